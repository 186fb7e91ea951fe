"""What a profiler runs: one kernel on one problem, compiled and warm first, then one launch between two marks.

``python -m peakattn_lab.profiling.target JOB.json FOUND.json``.  It is a process of its own because profilers start the
process that they look into, and because two of them cannot look into one.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch

from peakattn import dispatch
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab import baselines, ladder, observe, problems
from peakattn_lab.baselines import Contender
from peakattn_lab.gate import Gate
from peakattn_lab.ladder import running
from peakattn_lab.sweep.measure import Arena

_WARM_CALLS = 8
_TIMELINE_CALLS = 10


class Job(pydantic.BaseModel):
    """What to launch. ``counters`` is one launch between the marks, ``timeline`` several, ``trace`` the same under torch."""

    problem: dict[str, Any]
    kernel: str | None = None
    rival: str | None = None
    rung: str | None = None  # of a ladder, such as ladder.cutile.step5
    config: dict[str, Any] | None = None  # knobs, all of them; the tuned or default ones without
    mode: Literal["counters", "timeline", "trace"] = "counters"
    warm_seconds: float = 1.0
    device: str = "cuda"

    @property
    def name(self) -> str:
        return self.rival or self.rung or f"{baselines.OURS}:{self.kernel}"


class Launch(pydantic.BaseModel):
    """One kernel on a timeline, microseconds."""

    name: str
    start: float
    duration: float


class Found(pydantic.BaseModel):
    """What the process tells about its launches."""

    device: str
    arch: int
    gate_passed: bool
    gate_message: str
    config: dict[str, Any] | None = None
    config_source: str | None = None
    version: str | None = None
    warm_us: float | None = None  # median of calls before the profiler looked, between events
    calls: int = 1
    timeline: list[Launch] = []
    observed: dict[str, Any] = {}


def run(job: Job) -> Found:
    """Prepare, check, warm up, and launch between the marks."""
    where = torch.device(job.device)
    device = Device.of(where)
    problem = problems.on_device(problems.from_dict(job.problem), device.type)
    found: dict[str, Any] = {"device": device.name, "arch": device.arch}
    if job.kernel is None:
        contender, facts = _contender(job, problem, where)
        found |= facts
        reason = contender.unavailable(device) or contender.reject(problem)
        if reason is not None:
            raise ValueError(reason)
        tensors = problems.inputs(problem, where, seed=0)
        bound = baselines.bind(contender, problem, tensors)
        result = Gate(problem, tensors).check(bound())
        call, held = bound.call, bound.held
        found["version"] = contender.version()
    else:
        choice = dispatch.choose(problem, device, backend=job.kernel, config=job.config)
        fields = baselines.config_fields(choice.config) or {}
        arena = Arena(problem, where, device)
        ours = arena.bind(choice.kernel_id, fields)
        for _ in arena.inputs:
            ours()
        result = arena.check(ours.outputs[0])
        call, held = ours, baselines.ours().held
        found |= {"config": fields, "config_source": choice.config_source}
    found |= {"gate_passed": result.passed, "gate_message": result.message}
    observer = observe.of_cuda(where.index or 0) if device.type == "cuda" else observe.Observer(None)
    with held():
        found["warm_us"] = warm(call, job.warm_seconds, device.type == "cuda", observer)
        if job.mode == "counters":
            marked(call, 1, job.name)
        else:
            found["calls"] = _TIMELINE_CALLS
            found["timeline"] = traced(call, _TIMELINE_CALLS) if job.mode == "trace" else []
            if job.mode == "timeline":
                marked(call, _TIMELINE_CALLS, job.name)
    return Found(**found, observed=observer.summary())


def _contender(job: Job, problem: AttentionProblem, where: torch.device) -> tuple[Contender, dict[str, Any]]:
    """A rival, or a rung with the config that its tuning finds, and what is to be told of it."""
    if job.rung is None:
        return baselines.rival(job.rival or ""), {}
    subject = running.tune(ladder.rung(job.rung), problem, where)
    told = {"config": baselines.config_fields(subject.config), "config_source": subject.config_source}
    return running.contender(subject), told


def warm(call: Callable[[], Any], seconds: float, cuda: bool, observer: observe.Observer) -> float:
    """Call until the clocks have settled; the median microseconds of a call in the last round."""
    began = time.perf_counter()
    while True:
        samples = [_timed(call, cuda) for _ in range(_WARM_CALLS)]
        observer.read()
        if time.perf_counter() - began >= seconds:
            return statistics.median(samples)


def _timed(call: Callable[[], Any], cuda: bool) -> float:
    if not cuda:
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e6
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def marked(call: Callable[[], Any], calls: int, name: str) -> None:
    """Calls that a profiler sees: it was told to look only between these marks."""
    if not torch.cuda.is_available():
        raise RuntimeError("there is no CUDA device for a profiler to look at.")
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    torch.cuda.nvtx.range_push(name)
    for _ in range(calls):
        call()
    torch.cuda.nvtx.range_pop()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def traced(call: Callable[[], Any], calls: int) -> list[Launch]:
    """The kernels of some calls by torch's profiler, which needs no counters and no rights."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    events = [e for e in trace.events() or () if e.device_type == DeviceType.CUDA]
    return [Launch(name=e.name, start=e.time_range.start, duration=e.time_range.elapsed_us()) for e in events]


def main(job_file: str, found_file: str) -> None:
    job = Job.model_validate_json(Path(job_file).read_text(encoding="utf-8"))
    Path(found_file).write_text(run(job).model_dump_json(), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
