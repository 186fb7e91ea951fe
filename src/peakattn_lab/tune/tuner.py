"""peakattn tune: configs measured side by side until one is separated or they are tied; the winner goes to the user's store.

Candidates run in heats, each with the *anchor*, which is what runs where nothing was ever tuned; the best of all heats
meet in finals.  A worker process measures, so that a crash or a hang costs one config.  Every row is stored as it
comes: a run that was interrupted goes on where it stopped, and next time only a config that is new is timed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic
import torch

from peakattn import backends, dispatch, race, store
from peakattn.autotune import anchor_of
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn.trial import Candidate, row_of
from peakattn_lab import problems, provenance, records, workers
from peakattn_lab.sweep.jobs import CompileJob, compile_many
from peakattn_lab.tune.racer import Raced, RaceJob, Racer

HEAT = 8  # candidates that are timed together, and hold memory together
_HEAT = "heat"  # the mode of a row that has not met the other finalists
_MAX_FINALS = 3
_SECONDS_PER_CONFIG = 60.0  # after which a worker is taken for hung; a compiler may need most of it


class TuneRecord(pydantic.BaseModel):
    """One config on one problem, held against the anchor in the same rounds; ``samples_us`` are raw, in order."""

    model_config = pydantic.ConfigDict(extra="forbid")

    schema_version: int = records.SCHEMA
    provenance: provenance.Provenance
    problem: dict[str, Any]
    kernel: str
    kernel_hash: str | None
    compiler: str
    config: dict[str, Any]
    anchor: dict[str, Any]  # kernel and config
    speedup: tuple[float, float, float] | None  # over the anchor: median, and its interval
    samples_us: list[float] = []
    final: bool = False
    message: str = ""  # what was checked, or why there is no time
    compile_seconds: float = 0.0
    timing_seconds: float = 0.0


@dataclass
class Tuner:
    """One device, one file of records. ``worker`` does RaceJobs in another process; ``close`` ends it."""

    torch_device: torch.device
    path: Path  # where records go
    seconds: float = 2.0  # of finals, per problem; a heat has a quarter of it
    finalists: int = 6
    again: bool = False  # time what is stored, too
    commit: str | None = None  # of a tree that was copied without its repository
    worker: Any = None  # a workers.Worker
    on_step: Callable[[str], None] = lambda what: None
    compile_seconds: float = 0.0  # what the last problem cost
    timing_seconds: float = 0.0
    device: Device = field(init=False)

    def __post_init__(self) -> None:
        self.device = Device.of(self.torch_device)
        self._compile_seconds: dict[Candidate, float] = {}
        if self.worker is None:
            self.worker = workers.Worker(functools.partial(Racer, str(self.torch_device)))

    def close(self) -> None:
        self.worker.close()

    def tune(
        self, problem: AttentionProblem, kernel: str | None = None, proposals: Sequence[Candidate] | None = None
    ) -> list[store.Measured]:
        """Everything that is stored for the problem's shape class afterwards, the anchor first.

        ``kernel`` is a kernel id or a backend, default dispatch's own choice; ``proposals`` are its configs to try,
        default its search space.
        """
        self.compile_seconds = self.timing_seconds = 0.0
        here = dispatch.choose(problem, self.device, stored=False)
        chosen = dispatch.choose(problem, self.device, kernel, stored=False)
        default = chosen.kernel.default_config(problem, self.device)
        stored = anchor_of(problem, self.device)
        anchor = stored or Candidate(here.kernel_id, here.config)
        defaults = [Candidate(c.kernel_id, c.config) for c in (here, chosen)] + [Candidate(chosen.kernel_id, default)]
        if proposals is None:
            proposals = [Candidate(chosen.kernel_id, c) for c in chosen.kernel.search_space(problem, self.device)]
        names = set()
        if stored is not None and not self.again:
            names = {row.name for row in self.rows(problem) if row.record and row.stale() is None}
        todo = [c for c in dict.fromkeys([*defaults, *proposals]) if c != anchor and c.name not in names]
        if anchor.name not in names:
            self.on_step("the default")
            self._race(problem, anchor, [], self.seconds / 4)
        if todo and self.device.type == "cuda":
            todo = self._compiled(problem, anchor, todo)
        heats = [todo[i : i + HEAT - 1] for i in range(0, len(todo), HEAT - 1)]
        if len(heats) > 1:
            for number, heat in enumerate(heats, 1):
                self.on_step(f"heat {number} of {len(heats)}")
                self._race(problem, anchor, heat, self.seconds / 4, final=False)
            todo = []
        self._finals(problem, anchor, todo, due=len(heats) > 1)
        return self.rows(problem)

    def rows(self, problem: AttentionProblem) -> list[store.Measured]:
        """What is stored for the problem's shape class."""
        found = store.read(self.device, problem.key())
        return [] if found is None else list(found.measured)

    def _finals(self, problem: AttentionProblem, anchor: Candidate, new: Sequence[Candidate], due: bool) -> None:
        """Race the best, and again when what then wins was not among them."""
        for _ in range(_MAX_FINALS):
            rows = [row for row in self.rows(problem) if row.speedup is not None and row.stale() is None]
            speedups = [row.speedup for row in rows if row.speedup is not None]
            winner = rows[race.winner(speedups)]
            met = [row for row in rows if row.record and row.mode != _HEAT]
            if not (due or new) and winner in met and len(met) >= min(self.finalists, len(rows)):
                return
            best = sorted(range(len(rows)), key=lambda i: -speedups[i][0])[: self.finalists]
            finalists = dict.fromkeys([*(Candidate.of(rows[i]) for i in best), Candidate.of(winner), *new])
            entrants = [c for c in finalists if c != anchor]
            self.on_step(f"finals of {len(entrants) + 1}")
            self._race(problem, anchor, entrants, self.seconds)
            new, due = (), False

    def _compiled(self, problem: AttentionProblem, anchor: Candidate, todo: Sequence[Candidate]) -> list[Candidate]:
        """Those that compile, which is found out in parallel and off the GPU; the others are stored with the reason."""
        jobs = [CompileJob(c.kernel, problem, c.fields, self.device) for c in todo]
        by_name = {c.name: c for c in todo}
        failed = []
        for number, made in enumerate(compile_many(jobs), 1):
            self.on_step(f"compiled {number} of {len(jobs)}")
            candidate = by_name[store.name_of(made.job.kernel, made.job.config)]
            self._compile_seconds[candidate] = made.seconds
            if made.error is not None:
                failed.append(candidate)
                self._keep(problem, anchor, {candidate: Raced("failed", made.error)}, final=False)
        return [c for c in todo if c not in failed]

    def _race(
        self, problem: AttentionProblem, anchor: Candidate, others: Sequence[Candidate], seconds: float, *, final: bool = True
    ) -> None:
        """Race them, and store what came of it. After a lost worker each is raced alone with the anchor, to find out why."""
        members = [anchor, *others]
        job = RaceJob(problem, tuple((c.kernel, c.fields) for c in members), seconds)
        outcome = self.worker.call(job, timeout=_SECONDS_PER_CONFIG * len(members) + 4 * seconds)
        if outcome.status == "done":
            found = dict(zip(members, outcome.value, strict=True))
            lost = found[anchor] if found[anchor].lane is None else None
        else:
            lost = Raced(outcome.status, outcome.message)
            found = dict.fromkeys(others, lost)
        if lost is not None and not others:
            raise RuntimeError(
                f"{anchor.kernel} {lost.status} under its own default on {problem} ({lost.message}); nothing can be held "
                "against it. See what peakattn bench says of this problem."
            )
        if lost is not None and len(others) > 1:
            for one in others:
                self._race(problem, anchor, [one], seconds / len(others), final=final)
            return
        self._keep(problem, anchor, found, final)

    def _keep(self, problem: AttentionProblem, anchor: Candidate, found: dict[Candidate, Raced], final: bool) -> None:
        mode = ("wall" if self.device.type == "cpu" else "events") if final else _HEAT
        rows = [self._row(problem, candidate, one, mode) for candidate, one in found.items()]
        for row, one in zip(rows, found.values(), strict=True):
            self.compile_seconds += row.compile_seconds
            self.timing_seconds += row.timing_seconds
            records.append(self.path, self._record(problem, anchor, row, one, final))
        store.add(self.device, problem.key(), rows if anchor in found else [*self.rows(problem)[:1], *rows])

    def _row(self, problem: AttentionProblem, candidate: Candidate, one: Raced, mode: str) -> store.Measured:
        root = provenance.checkout()
        path = self.path.resolve()
        return row_of(
            problem,
            candidate,
            one.lane,
            mode=mode,
            compile_seconds=round(one.compile_seconds + self._compile_seconds.pop(candidate, 0.0), 4),
            timing_seconds=round(one.timing_seconds, 4),
            record=str(path.relative_to(root) if root and path.is_relative_to(root) else path),
            reason="" if one.lane is not None else f"{one.status}: {one.message}",
        )

    def _record(self, problem: AttentionProblem, anchor: Candidate, row: store.Measured, one: Raced, final: bool) -> TuneRecord:
        return TuneRecord(
            provenance=provenance.here(self.device.name, self.device.arch, self.commit),
            problem=problems.to_dict(problem),
            kernel=row.kernel,
            kernel_hash=row.kernel_hash,
            compiler=row.compiler,
            config=row.config,
            anchor={"kernel": anchor.kernel, "config": anchor.fields},
            speedup=row.speedup,
            samples_us=[round(s * 1e6, 4) for s in one.lane.seconds] if one.lane else [],
            final=final,
            message=one.message,
            compile_seconds=row.compile_seconds,
            timing_seconds=row.timing_seconds,
        )


def from_sweep(path: Path, problem: AttentionProblem, kernel: str | None, count: int | None) -> list[Candidate]:
    """The fastest configs of a sweep's records on a problem, whose kernels have not changed since."""
    rows = [row for row in records.read_as(records.SweepRecord, path) if row.problem == problems.to_dict(problem)]
    rows = [row for row in rows if row.speed_known and kernel in (None, row.kernel, row.kernel.split(".")[0])]
    current = [row for row in rows if row.kernel_hash == records.kernel_hash(row.kernel)]
    if not current:
        why = "only of kernels that have changed since" if rows else f"no measured row of {kernel or 'any kernel'}"
        raise ValueError(f"{path} has {why} on {problems.label(problem)}; run peakattn sweep on it first.")
    fastest = sorted(current, key=lambda row: row.median_us)
    found = dict.fromkeys((row.kernel, json.dumps(row.config)) for row in fastest)
    return [Candidate(k, backends.load(k).Config(**json.loads(config))) for k, config in list(found)[:count]]
