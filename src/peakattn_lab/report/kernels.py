"""The sections of a report on kernels: ladders, sweeps, tunings, shipped configs, profiles."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import resources

from peakattn import tuned
from peakattn_lab import ladder, problems, records
from peakattn_lab.ladder import figure, rows
from peakattn_lab.ladder import tables as ladder_tables
from peakattn_lab.ladder.rows import RungRecord
from peakattn_lab.profiling import tables
from peakattn_lab.profiling.profilers import Profile, ProfileRecord
from peakattn_lab.profiling.target import Job
from peakattn_lab.records import SweepRecord
from peakattn_lab.report.parts import Found, Part, Table, by_device, drawn
from peakattn_lab.roofline import roofs
from peakattn_lab.sweep import heatmap, predict
from peakattn_lab.sweep import tables as sweeptables
from peakattn_lab.timing import MODE_TITLES
from peakattn_lab.tune.tuner import TuneRecord
from peakattn_lab.wording import knobs

_FINALISTS = 5


def ladders(found: Found) -> Iterator[Part]:
    """The rungs of each language side by side with the rivals of their run, what their code says, and their ideas."""
    for device, everything in by_device(found.of(RungRecord)):
        yield from roofs.errors_of(everything)
        for language in dict.fromkeys(row.rung.split(".")[1] for row in everything if row.rung):
            runs = {row.provenance.run for row in everything if row.rung and row.rung.split(".")[1] == language}
            members = [row for row in everything if row.provenance.run in runs]
            for mode in dict.fromkeys(row.mode for row in members):
                cells = rows.cells(row for row in members if row.mode == mode)
                title = f"{language} ladder on {device}, {MODE_TITLES[mode]}, TFLOP/s"
                if any(row.speed_known for cell in cells for row in cell.steps):
                    alt = f"{title}; above each bar its gain over the rung before"
                    yield drawn(f"ladder-{language}-{device}-{mode}", alt, functools.partial(figure.draw, cells, title=alt))
                yield Table(title, *ladder_tables.overview(cells))
                for cell in cells:
                    yield Table(*ladder_tables.speeds(cell), left=2, folded=True)
                    yield Table(*ladder_tables.code(cell), left=2, folded=True)
            yield from _ideas(language, members)


def _ideas(language: str, members: Sequence[RungRecord]) -> Iterator[Part]:
    try:
        rungs = ladder.rungs(language)
    except (ImportError, ValueError) as error:
        yield f"The ideas of the {language} ladder cannot be shown here: {error}"
        return
    header, lines = ladder_tables.ideas(rungs)
    yield Table(f"{language}: the idea of each rung, its prediction before it ran, and what came of it", header, lines, left=5)
    yield f"The source's figures: {ladder.source(language)}"
    old = rows.stale(members, {rung.id: rung.source_hash for rung in rungs})
    if old:
        yield f"Measured before the last change of {', '.join(old)}."


def sweeps(found: Found) -> Iterator[Part]:
    """Heatmaps of each sweep, its fastest configs, what became of the others, and how well it was foretold."""
    for device, everything in by_device(found.of(SweepRecord)):
        for kernel in dict.fromkeys(row.kernel for row in everything):
            swept = [row for row in everything if row.kernel == kernel]
            title = f"{kernel} on {device}"
            for pair in heatmap.DEFAULT:
                if all(knob in row.config for row in swept for knob in pair):
                    panels = heatmap.panels(swept, pair)
                    alt = f"{title}, {' by '.join(pair)}, {heatmap.unit(panels[0])}"
                    name = f"sweep-{kernel}-{device}-{'-'.join(pair)}"
                    yield drawn(name, alt, functools.partial(heatmap.draw, panels, title=alt))
            yield Table(f"{title}: the fastest", *sweeptables.winners_table(swept), left=2)
            yield Table(f"{title}: what became of the configs", *sweeptables.summary_table(swept))
            yield from sweeptables.reasons(swept)
            hits = predict.hits(swept)
            if hits:
                yield Table(f"{title}: prediction against measurement", *predict.hit_table(hits))
            if {row.kernel_hash for row in swept} != {records.kernel_hash(kernel)}:
                yield f"Swept, all or in part, before the last change of {kernel}."


def tunings(found: Found) -> Iterator[Part]:
    """Configs that were held against what runs untuned, in the same rounds."""
    for device, everything in by_device(found.of(TuneRecord)):
        latest = {(records.problem_key(r.problem), r.kernel, records.problem_key(r.config)): r for r in everything}
        lines = []
        for problem in dict.fromkeys(key[0] for key in latest):
            members = [row for key, row in latest.items() if key[0] == problem and row.speedup is not None]
            members.sort(key=lambda row: (row.final, row.speedup or (0.0,)), reverse=True)
            lines += [_tuning(row) for row in members[:_FINALISTS]]
        if lines:
            header = ["problem", "kernel", "config", "x untuned", "interval", "met the other finalists"]
            yield Table(f"{device}: the fastest {_FINALISTS} of each tuning", header, lines, left=3)
        lost = Counter(row.message for row in latest.values() if row.speedup is None)
        yield from (f"{n} without a time: {message}" for message, n in lost.most_common())


def _tuning(row: TuneRecord) -> list[str]:
    ratio, low, high = row.speedup or (0.0, 0.0, 0.0)
    label = problems.label(problems.from_dict(row.problem))
    return [label, row.kernel, knobs(row.config), f"{ratio:.3f}", f"[{low:.3f}, {high:.3f}]", "yes" if row.final else "no"]


def tuned_configs(found: Found) -> Iterator[Part]:
    """The winners that are shipped, with their evidence."""
    folder = resources.files("peakattn").joinpath("tuned")
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".json"))
    for name in names:
        entries = tuned.entries(name.removesuffix(".json"))
        header = ["kernel", "shape class", "config", "TFLOP/s", "best rival", "beat", "when", "compiler", "source"]
        lines = [_entry(entry) for entry in entries]
        if lines:
            yield Table(name, header, lines, left=3, folded=len(lines) > 20)


def _entry(entry: tuned.Entry) -> list[str]:
    seen = entry.evidence
    changed = "kernel_hash" in seen and seen["kernel_hash"] != records.kernel_hash(entry.kernel)
    wanted = ("tflops", "best_rival", "beat", "date", "compiler")
    return [
        entry.kernel,
        knobs(entry.key),
        knobs(entry.config),
        *(str(seen.get(name, "")) for name in wanted),
        "stale" if changed else "",
    ]


def profiles(found: Found) -> Iterator[Part]:
    """What counters said: the last profile of each contender, side by side for each problem."""
    for device, everything in by_device(found.of(ProfileRecord)):
        last = {(records.problem_key(row.problem), row.contender): row for row in everything if row.gate.passed}
        for problem in dict.fromkeys(key[0] for key in last):
            members = [row for key, row in last.items() if key[0] == problem]
            label = problems.label(problems.from_dict(members[0].problem))
            for title, header, lines in tables.tables([_profile(row) for row in members]):
                yield Table(f"{device}, {label}: {title}", header, lines)


def _profile(row: ProfileRecord) -> Profile:
    job = Job(problem=row.problem, kernel=row.kernel, rival=None if row.kernel else row.contender, config=row.config)
    return Profile(job, tuple(row.counters()), row.profiler)
