"""Device code of ``triton.fwd_sm90``; ``fwd_sm90.py`` says what it does and why."""

# ruff: noqa: RUF059  device functions unpack whole groups of arguments by name

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Code that knows one of these to be 1 or a multiple of 16 is no faster, and more code.  A group of 1 saves a division.
_LAYOUT_NUMBERS = (
    "seqlen_k",
    "num_heads_q",
    "total_heads",
    "num_m_blocks",
    "num_tiles",
    "heads_per_section",
    "left",
    "right",
)
_LARGEST = gl.constexpr(2.0**24)  # scaled scores below it are rounded by less than a factor of 2 in their weight


@gluon.jit
def _block_range(m_offset, rows, seqlen_k, left, right, BLOCK_N: gl.constexpr):
    """Key tiles that some row of [m_offset, m_offset + rows) sees: [n_block_min, n_block_max)."""
    n_end = seqlen_k
    if right is not None:
        n_end = gl.minimum(n_end, gl.maximum(m_offset + rows + right, 0))
    n_block_max = (n_end + BLOCK_N - 1) // BLOCK_N
    n_block_min = n_block_max * 0
    if left is not None:
        n_block_min = gl.minimum(gl.maximum(m_offset - left, 0) // BLOCK_N, n_block_max)
    return n_block_min, n_block_max


@gluon.jit
def _tile_at(index, sizes, REVERSE: gl.constexpr):
    """Row block, head and batch entry of this block's ``index``-th tile, and whether there is one.

    Tiles go section by section, a section being the heads whose K and V share L2, and in a section longest
    first.  Every second round over the blocks runs backwards, which evens out what each of them gets.
    """
    seqlen_k, num_heads_q, group, total_heads, num_m_blocks, num_tiles, heads_per_section = sizes
    programs = gl.num_programs(0)
    tile = index * programs + gl.where(index % 2 == 1, programs - 1 - gl.program_id(0), gl.program_id(0))
    section = tile // (heads_per_section * num_m_blocks)
    first_head = section * heads_per_section
    heads = gl.maximum(gl.minimum(heads_per_section, total_heads - first_head), 1)
    rest = tile - first_head * num_m_blocks
    m_block = rest // heads
    batch_head = first_head + rest - m_block * heads
    if REVERSE:
        m_block = num_m_blocks - 1 - m_block
    batch = batch_head // num_heads_q
    return m_block, batch_head - batch * num_heads_q, batch, tile < num_tiles


@gluon.jit
def _advance(stage, phase, NUM_STAGES: gl.constexpr):
    wrap = stage == NUM_STAGES - 1
    return gl.where(wrap, 0, stage + 1), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def _fetch(desc, batch, row, head, full, empty, slot, phase):
    """One tile of K, V or Q by TMA, once its slot is free."""
    mbarrier.wait(empty, phase)
    mbarrier.expect(full, desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [batch, row, head, 0], full, slot)


@gluon.jit
def _produce(descs, bufs, bars, sizes, left, right):
    """The producer warp: of each tile the rows of Q, then K and V tile by tile, K one ahead."""
    q_desc, k_desc, v_desc, out_desc = descs
    q_smem, k_smem, v_smem = bufs
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn = bars
    seqlen_k, num_heads_q, group, total_heads, num_m_blocks, num_tiles, heads_per_section = sizes
    NUM_CONSUMERS: gl.constexpr = q_smem.shape[0]
    NUM_STAGES: gl.constexpr = k_smem.shape[0]
    ROWS: gl.constexpr = q_smem.shape[2]
    BLOCK_M: gl.constexpr = ROWS * NUM_CONSUMERS
    BLOCK_N: gl.constexpr = k_smem.shape[2]
    k_stage = gl.to_tensor(0)
    k_phase = gl.to_tensor(1)
    v_stage = gl.to_tensor(0)
    v_phase = gl.to_tensor(1)
    q_phase = gl.to_tensor(1)
    for index in range(gl.cdiv(num_tiles, gl.num_programs(0))):
        m_block, head, batch, exists = _tile_at(index, sizes, right is not None)
        if exists:
            m_offset = m_block * BLOCK_M
            n_block_min, n_block_max = _block_range(m_offset, BLOCK_M, seqlen_k, left, right, BLOCK_N)
            head_kv = head // group
            _fetch(q_desc, batch, m_offset, head, q_full.index(0), q_empty.index(0), q_smem.index(0), q_phase)
            if n_block_min < n_block_max:
                _fetch(
                    k_desc, batch, (n_block_max - 1) * BLOCK_N, head_kv,
                    k_full.index(k_stage), k_empty.index(k_stage), k_smem.index(k_stage), k_phase,
                )  # fmt: skip
                k_stage, k_phase = _advance(k_stage, k_phase, NUM_STAGES)
            for c in gl.static_range(1, NUM_CONSUMERS):
                row = m_offset + c * ROWS
                _fetch(q_desc, batch, row, head, q_full.index(c), q_empty.index(c), q_smem.index(c), q_phase)
            q_phase ^= 1
            for i in range(n_block_max - n_block_min):
                n_block = n_block_max - 1 - i
                if n_block > n_block_min:
                    _fetch(
                        k_desc, batch, (n_block - 1) * BLOCK_N, head_kv,
                        k_full.index(k_stage), k_empty.index(k_stage), k_smem.index(k_stage), k_phase,
                    )  # fmt: skip
                    k_stage, k_phase = _advance(k_stage, k_phase, NUM_STAGES)
                _fetch(
                    v_desc, batch, n_block * BLOCK_N, head_kv,
                    v_full.index(v_stage), v_empty.index(v_stage), v_smem.index(v_stage), v_phase,
                )  # fmt: skip
                v_stage, v_phase = _advance(v_stage, v_phase, NUM_STAGES)


@gluon.jit
def _matrix(buf, stage):
    """Slot of a ring, [1, rows, 1, head_dim], as a matrix."""
    slot = buf.index(stage)
    return slot.reshape([slot.shape[1], slot.shape[3]])


@gluon.jit
def _cap(qk, cap_scale):
    """tanh(qk * cap_scale / (2 log2 e)) by exp2, whose absolute error stays near 1e-7; tanh.approx errs by 5e-4."""
    half = 0.5 * gl.exp2(qk * cap_scale) + 0.5
    return 1.0 - gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [half], gl.float32, is_pure=True, pack=1)


@gluon.jit
def _mask(qk, n_offset, edges):
    """Scores outside [first, end) of their row, edges = (end,) or (end, first), become -inf, whatever they are."""
    columns = gl.arange(0, qk.shape[1], layout=gl.SliceLayout(0, qk.type.layout))
    visible = columns[None, :] < (edges[0] - n_offset)[:, None]
    if len(edges) == 2:
        visible = visible & (columns[None, :] >= (edges[1] - n_offset)[:, None])
    return gl.where(visible, qk, float("-inf"))


@gluon.jit
def _pack(p, DTYPE: gl.constexpr):
    """P rounded, two columns in an int32: values of 16 bits LLVM would carry through loops as halves, and pack anew."""
    ASM: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if gl.bfloat16 == DTYPE else "cvt.rn.f16x2.f32 $0, $2, $1;"
    even, odd = p.reshape([p.shape[0], p.shape[1] // 2, 2]).split()
    return gl.inline_asm_elementwise(ASM, "=r,f,f", [even, odd], gl.int32, is_pure=True, pack=1)


@gluon.jit
def _operand(packed, acc, DTYPE: gl.constexpr):
    """Packed P as the register operand of the product with V: no thread gives or takes anything, no instruction."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [packed], (gl.int16, gl.int16), is_pure=True, pack=1
    )  # fmt: skip
    p = gl.join(even, odd).reshape([packed.shape[0], 2 * packed.shape[1]]).to(DTYPE, bitcast=True)
    return gl.convert_layout(p, gl.DotOperandLayout(0, acc.type.layout, 2), assert_trivial=True)


@gluon.jit
def _softmax(qk, m_old, qk_scale, MASKED: gl.constexpr):
    """p = exp2(qk_scale * qk - m), its partial row sums, the new row maximum m (scaled) and the factor for what is older.

    The reductions first run over columns equal modulo 8, of which a thread holds all or none: shorter chains for the
    maximum, and sums that lanes exchange only after the last tile.  The maximum is carried with its rounding, which so
    is one for all tiles and cancels.
    """
    BLOCK_N: gl.constexpr = qk.shape[1]
    chains = gl.max(qk.reshape([qk.shape[0], BLOCK_N // 8, 8]), axis=1)
    highest = gl.convert_layout(gl.max(chains, axis=1), m_old.type.layout, assert_trivial=True)
    m_new = gl.maximum(m_old, highest * qk_scale)
    origin = m_new
    if MASKED:
        origin = gl.where(m_new == float("-inf"), 0.0, m_new)  # no key seen yet: -inf - -inf would be NaN
    p = gl.exp2(qk * qk_scale - origin[:, None])
    alpha = gl.exp2(m_old - origin)
    return p, gl.sum(p.reshape([qk.shape[0], BLOCK_N // 8, 8]), axis=1), m_new, alpha


@gluon.jit
def _per_row(x, like):
    """A value for each row, to multiply a matrix in another layout with the same rows in the same threads."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def _attend(
    count, n_block, q_matrix, bufs, bars, carried, ring, edges, scales,
    MASKED: gl.constexpr, QK: gl.constexpr, CONSUMER: gl.constexpr,
    SOFTCAP: gl.constexpr, PINGPONG: gl.constexpr,
):  # fmt: skip
    """``count`` key tiles from n_block downwards, each with the product P V of the tile before it under its softmax.

    O is rescaled under the first product.
    """
    q_smem, k_smem, v_smem = bufs
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn = bars
    k_stage, k_phase, v_stage, v_phase, turn_phase = ring
    acc, p, alpha, l_i, m_i = carried
    NUM_CONSUMERS: gl.constexpr = q_smem.shape[0]
    NUM_STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[2]
    qk_scale, cap_scale = scales
    zero = gl.zeros([acc.shape[0], BLOCK_N], gl.float32, QK)
    for i in range(count):
        mbarrier.wait(k_full.index(k_stage), k_phase)
        if PINGPONG:
            mbarrier.wait(turn.index(CONSUMER), turn_phase)
            turn_phase ^= 1
        qk = warpgroup_mma(q_matrix, _matrix(k_smem, k_stage).permute([1, 0]), zero, use_acc=False, is_async=True)
        acc = acc * _per_row(alpha, acc)
        acc = warpgroup_mma(_operand(p, acc, v_smem.dtype), _matrix(v_smem, v_stage), acc, is_async=True)
        if PINGPONG:
            mbarrier.arrive(turn.index((CONSUMER + 1) % NUM_CONSUMERS))
        qk = warpgroup_mma_wait(1, deps=[qk])
        mbarrier.arrive(k_empty.index(k_stage))
        k_stage, k_phase = _advance(k_stage, k_phase, NUM_STAGES)
        if SOFTCAP:
            qk = _cap(qk, cap_scale)
        if MASKED:
            qk = _mask(qk, (n_block - i) * BLOCK_N, edges)
        p_next, sums, m_i, alpha = _softmax(qk, m_i, qk_scale, MASKED)
        l_i = l_i * _per_row(alpha, l_i) + sums
        # The next V is waited for here, not where it is used: the wait is a loop, and ptxas, which would otherwise
        # wait for the product before the exponentials, moves nothing across it.
        read = v_empty.index(v_stage)
        v_stage, v_phase = _advance(v_stage, v_phase, NUM_STAGES)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(read)
        p = _pack(p_next, v_smem.dtype)  # not before: the registers of P belong to the product until it is done
    return (acc, p, alpha, l_i, m_i), (k_stage, k_phase, v_stage, v_phase, turn_phase)


@gluon.jit
def _skip(count, bufs, bars, ring, CONSUMER: gl.constexpr, PINGPONG: gl.constexpr):
    """Hands back tiles that other consumers of the block need and this one does not."""
    q_smem, k_smem, v_smem = bufs
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn = bars
    NUM_CONSUMERS: gl.constexpr = q_smem.shape[0]
    NUM_STAGES: gl.constexpr = k_smem.shape[0]
    k_stage, k_phase, v_stage, v_phase, turn_phase = ring
    for _ in range(count):
        mbarrier.wait(k_full.index(k_stage), k_phase)
        mbarrier.arrive(k_empty.index(k_stage))
        mbarrier.wait(v_full.index(v_stage), v_phase)
        mbarrier.arrive(v_empty.index(v_stage))
        if PINGPONG:
            mbarrier.wait(turn.index(CONSUMER), turn_phase)
            turn_phase ^= 1
            mbarrier.arrive(turn.index((CONSUMER + 1) % NUM_CONSUMERS))
        k_stage, k_phase = _advance(k_stage, k_phase, NUM_STAGES)
        v_stage, v_phase = _advance(v_stage, v_phase, NUM_STAGES)
    return k_stage, k_phase, v_stage, v_phase, turn_phase


@gluon.jit
def _repair(
    raw, lse, m_offset, batch, head, head_kv, sizes, left, right, scales,
    ROWS: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Rows of out and lse key by key, four rows a warp; slow, and complete in itself.

    Touches values of visible keys alone, and subtracts the maximum before it scales, so that no score is too large.
    """
    q, k, v, out, q_strides, k_strides, v_strides, out_strides, seqlen_q, head_dim, head_dim_v = raw
    seqlen_k = sizes[0]
    qk_scale, cap_scale = scales
    D: gl.constexpr = gl.BlockedLayout([1, BLOCK_D // 32], [1, 32], [4, 1], [1, 0])
    DV: gl.constexpr = gl.BlockedLayout([1, BLOCK_DV // 32], [1, 32], [4, 1], [1, 0])
    STEP: gl.constexpr = 16
    columns = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, D))
    columns_v = gl.arange(0, BLOCK_DV, layout=gl.SliceLayout(0, DV))
    q += batch.to(gl.int64) * q_strides[0] + head.to(gl.int64) * q_strides[2]
    k += batch.to(gl.int64) * k_strides[0] + head_kv.to(gl.int64) * k_strides[2]
    v += batch.to(gl.int64) * v_strides[0] + head_kv.to(gl.int64) * v_strides[2]
    out += batch.to(gl.int64) * out_strides[0] + head.to(gl.int64) * out_strides[2]
    for start in range(m_offset, gl.minimum(m_offset + ROWS, seqlen_q), STEP):
        rows = start + gl.arange(0, STEP, layout=gl.SliceLayout(1, D))
        rows_v = start + gl.arange(0, STEP, layout=gl.SliceLayout(1, DV))
        inside = (rows < seqlen_q)[:, None] & (columns < head_dim)[None, :]
        q_rows = gl.load(q + rows.to(gl.int64)[:, None] * q_strides[1] + columns[None, :], mask=inside, other=0.0)
        q_rows = q_rows.to(gl.float32)
        key_first = gl.to_tensor(0)
        key_end = seqlen_k
        if left is not None:
            key_first = gl.maximum(start - left, 0)
        if right is not None:
            key_end = gl.minimum(key_end, start + STEP + right)
        m_i = gl.full([STEP], float("-inf"), gl.float32, gl.SliceLayout(1, DV))
        l_i = gl.zeros([STEP], gl.float32, gl.SliceLayout(1, DV))
        acc = gl.zeros([STEP, BLOCK_DV], gl.float32, DV)
        for key in range(key_first, key_end):
            offset = gl.cast(key, gl.int64)
            k_row = gl.load(k + offset * k_strides[1] + columns, mask=columns < head_dim, other=0.0).to(gl.float32)
            v_row = gl.load(v + offset * v_strides[1] + columns_v, mask=columns_v < head_dim_v, other=0.0).to(gl.float32)
            s = gl.convert_layout(gl.sum(q_rows * k_row[None, :], axis=1), gl.SliceLayout(1, DV))
            if SOFTCAP:
                s = _cap(s, cap_scale)
            visible = key < seqlen_k + rows_v * 0
            if left is not None:
                visible = visible & (key >= rows_v - left)
            if right is not None:
                visible = visible & (key <= rows_v + right)
            m_new = gl.maximum(m_i, gl.where(visible, s, float("-inf")))
            origin = gl.where(m_new == float("-inf"), 0.0, m_new)
            p = gl.where(visible, gl.exp2((s - origin) * qk_scale), 0.0)
            alpha = gl.exp2((m_i - origin) * qk_scale)
            acc = acc * alpha[:, None] + gl.where(visible[:, None], p[:, None] * v_row[None, :], 0.0)
            l_i = l_i * alpha + p
            m_i = m_new
        acc = acc * gl.where(l_i == 0.0, 0.0, 1.0 / l_i)[:, None]
        inside_v = (rows_v < seqlen_q)[:, None] & (columns_v < head_dim_v)[None, :]
        gl.store(
            out + rows_v.to(gl.int64)[:, None] * out_strides[1] + columns_v[None, :],
            acc.to(out.dtype.element_ty),
            mask=inside_v,
        )
        if lse is not None:
            _store_lse(lse, batch * sizes[1] + head, rows_v, seqlen_q, m_i * qk_scale, l_i)


@gluon.jit
def _store_lse(lse, batch_head, rows, seqlen_q, m_i, l_i):
    """The natural logarithm of 2**m_i * l_i."""
    value = gl.where(l_i == 0.0, float("-inf"), m_i * 0.6931471805599453 + gl.log(l_i))
    gl.store(lse + batch_head.to(gl.int64) * seqlen_q + rows, value, mask=rows < seqlen_q)


@gluon.jit
def _consume(
    state, lse, left, right, CONSUMER: gl.constexpr,
    EVEN_K: gl.constexpr, SOFTCAP: gl.constexpr, PINGPONG: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: its rows of each tile, from Q in shared memory to out and lse."""
    descs, bufs, bars, sizes, scales, raw = state
    q_desc, k_desc, v_desc, out_desc = descs
    q_smem, k_smem, v_smem = bufs
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn = bars
    seqlen_k, num_heads_q, group, total_heads, num_m_blocks, num_tiles, heads_per_section = sizes
    qk_scale, cap_scale = scales
    DTYPE: gl.constexpr = q_desc.dtype
    NUM_CONSUMERS: gl.constexpr = q_smem.shape[0]
    NUM_STAGES: gl.constexpr = k_smem.shape[0]
    ROWS: gl.constexpr = q_smem.shape[2]
    BLOCK_M: gl.constexpr = ROWS * NUM_CONSUMERS
    BLOCK_N: gl.constexpr = k_smem.shape[2]
    BLOCK_D: gl.constexpr = q_smem.shape[4]
    BLOCK_DV: gl.constexpr = v_smem.shape[4]
    WINDOW: gl.constexpr = left is not None or right is not None
    QK: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_DV, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, QK)
    q_mine = q_smem.index(CONSUMER)
    q_matrix = q_mine.reshape([ROWS, BLOCK_D])
    out_mine = q_mine._reinterpret(DTYPE, [1, ROWS, 1, BLOCK_DV], out_desc.layout)
    ring = (gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(1 if CONSUMER == 0 else 0))
    q_phase = gl.to_tensor(0)
    for index in range(gl.cdiv(num_tiles, gl.num_programs(0))):
        m_block, head, batch, exists = _tile_at(index, sizes, right is not None)
        if exists:
            block_min, block_max = _block_range(m_block * BLOCK_M, BLOCK_M, seqlen_k, left, right, BLOCK_N)
            m_offset = m_block * BLOCK_M + CONSUMER * ROWS
            n_block_min, n_block_max = _block_range(m_offset, ROWS, seqlen_k, left, right, BLOCK_N)
            n_block_min = gl.minimum(gl.maximum(n_block_min, block_min), n_block_max)
            rows = m_offset + gl.arange(0, ROWS, layout=ROW)
            # No edge cuts the tiles [full_min, full_max).
            end = seqlen_k + rows * 0
            full_end = seqlen_k
            full_min = n_block_min
            if right is not None:
                end = gl.minimum(end, rows + right + 1)
                full_end = gl.minimum(full_end, gl.maximum(m_offset + right + 1, 0))
            full_max = gl.maximum(gl.minimum(full_end // BLOCK_N, n_block_max), n_block_min)
            edges = (end,)
            if left is not None:
                edges = (end, rows - left)  # type: ignore[assignment]
                full_min = gl.maximum(m_offset + ROWS - 1 - left, 0)
                full_min = gl.minimum(gl.maximum((full_min + BLOCK_N - 1) // BLOCK_N, n_block_min), full_max)

            acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, ACC)
            m_i = gl.full([ROWS], float("-inf"), gl.float32, ROW)
            l_row = gl.zeros([ROWS], gl.float32, ROW)
            mbarrier.wait(q_full.index(CONSUMER), q_phase)
            q_phase ^= 1
            if n_block_min < n_block_max:
                ring = _skip(block_max - n_block_max, bufs, bars, ring, CONSUMER, PINGPONG)
                k_stage, k_phase, v_stage, v_phase, turn_phase = ring
                mbarrier.wait(k_full.index(k_stage), k_phase)
                if PINGPONG:
                    mbarrier.wait(turn.index(CONSUMER), turn_phase)
                    turn_phase ^= 1
                zero = gl.zeros([ROWS, BLOCK_N], gl.float32, QK)
                qk = warpgroup_mma(q_matrix, _matrix(k_smem, k_stage).permute([1, 0]), zero, use_acc=False, is_async=True)
                if PINGPONG:
                    mbarrier.arrive(turn.index((CONSUMER + 1) % NUM_CONSUMERS))
                qk = warpgroup_mma_wait(0, deps=[qk])
                mbarrier.arrive(k_empty.index(k_stage))
                k_stage, k_phase = _advance(k_stage, k_phase, NUM_STAGES)
                if SOFTCAP:
                    qk = _cap(qk, cap_scale)
                if WINDOW or not EVEN_K:
                    qk = _mask(qk, (n_block_max - 1) * BLOCK_N, edges)
                p_first, l_i, m_i, alpha = _softmax(qk, m_i, qk_scale, WINDOW)
                mbarrier.wait(v_full.index(v_stage), v_phase)
                carried = (acc, _pack(p_first, DTYPE), alpha, l_i, m_i)
                ring = (k_stage, k_phase, v_stage, v_phase, turn_phase)
                n_block = n_block_max - 2
                if right is not None:
                    count = gl.maximum(n_block + 1 - full_max, 0)
                    carried, ring = _attend(
                        count, n_block, q_matrix, bufs, bars, carried, ring, edges, scales,
                        True, QK, CONSUMER, SOFTCAP, PINGPONG,
                    )  # fmt: skip
                    n_block -= count
                count = gl.maximum(n_block + 1 - full_min, 0)
                carried, ring = _attend(
                    count, n_block, q_matrix, bufs, bars, carried, ring, edges, scales,
                    False, QK, CONSUMER, SOFTCAP, PINGPONG,
                )  # fmt: skip
                n_block -= count
                if left is not None:
                    carried, ring = _attend(
                        n_block + 1 - n_block_min, n_block, q_matrix, bufs, bars, carried, ring, edges, scales,
                        True, QK, CONSUMER, SOFTCAP, PINGPONG,
                    )  # fmt: skip
                acc, p, alpha, l_i, m_i = carried
                k_stage, k_phase, v_stage, v_phase, turn_phase = ring
                acc = acc * _per_row(alpha, acc)
                acc = warpgroup_mma(_operand(p, acc, DTYPE), _matrix(v_smem, v_stage), acc, is_async=True)
                l_row = gl.convert_layout(gl.sum(l_i, axis=1), ROW, assert_trivial=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(v_empty.index(v_stage))
                v_stage, v_phase = _advance(v_stage, v_phase, NUM_STAGES)
                ring = (k_stage, k_phase, v_stage, v_phase, turn_phase)
                ring = _skip(n_block_min - block_min, bufs, bars, ring, CONSUMER, PINGPONG)
                acc = acc * _per_row(gl.where(l_row == 0.0, 0.0, 1.0 / l_row), acc)
            else:
                ring = _skip(block_max - block_min, bufs, bars, ring, CONSUMER, PINGPONG)

            # A masked NaN of V shows in the output, and weights that once were infinite show in their sum.
            probe = l_row
            if WINDOW:
                probe = gl.convert_layout(gl.sum(acc, axis=1), ROW, assert_trivial=True)
            size = gl.abs(m_i)
            broken = (probe != probe) | ((size >= _LARGEST) & (size < float("inf")))
            if gl.max(broken.to(gl.int32), axis=0) != 0:
                _repair(
                    raw, lse, m_offset, batch, head, head // group, sizes, left, right, scales, ROWS, BLOCK_D, BLOCK_DV, SOFTCAP
                )
            else:
                out_mine.reshape([ROWS, BLOCK_DV]).store(acc.to(DTYPE))
                fence_async_shared()
                tma.async_copy_shared_to_global(out_desc, [batch, m_offset, head, 0], out_mine)
                tma.store_wait(0)
                if lse is not None:
                    _store_lse(lse, batch * sizes[1] + head, rows, q_desc.shape[1], m_i, l_row)
            mbarrier.arrive(q_empty.index(CONSUMER))


@gluon.jit(do_not_specialize=_LAYOUT_NUMBERS)
def attention_fwd_kernel(
    q_desc, k_desc, v_desc, out_desc, q, k, v, out, lse,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    seqlen_k, num_heads_q, group, total_heads, num_m_blocks, num_tiles, heads_per_section, left, right,
    softmax_scale, softcap,
    NUM_CONSUMERS: gl.constexpr, NUM_STAGES: gl.constexpr, EVEN_K: gl.constexpr, SOFTCAP: gl.constexpr,
    PINGPONG: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """left and right are counted from the query's row: keys [row - left, row + right]; None where unlimited."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    ROWS: gl.constexpr = q_desc.block_shape[1]
    BLOCK_N: gl.constexpr = k_desc.block_shape[1]
    BLOCK_D: gl.constexpr = q_desc.block_shape[3]
    BLOCK_DV: gl.constexpr = v_desc.block_shape[3]
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [NUM_CONSUMERS, 1, ROWS, 1, BLOCK_D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [NUM_STAGES, 1, BLOCK_N, 1, BLOCK_D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [NUM_STAGES, 1, BLOCK_N, 1, BLOCK_DV], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [NUM_CONSUMERS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [NUM_CONSUMERS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], BARRIER)
    # An unused barrier must not exist: its memory would be handed to a reduction's scratch, and an initialised mbarrier
    # that is written as plain memory is undefined behaviour (seen as false NaN tests and hangs).
    turn = q_empty
    if PINGPONG:
        turn = gl.allocate_shared_memory(gl.int64, [NUM_CONSUMERS, 1], BARRIER)
    for c in gl.static_range(NUM_CONSUMERS):
        mbarrier.init(q_full.index(c), count=1)
        mbarrier.init(q_empty.index(c), count=1)
        if PINGPONG:
            mbarrier.init(turn.index(c), count=1)
    for s in gl.static_range(NUM_STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=NUM_CONSUMERS)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(v_empty.index(s), count=NUM_CONSUMERS)
    fence_async_shared()

    qk_scale = softmax_scale * 1.4426950408889634
    cap_scale = qk_scale
    if SOFTCAP:
        cap_scale = 2.0 * qk_scale / softcap
        qk_scale = softcap * 1.4426950408889634
    descs = (q_desc, k_desc, v_desc, out_desc)
    bufs = (q_smem, k_smem, v_smem)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty, turn)
    sizes = (seqlen_k, num_heads_q, group, total_heads, num_m_blocks, num_tiles, heads_per_section)
    raw = (
        q, k, v, out, (stride_qb, stride_qs, stride_qh), (stride_kb, stride_ks, stride_kh),
        (stride_vb, stride_vs, stride_vh), out_desc.strides,
        q_desc.shape[1], q_desc.shape[3], v_desc.shape[3],
    )  # fmt: skip
    state = (descs, bufs, bars, sizes, (qk_scale, cap_scale), raw)
    # What is None or compile-time stands in the calls themselves: a variable would turn it into a run-time value.
    if NUM_CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (state, lse, left, right, 0, EVEN_K, SOFTCAP, PINGPONG)),
                (_produce, (descs, bufs, bars, sizes, left, right)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )
    elif NUM_CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (state, lse, left, right, 0, EVEN_K, SOFTCAP, PINGPONG)),
                (_consume, (state, lse, left, right, 1, EVEN_K, SOFTCAP, PINGPONG)),
                (_produce, (descs, bufs, bars, sizes, left, right)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (state, lse, left, right, 0, EVEN_K, SOFTCAP, PINGPONG)),
                (_consume, (state, lse, left, right, 1, EVEN_K, SOFTCAP, PINGPONG)),
                (_consume, (state, lse, left, right, 2, EVEN_K, SOFTCAP, PINGPONG)),
                (_produce, (descs, bufs, bars, sizes, left, right)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
