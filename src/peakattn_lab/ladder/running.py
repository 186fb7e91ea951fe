"""Rungs timed: interleaved with each other and the rivals, their outputs checked, with what their code says beside."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from peakattn import dispatch, plan
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab import baselines, problems, provenance, timing
from peakattn_lab.baselines import Contender
from peakattn_lab.bench import Bench
from peakattn_lab.gate import Gate
from peakattn_lab.ladder import Rung
from peakattn_lab.ladder.compiling import Code, Job, executed_flops
from peakattn_lab.ladder.rows import RungRecord
from peakattn_lab.ladder.subjects import Subject, candidates, refusal

_TUNING_SECONDS = 0.25  # of measuring, for each candidate of a tuned rung


def run(
    subjects: Sequence[Subject],
    problem: AttentionProblem,
    rivals: Sequence[Contender],
    bench: Bench,
    code: Mapping[Job, Code],
) -> Iterator[RungRecord]:
    """Records of all subjects and rivals on one problem; a wrong one has a reason in place of a speed."""
    by_label = {one.label: one for one in subjects}
    for record in bench.run([problem], [*map(contender, subjects), *rivals]):
        one = by_label.get(record.contender)
        values = record.model_dump()
        if one is not None:
            values |= _about(one) | _from_code(one, problem, bench.device, code)
        yield RungRecord(**{"rung": None, **values})


def static(
    subjects: Sequence[Subject], problem: AttentionProblem, device: Device, code: Mapping[Job, Code]
) -> list[RungRecord]:
    """Records of what the compiler made, without a time."""
    made = []
    for one in subjects:
        found = code.get(Job.of(one, problem, device))
        made.append(
            RungRecord(
                provenance=provenance.here(device.name, device.arch),
                problem=problems.to_dict(problem),
                contender=one.label,
                mode="static",
                skipped=(found.error if found else None) or "compiled, not run",
                **_about(one),
                **_from_code(one, problem, device, code),
            )
        )
    return made


def tune(rung: Rung, problem: AttentionProblem, where: torch.device, seconds: float = _TUNING_SECONDS) -> Subject:
    """The fastest candidate of a rung, all timed interleaved; those that are wrong or do not fit are left out."""
    found = candidates(rung, problem, Device.of(where))
    if len(found) < 2:
        return found[0]
    began = time.perf_counter()
    tensors = problems.inputs(problem, where, seed=0)
    gate = Gate(problem, tensors)
    samplers: dict[str, timing.Sampler] = {}
    for i, one in enumerate(found):
        call = functools.partial(_Call(one, problem), *tensors)
        try:
            if gate.check((call(),)).passed:
                on_gpu = where.type == "cuda"
                samplers[str(i)] = timing.eager_sampler([call], lambda: None) if on_gpu else timing.wall_sampler([call])
        except Exception:  # a config that does not fit, or that the compiler refuses, is no candidate
            continue
    if not samplers:
        return found[0]
    samples = timing.interleave(samplers, seconds * len(samplers), finish=timing.finisher(where))
    best = min(samples, key=lambda name: statistics.median_high(samples[name]))
    spent = round(time.perf_counter() - began, 3)
    return dataclasses.replace(found[int(best)], config_source="measured", candidates=len(samplers), tuning_seconds=spent)


def contender(subject: Subject) -> Contender:
    """A subject as the bench takes it: allocation of out, and the prepared launch."""
    return Contender(
        subject.label,
        subject.rung.name,
        unavailable=lambda device: dispatch.unavailable(subject.rung.language),
        reject=lambda problem: refusal(subject.rung, problem, Device.of(torch.device(problem.device_type))),
        function=lambda problem: _Call(subject, problem),
        package="peakattn",
    )


class _Call:
    """q, k, v -> out of one subject, its launch prepared at the first call."""

    def __init__(self, subject: Subject, problem: AttentionProblem) -> None:
        self._kernel, self._config = subject.rung.kernel, subject.config
        self._problem = problem
        self._scale = 1.0 / math.sqrt(problem.head_dim)
        self._launch: Callable[..., None] | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = plan.new_out(q, self._problem.head_dim_v)
        if self._launch is None:
            self._launch = plan.prepared(self._kernel, self._problem, self._config, (q, k, v, out, None), q.device)
        self._launch(q, k, v, out, None, self._scale, 0.0)
        return out


def _about(one: Subject) -> dict[str, Any]:
    return {
        "rung": one.rung.id,
        "source_hash": one.rung.source_hash,
        "config": baselines.config_fields(one.config),
        "config_source": one.config_source,
        "candidates": one.candidates,
        "tuning_seconds": one.tuning_seconds,
    }


def _from_code(one: Subject, problem: AttentionProblem, device: Device, code: Mapping[Job, Code]) -> dict[str, Any]:
    found = code.get(Job.of(one, problem, device))
    if found is None or found.facts is None:
        return {}
    executed = executed_flops(one.rung, problem, one.config, found.ratio)
    return {"facts": found.facts, "executed_flops": executed, "layouts": found.layouts}
