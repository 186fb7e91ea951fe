"""Step 2: the same kernel with tiles that give every warp rows of its own.

One mma.sync makes 16 rows and one wgmma 64: with a warp for every 16 rows nothing is computed twice, row maxima and sums
stay inside a warp, and P goes from one product into the next in registers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from peakattn.backends.triton.toolchain import KernelLaunch
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab.ladder.triton import host
from peakattn_lab.ladder.triton.host import Config, reject

__all__ = ["Config", "launch", "prepare", "reject"]

IDEA = "Larger tiles, and one warp for each 16 rows of them."
PREDICTION = (
    "The largest step of the ladder, three times or more: no duplicated products, no reductions across warps, L2 reads "
    "fall by block_m / 16. On Hopper 8 warps x 16 rows make two warpgroups, so wgmma replaces mma.sync."
)
WHY = (
    "Predicted three times or more, measured 4.09, 4.48 and 4.51 x full (1k, 4k, 16k), 3.73, 4.11 and 4.18 x causal: "
    "the largest step, as predicted. wgmma replaces mma.sync, nothing is multiplied twice, and accesses to shared "
    "memory in the loop fall from 34 to 3 for four times the keys. One block an SM: 128 KiB of shared memory, more "
    "than 170 registers for each of 256 threads."
)
PUBLISHED: dict[str, str] = {
    "full": "63.5 TFLOP/s",
    "tensor operations": "137.4 G of 137.4 G",
    "L2 reads": "2.16 GB",
    "tile": "64 x 32, 4 warps, 3 stages",
}
VISITS = "all"


def default_config(problem: AttentionProblem, device: Device) -> Config:
    if host.small(device, problem):
        return Config(32, 16, num_warps=2, num_stages=2)
    return Config(128, 64, num_warps=8, num_stages=3)


def search_space(problem: AttentionProblem, device: Device) -> Iterable[Config]:
    yield default_config(problem, device)


@triton.jit
def attention_fwd_kernel(
    q, k, v, out, lse, softmax_scale,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh, stride_ob, stride_os, stride_oh,
    seqlen_q, seqlen_k, num_heads_q, group, offset,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    num_m_blocks = tl.cdiv(seqlen_q, BLOCK_M)
    m_block = tl.program_id(0) % num_m_blocks
    head = (tl.program_id(0) // num_m_blocks).to(tl.int64)
    batch = head // num_heads_q
    head_q = head % num_heads_q
    head_kv = head_q // group
    rows = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    real = (dims < HEAD_DIM)[None, :]
    q += batch * stride_qb + head_q * stride_qh
    k += batch * stride_kb + head_kv * stride_kh
    v += batch * stride_vb + head_kv * stride_vh
    out += batch * stride_ob + head_q * stride_oh
    q_tile = tl.load(q + rows[:, None] * stride_qs + dims[None, :], mask=(rows < seqlen_q)[:, None] & real, other=0.0)

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n_offset in tl.range(0, seqlen_k, BLOCK_N):
        keys = n_offset + tl.arange(0, BLOCK_N)
        inside = (keys < seqlen_k)[:, None] & real
        k_tile = tl.load(k + keys[:, None] * stride_ks + dims[None, :], mask=inside, other=0.0)
        qk = tl.dot(q_tile, k_tile.T, input_precision=PRECISION) * softmax_scale
        visible = (keys < seqlen_k)[None, :]
        if CAUSAL:
            visible = visible & (keys[None, :] <= rows[:, None] + offset)
        qk = tl.where(visible, qk, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(qk, 1))
        origin = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key seen yet: -inf - -inf would be NaN
        p = tl.exp(qk - origin[:, None])
        alpha = tl.exp(m_i - origin)
        l_i = l_i * alpha + tl.sum(p, 1)
        v_tile = tl.load(v + keys[:, None] * stride_vs + dims[None, :], mask=inside, other=0.0)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)
        m_i = m_new

    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]  # a row that sees no key has acc 0
    inside = (rows < seqlen_q)[:, None] & real
    tl.store(out + rows[:, None] * stride_os + dims[None, :], acc.to(out.dtype.element_ty), mask=inside)
    if lse is not None:
        tl.store(lse + head * seqlen_q + rows, m_i + tl.log(l_i), mask=rows < seqlen_q)


def launches(
    problem: AttentionProblem, config: Config, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor | None, softmax_scale: float, softcap: float,
) -> list[KernelLaunch]:  # fmt: skip
    args = host.arguments(problem, q, k, v, out, lse, softmax_scale)
    return host.launch_of(attention_fwd_kernel, problem, config, args)


launch, prepare = host.entry_points(launches)
