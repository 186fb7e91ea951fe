"""Bytes that each device function should move: predicted before they are read from counters.

A block reads its own tiles once, and the tiles of the other side that its rows or keys can see.  What several blocks read
comes from L2 each time; from memory everything must come once.  Tiles that one load hands to several blocks (multicast)
would be counted for each of them.
"""

from __future__ import annotations

import math
from typing import Any

from peakattn.problem import AttentionProblem


def l2_to_sm(function: str, problem: AttentionProblem, config: dict[str, Any]) -> tuple[float, str] | None:
    """(bytes from L2 into the SMs, how they come about in words), or None for a function whose tiles are not known."""
    size = problem.dtype.itemsize
    row, key = size * problem.head_dim, size * (problem.head_dim + problem.head_dim_v)
    own, prefix = row, ""
    if problem.direction == "bwd":
        if "dkdv" in function:
            return _of_key_blocks(problem, config)
        if "rows" in function:
            return _of_rows(problem)
        if "dq" not in function:
            return None
        prefix, own = "dq_", size * (problem.head_dim + problem.head_dim_v) + 8  # q, dout, lse and delta
    block_m, block_n = config.get(f"{prefix}block_m"), config.get(f"{prefix}block_n")
    if not block_m or not block_n:
        return None
    total = blocks = 0
    for start in range(0, problem.seqlen_q, block_m):
        end = min(start + block_m, problem.seqlen_q)
        first, last = _keys(problem, start, end, block_n)
        total += (end - start) * own + (last - first) * key
        blocks += 1
    heads = problem.batch * problem.num_heads_q
    return float(total * heads), _words(blocks * heads, f"{block_m} query rows", total / max(blocks, 1))


def _of_key_blocks(problem: AttentionProblem, config: dict[str, Any]) -> tuple[float, str] | None:
    block_n = config.get("dkdv_block_n")
    if not block_n:
        return None
    size = problem.dtype.itemsize
    own = size * (problem.head_dim + problem.head_dim_v)
    total = blocks = 0
    for start in range(0, problem.seqlen_k, block_n):
        end = min(start + block_n, problem.seqlen_k)
        first, last = _rows(problem, start, end)
        total += (end - start) * own + problem.group * (last - first) * (own + 8)
        blocks += 1
    heads = problem.batch * problem.num_heads_kv
    return float(total * heads), _words(blocks * heads, f"{block_n} keys", total / max(blocks, 1))


def _of_rows(problem: AttentionProblem) -> tuple[float, str]:
    rows = problem.batch * problem.num_heads_q * problem.seqlen_q
    return float(rows * (2 * problem.dtype.itemsize * problem.head_dim_v + 4)), "out, dout and lse once"


def _keys(problem: AttentionProblem, start: int, end: int, block_n: int) -> tuple[int, int]:
    """Keys that rows [start, end) load: those any of them sees, in whole blocks."""
    first, _ = problem.key_range(start)
    _, last = problem.key_range(end - 1)
    if last <= first:
        return 0, 0
    return first // block_n * block_n, min(math.ceil(last / block_n) * block_n, problem.seqlen_k)


def _rows(problem: AttentionProblem, start: int, end: int) -> tuple[int, int]:
    """Rows that see some key of [start, end)."""
    first, last = 0, problem.seqlen_q
    if problem.window_right is not None:
        first = max(0, start - problem.offset - problem.window_right)
    if problem.window_left is not None:
        last = min(last, end - problem.offset + problem.window_left)
    return first, max(first, last)


def _words(blocks: int, of: str, each: float) -> str:
    return f"{blocks:,} blocks of {of} x {each / 1e6:.2f} MB each"
