"""Device code that the cuTile kernels share: block order, bounds of the mask over tiles, the mask rule, tanh."""

from __future__ import annotations

import cuda.tile as ct

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
# A tile that is not checked has nothing to pad, and tileiras 13.4 fails on the two together.
PADDING = {True: ct.PaddingMode.ZERO, False: ct.PaddingMode.UNDETERMINED}


def program_block(BLOCK_AXIS, LAST_FIRST):
    """This block's index and head, on a grid that ``common.grid`` made."""
    HEAD_AXIS = ct.static_eval(1 - BLOCK_AXIS)
    block = ct.bid(BLOCK_AXIS)
    if LAST_FIRST:
        block = ct.num_blocks(BLOCK_AXIS) - 1 - block
    return block, ct.bid(2) * ct.num_blocks(HEAD_AXIS) + ct.bid(HEAD_AXIS)


def key_blocks(m_offset, seqlen_q, seqlen_k, left, right, BLOCK_M, BLOCK_N, BLOCK_MASKED, HAS_LEFT, HAS_RIGHT):
    """Edges of the key blocks that the rows from m_offset see: n_min, full_min, full_max, n_max.

    Blocks full_min to full_max, of BLOCK_N keys, are seen whole by every row.  Those on both sides of them are masked, and
    counted in blocks of BLOCK_MASKED keys, which divides BLOCK_N.
    """
    last_row = ct.minimum(m_offset + BLOCK_M, seqlen_q) - 1
    end = seqlen_k
    full_end = seqlen_k
    if HAS_RIGHT:
        end = ct.minimum(end, ct.maximum(last_row + right + 1, 0))
        full_end = ct.minimum(full_end, ct.maximum(m_offset + right + 1, 0))
    start = 0
    full_start = 0
    if HAS_LEFT:
        start = ct.maximum(m_offset - left, 0)
        full_start = ct.maximum(last_row - left, 0)
    n_min = start // BLOCK_MASKED
    n_max = ct.maximum(ct.cdiv(end, BLOCK_MASKED), n_min)
    whole = n_max // ct.static_eval(BLOCK_N // BLOCK_MASKED)
    full_min = ct.minimum(ct.cdiv(full_start, BLOCK_N), whole)
    full_max = ct.maximum(ct.minimum(full_end // BLOCK_N, whole), full_min)
    return n_min, full_min, full_max, n_max


def visible(rows, keys, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT):
    """The mask rule and the end of the keys, for rows and keys that broadcast against each other."""
    last = seqlen_k - 1
    if HAS_RIGHT:
        last = ct.minimum(rows + right, last)
    seen = keys <= last
    if HAS_LEFT:
        seen = seen & (keys >= rows - left)
    return seen


def scales(softmax_scale, softcap, SOFTCAP, NATURAL):
    """What makes exponents of scores, in base 2 or natural, and what the scores are multiplied by before tanh.

    Capped scores have the user's scale inside them already.
    """
    base = ct.static_eval(1.0 if NATURAL else LOG2E)
    if SOFTCAP:
        return ct.full((), base, dtype=ct.float32), softmax_scale / softcap
    return softmax_scale * base, softmax_scale


def tanh(x, ACCURATE):
    """Saturates without NaN for any finite x. ACCURATE keeps the relative accuracy of float32 near 0."""
    grown = 1.0 + ct.exp2(x * (2.0 * LOG2E), flush_to_zero=True)
    y = 1.0 - ct.truediv(2.0, grown, flush_to_zero=True, rounding_mode=ct.RoundingMode.APPROX)
    if ACCURATE:
        x2 = x * x
        series = x * (1.0 + x2 * (-1.0 / 3.0 + x2 * (2.0 / 15.0 + x2 * (-17.0 / 315.0 + x2 * (62.0 / 2835.0)))))
        y = ct.where(ct.abs(x) < 0.25, series, y)
    return y


def operand(tile, TF32):
    """A tile as a product takes it: float32 is multiplied exactly, unless TF32 allows less."""
    if TF32:
        return tile.astype(ct.tfloat32)
    return tile


def load_rows(array, batch, head, block, BLOCK, BLOCK_DIM, CHECK, LATENCY):
    """Tile ``block`` of one head's rows, with zeros beyond the tensor: [BLOCK, BLOCK_DIM]."""
    return ct.load(
        array,
        index=(batch, head, block, 0),
        shape=(1, 1, BLOCK, BLOCK_DIM),
        padding_mode=ct.static_eval(PADDING[CHECK]),
        check_bounds=CHECK,
        latency=ct.static_eval(LATENCY or None),
    ).reshape((BLOCK, BLOCK_DIM))


def load_columns(array, batch, head, block, BLOCK, BLOCK_DIM, CHECK, LATENCY):
    """The same tile, transposed by the order of the load: [BLOCK_DIM, BLOCK]."""
    return ct.load(
        array,
        index=(batch, head, 0, block),
        shape=(1, 1, BLOCK_DIM, BLOCK),
        order=(0, 1, 3, 2),
        padding_mode=ct.static_eval(PADDING[CHECK]),
        check_bounds=CHECK,
        latency=ct.static_eval(LATENCY or None),
    ).reshape((BLOCK_DIM, BLOCK))


def load_part(array, batch, head, block, part, BLOCK, BLOCK_PART):
    """``BLOCK_PART`` columns of some rows, in float32 and without TMA: [BLOCK, BLOCK_PART]."""
    return ct.load(
        array, index=(batch, head, block, part), shape=(1, 1, BLOCK, BLOCK_PART), padding_mode=ct.PaddingMode.ZERO,
        allow_tma=False,
    ).reshape((BLOCK, BLOCK_PART)).astype(ct.float32)  # fmt: skip


def products_with_row(x, y, batch, head_x, head_y, block, row, BLOCK, BLOCK_DIM, PART):
    """Products of a block of x's rows with one row of y, ``PART`` columns at a time: [BLOCK, 1]."""
    products = ct.zeros((BLOCK, 1), dtype=ct.float32)
    for i in range(BLOCK_DIM // PART):
        x_part = load_part(x, batch, head_x, block, i, BLOCK, PART)
        products = products + ct.sum(x_part * load_part(y, batch, head_y, row, i, 1, PART), 1, keepdims=True)
    return products


def any_nan(tile):
    """Whether an element may be NaN: along the rows first, where a thread has several, since the compiler takes axes in order.

    A sum of infinities of both signs is taken for one too.
    """
    rows = ct.isnan(ct.sum(tile, 1, keepdims=True)).astype(ct.int32)
    return ct.max(rows) > 0
