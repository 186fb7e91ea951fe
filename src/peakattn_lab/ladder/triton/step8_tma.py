"""Step 8: tiles come through TMA descriptors.

One thread asks for a tile, a copy engine computes its addresses, fills in zeros beyond the tensor, and writes shared
memory in the swizzle that wgmma reads. Pointers need a LDGSTS of 16 bytes and its address for every thread.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from peakattn.backends.triton.tile_ops import descriptor
from peakattn.backends.triton.toolchain import KernelLaunch
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab.ladder.triton import host
from peakattn_lab.ladder.triton.host import Config

__all__ = ["Config", "launch", "prepare"]

IDEA = "K, V and Q by TMA: one instruction a tile in place of one for every 16 bytes."
PREDICTION = (
    "Some percent: fewer instructions a tile and fewer registers for addresses; the loop is still bound by waiting, the "
    "softmax after its products, which TMA does not change."
)
WHY = (
    "Predicted some percent, measured 1.11, 1.08 and 1.10 x full (1k, 4k, 16k), 1.10, 1.08 and 1.04 x causal. The "
    "loop falls from 364 to 336 instructions: 16 copies become 2, and address arithmetic goes from 94 to 73. "
    "Registers do not fall with this tile when full (178 for 176), and do when causal (170 for 188)."
)
PUBLISHED: dict[str, str] = {}
VISITS = "visible"
TUNED = True


def reject(problem: AttentionProblem, device: Device) -> str | None:
    if problem.dtype.itemsize != 2:
        return f"its tiles are of 16-bit elements and the tensors are {problem.dtype}; earlier rungs take float32"
    if problem.seqlen_k == 0:
        return "TMA cannot describe a tensor without keys"
    if device.type == "cuda" and device.arch < 90:
        return f"TMA came with compute capability 9.0 and {device.name} has {device.arch / 10}; earlier rungs run there"
    return host.reject(problem, device)


def default_config(problem: AttentionProblem, device: Device) -> Config:
    if host.small(device, problem):
        return Config(32, 16, num_warps=2, num_stages=2)
    return Config(128, 64, num_warps=8, num_stages=3)


def search_space(problem: AttentionProblem, device: Device) -> Iterable[Config]:
    yield default_config(problem, device)
    if not host.small(device, problem):
        for block_n, num_stages in ((128, 2), (128, 3), (64, 4), (64, 2)):
            if (num_stages * block_n * 2 + 128) * problem.head_dim * 2 <= device.smem_per_block:
                yield Config(128, block_n, num_warps=8, num_stages=num_stages)
        yield Config(64, 128, num_warps=4, num_stages=2)
        yield Config(64, 64, num_warps=4, num_stages=3)


@triton.jit
def attention_fwd_kernel(
    q, k, v, out, lse, softmax_scale, stride_ob, stride_os, stride_oh,
    seqlen_q, seqlen_k, num_heads_q, group, offset,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    num_m_blocks = tl.cdiv(seqlen_q, BLOCK_M)
    m_block = tl.program_id(0) % num_m_blocks
    head = tl.program_id(0) // num_m_blocks
    batch = head // num_heads_q
    head_q = head % num_heads_q
    head_kv = head_q // group
    rows = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    real = (dims < HEAD_DIM)[None, :]
    out += batch.to(tl.int64) * stride_ob + head_q * stride_oh
    q_tile = q.load([batch, m_block * BLOCK_M, head_q, 0]).reshape([BLOCK_M, BLOCK_D])

    qk_scale = softmax_scale * 1.4426950408889634
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first_row = m_block * BLOCK_M + offset
    full_end = seqlen_k // BLOCK_N * BLOCK_N
    end = seqlen_k
    if CAUSAL:
        full_end = tl.minimum(full_end, tl.maximum(first_row + 1, 0) // BLOCK_N * BLOCK_N)
        end = tl.minimum(end, tl.maximum(first_row + BLOCK_M, 0))
    for MASKED in tl.static_range(2):
        for n_offset in tl.range(full_end if MASKED else 0, end if MASKED else full_end, BLOCK_N):
            keys = n_offset + tl.arange(0, BLOCK_N)
            k_tile = k.load([batch, n_offset, head_kv, 0]).reshape([BLOCK_N, BLOCK_D])
            qk = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)
            if MASKED:
                visible = (keys < seqlen_k)[None, :]
                if CAUSAL:
                    visible = visible & (keys[None, :] <= rows[:, None] + offset)
                qk = tl.where(visible, qk, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(qk, 1) * qk_scale)
            origin = m_new
            if MASKED:
                origin = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key seen yet: -inf - -inf would be NaN
            p = tl.exp2(qk * qk_scale - origin[:, None])
            alpha = tl.exp2(m_i - origin)
            l_i = l_i * alpha + tl.sum(p, 1)
            v_tile = v.load([batch, n_offset, head_kv, 0]).reshape([BLOCK_N, BLOCK_D])
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)
            m_i = m_new

    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]  # a row that sees no key has acc 0
    inside = (rows < seqlen_q)[:, None] & real
    tl.store(out + rows[:, None] * stride_os + dims[None, :], acc.to(out.dtype.element_ty), mask=inside)
    if lse is not None:
        tl.store(lse + head.to(tl.int64) * seqlen_q + rows, (m_i + tl.log2(l_i)) * 0.6931471805599453, mask=rows < seqlen_q)


def launches(
    problem: AttentionProblem, config: Config, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor | None, softmax_scale: float, softcap: float,
) -> list[KernelLaunch]:  # fmt: skip
    args = host.arguments(problem, q, k, v, out, lse, softmax_scale)
    for name, x, block in (("q", q, config.block_m), ("k", k, config.block_n), ("v", v, config.block_n)):
        args[name] = descriptor(True, x, block)
    return host.launch_of(attention_fwd_kernel, problem, config, args)


launch, prepare = host.entry_points(launches)
