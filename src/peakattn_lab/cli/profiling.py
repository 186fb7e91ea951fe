"""profile: hardware counters of one kernel, in tables and answers."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peakattn_lab.cli.console import default_records, progress, say, sentences, show_table, torch_device, words
from peakattn_lab.cli.options import Batch, Causal, Commit, Dtype, HeadDim, HeadDimV, Heads, Out, Seqlen

if TYPE_CHECKING:
    from peakattn.problem import AttentionProblem
    from peakattn_lab.profiling.profilers import Profile, ProfileRecord
    from peakattn_lab.profiling.target import Job
    from peakattn_lab.profiling.timeline import Timeline


def profile(
    kernel: Annotated[str, typer.Argument(help="A kernel id, such as triton.fwd_sm90.")],
    head_dim: HeadDim = 128,
    head_dim_v: HeadDimV = None,
    seqlen: Seqlen = 4096,
    batch: Batch = 4,
    heads: Heads = 16,
    dtype: Dtype = "bfloat16",
    causal: Causal = False,
    config: Annotated[str | None, typer.Option(help='Knobs other than the chosen ones, as JSON: {"block_m": 64}.')] = None,
    rival: Annotated[list[str] | None, typer.Option(help="Rivals to profile beside it, see peakattn bench --list.")] = None,
    timeline: Annotated[bool, typer.Option(help="Also record a timeline of some calls.")] = True,
    report: Annotated[
        Path | None, typer.Option(help="Read this .ncu-rep, or its raw page as .csv, instead of profiling; needs no GPU.")
    ] = None,
    match: Annotated[str, typer.Option(help="Only kernels of --report whose name this regular expression finds.")] = "",
    arch: Annotated[str | None, typer.Option(help="What to compile for where there is no GPU; Hopper unless given.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep the profilers' own reports in this folder.")] = None,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """Why a kernel is as fast as it is: Nsight Compute on one warm launch, held against predictions.

    Exit code: 1 the output is wrong, 3 no GPU, 4 no ncu, 5 no permission for counters, 6 ncu or driver too old, 7 ncu failed.
    """
    from peakattn_lab import compiled, inspection, problems
    from peakattn_lab.profiling import profilers
    from peakattn_lab.profiling.diagnosis import Outcome, ProfileError
    from peakattn_lab.profiling.target import Job

    with sentences():
        problem = inspection.make_problem(
            kernel,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            seqlen=seqlen,
            batch=batch,
            heads=heads,
            dtype=dtype,
            causal=causal,
        )
        if kernel.startswith("cpu."):
            raise ValueError(f"{kernel} runs on the CPU, where Nsight sees nothing; name a GPU kernel, such as triton.fwd.")
        number = compiled.arch_number(arch) if arch else compiled.default_arch()
        job = Job(problem=problems.to_dict(problem), kernel=kernel)
        code = 0
        try:
            if report is not None:
                _show([profilers.of_report(job, report, config, match)], None, report)
            else:
                job = job.model_copy(update={"config": _fields(kernel, problem, config)})
                _measure(job, words(",".join(rival or [])), timeline, keep, out, commit)
        except ProfileError as error:
            code = int(error.outcome)
            say(f"No counters: {error}")
            if error.outcome != Outcome.WRONG:
                _substitutes(job, problem, number, config, with_times=error.outcome != Outcome.NO_GPU)
    raise typer.Exit(code)


def _fields(kernel: str, problem: AttentionProblem, config: str | None) -> dict[str, object] | None:
    """All knobs of a config that changes some of the chosen ones; None for the chosen ones as they are."""
    import dataclasses

    import torch

    from peakattn import dispatch
    from peakattn.device import Device
    from peakattn_lab import inspection

    if config is None or not torch.cuda.is_available():
        return None
    chosen = dispatch.choose(problem, Device.of(torch.device("cuda")), backend=kernel).config
    return dataclasses.asdict(inspection.configured(chosen, config))


def _measure(job: Job, rivals: Sequence[str], timeline: bool, keep: Path | None, out: Path | None, commit: str | None) -> None:
    import dataclasses

    import torch

    from peakattn_lab import baselines, records
    from peakattn_lab.profiling import diagnosis, profilers

    for name in rivals:
        baselines.rival(name)
    facts = torch_device("")[1]
    ncu = diagnosis.ready(facts.arch if torch.cuda.is_available() else None)
    with _folder(keep) as folder, progress("profiling", 1 + len(rivals) + timeline) as step:
        lane = None
        if timeline:
            step("timeline of some calls")
            lane = _attempt_timeline(job, folder)
        step(f"{job.name} under Nsight Compute")
        ours = dataclasses.replace(profilers.with_counters(job, ncu, folder), timeline=lane)
        others = []
        for name in rivals:
            step(f"{name} under Nsight Compute")
            theirs = job.model_copy(update={"kernel": None, "rival": name, "config": None})
            try:
                others.append(profilers.with_counters(theirs, ncu, folder))
            except diagnosis.ProfileError as error:
                say(f"{name}: {error}")
    path = out or default_records(facts, "profile")
    before = profilers.last_record(path, ours)
    for one in (ours, *others):
        records.append(path, one.record(commit))
    _show([ours, *others], before, keep)
    say(f"records in {path}" + (f", reports in {keep}" if keep else ""))


def _attempt_timeline(job: Job, folder: Path) -> Timeline | None:
    from peakattn_lab.profiling import diagnosis, profilers

    try:
        return profilers.timeline_of(job, folder)[0]
    except diagnosis.ProfileError:
        raise
    except (RuntimeError, ValueError) as error:
        say(f"No timeline: {error}")
        return None


def _substitutes(job: Job, problem: AttentionProblem, arch: int, config: str | None, *, with_times: bool) -> None:
    """What can be said without counters: times of the kernels by torch's profiler, and what the machine code tells."""
    from peakattn_lab import inspection

    if with_times:
        say("Times without counters instead:")
        with tempfile.TemporaryDirectory() as folder:
            lane = _attempt_timeline(job, Path(folder))
        if lane is not None and lane.launches:
            title, header, rows = lane.table()
            show_table(title, header, rows, left=1)
            us = sum(map(sum, lane.kernels.values())) / lane.calls
            say(f"{problem.flops / us / 1e6:.1f} useful TFLOP/s; the GPU was {lane.answer()}")
    say(f"Static counts of the machine code for sm_{arch} instead:")
    try:
        found = inspection.inspect(job.kernel or "", problem, arch, config)
    except ValueError as error:
        say(str(error))
        return
    layouts = inspection.layouts.of(found)
    for title, header, rows in [*inspection.tables(found), *inspection.layouts.tables(layouts)]:
        show_table(title, header, rows, left=2)
    for note in [*inspection.notes(found), *inspection.layouts.notes(layouts, found.kernel)]:
        say(note)


def _show(found: Sequence[Profile], before: ProfileRecord | None, report: Path | None) -> None:
    from peakattn_lab.profiling import checklist, tables

    for title, header, rows in tables.tables(found):
        show_table(title, header, rows, left=1)
    if found[0].timeline is not None:
        title, header, rows = found[0].timeline.table()
        show_table(title, header, rows, left=1)
    title, header, rows = checklist.table(found[0], found[1:], before, report)
    show_table(title, header, rows, left=2)
    if found[0].found is None:
        say("The report does not say whether the output was right, so that no time in it is a result.")
    else:
        say(f"checked: {found[0].found.gate_message}")


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """The folder of the profilers' reports: the one to keep, or one that goes away."""
    if keep is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.resolve()
