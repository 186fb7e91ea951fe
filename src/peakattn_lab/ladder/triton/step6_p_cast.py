"""Step 6: where P is rounded, in three orders.

``sum_then_cast`` sums the float32 weights and rounds them for the product; ``cast_then_sum`` sums what is multiplied;
``no_cast`` keeps float32 and multiplies in TF32, at half the rate and with V converted on the way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from peakattn.backends.triton.toolchain import KernelLaunch
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab.ladder.triton import host
from peakattn_lab.ladder.triton.host import reject

__all__ = ["launch", "prepare", "reject"]

IDEA = "The cast of P as a knob: after the sum, before it, or not at all."
PREDICTION = (
    "Sum then cast stays fastest: the layout of P is that of the operand, so the cast is one F2FP for two weights. Cast "
    "then sum costs a conversion back. No cast is far slower: TF32 runs at half the rate, and V must be converted."
)
WHY = (
    "Predicted that the order of step 5 stays fastest. In the ladder it alone is timed, 0.99 to 1.02 x step 5: the loop "
    "is that of step 5, 364 instructions. In the experiment, 128 x 32 causal 4k, cast first has 0.85 (head_dim 64) and "
    "0.87 x (128) of sum first, no cast 0.61 and 0.28 x: 296 and 340 instructions for 262, and with no cast V goes "
    "through shared memory again and one block fits on an SM, not two."
)
PUBLISHED: dict[str, str] = {
    "cast then sum": "a little slower, no more accurate",
    "no cast": "0.70 x, 44.6 TFLOP/s causal for 63.7",
}
VISITS = "visible"
TUNED = True

ORDERS = ("sum_then_cast", "cast_then_sum", "no_cast")


@dataclass(frozen=True)
class Config(host.Config):
    p_cast: str = "sum_then_cast"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.p_cast not in ORDERS:
            raise ValueError(f"p_cast is {self.p_cast!r}; allowed are {', '.join(ORDERS)}.")


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
    PRECISION: tl.constexpr, P_CAST: tl.constexpr,
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
            v_tile = tl.load(v + keys[:, None] * stride_vs + dims[None, :], mask=inside, other=0.0)
            if P_CAST == "cast_then_sum":
                p = p.to(v_tile.dtype).to(tl.float32)
            l_i = l_i * alpha + tl.sum(p, 1)
            acc = acc * alpha[:, None]
            if P_CAST == "no_cast":
                acc = tl.dot(p, v_tile.to(tl.float32), acc, input_precision="tf32")
            else:
                acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
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
    return host.launch_of(attention_fwd_kernel, problem, config, args, {"P_CAST": config.p_cast})


launch, prepare = host.entry_points(launches)
