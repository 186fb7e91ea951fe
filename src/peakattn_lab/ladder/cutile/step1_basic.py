"""Step 1: FlashAttention-2 as the cuTile guide first writes it, with 64 x 64 tiles.

A block owns ``BLOCK_M`` query rows of one head and runs over the keys that any of them sees, ``BLOCK_N`` at a time, with the
running maximum ``m_i``, the running sum ``l_i`` and the unnormalised output ``acc`` in float32.
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

IDEA = "Online softmax over tiles of 64 x 64; what threads, TMA and tensor cores do is the compiler's."
PREDICTION = (
    "head_dim 128, 16k, full: about 330 TFLOP/s, a third of the peak. wgmma and TMA come by themselves, but exp "
    "costs a multiplication more for each score, the mask is computed on every tile, and one block has nothing to "
    "run under its softmax but other blocks."
)
WHY = (
    "349 TFLOP/s at 16k. One block on an SM, at 255 registers: while its softmax runs (686 instructions a pass), the "
    "tensor cores have nothing to do."
)
PUBLISHED: dict[str, str] = {
    "DGX Spark 2k": "62.8 TFLOP/s",
}
VISITS = "visible"


def default_config(problem: AttentionProblem, device: Device) -> Config:
    return Config(64, 64)


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
    m_i = ct.full((BLOCK_M, 1), -math.inf, dtype=ct.float32)
    l_i = ct.zeros((BLOCK_M, 1), dtype=ct.float32)
    acc = ct.zeros((BLOCK_M, BLOCK_D), dtype=ct.float32)
    q_tile = ct.load(
        q, index=(batch, head_q, m_block, 0), shape=(1, 1, BLOCK_M, BLOCK_D), padding_mode=ct.PaddingMode.ZERO
    ).reshape((BLOCK_M, BLOCK_D))
    end = ct.cdiv(seqlen_k, BLOCK_N)
    if CAUSAL:
        end = ct.minimum(end, ct.cdiv(ct.maximum((m_block + 1) * BLOCK_M + offset, 0), BLOCK_N))
    for n_block in range(end):
        k_tile = ct.load(
            k, index=(batch, head_kv, n_block, 0), shape=(1, 1, BLOCK_N, BLOCK_D), padding_mode=ct.PaddingMode.ZERO
        ).reshape((BLOCK_N, BLOCK_D))
        s = ct.mma(q_tile, ct.permute(k_tile, (1, 0)), ct.zeros((BLOCK_M, BLOCK_N), dtype=ct.float32))
        s = s * softmax_scale
        if CAUSAL or not EVEN_N:
            keys = n_block * BLOCK_N + columns
            visible = keys < seqlen_k
            if CAUSAL:
                visible = visible & (keys <= rows)
            s = ct.where(visible, s, -math.inf)
        m_new = ct.maximum(m_i, ct.max(s, 1, keepdims=True))
        origin = ct.where(m_new == -math.inf, 0.0, m_new)  # no key seen yet: -inf - -inf would be NaN
        p = ct.exp(s - origin)
        alpha = ct.exp(m_i - origin)
        l_i = l_i * alpha + ct.sum(p, 1, keepdims=True)
        v_tile = ct.load(
            v, index=(batch, head_kv, n_block, 0), shape=(1, 1, BLOCK_N, BLOCK_D), padding_mode=ct.PaddingMode.ZERO
        ).reshape((BLOCK_N, BLOCK_D))
        acc = ct.mma(p.astype(v.dtype), v_tile, acc * alpha)
        m_i = m_new

    acc = acc / ct.where(l_i == 0.0, 1.0, l_i)  # a row that sees no key has acc 0
    ct.store(out, index=(batch, head_q, m_block, 0), tile=acc.astype(out.dtype).reshape((1, 1, BLOCK_M, BLOCK_D)))
    if STORE_LSE:
        ct.store(lse, index=(batch, head_q, m_block), tile=(m_i + ct.log(l_i)).reshape((1, 1, BLOCK_M)))


def _device_code() -> Any:
    from peakattn_lab.ladder.cutile.step1_basic import attention_fwd_kernel

    return attention_fwd_kernel


def launches(
    problem: AttentionProblem, config: Config, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor | None, softmax_scale: float, softcap: float,
) -> list[TileLaunch]:  # fmt: skip
    return host.launch_of(_device_code, problem, config, q, k, v, out, lse, softmax_scale)


launch, prepare = host.entry_points(launches)
