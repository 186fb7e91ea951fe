"""Step 5: scores in base 2, their scale folded into the exponential.

The GPU has no natural exponential: exp(x) is ex2(x * log2(e)), with care for results below 2**-126. With the scale and
log2(e) in one constant a weight costs one FFMA and one MUFU.EX2, and the maximum is scaled once a row.
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

IDEA = "exp2 of (score * scale * log2(e) - maximum): one FFMA and one MUFU a weight."
PREDICTION = (
    "A few percent on the source's GPU, whose kernel waits for its tensor cores. More on Hopper: wgmma is faster against the "
    "other pipes, and without warp specialisation the softmax stands beside the products, not under them."
)
WHY = (
    "Predicted more than the few percent of the source, measured 1.10, 1.15 and 1.07 x full (1k, 4k, 16k) and 1.09 to "
    "1.14 x causal, for the source's 1.02 to 1.04. The loop falls from 528 to 364 instructions: float ones from 338 "
    "to 172, MUFU stays at 34."
)
PUBLISHED: dict[str, str] = {
    "full and causal": "1.02 to 1.04 x",
    "instructions": "264 M, before: 352 M",
}
VISITS = "visible"
TUNED = True


def default_config(problem: AttentionProblem, device: Device) -> Config:
    if host.small(device, problem):
        return Config(32, 16, num_warps=2, num_stages=2)
    return Config(128, 64, num_warps=8, num_stages=3)


def search_space(problem: AttentionProblem, device: Device) -> Iterable[Config]:
    yield default_config(problem, device)
    if not host.small(device, problem):
        yield Config(128, 64, num_warps=8, num_stages=2)
        yield Config(64, 64, num_warps=4, num_stages=3)
        yield Config(64, 32, num_warps=4, num_stages=3)
        if problem.head_dim <= 64:
            yield Config(128, 128, num_warps=8, num_stages=2)


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
            inside = real
            if MASKED:
                inside = (keys < seqlen_k)[:, None] & real
            k_tile = tl.load(k + keys[:, None] * stride_ks + dims[None, :], mask=inside, other=0.0)
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
            v_tile = tl.load(v + keys[:, None] * stride_vs + dims[None, :], mask=inside, other=0.0)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)
            m_i = m_new

    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]  # a row that sees no key has acc 0
    inside = (rows < seqlen_q)[:, None] & real
    tl.store(out + rows[:, None] * stride_os + dims[None, :], acc.to(out.dtype.element_ty), mask=inside)
    if lse is not None:
        tl.store(lse + head * seqlen_q + rows, (m_i + tl.log2(l_i)) * 0.6931471805599453, mask=rows < seqlen_q)


def launches(
    problem: AttentionProblem, config: Config, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor | None, softmax_scale: float, softcap: float,
) -> list[KernelLaunch]:  # fmt: skip
    args = host.arguments(problem, q, k, v, out, lse, softmax_scale)
    return host.launch_of(attention_fwd_kernel, problem, config, args)


launch, prepare = host.entry_points(launches)
