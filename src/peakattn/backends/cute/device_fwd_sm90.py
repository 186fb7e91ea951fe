"""Device code of ``cute.fwd_sm90``; imported, with cutlass, only to compile. ``fwd_sm90.py`` says what it does and why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2.0)
_FAR = 2.0**30  # a scaled score beyond this cannot be subtracted after it was multiplied: its rounding error is too large
# What a thread's part of a row's sum may reach before the row gets a new origin; P in float16 must stay below 65504.
_SUM_LIMIT = {torch.float16: 2.0**14, torch.bfloat16: 2.0**20}
_CUTE_DTYPES = {torch.float16: Float16, torch.bfloat16: BFloat16}
_ROWS = 64  # of queries a consumer has: the rows of one wgmma
_TILES = 2  # numbers of tiles on their way from the producer to the consumers
# Named barriers: one a consumer for turns, one for all consumers, and one a consumer for its own 128 threads.
_TURN, _ALL, _OWN = 1, 4, 5


@dataclass(frozen=True)
class Forward:
    """The forward of one problem class under one config; calling it under ``cute.compile`` makes the machine code."""

    dtype: torch.dtype
    dim: int  # tile widths of Q and K, and of V
    dim_v: int
    block_n: int
    num_consumers: int
    num_stages: int
    heads_per_tile: int  # of a group, packed: row r is position r // heads_per_tile of head r % heads_per_tile; 1: none
    schedule: str
    pingpong: bool
    separate_out: bool
    longest_first: bool
    ragged: bool  # seqlen_k is no multiple of block_n
    softcap: bool
    occupancy: int
    registers: tuple[int, int]  # of a producer thread, of a consumer thread

    @property
    def several(self) -> bool:
        """A block takes several tiles."""
        return self.schedule != "single"

    @property
    def positions(self) -> int:
        """Query positions of a consumer."""
        return _ROWS // self.heads_per_tile

    @property
    def idle(self) -> int:
        """Rows of a consumer that no whole position fills: a group that does not divide 64 leaves some."""
        return _ROWS % self.heads_per_tile

    @cute.jit
    def __call__(
        self, q_map, k_map, v_map, out_map, q, k, v, lse,
        seqlen_q, seqlen_k, head_dim, head_dim_v, num_heads, group, total_heads,
        num_m_blocks, num_tiles, heads_per_section, left, right,
        q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, counter,
        softmax_scale, softcap,
    ):  # fmt: skip
        kind = _CUTE_DTYPES[self.dtype]
        layouts = (
            _tiles(kind, _ROWS, self.dim, self.num_consumers),
            _tiles(kind, self.block_n, self.dim, self.num_stages),
            _tiles(kind, self.block_n, self.dim_v, self.num_stages),
            _tiles(kind, _ROWS, self.dim_v, self.num_consumers),
        )
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        packed = self.heads_per_tile > 1
        tma_q, mQ = _tma(load, q_map, layouts[0], packed=packed)
        tma_k, mK = _tma(load, k_map, layouts[1])
        tma_v, mV = _tma(load, v_map, layouts[2])
        tma_out, mO = _tma(store, out_map, layouts[3], packed=packed)
        self.attention_fwd_kernel.set_name_prefix("attention_fwd_kernel", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.attention_fwd_kernel(
            tma_q, mQ, tma_k, mK, tma_v, mV, tma_out, mO, q, k, v, lse,
            seqlen_q, seqlen_k, head_dim, head_dim_v, num_heads, group, total_heads,
            num_m_blocks, num_tiles, heads_per_section, left, right,
            q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, counter, softmax_scale, softcap, layouts,
        ).launch(
            grid=[1, 1, 1],
            block=[128 * (self.num_consumers + 1), 1, 1],
            min_blocks_per_mp=self.occupancy,
            preferred_smem_carveout=100,  # named, or the compiler asks a driver for the device's shared memory
        )  # fmt: skip

    @cute.kernel
    def attention_fwd_kernel(
        self, tma_q, mQ, tma_k, mK, tma_v, mV, tma_out, mO, q, k, v, lse,
        seqlen_q, seqlen_k, head_dim, head_dim_v, num_heads, group, total_heads,
        num_m_blocks, num_tiles, heads_per_section, left, right,
        q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, counter, softmax_scale, softcap, layouts,
    ):  # fmt: skip
        kind = _CUTE_DTYPES[self.dtype]
        memory = SmemAllocator()
        sQ, sK, sV = (_allocate(memory, kind, layout) for layout in layouts[:3])
        sO = _allocate(memory, kind, layouts[3]) if self.separate_out else _view(sV.iterator, kind, layouts[3])
        rings = {
            "q_full": self.num_consumers,
            "q_empty": self.num_consumers,
            "k_full": self.num_stages,
            "k_empty": self.num_stages,
            "v_full": self.num_stages,
            "v_empty": self.num_stages,
            "tile_full": _TILES,
            "tile_empty": _TILES,
            "out_empty": 1,
        }
        barriers = memory.allocate_array(Int64, sum(rings.values()), byte_alignment=8)
        bars = SimpleNamespace(tiles=cute.make_tensor(memory.allocate_array(Int32, _TILES), cute.make_layout(_TILES)))
        for name, count in rings.items():
            setattr(bars, name, barriers)
            barriers = barriers + count
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == 0:
            for atom in (tma_q, tma_k, tma_v, tma_out):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.num_consumers):
                    cute.arch.mbarrier_init(bars.q_full + i, 1)
                    cute.arch.mbarrier_init(bars.q_empty + i, 4)
                for i in cutlass.range_constexpr(self.num_stages):
                    cute.arch.mbarrier_init(bars.k_full + i, 1)
                    cute.arch.mbarrier_init(bars.v_full + i, 1)
                    cute.arch.mbarrier_init(bars.k_empty + i, 4 * self.num_consumers)
                    cute.arch.mbarrier_init(bars.v_empty + i, 4 * self.num_consumers)
                cute.arch.mbarrier_init(bars.out_empty, self.num_consumers)
                for i in cutlass.range_constexpr(_TILES):
                    cute.arch.mbarrier_init(bars.tile_full + i, 1)
                    cute.arch.mbarrier_init(bars.tile_empty + i, 4 * self.num_consumers)
            cute.arch.mbarrier_init_fence()
        if const_expr(self.idle):
            self.clear_idle_rows(sQ)
        cute.arch.sync_threads()

        sizes = SimpleNamespace(
            seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads=num_heads, group=group, total_heads=total_heads,
            num_m_blocks=num_m_blocks, num_tiles=num_tiles, heads_per_section=heads_per_section, left=left, right=right,
            head_dim=head_dim, head_dim_v=head_dim_v,
        )  # fmt: skip
        qk_scale, cap_scale = softmax_scale * _LOG2_E, None
        if const_expr(self.softcap):
            qk_scale, cap_scale = softcap * _LOG2_E, softmax_scale * (2.0 * _LOG2_E) / softcap
        raw = ((q, q_batch, q_row, q_head), (k, k_batch, k_row, k_head), (v, v_batch, v_row, v_head))
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp_index == 0:
                self.produce((tma_q, tma_k, tma_v), (mQ, mK, mV), (sQ, sK, sV), bars, sizes, counter)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            consumer = cute.arch.make_warp_uniform(warp_index // 4 - 1)
            self.consume(tma_out, mO, raw, lse, sQ, sK, sV, sO, bars, sizes, qk_scale, cap_scale, consumer)

    @cute.jit
    def clear_idle_rows(self, sQ):
        """No load ever fills these rows, and what memory holds must not look like a row that went wrong."""
        first = _ROWS - self.idle
        for i in cutlass.range(cute.arch.thread_idx()[0], self.idle * self.dim, 128 * (self.num_consumers + 1), unroll=1):
            for c in cutlass.range_constexpr(self.num_consumers):
                sQ[first + i // self.dim, i % self.dim, c] = _CUTE_DTYPES[self.dtype](0.0)
        cute.arch.fence_view_async_shared()

    # Which tile, and which keys it sees.

    @cute.jit
    def place(self, tile, sizes):
        """Row block, head (kv head where heads are packed) and batch entry of a tile.

        Tiles go section by section, a section being the heads whose K and V share L2, and in a section longest first.
        """
        section = tile // (sizes.heads_per_section * sizes.num_m_blocks)
        first_head = section * sizes.heads_per_section
        heads = cutlass.max(cutlass.min(sizes.heads_per_section, sizes.total_heads - first_head), 1)
        rest = tile - first_head * sizes.num_m_blocks
        m_block = rest // heads
        batch_head = first_head + rest - m_block * heads
        if const_expr(self.longest_first):
            m_block = sizes.num_m_blocks - 1 - m_block
        batch = batch_head // sizes.num_heads
        return m_block, batch_head - batch * sizes.num_heads, batch

    @cute.jit
    def ask(self, counter):
        """Asks for the number of a tile that no other block takes; the answer is read by ``answer``."""
        asked = Int32(0)
        if const_expr(self.schedule == "dynamic"):
            if cute.arch.lane_idx() == 0:
                asked = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
        return asked

    @cute.jit
    def answer(self, tile, asked, counter, sizes):
        """The tile after ``tile``. Whoever asked last leaves the counter at zero."""
        following = sizes.num_tiles
        if const_expr(self.schedule == "static"):
            following = tile + cute.arch.grid_dim()[0]
        if const_expr(self.schedule == "dynamic"):
            if cute.arch.lane_idx() == 0:
                # The blocks ask num_tiles times in all: for every tile but their first, and once each in vain.
                if asked == sizes.num_tiles - 1:
                    cute.make_tensor(counter, cute.make_layout(1))[0] = Int32(0)
            following = cute.arch.grid_dim()[0] + cute.arch.shuffle_sync(asked, offset=0)
        return following

    @cute.jit
    def block_range(self, m_offset, sizes):
        """Key tiles that some row of the block, whose first position is ``m_offset``, sees: [n_block_min, n_block_max)."""
        n_end = sizes.seqlen_k
        if const_expr(sizes.right is not None):
            n_end = cutlass.min(n_end, cutlass.max(m_offset + self.positions * self.num_consumers + sizes.right, 0))
        n_block_max = (n_end + self.block_n - 1) // self.block_n
        n_block_min = Int32(0)
        if const_expr(sizes.left is not None):
            n_block_min = cutlass.min(cutlass.max(m_offset - sizes.left, 0) // self.block_n, n_block_max)
        return n_block_min, n_block_max

    # The producer: one warp that keeps the rings full.

    @cute.jit
    def produce(self, atoms, globals_, shared, bars, sizes, counter):
        tma_q, tma_k, tma_v = atoms
        mQ, mK, mV = globals_
        sQ, sK, sV = shared
        k_stage, v_stage, k_phase, v_phase, q_phase, out_phase = Int32(0), Int32(0), Int32(1), Int32(1), Int32(1), Int32(1)
        tiles, slot, slot_phase = bars.tiles, Int32(0), Int32(1)
        tile = cute.arch.block_idx()[0]
        while tile < sizes.num_tiles:
            m_block, head, batch = self.place(tile, sizes)
            m_offset = m_block * (self.positions * self.num_consumers)
            n_block_min, n_block_max = self.block_range(m_offset, sizes)
            head_kv = head // sizes.group
            gK, tK = _partition(tma_k, mK[None, None, head_kv, batch], sK)
            gV, tV = _partition(tma_v, mV[None, None, head_kv, batch], sV)
            if n_block_min < n_block_max:
                self.fetch(tma_k, gK, tK, n_block_max - 1, bars.k_full, bars.k_empty, k_stage, k_phase)
                k_stage, k_phase = _advance(k_stage, k_phase, self.num_stages)
            for c in cutlass.range_constexpr(self.num_consumers):
                n = m_block * self.num_consumers + c
                gQ, tQ, n = self.partition_rows(tma_q, mQ, sQ, head, batch, n)
                self.fetch(tma_q, gQ, tQ, n, bars.q_full, bars.q_empty, Int32(c), q_phase, idle=self.idle)
            q_phase ^= 1
            if n_block_min < n_block_max:
                for i in cutlass.range(n_block_max - n_block_min - 1, unroll=1):
                    n_block = n_block_max - 1 - i
                    self.fetch(tma_k, gK, tK, n_block - 1, bars.k_full, bars.k_empty, k_stage, k_phase)
                    k_stage, k_phase = _advance(k_stage, k_phase, self.num_stages)
                    self.await_out(bars, out_phase)
                    self.fetch(tma_v, gV, tV, n_block, bars.v_full, bars.v_empty, v_stage, v_phase)
                    v_stage, v_phase = _advance(v_stage, v_phase, self.num_stages)
            # As late as the answer still comes in time: who asks early takes a tile from a block that could start it sooner.
            asked = self.ask(counter)
            self.await_out(bars, out_phase)
            if n_block_min < n_block_max:
                self.fetch(tma_v, gV, tV, n_block_min, bars.v_full, bars.v_empty, v_stage, v_phase)
                v_stage, v_phase = _advance(v_stage, v_phase, self.num_stages)
            out_phase ^= 1
            following = self.answer(tile, asked, counter, sizes)
            if const_expr(self.schedule == "dynamic"):
                cute.arch.mbarrier_wait(bars.tile_empty + slot, slot_phase)
                if cute.arch.lane_idx() == 0:
                    tiles[slot] = following
                    cute.arch.mbarrier_arrive(bars.tile_full + slot)
                slot, slot_phase = _advance(slot, slot_phase, _TILES)
            tile = following

    @cute.jit
    def await_out(self, bars, phase):
        """Where output passes through the ring of V: until the tile in front has left it."""
        if const_expr(self.several and not self.separate_out):
            cute.arch.mbarrier_wait(bars.out_empty, phase)

    def fetch(self, tma, gX, sX, n, full, empty, stage, phase, *, idle=0):
        """One tile, but for ``idle`` of 64 rows, by TMA into slot ``stage`` of its ring, once that is free."""
        cute.arch.mbarrier_wait(empty + stage, phase)
        num_bytes = cute.size_in_bytes(_CUTE_DTYPES[self.dtype], sX[None, 0].layout)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, num_bytes * (_ROWS - idle) // _ROWS)
        cute.copy(tma, gX[None, n], sX[None, stage], tma_bar_ptr=full + stage)

    def partition_rows(self, tma, tensor, shared, head, batch, n):
        """Tiles of Q or of the output as TMA copies them, and the index under which they have the rows of consumer ``n``."""
        if self.heads_per_tile == 1:
            return *_partition(tma, tensor[None, None, head, batch], shared), n
        rows = cute.domain_offset(((0, n * self.positions), 0), tensor[None, None, head, batch])
        return *_partition(tma, rows, shared), 0

    # The consumers.

    @cute.jit
    def consume(self, tma_out, mO, raw, lse, sQ, sK, sV, sO, bars, sizes, qk_scale, cap_scale, consumer):
        kind = _CUTE_DTYPES[self.dtype]
        thread = cute.arch.thread_idx()[0] % 128
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        mma_qk = hopper.make_trivial_tiled_mma(kind, kind, k_major, k_major, Float32, (1, 1, 1), (64, self.block_n))
        mma_pv = hopper.make_trivial_tiled_mma(
            kind, kind, k_major, mn_major, Float32, (1, 1, 1), (64, self.dim_v), warpgroup.OperandSource.RMEM
        )
        sVt = cute.composition(sV, cute.make_ordered_layout((self.dim_v, self.block_n, self.num_stages), order=(1, 0, 2)))
        whole_qk, whole_pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        tQ = mma_qk.make_fragment_A(whole_qk.partition_A(sQ))[None, None, None, consumer]
        tK = mma_qk.make_fragment_B(whole_qk.partition_B(sK))
        tV = mma_pv.make_fragment_B(whole_pv.partition_B(sVt))
        scores = cute.make_rmem_tensor(mma_qk.partition_shape_C((_ROWS, self.block_n)), Float32)
        acc = cute.make_rmem_tensor(mma_pv.partition_shape_C((_ROWS, self.dim_v)), Float32)
        p = cute.make_rmem_tensor(mma_pv.partition_shape_A((_ROWS, self.block_n)), kind)
        m_i, l_i, origin, alpha = (cute.make_rmem_tensor(2, Float32) for _ in range(4))
        lane = cute.arch.lane_idx()
        warp_in_group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        first_row = warp_in_group * 16 + lane // 4  # of this thread, in its consumer's rows
        at = SimpleNamespace(
            mma_qk=mma_qk, mma_pv=mma_pv, tQ=tQ, tK=tK, tV=tV, scores=scores, acc=acc, p=p, m_i=m_i, l_i=l_i, origin=origin,
            alpha=alpha, sQ=sQ, sK=sK, bars=bars, qk_scale=qk_scale, cap_scale=cap_scale, consumer=consumer, lane=lane,
            warp_in_group=warp_in_group, first_row=first_row, sizes=sizes,
        )  # fmt: skip

        if const_expr(self.pingpong):
            if consumer == self.num_consumers - 1:
                cute.arch.barrier_arrive(barrier_id=_TURN, number_of_threads=256)
        k_stage, k_phase, v_stage, v_phase, q_phase, slot, slot_phase = (Int32(0) for _ in range(7))
        tile = cute.arch.block_idx()[0]
        while tile < sizes.num_tiles:
            m_block, head, batch = self.place(tile, sizes)
            block_offset = m_block * (self.positions * self.num_consumers)
            n_block_min, n_block_max = self.block_range(block_offset, sizes)
            m_offset = block_offset + consumer * self.positions
            row = m_offset + first_row if const_expr(self.heads_per_tile == 1) else m_offset
            m_i.fill(-Float32.inf)
            l_i.fill(0.0)
            acc.fill(0.0)
            cute.arch.mbarrier_wait(bars.q_full + consumer, q_phase)
            q_phase ^= 1
            if n_block_min < n_block_max:
                # The first tile: nothing to overlap with.
                n_block = n_block_max - 1
                cute.arch.mbarrier_wait(bars.k_full + k_stage, k_phase)
                _gemm(mma_qk, scores, tQ, tK[None, None, None, k_stage], accumulate=False)
                warpgroup.wait_group(0)
                self.release(bars.k_empty + k_stage, lane)
                k_stage, k_phase = _advance(k_stage, k_phase, self.num_stages)
                self.cap(at)
                if const_expr(self.ragged or sizes.left is not None or sizes.right is not None):
                    self.mask(at, row, n_block)
                self.softmax(at)
                self.pack(at)
                right_end = n_block
                if const_expr(sizes.right is not None):
                    sees = cutlass.min(sizes.seqlen_k, cutlass.max(m_offset + sizes.right + 1, 0))
                    right_end = cutlass.max(cutlass.min(sees // self.block_n, n_block), n_block_min)
                left_end = n_block_min
                if const_expr(sizes.left is not None):
                    hidden = cutlass.max(m_offset + self.positions - 1 - sizes.left, 0)
                    left_end = cutlass.min(cutlass.max((hidden + self.block_n - 1) // self.block_n, n_block_min), right_end)
                if const_expr(sizes.right is not None):
                    for i in cutlass.range(n_block - right_end, unroll=1):
                        self.step_masked(at, row, n_block - 1 - i, k_stage, k_phase, v_stage, v_phase)
                        k_stage, k_phase = _advance(k_stage, k_phase, self.num_stages)
                        v_stage, v_phase = _advance(v_stage, v_phase, self.num_stages)
                for _i in cutlass.range(right_end - left_end, unroll=1):
                    self.step(at, k_stage, k_phase, v_stage, v_phase)
                    k_stage, k_phase = _advance(k_stage, k_phase, self.num_stages)
                    v_stage, v_phase = _advance(v_stage, v_phase, self.num_stages)
                if const_expr(sizes.left is not None):
                    for i in cutlass.range(left_end - n_block_min, unroll=1):
                        self.step_masked(at, row, left_end - 1 - i, k_stage, k_phase, v_stage, v_phase)
                        k_stage, k_phase = _advance(k_stage, k_phase, self.num_stages)
                        v_stage, v_phase = _advance(v_stage, v_phase, self.num_stages)
                if const_expr(self.several):
                    self.release(bars.q_empty + consumer, lane)
                # The last tile's second product.
                cute.arch.mbarrier_wait(bars.v_full + v_stage, v_phase)
                _gemm(mma_pv, acc, p, tV[None, None, None, v_stage], accumulate=True)
                warpgroup.wait_group(0)
                self.release(bars.v_empty + v_stage, lane)
                v_stage, v_phase = _advance(v_stage, v_phase, self.num_stages)
            elif const_expr(self.several):
                self.release(bars.q_empty + consumer, lane)
            self.finish(at, tma_out, mO, raw, lse, sO, m_offset, row, m_block, head, batch, thread)
            if const_expr(self.schedule == "single"):
                tile = sizes.num_tiles
            if const_expr(self.schedule == "static"):
                tile = tile + cute.arch.grid_dim()[0]
            if const_expr(self.schedule == "dynamic"):
                cute.arch.mbarrier_wait(bars.tile_full + slot, slot_phase)
                tile = bars.tiles[slot]
                cute.arch.sync_warp()
                self.release(bars.tile_empty + slot, lane)
                slot, slot_phase = _advance(slot, slot_phase, _TILES)
        if warp_in_group == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def issue(self, at, k_stage, k_phase, v_stage, v_phase):
        """Both products of a step: the next scores, and this tile's part of the output. Returns with the scores there."""
        cute.arch.mbarrier_wait(at.bars.k_full + k_stage, k_phase)
        if const_expr(self.pingpong):
            cute.arch.barrier(barrier_id=_TURN + at.consumer, number_of_threads=256)
        _gemm(at.mma_qk, at.scores, at.tQ, at.tK[None, None, None, k_stage], accumulate=False)
        cute.arch.mbarrier_wait(at.bars.v_full + v_stage, v_phase)
        _gemm(at.mma_pv, at.acc, at.p, at.tV[None, None, None, v_stage], accumulate=True)
        if const_expr(self.pingpong):
            after = at.consumer + 1
            if after == self.num_consumers:
                after = Int32(0)
            cute.arch.barrier_arrive(barrier_id=_TURN + after, number_of_threads=256)
        warpgroup.wait_group(1)

    @cute.jit
    def step_masked(self, at, row, n_block, k_stage, k_phase, v_stage, v_phase):
        """A step over a tile that an edge cuts."""
        self.issue(at, k_stage, k_phase, v_stage, v_phase)
        self.cap(at)
        self.mask(at, row, n_block)
        self.softmax(at)
        # K is here, so this does not wait; but its branch keeps the exponentials in front of the wait for the product.
        cute.arch.mbarrier_wait(at.bars.k_full + k_stage, k_phase)
        self.release(at.bars.k_empty + k_stage, at.lane)
        warpgroup.wait_group(0)
        self.release(at.bars.v_empty + v_stage, at.lane)
        self.pack(at)
        self.rescale(at)

    @cute.jit
    def step(self, at, k_stage, k_phase, v_stage, v_phase):
        """A step over a tile that no edge cuts, with the origin that each row has.

        The row's maximum is not asked for: the sums tell whether a score outgrew the origin. Then, which is rare, this
        warp computes its scores again and moves the origin.
        """
        self.issue(at, k_stage, k_phase, v_stage, v_phase)
        self.cap(at)
        fits = cutlass.Boolean(True)
        sums = []
        for r in cutlass.range_constexpr(2):
            total = self.exponentials(at, r, at.origin[r])
            sums.append(total)
            fits = fits & (total <= _SUM_LIMIT[self.dtype])  # false for NaN, too
        # Before the second product is waited for: across a branch the compiler cannot move the exponentials behind it.
        l_i = at.l_i
        if cute.arch.vote_all_sync(fits):
            for r in cutlass.range_constexpr(2):
                l_i[r] = l_i[r] + sums[r]
        else:
            warpgroup.wait_group(0)
            self.recompute(at, k_stage)
            self.cap(at)
            self.softmax(at)
            self.rescale(at)
        self.release(at.bars.k_empty + k_stage, at.lane)
        warpgroup.wait_group(0)
        self.release(at.bars.v_empty + v_stage, at.lane)
        self.pack(at)

    def row_of(self, fragment, r):
        """Row ``r`` of the two, eight apart, of which a thread has columns in an accumulator: [2, half of its columns]."""
        return cute.make_tensor(fragment.iterator + 2 * r, cute.make_layout((2, cute.size(fragment) // 4), stride=(1, 4)))

    def position(self, at, row, r):
        """Query position of row ``r`` of this thread's two; ``row`` is that of its first row, or of its tile's if packed."""
        return row + 8 * r if self.heads_per_tile == 1 else row + (at.first_row + 8 * r) // self.heads_per_tile

    def exponentials(self, at, r, origin):
        """P of row ``r`` in place of its scores; returns the sum over this thread's columns."""
        row = self.row_of(at.scores, r)
        sums = [Float32(0.0), Float32(0.0)]
        for j in range(cute.size(row) // 2):
            for c in range(2):
                p = _exp2(row[c, j] * at.qk_scale - origin)
                row[c, j] = p
                sums[c] = sums[c] + p
        return sums[0] + sums[1]

    @cute.jit
    def softmax(self, at):
        """The online softmax of the scores, exact: new maximum, P, sums, and alpha, by which older output shrinks."""
        far = cutlass.Boolean(False)
        for r in cutlass.range_constexpr(2):
            row = self.row_of(at.scores, r)
            best = [at.m_i[r], row[0, 0], row[1, 0], row[0, 1]]
            for i in cutlass.range_constexpr(3, cute.size(row)):
                best[i % 4] = cute.arch.fmax(best[i % 4], row[i % 2, i // 2])
            m_new = cute.arch.fmax(cute.arch.fmax(best[0], best[1]), cute.arch.fmax(best[2], best[3]))
            m_new = cute.arch.fmax(m_new, cute.arch.shuffle_sync_bfly(m_new, offset=1))
            m_new = cute.arch.fmax(m_new, cute.arch.shuffle_sync_bfly(m_new, offset=2))
            seen = m_new > -Float32.inf
            base = m_new if seen else Float32(0.0)
            at.alpha[r] = _exp2((at.m_i[r] - base) * at.qk_scale)
            at.m_i[r] = m_new
            at.origin[r] = base * at.qk_scale
            far = far | (cute.arch.fmax(at.origin[r], -at.origin[r]) > _FAR)
        origin = at.origin
        if cute.arch.vote_any_sync(far):
            self.subtract(at)
            for r in cutlass.range_constexpr(2):
                origin[r] = Float32(0.0)
        for r in cutlass.range_constexpr(2):
            at.l_i[r] = at.l_i[r] * at.alpha[r] + self.exponentials(at, r, at.origin[r])
            # A row that saw nothing yet, or is far out, has no origin that a step could use: its sum shall not fit.
            near = cute.arch.fmax(at.m_i[r], -at.m_i[r]) * at.qk_scale <= _FAR
            at.origin[r] = at.origin[r] if near else -Float32.inf

    @cute.jit
    def subtract(self, at):
        """Scores relative to their row's maximum, for rows so far out that the product with qk_scale loses the difference."""
        for r in cutlass.range_constexpr(2):
            row = self.row_of(at.scores, r)
            base = at.m_i[r] if at.m_i[r] > -Float32.inf else Float32(0.0)
            for i in cutlass.range_constexpr(cute.size(row)):
                row[i % 2, i // 2] = row[i % 2, i // 2] - base

    @cute.jit
    def rescale(self, at):
        for r in cutlass.range_constexpr(2):
            row = self.row_of(at.acc, r)
            for i in cutlass.range_constexpr(cute.size(row)):
                row[i % 2, i // 2] = row[i % 2, i // 2] * at.alpha[r]

    @cute.jit
    def cap(self, at):
        """softcap * tanh(score / softcap) by exp2, in units in which the softmax goes on with the same qk_scale."""
        if const_expr(self.softcap):
            for i in cutlass.range_constexpr(cute.size(at.scores)):
                half = 0.5 * _exp2(at.scores[i] * at.cap_scale) + 0.5
                at.scores[i] = 1.0 - cute.arch.rcp_approx(half)

    @cute.jit
    def mask(self, at, row, n_block):
        """Scores of keys that a row does not see become -inf, whatever they are."""
        column = n_block * self.block_n + 2 * (at.lane % 4)
        for r in cutlass.range_constexpr(2):
            m = self.position(at, row, r)
            end = at.sizes.seqlen_k
            if const_expr(at.sizes.right is not None):
                end = cutlass.min(end, m + at.sizes.right + 1)
            end = end - column
            scores = self.row_of(at.scores, r)
            for i in cutlass.range_constexpr(cute.size(scores)):
                offset = i % 2 + 8 * (i // 2)
                visible = offset < end
                if const_expr(at.sizes.left is not None):
                    visible = visible & (offset >= m - at.sizes.left - column)
                scores[i % 2, i // 2] = scores[i % 2, i // 2] if visible else -Float32.inf

    @cute.jit
    def pack(self, at):
        """P rounded, as the register operand of the second product: no thread gives or takes anything."""
        words = cute.recast_tensor(at.p, Int32)
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = self.pair(at.scores[2 * i], at.scores[2 * i + 1])

    def pair(self, low, high):
        kind = "bf16x2" if self.dtype == torch.bfloat16 else "f16x2"
        return cute.arch.inline_ptx(
            f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Int32], read_only_args=[high, low]
        )

    @cute.jit
    def recompute(self, at, k_stage):
        """This warp's scores once more, by warp-level products: the order of a thread's scores is the same."""
        kind = _CUTE_DTYPES[self.dtype]
        mma = cute.make_tiled_mma(warp.MmaF16BF16Op(kind, Float32, (16, 8, 16)))
        mine = mma.get_slice(at.lane)
        keys = mine.partition_B(at.sK[None, None, k_stage])
        queries = mine.partition_A(cute.local_tile(at.sQ[None, None, at.consumer], (16, self.dim), (at.warp_in_group, 0)))
        layout = cute.make_layout(((2, 2), 1, self.block_n // 8), stride=((1, 2), 0, 4))
        scores = cute.make_tensor(at.scores.iterator, layout)
        scores.fill(0.0)
        a, b = mma.make_fragment_A(queries[None, None, 0]), mma.make_fragment_B(keys[None, None, 0])
        for k in cutlass.range(self.dim // 16, unroll=1):
            cute.autovec_copy(queries[None, None, k], a)
            cute.autovec_copy(keys[None, None, k], b)
            cute.gemm(mma, scores, a, b, scores)

    @cute.jit
    def release(self, empty, lane):
        """This warp is done with a slot."""
        if lane == 0:
            cute.arch.mbarrier_arrive(empty)

    @cute.jit
    def finish(self, at, tma_out, mO, raw, lse, sO, m_offset, row, m_block, head, batch, thread):
        """Output and lse of this consumer's rows."""
        kind = _CUTE_DTYPES[self.dtype]
        sizes = at.sizes
        for r in cutlass.range_constexpr(2):
            total = at.l_i[r]
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
            total = total + cute.arch.shuffle_sync_bfly(total, offset=2)
            at.alpha[r] = 0.0 if total == 0.0 else cute.arch.rcp_approx(total)
            if const_expr(lse is not None):
                m = self.position(at, row, r)
                if at.lane % 4 == 0 and self.is_row(at.first_row + 8 * r, m, sizes):
                    place = self.place_of_lse(at.first_row + 8 * r, m, head, batch, sizes)
                    value = (at.m_i[r] * at.qk_scale + cute.math.log2(total, fastmath=True)) * _LN_2
                    cute.make_tensor(lse + place, cute.make_layout(1))[0] = value if total != 0.0 else -Float32.inf
        self.rescale(at)
        rO = cute.make_rmem_tensor(at.acc.layout, kind)
        words = cute.recast_tensor(rO, Int32)
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = self.pair(at.acc[2 * i], at.acc[2 * i + 1])
        own = _OWN + at.consumer
        # Nothing may still be read where the output goes: the output before it, or V by another consumer.
        if const_expr(self.separate_out):
            if at.warp_in_group == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=own, number_of_threads=128)
        else:
            cute.arch.barrier(barrier_id=_ALL, number_of_threads=128 * self.num_consumers)
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), kind)
        copy = cute.make_tiled_copy_C(atom, at.mma_pv).get_slice(thread)
        cute.copy(atom, copy.retile(rO), copy.partition_D(sO[None, None, at.consumer]))
        if const_expr(sizes.left is not None or sizes.right is not None):
            spoilt = Float32(0.0)
            for i in cutlass.range_constexpr(cute.size(at.acc)):
                spoilt = spoilt + at.acc[i] * 0.0
            if cute.arch.vote_any_sync(spoilt != 0.0):  # true for NaN
                self.repair(at, raw, lse, sO, m_offset, head, batch)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=own, number_of_threads=128)
        if at.warp_in_group == 0:
            n = m_block * self.num_consumers + at.consumer
            gO, tO, n = self.partition_rows(tma_out, mO, sO, head, batch, n)
            cute.copy(tma_out, tO[None, at.consumer], gO[None, n])
            cute.arch.cp_async_bulk_commit_group()
            if const_expr(self.several and not self.separate_out):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                self.release(at.bars.out_empty, at.lane)

    def is_row(self, local, m, sizes):
        """Whether row ``local`` of a consumer, at position ``m``, is one of the problem's."""
        inside = m < sizes.seqlen_q
        return inside & (local < _ROWS - self.idle) if self.idle else inside

    def query_head(self, local, head):
        """Query head of a consumer's row ``local`` in a tile of ``head``."""
        return head if self.heads_per_tile == 1 else head * self.heads_per_tile + local % self.heads_per_tile

    def place_of_lse(self, local, m, head, batch, sizes):
        heads = sizes.num_heads if self.heads_per_tile == 1 else sizes.num_heads * self.heads_per_tile
        return (Int64(batch) * heads + self.query_head(local, head)) * sizes.seqlen_q + m

    @cute.jit
    def repair(self, at, raw, lse, sO, m_offset, head, batch):
        """This warp's rows once more, key by key over visible keys alone: slow, and complete in itself.

        P is 0 where a key is masked, and 0 * V is NaN when V holds NaN or inf there.
        """
        kind = _CUTE_DTYPES[self.dtype]
        sizes = at.sizes
        head_kv = head // sizes.group
        cute.arch.sync_warp()
        for i in cutlass.range(16, unroll=1):
            local = at.warp_in_group * 16 + i
            m = m_offset + local // self.heads_per_tile if const_expr(self.heads_per_tile > 1) else m_offset + local
            if self.is_row(local, m, sizes):
                first, end = Int32(0), sizes.seqlen_k
                if const_expr(sizes.left is not None):
                    first = cutlass.max(m - sizes.left, 0)
                if const_expr(sizes.right is not None):
                    end = cutlass.min(end, m + sizes.right + 1)
                q_row, out_row = (cute.make_rmem_tensor(d // 32, Float32) for d in (self.dim, self.dim_v))
                self.load_row(q_row, raw[0], batch, m, self.query_head(local, head), sizes.head_dim, at.lane)
                out_row.fill(0.0)
                m_i, l_i = -Float32.inf, Float32(0.0)
                for key in cutlass.range(first, end, unroll=1):
                    k_row, v_row = (cute.make_rmem_tensor(d // 32, Float32) for d in (self.dim, self.dim_v))
                    self.load_row(k_row, raw[1], batch, key, head_kv, sizes.head_dim, at.lane)
                    self.load_row(v_row, raw[2], batch, key, head_kv, sizes.head_dim_v, at.lane)
                    score = Float32(0.0)
                    for e in cutlass.range_constexpr(self.dim // 32):
                        score = score + q_row[e] * k_row[e]
                    for distance in cutlass.range_constexpr(5):
                        score = score + cute.arch.shuffle_sync_bfly(score, offset=1 << distance)
                    if const_expr(self.softcap):
                        score = 1.0 - cute.arch.rcp_approx(0.5 * _exp2(score * at.cap_scale) + 0.5)
                    m_new = cute.arch.fmax(m_i, score)
                    base = m_new if m_new > -Float32.inf else Float32(0.0)
                    p, alpha = _exp2((score - base) * at.qk_scale), _exp2((m_i - base) * at.qk_scale)
                    l_i = l_i * alpha + p
                    for e in cutlass.range_constexpr(self.dim_v // 32):
                        out_row[e] = out_row[e] * alpha + p * v_row[e]
                    m_i = m_new
                inverse = Float32(0.0) if l_i == 0.0 else cute.arch.rcp_approx(l_i)
                for e in cutlass.range_constexpr(self.dim_v // 32):
                    sO[local, at.lane + 32 * e, at.consumer] = kind(out_row[e] * inverse)
                if const_expr(lse is not None):
                    if at.lane == 0:
                        place = self.place_of_lse(local, m, head, batch, sizes)
                        value = (m_i * at.qk_scale + cute.math.log2(l_i, fastmath=True)) * _LN_2
                        cute.make_tensor(lse + place, cute.make_layout(1))[0] = value if l_i != 0.0 else -Float32.inf

    @cute.jit
    def load_row(self, into, source, batch, row, head, width, lane):
        """One row of a tensor in global memory, spread over the lanes of a warp; zero past its width."""
        pointer, batch_stride, row_stride, head_stride = source
        offset = Int64(batch) * batch_stride + Int64(row) * row_stride + Int64(head) * head_stride
        for e in cutlass.range_constexpr(cute.size(into)):
            column = lane + 32 * e
            value = cute.make_tensor(pointer + (offset + cutlass.min(column, width - 1)), cute.make_layout(1))[0]
            into[e] = Float32(value) if column < width else Float32(0.0)


def _tiles(kind: Any, rows: int, width: int, count: int) -> Any:
    """Layout of ``count`` tiles of [rows, width] in shared memory, swizzled as wgmma and TMA want them."""
    atom = warpgroup.make_smem_layout_atom(hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, kind, width), kind)
    return cute.tile_to_shape(atom, (rows, width, count), order=(0, 1, 2))


def _tma(op: Any, pointer: Any, layout: Any, *, packed: bool = False) -> Any:
    """The copy atom of a tensor, whose descriptor is a kernel parameter, and its coordinates.

    The launch brings the descriptor, so the shape here only has to be static and to have more than one tile.  Packed rows
    are (head of a group, position), whatever the group: the size of the box, too, is the descriptor's.
    """
    rows, width = cute.size(layout, mode=[0]), cute.size(layout, mode=[1])
    shape = cute.make_layout((1 << 20, width, 2, 2), stride=(8 * width, 1, width, 8 * width))
    if packed:
        shape = cute.make_layout(((2, 1 << 20), width, 2, 2), stride=((width, 8 * width), 1, 2 * width, 8 * width))
    return cpasync.make_tiled_tma_atom(op, cute.make_tensor(pointer, shape), cute.select(layout, mode=[0, 1]), (rows, width))


def _view(pointer: Any, kind: Any, layout: Any) -> Any:
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=kind), layout.outer)


def _allocate(memory: SmemAllocator, kind: Any, layout: Any) -> Any:
    return _view(memory.allocate_array(kind, cute.cosize(layout.outer), byte_alignment=1024), kind, layout)


def _partition(tma: Any, tensor: Any, shared: Any) -> Any:
    """Tiles of one head in global memory and in shared memory, as TMA copies them: [tile, number of the tile]."""
    rows, width = shared.shape[0], shared.shape[1]
    tiles = cute.local_tile(tensor, (cute.size(rows), cute.size(width)), (None, 0))
    inner, outer = cpasync.tma_partition(
        tma, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    return outer, inner


def _gemm(mma: Any, acc: Any, a: Any, b: Any, *, accumulate: bool) -> None:
    """Issues acc = a b, or acc += a b, as one group that is waited for elsewhere."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in range(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def _advance(stage, phase, count: cutlass.Constexpr):
    """The next slot of a ring, and the phase in which its barriers are waited for."""
    stage += 1
    if stage == count:
        stage = Int32(0)
        phase ^= 1
    return stage, phase


def _exp2(x: Any) -> Any:
    return cute.arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])
