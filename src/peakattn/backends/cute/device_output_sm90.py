"""How a tile of ``device_fwd_sm90`` ends: output and lse, and rows that masked values of V spoilt once more.

``fwd`` is the ``Forward``, and ``at`` what a thread of a consumer works on (``Forward.consume``).
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp

from peakattn.backends.cute.device_hopper_ops import CUTE_DTYPES, exp2, pair, release
from peakattn.backends.cute.device_softmax_sm90 import rescale

_LN_2 = math.log(2.0)
# Named barriers: one for all consumers, and one a consumer for its own 128 threads. Those before are for turns.
_ALL, _OWN = 4, 5


@cute.jit
def finish(fwd, at, tma_out, mO, raw, lse, sO, m_offset, row, m_block, head, batch, thread):
    """Output and lse of this consumer's rows."""
    kind = CUTE_DTYPES[fwd.dtype]
    sizes = at.sizes
    for r in cutlass.range_constexpr(2):
        total = at.l_i[r]
        total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
        total = total + cute.arch.shuffle_sync_bfly(total, offset=2)
        at.alpha[r] = 0.0 if total == 0.0 else cute.arch.rcp_approx(total)
        if const_expr(lse is not None):
            m = fwd.position(at, row, r)
            if at.lane % 4 == 0 and fwd.is_row(at.first_row + 8 * r, m, sizes):
                place = fwd.place_of_lse(at.first_row + 8 * r, m, head, batch, sizes)
                value = (at.m_i[r] * at.qk_scale + cute.math.log2(total, fastmath=True)) * _LN_2
                cute.make_tensor(lse + place, cute.make_layout(1))[0] = value if total != 0.0 else -Float32.inf
    rescale(at)
    rO = cute.make_rmem_tensor(at.acc.layout, kind)
    words = cute.recast_tensor(rO, Int32)
    for i in cutlass.range_constexpr(cute.size(words)):
        words[i] = pair(fwd.dtype, at.acc[2 * i], at.acc[2 * i + 1])
    own = _OWN + at.consumer
    # Nothing may still be read where the output goes: the output before it, or V by another consumer.
    if const_expr(fwd.separate_out):
        if at.warp_in_group == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=own, number_of_threads=128)
    else:
        cute.arch.barrier(barrier_id=_ALL, number_of_threads=128 * fwd.num_consumers)
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), kind)
    copy = cute.make_tiled_copy_C(atom, at.mma_pv).get_slice(thread)
    cute.copy(atom, copy.retile(rO), copy.partition_D(sO[None, None, at.consumer]))
    if const_expr(sizes.left is not None or sizes.right is not None):
        spoilt = Float32(0.0)
        for i in cutlass.range_constexpr(cute.size(at.acc)):
            spoilt = spoilt + at.acc[i] * 0.0
        if cute.arch.vote_any_sync(spoilt != 0.0):  # true for NaN
            repair(fwd, at, raw, lse, sO, m_offset, head, batch)
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=own, number_of_threads=128)
    if at.warp_in_group == 0:
        n = m_block * fwd.num_consumers + at.consumer
        gO, tO, n = fwd.partition_rows(tma_out, mO, sO, head, batch, n)
        cute.copy(tma_out, tO[None, at.consumer], gO[None, n])
        cute.arch.cp_async_bulk_commit_group()
        if const_expr(fwd.several and not fwd.separate_out):
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            release(at.bars.out_empty, at.lane)


@cute.jit
def repair(fwd, at, raw, lse, sO, m_offset, head, batch):
    """This warp's rows once more, key by key over visible keys alone: slow, and complete in itself.

    P is 0 where a key is masked, and 0 * V is NaN when V holds NaN or inf there.
    """
    kind = CUTE_DTYPES[fwd.dtype]
    sizes = at.sizes
    head_kv = head // sizes.group
    cute.arch.sync_warp()
    for i in cutlass.range(16, unroll=1):
        local = at.warp_in_group * 16 + i
        m = m_offset + local // fwd.heads_per_tile if const_expr(fwd.heads_per_tile > 1) else m_offset + local
        if fwd.is_row(local, m, sizes):
            first, end = Int32(0), sizes.seqlen_k
            if const_expr(sizes.left is not None):
                first = cutlass.max(m - sizes.left, 0)
            if const_expr(sizes.right is not None):
                end = cutlass.min(end, m + sizes.right + 1)
            q_row, out_row = (cute.make_rmem_tensor(d // 32, Float32) for d in (fwd.dim, fwd.dim_v))
            load_row(q_row, raw[0], batch, m, fwd.query_head(local, head), sizes.head_dim, at.lane)
            out_row.fill(0.0)
            m_i, l_i = -Float32.inf, Float32(0.0)
            for key in cutlass.range(first, end, unroll=1):
                k_row, v_row = (cute.make_rmem_tensor(d // 32, Float32) for d in (fwd.dim, fwd.dim_v))
                load_row(k_row, raw[1], batch, key, head_kv, sizes.head_dim, at.lane)
                load_row(v_row, raw[2], batch, key, head_kv, sizes.head_dim_v, at.lane)
                score = Float32(0.0)
                for e in cutlass.range_constexpr(fwd.dim // 32):
                    score = score + q_row[e] * k_row[e]
                for distance in cutlass.range_constexpr(5):
                    score = score + cute.arch.shuffle_sync_bfly(score, offset=1 << distance)
                if const_expr(fwd.softcap):
                    score = 1.0 - cute.arch.rcp_approx(0.5 * exp2(score * at.cap_scale) + 0.5)
                m_new = cute.arch.fmax(m_i, score)
                base = m_new if m_new > -Float32.inf else Float32(0.0)
                p, alpha = exp2((score - base) * at.qk_scale), exp2((m_i - base) * at.qk_scale)
                l_i = l_i * alpha + p
                for e in cutlass.range_constexpr(fwd.dim_v // 32):
                    out_row[e] = out_row[e] * alpha + p * v_row[e]
                m_i = m_new
            inverse = Float32(0.0) if l_i == 0.0 else cute.arch.rcp_approx(l_i)
            for e in cutlass.range_constexpr(fwd.dim_v // 32):
                sO[local, at.lane + 32 * e, at.consumer] = kind(out_row[e] * inverse)
            if const_expr(lse is not None):
                if at.lane == 0:
                    place = fwd.place_of_lse(local, m, head, batch, sizes)
                    value = (m_i * at.qk_scale + cute.math.log2(l_i, fastmath=True)) * _LN_2
                    cute.make_tensor(lse + place, cute.make_layout(1))[0] = value if l_i != 0.0 else -Float32.inf


@cute.jit
def load_row(into, source, batch, row, head, width, lane):
    """One row of a tensor in global memory, spread over the lanes of a warp; zero past its width."""
    pointer, batch_stride, row_stride, head_stride = source
    offset = Int64(batch) * batch_stride + Int64(row) * row_stride + Int64(head) * head_stride
    for e in cutlass.range_constexpr(cute.size(into)):
        column = lane + 32 * e
        value = cute.make_tensor(pointer + (offset + cutlass.min(column, width - 1)), cute.make_layout(1))[0]
        into[e] = Float32(value) if column < width else Float32(0.0)
