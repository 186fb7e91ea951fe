"""cutile.fwd with two row tiles a block and a late start, which its defaults take for many keys only."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import oracle
from conftest import Target

pytestmark = pytest.mark.gpu

CUTILE = Target("cuda", "cutile.fwd")
LENGTHS = [(1, 600), (65, 600), (300, 300), (600, 257), (1024, 1024)]


def config(head_dim: int, causal: bool) -> dict[str, Any]:
    """Two row tiles with the knobs that the defaults give them for long rows, and 64 causal, which no default gives them."""
    tiles = {"block_m": 64, "occupancy": 1, "row_tiles": 2}
    if head_dim == 256:
        return {**tiles, "block_n": 128, "block_masked": 64, "row_sums": 16, "stagger": 20}
    masked, row_sums = (64, 64) if head_dim == 64 else (128, 1 if causal else 8)
    return {**tiles, "block_n": 256, "block_masked": masked, "row_sums": row_sums, "stagger": 65}


def tensors(head_dim: int, seqlens: tuple[int, int]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, n, 3, head_dim, device="cuda", dtype=torch.bfloat16) for n in (*seqlens, seqlens[1])]


@pytest.mark.parametrize("seqlens", LENGTHS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_two_row_tiles_are_right_wherever_rows_and_keys_end(head_dim: int, causal: bool, seqlens: tuple[int, int]) -> None:
    q, k, v = tensors(head_dim, seqlens)
    first = CUTILE.attention(q, k, v, causal=causal, return_lse=True, config=config(head_dim, causal))
    oracle.check(first[0], first[1], q, k, v, causal=causal)
    for _ in range(5):  # a tile beyond the end is the last one again: two warpgroups store the same
        again = CUTILE.attention(q, k, v, causal=causal, return_lse=True, config=config(head_dim, causal))
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_each_row_tile_repairs_what_masked_keys_spoilt(head_dim: int) -> None:
    q, k, v = tensors(head_dim, (300, 600))
    options: dict[str, Any] = {"causal": True, "alignment": "top_left", "config": config(head_dim, True)}
    clean = CUTILE.attention(q, k, v, **options)
    k[:, 300:], v[:, 300:] = math.nan, math.inf
    torch.testing.assert_close(CUTILE.attention(q, k, v, **options), clean, rtol=2e-2, atol=2e-2)
