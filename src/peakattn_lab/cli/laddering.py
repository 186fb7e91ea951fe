"""ladder: the same kernel from naive to peak, one idea a rung: checked, timed, explained."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peakattn_lab.cli.console import default_records, progress, say, sentences, show_table, torch_device, words
from peakattn_lab.cli.options import Commit, Dtype, Out, Processes, Rivals

if TYPE_CHECKING:
    import torch

    from peakattn.device import Device
    from peakattn.problem import AttentionProblem
    from peakattn_lab.ladder import Rung
    from peakattn_lab.ladder.compiling import Code, Job
    from peakattn_lab.ladder.rows import RungRecord
    from peakattn_lab.ladder.subjects import Subject

_TOKENS = 16384  # of a call, and num_heads x head_dim = 2048: the cells of the prefill set


def ladder(
    language: Annotated[str, typer.Argument(help="triton, cute, cuda or cutile.")] = "triton",
    rung: Annotated[list[str] | None, typer.Option(help="Steps, such as 4; all if none.")] = None,
    seqlen: Annotated[str, typer.Option(help="Comma-separated lengths.")] = "1024,4096,16384",
    head_dim: Annotated[str, typer.Option(help="Comma-separated head sizes.")] = "64,128",
    causal: Annotated[bool | None, typer.Option(help="Only causal or only full masks; both unless given.")] = None,
    dtype: Dtype = "bfloat16",
    rivals: Rivals = None,
    seconds: Annotated[float, typer.Option(help="Seconds of measuring for each problem.")] = 5.0,
    iterations: Annotated[int | None, typer.Option(min=1, help="Samples of each rung, instead of --seconds.")] = None,
    experiment: Annotated[str | None, typer.Option(help="A side experiment, see --list.")] = None,
    check_only: Annotated[bool, typer.Option("--check-only", help="Hold the rungs to the oracle; no times.")] = False,
    counters: Annotated[
        bool, typer.Option("--counters", help="Profile each rung with Nsight Compute instead: compute and memory throughput.")
    ] = False,
    static: Annotated[bool, typer.Option("--static", help="Compile and read the code; no GPU needed.")] = False,
    arch: Annotated[str, typer.Option(help="With --static: what to compile for.")] = "",
    diff: Annotated[str | None, typer.Option(help="Print how this step differs from the one before.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Ideas, predictions and reasons of the rungs.")] = False,
    processes: Processes = None,
    out: Out = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the ladder into this PNG.")] = None,
    commit: Commit = None,
) -> None:
    """One kernel from naive to peak: each rung checked, then all timed interleaved with the rivals, and recorded.

    Exit code 1 when a rung is wrong; it then has no speed.
    """
    from peakattn_lab import compiled, ladder, problems

    with sentences():
        chosen = ladder.rungs(language, rung or ())
        if show_list or diff is not None:
            _tell(language, chosen, diff)
            return
        kind = problems.dtype_named(dtype)
        dims = _numbers("head_dim", head_dim)
        wanted = _problems(_numbers("seqlen", seqlen), dims, causal, kind)
        count = processes or os.cpu_count() or 1
        if static:
            number = compiled.arch_number(arch) if arch else compiled.default_arch()
            _static(language, chosen, experiment, wanted, number, count)
            return
        if counters and experiment is not None:
            raise ValueError(
                f"--experiment is {experiment!r}, and --counters profiles rungs under their own configs; leave one of them out."
            )
        where, facts = torch_device("")
        if facts.type == "cpu" and not check_only:
            raise ValueError("there is no CUDA device to time on; --static compiles without one, --check-only interprets.")
        if counters:
            from peakattn_lab.profiling import diagnosis

            ncu = diagnosis.ready(facts.arch)  # before minutes of checks
        red = _check(chosen, kind, facts, where, dims, count)
        green = [one for one in chosen if one.id not in red]
        if counters:
            _profile(ncu, green, wanted, facts, out or default_records(facts, f"ladder_{language}_counters"), commit)
        elif not check_only:
            path = out or default_records(facts, "_".join(filter(None, ("ladder", language, experiment))))
            _measure(language, green, experiment, wanted, where, facts, rivals, seconds, iterations, count, path, plot, commit)
    if red:
        raise typer.Exit(1)


def _tell(language: str, chosen: Sequence[Rung], diff: str | None) -> None:
    from peakattn_lab import ladder
    from peakattn_lab.ladder import tables

    if diff is None:
        show_table(f"the {language} ladder", *tables.ideas(chosen), left=5)
        say(f"The source: {ladder.source(language)}.")
        return
    (after,) = ladder.rungs(language, [diff])
    every = ladder.rungs(language)
    place = every.index(after)
    if place == 0:
        raise ValueError(f"{after.id} is the first rung; --diff takes a later one.")
    say(ladder.difference(every[place - 1], after))


def _numbers(name: str, text: str) -> list[int]:
    try:
        found = [int(word) for word in words(text)]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ValueError(f"{name} is {text!r}; write positive numbers with commas between them.")
    return found


def _problems(seqlens: list[int], dims: list[int], causal: bool | None, kind: torch.dtype) -> list[AttentionProblem]:
    from peakattn_lab import problems

    masks = (False, True) if causal is None else (causal,)
    return [
        problems.make(n, dim, batch=max(_TOKENS // n, 1), heads=max(2048 // dim, 1), causal=mask, dtype=kind)
        for dim in dims
        for mask in masks
        for n in seqlens
    ]


def _check(
    chosen: Sequence[Rung], kind: torch.dtype, facts: Device, where: torch.device, dims: list[int], count: int
) -> set[str]:
    """The ids of rungs that are wrong, after a table of them all; RuntimeError when no rung could be checked."""
    from peakattn_lab import problems
    from peakattn_lab.ladder import checking, subjects

    rows, red, refusals = [], set(), []
    found = checking.check_problems(kind, facts, dims)
    if facts.type == "cuda":
        # Checks run one after the other, and their tails and masks are code of their own: minutes for one compiler.
        takers = [(p, [r for r in chosen if subjects.refusal(r, p, facts) is None]) for p in found]
        _compile([(p, [subjects.by_default(r, p, facts) for r in able]) for p, able in takers], facts, count)
    with progress("checking", len(chosen) * len(found)) as step:
        for one, problem, result in checking.check_all(chosen, found, where):
            step(f"checked {one.id}, {problems.label(problem)}")
            if isinstance(result, str):
                refusals.append(f"{one.id}: {result}")
                continue
            rows.append([one.id, problems.label(problem), "ok" if result.passed else "WRONG", result.message])
            if not result.passed:
                red.add(one.id)
    if not rows:
        raise RuntimeError("no rung could be checked.\n  " + "\n  ".join(dict.fromkeys(refusals)))
    shown = [row for row in rows if row[2] != "ok"]
    for one in chosen:
        mine = [row for row in rows if row[0] == one.id]
        if mine and one.id not in red:
            shown.append([one.id, f"{len(mine)} problems", "ok", mine[0][3]])
    show_table("against the oracle", ["rung", "problem", "", "what was checked, or what is wrong"], shown, left=4)
    for text in dict.fromkeys(refusals):
        say(text)
    return red


def _static(
    language: str, chosen: Sequence[Rung], experiment: str | None, wanted: list[AttentionProblem], arch: int, count: int
) -> None:
    from peakattn.device import Device
    from peakattn_lab.ladder import running, subjects

    facts = Device.for_arch(arch)
    plan = []
    for problem in _of_experiment(language, experiment, wanted):
        if experiment is None:
            found = [subjects.by_default(r, problem, facts) for r in chosen if _takes(r, problem, facts)]
        else:
            found = subjects.of_experiment(language, experiment)
        plan.append((problem, found))
    code = _compile(plan, facts, count)
    for problem, found in plan:
        _show(running.static(found, problem, facts, code))


def _measure(
    language: str,
    chosen: Sequence[Rung],
    experiment: str | None,
    wanted: list[AttentionProblem],
    where: torch.device,
    facts: Device,
    rivals: str | None,
    seconds: float,
    iterations: int | None,
    count: int,
    path: Path,
    plot: Path | None,
    commit: str | None,
) -> None:
    from peakattn_lab import baselines, problems, records
    from peakattn_lab.bench import Bench
    from peakattn_lab.ladder import figure, running, subjects
    from peakattn_lab.ladder.rows import cells

    names = words(rivals) if rivals is not None else baselines.DEFAULT_RIVALS[facts.type]
    against = [baselines.rival(name) for name in names]
    given = None if experiment is None else subjects.of_experiment(language, experiment)
    wanted = _of_experiment(language, experiment, wanted)
    plan = []
    for problem in wanted:
        takers = [r for r in chosen if _takes(r, problem, facts)]
        plan.append((problem, given or [c for r in takers for c in subjects.candidates(r, problem, facts)]))
    code = _compile(plan, facts, count)
    runner = Bench(where, seconds, ("kernel",), commit, iterations)
    shown: list[RungRecord] = []
    try:
        with progress("measuring", len(wanted)) as step:
            for problem in wanted:
                step(f"tuning {problems.label(problem)}")
                takers = [r for r in chosen if _takes(r, problem, facts)]
                found = given or [running.tune(r, problem, where) for r in takers]
                for row in running.run(found, problem, against, runner, code):
                    records.append(path, row)
                    shown.append(row)
    finally:
        _show(shown)
    say(f"records in {path}")
    if plot is not None:
        figure.draw(cells(shown), plot, f"{language} ladder, {facts.name}")
        say(f"picture in {plot}")


def _profile(
    ncu: Path, chosen: Sequence[Rung], wanted: list[AttentionProblem], facts: Device, path: Path, commit: str | None
) -> None:
    """One warm launch of each rung under Nsight Compute, and a table for each problem."""
    import tempfile

    from peakattn_lab import problems, records
    from peakattn_lab.profiling import diagnosis, profilers, tables
    from peakattn_lab.profiling.target import Job

    for problem in wanted:
        takers = [r for r in chosen if _takes(r, problem, facts)]
        columns = []
        with tempfile.TemporaryDirectory() as folder, progress("profiling", len(takers)) as step:
            for rung in takers:
                step(f"{rung.id}, {problems.label(problem)}")
                try:
                    one = profilers.with_counters(Job(problem=problems.to_dict(problem), rung=rung.id), ncu, Path(folder))
                except diagnosis.ProfileError as error:
                    say(f"{rung.id}: {error}")
                    continue
                records.append(path, one.record(commit))
                columns += tables.columns_of([one])
        if columns:
            title, header, rows = tables.side_by_side(columns)
            show_table(f"{title}, {problems.label(problem)}", header, rows, left=1)
    say(f"records in {path}")


def _takes(rung: Rung, problem: AttentionProblem, facts: Device) -> bool:
    from peakattn_lab.ladder import subjects

    reason = subjects.refusal(rung, problem, facts)
    if reason is not None:
        say(f"{rung.id} is left out: {reason}")
    return reason is None


def _of_experiment(language: str, experiment: str | None, wanted: list[AttentionProblem]) -> list[AttentionProblem]:
    """The problems with the mask that an experiment is about, and its claim said."""
    if experiment is None:
        return wanted
    from peakattn_lab import ladder

    about = ladder.experiment(language, experiment)
    say(about.claim)
    return [problem for problem in wanted if problem.causal == about.causal]


def _compile(plan: Sequence[tuple[AttentionProblem, Sequence[Subject]]], facts: Device, count: int) -> dict[Job, Code]:
    from peakattn_lab.ladder.compiling import Job, compile_all

    jobs = dict.fromkeys(Job.of(one, problem, facts) for problem, found in plan for one in found)
    with progress("compiling", len(jobs)) as step:
        return compile_all(jobs, count, on_done=lambda job: step(f"compiled {job.rung.id}"))


def _show(rows: Sequence[RungRecord]) -> None:
    from peakattn_lab.ladder import tables
    from peakattn_lab.ladder.rows import cells

    found = cells(rows)
    for cell in found:
        if any(row.mode != "static" for row in cell.rows.values()):
            title, header, body = tables.speeds(cell)
            show_table(title, header, body, left=2)
    for cell in found:
        title, header, body = tables.code(cell)
        show_table(title, header, body, left=2)
