"""What rungs compile to, with no GPU and in parallel: facts, layouts, and the tensor-core work of a launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab import inspection, workers
from peakattn_lab.ladder import Rung
from peakattn_lab.ladder.subjects import Subject
from peakattn_lab.records import FunctionFacts
from peakattn_lab.sweep.jobs import COMPILE_TIMEOUT
from peakattn_lab.wording import failure

_TILE = 256  # lengths that are multiples of every tile compile to the same code


@dataclass(frozen=True)
class Code:
    """What the compiler made of a subject, or why there is nothing."""

    facts: FunctionFacts | None = None
    layouts: tuple[str, ...] = ()
    error: str | None = None

    @property
    def ratio(self) -> float | None:
        """Executed over needed operations of a pass over the plainest loop."""
        return None if self.facts is None else self.facts.waste


@dataclass(frozen=True)
class Job:
    """What decides the code of a subject."""

    rung: Rung
    config: Any
    problem: AttentionProblem
    device: Device

    @classmethod
    def of(cls, subject: Subject, problem: AttentionProblem, device: Device) -> Job:
        if problem.seqlen_q % _TILE == 0 and problem.seqlen_k == problem.seqlen_q:
            problem = dataclasses.replace(problem, batch=1, seqlen_q=16 * _TILE, seqlen_k=16 * _TILE)
        return cls(subject.rung, subject.config, problem, device)


def compile_all(jobs: Iterable[Job], processes: int, on_done: Callable[[Job], None] = lambda job: None) -> dict[Job, Code]:
    """Each job once; what a compiler refuses has its error. Compilers keep what they made on disk, for the launches after."""
    wanted = list(dict.fromkeys(jobs))
    found: dict[Job, Code] = {}
    if processes < 2 or len(wanted) < 2:
        for job in wanted:
            found[job] = compile_one(job)
            on_done(job)
        return found
    for job, outcome, _ in workers.run_many(wanted, _compiler, min(processes, len(wanted)), timeout=COMPILE_TIMEOUT):
        found[job] = outcome.value if outcome.status == "done" else Code(error=f"does not compile: {outcome.message}")
        on_done(job)
    return found


def _compiler() -> Callable[[Job], Code]:
    return compile_one


def compile_one(job: Job) -> Code:
    """In this process."""
    try:
        (made,) = job.rung.artifacts(job.problem, job.config, job.device.arch)
        layouts = tuple(job.rung.layouts(job.problem, job.config, job.device.arch))
    except Exception as error:  # a compiler fails in its own ways
        return Code(error=f"does not compile: {failure(error)}")
    return Code(inspection.recorded(made, job.problem, job.config, job.device), layouts)


def executed_flops(rung: Rung, problem: AttentionProblem, config: Any, ratio: float | None) -> float | None:
    """Tensor-core operations of a launch: those of the visited tiles, times how often the code computes each.

    None where the code does not tell: products whose shape is no part of their opcode, warps that others launch.
    """
    block_m, block_n = getattr(config, "block_m", None), getattr(config, "block_n", None)
    if ratio is None or block_m is None or block_n is None:
        return None
    # Consumers of a warp-specialised kernel each skip what their own rows do not see.
    rows = block_m // getattr(config, "num_consumers", 1)
    pairs = visited_pairs(problem, rows, block_n, rung.visits_all)
    return 2.0 * problem.batch * problem.num_heads_q * pairs * (problem.head_dim + problem.head_dim_v) * ratio


def visited_pairs(problem: AttentionProblem, block_m: int, block_n: int, visits_all: bool) -> int:
    """(query, key) pairs of the tiles that a kernel computes for one head: whole tiles, whatever the mask leaves of them."""
    tiles = 0
    for first in range(0, problem.seqlen_q, block_m):
        end = problem.seqlen_k
        if problem.causal and not visits_all:
            end = min(end, max(first + block_m + problem.offset, 0))
        tiles += -(-end // block_n)
    return tiles * block_m * block_n
