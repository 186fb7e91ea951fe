"""What the Triton kernels share: tiles of memory, the mask rule over tiles, and the host side of both."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from peakattn.backends.triton import toolchain
from peakattn.backends.triton.toolchain import Tma
from peakattn.device import Device
from peakattn.problem import AttentionProblem, is_aligned

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# Numbers that lay out programs and bound loops.  Code that knows one to be 1 or a multiple of 16 is no faster, and more code.
LAYOUT_NUMBERS = (
    "num_heads",
    "num_heads_q",
    "num_heads_kv",
    "num_m_blocks",
    "num_n_blocks",
    "section",
    "offset",
    "window_left",
    "window_right",
)

# Of 255 registers a thread keeps about 40 for addresses, row statistics and copies.  Code that wants a few more spills
# a little, and may be the fastest all the same.
REGISTERS_FOR_TILES = 230

_L2_SECTION_BYTES = 32 << 20  # K and V of the heads whose blocks are scheduled together
_FIXED_SMEM_BYTES = 2048  # barriers and reduction scratch


@triton.jit
def program_block(num_blocks, num_heads, section, LAST_FIRST: tl.constexpr):
    """This program's block and head: a section of heads at a time, and in a section block by block over its heads."""
    pid = tl.program_id(0)
    first_head = pid // (num_blocks * section) * section
    width = tl.minimum(num_heads - first_head, section)
    rest = pid - first_head * num_blocks
    block = rest // width
    if LAST_FIRST:
        block = num_blocks - 1 - block
    return block, first_head + rest % width


@triton.jit
def load_tile(
    tma,
    base,
    stride_row,
    stride_col,
    batch,
    head,
    row,
    num_rows,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    MASK_ROWS: tl.constexpr,
):
    """Rows ``row`` to ``row + BLOCK`` of one head, zero beyond ``num_rows`` and ``DIM``: [BLOCK, BLOCK_DIM].

    By descriptor when ``tma`` is one; then the hardware fills in the zeros. Else from ``base``, the head's first
    element, and rows are compared with num_rows only under MASK_ROWS.
    """
    if tma is not None:
        return tma.load([batch, row, head, 0]).reshape([BLOCK, BLOCK_DIM])
    rows = tl.arange(0, BLOCK)
    cols = tl.arange(0, BLOCK_DIM)
    pointers = base + tl.cast(row, tl.int64) * stride_row
    pointers = pointers + (rows.to(tl.int64)[:, None] * stride_row + cols.to(tl.int64)[None, :] * stride_col)
    if MASK_ROWS and DIM != BLOCK_DIM:
        return tl.load(pointers, mask=(row + rows < num_rows)[:, None] & (cols < DIM)[None, :], other=0.0)
    if MASK_ROWS:
        return tl.load(pointers, mask=(row + rows < num_rows)[:, None], other=0.0)
    if DIM != BLOCK_DIM:
        return tl.load(pointers, mask=(cols < DIM)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def store_tile(
    base, stride_row, stride_col, row, num_rows, tile, BLOCK: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    rows = tl.arange(0, BLOCK)
    cols = tl.arange(0, BLOCK_DIM)
    pointers = base + tl.cast(row, tl.int64) * stride_row
    pointers = pointers + (rows.to(tl.int64)[:, None] * stride_row + cols.to(tl.int64)[None, :] * stride_col)
    mask = (row + rows < num_rows)[:, None]
    if DIM != BLOCK_DIM:
        mask = mask & (cols < DIM)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_row(base, stride_row, stride_col, row, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """One row in float32: [BLOCK_DIM]."""
    cols = tl.arange(0, BLOCK_DIM)
    pointers = base + tl.cast(row, tl.int64) * stride_row + cols.to(tl.int64) * stride_col
    return tl.load(pointers, mask=cols < DIM, other=0.0).to(tl.float32)


@triton.jit
def key_blocks(
    m_offset,
    seqlen_q,
    seqlen_k,
    offset,
    window_left,
    window_right,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Key blocks that the rows from m_offset see: n_block_min <= full_min <= full_max <= n_block_max.

    Between full_min and full_max every row sees every key, so nothing is masked there.
    """
    position = m_offset + offset
    last_row = tl.minimum(m_offset + BLOCK_M, seqlen_q) - 1
    end = seqlen_k
    full_end = seqlen_k
    if HAS_RIGHT:
        end = tl.minimum(end, tl.maximum(last_row + offset + window_right + 1, 0))
        full_end = tl.minimum(full_end, tl.maximum(position + window_right + 1, 0))
    start = 0
    full_start = 0
    if HAS_LEFT:
        start = tl.maximum(position - window_left, 0)
        full_start = tl.maximum(last_row + offset - window_left, 0)
    n_block_min = start // BLOCK_N
    n_block_max = tl.maximum(tl.cdiv(end, BLOCK_N), n_block_min)
    full_min = tl.minimum(tl.cdiv(full_start, BLOCK_N), n_block_max)
    full_max = tl.maximum(tl.minimum(full_end // BLOCK_N, n_block_max), full_min)
    return n_block_min, full_min, full_max, n_block_max


@triton.jit
def visible(rows, keys, offset, window_left, window_right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """The mask rule for query positions and key positions that broadcast against each other."""
    distance = keys - rows - offset
    if HAS_LEFT and HAS_RIGHT:
        return (distance >= -window_left) & (distance <= window_right)
    if HAS_LEFT:
        return distance >= -window_left
    if HAS_RIGHT:
        return distance <= window_right
    return distance == distance


@triton.jit
def tanh(x, ACCURATE: tl.constexpr):
    """Saturates without NaN for any finite x. ACCURATE keeps the relative accuracy of float32 near 0."""
    y = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))
    if ACCURATE:
        x2 = x * x
        series = x * (1.0 + x2 * (-1.0 / 3.0 + x2 * (2.0 / 15.0 + x2 * (-17.0 / 315.0 + x2 * (62.0 / 2835.0)))))
        y = tl.where(tl.abs(x) < 0.25, series, y)
    return y


@triton.jit
def any_nan(x):
    return tl.max((x != x).to(tl.int32), axis=None) > 0


def unsupported(problem: AttentionProblem, device: Device) -> str | None:
    """What neither kernel can do, as a sentence."""
    if device.type != "cuda":
        if not toolchain.interpreting():
            return f"it needs a CUDA device and the tensors are on {device.name}; TRITON_INTERPRET=1 interprets it on the CPU"
        if problem.dtype == torch.bfloat16:
            return "Triton's interpreter cannot multiply bfloat16; use float16 or float32"
        return None
    if device.arch < 80:
        return f"it needs compute capability 8.0 or newer and {device.name} has {device.arch / 10}"
    return None


def padded(dim: int) -> int:
    """The power of two at or above ``dim`` that tiles have; 16 is the least that a tensor core takes."""
    return max(16, 1 << (dim - 1).bit_length())


def power_of_two(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high or value & (value - 1):
        raise ValueError(f"{name} is {value!r}; allowed are the powers of two from {low} to {high}.")


def check_launch_knobs(num_warps: int, num_stages: int, maxnreg: int | None, prefix: str = "") -> None:
    power_of_two(f"{prefix}num_warps", num_warps, 1, 16)
    if not 1 <= num_stages <= 8:
        raise ValueError(f"{prefix}num_stages is {num_stages}; allowed are 1 to 8.")
    if maxnreg is not None and not (24 <= maxnreg <= 255):
        raise ValueError(f"{prefix}maxnreg is {maxnreg}; allowed are 24 to 255 registers per thread, or None for no limit.")


def strides(name: str, x: torch.Tensor) -> dict[str, int]:
    """Strides of ``[batch, seqlen, num_heads, head_dim]`` as kernel arguments ``stride_<name>{b,s,h,d}``."""
    return {f"stride_{name}{axis}": stride for axis, stride in zip("bshd", x.stride(), strict=True)}


def descriptor(use: bool, x: torch.Tensor, block: int) -> Tma | None:
    return Tma(x, (1, block, 1, padded(x.shape[-1]))) if use else None


def has_tma(problem: AttentionProblem, device: Device) -> bool:
    not_empty = problem.seqlen_q > 0 and problem.seqlen_k > 0
    return device.arch >= 90 and problem.aligned and problem.dtype.itemsize == 2 and not_empty


def addressable(problem: AttentionProblem, *tensors: torch.Tensor) -> bool:
    """True when TMA can read these tensors: 16-bit elements, aligned, not empty."""
    return problem.dtype.itemsize == 2 and all(x.numel() and is_aligned(x) for x in tensors)


def mask_arguments(problem: AttentionProblem) -> tuple[dict[str, int], dict[str, bool]]:
    """Run-time bounds and compile-time flags of the mask; a bound wider than the sequences is cut to fit an int32."""
    widest = problem.seqlen_q + problem.seqlen_k
    left, right = problem.window_left, problem.window_right
    args = {
        "offset": problem.offset,
        "window_left": 0 if left is None else min(left, widest),
        "window_right": 0 if right is None else min(right, widest),
    }
    return args, {"HAS_LEFT": left is not None, "HAS_RIGHT": right is not None}


def heads_together(problem: AttentionProblem, bytes_per_head: int, num_heads: int) -> int:
    """Heads scheduled together: one at a time when all blocks take equally long, else as many as L2 holds the data of.

    Longest-first order over many heads fills the tail of a masked launch, and stops paying when L2 overflows.
    """
    if problem.mask_name == "full":
        return 1
    return max(1, min(_L2_SECTION_BYTES // max(bytes_per_head, 1), num_heads))


def precision(problem: AttentionProblem) -> str:
    """How float32 tiles are multiplied: exactly, unless torch's own setting allows TF32."""
    if problem.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return "ieee"


def smem_bytes(*tiles: int) -> int:
    return sum(tiles) + _FIXED_SMEM_BYTES
