"""Step 8: one loop without a mask, one with it.

Keys that every row of the block sees need no mask, and a row that has seen one needs no care for a maximum of -inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import cuda.tile as ct
import torch

from peakattn.backends.cutile.toolchain import TileLaunch
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab.ladder.cutile import host
from peakattn_lab.ladder.cutile.host import Config, reject

__all__ = ["Config", "launch", "prepare", "reject"]

IDEA = "The loop over keys in two: tiles that every row sees whole, without mask code, and those on the diagonal."
PREDICTION = (
    "Full: nothing where the tile divides the keys. Causal: 1.1 to 1.3 x at 16k, for three instructions fewer for "
    "each score on all tiles but the diagonal's, less at 1k where most tiles are on it. The article calls it its "
    "biggest step."
)
WHY = "1.04 x full and 1.08 to 1.14 x causal: the loop without a mask has 7,052 instructions for 8,289, and spills as much."
PUBLISHED: dict[str, str] = {
    "B200 causal fp16, 1k / 2k / 4k / 8k / 16k": "373 / 552 / 684 / 770 / 813 TFLOP/s, 1.16 to 1.32 x",
}
VISITS = "visible"


def default_config(problem: AttentionProblem, device: Device) -> Config:
    return Config(256, 128, occupancy=1)


def search_space(problem: AttentionProblem, device: Device) -> Iterable[Config]:
    yield default_config(problem, device)


@ct.kernel
def attention_fwd_kernel(
    q, k, v, out, lse, softmax_scale, offset, GROUP, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, EVEN_N, STORE_LSE
):  # fmt: skip
    seqlen_k = k.shape[2]
    num_m_blocks = ct.cdiv(q.shape[2], BLOCK_M)
    m_block = ct.bid(0) % num_m_blocks
    head = ct.bid(0) // num_m_blocks
    batch = head // q.shape[1]
    head_q = head % q.shape[1]
    head_kv = head_q // GROUP

    rows = m_block * BLOCK_M + offset + ct.arange(BLOCK_M, dtype=ct.int32)[:, None]
    columns = ct.arange(BLOCK_N, dtype=ct.int32)[None, :]
    qk_scale = softmax_scale * 1.4426950408889634
    m_i = ct.full((BLOCK_M, 1), -math.inf, dtype=ct.float32)
    l_i = ct.zeros((BLOCK_M, 1), dtype=ct.float32)
    acc = ct.zeros((BLOCK_M, BLOCK_D), dtype=ct.float32)
    q_tile = ct.load(
        q, index=(batch, head_q, m_block, 0), shape=(1, 1, BLOCK_M, BLOCK_D), padding_mode=ct.PaddingMode.ZERO
    ).reshape((BLOCK_M, BLOCK_D))
    end = ct.cdiv(seqlen_k, BLOCK_N)
    if CAUSAL:
        end = ct.minimum(end, ct.cdiv(ct.maximum((m_block + 1) * BLOCK_M + offset, 0), BLOCK_N))
    full = seqlen_k // BLOCK_N
    if CAUSAL:
        full = ct.minimum(full, ct.maximum(m_block * BLOCK_M + offset + 1, 0) // BLOCK_N)
    for MASKED in ct.static_iter((False, True)):
        if not MASKED or CAUSAL or not EVEN_N:
            for n_block in range(ct.static_eval(full if MASKED else 0), ct.static_eval(end if MASKED else full)):
                k_tile = ct.load(
                    k, index=(batch, head_kv, 0, n_block), shape=(1, 1, BLOCK_D, BLOCK_N), order=(0, 1, 3, 2),
                    padding_mode=ct.PaddingMode.ZERO, latency=2,
                ).reshape((BLOCK_D, BLOCK_N))  # fmt: skip
                s = ct.mma(q_tile, k_tile, ct.zeros((BLOCK_M, BLOCK_N), dtype=ct.float32))
                if MASKED:
                    keys = n_block * BLOCK_N + columns
                    visible = keys < seqlen_k
                    if CAUSAL:
                        visible = visible & (keys <= rows)
                    s = ct.where(visible, s, -math.inf)
                m_new = ct.maximum(m_i, ct.max(s, 1, keepdims=True) * qk_scale)
                origin = m_new
                if MASKED:
                    origin = ct.where(m_new == -math.inf, 0.0, m_new)  # no key seen yet: -inf - -inf would be NaN
                p = ct.exp2(s * qk_scale - origin, flush_to_zero=True)
                alpha = ct.exp2(m_i - origin, flush_to_zero=True)
                l_i = l_i * alpha + ct.sum(p, 1, keepdims=True)
                v_tile = ct.load(
                    v,
                    index=(batch, head_kv, n_block, 0),
                    shape=(1, 1, BLOCK_N, BLOCK_D),
                    padding_mode=ct.PaddingMode.ZERO,
                    latency=4,
                ).reshape((BLOCK_N, BLOCK_D))
                acc = ct.mma(p.astype(v.dtype), v_tile, acc * alpha)
                m_i = m_new

    total = ct.where(l_i == 0.0, 1.0, l_i)  # a row that sees no key has acc 0
    acc = ct.truediv(acc, total, flush_to_zero=True, rounding_mode=ct.RoundingMode.APPROX)
    ct.store(out, index=(batch, head_q, m_block, 0), tile=acc.astype(out.dtype).reshape((1, 1, BLOCK_M, BLOCK_D)))
    if STORE_LSE:
        ct.store(lse, index=(batch, head_q, m_block), tile=((m_i + ct.log2(l_i)) * 0.6931471805599453).reshape((1, 1, BLOCK_M)))


def _device_code() -> Any:
    from peakattn_lab.ladder.cutile.step8_loop_split import attention_fwd_kernel

    return attention_fwd_kernel


def launches(
    problem: AttentionProblem, config: Config, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor | None, softmax_scale: float, softcap: float,
) -> list[TileLaunch]:  # fmt: skip
    return host.launch_of(_device_code, problem, config, q, k, v, out, lse, softmax_scale)


launch, prepare = host.entry_points(launches)
