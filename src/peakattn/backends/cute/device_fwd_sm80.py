"""Device code of ``cute.fwd_sm80``: FlashAttention-2 with cp.async, ldmatrix and mma.sync m16n8k16.

A block owns ``block_m`` query rows of one head, a warp 16 rows of each ``num_threads / 2``.  Q, K and V tiles lie in
shared memory in rows of 64 or 32 elements, swizzled so that ldmatrix meets no bank twice.  There is one tile of K and
one of V: V arrives under Q K^T, and the next K under the softmax and P V.  Fragments of the next k-step come out of
shared memory while the tensor cores work on this one.  Nothing outside the tensors is read: cp.async writes zeros for
rows and columns beyond them.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import LoadCacheMode, cpasync, warp
from cutlass.memory import SmemAllocator

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
VECTOR = 8  # elements of one 16-byte access
WARP = 32
PIECE = 4  # steps of 16 columns that are read at a time
DTYPES = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16}

# Base-2 scores beyond this are rounded by more than half, so that exp2(score - max) could miss 1 by any factor.
_EXACT = 2.0**24


@dataclass(frozen=True)
class Forward:
    """One variant of the kernel; the constants are those of ``fwd_sm80.launches``."""

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    block_m: int
    block_n: int
    num_threads: int
    shared_bytes: int
    has_left: bool
    has_right: bool
    softcap: bool

    @cute.jit
    def __call__(self, *args):
        self.attention_fwd_kernel(*args).launch(grid=(1, 1, 1), block=(self.num_threads, 1, 1), smem=self.shared_bytes)

    @cute.kernel
    def attention_fwd_kernel(
        self, q, k, v, out, lse, softmax_scale, softcap,
        stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
        stride_ob, stride_os, stride_oh, seqlen_q, seqlen_k, num_heads_q, group, num_heads, num_m_blocks, section,
        offset, window_left, window_right,
    ):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        lane = tid % WARP
        kind = DTYPES[self.dtype]
        dim, dim_v, dim_pv = padded(self.head_dim, 32), padded(self.head_dim_v, 32), padded(self.head_dim_v, 16)
        m_block, head = program_block(num_m_blocks, num_heads, section, self.has_right)
        batch = head // num_heads_q
        head_q = head - batch * num_heads_q
        head_kv = head_q // group
        m_offset = m_block * self.block_m

        # One head of each tensor, [seqlen, padded head_dim]; nothing is read or written beyond the real sizes.
        mQ = head_tensor(q, batch, head_q, stride_qb, stride_qh, stride_qs, seqlen_q, dim)
        mK = head_tensor(k, batch, head_kv, stride_kb, stride_kh, stride_ks, seqlen_k, dim)
        mV = head_tensor(v, batch, head_kv, stride_vb, stride_vh, stride_vs, seqlen_k, dim_v)
        mO = head_tensor(out, batch, head_q, stride_ob, stride_oh, stride_os, seqlen_q, dim_v)

        smem = SmemAllocator().allocate_array(kind, self.shared_bytes // 2, byte_alignment=128)
        sQ = cute.make_tensor(smem, tile_layout(self.block_m, dim))
        sK = cute.make_tensor(smem + self.block_m * dim, tile_layout(self.block_n, dim))
        sV = cute.make_tensor(smem + (self.block_m + self.block_n) * dim, tile_layout(self.block_n, dim_v))
        sO = cute.make_tensor(smem, tile_layout(self.block_m, dim_v))
        sVt = cute.composition(sV, cute.make_layout((dim_v, self.block_n), stride=(self.block_n, 1)))

        num_warps = self.num_threads // WARP
        op = warp.MmaF16BF16Op(kind, Float32, (16, 8, 16))
        mma = cute.make_tiled_mma(op, (num_warps, 1, 1), permutation_mnk=(16 * num_warps, 16, 16))
        thr_mma = mma.get_slice(tid)
        tSrQ = thr_mma.make_fragment_A(thr_mma.partition_A(sQ))
        tSrK = thr_mma.make_fragment_B(thr_mma.partition_B(sK))
        tOrV = thr_mma.make_fragment_B(thr_mma.partition_B(sVt))
        rows_of = cute.make_tiled_copy_A(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), kind), mma).get_slice(tid)
        keys_of = cute.make_tiled_copy_B(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), kind), mma).get_slice(tid)
        values_of = cute.make_tiled_copy_B(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), kind), mma).get_slice(tid)
        read_q = (rows_of, rows_of.partition_S(sQ), rows_of.retile(tSrQ))
        read_k = (keys_of, keys_of.partition_S(sK), keys_of.retile(tSrK))
        read_v = (values_of, values_of.partition_S(sVt), values_of.retile(tOrV))

        # Score and output fragments, once as the tensor cores take them and once as [rows, columns] of this thread.
        acc = cute.make_rmem_tensor(thr_mma.partition_shape_C((self.block_m, dim_pv)), Float32)
        acc.fill(0.0)
        acc_rows = rows_and_columns(acc)
        cS = rows_and_columns(thr_mma.partition_C(cute.make_identity_tensor((self.block_m, self.block_n))))
        num_rows = cute.size(acc_rows, mode=[0])
        m_i = cute.make_rmem_tensor(num_rows, Float32)
        shift_i = cute.make_rmem_tensor(num_rows, Float32)
        l_i = cute.make_rmem_tensor(num_rows, Float32)
        for r in range_constexpr(num_rows):
            m_i[r], shift_i[r], l_i[r] = -Float32.inf, -Float32.inf, Float32(0.0)

        # Scores in base 2 are s * qk_scale; capped scores have the user's scale inside them already.
        qk_scale, cap_scale = softmax_scale * LOG2E, Float32(0.0)
        if const_expr(self.softcap):
            qk_scale, cap_scale = Float32(LOG2E), softmax_scale / softcap
        scales = (qk_scale, next_power_of_two(qk_scale), cap_scale, softcap)

        copy_qk, copy_v = self.tile_copy(kind, dim), self.tile_copy(kind, dim_v)
        n_block_min, full_min, full_max, n_block_max = self.key_blocks(
            m_offset, seqlen_q, seqlen_k, offset, window_left, window_right
        )
        load_tile(copy_qk, tid, mQ, sQ, m_block, seqlen_q, self.head_dim)
        load_tile(copy_qk, tid, mK, sK, n_block_min, seqlen_k, self.head_dim)
        cute.arch.cp_async_commit_group()
        # The left edge of a window, then blocks that every row sees whole, then the right edge or the end of the keys.
        for phase in range_constexpr(3):
            if const_expr(phase > 0 or self.has_left):
                begin, end = ((n_block_min, full_min), (full_min, full_max), (full_max, n_block_max))[phase]
                for n_block in cutlass.range(begin, end, unroll=1):
                    cute.arch.cp_async_wait_group(0)
                    cute.arch.barrier()  # K is here, and no warp reads the last V any more
                    load_tile(copy_v, tid, mV, sV, n_block, seqlen_k, self.head_dim_v)
                    cute.arch.cp_async_commit_group()
                    scores = cute.make_rmem_tensor(thr_mma.partition_shape_C((self.block_m, self.block_n)), Float32)
                    scores.fill(0.0)
                    gemm(mma, scores, tSrQ, tSrK, read_q, read_k, padded(self.head_dim, 16) // 16)
                    cute.arch.cp_async_wait_group(0)
                    cute.arch.barrier()  # V is here, and no warp reads this K any more
                    if n_block + 1 < n_block_max:
                        load_tile(copy_qk, tid, mK, sK, n_block + 1, seqlen_k, self.head_dim)
                    cute.arch.cp_async_commit_group()
                    seen = None
                    if const_expr(phase != 1):
                        seen = (cS, n_block * self.block_n, m_offset + offset, seqlen_k, window_left, window_right)
                    self.softmax(rows_and_columns(scores), acc_rows, m_i, shift_i, l_i, scales, seen)
                    weights = cute.make_rmem_tensor_like(scores, kind)
                    weights.store(scores.load().to(kind))
                    gemm(mma, acc, as_operand(weights), tOrV, None, read_v, self.block_n // 16)

        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()  # the output takes the place of the tiles
        for r in range_constexpr(num_rows):
            l_i[r] = cute.arch.warp_reduction(l_i[r], lambda a, b: a + b, threads_in_group=4)
            total = select(l_i[r] == 0.0, Float32(1.0), l_i[r])  # no visible key: its accumulator is 0
            acc_rows[r, None].store(acc_rows[r, None].load() * (1.0 / total))
        tOsO = thr_mma.partition_C(sO)
        rounded = cute.make_rmem_tensor_like(acc, kind)
        rounded.store(acc.load().to(kind))
        for n in range_constexpr(cute.size(acc, mode=[2])):
            cute.autovec_copy(rounded[None, None, n], tOsO[None, None, n])
        if const_expr(self.has_left or self.has_right):
            mask = (m_offset + offset, seqlen_k, window_left, window_right)
            self.repair(acc_rows, cS, m_i, l_i, scales, mask, (mQ, mK, mV, sO), m_offset, seqlen_q, lane)
        if const_expr(lse is not None):
            for r in range_constexpr(num_rows):
                row = m_offset + cS[r, 0][0]
                if lane % 4 == 0 and row < seqlen_q:
                    lse_row = cute.make_tensor(lse + (Int64(head) * seqlen_q + row), cute.make_layout(1))
                    lse_row[0] = (m_i[r] * qk_scale + cute.math.log2(l_i[r])) * LN2
        cute.arch.barrier()
        store_tile(self.tile_copy(kind, dim_v, False), tid, sO, mO, m_block, seqlen_q, self.head_dim_v)

    def tile_copy(self, kind, dim, to_shared=True):
        """Copies tiles of ``dim`` columns in 16-byte vectors, neighbouring threads along a row."""
        across = (64 if dim % 64 == 0 else 32) // VECTOR
        op = cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL) if to_shared else cute.nvgpu.CopyUniversalOp()
        atom = cute.make_copy_atom(op, kind, num_bits_per_copy=128)
        threads = cute.make_layout((self.num_threads // across, across), stride=(across, 1))
        return cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, VECTOR)))

    @cute.jit
    def key_blocks(self, m_offset, seqlen_q, seqlen_k, offset, window_left, window_right):
        """Key blocks that the rows from m_offset see: n_block_min <= full_min <= full_max <= n_block_max.

        Between full_min and full_max every row sees every key, so nothing is masked there.
        """
        block_n = self.block_n
        first = m_offset + offset
        last = cutlass.min(m_offset + self.block_m, seqlen_q) - 1 + offset
        start, full_start, end, full_end = Int32(0), Int32(0), seqlen_k, seqlen_k
        if const_expr(self.has_right):
            end = cutlass.min(end, cutlass.max(last + window_right + 1, 0))
            full_end = cutlass.min(full_end, cutlass.max(first + window_right + 1, 0))
        if const_expr(self.has_left):
            start = cutlass.max(first - window_left, 0)
            full_start = cutlass.max(last - window_left, 0)
        n_block_min = start // block_n
        n_block_max = cutlass.max(cute.ceil_div(end, block_n), n_block_min)
        full_min = cutlass.min(cute.ceil_div(full_start, block_n), n_block_max)
        full_max = cutlass.max(cutlass.min(full_end // block_n, n_block_max), full_min)
        return n_block_min, full_min, full_max, n_block_max

    @cute.jit
    def visible(self, row, position, seqlen_k, window_left, window_right):
        """The half-open range of keys that a row sees; row 0 of this block is at key ``position``."""
        first, last = Int32(0), seqlen_k
        if const_expr(self.has_left):
            first = cutlass.max(position + row - window_left, 0)
        if const_expr(self.has_right):
            last = cutlass.min(position + row + window_right + 1, seqlen_k)
        return first, last

    @cute.jit
    def softmax(self, scores, acc, m_i, shift_i, l_i, scales, seen):
        """Turns scores into weights, and brings the maximum, the sum and acc up to them.

        The weight is exp2(s * scale - shift) in one FMA, with shift = max * scale rounded.  The rounding is the same for
        the whole row and cancels, unless it is so large that exp2 of it overflows: such rows use the power of two above
        qk_scale, with which the product is exact.  Their scores differ by more than rounding or not at all.
        """
        qk_scale, power_scale, cap_scale, softcap = scales
        for r in range_constexpr(cute.size(scores, mode=[0])):
            if const_expr(self.softcap):
                for c in range_constexpr(cute.size(scores, mode=[1])):
                    scores[r, c] = softcap * tanh(scores[r, c] * cap_scale)
            if const_expr(seen is not None):
                coordinates, n_offset, *mask = seen
                first, last = self.visible(coordinates[r, 0][0], *mask)
                for c in range_constexpr(cute.size(scores, mode=[1])):
                    key = coordinates[r, c][1]
                    hidden = key >= last - n_offset
                    if const_expr(self.has_left):
                        hidden = hidden | (key < first - n_offset)
                    scores[r, c] = select(hidden, -Float32.inf, scores[r, c])
            s = scores[r, None].load()
            m = s.reduce(cute.ReductionOp.MAX, m_i[r], 0)
            m = cute.arch.warp_reduction(m, cute.arch.fmax, threads_in_group=4)
            scale = row_scale(m, qk_scale, power_scale)
            shift = m * scale
            origin = shift
            if const_expr(seen is not None):
                origin = select(m == -Float32.inf, Float32(0.0), shift)
            p = cute.math.exp2(s * scale - origin, fastmath=True)
            alpha = cute.math.exp2(shift_i[r] - origin, fastmath=True)
            scores[r, None].store(p)
            acc[r, None].store(acc[r, None].load() * alpha)
            m_i[r], shift_i[r] = m, shift
            l_i[r] = p.reduce(cute.ReductionOp.ADD, l_i[r] * alpha, 0)

    @cute.jit
    def repair(self, acc, coordinates, m_i, l_i, scales, mask, tensors, m_offset, seqlen_q, lane):
        """Computes rows that ended with a NaN again, key by key from the visible ones alone, into sO.

        A masked weight is 0, and 0 * NaN is NaN: V may hold anything where it is masked.  A warp takes its bad rows one
        by one, with 32 keys at a time for the scores and its lanes along the columns for the output.
        """
        cute.arch.sync_warp()
        mQ, mK, mV, sO = tensors
        qk_scale, power_scale, cap_scale, softcap = scales
        num_columns = padded(self.head_dim_v, WARP) // WARP
        for r in range_constexpr(cute.size(acc, mode=[0])):
            checksum = acc[r, None].load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            bad = cute.arch.vote_ballot_sync(checksum != checksum)
            for quad in cutlass.range(8, unroll=1):
                source = 4 * quad
                row = cute.arch.shuffle_sync(coordinates[r, 0][0], source)
                if (bad >> source) & 15 != 0 and m_offset + row < seqlen_q:
                    m, total = cute.arch.shuffle_sync(m_i[r], source), cute.arch.shuffle_sync(l_i[r], source)
                    first, last = self.visible(row, *mask)
                    scale = row_scale(m, qk_scale, power_scale)
                    columns = cute.make_rmem_tensor(num_columns, Float32)
                    columns.fill(0.0)
                    for begin in cutlass.range(first, last, WARP, unroll=1):
                        key = cutlass.min(begin + lane, last - 1)
                        s = Float32(0.0)
                        for d in cutlass.range(self.head_dim, unroll=4):
                            s = s + mQ[m_offset + row, d].to(Float32) * mK[key, d].to(Float32)
                        if const_expr(self.softcap):
                            s = softcap * tanh(s * cap_scale)
                        p = cute.math.exp2(s * scale - m * scale, fastmath=True)
                        for i in cutlass.range(cutlass.min(last - begin, WARP), unroll=1):
                            weight = cute.arch.shuffle_sync(p, i)
                            for c in range_constexpr(num_columns):
                                if c * WARP + lane < self.head_dim_v:
                                    columns[c] = columns[c] + weight * mV[begin + i, c * WARP + lane].to(Float32)
                    total = select(total == 0.0, Float32(1.0), total)
                    for c in range_constexpr(num_columns):
                        sO[row, c * WARP + lane] = (columns[c] / total).to(sO.element_type)


Forward.attention_fwd_kernel.set_name_prefix("attention_fwd_kernel", remove_cutlass_symbol=True, keep_mangled_name=False)


def padded(dim: int, multiple: int) -> int:
    return -(-dim // multiple) * multiple


def tile_layout(rows: int, dim: int):
    """A swizzled tile [rows, dim] of 16-bit elements."""
    width = 64 if dim % 64 == 0 else 32
    swizzle = cute.make_swizzle(3 if width == 64 else 2, 3, 3)
    atom = cute.make_composed_layout(swizzle, 0, cute.make_layout((8, width), stride=(width, 1)))
    return cute.tile_to_shape(atom, (rows, dim), (0, 1))


def head_tensor(pointer, batch, head, stride_b, stride_h, stride_s, seqlen, dim):
    """One head of a [batch, seqlen, num_heads, head_dim] tensor: [seqlen, dim]. Strides are multiples of 16 bytes."""
    stride_b, stride_h, stride_s = (cute.assume(s, divby=VECTOR) for s in (stride_b, stride_h, stride_s))
    start = pointer + (Int64(batch) * stride_b + Int64(head) * stride_h)
    return cute.make_tensor(start, cute.make_layout((seqlen, dim), stride=(stride_s, 1)))


@cute.jit
def program_block(num_blocks, num_heads, section, last_first: cutlass.Constexpr):
    """This block's rows and head: a section of heads at a time, and in a section block by block over its heads."""
    pid, _, _ = cute.arch.block_idx()
    first_head = pid // (num_blocks * section) * section
    width = cutlass.min(num_heads - first_head, section)
    rest = pid - first_head * num_blocks
    block = rest // width
    head = first_head + rest - block * width
    if const_expr(last_first):
        block = num_blocks - 1 - block
    return block, head


def rows_and_columns(fragment):
    """A C fragment ((2, 2), MMA_M, MMA_N) of m16n8 tiles as [rows, columns] of this thread."""
    (pair, halves), m, n = fragment.layout.shape
    (pair_stride, half_stride), m_stride, n_stride = fragment.layout.stride
    layout = cute.make_layout(((halves, m), (pair, n)), stride=((half_stride, m_stride), (pair_stride, n_stride)))
    return cute.make_tensor(fragment.iterator, layout)


def as_operand(weights):
    """A C fragment of m16n8 tiles as the A fragment of m16n8k16: two tiles side by side are one step of k."""
    divided = cute.logical_divide(weights.layout, (None, None, 2))
    layout = cute.make_layout(
        ((divided.shape[0], divided.shape[2][0]), divided.shape[1], divided.shape[2][1]),
        stride=((divided.stride[0], divided.stride[2][0]), divided.stride[1], divided.stride[2][1]),
    )
    return cute.make_tensor(weights.iterator, layout)


def gemm(mma, acc, a, b, read_a, read_b, steps):
    """acc += a b, reading the next operands from shared memory before the products of these.

    A piece is 64 columns of b in one step of k: a whole row of a wide tile would need twice the registers.  Operands
    that are in registers already have no ``read``, which is (copy, source, target).
    """
    columns = cute.size(acc, mode=[2]) // 2
    pieces = [(k, range(n, min(n + PIECE, columns))) for k in range(steps) for n in range(0, columns, PIECE)]

    def read(k, part):
        if read_a is not None and part.start == 0:
            copy, source, target = read_a
            cute.copy(copy, source[None, None, k], target[None, None, k])
        copy, source, target = read_b
        for n in part:
            cute.copy(copy, source[None, n, k], target[None, n, k])

    read(*pieces[0])
    for i, (k, part) in enumerate(pieces):
        if i + 1 < len(pieces):
            read(*pieces[i + 1])
        for n in range(2 * part.start, 2 * part.stop):
            tiles = cute.append_ones(acc[None, None, n], up_to_rank=3)
            cute.gemm(mma, tiles, a[None, None, k], cute.append_ones(b[None, n, k], up_to_rank=2), tiles)


def load_tile(copy, tid, tensor, tile, block, seqlen, head_dim):
    """Starts the copy of block ``block`` of a head into shared memory, with zeros beyond its rows and columns."""
    rows, dim = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    thread = copy.get_slice(tid)
    source, inside = within(thread, tensor, rows, dim, block, seqlen, head_dim)
    cute.copy(copy, source, thread.partition_D(tile), pred=inside)


def store_tile(copy, tid, tile, tensor, block, seqlen, head_dim):
    rows, dim = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    thread = copy.get_slice(tid)
    target, inside = within(thread, tensor, rows, dim, block, seqlen, head_dim)
    source = thread.partition_S(tile)
    values = cute.make_rmem_tensor_like(source)
    cute.autovec_copy(source, values)
    cute.copy(copy, values, target, pred=inside)


def within(thread, tensor, rows, dim, block, seqlen, head_dim):
    """This thread's vectors of block ``block`` in global memory, and which of them are in the tensor."""
    vectors = thread.partition_S(cute.local_tile(tensor, (rows, dim), (block, 0)))
    places = thread.partition_S(cute.make_identity_tensor((rows, dim)))
    _, num_rows, num_columns = vectors.shape
    num_rows, num_columns = cute.size(num_rows), cute.size(num_columns)
    inside = cute.make_rmem_tensor((1, num_rows, num_columns), Boolean)
    for i in range(num_rows):
        for j in range(num_columns):
            row, column = places[(0, 0), i, j]
            is_inside = row < seqlen - block * rows
            if head_dim != dim:
                is_inside = is_inside & (column < head_dim)
            inside[0, i, j] = is_inside
    return vectors, inside


def next_power_of_two(x):
    """The power of two above a positive normal number."""
    return ((x.bitcast(Int32) & 0x7F800000) + 0x00800000).bitcast(Float32)


def row_scale(m, qk_scale, power_scale):
    return select(cutlass.max(m, -m) * qk_scale >= _EXACT, power_scale, qk_scale)


def select(condition, if_true, if_false):
    return Float32(cutlass.select_(condition, if_true, if_false))


def tanh(x):
    """Saturates without NaN for any finite x."""
    return 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + cute.math.exp2(x * (2.0 * LOG2E), fastmath=True))
