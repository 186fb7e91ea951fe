"""Device code of ``triton.fwd``; ``fwd.py`` says what it does and why."""

from __future__ import annotations

import triton
import triton.language as tl

from peakattn.backends.triton.tile_ops import (
    LAYOUT_NUMBERS,
    LN2,
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

# Base-2 scores beyond this are rounded by more than half, so that exp2(score - max) could miss 1 by any factor.
_EXACT = tl.constexpr(2.0**24)


@triton.jit
def _row_scale(m, qk_scale, power_scale):
    return tl.where(tl.abs(m) * qk_scale < _EXACT, qk_scale, power_scale)


@triton.jit
def _softmax(s, m_i, shift_i, l_i, qk_scale, power_scale, MASK: tl.constexpr):
    """Weights of a score tile, and the running maximum, its scaled value, the sum, and the factor for what came before.

    The weight is exp2(s * qk_scale - shift) in one FMA, with shift = max * qk_scale rounded.  The rounding is the same
    for the whole row and cancels, unless it is so large that exp2 of it overflows: such rows use the power of two above
    qk_scale, with which the product is exact.  Their scores differ by more than rounding or not at all.
    """
    m_new = tl.maximum(m_i, tl.max(s, 1))
    row_scale = _row_scale(m_new, qk_scale, power_scale)
    shift = m_new * row_scale
    origin = shift
    if MASK:
        origin = tl.where(m_new == float("-inf"), 0.0, shift)
    p = tl.exp2(s * row_scale[:, None] - origin[:, None])
    alpha = tl.exp2(shift_i - origin)
    return p, m_new, shift, l_i * alpha + tl.sum(p, 1), alpha


@triton.jit
def _repair(
    q,
    k,
    v,
    stride_qs,
    stride_qd,
    stride_ks,
    stride_kd,
    stride_vs,
    stride_vd,
    m_i,
    shift_i,
    m_offset,
    seqlen_q,
    first_key,
    last_key,
    offset,
    window_left,
    window_right,
    qk_scale,
    power_scale,
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
    """The unnormalised output with masked keys selected away instead of multiplied by 0."""
    rows = m_offset + tl.arange(0, BLOCK_M)
    q_tile = load_tile(None, q, stride_qs, stride_qd, 0, 0, m_offset, seqlen_q, BLOCK_M, HEAD_DIM, BLOCK_D, True).to(tl.float32)
    row_scale = _row_scale(m_i, qk_scale, power_scale)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for key in tl.range(first_key, last_key, num_stages=1):
        k_row = load_row(k, stride_ks, stride_kd, key, HEAD_DIM, BLOCK_D)
        v_row = load_row(v, stride_vs, stride_vd, key, HEAD_DIM_V, BLOCK_DV)
        s = tl.sum(q_tile * k_row[None, :], 1)
        if SOFTCAP:
            s = softcap * tanh(s * cap_scale, False)
        p = tl.exp2(s * row_scale - shift_i)
        seen = visible(rows, key, offset, window_left, window_right, HAS_LEFT, HAS_RIGHT)
        acc += tl.where(seen[:, None], p[:, None] * v_row[None, :], 0.0)
    return acc


@triton.jit(do_not_specialize=LAYOUT_NUMBERS)
def attention_fwd_kernel(
    q,
    k,
    v,
    out,
    lse,
    q_tma,
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
    stride_ob,
    stride_os,
    stride_oh,
    stride_od,
    seqlen_q,
    seqlen_k,
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
    OVERLAP: tl.constexpr,
):
    m_block, head = program_block(num_m_blocks, num_heads, section, HAS_RIGHT)
    batch = head // num_heads_q
    head_q = head % num_heads_q
    head_kv = head_q // GROUP
    m_offset = m_block * BLOCK_M
    q += batch.to(tl.int64) * stride_qb + head_q.to(tl.int64) * stride_qh
    k += batch.to(tl.int64) * stride_kb + head_kv.to(tl.int64) * stride_kh
    v += batch.to(tl.int64) * stride_vb + head_kv.to(tl.int64) * stride_vh
    out += batch.to(tl.int64) * stride_ob + head_q.to(tl.int64) * stride_oh
    n_block_min, full_min, full_max, n_block_max = key_blocks(
        m_offset, seqlen_q, seqlen_k, offset, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    # Scores in base 2 are s * qk_scale; capped scores have the user's scale inside them already.
    qk_scale = tl.full([], LOG2E, tl.float32) if SOFTCAP else softmax_scale * LOG2E
    cap_scale = softmax_scale / softcap if SOFTCAP else softmax_scale
    power_scale = ((qk_scale.to(tl.int32, bitcast=True) & 0x7F800000) + 0x00800000).to(tl.float32, bitcast=True)

    rows = m_offset + tl.arange(0, BLOCK_M)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    shift_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    q_tile = load_tile(q_tma, q, stride_qs, stride_qd, batch, head_q, m_offset, seqlen_q, BLOCK_M, HEAD_DIM, BLOCK_D, True)

    last = n_block_max
    if OVERLAP:
        last = tl.maximum(n_block_max - 1, n_block_min)
        full_min = tl.minimum(full_min, last)
        full_max = tl.minimum(full_max, last)
        k_tile = load_tile(
            k_tma, k, stride_ks, stride_kd, batch, head_kv, n_block_min * BLOCK_N, seqlen_k, BLOCK_N, HEAD_DIM, BLOCK_D, True
        )
        s_next = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)
    # 0: the left edge of a window, 1: no mask, 2: the right edge or the end of the keys, 3: the last block under OVERLAP.
    for PHASE in tl.static_range(4):
        if (PHASE == 0 and HAS_LEFT) or PHASE == 1 or (PHASE == 2 and (HAS_RIGHT or not EVEN_N)) or (PHASE == 3 and OVERLAP):
            begin = n_block_min if PHASE == 0 else full_min if PHASE == 1 else full_max if PHASE == 2 else last
            end = full_min if PHASE == 0 else full_max if PHASE == 1 else last if PHASE == 2 else n_block_max
            for n_block in tl.range(begin, end):
                n_offset = n_block * BLOCK_N
                if OVERLAP:
                    s = s_next
                if not OVERLAP or PHASE != 3:
                    k_tile = load_tile(
                        k_tma,
                        k,
                        stride_ks,
                        stride_kd,
                        batch,
                        head_kv,
                        n_offset + BLOCK_N if OVERLAP else n_offset,
                        seqlen_k,
                        BLOCK_N,
                        HEAD_DIM,
                        BLOCK_D,
                        not EVEN_N and (OVERLAP or PHASE != 1),
                    )
                    s_next = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)
                if not OVERLAP:
                    s = s_next
                if SOFTCAP:
                    s = softcap * tanh(s * cap_scale, q_tile.dtype == tl.float32)
                if PHASE != 1 and (HAS_LEFT or HAS_RIGHT or not EVEN_N):
                    keys = n_offset + tl.arange(0, BLOCK_N)
                    seen = (keys < seqlen_k)[None, :]
                    if HAS_LEFT or HAS_RIGHT:
                        seen &= visible(rows[:, None], keys[None, :], offset, window_left, window_right, HAS_LEFT, HAS_RIGHT)
                    s = tl.where(seen, s, float("-inf"))
                p, m_i, shift_i, l_i, alpha = _softmax(s, m_i, shift_i, l_i, qk_scale, power_scale, PHASE != 1)
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
                acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)

    if HAS_LEFT or HAS_RIGHT:  # noqa: SIM102
        if any_nan(acc):
            acc = _repair(
                q,
                k,
                v,
                stride_qs,
                stride_qd,
                stride_ks,
                stride_kd,
                stride_vs,
                stride_vd,
                m_i,
                shift_i,
                m_offset,
                seqlen_q,
                n_block_min * BLOCK_N,
                tl.minimum(n_block_max * BLOCK_N, seqlen_k),
                offset,
                window_left,
                window_right,
                qk_scale,
                power_scale,
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
    # A row without a visible key has sum 0 and keeps its acc of 0.
    acc = acc * (1.0 / tl.where(l_i == 0.0, 1.0, l_i))[:, None]
    store_tile(out, stride_os, stride_od, m_offset, seqlen_q, acc, BLOCK_M, HEAD_DIM_V, BLOCK_DV)
    if lse is not None:
        # The maximum in the natural base, rounded once, and what the sum is relative to: the maximum's shift, rounded too.
        rounding = m_i * _row_scale(m_i, qk_scale, power_scale) - shift_i
        rounding = tl.where(m_i == float("-inf"), 0.0, rounding)
        natural = 1.0 if SOFTCAP else softmax_scale
        lse_rows = lse + head.to(tl.int64) * seqlen_q + rows
        tl.store(lse_rows, m_i * natural + (tl.log2(l_i) - rounding) * LN2, mask=rows < seqlen_q)
