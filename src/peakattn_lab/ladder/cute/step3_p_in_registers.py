"""Step 3: P goes into the second product from registers.

The accumulator of S = Q K^T holds, thread by thread, the very elements that wgmma takes as its left operand: P is rounded
in place, and neither stored, nor fenced, nor waited for.  The rest is as in step 2: one warpgroup, 64 query rows, one tile
of K and one of V.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from peakattn.backends.cute.toolchain import CuteLaunch
from peakattn.problem import AttentionProblem
from peakattn_lab.ladder.cute import host, parts
from peakattn_lab.ladder.cute.host import Config, reject
from peakattn_lab.ladder.cute.parts import CUTE_DTYPES, LOG2_E, ROWS, exp2, row_of

__all__ = ["Config", "launch", "prepare", "reject"]

IDEA = "P stays in registers: the accumulator of the first product is the operand of the second."
PREDICTION = (
    "head_dim 128, 16k, full: about 480 TFLOP/s, 1.10 to 1.15 x. Gone are a fence, a wait of all warps, and 32 KB a tile "
    "through shared memory, written and read: 250 of 2000 clocks. The second product reads 64 bytes of it a clock now, where "
    "it read 96."
)
WHY = (
    "1.09 to 1.14 x with a full mask, as predicted, and 1.05 x with a causal one, whose masked tiles and short row "
    "blocks spend their time elsewhere."
)
PUBLISHED: dict[str, str] = {}
VISITS = "visible"

default_config = host.one_warpgroup
search_space = host.only(default_config)


@dataclass(frozen=True)
class Forward:
    """The device code of one problem class; calling it under ``cute.compile`` makes the machine code."""

    dtype: torch.dtype
    dim: int
    block_n: int
    causal: bool
    occupancy: int

    @cute.jit
    def __call__(self, q, k, v, out, *args):
        kind = CUTE_DTYPES[self.dtype]
        rows, keys = parts.tiles(kind, ROWS, self.dim, 1), parts.tiles(kind, self.block_n, self.dim, 1)
        tma_q, mQ = parts.tma_load(q, rows)
        tma_k, mK = parts.tma_load(k, keys)
        tma_v, mV = parts.tma_load(v, keys)
        tma_out, mO = parts.tma_store(out, rows)
        self.attention_fwd_kernel(
            tma_q, mQ, tma_k, mK, tma_v, mV, tma_out, mO, *args, rows, keys
        ).launch(
            grid=[1, 1, 1], block=[128, 1, 1], min_blocks_per_mp=self.occupancy, preferred_smem_carveout=100
        )  # fmt: skip

    @cute.kernel
    def attention_fwd_kernel(
        self, tma_q, mQ, tma_k, mK, tma_v, mV, tma_out, mO, lse, seqlen_q, seqlen_k, num_heads_q, group,
        num_m_blocks, total_heads, heads_per_section, offset, softmax_scale, softcap, rows_layout, keys_layout,
    ):  # fmt: skip
        kind = CUTE_DTYPES[self.dtype]
        memory = SmemAllocator()
        sQ, sK, sV = (parts.allocate(memory, kind, x) for x in (rows_layout, keys_layout, keys_layout))
        barriers = memory.allocate_array(Int64, 3, byte_alignment=8)
        q_full, k_full, v_full = barriers, barriers + 1, barriers + 2
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(3):
                    cute.arch.mbarrier_init(barriers + i, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        m_block, head, batch = parts.place(num_heads_q, num_m_blocks, total_heads, heads_per_section, self.causal)
        m_offset = m_block * ROWS
        last = parts.keys_seen(m_offset + ROWS - 1, seqlen_k, offset, self.causal)
        n_blocks = (last + self.block_n - 1) // self.block_n
        n_whole = parts.keys_seen(m_offset, seqlen_k, offset, self.causal) // self.block_n
        queries = parts.head_tiles(tma_q, mQ, sQ, head, batch)
        keys = parts.head_tiles(tma_k, mK, sK, head // group, batch)
        values = parts.head_tiles(tma_v, mV, sV, head // group, batch)
        if warp_index == 0:
            parts.fetch(tma_q, queries, m_block, 0, q_full)
            if n_blocks > 0:
                parts.fetch(tma_k, keys, n_blocks - 1, 0, k_full)
                parts.fetch(tma_v, values, n_blocks - 1, 0, v_full)

        mma_qk, mma_pv = parts.products(kind, self.block_n, self.dim, warpgroup.OperandSource.RMEM)
        qk, pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        tQ = mma_qk.make_fragment_A(qk.partition_A(sQ))[None, None, None, 0]
        tK = mma_qk.make_fragment_B(qk.partition_B(sK))[None, None, None, 0]
        tV = mma_pv.make_fragment_B(pv.partition_B(parts.transposed(sV, self.block_n, self.dim, 1)))[None, None, None, 0]
        scores = cute.make_rmem_tensor(mma_qk.partition_shape_C((ROWS, self.block_n)), Float32)
        acc = cute.make_rmem_tensor(mma_pv.partition_shape_C((ROWS, self.dim)), Float32)
        p = cute.make_rmem_tensor(mma_pv.partition_shape_A((ROWS, self.block_n)), kind)
        m_i, l_i, alpha = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
        m_i.fill(-Float32.inf)
        l_i.fill(0.0)
        acc.fill(0.0)
        row = m_offset + warp_index * 16 + lane // 4  # of this thread, and another 8 rows below
        at = SimpleNamespace(
            mma_qk=mma_qk, mma_pv=mma_pv, tQ=tQ, tK=tK, tV=tV, scores=scores, acc=acc, p=p, m_i=m_i, l_i=l_i,
            alpha=alpha, tma_k=tma_k, tma_v=tma_v, keys=keys, values=values, k_full=k_full, v_full=v_full,
            lane=lane, warp_index=warp_index, row=row, seqlen_k=seqlen_k, offset=offset, qk_scale=softmax_scale * LOG2_E,
        )  # fmt: skip

        cute.arch.mbarrier_wait(q_full, 0)
        phase = Int32(0)
        for i in cutlass.range(n_blocks - n_whole, unroll=1):
            self.step(at, n_blocks - 1 - i, phase, True)
            phase ^= 1
        for i in cutlass.range(n_whole, unroll=1):
            self.step(at, n_whole - 1 - i, phase, False)
            phase ^= 1

        for r in cutlass.range_constexpr(2):
            total = parts.quad(l_i[r], lambda a, b: a + b)
            alpha[r] = 0.0 if total == 0.0 else cute.arch.rcp_approx(total)
            parts.store_lse(lse, m_i[r], total, at.qk_scale, row + 8 * r, lane, head, batch, num_heads_q, seqlen_q)
        self.rescale(at)
        # Output takes the place of Q.
        rO = cute.make_rmem_tensor(acc.layout, kind)
        parts.rounded(acc, rO)
        cute.arch.sync_threads()
        parts.to_shared(mma_pv, rO, sQ[None, None, 0], thread)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        if warp_index == 0:
            target, source = parts.head_tiles(tma_out, mO, sQ, head, batch)
            cute.copy(tma_out, source[None, 0], target[None, m_block])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def step(self, at, n_block, phase, masked: cutlass.Constexpr):
        """One tile of keys, and the copies of the next."""
        cute.arch.mbarrier_wait(at.k_full, phase)
        parts.gemm(at.mma_qk, at.scores, at.tQ, at.tK, accumulate=False)
        warpgroup.wait_group(0)
        cute.arch.sync_threads()  # all warps have read K
        if at.warp_index == 0 and n_block > 0:
            parts.fetch(at.tma_k, at.keys, n_block - 1, 0, at.k_full)
        if const_expr(masked):
            self.mask(at, n_block)
        self.softmax(at)
        self.rescale(at)
        parts.rounded(at.scores, at.p)
        cute.arch.mbarrier_wait(at.v_full, phase)
        parts.gemm(at.mma_pv, at.acc, at.p, at.tV, accumulate=True)
        warpgroup.wait_group(0)
        cute.arch.sync_threads()  # all warps have read V
        if at.warp_index == 0 and n_block > 0:
            parts.fetch(at.tma_v, at.values, n_block - 1, 0, at.v_full)

    @cute.jit
    def mask(self, at, n_block):
        """Scores of keys that a row does not see become -inf."""
        column = n_block * self.block_n + 2 * (at.lane % 4)
        for r in cutlass.range_constexpr(2):
            scores = row_of(at.scores, r)
            end = parts.keys_seen(at.row + 8 * r, at.seqlen_k, at.offset, self.causal) - column
            for i in cutlass.range_constexpr(cute.size(scores)):
                visible = i % 2 + 8 * (i // 2) < end
                scores[i % 2, i // 2] = scores[i % 2, i // 2] if visible else -Float32.inf

    @cute.jit
    def softmax(self, at):
        """The online softmax: new maximum, weights, sums, and alpha, by which older output shrinks."""
        for r in cutlass.range_constexpr(2):
            row = row_of(at.scores, r)
            best = [at.m_i[r], row[0, 0], row[1, 0], row[0, 1]]  # four chains, since each step waits for the one before
            for i in cutlass.range_constexpr(3, cute.size(row)):
                best[i % 4] = cute.arch.fmax(best[i % 4], row[i % 2, i // 2])
            m_new = cute.arch.fmax(cute.arch.fmax(best[0], best[1]), cute.arch.fmax(best[2], best[3]))
            m_new = parts.quad(m_new, cute.arch.fmax)
            origin = m_new if m_new > -Float32.inf else Float32(0.0)  # no key seen yet: -inf - -inf would be NaN
            at.alpha[r] = exp2((at.m_i[r] - origin) * at.qk_scale)
            at.m_i[r] = m_new
            sums = [Float32(0.0), Float32(0.0)]
            for i in cutlass.range_constexpr(cute.size(row)):
                weight = exp2(row[i % 2, i // 2] * at.qk_scale - origin * at.qk_scale)
                row[i % 2, i // 2] = weight
                sums[i % 2] = sums[i % 2] + weight
            at.l_i[r] = at.l_i[r] * at.alpha[r] + (sums[0] + sums[1])

    @cute.jit
    def rescale(self, at):
        for r in cutlass.range_constexpr(2):
            row = row_of(at.acc, r)
            for i in cutlass.range_constexpr(cute.size(row)):
                row[i % 2, i // 2] = row[i % 2, i // 2] * at.alpha[r]


Forward.attention_fwd_kernel.set_name_prefix("attention_fwd_kernel", remove_cutlass_symbol=True, keep_mangled_name=False)


def device_code() -> Any:
    return Forward


def launches(
    problem: AttentionProblem, config: Config, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor | None, softmax_scale: float, softcap: float,
) -> list[CuteLaunch]:  # fmt: skip
    return host.one_warpgroup_launch(device_code, problem, config, (q, k, v, out, lse), softmax_scale)


launch, prepare = host.entry_points(launches)
