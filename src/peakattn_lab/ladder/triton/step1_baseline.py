"""Step 1: FlashAttention-2 as one would first write it in Triton, with 16 x 16 tiles.

A program owns ``BLOCK_M`` query rows of one head and runs over all keys, ``BLOCK_N`` at a time, with the running maximum
``m_i``, the running sum ``l_i`` and the unnormalised output ``acc`` in float32.
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

IDEA = "Online softmax over tiles, with 16 x 16 tiles and Triton's default of 4 warps and 3 stages."
PREDICTION = (
    "Slow: 4 warps share 16 rows, so they duplicate products, and exchange row maxima and sums through shared memory; "
    "every 16 rows read all of K and V from L2 again. On Hopper wgmma needs 64 rows, so these tiles get mma.sync."
)
WHY = (
    "Predicted slow, measured so: 64 TFLOP/s full at every length and 33 causal, 0.09 to 0.10 and 0.07 of the best rival. The "
    "code is as predicted: mma.sync, 1.50 x the operations needed and 3.00 x causal, and for the weights of a tile of 64 keys "
    "5.6 times the instructions of step 2, with 34 accesses to shared memory and 12 barriers or waits for every 16 keys. Which "
    "of these it waits for was not profiled."
)
PUBLISHED: dict[str, str] = {
    "full": "21.8 TFLOP/s",
    "tensor operations": "206 G, 1.5 x the 137.4 G needed",
    "L2 reads": "8.6 GB",
}
VISITS = "all"


def default_config(problem: AttentionProblem, device: Device) -> Config:
    return Config(16, 16, num_warps=4, num_stages=3)


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
