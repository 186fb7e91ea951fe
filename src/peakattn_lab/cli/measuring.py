"""bench, compare, roofline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peakattn_lab.cli.console import (
    default_records,
    progress,
    records_of,
    say,
    sentences,
    show_table,
    torch_device,
    words,
)
from peakattn_lab.cli.options import Commit, Only, Out, Rivals, TorchDevice

if TYPE_CHECKING:
    import torch

    from peakattn.device import Device
    from peakattn.problem import AttentionProblem
    from peakattn_lab import records
    from peakattn_lab.baselines import Contender
    from peakattn_lab.bench import Bench


def bench(
    set_names: Annotated[
        list[str] | None, typer.Option("--set", help="Problem sets, see --list; prefill on a GPU, else cpu.")
    ] = None,
    only: Only = None,
    rivals: Rivals = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Backends or kernel ids of peakattn to time, auto for its own choice, which is all if none."),
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="Comma-separated timing modes: kernel, eager, host on a GPU; wall on a CPU.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Seconds of measuring for each problem, all modes and contenders together.")
    ] = 5.0,
    device: TorchDevice = "",
    out: Out = None,
    resume: Annotated[
        bool, typer.Option(help="Leave out problems that the records file already has, unless the kernel changed.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw the bars into this PNG.")] = None,
    host: Annotated[bool, typer.Option(help="Instead: the host's cost of one eager call, against its floor and SDPA.")] = False,
    commit: Commit = None,
    show_list: Annotated[bool, typer.Option("--list", help="List problem sets and rivals.")] = False,
) -> None:
    """peakattn against its rivals: interleaved, checked against the oracle, recorded. Exit code 1 when ours has no speed.

    What was tuned on this machine counts only when PEAKATTN_STORE names its folder.
    """
    from peakattn_lab import baselines, problems
    from peakattn_lab.bench import Bench

    os.environ.setdefault("PEAKATTN_STORE", "off")  # a published figure is what everybody gets
    with sentences():
        if show_list:
            _list_bench()
            return
        where, facts = torch_device(device)
        backends = [None if word == "auto" else word for word in words(",".join(backend or []))] or [None]
        names = words(rivals) if rivals is not None else baselines.DEFAULT_RIVALS[facts.type]
        contenders = [*map(baselines.ours, backends), *map(baselines.rival, names)]
        if host:
            _bench_host(where, facts, contenders, out, commit)
            return
        chosen = set_names or (["prefill"] if facts.type == "cuda" else ["cpu"])
        sets = [problems.named(name) for name in chosen]
        runner = Bench(where, seconds, tuple(words(mode or "")), commit)  # type: ignore[arg-type]
        shown: list[records.Record] = []
        try:
            for one in sets:
                wanted = problems.matching(one.problems, only)
                path = out or default_records(facts, one.name)
                _bench_set(runner, wanted, contenders, path, resume, shown)
                say(f"{one.name}: records in {path}")
        finally:
            if shown:
                _show_cells(shown)
        if plot is not None:
            _draw(shown, plot, facts)
    if any(baselines.is_ours(row.contender) and not row.speed_known for row in shown):
        raise typer.Exit(1)


def compare(
    a: Annotated[Path, typer.Argument(help="Records file (JSON lines) of before, of peakattn bench or bench --host.")],
    b: Annotated[Path, typer.Argument(help="Records file of after.")],
    relative_to: Annotated[
        str, typer.Option(help="auto: a rival of both runs, so that drift cancels; time: absolute times; or a rival's name.")
    ] = "auto",
    tolerance: Annotated[float, typer.Option(help="A ratio whose interval lies this close to 1 is SAME.")] = 0.01,
    fail_on: Annotated[str, typer.Option(help="Comma-separated verdicts that give exit code 1, or none.")] = "SLOWER",
) -> None:
    """Is B faster than A, case by case? Exit code 1 when peakattn is SLOWER, wrong or gone in B."""
    from peakattn_lab import records, regress

    with sentences():
        hosts = [records.kind_of_file(path) == "host" for path in (a, b)]
        if all(hosts):
            costs = [records.read_as(records.HostRecord, path) for path in (a, b)]
            result = regress.compare_hosts(*costs, relative_to=relative_to, tolerance=tolerance)
        else:
            result = regress.compare_runs(records_of(a), records_of(b), relative_to=relative_to, tolerance=tolerance)
        code = result.exit_code(words(fail_on))
    show_table("B against A; above 1 B is faster", *result.table(), left=3)
    for note in result.notes():
        say(note)
    raise typer.Exit(code)


def roofline(
    files: Annotated[list[Path] | None, typer.Argument(help="Record files (JSON lines); without any, predictions.")] = None,
    set_names: Annotated[
        list[str] | None, typer.Option("--set", help="Problem sets to predict; prefill and backward if none.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="A GPU such as h200; that of the records if there are any.")] = None,
    mode: Annotated[str, typer.Option(help="kernel or eager: which records.")] = "kernel",
    plot: Annotated[Path | None, typer.Option(help="Also draw it into this PNG.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Instead: measure the ceilings of the GPU at hand and record them.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="With --measure: seconds for each ceiling.")] = 2.0,
    ceilings: Annotated[
        Path | None, typer.Option(help="File of measured ceilings; benchmarks/results/<gpu>/ceilings.jsonl if none.")
    ] = None,
    commit: Commit = None,
) -> None:
    """What a GPU allows attention at most, and how near the records come. Exit code 1 when a record is above a roof."""
    from peakattn.device import Device
    from peakattn_lab import problems
    from peakattn_lab.provenance import known_device
    from peakattn_lab.roofline import ceilings as measured
    from peakattn_lab.roofline import picture as roofplot
    from peakattn_lab.roofline import roofs

    with sentences():
        if measure:
            _measure_ceilings(seconds, ceilings, commit)
            return
        gpu = Device.named(device) if device else None
        rows = [row for path in files or () for row in records_of(path)]
        known = gpu or known_device(rows[0].provenance.device if rows else None) or Device.named("h200")
        beside = measured.read(ceilings or default_records(known, "ceilings"))
        if files:
            found = roofs.of_records(rows, gpu, mode, beside)
        else:
            sets = [problems.named(name) for name in set_names or ("prefill", "backward")]
            found = roofs.of_problems([p for one in sets for p in one.problems], known, beside)
        if plot is not None:
            roofplot.draw(found, plot)
    show_table(f"roofs of {found.device.name}, useful TFLOP/s", *found.table(), left=2 if found.measured else 1)
    for note in found.notes():
        say(note)
    if plot is not None:
        say(f"picture in {plot}")
    raise typer.Exit(found.exit_code())


def _measure_ceilings(seconds: float, out: Path | None, commit: str | None) -> None:
    from peakattn_lab import records
    from peakattn_lab.roofline import ceilings

    where, facts = torch_device("")
    with progress("ceilings", len(ceilings.UNITS)) as step:
        record = ceilings.measure(where, seconds, commit=commit, on_ceiling=step)
    path = out or default_records(facts, "ceilings")
    records.append(path, record)
    show_table(f"ceilings of {facts.name}", *ceilings.table(ceilings.of_device(facts, [record]), facts), left=2)
    say(f"records in {path}")


def _bench_set(
    runner: Bench,
    wanted: Sequence[AttentionProblem],
    contenders: Sequence[Contender],
    path: Path,
    resume: bool,
    shown: list[records.Record],
) -> None:
    """Measure, append each record to the file as it comes, and to ``shown`` with those that ``resume`` found in the file."""
    from peakattn_lab import problems, records

    before = records.read(path) if resume else []
    keys = {records.problem_key(problems.to_dict(problems.on_device(p, runner.device.type))) for p in wanted}
    shown += [r for r in before if records.problem_key(r.problem) in keys and r.provenance.device == runner.device.name]
    with progress("measuring", len(wanted)) as step:
        done = records.done(before, runner.device.name)
        for record in runner.run(wanted, contenders, done, on_problem=lambda problem: step(problems.label(problem))):
            records.append(path, record)
            shown.append(record)


def _bench_host(
    where: torch.device, facts: Device, contenders: Sequence[Contender], out: Path | None, commit: str | None
) -> None:
    from peakattn_lab import hostcost, records

    rows, reasons = hostcost.measure(where, contenders)
    path = out or default_records(facts, "host")
    for record in hostcost.to_records(rows, facts, commit):
        records.append(path, record)
    show_table(f"host cost of one eager call, {facts.name}", *hostcost.table(rows), left=2)
    for name, reason in reasons.items():
        say(f"{name}: {reason}")
    say(f"records in {path}")


def _show_cells(rows: Sequence[records.Record]) -> None:
    from peakattn_lab import compare
    from peakattn_lab.timing import MODE_TITLES

    found = compare.cells(rows)
    for mode in dict.fromkeys(cell.mode for cell in found):
        members = [cell for cell in found if cell.mode == mode]
        show_table(f"{MODE_TITLES[mode]}, {compare.unit(members)[0]}", *compare.table(members), left=1)
        for note in compare.notes(members):
            say(note)


def _draw(rows: Sequence[records.Record], path: Path, facts: Device) -> None:
    from peakattn_lab import compare, plots
    from peakattn_lab.docs import cells_of

    found = cells_of(rows, None)
    if any(row.speed_known for cell in found for row in cell.rows.values()):
        plots.bars(found, path, f"{facts.name}, {compare.unit(found)[0]}, {found[0].mode} time")
        say(f"picture in {path}")


def _list_bench() -> None:
    from peakattn_lab import baselines, problems

    sets = [[s.name, str(len(s.problems)), s.why] for s in problems.SETS.values()]
    show_table("problem sets", ["name", "problems", "what"], sets, left=3)
    facts = torch_device("")[1]
    rows = [[r.name, r.title, r.unavailable(facts) or "ready"] for r in baselines.RIVALS.values()]
    show_table("rivals", ["name", "what", "here"], rows, left=3)
