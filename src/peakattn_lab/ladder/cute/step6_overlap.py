"""Step 6: a consumer's softmax runs under its own product.

S_next = Q K_next^T and O += P V are issued together, as in step 5.  Their results come in this order, so the softmax starts
as soon as the scores are there, while the tensor cores still work on the output.  Nobody takes turns any more.
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

IDEA = "Overlap inside a warpgroup: the softmax of the next scores runs under P V of this tile; no turns."
PREDICTION = (
    "head_dim 128, 16k, full: about 650 TFLOP/s, 1.05 x, which is where FlashAttention-3 stands. Each consumer now hides half "
    "of its own products, whatever the other one does. P and the scores live at the same time: 32 more registers a thread."
)
WHY = (
    "1.02 to 1.07 x: with the softmax under its own second product a consumer no longer needs the other to be "
    "elsewhere. Least at 1k, where a row block has eight tiles and the first and the last overlap nothing."
)
PUBLISHED: dict[str, str] = {}
VISITS = "visible"

default_config = host.several_warpgroups
search_space = host.only(default_config)

_OWN = 1  # named barriers: one a consumer for its own threads


@dataclass(frozen=True)
class Forward:
    """The device code of one problem class; calling it under ``cute.compile`` makes the machine code."""

    dtype: torch.dtype
    dim: int
    block_n: int
    causal: bool
    occupancy: int
    num_consumers: int
    num_stages: int
    registers: tuple[int, int]  # of a producer thread, of a consumer thread

    @cute.jit
    def __call__(self, q, k, v, out, *args):
        kind = CUTE_DTYPES[self.dtype]
        rows = parts.tiles(kind, ROWS, self.dim, self.num_consumers)
        keys = parts.tiles(kind, self.block_n, self.dim, self.num_stages)
        tma_q, mQ = parts.tma_load(q, rows)
        tma_k, mK = parts.tma_load(k, keys)
        tma_v, mV = parts.tma_load(v, keys)
        tma_out, mO = parts.tma_store(out, rows)
        self.attention_fwd_kernel(tma_q, mQ, tma_k, mK, tma_v, mV, tma_out, mO, *args, rows, keys).launch(
            grid=[1, 1, 1],
            block=[128 * (self.num_consumers + 1), 1, 1],
            min_blocks_per_mp=self.occupancy,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def attention_fwd_kernel(
        self, tma_q, mQ, tma_k, mK, tma_v, mV, tma_out, mO, lse, seqlen_q, seqlen_k, num_heads_q, group,
        num_m_blocks, total_heads, heads_per_section, offset, softmax_scale, softcap, rows_layout, keys_layout,
    ):  # fmt: skip
        kind = CUTE_DTYPES[self.dtype]
        memory = SmemAllocator()
        sQ, sK, sV = (parts.allocate(memory, kind, x) for x in (rows_layout, keys_layout, keys_layout))
        barriers = memory.allocate_array(Int64, 1 + 4 * self.num_stages, byte_alignment=8)
        q_full = barriers
        k_full, k_empty, v_full, v_empty = (barriers + 1 + i * self.num_stages for i in range(4))
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(q_full, self.num_consumers)
                for i in cutlass.range_constexpr(self.num_stages):
                    cute.arch.mbarrier_init(k_full + i, 1)
                    cute.arch.mbarrier_init(v_full + i, 1)
                    cute.arch.mbarrier_init(k_empty + i, 4 * self.num_consumers)  # a warp arrives once
                    cute.arch.mbarrier_init(v_empty + i, 4 * self.num_consumers)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        m_block, head, batch = parts.place(num_heads_q, num_m_blocks, total_heads, heads_per_section, self.causal)
        last = parts.keys_seen((m_block + 1) * ROWS * self.num_consumers - 1, seqlen_k, offset, self.causal)
        n_blocks = (last + self.block_n - 1) // self.block_n
        at = SimpleNamespace(
            sQ=sQ, sK=sK, sV=sV, q_full=q_full, k_full=k_full, k_empty=k_empty, v_full=v_full, v_empty=v_empty,
            m_block=m_block, head=head, batch=batch, n_blocks=n_blocks, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
            num_heads_q=num_heads_q, offset=offset, qk_scale=softmax_scale * LOG2_E, lane=cute.arch.lane_idx(),
        )  # fmt: skip
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp_index == 0:
                queries = parts.head_tiles(tma_q, mQ, sQ, head, batch)
                keys = parts.head_tiles(tma_k, mK, sK, head // group, batch)
                values = parts.head_tiles(tma_v, mV, sV, head // group, batch)
                self.produce(at, (tma_q, tma_k, tma_v), (queries, keys, values))
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            self.consume(at, tma_out, mO, lse, cute.arch.make_warp_uniform(warp_index // 4 - 1), warp_index % 4)

    @cute.jit
    def produce(self, at, atoms, tensors):
        """Q once, then K and V tile after tile, each into a slot that all consumers have left."""
        tma_q, tma_k, tma_v = atoms
        queries, keys, values = tensors
        for c in cutlass.range_constexpr(self.num_consumers):
            parts.fetch(tma_q, queries, at.m_block * self.num_consumers + c, c, at.q_full)
        stage, phase = Int32(0), Int32(1)  # a wait for the phase before the first returns at once
        for i in cutlass.range(at.n_blocks, unroll=1):
            n_block = at.n_blocks - 1 - i
            cute.arch.mbarrier_wait(at.k_empty + stage, phase)
            parts.fetch(tma_k, keys, n_block, stage, at.k_full + stage)
            cute.arch.mbarrier_wait(at.v_empty + stage, phase)
            parts.fetch(tma_v, values, n_block, stage, at.v_full + stage)
            stage, phase = parts.advance(stage, phase, self.num_stages)

    @cute.jit
    def consume(self, at, tma_out, mO, lse, consumer, warp_in_group):
        kind = CUTE_DTYPES[self.dtype]
        thread = cute.arch.thread_idx()[0] % 128
        mma_qk, mma_pv = parts.products(kind, self.block_n, self.dim, warpgroup.OperandSource.RMEM)
        qk, pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        sVt = parts.transposed(at.sV, self.block_n, self.dim, self.num_stages)
        tQ = mma_qk.make_fragment_A(qk.partition_A(at.sQ))[None, None, None, consumer]
        tK = mma_qk.make_fragment_B(qk.partition_B(at.sK))
        tV = mma_pv.make_fragment_B(pv.partition_B(sVt))
        scores = cute.make_rmem_tensor(mma_qk.partition_shape_C((ROWS, self.block_n)), Float32)
        acc = cute.make_rmem_tensor(mma_pv.partition_shape_C((ROWS, self.dim)), Float32)
        p = cute.make_rmem_tensor(mma_pv.partition_shape_A((ROWS, self.block_n)), kind)
        m_i, l_i, alpha = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
        m_i.fill(-Float32.inf)
        l_i.fill(0.0)
        acc.fill(0.0)
        m_offset = (at.m_block * self.num_consumers + consumer) * ROWS
        row = m_offset + warp_in_group * 16 + at.lane // 4  # of this thread, and another 8 rows below
        n_whole = parts.keys_seen(m_offset, at.seqlen_k, at.offset, self.causal) // self.block_n
        at = SimpleNamespace(
            **vars(at), mma_qk=mma_qk, mma_pv=mma_pv, tQ=tQ, tK=tK, tV=tV, scores=scores, acc=acc, p=p, m_i=m_i, l_i=l_i,
            alpha=alpha, row=row,
        )  # fmt: skip

        cute.arch.mbarrier_wait(at.q_full, 0)
        if at.n_blocks > 0:
            cute.arch.mbarrier_wait(at.k_full, 0)
            parts.gemm(mma_qk, scores, tQ, tK[None, None, None, 0], accumulate=False)
            warpgroup.wait_group(0)
            self.release(at, at.k_empty)
            self.mask(at, at.n_blocks - 1)
            self.softmax(at)
            parts.rounded(scores, p)
            k_stage, k_phase = parts.advance(Int32(0), Int32(0), self.num_stages)
            v_stage, v_phase = Int32(0), Int32(0)
            n_rest = at.n_blocks - 1
            n_whole = cutlass.min(n_whole, n_rest)
            for i in cutlass.range(n_rest - n_whole, unroll=1):
                self.step(at, n_rest - 1 - i, k_stage, k_phase, v_stage, v_phase, True)
                k_stage, k_phase = parts.advance(k_stage, k_phase, self.num_stages)
                v_stage, v_phase = parts.advance(v_stage, v_phase, self.num_stages)
            for i in cutlass.range(n_whole, unroll=1):
                self.step(at, n_whole - 1 - i, k_stage, k_phase, v_stage, v_phase, False)
                k_stage, k_phase = parts.advance(k_stage, k_phase, self.num_stages)
                v_stage, v_phase = parts.advance(v_stage, v_phase, self.num_stages)
            cute.arch.mbarrier_wait(at.v_full + v_stage, v_phase)
            parts.gemm(mma_pv, acc, p, tV[None, None, None, v_stage], accumulate=True)
            warpgroup.wait_group(0)
        self.finish(at, tma_out, mO, lse, consumer, warp_in_group, thread)

    @cute.jit
    def step(self, at, n_block, k_stage, k_phase, v_stage, v_phase, masked: cutlass.Constexpr):
        """The scores of tile ``n_block``, and the part of the output of the tile before it."""
        cute.arch.mbarrier_wait(at.k_full + k_stage, k_phase)
        parts.gemm(at.mma_qk, at.scores, at.tQ, at.tK[None, None, None, k_stage], accumulate=False)
        cute.arch.mbarrier_wait(at.v_full + v_stage, v_phase)
        parts.gemm(at.mma_pv, at.acc, at.p, at.tV[None, None, None, v_stage], accumulate=True)
        warpgroup.wait_group(1)  # the scores are there
        self.release(at, at.k_empty + k_stage)
        if const_expr(masked):
            self.mask(at, n_block)
        self.softmax(at)
        # The compiler would wait for O first, and have the exponentials after. It moves none across a loop; this ends at once.
        cute.arch.mbarrier_wait(at.q_full, 0)
        warpgroup.wait_group(0)
        self.release(at, at.v_empty + v_stage)
        parts.rounded(at.scores, at.p)
        self.rescale(at)

    @cute.jit
    def release(self, at, empty):
        """This warp has read a slot."""
        if at.lane == 0:
            cute.arch.mbarrier_arrive(empty)

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

    @cute.jit
    def finish(self, at, tma_out, mO, lse, consumer, warp_in_group, thread):
        """Output and lse of this consumer's rows; output takes the place of its Q."""
        for r in cutlass.range_constexpr(2):
            total = parts.quad(at.l_i[r], lambda a, b: a + b)
            at.alpha[r] = 0.0 if total == 0.0 else cute.arch.rcp_approx(total)
            place = (at.row + 8 * r, at.lane, at.head, at.batch, at.num_heads_q, at.seqlen_q)
            parts.store_lse(lse, at.m_i[r], total, at.qk_scale, *place)
        self.rescale(at)
        rO = cute.make_rmem_tensor(at.acc.layout, CUTE_DTYPES[self.dtype])
        parts.rounded(at.acc, rO)
        own = _OWN + consumer
        cute.arch.barrier(barrier_id=own, number_of_threads=128)
        parts.to_shared(at.mma_pv, rO, at.sQ[None, None, consumer], thread)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=own, number_of_threads=128)
        if warp_in_group == 0:
            target, source = parts.head_tiles(tma_out, mO, at.sQ, at.head, at.batch)
            cute.copy(tma_out, source[None, consumer], target[None, at.m_block * self.num_consumers + consumer])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)


Forward.attention_fwd_kernel.set_name_prefix("attention_fwd_kernel", remove_cutlass_symbol=True, keep_mangled_name=False)


def device_code() -> Any:
    return Forward


def launches(
    problem: AttentionProblem, config: Config, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor | None, softmax_scale: float, softcap: float,
) -> list[CuteLaunch]:  # fmt: skip
    return host.specialized(device_code, problem, config, (q, k, v, out, lse), softmax_scale)


launch, prepare = host.entry_points(launches)
