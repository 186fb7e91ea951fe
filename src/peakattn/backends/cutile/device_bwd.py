"""Device code of the backward, loaded only to compile: ``bwd.py`` says what it does."""

from __future__ import annotations

import math

import cuda.tile as ct

from peakattn.backends.cutile.tile_ops import (
    LOG2E,
    any_nan,
    key_blocks,
    load_part,
    load_rows,
    operand,
    products_with_row,
    program_block,
    scales,
    tanh,
    visible,
)

# An lse beyond this is rounded by more than exp2 can take; such a row counts as having no visible key.
LARGEST_LSE = 2.0**28


def load_row_numbers(array, batch, head, block, BLOCK, PADDING):
    """A number for each row of a tile: [1, BLOCK]."""
    return ct.load(array, index=(batch, head, block), shape=(1, 1, BLOCK), padding_mode=PADDING).reshape((1, BLOCK))


def probability(difference, ACCURATE):
    """exp of a score less the row's lse. In float32 the base changes after the subtraction, which rounds less."""
    if ACCURATE:
        difference = difference * LOG2E
    return ct.exp2(difference, flush_to_zero=True)


def score_gradient(s, dp, row_lse, row_delta, qk_scale, cap_scale, softcap, SOFTCAP, ACCURATE):
    """ds of a score and of the gradient dp of its probability."""
    if SOFTCAP:
        t = tanh(s * cap_scale, ACCURATE)
        s = softcap * t
    ds = probability(s * qk_scale + row_lse, ACCURATE) * (dp + row_delta)
    if SOFTCAP:
        ds = ds * (1.0 - t * t)
    return ds


@ct.kernel
def attention_bwd_rows_kernel(
    out, dout, lse, dlse, neg_delta, neg_lse, BLOCK_M, BLOCK_DV, HAS_DLSE, ACCURATE, BLOCK_AXIS
):  # fmt: skip
    """-delta and -lse, for 16-bit tensors in base 2, so that the other two functions add instead of subtract."""
    m_block, head = program_block(BLOCK_AXIS, False)
    batch = head // out.shape[1]
    head_q = head % out.shape[1]
    o = load_rows(out, batch, head_q, m_block, BLOCK_M, BLOCK_DV, True, 0).astype(ct.float32)
    do = load_rows(dout, batch, head_q, m_block, BLOCK_M, BLOCK_DV, True, 0).astype(ct.float32)
    delta = ct.sum(o * do, 1, keepdims=True).reshape((1, BLOCK_M))
    if HAS_DLSE:
        delta = delta - load_row_numbers(dlse, batch, head_q, m_block, BLOCK_M, ct.PaddingMode.ZERO)
    row_lse = load_row_numbers(lse, batch, head_q, m_block, BLOCK_M, ct.PaddingMode.ZERO)
    if not ACCURATE:
        row_lse = row_lse * LOG2E
    # +inf makes p zero: rows without a visible key.
    row_lse = ct.where(ct.abs(row_lse) > LARGEST_LSE, math.inf, row_lse)
    ct.store(neg_lse, index=(batch, head_q, m_block), tile=(-row_lse).reshape((1, 1, BLOCK_M)))
    ct.store(neg_delta, index=(batch, head_q, m_block), tile=(-delta).reshape((1, 1, BLOCK_M)))


@ct.kernel
def attention_bwd_dkdv_kernel(
    q, k, v, dout, dk, dv, neg_delta, neg_lse, softmax_scale, softcap, left, right,
    GROUP, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT, SOFTCAP, ACCURATE, TF32, BLOCK_M, BLOCK_N, EVEN_M,
    NEEDS_DK, NEEDS_DV, LATENCY, BLOCK_AXIS,
):  # fmt: skip
    seqlen_q = q.shape[2]
    seqlen_k = k.shape[2]
    # Under a causal mask the first key blocks meet the most rows, and are started first.
    n_block, head = program_block(BLOCK_AXIS, False)
    batch = head // k.shape[1]
    head_kv = head % k.shape[1]
    n_offset = n_block * BLOCK_N

    # Row blocks that see these keys, and among them those whose every row sees every key.
    last_key = ct.minimum(n_offset + BLOCK_N, seqlen_k) - 1
    m_block_min = 0
    full_min = 0
    m_block_max = ct.cdiv(seqlen_q, BLOCK_M)
    full_max = seqlen_q // BLOCK_M
    if HAS_RIGHT:
        m_block_min = ct.maximum(n_offset - right, 0) // BLOCK_M
        full_min = ct.cdiv(ct.maximum(last_key - right, 0), BLOCK_M)
    if HAS_LEFT:
        m_block_max = ct.minimum(m_block_max, ct.cdiv(ct.maximum(last_key + left + 1, 0), BLOCK_M))
        full_max = ct.minimum(full_max, ct.maximum(n_offset + left + 1, 0) // BLOCK_M)
    m_block_max = ct.maximum(m_block_max, m_block_min)
    full_min = ct.minimum(full_min, m_block_max)
    full_max = ct.maximum(ct.minimum(full_max, m_block_max), full_min)

    qk_scale, cap_scale = scales(softmax_scale, softcap, SOFTCAP, ACCURATE)
    keys = n_offset + ct.arange(BLOCK_N, dtype=ct.int32)[:, None]
    columns = ct.arange(BLOCK_M, dtype=ct.int32)[None, :]
    k_tile = load_rows(k, batch, head_kv, n_block, BLOCK_N, BLOCK_D, True, 0)
    v_tile = load_rows(v, batch, head_kv, n_block, BLOCK_N, BLOCK_DV, True, 0)
    dk_acc = ct.zeros((BLOCK_N, BLOCK_D), dtype=ct.float32)
    dv_acc = ct.zeros((BLOCK_N, BLOCK_DV), dtype=ct.float32)

    # 0: the right edge of the mask, 1: no mask, 2: the left edge of a window or the end of the rows.
    for PHASE in ct.static_iter(range(3)):
        if (PHASE == 0 and HAS_RIGHT) or PHASE == 1 or (PHASE == 2 and (HAS_LEFT or not EVEN_M)):
            begin = ct.static_eval((m_block_min, full_min, full_max)[PHASE])
            count = ct.static_eval((full_min, full_max, m_block_max)[PHASE]) - begin
            for step in range(GROUP * count):
                head_q = head_kv * GROUP
                m_block = begin + step
                if GROUP > 1:
                    head_q = head_q + step // count
                    m_block = begin + step % count
                q_tile = load_rows(q, batch, head_q, m_block, BLOCK_M, BLOCK_D, PHASE != 1 or BLOCK_D != HEAD_DIM, LATENCY)
                dout_tile = load_rows(
                    dout, batch, head_q, m_block, BLOCK_M, BLOCK_DV, PHASE != 1 or BLOCK_DV != HEAD_DIM_V, LATENCY
                )
                # A row beyond the end has lse +inf, which makes p 0 for any score but NaN.
                row_lse = load_row_numbers(neg_lse, batch, head_q, m_block, BLOCK_M, ct.PaddingMode.NEG_INF)
                start = ct.zeros((BLOCK_N, BLOCK_M), dtype=ct.float32)
                s = ct.mma(operand(k_tile, TF32), operand(ct.transpose(q_tile), TF32), start)
                if SOFTCAP:
                    t = tanh(s * cap_scale, ACCURATE)
                    s = softcap * t
                p = probability(s * qk_scale + row_lse, ACCURATE)
                if PHASE != 1 and (HAS_LEFT or HAS_RIGHT):
                    rows = m_block * BLOCK_M + columns
                    known = seqlen_k
                    if not EVEN_M:
                        known = ct.where(rows < seqlen_q, seqlen_k, 0)  # a row beyond the end sees no key
                    seen = visible(rows, keys, known, left, right, HAS_LEFT, HAS_RIGHT)
                    p = ct.where(seen, p, 0.0)
                if NEEDS_DV:
                    dv_acc = ct.mma(operand(p.astype(dout.dtype), TF32), operand(dout_tile, TF32), dv_acc)
                if NEEDS_DK:
                    row_delta = load_row_numbers(neg_delta, batch, head_q, m_block, BLOCK_M, ct.PaddingMode.ZERO)
                    dp = ct.mma(operand(v_tile, TF32), operand(ct.transpose(dout_tile), TF32), start)
                    ds = p * (dp + row_delta)
                    if SOFTCAP:
                        ds = ds * (1.0 - t * t)
                    if PHASE != 1 and (HAS_LEFT or HAS_RIGHT):
                        ds = ct.where(seen, ds, 0.0)
                    dk_acc = ct.mma(operand(ds.astype(q.dtype), TF32), operand(q_tile, TF32), dk_acc)

    if NEEDS_DK:
        dk_acc = (dk_acc * softmax_scale).astype(dk.dtype)
        ct.store(dk, index=(batch, head_kv, n_block, 0), tile=dk_acc.reshape((1, 1, BLOCK_N, BLOCK_D)))
    if NEEDS_DV:
        ct.store(dv, index=(batch, head_kv, n_block, 0), tile=dv_acc.astype(dv.dtype).reshape((1, 1, BLOCK_N, BLOCK_DV)))


def store_dq(dq, batch, head_q, m_block, part, acc, softmax_scale, BLOCK_M, BLOCK_PART):
    acc = (acc * softmax_scale).astype(dq.dtype)
    ct.store(dq, index=(batch, head_q, m_block, part), tile=acc.reshape((1, 1, BLOCK_M, BLOCK_PART)))


def repair(
    q, k, v, dout, dq, batch, head_q, head_kv, m_block, rows, first_key, last_key, row_lse, row_delta, left, right,
    softmax_scale, qk_scale, cap_scale, softcap, BLOCK_M, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT, SOFTCAP, ACCURATE,
):  # fmt: skip
    """Computes and stores dq with masked keys selected away instead of multiplied by 0.

    It is slow, and takes few columns at a time, so that the loops over tiles need not spare registers for it.
    """
    PART = ct.static_eval(max(min(BLOCK_D, BLOCK_DV) // 2, 16))
    for part in range(BLOCK_D // PART):
        acc = ct.zeros((BLOCK_M, PART), dtype=ct.float32)
        for key in range(first_key, last_key):
            s = products_with_row(q, k, batch, head_q, head_kv, m_block, key, BLOCK_M, BLOCK_D, PART)
            dp = products_with_row(dout, v, batch, head_q, head_kv, m_block, key, BLOCK_M, BLOCK_DV, PART)
            ds = score_gradient(s, dp, row_lse, row_delta, qk_scale, cap_scale, softcap, SOFTCAP, ACCURATE)
            seen = visible(rows, key, last_key, left, right, HAS_LEFT, HAS_RIGHT)
            acc = acc + ct.where(seen, ds * load_part(k, batch, head_kv, key, part, 1, PART), 0.0)
        store_dq(dq, batch, head_q, m_block, part, acc, softmax_scale, BLOCK_M, PART)


@ct.kernel
def attention_bwd_dq_kernel(
    q, k, v, dout, dq, neg_delta, neg_lse, softmax_scale, softcap, left, right,
    GROUP, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT, SOFTCAP, ACCURATE, TF32, BLOCK_M, BLOCK_N, EVEN_N,
    LATENCY, BLOCK_AXIS,
):  # fmt: skip
    seqlen_q = q.shape[2]
    seqlen_k = k.shape[2]
    m_block, head = program_block(BLOCK_AXIS, HAS_RIGHT)
    batch = head // q.shape[1]
    head_q = head % q.shape[1]
    head_kv = head_q // GROUP
    m_offset = m_block * BLOCK_M
    n_block_min, full_min, full_max, n_block_max = key_blocks(
        m_offset, seqlen_q, seqlen_k, left, right, BLOCK_M, BLOCK_N, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    qk_scale, cap_scale = scales(softmax_scale, softcap, SOFTCAP, ACCURATE)

    rows = m_offset + ct.arange(BLOCK_M, dtype=ct.int32)[:, None]
    columns = ct.arange(BLOCK_N, dtype=ct.int32)[None, :]
    row_lse = load_row_numbers(neg_lse, batch, head_q, m_block, BLOCK_M, ct.PaddingMode.NEG_INF).reshape((BLOCK_M, 1))
    row_delta = load_row_numbers(neg_delta, batch, head_q, m_block, BLOCK_M, ct.PaddingMode.ZERO).reshape((BLOCK_M, 1))
    q_tile = load_rows(q, batch, head_q, m_block, BLOCK_M, BLOCK_D, True, 0)
    dout_tile = load_rows(dout, batch, head_q, m_block, BLOCK_M, BLOCK_DV, True, 0)
    acc = ct.zeros((BLOCK_M, BLOCK_D), dtype=ct.float32)

    # 0: the left edge of a window, 1: no mask, 2: the right edge or the end of the keys.
    for PHASE in ct.static_iter(range(3)):
        if (PHASE == 0 and HAS_LEFT) or PHASE == 1 or (PHASE == 2 and (HAS_RIGHT or not EVEN_N)):
            begin = ct.static_eval((n_block_min, full_min, full_max)[PHASE])
            end = ct.static_eval((full_min, full_max, n_block_max)[PHASE])
            for n_block in range(begin, end):
                k_tile = load_rows(k, batch, head_kv, n_block, BLOCK_N, BLOCK_D, PHASE != 1 or BLOCK_D != HEAD_DIM, LATENCY)
                v_tile = load_rows(v, batch, head_kv, n_block, BLOCK_N, BLOCK_DV, PHASE != 1 or BLOCK_DV != HEAD_DIM_V, LATENCY)
                start = ct.zeros((BLOCK_M, BLOCK_N), dtype=ct.float32)
                s = ct.mma(operand(q_tile, TF32), operand(ct.transpose(k_tile), TF32), start)
                dp = ct.mma(operand(dout_tile, TF32), operand(ct.transpose(v_tile), TF32), start)
                ds = score_gradient(s, dp, row_lse, row_delta, qk_scale, cap_scale, softcap, SOFTCAP, ACCURATE)
                if PHASE != 1:
                    keys = n_block * BLOCK_N + columns
                    seen = visible(rows, keys, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT)
                    ds = ct.where(seen, ds, 0.0)
                acc = ct.mma(operand(ds.astype(k.dtype), TF32), operand(k_tile, TF32), acc)

    if HAS_LEFT or HAS_RIGHT:
        if any_nan(acc):
            repair(
                q, k, v, dout, dq, batch, head_q, head_kv, m_block, rows,
                n_block_min * BLOCK_N, ct.minimum(n_block_max * BLOCK_N, seqlen_k), row_lse, row_delta,
                left, right, softmax_scale, qk_scale, cap_scale, softcap,
                BLOCK_M, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT, SOFTCAP, ACCURATE,
            )  # fmt: skip
        else:
            store_dq(dq, batch, head_q, m_block, 0, acc, softmax_scale, BLOCK_M, BLOCK_D)
    else:
        store_dq(dq, batch, head_q, m_block, 0, acc, softmax_scale, BLOCK_M, BLOCK_D)
