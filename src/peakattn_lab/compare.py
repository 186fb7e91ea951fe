"""From records to statements: cells of contenders measured side by side, ratios to the best rival, verdicts, tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from peakattn.problem import AttentionProblem
from peakattn_lab import problems, records, timing
from peakattn_lab.baselines import RIVALS, is_ours
from peakattn_lab.records import Record


@dataclass(frozen=True)
class Cell:
    """One problem in one timing mode: a row for each contender, all of one interleaved run."""

    problem: AttentionProblem
    mode: str
    rows: dict[str, Record]

    @cached_property
    def best_rival(self) -> Record | None:
        """The fastest rival whose gate is green."""
        known = [row for name, row in self.rows.items() if not is_ours(name) and row.speed_known]
        return min(known, key=lambda row: row.median_us, default=None)

    def against_best(self, name: str) -> timing.Comparison | None:
        """How a contender of ours stands against the best rival, or None where one of them has no speed."""
        row = self.rows.get(name)
        if row is None or not row.speed_known or self.best_rival is None:
            return None
        return timing.compare(row.samples_us, self.best_rival.samples_us)


def cells(rows: Iterable[Record]) -> list[Cell]:
    """Rows grouped by problem and mode; of several runs of one problem the last, because only one run's rows are comparable."""
    grouped: dict[tuple[str, str], dict[str, Record]] = {}
    for row in rows:
        key = (records.problem_key(row.problem), row.mode)
        group = grouped.get(key)
        if group is not None and next(iter(group.values())).provenance.run != row.provenance.run:
            group = None
        if group is None:
            group = grouped[key] = {}
        group[row.contender] = row
    return [Cell(problems.from_dict(next(iter(g.values())).problem), mode, g) for (_, mode), g in grouped.items()]


def contenders(found: Sequence[Cell]) -> list[str]:
    """Names, ours first, then rivals in the order of ``RIVALS``."""
    names = dict.fromkeys(name for cell in found for name in cell.rows)
    rank = {name: i for i, name in enumerate(RIVALS, 1)}
    return sorted(names, key=lambda name: 0 if is_ours(name) else rank.get(name, len(rank) + 1))


def geometric_mean(found: Sequence[Cell], name: str) -> tuple[float, int] | None:
    """(mean ratio to the best rival of each cell, number of cells) for one contender of ours."""
    compared = [c.ratio for c in (cell.against_best(name) for cell in found) if c is not None]
    if not compared:
        return None
    return math.exp(sum(map(math.log, compared)) / len(compared)), len(compared)


def unit(found: Sequence[Cell]) -> tuple[str, Callable[[Record], float]]:
    """What the numbers of these cells are given in, and how to get one from a row: host times are times, the rest rates."""
    if found and found[0].mode == "host":
        return "us", lambda row: row.median_us
    speeds = [row.tflops for cell in found for row in cell.rows.values() if row.speed_known]
    if speeds and max(speeds) < 1:
        return "GFLOP/s", lambda row: row.tflops * 1e3
    return "TFLOP/s", lambda row: row.tflops


def table(found: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of text for cells of one mode, in ``unit(found)``; where no speed may be shown, a word.

    One contender of ours has its ratio to the best rival with an interval and a verdict.  Several have their ratios behind
    their speeds, because a table has only so much room.
    """
    names = contenders(found)
    own = [name for name in names if is_ours(name)]
    value = unit(found)[1]
    alone = len(own) == 1
    header = ["problem", *(name if alone else name.partition(":")[2] or name for name in names)]
    if alone:
        header += ["x best rival", "verdict"]
    body = []
    for cell in found:
        line = [problems.label(cell.problem)]
        for name in names:
            comparison = None if alone or name not in own else cell.against_best(name)
            behind = "" if comparison is None else f" ({comparison.ratio:.2f} x)"
            line.append(_figure(cell.rows.get(name), value) + behind)
        if alone:
            comparison = cell.against_best(own[0])
            if comparison is None:
                line += ["", ""]
            else:
                line += [f"{comparison.ratio:.3f} [{comparison.low:.3f}, {comparison.high:.3f}]", comparison.verdict]
        body.append(line)
    return header, body


def _figure(row: Record | None, value: Callable[[Record], float]) -> str:
    if row is None:
        return ""
    if not row.speed_known:
        return "WRONG" if row.gate is not None and not row.gate.passed else "-"
    number = value(row)
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "..."


_LONGEST_NAME = 72


def notes(found: Sequence[Cell]) -> list[str]:
    """Means over the cells, what really ran, and why numbers are missing: each said once."""
    lines: dict[str, None] = {}
    for name in contenders(found):
        mean = geometric_mean(found, name) if is_ours(name) else None
        if mean is not None:
            lines[f"{name}: geometric mean {mean[0]:.3f} x the best rival of each of {mean[1]} problems"] = None
    for cell in found:
        for name, row in cell.rows.items():
            what = row.kernel or ", ".join(map(_shortened, row.ran))
            if row.speed_known and what and what != name:
                version = f" {row.version}" if row.version else ""
                lines[f"{name}{version} ran {what}"] = None
            elif row.reason is not None:
                lines[f"{name} on {problems.label(cell.problem)}: {row.reason}" if row.gate else f"{name}: {row.reason}"] = None
    return list(lines)
