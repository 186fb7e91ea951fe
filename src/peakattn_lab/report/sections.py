"""The sections of a report: each is one function from the rows that were found to tables, pictures and sentences."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from peakattn_lab import compare, hostcost, plots, records
from peakattn_lab.baselines import is_ours
from peakattn_lab.profiling.profilers import ProfileRecord
from peakattn_lab.provenance import known_device
from peakattn_lab.records import HostRecord, Record, SweepRecord
from peakattn_lab.report import kernels
from peakattn_lab.report.parts import Found, Part, Table, by_device, drawn
from peakattn_lab.roofline import ceilings, picture, roofs
from peakattn_lab.roofline.ceilings import CeilingRecord
from peakattn_lab.selftest import SelftestRecord
from peakattn_lab.timing import MODE_TITLES
from peakattn_lab.tune.tuner import TuneRecord

_OF_A_KERNEL = (Record, SweepRecord, TuneRecord, ProfileRecord)


def environment(found: Found) -> Iterator[Part]:
    """Where and when everything was measured, and what the GPU did meanwhile."""
    header = ["device", "when", "driver", "python", "versions", "commits"]
    lines, watched = [], []
    for device in found.devices:
        rows = [row for kind in found.rows.values() for row in kind if row.provenance.device == device]
        where = [row.provenance for row in rows]
        days = sorted({p.time[:10] for p in where})
        versions = sorted({f"{name} {version}" for p in where for name, version in p.versions.items()})
        commits = sorted({(p.commit or "no commit")[:10] + (" with changes" if p.dirty else "") for p in where})
        lines.append(
            [
                device,
                " to ".join(dict.fromkeys((days[0], days[-1]))),
                ", ".join(sorted({p.driver or "none" for p in where})),
                ", ".join(sorted({p.python for p in where})),
                ", ".join(versions),
                ", ".join(commits),
            ]
        )
        watched += _observed(device, [row.observed for row in rows if isinstance(row, (Record, SweepRecord)) and row.observed])
    if lines:
        yield Table("", header, lines, left=6)
    if watched:
        yield Table("while it was measured", ["device", "reading", "lowest", "highest"], watched, left=2)


def _observed(device: str, seen: Sequence[dict[str, Any]]) -> list[list[str]]:
    names = {
        "sm_mhz": "SM clock, MHz",
        "memory_mhz": "memory clock, MHz",
        "power_w": "power, W",
        "temperature_c": "temperature, C",
    }
    lines = []
    for name, title in names.items():
        values = [reading[name] for reading in seen if name in reading]
        if values:
            lines.append([device, title, f"{min(v[0] for v in values):g}", f"{max(v[-1] for v in values):g}"])
    held = Counter(reason for reading in seen for reason in reading.get("throttle", ()))
    return lines + [[device, f"held back by: {reason}", "", f"{n} of {len(seen)} rows"] for reason, n in held.most_common()]


def rivals(found: Found) -> Iterator[Part]:
    """Every contender on every problem, with intervals against the best rival."""
    for device, rows in by_device(found.of(Record)):
        for own, group in _by_own_contenders(rows):
            cells = compare.cells(group)
            for mode in dict.fromkeys(cell.mode for cell in cells):
                for direction, name in (("fwd", "forward"), ("bwd", "backward")):
                    members = [cell for cell in cells if cell.mode == mode and cell.problem.direction == direction]
                    if members:
                        title = f"{device}, {name}, {MODE_TITLES[mode]}, {compare.unit(members)[0]}"
                        named = "" if own == ("peakattn",) else "".join(f"; {one}" for one in own)
                        yield from _rivals_of(members, f"rivals-{device}-{name}-{mode}{named}", title + named)


def _by_own_contenders(rows: Sequence[Record]) -> list[tuple[tuple[str, ...], list[Record]]]:
    """Rows by which of our kernels their run was about: a later run of other kernels does not replace one of the choice."""
    own: dict[str, set[str]] = {}
    for row in rows:
        own.setdefault(row.provenance.run, set()).update({row.contender} if is_ours(row.contender) else ())
    groups: dict[tuple[str, ...], list[Record]] = {}
    for row in rows:
        groups.setdefault(tuple(sorted(own[row.provenance.run])), []).append(row)
    return sorted(groups.items())


def _rivals_of(members: Sequence[compare.Cell], key: str, title: str) -> Iterator[Part]:
    if any(row.speed_known for cell in members for row in cell.rows.values()):
        yield drawn(key, title, functools.partial(plots.bars, members, title=title))
    header, lines = compare.table(members)
    yield Table(title, header, lines)
    yield from compare.notes(members)
    yield from _stale_note(row for cell in members for row in cell.rows.values())


def rooflines(found: Found) -> Iterator[Part]:
    """Records under the roofs of their device; errors first."""
    beside = found.of(CeilingRecord)
    for device, rows in by_device(found.of(Record)):
        known = known_device(device)
        if known is None or not any(row.mode == "kernel" and row.speed_known for row in rows):
            continue
        under = roofs.of_records(rows, known, measured=beside)
        title = f"{device}, roofs in useful TFLOP/s"
        yield drawn(f"roofline-{device}", title, functools.partial(picture.draw, under))
        yield from under.notes()
        header, lines = under.table()
        yield Table(title, header, lines, left=2, folded=True)
        reached = ceilings.of_device(known, beside)
        if reached:
            header, lines = ceilings.table(reached, known)
            yield Table(f"{device}, ceilings", header, lines, left=2)


def host(found: Found) -> Iterator[Part]:
    """The host's cost of an eager call."""
    for device, rows in by_device(found.of(HostRecord)):
        latest = {(row.kind, row.contender): row for row in rows}
        shown = [hostcost.HostRow.of(row.kind, row.contender, row.loops_us) for row in latest.values()]
        header, lines = hostcost.table(shown)
        yield Table(f"{device}, microseconds of one eager call", header, lines, left=2)


def selftests(found: Found) -> Iterator[Part]:
    """The last run of the tests on each device."""
    for device, rows in by_device(found.of(SelftestRecord)):
        last = rows[-1]
        yield f"{device}, {last.provenance.time[:10]}: {last.counts} in {last.seconds:.0f} s."
        if last.failed:
            yield Table(f"{device}: did not pass", ["test", "outcome"], [[name, "failed"] for name in last.failed], left=2)
        reasons = Counter(reason.split("\n")[0] for reason in last.skipped.values())
        if reasons:
            lines = [[reason, str(n)] for reason, n in reasons.most_common()]
            yield Table(f"{device}: skipped, by reason", ["reason", "tests"], lines, folded=True)


def stale(found: Found) -> Iterator[Part]:
    """Kernels whose sources have changed since rows of them were made."""
    lines = []
    for kind, rows in found.rows.items():
        held: Counter[tuple[str, str, str]] = Counter()
        for row in rows:
            pairs = row.kernels.items() if isinstance(row, SelftestRecord) else _kernel_of(row)
            for kernel, recorded in pairs:
                if recorded != records.kernel_hash(kernel):
                    held[row.provenance.device, kernel, recorded or "none"] += 1
        lines += [[device, kind, kernel, recorded, str(n), "stale"] for (device, kernel, recorded), n in held.items()]
    if lines:
        yield Table("", ["device", "rows", "kernel", "measured source", "count", "now"], lines, left=4)
    elif found.rows:
        yield "Every row was measured on the kernel sources that are here now."


def _kernel_of(row: Any) -> list[tuple[str, str | None]]:
    return [(row.kernel, row.kernel_hash)] if isinstance(row, _OF_A_KERNEL) and row.kernel else []


def _stale_note(rows: Iterable[Record]) -> Iterator[str]:
    old = records.stale(list(rows))
    if old:
        yield f"Measured before the last change of {', '.join(old)}."


# key -> title, what to do when there is nothing, function.
SECTIONS: dict[str, tuple[str, str, Callable[[Found], Iterable[Part]]]] = {
    "environment": ("Environment", "No records were found; peakattn bench makes some.", environment),
    "rivals": ("Against rivals", "No measurements; peakattn bench makes them.", rivals),
    "rooflines": ("Rooflines", "No kernel times of a GPU whose roofs are known; peakattn bench makes them.", rooflines),
    "ladders": ("Ladders", "No rungs were measured; peakattn ladder LANGUAGE measures them.", kernels.ladders),
    "sweeps": ("Sweeps", "No sweeps; peakattn sweep KERNEL makes them.", kernels.sweeps),
    "tunings": ("Tunings", "No tunings were recorded; peakattn tune makes them.", kernels.tunings),
    "tuned": ("Tuned configs", "No tuned configs are shipped; peakattn tune makes them.", kernels.tuned_configs),
    "profiles": ("Counters", "No profiles; peakattn profile KERNEL makes them.", kernels.profiles),
    "host": ("Host cost", "No host costs; peakattn bench --host makes them.", host),
    "selftests": ("Tests on the device", "No test runs; peakattn selftest makes them.", selftests),
    "stale": ("Changed since", "No records, so none are stale.", stale),
}
