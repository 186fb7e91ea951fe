"""What device code for Hopper is written with: tiles in shared memory, TMA, products of a warpgroup, rings, conversions."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float16, Float32, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

ROWS = 64  # of one wgmma
CUTE_DTYPES = {torch.float16: Float16, torch.bfloat16: BFloat16}


def tile_layout(kind: Any, rows: int, width: int, count: int) -> Any:
    """Layout of ``count`` tiles of [rows, width] in shared memory, swizzled as wgmma and TMA want them."""
    atom = warpgroup.make_smem_layout_atom(hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, kind, width), kind)
    return cute.tile_to_shape(atom, (rows, width, count), order=(0, 1, 2))


def tma_copy(op: Any, pointer: Any, layout: Any, *, packed: bool = False) -> Any:
    """The copy atom of a tensor, whose descriptor is a kernel parameter, and its coordinates.

    The launch brings the descriptor, so the shape here only has to be static and to have more than one tile.  Packed rows
    are (head of a group, position), whatever the group: the size of the box, too, is the descriptor's.
    """
    rows, width = cute.size(layout, mode=[0]), cute.size(layout, mode=[1])
    shape = cute.make_layout((1 << 20, width, 2, 2), stride=(8 * width, 1, width, 8 * width))
    if packed:
        shape = cute.make_layout(((2, 1 << 20), width, 2, 2), stride=((width, 8 * width), 1, 2 * width, 8 * width))
    return cpasync.make_tiled_tma_atom(op, cute.make_tensor(pointer, shape), cute.select(layout, mode=[0, 1]), (rows, width))


def view(pointer: Any, kind: Any, layout: Any) -> Any:
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=kind), layout.outer)


def allocate(memory: SmemAllocator, kind: Any, layout: Any) -> Any:
    return view(memory.allocate_array(kind, cute.cosize(layout.outer), byte_alignment=1024), kind, layout)


def partition(tma: Any, tensor: Any, shared: Any) -> Any:
    """Tiles of one head in global memory and in shared memory, as TMA copies them: [tile, number of the tile]."""
    rows, width = shared.shape[0], shared.shape[1]
    tiles = cute.local_tile(tensor, (cute.size(rows), cute.size(width)), (None, 0))
    inner, outer = cpasync.tma_partition(
        tma, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    return outer, inner


def gemm(mma: Any, acc: Any, a: Any, b: Any, *, accumulate: bool) -> None:
    """Issues acc = a b, or acc += a b, as one group that is waited for elsewhere."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in range(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def advance(stage, phase, count: cutlass.Constexpr):
    """The next slot of a ring, and the phase in which its barriers are waited for."""
    stage += 1
    if stage == count:
        stage = Int32(0)
        phase ^= 1
    return stage, phase


def exp2(x: Any) -> Any:
    return cute.arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def pair(dtype: torch.dtype, low: Any, high: Any) -> Any:
    """Two float32 values, rounded, in one register; the first is its lower half."""
    kind = "bf16x2" if dtype == torch.bfloat16 else "f16x2"
    return cute.arch.inline_ptx(
        f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Int32], read_only_args=[high, low]
    )


@cute.jit
def release(empty, lane):
    """This warp is done with a slot."""
    if lane == 0:
        cute.arch.mbarrier_arrive(empty)
