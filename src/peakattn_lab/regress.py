"""Two record files against each other: is B faster than A, case by case, although the two are different runs?

Samples of different runs cannot be paired.  Each run's median gets an interval of its own from order statistics, and the
ratio's interval spans both; no distribution is assumed.  What it cannot contain is a drift of clocks or power from one run
to the other.  Where a rival was measured in both, a case is therefore its time relative to that rival, sample by sample of
the same rounds, and the drift cancels.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from peakattn_lab import compare, problems, records, timing
from peakattn_lab.baselines import is_ours
from peakattn_lab.records import HostRecord, Record

AUTO, TIME = "auto", "time"  # relative_to: a rival chosen for each case, or absolute times
TOLERANCE = 0.01  # less than this is no difference between runs; inside one run half of it is none
VERDICTS = ("SAME", "FASTER", "SLOWER", "UNCLEAR")

# Two intervals of 97.5 % hold both medians, and so their ratio, with at least 95 %.
_CONFIDENCE = 0.975
_MIN_SAMPLES = 7  # the fewest whose range is such an interval

_CONDITIONS = ("device", "driver", "platform", "python")

Measured = Record | HostRecord


@dataclass(frozen=True)
class Row:
    """What a comparison needs of a record: times in microseconds, or a sentence on why there are none to show."""

    samples_us: tuple[float, ...]
    reason: str | None = None
    wrong: bool = False  # the gate is red

    @classmethod
    def of(cls, record: Record | None) -> Row | None:
        """The row of a record, None for none."""
        if record is None:
            return None
        wrong = record.gate is not None and not record.gate.passed
        return cls(tuple(record.samples_us) if record.speed_known else (), record.reason, wrong)

    @property
    def speed_known(self) -> bool:
        """True when the times may be shown."""
        return self.reason is None


@dataclass(frozen=True)
class Case:
    """One contender at one thing in one mode: a row of each file, or of one. ``ratio`` above 1 says that B is faster."""

    label: str  # the problem, or the kind of use of a host's cost
    mode: str
    contender: str
    a: Row | None
    b: Row | None
    reference: str | None  # the rival that both times are relative to
    ratio: timing.Comparison | None

    @property
    def verdict(self) -> str:
        """One of ``VERDICTS``, or why there is none."""
        if self.ratio is not None:
            return self.ratio.verdict
        for name, row in (("A", self.a), ("B", self.b)):
            if row is not None and row.wrong:
                return f"WRONG in {name}"
        if self.a is None or self.b is None:
            return "only in A" if self.b is None else "only in B"
        return f"no speed in {'B' if self.a.speed_known else 'A' if self.b.speed_known else 'either'}"

    @property
    def lost(self) -> bool:
        """True when B computes wrongly, or has no speed where A had one."""
        if self.b is None or self.b.speed_known:
            return False
        return self.b.wrong or (self.a is not None and self.a.speed_known)


@dataclass(frozen=True)
class Regression:
    """B against A: a case for each row of either file, and what a reader must know beside the verdicts."""

    cases: tuple[Case, ...]
    caveats: tuple[str, ...]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """(header, rows) of text."""
        header = ["problem", "contender", "mode", "A us", "B us", "B x A", "relative to", "verdict"]
        return header, [_line(case) for case in self.cases]

    def notes(self) -> list[str]:
        """What was compared with what, why verdicts are missing, and counts; caveats first."""
        lines = dict.fromkeys(self.caveats)
        compared = [case for case in self.cases if case.ratio is not None and is_ours(case.contender)]
        for name, n in Counter(case.reference for case in compared).items():
            how = (
                "in absolute times: a drift of clocks or power between the runs is in the ratio"
                if name is None
                else f"relative to {name} of the same run: a drift of clocks or power cancels"
            )
            lines[f"{_cases(n)} of peakattn {how}"] = None
        for name in dict.fromkeys(case.contender for case in self.cases):
            ratios = [case.ratio for case in self.cases if case.contender == name and case.ratio is not None]
            if ratios:
                counts = Counter(ratio.verdict for ratio in ratios)
                words = ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common())
                mean = math.exp(statistics.fmean(math.log(ratio.ratio) for ratio in ratios))
                drift = "" if is_ours(name) else "; a rival's absolute times, which show the drift"
                lines[f"{name}: {words}; geometric mean B {mean:.3f} x A{drift}"] = None
        for case in self.cases:
            for file, row in (("A", case.a), ("B", case.b)):
                if row is not None and row.reason is not None:
                    lines[f"{case.contender} on {case.label} in {file}: {row.reason}"] = None
        return list(lines)

    def exit_code(self, fail_on: Collection[str] = ("SLOWER",)) -> int:
        """1 when a case of peakattn has one of these verdicts, or is wrong or without a speed in B; rivals fail nothing."""
        for verdict in fail_on:
            if verdict not in VERDICTS:
                raise ValueError(f"verdict {verdict!r} is unknown; allowed are {', '.join(VERDICTS)}.")
        own = [case for case in self.cases if is_ours(case.contender)]
        return int(any(case.lost or case.verdict in fail_on for case in own))


def compare_runs(
    a: Sequence[Record], b: Sequence[Record], *, relative_to: str = AUTO, tolerance: float = TOLERANCE
) -> Regression:
    """B against A. ``relative_to`` is ``auto``, ``time`` or a rival's name; a case without that rival uses absolute times.

    An interval of the ratio within ``tolerance`` of 1 is SAME. Of several runs of one problem in a file the last counts.
    """
    _check_tolerance(tolerance)
    cells_a, cells_b = _by_key(a), _by_key(b)
    if relative_to not in (AUTO, TIME):
        of_a, of_b = ({name for cell in cells.values() for name in cell.rows} for cells in (cells_a, cells_b))
        rivals = sorted(name for name in of_a & of_b if not is_ours(name))
        if relative_to not in rivals:
            allowed = ", ".join([AUTO, TIME, *rivals])
            raise ValueError(f"relative_to is {relative_to!r}, which is no rival in both files; allowed are {allowed}.")
    cases: list[Case] = []
    for key in dict.fromkeys([*cells_a, *cells_b]):
        cell_a, cell_b = cells_a.get(key), cells_b.get(key)
        names = compare.contenders([cell for cell in (cell_a, cell_b) if cell is not None])
        cases += [_case(cell_a, cell_b, name, relative_to, tolerance) for name in names]
    return _regression(cases, a, b)


def compare_hosts(
    a: Sequence[HostRecord], b: Sequence[HostRecord], *, relative_to: str = AUTO, tolerance: float = TOLERANCE
) -> Regression:
    """The host's cost of calls, B against A: a case for each contender in each kind of use, in absolute times.

    Loops of one contender and another are not of the same rounds, so there is no rival to cancel a drift with.
    """
    _check_tolerance(tolerance)
    if relative_to not in (AUTO, TIME):
        raise ValueError(f"relative_to is {relative_to!r}; host costs are compared in absolute times, with {AUTO} or {TIME}.")
    last_a, last_b = ({(row.kind, row.contender): Row(tuple(row.loops_us)) for row in rows} for rows in (a, b))
    cases = []
    for kind, name in dict.fromkeys([*last_a, *last_b]):
        one, other = last_a.get((kind, name)), last_b.get((kind, name))
        ratio = _ratio(one.samples_us, other.samples_us, tolerance) if one is not None and other is not None else None
        cases.append(Case(kind, "host", name, one, other, None, ratio))
    return _regression(cases, a, b)


def _check_tolerance(tolerance: float) -> None:
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance is {tolerance}; allowed is 0 up to 1, such as 0.01 for one per cent.")


def _regression(cases: Sequence[Case], a: Sequence[Measured], b: Sequence[Measured]) -> Regression:
    if not any(case.a is not None and case.b is not None for case in cases):
        raise ValueError("the two files have no case in common; give records of the same problems, contenders and modes.")
    return Regression(tuple(cases), tuple(_caveats(a, b)))


def _by_key(rows: Iterable[Record]) -> dict[tuple[str, str], compare.Cell]:
    return {(records.problem_key(problems.to_dict(cell.problem)), cell.mode): cell for cell in compare.cells(rows)}


def _case(a: compare.Cell | None, b: compare.Cell | None, name: str, relative_to: str, tolerance: float) -> Case:
    some = a or b
    assert some is not None
    row_a, row_b = (cell.rows.get(name) if cell is not None else None for cell in (a, b))
    reference = ratio = None
    if a is not None and b is not None and all(row is not None and row.speed_known for row in (row_a, row_b)):
        # Rivals stay in absolute times: they are what shows the drift.
        reference = _reference(a, b, name, relative_to) if is_ours(name) and relative_to != TIME else None
        ratio = _ratio(_costs(a, name, reference), _costs(b, name, reference), tolerance)
    return Case(problems.label(some.problem), some.mode, name, Row.of(row_a), Row.of(row_b), reference, ratio)


def _reference(a: compare.Cell, b: compare.Cell, name: str, wanted: str) -> str | None:
    """The fastest rival in A that both runs measured beside the contender, in the same version."""
    usable = [
        rival
        for rival in a.rows
        if not is_ours(rival)
        and wanted in (AUTO, rival)
        and rival in b.rows
        and a.rows[rival].version == b.rows[rival].version
        and all(c.rows[rival].speed_known and len(c.rows[rival].samples_us) == len(c.rows[name].samples_us) for c in (a, b))
    ]
    return min(usable, key=lambda rival: a.rows[rival].median_us, default=None)


def _costs(cell: compare.Cell, name: str, reference: str | None) -> list[float]:
    samples = cell.rows[name].samples_us
    if reference is None:
        return samples
    return [ours / rival for ours, rival in zip(samples, cell.rows[reference].samples_us, strict=True)]


def _ratio(a: Sequence[float], b: Sequence[float], tolerance: float) -> timing.Comparison:
    """How many times faster b is than a, of independent samples of either."""
    (low_a, high_a), (low_b, high_b) = timing.interval(a, _CONFIDENCE), timing.interval(b, _CONFIDENCE)
    low, high = low_a / high_b, high_a / low_b
    verdict: timing.Verdict = "UNCLEAR"
    if min(len(a), len(b)) >= _MIN_SAMPLES:
        if low >= 1 - tolerance and high <= 1 + tolerance:
            verdict = "SAME"
        elif low > 1:
            verdict = "FASTER"
        elif high < 1:
            verdict = "SLOWER"
    return timing.Comparison(statistics.median(a) / statistics.median(b), low, high, verdict)


def _caveats(a: Sequence[Measured], b: Sequence[Measured]) -> list[str]:
    """Conditions that differ between the files and so may be the reason of any difference."""
    lines = []
    conditions_a, conditions_b = _conditions(a), _conditions(b)
    for name in dict.fromkeys([*conditions_a, *conditions_b]):
        one, other = conditions_a.get(name, {"none"}), conditions_b.get(name, {"none"})
        if one != other:
            lines.append(f"caveat: {name} is {', '.join(sorted(one))} in A and {', '.join(sorted(other))} in B")
    return lines


def _conditions(rows: Iterable[Measured]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}

    def add(name: str, value: Any) -> None:
        found.setdefault(name, set()).add(str(value))

    for row in rows:
        for name in _CONDITIONS:
            add(name, getattr(row.provenance, name))
        if isinstance(row, Record):
            add("dtype", row.problem["dtype"])
        for package, version in row.provenance.versions.items():
            if package != "peakattn":  # what is being compared
                add(package, version)
    return found


def _line(case: Case) -> list[str]:
    ratio = case.ratio
    return [
        case.label,
        case.contender,
        case.mode,
        _time(case.a),
        _time(case.b),
        "" if ratio is None else f"{ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
        "" if ratio is None else case.reference or TIME,
        case.verdict,
    ]


def _time(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{statistics.median(row.samples_us):.1f}" if row.speed_known else "-"


def _cases(n: int) -> str:
    return f"{n} case" if n == 1 else f"{n} cases"
