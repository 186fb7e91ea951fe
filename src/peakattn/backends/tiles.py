"""The order of a forward's tiles, and the edges of its mask counted from a query's row: host arithmetic that kernels share."""

from __future__ import annotations

import math

from peakattn.problem import AttentionProblem

_L2_SECTION_BYTES = 32 << 20  # of K and V


def edges(problem: AttentionProblem) -> tuple[int | None, int | None]:
    """The window counted from the query's row, as (left, right); None for a side that cuts no row."""
    left = None if problem.window_left is None else problem.window_left - problem.offset
    right = None if problem.window_right is None else problem.window_right + problem.offset
    if left is not None and problem.seqlen_q - 1 - left <= 0:
        left = None
    if right is not None and right >= problem.seqlen_k - 1:
        right = None
    return left, right


def heads_per_section(problem: AttentionProblem) -> int:
    """Query heads whose tiles are scheduled together, the longest tiles first.

    Measured on an H200 on 2026-11-29 from 1 to all of them (docs/notebook/cute_fwd_sm90.md): few enough that their K and V
    stay in L2, and enough that blocks which run at the same time do not all read the same tile at once.  Where rows differ
    in length, more heads keep long tiles away from the end.
    """
    heads_kv = 4
    if problem.window_right is not None:
        head_bytes = problem.dtype.itemsize * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
        heads_kv = min(max(1 << round(math.log2(max(_L2_SECTION_BYTES / max(head_bytes, 1), 1))), 4), 16)
    return min(heads_kv * problem.group, problem.batch * problem.num_heads_q)
