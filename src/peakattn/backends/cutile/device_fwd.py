"""Device code of the forward, loaded only to compile: ``fwd.py`` says what it does."""

from __future__ import annotations

import math

import cuda.tile as ct

from peakattn.backends.cutile.tile_ops import (
    LN2,
    any_nan,
    key_blocks,
    load_columns,
    load_part,
    load_rows,
    operand,
    products_with_row,
    program_block,
    scales,
    tanh,
    visible,
)

# Base-2 scores beyond this are rounded by more than half, so that exp2(score - max) could miss 1 by any factor.
EXACT = 2.0**24


def row_scales(m, qk_scale, power_scale):
    return ct.where(ct.abs(m) * qk_scale < EXACT, qk_scale, power_scale)


def new_shift(s, m_i, qk_scale, power_scale, MASK):
    """The running maximum with these scores, the factor of the scores, and what their exponents are shifted by.

    A weight is exp2(s * factor - shift) in one FMA, with shift = max * factor rounded.  The rounding is the same for the
    whole row and cancels, unless it is so large that exp2 of it overflows: such rows use the power of two above qk_scale,
    with which the product is exact.  Their scores differ by more than rounding or not at all.  The last is the shift to
    subtract: 0 where no key was seen yet, since -inf - -inf would be NaN.
    """
    m_new = ct.maximum(m_i, ct.max(s, 1, keepdims=True))
    factor = row_scales(m_new, qk_scale, power_scale)
    shift = m_new * factor
    origin = shift
    if MASK:
        origin = ct.where(m_new == -math.inf, 0.0, shift)
    return m_new, factor, shift, origin


def late_start(m_i, n_block, first_block, qk_scale, STAGGER):
    """m_i as it is, but in the first key block later by STAGGER exponentials, which wait for each other some 30 cycles each.

    Row tiles with a warpgroup each start together, and would always compute their softmax at the same time, with no product
    to run under it.  A tile that starts late stays behind.
    """
    late = ct.zeros(m_i.shape, dtype=ct.float32)
    if n_block == first_block:
        late = late + qk_scale  # a value that the compiler does not know; from the first exponential on it is below 1
        for _ in ct.static_iter(range(STAGGER)):
            late = ct.exp2(late * -0.5, flush_to_zero=True)
    return m_i + 0.0 * late


def row_numbers(m_offset, BLOCK_M):
    return m_offset + ct.arange(BLOCK_M, dtype=ct.int32)[:, None]


def repair(
    q, k, v, out, batch, head_q, head_kv, m_block, rows, first_key, last_key, m_i, shift_i, total, left, right,
    qk_scale, power_scale, cap_scale, softcap, BLOCK_M, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT, SOFTCAP, ACCURATE,
):  # fmt: skip
    """Computes and stores the output with masked keys selected away instead of multiplied by 0.

    It is slow, and takes few columns at a time, so that the loops over tiles need not spare registers for it.
    """
    row_scale = row_scales(m_i, qk_scale, power_scale)
    PART = ct.static_eval(max(min(BLOCK_D, BLOCK_DV) // 2, 16))
    for part in range(BLOCK_DV // PART):
        acc = ct.zeros((BLOCK_M, PART), dtype=ct.float32)
        for key in range(first_key, last_key):
            s = products_with_row(q, k, batch, head_q, head_kv, m_block, key, BLOCK_M, BLOCK_D, PART)
            if SOFTCAP:
                s = softcap * tanh(s * cap_scale, ACCURATE)
            p = ct.exp2(s * row_scale - shift_i, flush_to_zero=True)
            seen = visible(rows, key, last_key, left, right, HAS_LEFT, HAS_RIGHT)
            acc = acc + ct.where(seen, p * load_part(v, batch, head_kv, key, part, 1, PART), 0.0)
        store_output(out, batch, head_q, m_block, part, acc, total, BLOCK_M, PART)


def store_output(out, batch, head_q, m_block, part, acc, total, BLOCK_M, BLOCK_PART):
    o = ct.truediv(acc, total, flush_to_zero=True, rounding_mode=ct.RoundingMode.APPROX).astype(out.dtype)
    ct.store(out, index=(batch, head_q, m_block, part), tile=o.reshape((1, 1, BLOCK_M, BLOCK_PART)))


@ct.kernel
def attention_fwd_kernel(
    q, k, v, out, lse, softmax_scale, softcap, left, right,
    GROUP, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, TILES, BLOCK_M, BLOCK_N, BLOCK_MASKED, ROW_SUMS, KEEP_ROWS, STAGGER,
    HAS_LEFT, HAS_RIGHT, EVEN_N, SOFTCAP, ACCURATE, TF32, STORE_LSE, K_LATENCY, V_LATENCY, BLOCK_AXIS,
):  # fmt: skip
    seqlen_q = q.shape[2]
    seqlen_k = k.shape[2]
    block, head = program_block(BLOCK_AXIS, HAS_RIGHT)
    batch = head // q.shape[1]
    head_q = head % q.shape[1]
    head_kv = head_q // GROUP
    m_offset = block * (TILES * BLOCK_M)
    n_min, full_min, full_max, n_max = key_blocks(
        m_offset, seqlen_q, seqlen_k, left, right, TILES * BLOCK_M, BLOCK_N, BLOCK_MASKED, HAS_LEFT, HAS_RIGHT
    )
    qk_scale, cap_scale = scales(softmax_scale, softcap, SOFTCAP, False)
    power_scale = ct.bitcast((ct.bitcast(qk_scale, ct.int32) & 0x7F800000) + 0x00800000, ct.float32)

    # One of each for every row tile.  Nothing of one tile's may reach another's, or the compiler keeps them in one warpgroup.
    NO_TILES = ct.static_eval(())
    m_blocks, rows, q_tiles, m_i, shift_i, l_i, acc = NO_TILES, NO_TILES, NO_TILES, NO_TILES, NO_TILES, NO_TILES, NO_TILES
    for TILE in ct.static_iter(range(TILES)):
        m_block = block * TILES + TILE
        if TILE > 0:  # one beyond the end, which may not be loaded, computes the last one again
            m_block = ct.minimum(m_block, ct.cdiv(seqlen_q, BLOCK_M) - 1)
        m_blocks += (m_block,)
        if KEEP_ROWS:
            rows += (row_numbers(m_block * BLOCK_M, BLOCK_M),)
        q_tiles += (load_rows(q, batch, head_q, m_block, BLOCK_M, BLOCK_D, True, 0),)
        m_i += (ct.full((BLOCK_M, 1), -math.inf, dtype=ct.float32),)
        shift_i += (ct.full((BLOCK_M, 1), -math.inf, dtype=ct.float32),)
        l_i += (ct.zeros((BLOCK_M, ROW_SUMS), dtype=ct.float32),)
        acc += (ct.zeros((BLOCK_M, BLOCK_DV), dtype=ct.float32),)

    # 0: the left edge of a window, 1: no mask, 2: the right edge or the end of the keys.
    RATIO = ct.static_eval(BLOCK_N // BLOCK_MASKED)
    left_end = full_min * RATIO
    right_begin = ct.maximum(full_max * RATIO, n_min)
    for PHASE in ct.static_iter(range(3)):
        if (PHASE == 0 and HAS_LEFT) or PHASE == 1 or (PHASE == 2 and (HAS_RIGHT or not EVEN_N)):
            begin = ct.static_eval((n_min, full_min, right_begin)[PHASE])
            end = ct.static_eval((left_end, full_max, n_max)[PHASE])
            WIDTH = ct.static_eval(BLOCK_N if PHASE == 1 else BLOCK_MASKED)
            columns = ct.arange(WIDTH, dtype=ct.int32)[None, :]
            for n_block in range(begin, end):
                k_tile = load_columns(k, batch, head_kv, n_block, WIDTH, BLOCK_D, PHASE != 1 or BLOCK_D != HEAD_DIM, K_LATENCY)
                scores = NO_TILES
                for TILE in ct.static_iter(range(TILES)):
                    start = ct.zeros((BLOCK_M, WIDTH), dtype=ct.float32)
                    scores += (ct.mma(operand(q_tiles[TILE], TF32), operand(k_tile, TF32), start),)
                m_old, shift_old, l_old, acc_old = m_i, shift_i, l_i, acc
                m_i, shift_i, l_i, acc = NO_TILES, NO_TILES, NO_TILES, NO_TILES
                for TILE in ct.static_iter(range(TILES)):
                    s = scores[TILE]
                    m_before = m_old[TILE]
                    if SOFTCAP:
                        s = softcap * tanh(s * cap_scale, ACCURATE)
                    if PHASE != 1:
                        first_key = n_block * WIDTH
                        first_row = m_blocks[TILE] * BLOCK_M - first_key
                        rows_seen = rows[TILE] - first_key if KEEP_ROWS else row_numbers(first_row, BLOCK_M)
                        # Where only the keys end, an edge that cuts no row: the tiles' masks must not be one and the same.
                        right_edge = right if HAS_RIGHT else seqlen_k
                        seen = visible(rows_seen, columns, seqlen_k - first_key, left, right_edge, HAS_LEFT, True)
                        s = ct.where(seen, s, -math.inf)
                    elif STAGGER and TILE % 2 == 1:
                        m_before = late_start(m_before, n_block, begin, qk_scale, STAGGER)
                    m_new, factor, shift, origin = new_shift(s, m_before, qk_scale, power_scale, PHASE != 1)
                    alpha = ct.exp2(shift_old[TILE] - origin, flush_to_zero=True)
                    p = ct.exp2(s * factor - origin, flush_to_zero=True)
                    m_i += (m_new,)
                    shift_i += (shift,)
                    l_i += (l_old[TILE] * alpha + ct.sum(p.reshape((BLOCK_M, WIDTH // ROW_SUMS, ROW_SUMS)), 1),)
                    if TILE == 0:
                        CHECK_V = ct.static_eval(PHASE != 1 or BLOCK_DV != HEAD_DIM_V)
                        v_tile = load_rows(v, batch, head_kv, n_block, WIDTH, BLOCK_DV, CHECK_V, V_LATENCY)
                    acc += (ct.mma(operand(p.astype(v.dtype), TF32), operand(v_tile, TF32), acc_old[TILE] * alpha),)

    for TILE in ct.static_iter(range(TILES)):
        m_block = m_blocks[TILE]
        row_sum = ct.sum(l_i[TILE], 1, keepdims=True)
        # A row without a visible key has sum 0 and keeps its acc of 0.
        total = ct.where(row_sum == 0.0, 1.0, row_sum)
        if STORE_LSE:
            # The maximum in the natural base, rounded once, and what the sum is relative to: its shift, rounded too.
            rounding = m_i[TILE] * row_scales(m_i[TILE], qk_scale, power_scale) - shift_i[TILE]
            rounding = ct.where(m_i[TILE] == -math.inf, 0.0, rounding)
            natural = m_i[TILE] if SOFTCAP else m_i[TILE] * softmax_scale
            row_lse = natural + (ct.log2(row_sum) - rounding) * LN2
            ct.store(lse, index=(batch, head_q, m_block), tile=row_lse.reshape((1, 1, BLOCK_M)))
        if HAS_LEFT or HAS_RIGHT:
            if any_nan(acc[TILE]):
                tile_rows = rows[TILE] if KEEP_ROWS else row_numbers(m_block * BLOCK_M, BLOCK_M)
                repair(
                    q, k, v, out, batch, head_q, head_kv, m_block, tile_rows,
                    n_min * BLOCK_MASKED, ct.minimum(n_max * BLOCK_MASKED, seqlen_k),
                    m_i[TILE], shift_i[TILE], total, left, right, qk_scale, power_scale, cap_scale, softcap,
                    BLOCK_M, BLOCK_D, BLOCK_DV, HAS_LEFT, HAS_RIGHT, SOFTCAP, ACCURATE,
                )  # fmt: skip
            else:
                store_output(out, batch, head_q, m_block, 0, acc[TILE], total, BLOCK_M, BLOCK_DV)
        else:
            store_output(out, batch, head_q, m_block, 0, acc[TILE], total, BLOCK_M, BLOCK_DV)
