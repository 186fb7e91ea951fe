"""sweep: every config of a kernel compiled, checked and timed; budgets, predictions and heatmaps of what was found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peakattn_lab.cli.console import default_records, progress, say, sentences, show_table, torch_device, words
from peakattn_lab.cli.options import Commit, Only, Out, Processes

if TYPE_CHECKING:
    import torch

    from peakattn.device import Device
    from peakattn.problem import AttentionProblem, Direction
    from peakattn_lab import records


def sweep(
    kernel: Annotated[str | None, typer.Argument(help="A kernel id, such as triton.fwd.")] = None,
    set_names: Annotated[list[str] | None, typer.Option("--set", help="Problem sets, see peakattn bench --list.")] = None,
    only: Only = None,
    seqlen: Annotated[
        list[int] | None, typer.Option(help="Instead of a set: tokens of each problem, full and causal, batch 4, 8 heads.")
    ] = None,
    head_dim: Annotated[int, typer.Option(help="Size of a head, with --seqlen.")] = 64,
    grid: Annotated[str, typer.Option(help="space: the kernel's search space; source: 625 configs on 8 shapes.")] = "space",
    knob: Annotated[list[str] | None, typer.Option(help="Values of a knob instead of the grid's: block_m=64,128.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu to measure; a GPU such as h200 for a static sweep.")] = "",
    static: Annotated[bool, typer.Option("--static", help="Compile only, also where there is a GPU.")] = False,
    processes: Processes = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which a config counts as hung.")] = 60.0,
    out: Out = None,
    resume: Annotated[bool, typer.Option(help="Go on where the records file ends, unless kernel or compiler changed.")] = False,
    show: Annotated[Path | None, typer.Option(help="Sweep nothing: show what this records file has.")] = None,
    heatmap: Annotated[
        list[str] | None, typer.Option(help="Two knobs, such as block_m,block_n; tiles and warps if none.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the heatmaps into PNGs, the knobs added to this name.")] = None,
    budget: Annotated[bool, typer.Option("--budget", help="Budget equations against the compiler's figures.")] = False,
    hit_rate: Annotated[
        Path | None, typer.Option(help="Sweep nothing: how well the static model foretells this measured sweep.")
    ] = None,
    commit: Commit = None,
) -> None:
    """Every config of a kernel on a set of problems: compiled in parallel, checked against the oracle, timed, recorded."""
    with sentences():
        if hit_rate is not None:
            _show_hits(_rows(hit_rate, kernel))
            return
        if show is not None:
            rows = _rows(show, kernel)
        elif kernel is None:
            raise ValueError("sweep takes a kernel id, or a records file by --show or --hit-rate.")
        else:
            where, facts = _place(device, static)
            chosen = _problems(kernel, set_names, only, seqlen, head_dim, grid, facts)
            path = out or default_records(facts, f"sweep_{kernel.replace('.', '_')}")
            knobs = dict(map(_knob, knob or []))
            rows = _run(kernel, facts, where, chosen, grid, knobs, processes, timeout, path, resume, commit)
            say(f"records in {path}")
        _show(rows, heatmap, plot)
        if budget:
            _show_budget(rows)


def _run(
    kernel: str,
    facts: Device,
    where: torch.device | None,
    chosen: Sequence[AttentionProblem],
    grid: str,
    knobs: dict[str, list[Any]],
    processes: int | None,
    timeout: float,
    path: Path,
    resume: bool,
    commit: str | None,
) -> list[records.SweepRecord]:
    from peakattn_lab import problems, records
    from peakattn_lab.sweep.grid import candidates
    from peakattn_lab.sweep.run import Sweep

    runner = Sweep(kernel, facts, where, processes, timeout=timeout, commit=commit)
    found = [c for problem in chosen for c in candidates(kernel, problem, facts, grid, knobs)]
    keys = {records.problem_key(c.config) for c in found}
    names = {records.problem_key(problems.to_dict(p)) for p in chosen}
    before = records.read_as(records.SweepRecord, path) if resume else []
    rows = [r for r in before if records.problem_key(r.config) in keys and records.problem_key(r.problem) in names]
    with progress(f"sweeping {kernel}", len(found)) as step:
        runner.on_step = lambda text, done, total: step(text)
        try:
            for row in runner.run(found, rows):
                records.append(path, row)
                rows.append(row)
        except KeyboardInterrupt:
            say(f"interrupted; {path} has what was done, and --resume goes on from there.")
    return rows


def _place(device: str, static: bool) -> tuple[torch.device | None, Device]:
    """Where to measure, None for a static sweep, and the facts of the device."""
    from peakattn.device import KNOWN, Device

    if device.lower() in KNOWN:
        return None, Device.named(device)
    where, facts = torch_device(device)
    if facts.type == "cpu" and not device:
        return None, Device.named("h200")
    return (None if static else where), facts


def _problems(
    kernel: str,
    set_names: list[str] | None,
    only: str | None,
    seqlen: list[int] | None,
    head_dim: int,
    grid: str,
    facts: Device,
) -> list[AttentionProblem]:
    from peakattn_lab import problems
    from peakattn_lab.sweep.grid import SOURCE_TOKENS, source_problems

    direction: Direction = "bwd" if kernel.split(".")[-1].startswith("bwd") else "fwd"
    if set_names and not seqlen:
        found = [p for name in set_names for p in problems.named(name).problems if p.direction == direction]
    else:
        found = source_problems(direction, seqlen or SOURCE_TOKENS, head_dim)
    return [problems.on_device(p, facts.type) for p in problems.matching(found, only)]


def _knob(text: str) -> tuple[str, list[Any]]:
    name, _, values = text.partition("=")
    try:
        return name.strip(), [json.loads(value.lower().replace("none", "null")) for value in values.split(",")]
    except ValueError:
        raise ValueError(f"knob is {text!r}; write NAME=VALUE,VALUE, such as block_m=64,128 or tma=true.") from None


def _rows(path: Path, kernel: str | None) -> list[records.SweepRecord]:
    from peakattn_lab import records

    if not path.is_file():
        raise ValueError(f"there is no file {path}; give a records file that peakattn sweep wrote.")
    found = [r for r in records.read_as(records.SweepRecord, path) if kernel in (None, r.kernel)]
    kernels = sorted({r.kernel for r in found})
    if len(kernels) != 1:
        raise ValueError(f"{path} has rows of {', '.join(kernels) or 'no such kernel'}; name one kernel that it has.")
    return found


def _show(rows: Sequence[records.SweepRecord], pairs: list[str] | None, plot: Path | None) -> None:
    from rich.console import Console

    from peakattn_lab.sweep import heatmap
    from peakattn_lab.sweep import tables as sweeptables

    if not rows:
        return
    title = f"{rows[0].kernel} on {rows[0].provenance.device}"
    show_table(f"sweep of {title}", *sweeptables.summary_table(rows), left=1)
    for reason in sweeptables.reasons(rows):
        say(reason)
    wanted = [tuple(words(pair)) for pair in pairs] if pairs else [p for p in heatmap.DEFAULT if set(p) <= set(rows[0].config)]
    for pair in wanted:
        if len(pair) != 2:
            raise ValueError(f"heatmap is {','.join(pair)!r}; name two knobs, such as block_m,block_n.")
        found = heatmap.panels(rows, (pair[0], pair[1]))
        console = Console()
        say(heatmap.unit(found[0]))
        for panel in found:
            console.print(heatmap.terminal(panel))
        if plot is not None:
            file = plot.with_name(f"{plot.stem}_{pair[0]}_{pair[1]}.png")
            heatmap.draw(found, file, f"{title}, {heatmap.unit(found[0])}")
            say(f"picture in {file}")
    show_table(f"fastest configs of {title}", *sweeptables.winners_table(rows), left=2)


def _show_budget(rows: Sequence[records.SweepRecord]) -> None:
    from peakattn_lab.sweep import budget_check

    found = budget_check.checks(rows)
    show_table("shared memory, formula against compiler, bytes", *budget_check.table(found), left=2)
    for sentence in budget_check.findings(found, rows):
        say(sentence)


def _show_hits(rows: Sequence[records.SweepRecord]) -> None:
    from peakattn_lab.sweep import predict

    found = predict.hits(rows)
    if not found:
        raise ValueError("the file has no problem with two configs that were both compiled and timed; sweep on a GPU first.")
    show_table(f"prediction of {rows[0].kernel} on {rows[0].provenance.device}", *predict.hit_table(found), left=1)
