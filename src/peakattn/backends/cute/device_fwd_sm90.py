"""Device code of ``cute.fwd_sm90``; imported, with cutlass, only to compile. ``fwd_sm90.py`` says what it does and why.

Here are the kernel, its tiles, its producer and its consumers, from the top.  ``device_softmax_sm90`` makes scores P,
``device_output_sm90`` ends a tile, and ``device_hopper_ops`` has what all are written with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils import hopper_helpers as hopper

from peakattn.backends.cute.device_hopper_ops import (
    CUTE_DTYPES,
    ROWS,
    advance,
    allocate,
    gemm,
    partition,
    release,
    tile_layout,
    tma_copy,
    view,
)
from peakattn.backends.cute.device_output_sm90 import finish
from peakattn.backends.cute.device_softmax_sm90 import cap, exponentials, mask, pack, rescale, softmax

_LOG2_E = math.log2(math.e)
# What a thread's part of a row's sum may reach before the row gets a new origin; P in float16 must stay below 65504.
_SUM_LIMIT = {torch.float16: 2.0**14, torch.bfloat16: 2.0**20}
_TILES = 2  # numbers of tiles on their way from the producer to the consumers
_TURN = 1  # the first of the named barriers for turns, one a consumer; device_output_sm90 has the next


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
        return ROWS // self.heads_per_tile

    @property
    def idle(self) -> int:
        """Rows of a consumer that no whole position fills: a group that does not divide 64 leaves some."""
        return ROWS % self.heads_per_tile

    @cute.jit
    def __call__(
        self, q_map, k_map, v_map, out_map, q, k, v, lse,
        seqlen_q, seqlen_k, head_dim, head_dim_v, num_heads, group, total_heads,
        num_m_blocks, num_tiles, heads_per_section, left, right,
        q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, counter,
        softmax_scale, softcap,
    ):  # fmt: skip
        kind = CUTE_DTYPES[self.dtype]
        layouts = (
            tile_layout(kind, ROWS, self.dim, self.num_consumers),
            tile_layout(kind, self.block_n, self.dim, self.num_stages),
            tile_layout(kind, self.block_n, self.dim_v, self.num_stages),
            tile_layout(kind, ROWS, self.dim_v, self.num_consumers),
        )
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        packed = self.heads_per_tile > 1
        tma_q, mQ = tma_copy(load, q_map, layouts[0], packed=packed)
        tma_k, mK = tma_copy(load, k_map, layouts[1])
        tma_v, mV = tma_copy(load, v_map, layouts[2])
        tma_out, mO = tma_copy(store, out_map, layouts[3], packed=packed)
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
        kind = CUTE_DTYPES[self.dtype]
        memory = SmemAllocator()
        sQ, sK, sV = (allocate(memory, kind, layout) for layout in layouts[:3])
        sO = allocate(memory, kind, layouts[3]) if self.separate_out else view(sV.iterator, kind, layouts[3])
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
        first = ROWS - self.idle
        for i in cutlass.range(cute.arch.thread_idx()[0], self.idle * self.dim, 128 * (self.num_consumers + 1), unroll=1):
            for c in cutlass.range_constexpr(self.num_consumers):
                sQ[first + i // self.dim, i % self.dim, c] = CUTE_DTYPES[self.dtype](0.0)
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
            gK, tK = partition(tma_k, mK[None, None, head_kv, batch], sK)
            gV, tV = partition(tma_v, mV[None, None, head_kv, batch], sV)
            if n_block_min < n_block_max:
                self.fetch(tma_k, gK, tK, n_block_max - 1, bars.k_full, bars.k_empty, k_stage, k_phase)
                k_stage, k_phase = advance(k_stage, k_phase, self.num_stages)
            for c in cutlass.range_constexpr(self.num_consumers):
                n = m_block * self.num_consumers + c
                gQ, tQ, n = self.partition_rows(tma_q, mQ, sQ, head, batch, n)
                self.fetch(tma_q, gQ, tQ, n, bars.q_full, bars.q_empty, Int32(c), q_phase, idle=self.idle)
            q_phase ^= 1
            if n_block_min < n_block_max:
                for i in cutlass.range(n_block_max - n_block_min - 1, unroll=1):
                    n_block = n_block_max - 1 - i
                    self.fetch(tma_k, gK, tK, n_block - 1, bars.k_full, bars.k_empty, k_stage, k_phase)
                    k_stage, k_phase = advance(k_stage, k_phase, self.num_stages)
                    self.await_out(bars, out_phase)
                    self.fetch(tma_v, gV, tV, n_block, bars.v_full, bars.v_empty, v_stage, v_phase)
                    v_stage, v_phase = advance(v_stage, v_phase, self.num_stages)
            # As late as the answer still comes in time: who asks early takes a tile from a block that could start it sooner.
            asked = self.ask(counter)
            self.await_out(bars, out_phase)
            if n_block_min < n_block_max:
                self.fetch(tma_v, gV, tV, n_block_min, bars.v_full, bars.v_empty, v_stage, v_phase)
                v_stage, v_phase = advance(v_stage, v_phase, self.num_stages)
            out_phase ^= 1
            following = self.answer(tile, asked, counter, sizes)
            if const_expr(self.schedule == "dynamic"):
                cute.arch.mbarrier_wait(bars.tile_empty + slot, slot_phase)
                if cute.arch.lane_idx() == 0:
                    tiles[slot] = following
                    cute.arch.mbarrier_arrive(bars.tile_full + slot)
                slot, slot_phase = advance(slot, slot_phase, _TILES)
            tile = following

    @cute.jit
    def await_out(self, bars, phase):
        """Where output passes through the ring of V: until the tile in front has left it."""
        if const_expr(self.several and not self.separate_out):
            cute.arch.mbarrier_wait(bars.out_empty, phase)

    def fetch(self, tma, gX, sX, n, full, empty, stage, phase, *, idle=0):
        """One tile, but for ``idle`` of 64 rows, by TMA into slot ``stage`` of its ring, once that is free."""
        cute.arch.mbarrier_wait(empty + stage, phase)
        num_bytes = cute.size_in_bytes(CUTE_DTYPES[self.dtype], sX[None, 0].layout)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, num_bytes * (ROWS - idle) // ROWS)
        cute.copy(tma, gX[None, n], sX[None, stage], tma_bar_ptr=full + stage)

    def partition_rows(self, tma, tensor, shared, head, batch, n):
        """Tiles of Q or of the output as TMA copies them, and the index under which they have the rows of consumer ``n``."""
        if self.heads_per_tile == 1:
            return *partition(tma, tensor[None, None, head, batch], shared), n
        rows = cute.domain_offset(((0, n * self.positions), 0), tensor[None, None, head, batch])
        return *partition(tma, rows, shared), 0

    # The consumers.

    @cute.jit
    def consume(self, tma_out, mO, raw, lse, sQ, sK, sV, sO, bars, sizes, qk_scale, cap_scale, consumer):
        kind = CUTE_DTYPES[self.dtype]
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
        scores = cute.make_rmem_tensor(mma_qk.partition_shape_C((ROWS, self.block_n)), Float32)
        acc = cute.make_rmem_tensor(mma_pv.partition_shape_C((ROWS, self.dim_v)), Float32)
        p = cute.make_rmem_tensor(mma_pv.partition_shape_A((ROWS, self.block_n)), kind)
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
                gemm(mma_qk, scores, tQ, tK[None, None, None, k_stage], accumulate=False)
                warpgroup.wait_group(0)
                release(bars.k_empty + k_stage, lane)
                k_stage, k_phase = advance(k_stage, k_phase, self.num_stages)
                cap(self, at)
                if const_expr(self.ragged or sizes.left is not None or sizes.right is not None):
                    mask(self, at, row, n_block)
                softmax(at)
                pack(self, at)
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
                        k_stage, k_phase = advance(k_stage, k_phase, self.num_stages)
                        v_stage, v_phase = advance(v_stage, v_phase, self.num_stages)
                for _i in cutlass.range(right_end - left_end, unroll=1):
                    self.step(at, k_stage, k_phase, v_stage, v_phase)
                    k_stage, k_phase = advance(k_stage, k_phase, self.num_stages)
                    v_stage, v_phase = advance(v_stage, v_phase, self.num_stages)
                if const_expr(sizes.left is not None):
                    for i in cutlass.range(left_end - n_block_min, unroll=1):
                        self.step_masked(at, row, left_end - 1 - i, k_stage, k_phase, v_stage, v_phase)
                        k_stage, k_phase = advance(k_stage, k_phase, self.num_stages)
                        v_stage, v_phase = advance(v_stage, v_phase, self.num_stages)
                if const_expr(self.several):
                    release(bars.q_empty + consumer, lane)
                # The last tile's second product.
                cute.arch.mbarrier_wait(bars.v_full + v_stage, v_phase)
                gemm(mma_pv, acc, p, tV[None, None, None, v_stage], accumulate=True)
                warpgroup.wait_group(0)
                release(bars.v_empty + v_stage, lane)
                v_stage, v_phase = advance(v_stage, v_phase, self.num_stages)
            elif const_expr(self.several):
                release(bars.q_empty + consumer, lane)
            finish(self, at, tma_out, mO, raw, lse, sO, m_offset, row, m_block, head, batch, thread)
            if const_expr(self.schedule == "single"):
                tile = sizes.num_tiles
            if const_expr(self.schedule == "static"):
                tile = tile + cute.arch.grid_dim()[0]
            if const_expr(self.schedule == "dynamic"):
                cute.arch.mbarrier_wait(bars.tile_full + slot, slot_phase)
                tile = bars.tiles[slot]
                cute.arch.sync_warp()
                release(bars.tile_empty + slot, lane)
                slot, slot_phase = advance(slot, slot_phase, _TILES)
        if warp_in_group == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def issue(self, at, k_stage, k_phase, v_stage, v_phase):
        """Both products of a step: the next scores, and this tile's part of the output. Returns with the scores there."""
        cute.arch.mbarrier_wait(at.bars.k_full + k_stage, k_phase)
        if const_expr(self.pingpong):
            cute.arch.barrier(barrier_id=_TURN + at.consumer, number_of_threads=256)
        gemm(at.mma_qk, at.scores, at.tQ, at.tK[None, None, None, k_stage], accumulate=False)
        cute.arch.mbarrier_wait(at.bars.v_full + v_stage, v_phase)
        gemm(at.mma_pv, at.acc, at.p, at.tV[None, None, None, v_stage], accumulate=True)
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
        cap(self, at)
        mask(self, at, row, n_block)
        softmax(at)
        # K is here, so this does not wait; but its branch keeps the exponentials in front of the wait for the product.
        cute.arch.mbarrier_wait(at.bars.k_full + k_stage, k_phase)
        release(at.bars.k_empty + k_stage, at.lane)
        warpgroup.wait_group(0)
        release(at.bars.v_empty + v_stage, at.lane)
        pack(self, at)
        rescale(at)

    @cute.jit
    def step(self, at, k_stage, k_phase, v_stage, v_phase):
        """A step over a tile that no edge cuts, with the origin that each row has.

        The row's maximum is not asked for: the sums tell whether a score outgrew the origin. Then, which is rare, this
        warp computes its scores again and moves the origin.
        """
        self.issue(at, k_stage, k_phase, v_stage, v_phase)
        cap(self, at)
        fits = cutlass.Boolean(True)
        sums = []
        for r in cutlass.range_constexpr(2):
            total = exponentials(at, r, at.origin[r])
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
            cap(self, at)
            softmax(at)
            rescale(at)
        release(at.bars.k_empty + k_stage, at.lane)
        warpgroup.wait_group(0)
        release(at.bars.v_empty + v_stage, at.lane)
        pack(self, at)

    @cute.jit
    def recompute(self, at, k_stage):
        """This warp's scores once more, by warp-level products: the order of a thread's scores is the same."""
        kind = CUTE_DTYPES[self.dtype]
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

    # Rows of a consumer, packed or not.

    def position(self, at, row, r):
        """Query position of row ``r`` of this thread's two; ``row`` is that of its first row, or of its tile's if packed."""
        return row + 8 * r if self.heads_per_tile == 1 else row + (at.first_row + 8 * r) // self.heads_per_tile

    def is_row(self, local, m, sizes):
        """Whether row ``local`` of a consumer, at position ``m``, is one of the problem's."""
        inside = m < sizes.seqlen_q
        return inside & (local < ROWS - self.idle) if self.idle else inside

    def query_head(self, local, head):
        """Query head of a consumer's row ``local`` in a tile of ``head``."""
        return head if self.heads_per_tile == 1 else head * self.heads_per_tile + local % self.heads_per_tile

    def place_of_lse(self, local, m, head, batch, sizes):
        heads = sizes.num_heads if self.heads_per_tile == 1 else sizes.num_heads * self.heads_per_tile
        return (Int64(batch) * heads + self.query_head(local, head)) * sizes.seqlen_q + m
