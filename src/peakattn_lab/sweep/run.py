"""The sweep of a kernel: every config of a grid on every problem, compiled first, then checked and timed.

The compilers run in parallel and away from the GPU; configs are measured one after another in a worker process while
the others still compile.  Whatever becomes of a config is a row: pruned and by what, spilling, wrong, crashed, hung.
Without a GPU the sweep ends with what the compiler made and the time that ``predict`` says.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from peakattn import backends, dispatch
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab import observe, problems, provenance, records
from peakattn_lab.records import FunctionFacts, SweepRecord
from peakattn_lab.sweep import jobs, predict
from peakattn_lab.sweep.grid import Candidate, code_class, from_both_ends
from peakattn_lab.sweep.jobs import Compiled, CompileJob, MeasureJob, Measurement
from peakattn_lab.sweep.measure import Measures, MeasuringWorker

FINALISTS = 8
_NEAR = 1.05  # a screened time within this of the fastest makes a finalist
_SCREEN_SECONDS = 0.004
_FINAL_SECONDS = 0.25
_TIMEOUT = 60.0
_OBSERVE_SECONDS = 0.5


@dataclass
class Sweep:
    """One kernel on one device. ``torch_device`` is where to measure; without it the device need not be here."""

    kernel: str
    device: Device
    torch_device: torch.device | None = None
    processes: int | None = None
    final_seconds: float = _FINAL_SECONDS
    timeout: float = _TIMEOUT
    commit: str | None = None
    on_step: Callable[[str, int, int], None] = lambda text, done, total: None
    compile_many: Callable[..., Iterator[Compiled]] = jobs.compile_many
    worker: Callable[[str], Measures] = MeasuringWorker
    _best: dict[str, float] = field(default_factory=dict)  # the lowest median of each problem, microseconds
    _done: int = 0
    _total: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _observer: observe.Observer | None = None
    _observed: dict[str, Any] = field(default_factory=dict)
    _observed_at: float = -math.inf

    def __post_init__(self) -> None:
        if self.kernel not in backends.KERNELS:
            raise ValueError(f"kernel {self.kernel!r} is unknown; known are {', '.join(backends.KERNELS)}.")
        backend = self.kernel.split(".")[0]
        reason = dispatch.unavailable(backend)
        if reason is not None:
            raise ValueError(f"{self.kernel} cannot be compiled: {reason}.")
        self.compiler: str = backends.toolchain(backend).version()

    def run(self, grid: Sequence[Candidate], before: Sequence[SweepRecord] = ()) -> Iterator[SweepRecord]:
        """Rows as they come. What ``before`` has of this kernel, compiler and device is not done again."""
        rows = [row for row in before if self._is_current(row)]
        done = {row.key for row in rows}
        todo = [c for c in grid if self._record(c, "static", "compiled").key not in done]
        self._done, self._total = len(grid) - len(todo), len(grid)
        for row in rows:
            self._note(row)
        for candidate in todo:
            if candidate.reason is not None:
                yield self._step(self._record(candidate, "static", "pruned", reason=candidate.reason))
        classes: dict[tuple[Any, ...], list[Candidate]] = {}
        for candidate in todo:
            if candidate.reason is None:
                classes.setdefault(code_class(candidate), []).append(candidate)
        ordered = from_both_ends(list(classes.values()))
        if self.torch_device is None:
            for made, members in self._compile(ordered):
                for candidate in members:
                    yield self._step(self._unfit(candidate, made) or self._record(candidate, "static", "compiled", made))
            return
        with self.worker(str(self.torch_device)) as worker:
            for row in self._survivors(worker, ordered):
                rows.append(row)
                yield row
            yield from self._finals(worker, rows, [c.problem for c in grid])

    def _is_current(self, row: SweepRecord) -> bool:
        same = (row.kernel, row.compiler, row.provenance.device) == (self.kernel, self.compiler, self.device.name)
        timed = self.torch_device is None or row.status != "compiled"
        return same and timed and row.kernel_hash == records.kernel_hash(self.kernel)

    def _survivors(self, worker: Measures, classes: Sequence[list[Candidate]]) -> Iterator[SweepRecord]:
        """Compile in the background; measure each config as soon as it is there."""
        compiled = _Background(self._compile(classes))
        try:
            for made, members in compiled:
                for candidate in members:
                    row = self._unfit(candidate, made) or self._measured(worker, candidate, made)
                    self._note(row)
                    yield self._step(row)
        finally:
            self._stop.set()

    def _compile(self, classes: Sequence[list[Candidate]]) -> Iterator[tuple[Compiled, list[Candidate]]]:
        """One compilation for each class of identical ones."""
        jobs = [CompileJob(self.kernel, members[0].problem, members[0].config, self.device) for members in classes]
        if self.device.type == "cpu":
            yield from zip(map(Compiled, jobs), classes, strict=True)
            return
        members_of = {id(job): members for job, members in zip(jobs, classes, strict=True)}
        for made in self.compile_many(jobs, self.processes, stop=self._stop):
            yield made, members_of[id(made.job)]

    def _unfit(self, candidate: Candidate, made: Compiled) -> SweepRecord | None:
        """A row when the compiler failed, or made something that the device cannot launch."""
        if made.error is not None:
            return self._record(candidate, "static", "uncompiled", made, reason=made.error)
        for one in made.functions:
            if one.shared_bytes > self.device.smem_per_block:
                reason = f"{one.name} has {one.shared_bytes} bytes of shared memory; a block has {self.device.smem_per_block}."
                return self._record(candidate, "static", "pruned", made, reason=reason)
            if not one.blocks:
                reason = f"{one.name} has {one.registers} registers in each of {one.num_threads} threads; no SM holds a block."
                return self._record(candidate, "static", "pruned", made, reason=reason)
        return None

    def _measured(self, worker: Measures, candidate: Candidate, made: Compiled) -> SweepRecord:
        best = self._best.get(records.problem_key(problems.to_dict(candidate.problem)))
        job = MeasureJob(self.kernel, candidate.problem, (candidate.config,), _SCREEN_SECONDS, best)
        [result] = worker.measure(job, self.timeout)
        return self._record(candidate, "screen", result.status, made, observed=self._observe(), **_outcome(result))

    def _finals(
        self, worker: Measures, rows: Sequence[SweepRecord], wanted: Sequence[AttentionProblem]
    ) -> Iterator[SweepRecord]:
        """Finalists of each problem, interleaved; none where earlier rows have them already."""
        names = {records.problem_key(problems.to_dict(p)) for p in wanted}
        groups = predict.by_problem(row for row in rows if records.problem_key(row.problem) in names)
        for members in groups.values():
            chosen = finalists(members)
            if len(chosen) < 2 or all(row.stage == "final" for row in chosen):
                continue
            seconds = self.final_seconds * len(chosen)
            job = MeasureJob(self.kernel, problems.from_dict(chosen[0].problem), tuple(r.config for r in chosen), seconds)
            for row, result in zip(chosen, worker.measure(job, self.timeout), strict=True):
                if result.status not in ("ok", "wrong"):
                    continue  # a lost worker does not say whose fault it was; the times of before stay
                values = {"gate": None, "reason": None, **_outcome(result), "observed": self._observe()}
                values |= {"stage": "final", "status": result.status, "provenance": self._provenance()}
                yield row.model_copy(update=values)

    def _observe(self) -> dict[str, Any]:
        """Clocks, power and temperature, as of at most half a second ago: reading them takes as long as a small kernel."""
        if self.torch_device is None or self.torch_device.type != "cuda":
            return {}
        if self._observer is None:
            self._observer = observe.of_cuda(self.torch_device.index or 0)
        if time.monotonic() - self._observed_at > _OBSERVE_SECONDS:
            self._observer.read()
            self._observed, self._observed_at = self._observer.summary(), time.monotonic()
        return self._observed

    def _note(self, row: SweepRecord) -> None:
        if row.speed_known:
            name = records.problem_key(row.problem)
            self._best[name] = min(row.median_us, self._best.get(name, math.inf))

    def _step(self, row: SweepRecord) -> SweepRecord:
        self._done += 1
        self.on_step(f"{row.status}: {problems.label(problems.from_dict(row.problem))}", self._done, self._total)
        return row

    def _provenance(self) -> provenance.Provenance:
        return provenance.here(self.device.name, self.device.arch, self.commit)

    def _record(
        self, candidate: Candidate, stage: Any, status: Any, made: Compiled | None = None, **values: Any
    ) -> SweepRecord:
        functions: list[FunctionFacts] = []
        if made is not None:
            functions = list(made.functions)
            values |= {"functions": functions, "compile_seconds": round(made.seconds, 3)}
            if functions:
                values["predicted_us"] = predict.predicted_us(
                    self.kernel, candidate.problem, candidate.config, functions, self.device
                )
        return SweepRecord(
            provenance=self._provenance(),
            problem=problems.to_dict(candidate.problem),
            kernel=self.kernel,
            kernel_hash=records.kernel_hash(self.kernel),
            compiler=self.compiler,
            config=candidate.config,
            stage=stage,
            status=status,
            shared_estimate=candidate.estimate.shared_bytes,
            register_estimate=candidate.estimate.registers,
            **values,
        )


def finalists(rows: Sequence[SweepRecord]) -> list[SweepRecord]:
    """Rows of one problem whose screened time is near the lowest, the lowest first."""
    timed = sorted((r for r in rows if r.speed_known), key=lambda r: r.median_us)
    return [r for r in timed if r.interval_us[0] <= _NEAR * timed[0].interval_us[1]][:FINALISTS]


def _outcome(result: Measurement) -> dict[str, Any]:
    values: dict[str, Any] = {"samples_us": list(result.samples_us), "calls_per_sample": result.calls_per_sample}
    return values | ({"gate": result.message} if result.status == "ok" else {"reason": result.message})


class _Background:
    """An iterator that a thread runs ahead of its reader."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            for item in self._items:
                self._ready.put((item, None))
            self._ready.put((None, None))
        except BaseException as error:
            self._ready.put((None, error))

    def __iter__(self) -> Iterator[Any]:
        while True:
            item, error = self._ready.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item
