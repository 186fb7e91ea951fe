"""The candidates of a sweep: every config of a grid on a problem, with what is known of each before it is compiled."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from peakattn import backends
from peakattn.backends import tiles
from peakattn.backends.binding import meta_tensors
from peakattn.device import Device
from peakattn.problem import AttentionProblem, Direction
from peakattn_lab import problems
from peakattn_lab.sweep import budget

# The grid of the source of this sweep (seed 003), as values of the four knobs that it has.
SOURCE_TILES = (16, 32, 64, 128, 256)
SOURCE_WARPS = (1, 2, 4, 8, 16)
SOURCE_STAGES = (1, 2, 3, 4, 5)
SOURCE_TOKENS = (512, 1024, 2048, 4096)
GRIDS = ("space", "source")


@dataclass(frozen=True)
class Candidate:
    """One config for one problem; ``reason`` says why it cannot run or cannot win, before anything is compiled."""

    problem: AttentionProblem
    config: dict[str, Any]
    reason: str | None = None
    estimate: budget.Estimate = field(default_factory=budget.Estimate)


def source_problems(
    direction: Direction = "fwd", tokens: Sequence[int] = SOURCE_TOKENS, head_dim: int = 64
) -> list[AttentionProblem]:
    """The eight shapes of the source: batch 4, 8 heads of 64, bf16, 512 to 4096 tokens, full and causal."""
    return [
        problems.make(n, head_dim, batch=4, heads=8, causal=causal, direction=direction)
        for causal in (False, True)
        for n in tokens
    ]


def candidates(
    kernel_id: str, problem: AttentionProblem, device: Device, grid: str = "space", knobs: dict[str, list[Any]] | None = None
) -> list[Candidate]:
    """The grid for one problem, the default config first; ``knobs`` are values to take for a knob instead of the grid's."""
    kernel = backends.load(kernel_id)
    names = [f.name for f in dataclasses.fields(kernel.Config)]
    for name in knobs or {}:
        if name not in names:
            raise ValueError(f"{kernel_id} has no knob {name!r}; its knobs are {', '.join(names)}.")
    reason = kernel.reject(problem, device)
    if reason is not None:
        raise ValueError(f"{kernel_id} does not take {problems.label(problem)} on {device.name}: {reason}.")
    default = dataclasses.asdict(kernel.default_config(problem, device))
    if grid == "source":
        needed = {"block_m", "block_n", "num_warps", "num_stages"}
        if not needed <= set(names):
            raise ValueError(
                f"the source's grid has the knobs {', '.join(sorted(needed))}; {kernel_id} has {', '.join(names)}."
            )
        plain = {f.name: f.default for f in dataclasses.fields(kernel.Config) if f.default is not dataclasses.MISSING}
        base = [
            {**plain, "block_m": m, "block_n": n, "num_warps": w, "num_stages": s}
            for m, n, w, s in itertools.product(SOURCE_TILES, SOURCE_TILES, SOURCE_WARPS, SOURCE_STAGES)
        ]
    elif grid == "space":
        base = [default, *map(dataclasses.asdict, kernel.search_space(problem, device))]
    else:
        raise ValueError(f"grid is {grid!r}; allowed are {', '.join(GRIDS)}.")
    found: dict[str, Candidate] = {}
    chosen = itertools.product(*(knobs or {}).values())
    for values in chosen:
        replaced = dict(zip(knobs or {}, values, strict=True))
        for config in base:
            config = {**config, **replaced}
            key = json.dumps(config)
            if key not in found:
                found[key] = _candidate(kernel_id, kernel, problem, device, config)
    return sorted(found.values(), key=lambda c: c.config != default)


def _candidate(kernel_id: str, kernel: Any, problem: AttentionProblem, device: Device, fields: dict[str, Any]) -> Candidate:
    try:
        config = kernel.Config(**fields)
    except (ValueError, TypeError) as error:
        return Candidate(problem, fields, str(error))
    estimate = budget.estimate(kernel_id, problem, config, device)
    return Candidate(problem, fields, budget.misfit(estimate, device), estimate)


def code_class(candidate: Candidate) -> tuple[Any, ...]:
    """Equal for problems of one config that compile to the same code.

    Sizes are numbers of the launch. What compilers see of them is whether a tile is cut, whether an edge of the mask cuts
    any row, and whether a length or a stride is 1, a multiple of 16 or beyond 32 bits; not how many tiles and heads there are.
    """
    problem, config = candidate.problem, candidate.config
    blocks = sorted({value for name, value in config.items() if "block" in name and isinstance(value, int)})
    strides = [stride for tensor in meta_tensors(problem) if tensor is not None for stride in tensor.stride()]
    seen: list[Any] = [problem.group, *(edge is None for edge in tiles.edges(problem)), *map(_of_an_integer, strides)]
    for size in (problem.seqlen_q, problem.seqlen_k):
        seen += [_of_an_integer(size), *(size % block == 0 for block in blocks)]
    plain = dataclasses.replace(problem, seqlen_q=1, seqlen_k=1, batch=1, num_heads_q=1, num_heads_kv=1)
    return plain, json.dumps(config), tuple(seen)


def from_both_ends(classes: list[list[Candidate]]) -> list[list[Candidate]]:
    """The first, then the lightest and the heaviest in turn: a good time is there early, and no slow compilation comes last."""
    rest = sorted(classes[1:], key=lambda members: members[0].estimate.registers or 0)
    return classes[:1] + [rest[i // 2] if i % 2 == 0 else rest[-1 - i // 2] for i in range(len(rest))]


def _of_an_integer(value: int) -> tuple[bool, bool, bool]:
    return value == 1, value % 16 == 0, value >= 1 << 31
