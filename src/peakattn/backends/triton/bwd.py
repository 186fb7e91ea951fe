"""Backward attention in portable Triton, sm_80 to sm_121: deterministic, no atomics, only the gradients asked for.

Three device functions:

1. rows:   delta = rowsum(dout * out) - dlse and lse in base 2, negated, for every query row
2. dk, dv: one program per key block and kv head; K and V stay, the query heads of the group and their row blocks pass by
3. dq:     one program per row block and query head; Q and dout stay, the key blocks pass by

    p  = exp2(s * qk_scale - lse * log2(e))        recomputed in 2 and again in 3
    dv = p^T dout        dp = dout v^T        ds = p * (dp - delta)        dk = scale ds^T q        dq = scale ds k

Because s and dp are recomputed, seven products are executed where five count; in return each gradient is written once,
by one program, in an order that does not depend on timing, and grouped kv heads need no atomics either.  Function 2
works on the transposes s^T = k q^T and dp^T = v dout^T, so that p^T and ds^T are left operands straight from registers.

Loops over blocks come in three phases as in the forward: masked, mask-free, masked.  Masked elements of p and ds are
replaced by 0, which in 2 keeps each key row to itself whatever stands in other rows of K and V.  In 3 a masked row of K
meets a weight of 0, and 0 * NaN is NaN: a row block that ends with a NaN is computed again key by key (``_repair``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from peakattn.backends.triton import toolchain
from peakattn.backends.triton.tile_ops import (
    LOG2E,
    REGISTERS_FOR_TILES,
    addressable,
    any_nan,
    check_launch_knobs,
    descriptor,
    has_tma,
    heads_together,
    key_blocks,
    load_row,
    load_tile,
    mask_arguments,
    padded,
    power_of_two,
    precision,
    program_block,
    smem_bytes,
    store_tile,
    strides,
    tanh,
    unsupported,
    visible,
)
from peakattn.backends.triton.toolchain import KernelLaunch, Tma
from peakattn.device import Device
from peakattn.problem import AttentionProblem

_ROW_BLOCK = 128  # rows of the scratch are a multiple of this, so that no block reads beyond them
_ROWS_ELEMENTS = 8192  # elements of a tile of function 1

# An lse beyond this is rounded by more than exp2 can take; such a row counts as having no visible key.
_LARGEST_LSE = tl.constexpr(2.0**28)


@dataclass(frozen=True)
class Config:
    """Knobs of the dk, dv and the dq functions. ``tma`` needs sm_90 or newer, and is ignored where TMA cannot address."""

    dkdv_block_m: int
    dkdv_block_n: int
    dq_block_m: int
    dq_block_n: int
    dkdv_num_warps: int = 4
    dkdv_num_stages: int = 2
    dkdv_maxnreg: int | None = None
    dq_num_warps: int = 4
    dq_num_stages: int = 2
    dq_maxnreg: int | None = None
    tma: bool = False

    def __post_init__(self) -> None:
        power_of_two("dkdv_block_m", self.dkdv_block_m, 16, _ROW_BLOCK)
        power_of_two("dkdv_block_n", self.dkdv_block_n, 16, 256)
        power_of_two("dq_block_m", self.dq_block_m, 16, _ROW_BLOCK)
        power_of_two("dq_block_n", self.dq_block_n, 16, 256)
        check_launch_knobs(self.dkdv_num_warps, self.dkdv_num_stages, self.dkdv_maxnreg, "dkdv_")
        check_launch_knobs(self.dq_num_warps, self.dq_num_stages, self.dq_maxnreg, "dq_")


def reject(problem: AttentionProblem, device: Device) -> str | None:
    return unsupported(problem, device)


def default_config(problem: AttentionProblem, device: Device) -> Config:
    """Reasoned from shared memory, registers and spills of the compiled code; unmeasured on any GPU but sm_90."""
    dim = max(padded(problem.head_dim), padded(problem.head_dim_v))
    # On sm_120 descriptors cost more registers than pointers do: 195 spills instead of none at head_dim 64.
    tma = has_tma(problem, device) and device.arch < 120
    if device.type != "cuda":
        return Config(32, 32, 32, 32)
    if problem.dtype == torch.float32:
        # Exact float32 products run on the FMA units, with whole rows of a tile in registers.
        if dim <= 64:
            return Config(32, 32, 32, 32, 8, 1, None, 8, 1)
        return Config(16, 16, 16, 16, 8, 1, None, 8, 1)
    if device.arch == 90 and tma:
        # The fastest of six tiles for each function in the sweep of 2026-11-29 on an H200, bf16; see the notebook.
        if dim <= 64:
            return Config(64, 64, 64, 64, 4, 3, None, 4, 2 if problem.mask_name == "full" else 3, tma=True)
        if dim <= 128:
            return Config(64, 64, 128, 64, 4, 2, None, 8, 3, tma=True)
        return Config(64, 64, 128, 32, 8, 2, None, 8, 3, tma=True)
    if dim <= 64:
        return Config(64, 64, 128, 64, 4, 2, None, 8, 2, tma=tma)
    if dim <= 128:
        return Config(32, 64, 64, 32, 4, 2, None, 4, 2, tma=tma)
    return Config(32, 32, 32, 32, 8, 1, None, 8, 1, tma=tma)


def search_space(problem: AttentionProblem, device: Device) -> Iterable[Config]:
    """All pairs of a legal dk, dv shape and a legal dq shape. The two functions are independent: tune one, then the other."""
    tma = has_tma(problem, device)
    shapes = list(itertools.product((16, 32, 64, 128), (16, 32, 64, 128), (4, 8), (1, 2, 3)))
    dkdv = [shape for shape in shapes if _fits(problem, device, shape[1], shape[0], *shape[2:], dkdv=True)]
    dq = [shape for shape in shapes if _fits(problem, device, *shape, dkdv=False)]
    for (dkdv_m, dkdv_n, dkdv_warps, dkdv_stages), (dq_m, dq_n, dq_warps, dq_stages) in itertools.product(dkdv, dq):
        yield Config(dkdv_m, dkdv_n, dq_m, dq_n, dkdv_warps, dkdv_stages, None, dq_warps, dq_stages, None, tma)


def _fits(
    problem: AttentionProblem, device: Device, resident: int, streamed: int, num_warps: int, num_stages: int, *, dkdv: bool
) -> bool:
    """Whether a function with ``resident`` rows that stay and ``streamed`` rows a step fits the device."""
    size, threads = problem.dtype.itemsize, 32 * num_warps
    dims = padded(problem.head_dim) + padded(problem.head_dim_v)
    acc = resident * (dims if dkdv else padded(problem.head_dim))
    scores = resident * streamed
    if problem.dtype == torch.float32:
        registers_fit = acc <= 32 * threads and scores <= 4 * threads
    else:
        registers_fit = acc + 2.5 * scores <= REGISTERS_FOR_TILES * threads
    shared = smem_bytes(size * dims * resident, num_stages * streamed * (size * dims + 8))
    return registers_fit and (device.type != "cuda" or shared <= device.smem_per_block)


@triton.jit
def attention_bwd_rows_kernel(
    out,
    dout,
    lse,
    dlse,
    neg_delta,
    neg_lse,
    stride_ob,
    stride_os,
    stride_oh,
    stride_od,
    stride_dob,
    stride_dos,
    stride_doh,
    stride_dod,
    stride_dlb,
    stride_dlh,
    stride_dls,
    seqlen_q,
    padded_q,
    num_heads_q,
    num_m_blocks,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """-delta and -lse, for 16-bit tensors in base 2, so that functions 2 and 3 add instead of subtract."""
    head = tl.program_id(0) // num_m_blocks
    m_offset = tl.program_id(0) % num_m_blocks * BLOCK_M
    batch = head // num_heads_q
    head_q = head % num_heads_q
    out += batch.to(tl.int64) * stride_ob + head_q.to(tl.int64) * stride_oh
    dout += batch.to(tl.int64) * stride_dob + head_q.to(tl.int64) * stride_doh
    rows = m_offset + tl.arange(0, BLOCK_M)
    inside = rows < seqlen_q
    o = load_tile(None, out, stride_os, stride_od, 0, 0, m_offset, seqlen_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, True)
    do = load_tile(None, dout, stride_dos, stride_dod, 0, 0, m_offset, seqlen_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, True)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if dlse is not None:
        dlse += batch.to(tl.int64) * stride_dlb + head_q.to(tl.int64) * stride_dlh
        delta -= tl.load(dlse + rows.to(tl.int64) * stride_dls, mask=inside, other=0.0)
    row_lse = tl.load(lse + head.to(tl.int64) * seqlen_q + rows, mask=inside, other=float("inf"))
    if o.dtype != tl.float32:
        row_lse *= LOG2E
    # +inf makes p zero: rows beyond the end, and rows without a visible key.
    row_lse = tl.where(tl.abs(row_lse) > _LARGEST_LSE, float("inf"), row_lse)
    at = head.to(tl.int64) * padded_q + rows
    tl.store(neg_lse + at, -row_lse, mask=rows < padded_q)
    tl.store(neg_delta + at, -delta, mask=rows < padded_q)


@triton.jit
def _probability(difference, NATURAL: tl.constexpr):
    """exp of a score less the row's lse. In float32 the base changes after the subtraction, which rounds less."""
    if NATURAL:
        difference *= LOG2E
    return tl.exp2(difference)


@triton.jit
def _load_rows(tma, base, head, row, padded_q, BLOCK_M: tl.constexpr):
    """Scratch of the rows from ``row`` of one head: [BLOCK_M]."""
    if tma is not None:
        return tma.load([head, row]).reshape([BLOCK_M])
    return tl.load(base + head.to(tl.int64) * padded_q + row + tl.arange(0, BLOCK_M))


@triton.jit
def attention_bwd_dkdv_kernel(
    q,
    k,
    v,
    dout,
    dk,
    dv,
    neg_delta,
    neg_lse,
    q_tma,
    dout_tma,
    neg_delta_tma,
    neg_lse_tma,
    softmax_scale,
    softcap,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_qd,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_kd,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_vd,
    stride_dob,
    stride_dos,
    stride_doh,
    stride_dod,
    stride_dkb,
    stride_dks,
    stride_dkh,
    stride_dkd,
    stride_dvb,
    stride_dvs,
    stride_dvh,
    stride_dvd,
    seqlen_q,
    seqlen_k,
    padded_q,
    num_heads_kv,
    num_heads,
    num_n_blocks,
    section,
    offset,
    window_left,
    window_right,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    EVEN_M: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    NEEDS_DK: tl.constexpr = dk is not None
    NEEDS_DV: tl.constexpr = dv is not None
    # Under a causal mask the first key blocks meet the most rows, and are started first.
    n_block, head = program_block(num_n_blocks, num_heads, section, False)
    batch = head // num_heads_kv
    head_kv = head % num_heads_kv
    n_offset = n_block * BLOCK_N
    q += batch.to(tl.int64) * stride_qb
    dout += batch.to(tl.int64) * stride_dob
    k += batch.to(tl.int64) * stride_kb + head_kv.to(tl.int64) * stride_kh
    v += batch.to(tl.int64) * stride_vb + head_kv.to(tl.int64) * stride_vh

    # Row blocks that see these keys, and among them those whose every row sees every key.
    last_key = tl.minimum(n_offset + BLOCK_N, seqlen_k) - 1
    m_block_min = 0
    full_min = 0
    m_block_max = tl.cdiv(seqlen_q, BLOCK_M)
    full_max = m_block_max if EVEN_M else seqlen_q // BLOCK_M
    if HAS_RIGHT:
        m_block_min = tl.maximum(n_offset - offset - window_right, 0) // BLOCK_M
        full_min = tl.cdiv(tl.maximum(last_key - offset - window_right, 0), BLOCK_M)
    if HAS_LEFT:
        m_block_max = tl.minimum(m_block_max, tl.cdiv(tl.maximum(last_key - offset + window_left + 1, 0), BLOCK_M))
        full_max = tl.minimum(full_max, tl.maximum(n_offset - offset + window_left + 1, 0) // BLOCK_M)
    m_block_max = tl.maximum(m_block_max, m_block_min)
    full_min = tl.minimum(full_min, m_block_max)
    full_max = tl.maximum(tl.minimum(full_max, m_block_max), full_min)

    qk_scale = 1.0 if SOFTCAP else softmax_scale
    if q.dtype.element_ty != tl.float32:
        qk_scale *= LOG2E
    cap_scale = softmax_scale / softcap if SOFTCAP else softmax_scale
    keys = n_offset + tl.arange(0, BLOCK_N)
    k_tile = load_tile(None, k, stride_ks, stride_kd, 0, 0, n_offset, seqlen_k, BLOCK_N, HEAD_DIM, BLOCK_D, True)
    if NEEDS_DK:
        v_tile = load_tile(None, v, stride_vs, stride_vd, 0, 0, n_offset, seqlen_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, True)
        dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if NEEDS_DV:
        dv_acc = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    # 0: no mask, 1: the right edge of the mask, 2: the left edge of a window or the end of the rows.
    for PHASE in tl.static_range(3):
        if PHASE == 0 or (PHASE == 1 and HAS_RIGHT) or (PHASE == 2 and (HAS_LEFT or not EVEN_M)):
            begin = full_min if PHASE == 0 else m_block_min if PHASE == 1 else full_max
            count = (full_max if PHASE == 0 else full_min if PHASE == 1 else m_block_max) - begin
            # An explicit num_stages has Triton prefetch the start values too, which no product takes as an operand.
            for step in tl.range(0, GROUP * count, num_stages=NUM_STAGES):
                head_q = head_kv * GROUP
                m_block = begin + step
                if GROUP > 1:
                    head_q += step // count
                    m_block = begin + step % count
                m_offset = m_block * BLOCK_M
                rows = m_offset + tl.arange(0, BLOCK_M)
                row_head = batch * num_heads_kv * GROUP + head_q
                q_tile = load_tile(
                    q_tma,
                    q + head_q.to(tl.int64) * stride_qh,
                    stride_qs,
                    stride_qd,
                    batch,
                    head_q,
                    m_offset,
                    seqlen_q,
                    BLOCK_M,
                    HEAD_DIM,
                    BLOCK_D,
                    not EVEN_M and PHASE != 0,
                )
                row_lse = _load_rows(neg_lse_tma, neg_lse, row_head, m_offset, padded_q, BLOCK_M)
                s = tl.dot(k_tile, q_tile.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
                dout_tile = load_tile(
                    dout_tma,
                    dout + head_q.to(tl.int64) * stride_doh,
                    stride_dos,
                    stride_dod,
                    batch,
                    head_q,
                    m_offset,
                    seqlen_q,
                    BLOCK_M,
                    HEAD_DIM_V,
                    BLOCK_DV,
                    not EVEN_M and PHASE != 0,
                )
                if NEEDS_DK:
                    row_delta = _load_rows(neg_delta_tma, neg_delta, row_head, m_offset, padded_q, BLOCK_M)
                    # From -delta on, which takes less registers than to subtract it from the product.
                    start = tl.broadcast_to(row_delta[None, :], [BLOCK_N, BLOCK_M])
                    dp = tl.dot(v_tile, dout_tile.T, start, input_precision=PRECISION)
                if SOFTCAP:
                    t = tanh(s * cap_scale, q_tile.dtype == tl.float32)
                    s = softcap * t
                p = _probability(s * qk_scale + row_lse[None, :], q_tile.dtype == tl.float32)
                if PHASE != 0 and (HAS_LEFT or HAS_RIGHT):
                    seen = visible(rows[None, :], keys[:, None], offset, window_left, window_right, HAS_LEFT, HAS_RIGHT)
                    # A row beyond the end has lse +inf, which makes p 0 for any score but NaN.
                    seen &= (rows < seqlen_q)[None, :]
                    p = tl.where(seen, p, 0.0)
                if NEEDS_DV:
                    dv_acc = tl.dot(p.to(dout_tile.dtype), dout_tile, dv_acc, input_precision=PRECISION)
                if NEEDS_DK:
                    ds = p * dp
                    if SOFTCAP:
                        ds *= 1.0 - t * t
                    if PHASE != 0 and (HAS_LEFT or HAS_RIGHT):
                        ds = tl.where(seen, ds, 0.0)
                    dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)

    if NEEDS_DK:
        dk += batch.to(tl.int64) * stride_dkb + head_kv.to(tl.int64) * stride_dkh
        store_tile(dk, stride_dks, stride_dkd, n_offset, seqlen_k, dk_acc * softmax_scale, BLOCK_N, HEAD_DIM, BLOCK_D)
    if NEEDS_DV:
        dv += batch.to(tl.int64) * stride_dvb + head_kv.to(tl.int64) * stride_dvh
        store_tile(dv, stride_dvs, stride_dvd, n_offset, seqlen_k, dv_acc, BLOCK_N, HEAD_DIM_V, BLOCK_DV)


@triton.jit
def _repair(
    q_tile,
    dout_tile,
    k,
    v,
    stride_ks,
    stride_kd,
    stride_vs,
    stride_vd,
    row_lse,
    row_delta,
    rows,
    first_key,
    last_key,
    offset,
    window_left,
    window_right,
    qk_scale,
    cap_scale,
    softcap,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """The unscaled dq with masked keys selected away instead of multiplied by 0."""
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for key in tl.range(first_key, last_key, num_stages=1):
        k_row = load_row(k, stride_ks, stride_kd, key, HEAD_DIM, BLOCK_D)
        v_row = load_row(v, stride_vs, stride_vd, key, HEAD_DIM_V, BLOCK_DV)
        s = tl.sum(q_tile.to(tl.float32) * k_row[None, :], 1)
        dp = tl.sum(dout_tile.to(tl.float32) * v_row[None, :], 1)
        if SOFTCAP:
            t = tanh(s * cap_scale, False)
            s = softcap * t
        ds = _probability(s * qk_scale + row_lse, q_tile.dtype == tl.float32) * (dp + row_delta)
        if SOFTCAP:
            ds *= 1.0 - t * t
        seen = visible(rows, key, offset, window_left, window_right, HAS_LEFT, HAS_RIGHT)
        acc += tl.where(seen[:, None], ds[:, None] * k_row[None, :], 0.0)
    return acc


@triton.jit
def attention_bwd_dq_kernel(
    q,
    k,
    v,
    dout,
    dq,
    neg_delta,
    neg_lse,
    k_tma,
    v_tma,
    softmax_scale,
    softcap,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_qd,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_kd,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_vd,
    stride_dob,
    stride_dos,
    stride_doh,
    stride_dod,
    stride_dqb,
    stride_dqs,
    stride_dqh,
    stride_dqd,
    seqlen_q,
    seqlen_k,
    padded_q,
    num_heads_q,
    num_heads,
    num_m_blocks,
    section,
    offset,
    window_left,
    window_right,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    EVEN_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    m_block, head = program_block(num_m_blocks, num_heads, section, HAS_RIGHT)
    batch = head // num_heads_q
    head_q = head % num_heads_q
    head_kv = head_q // GROUP
    m_offset = m_block * BLOCK_M
    q += batch.to(tl.int64) * stride_qb + head_q.to(tl.int64) * stride_qh
    dout += batch.to(tl.int64) * stride_dob + head_q.to(tl.int64) * stride_doh
    dq += batch.to(tl.int64) * stride_dqb + head_q.to(tl.int64) * stride_dqh
    k += batch.to(tl.int64) * stride_kb + head_kv.to(tl.int64) * stride_kh
    v += batch.to(tl.int64) * stride_vb + head_kv.to(tl.int64) * stride_vh
    n_block_min, full_min, full_max, n_block_max = key_blocks(
        m_offset, seqlen_q, seqlen_k, offset, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    qk_scale = 1.0 if SOFTCAP else softmax_scale
    if q.dtype.element_ty != tl.float32:
        qk_scale *= LOG2E
    cap_scale = softmax_scale / softcap if SOFTCAP else softmax_scale

    rows = m_offset + tl.arange(0, BLOCK_M)
    at = head.to(tl.int64) * padded_q + rows
    row_lse = tl.load(neg_lse + at)
    row_delta = tl.load(neg_delta + at)
    q_tile = load_tile(None, q, stride_qs, stride_qd, 0, 0, m_offset, seqlen_q, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    dout_tile = load_tile(None, dout, stride_dos, stride_dod, 0, 0, m_offset, seqlen_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, True)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # 0: the left edge of a window, 1: no mask, 2: the right edge or the end of the keys.
    for PHASE in tl.static_range(3):
        if (PHASE == 0 and HAS_LEFT) or PHASE == 1 or (PHASE == 2 and (HAS_RIGHT or not EVEN_N)):
            begin = n_block_min if PHASE == 0 else full_min if PHASE == 1 else full_max
            end = full_min if PHASE == 0 else full_max if PHASE == 1 else n_block_max
            for n_block in tl.range(begin, end):
                n_offset = n_block * BLOCK_N
                k_tile = load_tile(
                    k_tma,
                    k,
                    stride_ks,
                    stride_kd,
                    batch,
                    head_kv,
                    n_offset,
                    seqlen_k,
                    BLOCK_N,
                    HEAD_DIM,
                    BLOCK_D,
                    not EVEN_N and PHASE != 1,
                )
                s = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)
                v_tile = load_tile(
                    v_tma,
                    v,
                    stride_vs,
                    stride_vd,
                    batch,
                    head_kv,
                    n_offset,
                    seqlen_k,
                    BLOCK_N,
                    HEAD_DIM_V,
                    BLOCK_DV,
                    not EVEN_N and PHASE != 1,
                )
                dp = tl.dot(dout_tile, v_tile.T, input_precision=PRECISION)
                if SOFTCAP:
                    t = tanh(s * cap_scale, q_tile.dtype == tl.float32)
                    s = softcap * t
                ds = _probability(s * qk_scale + row_lse[:, None], q_tile.dtype == tl.float32) * (dp + row_delta[:, None])
                if SOFTCAP:
                    ds *= 1.0 - t * t
                if PHASE != 1:
                    keys = n_offset + tl.arange(0, BLOCK_N)
                    seen = (keys < seqlen_k)[None, :]
                    if HAS_LEFT or HAS_RIGHT:
                        seen &= visible(rows[:, None], keys[None, :], offset, window_left, window_right, HAS_LEFT, HAS_RIGHT)
                    ds = tl.where(seen, ds, 0.0)
                acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)

    if HAS_LEFT or HAS_RIGHT:  # noqa: SIM102
        if any_nan(acc):
            acc = _repair(
                q_tile,
                dout_tile,
                k,
                v,
                stride_ks,
                stride_kd,
                stride_vs,
                stride_vd,
                row_lse,
                row_delta,
                rows,
                n_block_min * BLOCK_N,
                tl.minimum(n_block_max * BLOCK_N, seqlen_k),
                offset,
                window_left,
                window_right,
                qk_scale,
                cap_scale,
                softcap,
                BLOCK_M,
                HEAD_DIM,
                HEAD_DIM_V,
                BLOCK_D,
                BLOCK_DV,
                HAS_LEFT,
                HAS_RIGHT,
                SOFTCAP,
            )
    store_tile(dq, stride_dqs, stride_dqd, m_offset, seqlen_q, acc * softmax_scale, BLOCK_M, HEAD_DIM, BLOCK_D)


def workspace(problem: AttentionProblem, config: Config) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Scratch memory by name: shape and dtype."""
    padded_q = -(-problem.seqlen_q // _ROW_BLOCK) * _ROW_BLOCK
    shape = (problem.batch * problem.num_heads_q, padded_q)
    return {"neg_delta": (shape, torch.float32), "neg_lse": (shape, torch.float32)}


def launches(
    problem: AttentionProblem,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    softmax_scale: float,
    softcap: float,
    scratch: dict[str, torch.Tensor] | None = None,
) -> list[KernelLaunch]:
    """``scratch`` is memory as ``workspace`` describes it; it is allocated here when None."""
    if scratch is None:
        scratch = _allocate(problem, config, q.device)
    padded_q = scratch["neg_delta"].shape[-1]
    heads_q, heads_kv = problem.batch * problem.num_heads_q, problem.batch * problem.num_heads_kv
    block_d, block_dv = padded(problem.head_dim), padded(problem.head_dim_v)
    use_tma = config.tma and addressable(problem, q, k, v, dout)
    bounds, flags = mask_arguments(problem)
    tensors = {"q": q, "k": k, "v": v, "dout": dout, **scratch}
    numbers = {
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        **strides("q", q),
        **strides("k", k),
        **strides("v", v),
        **strides("do", dout),
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "padded_q": padded_q,
        **bounds,
    }
    constexprs = {
        "GROUP": problem.group,
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        **flags,
        "SOFTCAP": problem.softcap,
        "PRECISION": precision(problem),
    }
    size = problem.dtype.itemsize * (problem.head_dim + problem.head_dim_v)
    made = []

    rows_block = max(16, min(_ROW_BLOCK, _ROWS_ELEMENTS // block_dv))
    num_blocks = padded_q // rows_block
    dl = (0, 0, 0) if dlse is None else dlse.stride()
    args: dict[str, Any] = {
        "out": out,
        "dout": dout,
        "lse": lse,
        "dlse": dlse,
        **scratch,
        **strides("o", out),
        **strides("do", dout),
        "stride_dlb": dl[0],
        "stride_dlh": dl[1],
        "stride_dls": dl[2],
        "seqlen_q": problem.seqlen_q,
        "padded_q": padded_q,
        "num_heads_q": problem.num_heads_q,
        "num_m_blocks": num_blocks,
    }
    row_constexprs = {"HEAD_DIM_V": problem.head_dim_v, "BLOCK_DV": block_dv, "BLOCK_M": rows_block}
    made.append(KernelLaunch(attention_bwd_rows_kernel, (heads_q * num_blocks, 1, 1), args, row_constexprs, 4, 1))

    if dk is not None or dv is not None:
        block_m, block_n = config.dkdv_block_m, config.dkdv_block_n
        num_blocks = -(-problem.seqlen_k // block_n)
        args = {
            **tensors,
            "dk": dk,
            "dv": dv,
            "q_tma": descriptor(use_tma, q, block_m),
            "dout_tma": descriptor(use_tma, dout, block_m),
            "neg_delta_tma": Tma(scratch["neg_delta"], (1, block_m)) if use_tma else None,
            "neg_lse_tma": Tma(scratch["neg_lse"], (1, block_m)) if use_tma else None,
            **numbers,
            **strides("dk", k if dk is None else dk),
            **strides("dv", v if dv is None else dv),
            "num_heads_kv": problem.num_heads_kv,
            "num_heads": heads_kv,
            "num_n_blocks": num_blocks,
            "section": heads_together(problem, problem.group * problem.seqlen_q * size, heads_kv),
        }
        blocks = {
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            # The hardware fills in zeros beyond the last row, and p is 0 there.
            "EVEN_M": use_tma or problem.seqlen_q % block_m == 0,
            "NUM_STAGES": config.dkdv_num_stages,
        }
        made.append(
            KernelLaunch(
                attention_bwd_dkdv_kernel,
                (heads_kv * num_blocks, 1, 1),
                args,
                constexprs | blocks,
                config.dkdv_num_warps,
                config.dkdv_num_stages,
                config.dkdv_maxnreg,
            )
        )

    if dq is not None:
        block_m, block_n = config.dq_block_m, config.dq_block_n
        num_blocks = -(-problem.seqlen_q // block_m)
        args = {
            **tensors,
            "dq": dq,
            "k_tma": descriptor(use_tma, k, block_n),
            "v_tma": descriptor(use_tma, v, block_n),
            **numbers,
            **strides("dq", dq),
            "num_heads_q": problem.num_heads_q,
            "num_heads": heads_q,
            "num_m_blocks": num_blocks,
            "section": heads_together(problem, problem.seqlen_k * size // max(problem.group, 1), heads_q),
        }
        blocks = {
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "EVEN_N": problem.seqlen_k % block_n == 0,
        }
        made.append(
            KernelLaunch(
                attention_bwd_dq_kernel,
                (heads_q * num_blocks, 1, 1),
                args,
                constexprs | blocks,
                config.dq_num_warps,
                config.dq_num_stages,
                config.dq_maxnreg,
            )
        )
    return [launch for launch in made if launch.grid[0]]


def prepare(
    problem: AttentionProblem,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
) -> Callable[..., None]:
    """``call(*the same tensors, softmax_scale, softcap)``; each call takes its scratch memory from torch's allocator."""
    tensors = (q, k, v, out, lse, dout, dlse, dq, dk, dv)
    device, scratch = q.device, _allocate(problem, config, q.device)
    made = launches(problem, config, *tensors, 1.0, 0.0, scratch)
    if not made:
        return lambda *args: None
    bound = toolchain.bind(made, (*tensors, *scratch.values()))

    # The closure holds no tensor, so that a prepared launch keeps no memory alive.
    def call(*args: torch.Tensor | float | None) -> None:
        bound(*args[:-2], *_allocate(problem, config, device).values(), *args[-2:])

    return call


def launch(
    problem: AttentionProblem,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    softmax_scale: float,
    softcap: float,
) -> None:
    tensors = (q, k, v, out, lse, dout, dlse, dq, dk, dv)
    prepare(problem, config, *tensors)(*tensors, softmax_scale, softcap)


def _allocate(problem: AttentionProblem, config: Config, device: torch.device) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in workspace(problem, config).items()}
