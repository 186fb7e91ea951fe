"""Scores become P in ``device_fwd_sm90``: cap, mask, online softmax, and P as an operand of the second product.

``fwd`` is the ``Forward``, and ``at`` what a thread of a consumer works on (``Forward.consume``).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from peakattn.backends.cute.device_hopper_ops import exp2, pair

_FAR = 2.0**30  # a scaled score beyond this cannot be subtracted after it was multiplied: its rounding error is too large


@cute.jit
def mask(fwd, at, row, n_block):
    """Scores of keys that a row does not see become -inf, whatever they are."""
    column = n_block * fwd.block_n + 2 * (at.lane % 4)
    for r in cutlass.range_constexpr(2):
        m = fwd.position(at, row, r)
        end = at.sizes.seqlen_k
        if const_expr(at.sizes.right is not None):
            end = cutlass.min(end, m + at.sizes.right + 1)
        end = end - column
        scores = row_of(at.scores, r)
        for i in cutlass.range_constexpr(cute.size(scores)):
            offset = i % 2 + 8 * (i // 2)
            visible = offset < end
            if const_expr(at.sizes.left is not None):
                visible = visible & (offset >= m - at.sizes.left - column)
            scores[i % 2, i // 2] = scores[i % 2, i // 2] if visible else -Float32.inf


@cute.jit
def cap(fwd, at):
    """softcap * tanh(score / softcap) by exp2, in units in which the softmax goes on with the same qk_scale."""
    if const_expr(fwd.softcap):
        for i in cutlass.range_constexpr(cute.size(at.scores)):
            half = 0.5 * exp2(at.scores[i] * at.cap_scale) + 0.5
            at.scores[i] = 1.0 - cute.arch.rcp_approx(half)


@cute.jit
def softmax(at):
    """The online softmax of the scores, exact: new maximum, P, sums, and alpha, by which older output shrinks."""
    far = cutlass.Boolean(False)
    for r in cutlass.range_constexpr(2):
        row = row_of(at.scores, r)
        best = [at.m_i[r], row[0, 0], row[1, 0], row[0, 1]]
        for i in cutlass.range_constexpr(3, cute.size(row)):
            best[i % 4] = cute.arch.fmax(best[i % 4], row[i % 2, i // 2])
        m_new = cute.arch.fmax(cute.arch.fmax(best[0], best[1]), cute.arch.fmax(best[2], best[3]))
        m_new = cute.arch.fmax(m_new, cute.arch.shuffle_sync_bfly(m_new, offset=1))
        m_new = cute.arch.fmax(m_new, cute.arch.shuffle_sync_bfly(m_new, offset=2))
        seen = m_new > -Float32.inf
        base = m_new if seen else Float32(0.0)
        at.alpha[r] = exp2((at.m_i[r] - base) * at.qk_scale)
        at.m_i[r] = m_new
        at.origin[r] = base * at.qk_scale
        far = far | (cute.arch.fmax(at.origin[r], -at.origin[r]) > _FAR)
    origin = at.origin
    if cute.arch.vote_any_sync(far):
        subtract(at)
        for r in cutlass.range_constexpr(2):
            origin[r] = Float32(0.0)
    for r in cutlass.range_constexpr(2):
        at.l_i[r] = at.l_i[r] * at.alpha[r] + exponentials(at, r, at.origin[r])
        # A row that saw nothing yet, or is far out, has no origin that a step could use: its sum shall not fit.
        near = cute.arch.fmax(at.m_i[r], -at.m_i[r]) * at.qk_scale <= _FAR
        at.origin[r] = at.origin[r] if near else -Float32.inf


@cute.jit
def subtract(at):
    """Scores relative to their row's maximum, for rows so far out that the product with qk_scale loses the difference."""
    for r in cutlass.range_constexpr(2):
        row = row_of(at.scores, r)
        base = at.m_i[r] if at.m_i[r] > -Float32.inf else Float32(0.0)
        for i in cutlass.range_constexpr(cute.size(row)):
            row[i % 2, i // 2] = row[i % 2, i // 2] - base


def exponentials(at, r, origin):
    """P of row ``r`` in place of its scores; returns the sum over this thread's columns."""
    row = row_of(at.scores, r)
    sums = [Float32(0.0), Float32(0.0)]
    for j in range(cute.size(row) // 2):
        for c in range(2):
            p = exp2(row[c, j] * at.qk_scale - origin)
            row[c, j] = p
            sums[c] = sums[c] + p
    return sums[0] + sums[1]


@cute.jit
def rescale(at):
    for r in cutlass.range_constexpr(2):
        row = row_of(at.acc, r)
        for i in cutlass.range_constexpr(cute.size(row)):
            row[i % 2, i // 2] = row[i % 2, i // 2] * at.alpha[r]


@cute.jit
def pack(fwd, at):
    """P rounded, as the register operand of the second product: no thread gives or takes anything."""
    words = cute.recast_tensor(at.p, Int32)
    for i in cutlass.range_constexpr(cute.size(words)):
        words[i] = pair(fwd.dtype, at.scores[2 * i], at.scores[2 * i + 1])


def row_of(fragment, r):
    """Row ``r`` of the two, eight apart, of which a thread has columns in an accumulator: [2, half of its columns]."""
    return cute.make_tensor(fragment.iterator + 2 * r, cute.make_layout((2, cute.size(fragment) // 4), stride=(1, 4)))
