"""Device code of the forward, loaded only to compile: ``fwd.py`` says what it does."""

from __future__ import annotations

import math

import cuda.tile as ct

from peakattn.backends.cutile.tile_ops import (
    LN2,
    any_nan,
    key_blocks,
    load_columns,
    load_rows,
    operand,
    program_block,
    scales,
    tanh,
    visible,
)

# Base-2 scores beyond this are rounded by more than half, so that exp2(score - max) could miss 1 by any factor.
EXACT = 2.0**24
# What runs under the softmax of a block of keys: values of OVERLAP.
NOTHING, SCORES, OUTPUT = range(3)


def row_scales(m, qk_scale, power_scale):
    return ct.where(ct.abs(m) * qk_scale < EXACT, qk_scale, power_scale)


def softmax(s, m_i, shift_i, l_i, qk_scale, power_scale, MASK):
    """Weights of a score tile, and the running maximum, its scaled value, the sum, and the factor for what came before.

    The weight is exp2(s * qk_scale - shift) in one FMA, with shift = max * qk_scale rounded.  The rounding is the same
    for the whole row and cancels, unless it is so large that exp2 of it overflows: such rows use the power of two above
    qk_scale, with which the product is exact.  Their scores differ by more than rounding or not at all.
    """
    m_new = ct.maximum(m_i, ct.max(s, 1, keepdims=True))
    row_scale = row_scales(m_new, qk_scale, power_scale)
    shift = m_new * row_scale
    origin = shift
    if MASK:
        origin = ct.where(m_new == -math.inf, 0.0, shift)
    p = ct.exp2(s * row_scale - origin, flush_to_zero=True)
    alpha = ct.exp2(shift_i - origin, flush_to_zero=True)
    return p, m_new, shift, l_i * alpha + ct.sum(p, 1, keepdims=True), alpha


def scores(q_tile, k, batch, head_kv, n_block, BLOCK_M, BLOCK_N, BLOCK_D, TF32, CHECK, LATENCY):
    """The products of the queries with a block of keys, before scale, softcap and mask."""
    k_tile = load_columns(k, batch, head_kv, n_block, BLOCK_N, BLOCK_D, CHECK, LATENCY)
    return ct.mma(operand(q_tile, TF32), operand(k_tile, TF32), ct.zeros((BLOCK_M, BLOCK_N), dtype=ct.float32))


def finished(
    s, rows, keys, seqlen_k, left, right, cap_scale, softcap, HAS_LEFT, HAS_RIGHT, SOFTCAP, ACCURATE, MASK
):  # fmt: skip
    """Scores with softcap and mask."""
    if SOFTCAP:
        s = softcap * tanh(s * cap_scale, ACCURATE)
    if MASK:
        s = ct.where(visible(rows, keys, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT), s, -math.inf)
    return s


def add_values(acc, p, v, batch, head_kv, n_block, BLOCK_N, BLOCK_DV, TF32, CHECK, LATENCY):
    """``acc`` and the values of a block of keys, weighted with ``p``."""
    v_tile = load_rows(v, batch, head_kv, n_block, BLOCK_N, BLOCK_DV, CHECK, LATENCY)
    return ct.mma(operand(p.astype(v.dtype), TF32), operand(v_tile, TF32), acc)


def repair(
    q_tile, k, v, batch, head_kv, rows, first_key, last_key, m_i, shift_i, left, right,
    qk_scale, power_scale, cap_scale, softcap, BLOCK_M, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT, SOFTCAP, ACCURATE,
):  # fmt: skip
    """The unnormalised output with masked keys selected away instead of multiplied by 0."""
    row_scale = row_scales(m_i, qk_scale, power_scale)
    acc = ct.zeros((BLOCK_M, BLOCK_DV), dtype=ct.float32)
    for key in range(first_key, last_key):
        k_row = load_rows(k, batch, head_kv, key, 1, BLOCK_D, True, 0).astype(ct.float32)
        v_row = load_rows(v, batch, head_kv, key, 1, BLOCK_DV, True, 0).astype(ct.float32)
        s = ct.sum(q_tile.astype(ct.float32) * k_row, 1, keepdims=True)
        if SOFTCAP:
            s = softcap * tanh(s * cap_scale, ACCURATE)
        p = ct.exp2(s * row_scale - shift_i, flush_to_zero=True)
        seen = visible(rows, key, last_key, left, right, HAS_LEFT, HAS_RIGHT)
        acc = acc + ct.where(seen, p * v_row, 0.0)
    return acc


@ct.kernel
def attention_fwd_kernel(
    q, k, v, out, lse, softmax_scale, softcap, num_heads, num_m_blocks, section, left, right,
    GROUP, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, EVEN_N, SOFTCAP, ACCURATE, TF32,
    STORE_LSE, OVERLAP, K_LATENCY, V_LATENCY,
):  # fmt: skip
    seqlen_q = q.shape[2]
    seqlen_k = k.shape[2]
    m_block, head = program_block(num_m_blocks, num_heads, section, HAS_RIGHT)
    batch = head // q.shape[1]
    head_q = head % q.shape[1]
    head_kv = head_q // GROUP
    m_offset = m_block * BLOCK_M
    n_block_min, full_min, full_max, n_block_max = key_blocks(
        m_offset, seqlen_q, seqlen_k, left, right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    qk_scale, cap_scale = scales(softmax_scale, softcap, SOFTCAP)
    power_scale = ct.bitcast((ct.bitcast(qk_scale, ct.int32) & 0x7F800000) + 0x00800000, ct.float32)

    rows = m_offset + ct.arange(BLOCK_M, dtype=ct.int32)[:, None]
    columns = ct.arange(BLOCK_N, dtype=ct.int32)[None, :]
    m_i = ct.full((BLOCK_M, 1), -math.inf, dtype=ct.float32)
    shift_i = ct.full((BLOCK_M, 1), -math.inf, dtype=ct.float32)
    l_i = ct.zeros((BLOCK_M, 1), dtype=ct.float32)
    acc = ct.zeros((BLOCK_M, BLOCK_DV), dtype=ct.float32)
    q_tile = load_rows(q, batch, head_q, m_block, BLOCK_M, BLOCK_D, True, 0)

    TAIL = HAS_RIGHT or not EVEN_N
    K_CHECK = not EVEN_N or BLOCK_D != HEAD_DIM
    V_CHECK = BLOCK_DV != HEAD_DIM_V
    # 0: the left edge of a window, 1: no mask, 2: the right edge or the end of the keys.
    for PHASE in ct.static_iter(range(3)):
        if (PHASE == 0 and HAS_LEFT) or (OVERLAP == NOTHING and (PHASE == 1 or (PHASE == 2 and TAIL))):
            begin = ct.static_eval((n_block_min, full_min, full_max)[PHASE])
            end = ct.static_eval((full_min, full_max, n_block_max)[PHASE])
            for n_block in range(begin, end):
                s = scores(
                    q_tile, k, batch, head_kv, n_block, BLOCK_M, BLOCK_N, BLOCK_D, TF32,
                    PHASE != 1 or BLOCK_D != HEAD_DIM, K_LATENCY,
                )  # fmt: skip
                s = finished(
                    s, rows, n_block * BLOCK_N + columns, seqlen_k, left, right, cap_scale, softcap,
                    HAS_LEFT, HAS_RIGHT, SOFTCAP, ACCURATE, PHASE != 1,
                )  # fmt: skip
                p, m_i, shift_i, l_i, alpha = softmax(s, m_i, shift_i, l_i, qk_scale, power_scale, PHASE != 1)
                acc = add_values(
                    acc * alpha, p, v, batch, head_kv, n_block, BLOCK_N, BLOCK_DV, TF32, PHASE != 1 or V_CHECK, V_LATENCY
                )

    # A product that does not need this tile's softmax is begun before it, and runs under it.
    last = n_block_max - 1
    if OVERLAP == SCORES:  # noqa: SIM102
        if full_min <= last:
            full_end = ct.minimum(full_max, last)
            s = scores(q_tile, k, batch, head_kv, full_min, BLOCK_M, BLOCK_N, BLOCK_D, TF32, K_CHECK, K_LATENCY)
            for PHASE in ct.static_iter((1, 2)):
                if PHASE == 1 or TAIL:
                    for n_block in range(
                        ct.static_eval(full_min if PHASE == 1 else full_end), ct.static_eval(full_end if PHASE == 1 else last)
                    ):
                        s_next = scores(
                            q_tile, k, batch, head_kv, n_block + 1, BLOCK_M, BLOCK_N, BLOCK_D, TF32, K_CHECK, K_LATENCY
                        )
                        s = finished(
                            s, rows, n_block * BLOCK_N + columns, seqlen_k, left, right, cap_scale, softcap,
                            HAS_LEFT, HAS_RIGHT, SOFTCAP, ACCURATE, PHASE == 2,
                        )  # fmt: skip
                        p, m_i, shift_i, l_i, alpha = softmax(s, m_i, shift_i, l_i, qk_scale, power_scale, PHASE == 2)
                        acc = add_values(
                            acc * alpha, p, v, batch, head_kv, n_block, BLOCK_N, BLOCK_DV, TF32, V_CHECK, V_LATENCY
                        )
                        s = s_next
            s = finished(
                s, rows, last * BLOCK_N + columns, seqlen_k, left, right, cap_scale, softcap,
                HAS_LEFT, HAS_RIGHT, SOFTCAP, ACCURATE, TAIL,
            )  # fmt: skip
            p, m_i, shift_i, l_i, alpha = softmax(s, m_i, shift_i, l_i, qk_scale, power_scale, TAIL)
            acc = add_values(acc * alpha, p, v, batch, head_kv, last, BLOCK_N, BLOCK_DV, TF32, not EVEN_N or V_CHECK, V_LATENCY)
    if OVERLAP == OUTPUT:  # noqa: SIM102
        if full_min <= last:
            second = full_min + 1
            full_end = ct.maximum(full_max, second)
            s = scores(q_tile, k, batch, head_kv, full_min, BLOCK_M, BLOCK_N, BLOCK_D, TF32, K_CHECK, K_LATENCY)
            s = finished(
                s, rows, full_min * BLOCK_N + columns, seqlen_k, left, right, cap_scale, softcap,
                HAS_LEFT, HAS_RIGHT, SOFTCAP, ACCURATE, TAIL,
            )  # fmt: skip
            p, m_i, shift_i, l_i, alpha = softmax(s, m_i, shift_i, l_i, qk_scale, power_scale, TAIL)
            p = p.astype(v.dtype)
            acc = acc * alpha
            for PHASE in ct.static_iter((1, 2)):
                if PHASE == 1 or TAIL:
                    for n_block in range(
                        ct.static_eval(second if PHASE == 1 else full_end),
                        ct.static_eval(full_end if PHASE == 1 else n_block_max),
                    ):
                        s = scores(q_tile, k, batch, head_kv, n_block, BLOCK_M, BLOCK_N, BLOCK_D, TF32, K_CHECK, K_LATENCY)
                        acc = add_values(acc, p, v, batch, head_kv, n_block - 1, BLOCK_N, BLOCK_DV, TF32, V_CHECK, V_LATENCY)
                        s = finished(
                            s, rows, n_block * BLOCK_N + columns, seqlen_k, left, right, cap_scale, softcap,
                            HAS_LEFT, HAS_RIGHT, SOFTCAP, ACCURATE, PHASE == 2,
                        )  # fmt: skip
                        weights, m_i, shift_i, l_i, alpha = softmax(s, m_i, shift_i, l_i, qk_scale, power_scale, PHASE == 2)
                        p = weights.astype(v.dtype)
                        acc = acc * alpha
            acc = add_values(acc, p, v, batch, head_kv, last, BLOCK_N, BLOCK_DV, TF32, not EVEN_N or V_CHECK, V_LATENCY)

    if HAS_LEFT or HAS_RIGHT:  # noqa: SIM102
        if any_nan(acc):
            acc = repair(
                q_tile, k, v, batch, head_kv, rows, n_block_min * BLOCK_N, ct.minimum(n_block_max * BLOCK_N, seqlen_k),
                m_i, shift_i, left, right, qk_scale, power_scale, cap_scale, softcap,
                BLOCK_M, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT, SOFTCAP, ACCURATE,
            )  # fmt: skip
    # A row without a visible key has sum 0 and keeps its acc of 0.
    total = ct.where(l_i == 0.0, 1.0, l_i)
    o = ct.truediv(acc, total, flush_to_zero=True, rounding_mode=ct.RoundingMode.APPROX)
    ct.store(out, index=(batch, head_q, m_block, 0), tile=o.astype(out.dtype).reshape((1, 1, BLOCK_M, BLOCK_DV)))
    if STORE_LSE:
        ct.store(lse, index=(batch, head_q, m_block), tile=((m_i * qk_scale + ct.log2(l_i)) * LN2).reshape((1, 1, BLOCK_M)))
