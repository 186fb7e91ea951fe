"""Step 13: a block has two tiles of rows, which share K and V and nothing else.

The sums of each are values of their own, and both products of a key block stand before both softmaxes. Whatever one tile
has in common with the other keeps the compiler from giving each a warpgroup: even the numbers of the masked keys.
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

IDEA = "Two row tiles a block, each with its own maximum, sum and output: the compiler gives each a warpgroup and buffers."
PREDICTION = (
    "1.02 to 1.05 x of step 10 at head_dim 128, 16k: K and V are read once for 128 rows, and without spills, which no tile "
    "of 128 rows had. At 1k less: with one block an SM nothing covers the first load and the last store."
)
WHY = (
    "Over step 10: 0.98 to 1.06 x full, the more the longer, and 0.95 to 1.02 x causal. Both warpgroups wait for the same "
    "tile of K and so multiply, and idle, together: by ncu tensor cores are busy 69 % of the time at full 4k, 73 % in step "
    "10. With a mask 256 keys spill 91 times a tile, and two blocks with both tiles in one warpgroup are better."
)
PUBLISHED: dict[str, str] = {}
VISITS = "visible"
TUNED = True


def default_config(problem: AttentionProblem, device: Device) -> Config:
    return Config(128, 256 if problem.head_dim <= 128 else 128, occupancy=1)


def search_space(problem: AttentionProblem, device: Device) -> Iterable[Config]:
    yield default_config(problem, device)
    for block_n, occupancy in ((128, 1), (64, 1), (64, 2), (32, 2)):
        yield Config(128, block_n, occupancy)


@ct.kernel
def attention_fwd_kernel(
    q, k, v, out, lse, softmax_scale, offset, GROUP, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, EVEN_N, STORE_LSE
):  # fmt: skip
    seqlen_k = k.shape[2]
    num_m_blocks = ct.cdiv(q.shape[2], BLOCK_M)
    m_block = ct.bid(0) % num_m_blocks
    if CAUSAL:
        m_block = num_m_blocks - 1 - m_block
    head = ct.bid(0) // num_m_blocks
    batch = head // q.shape[1]
    head_q = head % q.shape[1]
    head_kv = head_q // GROUP

    HALF = ct.static_eval(BLOCK_M // 2)
    columns = ct.arange(BLOCK_N, dtype=ct.int32)[None, :]
    qk_scale = softmax_scale * 1.4426950408889634
    NONE = ct.static_eval(())
    places, q_tiles, m_i, l_i, acc = NONE, NONE, NONE, NONE, NONE
    for TILE in ct.static_iter(range(2)):
        place = ct.minimum(2 * m_block + TILE, ct.cdiv(q.shape[2], HALF) - 1)  # one beyond the end is the last one again
        places += (place,)
        q_tiles += (ct.load(
            q, index=(batch, head_q, place, 0), shape=(1, 1, HALF, BLOCK_D), padding_mode=ct.PaddingMode.ZERO
        ).reshape((HALF, BLOCK_D)),)  # fmt: skip
        m_i += (ct.full((HALF, 1), -math.inf, dtype=ct.float32),)
        l_i += (ct.zeros((HALF, 1), dtype=ct.float32),)
        acc += (ct.zeros((HALF, BLOCK_D), dtype=ct.float32),)
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
                start = ct.zeros((HALF, BLOCK_N), dtype=ct.float32)
                scores = (ct.mma(q_tiles[0], k_tile, start), ct.mma(q_tiles[1], k_tile, start))
                m_old, l_old, acc_old = m_i, l_i, acc
                m_i, l_i, acc = NONE, NONE, NONE
                for TILE in ct.static_iter(range(2)):
                    s = scores[TILE]
                    m_before = m_old[TILE]
                    if MASKED:  # keys counted from the block's first, or the tiles would share their numbers
                        row = places[TILE] * HALF + offset - n_block * BLOCK_N + ct.arange(HALF, dtype=ct.int32)[:, None]
                        last = ct.minimum(row if CAUSAL else row + seqlen_k + q.shape[2], seqlen_k - 1 - n_block * BLOCK_N)
                        s = ct.where(columns <= last, s, -math.inf)
                    m_new = ct.maximum(m_before, ct.max(s, 1, keepdims=True) * qk_scale)
                    origin = m_new
                    if MASKED:
                        origin = ct.where(m_new == -math.inf, 0.0, m_new)  # no key seen yet: -inf - -inf would be NaN
                    p = ct.exp2(s * qk_scale - origin, flush_to_zero=True)
                    alpha = ct.exp2(m_before - origin, flush_to_zero=True)
                    m_i += (m_new,)
                    l_i += (l_old[TILE] * alpha + ct.sum(p, 1, keepdims=True),)
                    if TILE == 0:
                        v_tile = ct.load(
                            v, index=(batch, head_kv, n_block, 0), shape=(1, 1, BLOCK_N, BLOCK_D),
                            padding_mode=ct.PaddingMode.ZERO, latency=4,
                        ).reshape((BLOCK_N, BLOCK_D))  # fmt: skip
                    acc += (ct.mma(p.astype(v.dtype), v_tile, acc_old[TILE] * alpha),)

    for TILE in ct.static_iter(range(2)):
        total = ct.where(l_i[TILE] == 0.0, 1.0, l_i[TILE])  # a row that sees no key has acc 0
        o = ct.truediv(acc[TILE], total, flush_to_zero=True, rounding_mode=ct.RoundingMode.APPROX).astype(out.dtype)
        ct.store(out, index=(batch, head_q, places[TILE], 0), tile=o.reshape((1, 1, HALF, BLOCK_D)))
        if STORE_LSE:
            row_lse = (m_i[TILE] + ct.log2(l_i[TILE])) * 0.6931471805599453
            ct.store(lse, index=(batch, head_q, places[TILE]), tile=row_lse.reshape((1, 1, HALF)))


def _device_code() -> Any:
    from peakattn_lab.ladder.cutile.step13_row_tiles import attention_fwd_kernel

    return attention_fwd_kernel


def launches(
    problem: AttentionProblem, config: Config, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor | None, softmax_scale: float, softcap: float,
) -> list[TileLaunch]:  # fmt: skip
    return host.launch_of(_device_code, problem, config, q, k, v, out, lse, softmax_scale)


launch, prepare = host.entry_points(launches)
