"""Device code that the cute rungs for Hopper have in common: layouts, TMA copies, products, and which rows a block owns."""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

ROWS = 64  # query rows of a warpgroup
LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
CUTE_DTYPES = {torch.float16: Float16, torch.bfloat16: BFloat16}


def tiles(kind: Any, rows: int, width: int, count: int) -> Any:
    """Layout of ``count`` tiles of [rows, width] in shared memory, swizzled as wgmma and TMA want them."""
    atom = warpgroup.make_smem_layout_atom(hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, kind, width), kind)
    return cute.tile_to_shape(atom, (rows, width, count), order=(0, 1, 2))


def tma_load(pointer: Any, layout: Any) -> Any:
    return _tma(cpasync.CopyBulkTensorTileG2SOp(), pointer, layout)


def tma_store(pointer: Any, layout: Any) -> Any:
    return _tma(cpasync.CopyBulkTensorTileS2GOp(), pointer, layout)


def _tma(op: Any, pointer: Any, layout: Any) -> Any:
    """The copy atom of a tensor, whose descriptor is a kernel parameter, and its coordinates.

    The launch brings the descriptor, so the shape here only has to be static and to have more than one tile.
    """
    rows, width = cute.size(layout, mode=[0]), cute.size(layout, mode=[1])
    shape = cute.make_layout((1 << 20, width, 2, 2), stride=(8 * width, 1, width, 8 * width))
    return cpasync.make_tiled_tma_atom(op, cute.make_tensor(pointer, shape), cute.select(layout, mode=[0, 1]), (rows, width))


def allocate(memory: SmemAllocator, kind: Any, layout: Any) -> Any:
    array = memory.allocate_array(kind, cute.cosize(layout.outer), byte_alignment=1024)
    return cute.make_tensor(cute.recast_ptr(array, layout.inner, dtype=kind), layout.outer)


def head_tiles(tma: Any, tensor: Any, shared: Any, head: Any, batch: Any) -> Any:
    """Tiles of one head in global memory and in shared memory, as TMA copies them: [tile, number of the tile]."""
    rows, width = cute.size(shared, mode=[0]), cute.size(shared, mode=[1])
    in_global = cute.local_tile(tensor[None, None, head, batch], (rows, width), (None, 0))
    inner, outer = cpasync.tma_partition(
        tma, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(in_global, 0, 2)
    )
    return outer, inner


def fetch(tma: Any, head: Any, n: Any, slot: Any, full: Any) -> None:
    """One warp starts the copy of tile ``n`` of a head into a slot; the barrier ``full`` flips when it is there."""
    source, target = head
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, cute.size_in_bytes(target.element_type, target[None, 0].layout))
    cute.copy(tma, source[None, n], target[None, slot], tma_bar_ptr=full)


def products(kind: Any, block_n: int, dim: int, p_source: Any) -> Any:
    """The tiled products of one warpgroup: S = Q K^T from shared memory, and O += P V with P from ``p_source``."""
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
    qk = hopper.make_trivial_tiled_mma(kind, kind, k_major, k_major, Float32, (1, 1, 1), (ROWS, block_n))
    pv = hopper.make_trivial_tiled_mma(kind, kind, k_major, mn_major, Float32, (1, 1, 1), (ROWS, dim), p_source)
    return qk, pv


def transposed(sV: Any, block_n: int, dim: int, stages: int) -> Any:
    """V as the product reads it: [column, key, slot]."""
    return cute.composition(sV, cute.make_ordered_layout((dim, block_n, stages), order=(1, 0, 2)))


def gemm(mma: Any, acc: Any, a: Any, b: Any, *, accumulate: bool) -> None:
    """Issues acc = a b, or acc += a b, as one group that is waited for elsewhere."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in range(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def row_of(fragment: Any, r: int) -> Any:
    """Row ``r`` of the two that a thread has in an accumulator: every column that it holds of it, in pairs."""
    layout = cute.make_layout((2, cute.size(fragment) // 4), stride=(1, 4))
    return cute.make_tensor(fragment.iterator + 2 * r, layout)


def rounded(fragment: Any, into: Any) -> None:
    """Float32 values of an accumulator as 16-bit ones, in the same order."""
    kind = "bf16x2" if into.element_type is BFloat16 else "f16x2"
    words = cute.recast_tensor(into, Int32)
    for i in range(cute.size(words)):
        words[i] = cute.arch.inline_ptx(
            f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};",
            write_only_types=[Int32],
            read_only_args=[fragment[2 * i + 1], fragment[2 * i]],  # the first one is the upper half
        )


def to_shared(mma: Any, fragment: Any, tile: Any, thread: Any) -> None:
    """A 16-bit fragment with the layout of an accumulator of ``mma`` into a swizzled tile."""
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), fragment.element_type)
    copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
    cute.copy(atom, copy.retile(fragment), copy.partition_D(tile))


def exp2(x: Any) -> Any:
    return cute.arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def quad(x: Any, combine: Any) -> Any:
    """The four lanes that share a row combine their values."""
    x = combine(x, cute.arch.shuffle_sync_bfly(x, offset=1))
    return combine(x, cute.arch.shuffle_sync_bfly(x, offset=2))


@cute.jit
def advance(stage, phase, count: cutlass.Constexpr):
    """The next slot of a ring, and the phase in which its barriers are waited for."""
    stage += 1
    if stage == count:
        stage = Int32(0)
        phase ^= 1
    return stage, phase


@cute.jit
def place(num_heads_q, num_m_blocks, total_heads, heads_per_section, longest_first: cutlass.Constexpr):
    """Row block, head and batch entry of this block.

    Blocks go section by section, a section being the heads whose K and V share L2, and in a section longest first.
    """
    tile = cute.arch.block_idx()[0]
    first_head = tile // (heads_per_section * num_m_blocks) * heads_per_section
    heads = cutlass.min(heads_per_section, total_heads - first_head)
    rest = tile - first_head * num_m_blocks
    m_block = rest // heads
    head = first_head + rest - m_block * heads
    if const_expr(longest_first):
        m_block = num_m_blocks - 1 - m_block
    batch = head // num_heads_q
    return m_block, head - batch * num_heads_q, batch


@cute.jit
def keys_seen(row, seqlen_k, offset, causal: cutlass.Constexpr):
    """How many keys a query row sees."""
    count = seqlen_k
    if const_expr(causal):
        count = cutlass.min(count, cutlass.max(row + offset + 1, 0))
    return count


@cute.jit
def store_lse(lse, m_i, l_i, qk_scale, row, lane, head, batch, num_heads_q, seqlen_q):
    """The natural logarithm of a row's sum of exponentials; -inf where no key was seen."""
    if const_expr(lse is not None):
        is_mine = (lane % 4 == 0) & (row < seqlen_q)
        if is_mine:
            at = (Int64(batch) * num_heads_q + head) * seqlen_q + row
            value = (m_i * qk_scale + cute.math.log2(l_i, fastmath=True)) * LN_2
            cute.make_tensor(lse + at, cute.make_layout(1))[0] = value if l_i != 0.0 else -Float32.inf
