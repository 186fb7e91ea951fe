"""What tuning does in its worker process: candidates checked, and timed side by side."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from peakattn import race
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab import timing
from peakattn_lab.sweep import measure
from peakattn_lab.wording import failure
from peakattn_lab.workers import check_context


@dataclass(frozen=True)
class RaceJob:
    """Check candidates, (kernel, config) pairs, and time them side by side; the first is the anchor."""

    problem: AttentionProblem
    candidates: tuple[tuple[str, dict[str, Any]], ...]
    seconds: float


@dataclass(frozen=True)
class Raced:
    """What came of one candidate: a lane, or in ``message`` why there is none."""

    status: Literal["ok", "wrong", "failed", "crashed", "hung"]
    message: str
    lane: race.Lane | None = None
    compile_seconds: float = 0.0
    timing_seconds: float = 0.0


class Racer:
    """The function of a RaceJob on one torch device."""

    def __init__(self, torch_device: str) -> None:
        self.where = torch.device(torch_device)
        if self.where.type == "cuda":
            torch.cuda.set_device(self.where)
        self._finish = timing.finisher(self.where)
        self._arena: measure.Arena | None = None

    def __call__(self, job: RaceJob) -> list[Raced]:
        if self._arena is None or self._arena.problem != job.problem:
            self._arena = None  # the old inputs go before the new ones come
            self._arena = measure.Arena(job.problem, self.where, Device.of(self.where))
        ready: dict[int, measure.Bound] = {}
        found: dict[int, Raced] = {}
        for i, (kernel, config) in enumerate(job.candidates):
            began = time.perf_counter()
            try:
                bound = self._arena.bind(kernel, config)
                bound.settle(self._finish)
                checked = self._arena.check(bound.outputs[0])
            except Exception as error:  # a compiler or a driver fails in its own ways
                check_context(self._finish, error)
                found[i] = Raced("failed", failure(error), compile_seconds=time.perf_counter() - began)
                continue
            found[i] = Raced("ok" if checked.passed else "wrong", checked.message, None, time.perf_counter() - began)
            if checked.passed:
                ready[i] = bound
        if 0 not in ready:
            return [found[i] for i in range(len(job.candidates))]
        began = time.perf_counter()
        lanes = race.run(list(ready.values()), job.seconds, finish=self._finish)
        share = (time.perf_counter() - began) / len(lanes)
        for (i, bound), lane in zip(ready.items(), lanes, strict=True):
            checked = self._arena.check(bound.outputs[0])  # the very outputs that were timed
            found[i] = replace(found[i], message=checked.message, timing_seconds=share)
            found[i] = replace(found[i], lane=lane) if checked.passed else replace(found[i], status="wrong")
        return [found[i] for i in range(len(job.candidates))]
