"""``with peakattn.autotune():`` calls of a new shape class are tuned once, on their own tensors, and remembered.

Off by default.  Inside the block, a call whose shape class the store does not know compiles a few configs, holds each
to the oracle, times them side by side, and puts the winner into the store, where every later call and process finds it.
Nothing is tuned under CUDA graph capture, and nothing when the caller gave a config.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from peakattn import api, dispatch, ops, plan, race, store, trial, tuned
from peakattn.backends import load
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn.trial import Candidate, Tensors

_lock = threading.RLock()  # one measurement at a time; a backward comes from a thread of autograd


@dataclass
class Report:
    """What was tuned inside the block; prints as one line for each shape class, with what it cost."""

    tunings: list[tuple[list[store.Measured], float]] = field(default_factory=list)  # rows, and seconds in all

    @property
    def seconds(self) -> float:
        """What tuning cost: compiling, checking and timing."""
        return sum(seconds for _, seconds in self.tunings)

    def __str__(self) -> str:
        lines = (f"{rows[0].problem}: {summary(rows)}, {seconds:.2f} s in all" for rows, seconds in self.tunings)
        return "\n".join(lines) or "nothing was tuned"


def summary(rows: Sequence[store.Measured]) -> str:
    """One sentence on a shape class: how many configs, the winner, its speedup over the first row, the cost."""
    raced = [row for row in rows if row.speedup is not None]
    cost = f"{sum(r.compile_seconds for r in rows):.2f} s compiling, {sum(r.timing_seconds for r in rows):.2f} s timing"
    if not raced:
        return f"none of {len(rows)} configs can be used ({rows[0].reason}); {cost}"
    speedups = [row.speedup for row in raced if row.speedup is not None]
    index = race.winner(speedups)
    best = raced[index]
    knobs = ", ".join(f"{name}={value}" for name, value in best.config.items())
    tie = ", tied with others" if race.is_tied(speedups, index) else ""
    median, low, high = speedups[index]
    gain = "the default stands" if index == 0 else f"{median:.3f} x the default [{low:.3f}, {high:.3f}]"
    return f"{best.kernel} ({knobs}) of {len(rows)} configs, {gain}{tie}; {cost}"


@contextlib.contextmanager
def autotune(configs: int = 8, seconds: float = 2.0) -> Iterator[Report]:
    """Tune calls of shape classes that the store does not know, for the whole process, while the block runs.

    Args:
        configs: how many configs to try for each, the default among them.
        seconds: at most so long are they timed; compiling them is not counted.

    Yields a report of what was tuned and what it cost.  The winner is never one that was not surely faster than the
    default.  Where the store is, and how to switch it off, is in ``peakattn.store``.
    """
    if configs < 1 or seconds < 0:
        raise ValueError(f"configs is {configs} and seconds is {seconds}; allowed are 1 and up, and 0 and up.")
    report = Report()

    def tune(problem: AttentionProblem, device: Device, backend: str | None, tensors: Tensors) -> None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        with _lock:
            if not is_tuned(problem, device, backend):
                began = time.perf_counter()
                rows = trial.measure(problem, device, _untimed(problem, device, backend, configs), tensors, seconds)
                report.tunings.append((rows, time.perf_counter() - began))

    with _lock:
        before, plan.before_choosing = plan.before_choosing, tune
        _forget_plans()
    try:
        yield report
    finally:
        plan.before_choosing = before


def _forget_plans() -> None:
    """Calls that were made before must choose again."""
    for cache in (api._plans, api._recent, ops._plans, plan._backward_plans):
        cache.clear()


def is_tuned(problem: AttentionProblem, device: Device, backend: str | None) -> bool:
    """True when the store has a winner for the problem's shape class, none of whose rows is out of date."""
    try:
        choice = dispatch.choose(problem, device, backend)
    except dispatch.NoKernelError:
        return True  # there is nothing to tune, and the call itself raises
    return choice.config_source == "stored" and not any(name.startswith("stored") for name in choice.refusals)


def _untimed(problem: AttentionProblem, device: Device, backend: str | None, limit: int) -> list[Candidate]:
    """The anchor, and those of the shortlist that the store has no row of that counts."""
    anchor, *others = shortlist(problem, device, backend, limit)
    if anchor != anchor_of(problem, device):
        return [anchor, *others]
    known = store.read(device, problem.key())
    names = {row.name for row in known.measured if row.stale() is None} if known else set()
    return [anchor, *(candidate for candidate in others if candidate.name not in names)]


def takers(problem: AttentionProblem, device: Device, backend: str | None) -> list[str]:
    """Kernels that compute the problem, in dispatch's order."""
    order = dispatch.candidates(problem, device, backend)
    return [k for k in order if dispatch.unavailable(k.split(".")[0]) is None and load(k).reject(problem, device) is None]


def shortlist(problem: AttentionProblem, device: Device, backend: str | None, limit: int) -> list[Candidate]:
    """At most ``limit`` configs: the anchor, each kernel's default, shipped winners nearby, and neighbours of the anchor."""
    plain = dispatch.choose(problem, device, backend, stored=False)
    anchor = Candidate(plain.kernel_id, plain.config)
    found = [anchor_of(problem, device) or anchor, anchor]
    for kernel_id in takers(problem, device, backend):
        found.append(Candidate(kernel_id, load(kernel_id).default_config(problem, device)))
    found += _shipped(problem, device, anchor.kernel)
    space = [Candidate(anchor.kernel, config) for config in plain.kernel.search_space(problem, device)]
    found += sorted(space, key=lambda candidate: _steps(candidate.fields, anchor.fields))
    return list(dict.fromkeys(found))[: max(limit, 1 + (found[0] != anchor))]


def anchor_of(problem: AttentionProblem, device: Device) -> Candidate | None:
    """What the stored rows of the shape class were held against, so that new rows can be held against it too."""
    with contextlib.suppress(ValueError):
        known = store.read(device, problem.key())
        if known is not None and known.measured[0].stale() is None:
            return Candidate.of(known.measured[0])
    return None


def _shipped(problem: AttentionProblem, device: Device, kernel_id: str) -> Iterable[Candidate]:
    """Shipped winners of problems that differ in length alone."""
    key = problem.key()
    for entry in tuned.entries(device.slug):
        alike = all(key[name] == value for name, value in entry.key.items() if not name.startswith("seqlen"))
        if entry.kernel == kernel_id and alike:
            yield Candidate(kernel_id, load(kernel_id).Config(**entry.config))


def _steps(config: dict[str, Any], centre: dict[str, Any]) -> tuple[int, float]:
    """How many knobs differ, and by how many doublings; a switch or a missing number counts as one."""
    differing = [(config[name], value) for name, value in centre.items() if config[name] != value]
    numbers = all(type(a) is int and type(b) is int and a > 0 and b > 0 for a, b in differing)
    return len(differing), sum(abs(math.log2(a / b)) for a, b in differing) if numbers else float(len(differing))
