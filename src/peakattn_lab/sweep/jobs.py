"""The jobs that a sweep gives to worker processes, and the compiling ones done: in parallel, and off the GPU.

for done in compile_many(jobs, processes=16): ...
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab.records import FunctionFacts
from peakattn_lab.workers import Setup, run_many

COMPILE_TIMEOUT = 180.0  # seconds; ptxas needs minutes for some tiles that spill by the thousand
_NICE = 10  # compilers leave the CPU to the process that measures: one GPU waits for it, and they are many


@dataclass(frozen=True)
class CompileJob:
    """Compile one kernel for one problem under one config, for a device that need not be here."""

    kernel: str
    problem: AttentionProblem
    config: dict[str, Any]
    device: Device


@dataclass(frozen=True)
class Compiled:
    """What came of a CompileJob: the facts of each device function, or in ``error`` why there are none, as a sentence."""

    job: CompileJob
    functions: tuple[FunctionFacts, ...] = ()
    seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class MeasureJob:
    """Time one kernel under one config, or under several interleaved round by round, and check what was timed.

    With one config, sampling stops as soon as it is clearly slower than ``stop_above_us``.  ``seconds`` is the time
    for all configs together; each has at least six samples unless it was stopped.
    """

    kernel: str
    problem: AttentionProblem
    configs: tuple[dict[str, Any], ...]
    seconds: float = 0.01
    stop_above_us: float | None = None


@dataclass(frozen=True)
class Measurement:
    """What came of one config of a MeasureJob. ``message`` says what was checked, or what went wrong.

    In a job of several configs, sample i of each was taken in round i, side by side.
    """

    config: dict[str, Any]
    status: Literal["ok", "wrong", "failed", "crashed", "hung"]
    message: str
    samples_us: tuple[float, ...] = ()
    calls_per_sample: int = 1


def compile_many(
    jobs: Iterable[CompileJob],
    processes: int | None = None,
    *,
    timeout: float = COMPILE_TIMEOUT,
    stop: threading.Event | None = None,
    setup: Setup | None = None,
) -> Iterator[Compiled]:
    """The results of all jobs, each as soon as it is there. Closing the iterator ends the workers, and so does ``stop``.

    What a compiler keeps on disk is found by every later process, a measuring worker among them.
    """
    for job, outcome, seconds in run_many(jobs, setup or _compiler, processes, timeout=timeout, stop=stop):
        if outcome.status == "done":
            yield Compiled(job, outcome.value, seconds)
        else:
            yield Compiled(job, seconds=seconds, error=f"does not compile: {outcome.message}")


def _compiler() -> Callable[[CompileJob], tuple[FunctionFacts, ...]]:
    import torch

    torch.set_num_threads(1)
    if hasattr(os, "nice"):
        os.nice(_NICE)
    return compile_one


def compile_one(job: CompileJob) -> tuple[FunctionFacts, ...]:
    """Compile in this process; raises what the compiler raises."""
    from peakattn import backends
    from peakattn_lab import inspection

    config = backends.load(job.kernel).Config(**job.config)
    made = backends.toolchain(job.kernel.split(".")[0]).artifacts(job.kernel, job.problem, config, job.device.arch)
    return tuple(inspection.recorded(facts, job.problem, config, job.device) for facts in made)
