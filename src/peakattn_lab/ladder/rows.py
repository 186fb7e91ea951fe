"""The record of a rung: a bench record, and what its code says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from peakattn_lab import problems, records, timing
from peakattn_lab.records import FunctionFacts, Record


class RungRecord(Record):
    """One rung, or a rival of the same run (``rung`` is None), on one problem."""

    rung: str | None
    source_hash: str | None = None
    candidates: int = 1  # configs that were timed to choose this one
    tuning_seconds: float = 0.0
    facts: FunctionFacts | None = None
    executed_flops: float | None = None  # tensor-core work of a launch, counted from the code; the algorithm's is problem.flops
    layouts: tuple[str, ...] = ()

    @property
    def waste(self) -> float | None:
        """Executed tensor-core operations over the algorithm's; 1.00 when nothing is computed in vain."""
        if self.executed_flops is None:
            return None
        return self.executed_flops / max(problems.from_dict(self.problem).flops, 1.0)


@dataclass(frozen=True)
class Cell:
    """One problem of one run: the newest record of each contender in order of the ladder, rivals last."""

    problem: str
    rows: dict[str, RungRecord]

    @property
    def steps(self) -> list[RungRecord]:
        return [row for row in self.rows.values() if row.rung is not None]

    @property
    def rivals(self) -> list[RungRecord]:
        return [row for row in self.rows.values() if row.rung is None]

    @property
    def best_rival(self) -> RungRecord | None:
        timed = [row for row in self.rivals if row.speed_known]
        return min(timed, key=lambda row: row.median_us, default=None)

    def gain(self, row: RungRecord, over: RungRecord | None) -> timing.Comparison | None:
        """How many times faster than another of the same run, with an interval; None where either has no speed."""
        if over is None or not (row.speed_known and over.speed_known) or len(row.samples_us) != len(over.samples_us):
            return None
        if row.provenance.run != over.provenance.run:
            return None
        return timing.compare(row.samples_us, over.samples_us)

    def before(self, row: RungRecord) -> RungRecord | None:
        """The last rung below this one that has a speed."""
        found = None
        for one in self.steps:
            if one is row:
                return found
            if one.speed_known:
                found = one
        return None


def cells(rows: Iterable[RungRecord]) -> list[Cell]:
    """Cells in the order in which their problems first came, each from the newest run that has the problem."""
    newest: dict[str, str] = {}
    grouped: dict[tuple[str, str], dict[str, RungRecord]] = {}
    for row in rows:
        key = records.problem_key({**row.problem, "device_type": ""}) + row.mode
        newest[key] = row.provenance.run
        grouped.setdefault((key, row.provenance.run), {})[row.contender] = row
    return [Cell(key, _in_order(grouped[key, run])) for key, run in newest.items()]


def _in_order(found: dict[str, RungRecord]) -> dict[str, RungRecord]:
    names = sorted(found, key=lambda name: (found[name].rung is None, _step(found[name].rung)))
    return {name: found[name] for name in names}


def _step(rung: str | None) -> int:
    return 0 if rung is None else int(rung.rpartition(".step")[2])


def stale(rows: Sequence[RungRecord], hashes: dict[str, str]) -> list[str]:
    """Rungs whose files have changed since these rows were measured."""
    return sorted({row.rung for row in rows if row.rung in hashes and row.source_hash != hashes[row.rung]}, key=_step)
