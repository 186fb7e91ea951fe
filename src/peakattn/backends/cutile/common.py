"""The host side that the cuTile kernels share: knobs, the mask as arguments, refusals."""

from __future__ import annotations

import math
from typing import Any

import torch

from peakattn.backends import tiles
from peakattn.device import Device
from peakattn.problem import AttentionProblem

_MOST_BLOCKS = 65535  # on the second and the third axis of a grid


def unsupported(problem: AttentionProblem, device: Device) -> str | None:
    """What neither kernel can do, as a sentence."""
    if device.type != "cuda":
        return f"it needs a CUDA device and the tensors are on {device.name}"
    if device.arch < 80:
        return f"it needs compute capability 8.0 or newer and {device.name} has {device.arch / 10}"
    return None


def padded(dim: int) -> int:
    """The power of two at or above ``dim`` that tiles have; 16 is the least that a tensor core takes."""
    return max(16, 1 << (dim - 1).bit_length())


def power_of_two(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high or value & (value - 1):
        raise ValueError(f"{name} is {value!r}; allowed are the powers of two from {low} to {high}.")


def between(name: str, value: Any, low: int, high: int, meaning: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}; allowed are {low} to {high}, {meaning}.")


def worker_warps(name: str, value: Any) -> None:
    if value not in (0, 4, 8):
        raise ValueError(f"{name} is {value!r}; allowed are 4, 8, or 0 for the compiler's choice.")


def grid(num_blocks: int, num_heads: int, section: int) -> tuple[tuple[int, int, int], int]:
    """A grid of ``num_blocks`` tiles of each head, and which of its axes counts the tiles.

    Blocks start along the first axis first: a tile of each head of a section, the next tile of them all, the next section.
    A section is as near to ``section`` heads as a divisor of all heads can be, so that no block computes a division to
    find its place.  Tiles that are too many for the second axis lie along the first.
    """
    below = range(1, math.isqrt(num_heads) + 1)
    divisors = [n for i in below if num_heads % i == 0 for n in (i, num_heads // i) if num_heads // n <= _MOST_BLOCKS]
    heads = min(divisors, key=lambda n: abs(math.log(n / section)), default=1)
    if num_blocks <= _MOST_BLOCKS:
        return (heads, num_blocks, num_heads // heads), 1
    return (num_blocks, heads, num_heads // heads), 0


def mask_arguments(problem: AttentionProblem) -> tuple[dict[str, int], dict[str, bool]]:
    """Run-time edges of the mask, counted from the row, and compile-time flags of those that cut any row."""
    left, right = tiles.edges(problem)
    return {"left": left or 0, "right": right or 0}, {"HAS_LEFT": left is not None, "HAS_RIGHT": right is not None}


def tf32(problem: AttentionProblem) -> bool:
    """Whether torch's own setting allows float32 tiles to be multiplied as TF32."""
    return problem.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
