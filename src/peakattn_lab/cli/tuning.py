"""tune."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peakattn_lab.cli.console import default_records, device_named, progress, say, sentences, show_table, torch_device, words
from peakattn_lab.cli.options import Commit, Only, Out, TorchDevice

if TYPE_CHECKING:
    from peakattn.problem import AttentionProblem
    from peakattn_lab.tune.tuner import Tuner


def tune(
    kernel: Annotated[str, typer.Argument(help="A kernel id or a backend, or auto for what would be chosen.")] = "auto",
    set_names: Annotated[
        list[str] | None, typer.Option("--set", help="Problem sets, see bench --list; prefill on a GPU, else cpu.")
    ] = None,
    only: Only = None,
    sweep: Annotated[
        Path | None, typer.Option("--from", help="Records of peakattn sweep: its fastest configs, not the search space.")
    ] = None,
    configs: Annotated[
        int, typer.Option(help="How many: the fastest of --from, else the default's nearest in the search space; 0 for all.")
    ] = 32,
    seconds: Annotated[float, typer.Option(help="Seconds of finals for each problem; a heat has a quarter of it.")] = 2.0,
    finalists: Annotated[int, typer.Option(help="How many meet in the finals, besides the default.")] = 6,
    again: Annotated[bool, typer.Option(help="Time again what the store has.")] = False,
    device: TorchDevice = "",
    out: Out = None,
    commit: Commit = None,
    show: Annotated[
        bool, typer.Option("--show", help="Instead: what is stored; with --only, one shape class in full.")
    ] = False,
    merge: Annotated[Path | None, typer.Option(help="Instead: take in a file or folder of another store.")] = None,
    export: Annotated[Path | None, typer.Option(help="Instead: write winners into a tuned-config file, to be shipped.")] = None,
    gpu: Annotated[str, typer.Option(help="For --export: a device such as h200, by default the one that is here.")] = "current",
    forget: Annotated[
        str | None, typer.Option(help="Instead: remove from the store: all, stale, or the words of a shape class.")
    ] = None,
    cost: Annotated[bool, typer.Option("--cost", help="Instead: what tuning costs a program, in fresh processes.")] = False,
    counts: Annotated[str, typer.Option(help="For --cost: how many configs.")] = "1,2,4,8,16",
) -> None:
    """The fastest config, into your store: raced side by side until it is separated or tied, never slower than the default.

    Interrupted, it goes on where it stopped; a config that was added is all that is timed.
    """
    from peakattn import store

    with sentences():
        where = store.folder()
        if show:
            _show(where, words((only or "").replace(" ", ",")))
        elif merge is not None:
            from peakattn_lab.tune import stored

            for line in stored.merge(merge):
                say(line)
        elif export is not None:
            from peakattn_lab.tune import stored

            for line in stored.export(export, device_named(gpu)):
                say(line)
        elif forget is not None:
            _forget(forget)
        elif cost:
            _cost([int(word) for word in words(counts)], device)
        else:
            _tune(kernel, set_names, only, sweep, configs, seconds, finalists, again, device, out, commit)
            say(f"stored in {where}" if where else "the store is off (PEAKATTN_STORE=off): nothing was kept")


def _tune(
    kernel: str,
    set_names: Sequence[str] | None,
    only: str | None,
    sweep: Path | None,
    configs: int,
    seconds: float,
    finalists: int,
    again: bool,
    device: str,
    out: Path | None,
    commit: str | None,
) -> None:
    from peakattn_lab import problems
    from peakattn_lab.tune.tuner import Tuner

    where, facts = torch_device(device)
    direction = kernel.split(".")[1][:3] if "." in kernel else ""
    default_set = "cpu" if facts.type == "cpu" else "backward" if direction == "bwd" else "prefill"
    sets = [problems.named(name) for name in set_names or [default_set]]
    wanted = [problems.on_device(p, facts.type) for one in sets for p in one.problems if direction in ("", p.direction)]
    wanted = problems.matching(wanted, only)
    path = out or default_records(facts, "tune")
    tuner = Tuner(where, path, seconds, finalists, again, commit)
    lines = []
    try:
        with progress("tuning") as step:
            for number, problem in enumerate(wanted, 1):
                name = f"{number}/{len(wanted)} {problems.label(problem)}: "
                tuner.on_step = functools.partial(_step, step, name)
                lines.append(_tune_one(tuner, problem, None if kernel == "auto" else kernel, sweep, configs))
    finally:
        tuner.close()
        if lines:
            header = ["problem", "winner", "config", "over the default", "", "compile s", "timing s", "all s"]
            show_table(f"tuned on {facts.name}", header, lines, left=3)
    say(f"records in {path}")


def _step(step: Callable[[str], None], name: str, what: str) -> None:
    step(name + what)


def _tune_one(tuner: Tuner, problem: AttentionProblem, kernel: str | None, sweep: Path | None, configs: int) -> list[str]:
    from peakattn import dispatch, race
    from peakattn.autotune import shortlist
    from peakattn_lab import problems
    from peakattn_lab.tune.tuner import from_sweep
    from peakattn_lab.wording import knobs

    label = problems.label(problem)
    began = time.perf_counter()
    try:
        proposals = None
        if sweep is not None:
            proposals = from_sweep(sweep, problem, kernel, configs or None)
        elif configs:
            proposals = shortlist(problem, tuner.device, kernel, configs)
        rows = tuner.tune(problem, kernel, proposals)
    except dispatch.NoKernelError as error:
        return [label, "none", str(error).splitlines()[1].strip(), "", "", "", "", ""]
    timed = [row for row in rows if row.speedup is not None]
    speedups = [row.speedup for row in timed if row.speedup is not None]
    index = race.winner(speedups)
    over = "{:.3f} [{:.3f}, {:.3f}]".format(*speedups[index])
    verdict = "default" if index == 0 else "tied" if race.is_tied(speedups, index) else "separated"
    cost = [f"{s:.2f}" for s in (tuner.compile_seconds, tuner.timing_seconds, time.perf_counter() - began)]
    return [label, timed[index].kernel, knobs(timed[index].config), over, verdict, *cost]


def _show(where: Path | None, wanted: Sequence[str]) -> None:
    from peakattn import store
    from peakattn_lab.tune import stored

    files = stored.matching(wanted)
    say(f"the store is {where or 'off (PEAKATTN_STORE=off)'}")
    if not files:
        say(f"nothing in it has the words {' '.join(wanted)}" if wanted else "nothing in it; peakattn tune fills it")
        return
    if len(files) == 1 and isinstance(files[0][1], store.Tuning):
        show_table(str(files[0][0]), *stored.details(files[0][1]), left=2)
    else:
        show_table("", *stored.table(files), left=4)


def _forget(what: str) -> None:
    from peakattn_lab.tune import stored

    files = stored.matching(() if what in ("all", "stale") else what.replace(",", " ").split())
    gone = stored.forget(files, stale_only=what == "stale")
    for path in gone:
        say(f"removed {path}")
    if not gone:
        say("nothing was removed")


def _cost(counts: Sequence[int], device: str) -> None:
    from peakattn_lab.tune import cost as tunecost

    where, facts = torch_device(device)
    rows: list[tunecost.Cost] = []
    try:
        with progress("measuring", tunecost.total(counts)) as step:
            for row in tunecost.study(counts, str(where), on_step=step):
                rows.append(row)
    finally:  # an interrupted study shows what it has
        if rows:
            show_table(f"what tuning costs a program, seconds, {facts.name}", *tunecost.table(rows), left=2)
        for note in tunecost.notes(rows):
            say(note)
