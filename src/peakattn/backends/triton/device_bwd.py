"""Device code of ``triton.bwd``; ``bwd.py`` says what it does and why."""

from __future__ import annotations

import triton
import triton.language as tl

from peakattn.backends.triton.tile_ops import (
    LAYOUT_NUMBERS,
    LOG2E,
    any_nan,
    key_blocks,
    load_row,
    load_tile,
    program_block,
    store_tile,
    tanh,
    visible,
)

# An lse beyond this is rounded by more than exp2 can take; such a row counts as having no visible key.
_LARGEST_LSE = tl.constexpr(2.0**28)


@triton.jit(do_not_specialize=LAYOUT_NUMBERS)
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


@triton.jit(do_not_specialize=LAYOUT_NUMBERS)
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


@triton.jit(do_not_specialize=LAYOUT_NUMBERS)
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
