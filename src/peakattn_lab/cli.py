"""The ``peakattn`` command. Commands import what they need when they run, so that ``--help`` is instant."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
except ModuleNotFoundError:
    raise SystemExit('the peakattn command needs more packages; install them with: pip install "peakattn[lab]"') from None

if TYPE_CHECKING:
    import torch

    from peakattn.device import Device
    from peakattn.problem import AttentionProblem
    from peakattn_lab import records
    from peakattn_lab.baselines import Contender
    from peakattn_lab.bench import Bench

app = typer.Typer(
    name="peakattn",
    help="Exact attention at peak speed for PyTorch: see what runs, check it, time it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def main() -> None:
    """Entry point of the ``peakattn`` command."""
    app()


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON.")] = False,
) -> None:
    """What is installed, which backends work and why not, GPU, driver, caches. Exit code 0 when the main job can run."""
    from peakattn_lab import doctor as examination

    findings = examination.examine()
    ok = examination.healthy(findings)
    if as_json:
        _say_json({"healthy": ok, "findings": [finding.model_dump() for finding in findings]})
    else:
        rows = [[f.group, f.name, f.status, f.detail, f.fix or ""] for f in findings]
        _show_table("", ["", "", "status", "detail", "what mends it"], rows, left=5)
        _say("The main job works." if ok else "The main job does not work: see the rows that say failed.")
    raise typer.Exit(0 if ok else 1)


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(help="Seconds for each thing that is timed.")] = 4.0,
) -> None:
    """A real sentence encoder with peakattn as its attention: checked, timed, and compiled for a GPU. No network."""
    from peakattn_lab import demo as job

    with _sentences():
        ok = job.demo(_say, _show_table, seconds)
    raise typer.Exit(0 if ok else 1)


@app.command()
def explain(
    batch: Annotated[int, typer.Option(help="Batch size.")] = 1,
    seqlen: Annotated[int, typer.Option("--seqlen", help="Query length in tokens, and key length unless given.")] = 4096,
    seqlen_k: Annotated[int | None, typer.Option(help="Key length in tokens.")] = None,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 16,
    kv_heads: Annotated[int | None, typer.Option(help="Key and value heads; as many as query heads unless given.")] = None,
    head_dim: Annotated[int, typer.Option(help="Size of a head of q and k.")] = 128,
    head_dim_v: Annotated[int | None, typer.Option(help="Size of a head of v; as of q and k unless given.")] = None,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "bfloat16",
    causal: Annotated[bool, typer.Option(help="Causal mask.")] = False,
    window: Annotated[str | None, typer.Option(help="LEFT,RIGHT; -1 for an unlimited side.")] = None,
    softcap: Annotated[float | None, typer.Option(help="Bound on the scores.")] = None,
    alignment: Annotated[str, typer.Option(help="bottom_right or top_left.")] = "bottom_right",
    backward: Annotated[bool, typer.Option(help="The backward pass.")] = False,
    device: Annotated[str, typer.Option(help="current, cpu, or a GPU that need not be here, such as h200.")] = "current",
    backend: Annotated[str | None, typer.Option(help="A backend or a kernel id that must be used.")] = None,
) -> None:
    """Which kernel and config a problem gets, and why every other kernel refuses. Nothing is compiled."""
    import torch

    from peakattn import api
    from peakattn.problem import AttentionProblem
    from peakattn_lab import problems

    with _sentences():
        where = _device(device)
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"dtype is {dtype!r}; allowed are float16, bfloat16 and float32.")
        keys, kv = seqlen if seqlen_k is None else seqlen_k, heads if kv_heads is None else kv_heads
        q, k, v = (
            torch.empty(batch, length, count, dim, dtype=kind, device="meta")
            for length, count, dim in ((seqlen, heads, head_dim), (keys, kv, head_dim), (keys, kv, head_dim_v or head_dim))
        )
        problem = AttentionProblem.of(
            q, k, v, causal=causal, window_size=_window(window), softcap=softcap, alignment=alignment, return_lse=backward
        )
        problem = problems.on_device(problem, where.type)
        if backward:
            problem = problem.backward(needs_dq=True, needs_dk=True, needs_dv=True, aligned=problem.aligned)
        text = api.describe(problem, where, backend)
    _say(text)
    raise typer.Exit(0 if "chosen:" in text or "no kernel is needed" in text else 1)


@app.command()
def bench(
    set_names: Annotated[
        list[str] | None, typer.Option("--set", help="Problem sets, see --list; prefill on a GPU, else cpu.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Only problems whose label has all these words, such as 'd128 causal'.")
    ] = None,
    rivals: Annotated[str | None, typer.Option(help="Comma-separated rivals, see --list, or none.")] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="Backends or kernel ids of peakattn to time; its own choice if none.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="Comma-separated timing modes: kernel, eager, host on a GPU; wall on a CPU.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Seconds of measuring for each problem, all modes and contenders together.")
    ] = 5.0,
    device: Annotated[str, typer.Option(help="A torch device: cpu, cuda, cuda:1.")] = "",
    out: Annotated[Path | None, typer.Option(help="Records file (JSON lines) to append to.")] = None,
    resume: Annotated[
        bool, typer.Option(help="Leave out problems that the records file already has, unless the kernel changed.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw the bars into this PNG.")] = None,
    host: Annotated[bool, typer.Option(help="Instead: the host's cost of one eager call, against its floor and SDPA.")] = False,
    commit: Annotated[str | None, typer.Option(help="The commit, for a tree that was copied without its repository.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List problem sets and rivals.")] = False,
) -> None:
    """peakattn against its rivals: interleaved, checked against the oracle, recorded. Exit code 1 when ours has no speed."""
    from peakattn_lab import baselines, problems
    from peakattn_lab.bench import Bench

    with _sentences():
        if show_list:
            _list_bench()
            return
        where, facts = _torch_device(device)
        backends: list[str | None] = [*_listed(",".join(backend or []))] or [None]
        names = _listed(rivals) if rivals is not None else baselines.DEFAULT_RIVALS[facts.type]
        contenders = [*map(baselines.ours, backends), *map(baselines.rival, names)]
        if host:
            _bench_host(where, facts, contenders, out, commit)
            return
        chosen = set_names or (["prefill"] if facts.type == "cuda" else ["cpu"])
        sets = [problems.named(name) for name in chosen]
        runner = Bench(where, seconds, tuple(_listed(mode or "")), commit)  # type: ignore[arg-type]
        shown: list[records.Record] = []
        try:
            for one in sets:
                wanted = [p for p in one.problems if all(word in problems.label(p).split() for word in (only or "").split())]
                if not wanted:
                    labels = "\n  ".join(map(problems.label, one.problems))
                    raise ValueError(f"no problem of {one.name} has all the words {only!r}; its problems are\n  {labels}")
                path = out or default_records(facts, one.name)
                _bench_set(runner, wanted, contenders, path, resume, shown)
                _say(f"{one.name}: records in {path}")
        finally:
            if shown:
                _show_cells(shown)
        if plot is not None:
            _draw(shown, plot, facts)
    if any(baselines.is_ours(row.contender) and not row.speed_known for row in shown):
        raise typer.Exit(1)


@app.command()
def compiled(
    arch: Annotated[str, typer.Option(help="Architecture to compile for, such as sm_90; no GPU needed.")] = "",
    kernel: Annotated[list[str] | None, typer.Option(help="Kernel ids; all GPU kernels if none.")] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="Head sizes; 64, 128 and 256 if none.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Registers, shared memory, spills and tensor-core instructions of every kernel under its default config."""
    from peakattn_lab import compiled as survey

    with _sentences():
        number = survey.arch_number(arch) if arch else survey.default_arch()
        with _progress("compiling") as step:
            found = []
            for one in survey.survey(number, kernel or (), head_dim or survey.HEAD_DIMS):
                found.append(one)
                step(f"compiled {one.kernel}, head_dim {one.problem.head_dim}")
    if as_json:
        _say_json([one.to_dict() for one in found])
    else:
        header, rows = survey.table(found)
        _show_table(f"compiled for sm_{number}: causal bfloat16, 4,096 tokens, default configs", header, rows, left=4)
        for note in survey.notes(found):
            _say(note)
    if not any(one.artifacts for one in found):
        raise typer.Exit(1)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="Records file (JSON lines) of before.")],
    b: Annotated[Path, typer.Argument(help="Records file of after.")],
    relative_to: Annotated[
        str, typer.Option(help="auto: a rival of both runs, so that drift cancels; time: absolute times; or a rival's name.")
    ] = "auto",
    tolerance: Annotated[float, typer.Option(help="A ratio whose interval lies this close to 1 is SAME.")] = 0.01,
    fail_on: Annotated[str, typer.Option(help="Comma-separated verdicts that give exit code 1, or none.")] = "SLOWER",
) -> None:
    """Is B faster than A, case by case? Exit code 1 when peakattn is SLOWER, wrong or gone in B."""
    from peakattn_lab import regress

    with _sentences():
        result = regress.compare_runs(_records_of(a), _records_of(b), relative_to=relative_to, tolerance=tolerance)
        code = result.exit_code(_listed(fail_on))
    _show_table("B against A; above 1 B is faster", *result.table(), left=3)
    for note in result.notes():
        _say(note)
    raise typer.Exit(code)


@app.command()
def roofline(
    files: Annotated[list[Path] | None, typer.Argument(help="Record files (JSON lines); without any, predictions.")] = None,
    set_names: Annotated[
        list[str] | None, typer.Option("--set", help="Problem sets to predict; prefill and backward if none.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="A GPU such as h200; that of the records if there are any.")] = None,
    mode: Annotated[str, typer.Option(help="kernel or eager: which records.")] = "kernel",
    plot: Annotated[Path | None, typer.Option(help="Also draw it into this PNG.")] = None,
) -> None:
    """What a GPU allows attention at most, and how near the records come. Exit code 1 when a record is above a roof."""
    from peakattn.device import Device
    from peakattn_lab import problems
    from peakattn_lab import roofline as roofs

    with _sentences():
        gpu = Device.named(device) if device else None
        if files:
            found = roofs.of_records([row for path in files for row in _records_of(path)], gpu, mode)
        else:
            sets = [problems.named(name) for name in set_names or ("prefill", "backward")]
            found = roofs.of_problems([p for one in sets for p in one.problems], gpu or Device.named("h200"))
        if plot is not None:
            roofs.draw(found, plot)
    _show_table(f"roofs of {found.device.name}, useful TFLOP/s", *found.table(), left=2 if found.measured else 1)
    for note in found.notes():
        _say(note)
    if plot is not None:
        _say(f"picture in {plot}")
    raise typer.Exit(found.exit_code())


@app.command()
def inspect(
    kernel: Annotated[str | None, typer.Argument(help="A kernel id, such as triton.fwd.")] = None,
    arch: Annotated[str | None, typer.Option(help="Such as sm_90; of this machine's GPU, or Hopper's.")] = None,
    head_dim: Annotated[int, typer.Option(help="Size of a head of q and k.")] = 128,
    head_dim_v: Annotated[int | None, typer.Option(help="Size of a head of v; as of q and k unless given.")] = None,
    seqlen: Annotated[int, typer.Option(help="Tokens.")] = 4096,
    batch: Annotated[int, typer.Option(help="Batch size.")] = 4,
    heads: Annotated[int, typer.Option(help="Heads.")] = 16,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "bfloat16",
    causal: Annotated[bool, typer.Option(help="Causal mask.")] = False,
    config: Annotated[str | None, typer.Option(help='Knobs other than the default ones, as JSON: {"block_m": 64}.')] = None,
    against: Annotated[str | None, typer.Option(help="What to compare with: knobs as JSON, or another kernel id.")] = None,
    loop: Annotated[int | None, typer.Option(help="Print the machine code of this hot loop.")] = None,
    cubin: Annotated[Path | None, typer.Option(help="A cubin file to read instead of a kernel.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The findings as JSON.")] = False,
) -> None:
    """What one kernel compiles to, with no GPU: occupancy, hot loops, wasted products, differences between two configs."""
    from peakattn_lab import compiled, inspection

    notes: list[str] = []
    with _sentences():
        if cubin is not None and kernel is None:
            kernels = inspection.read_cubin(cubin)
            tables, loops = inspection.cubin_tables(kernels), [one for k in kernels for one in k.loops]
        elif kernel is not None and cubin is None:
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
            number = compiled.default_arch() if arch is None else compiled.arch_number(arch)
            found = inspection.inspect(kernel, problem, number, config)
            if as_json:
                return _say_json(inspection.to_dict(found))
            tables, notes, loops = inspection.tables(found), inspection.notes(found), inspection.all_loops(found)
            if against is not None:
                tables, notes = [inspection.difference_table(found, inspection.counterpart(found, against))], []
        else:
            raise ValueError("inspect takes a kernel id or --cubin FILE, one of the two.")
        if loop is not None:
            return _say(inspection.loop_listing(loops, loop))
    for title, header, rows in tables:
        _show_table(title, header, rows, left=2)
    for note in notes:
        _say(note)
    return None


@app.command()
def selftest(
    marker: Annotated[str, typer.Option(help="pytest marker expression of the tests to run.")] = "gpu",
    out: Annotated[Path | None, typer.Option(help="Record file (JSON lines) to append to.")] = None,
    commit: Annotated[str | None, typer.Option(help="The commit, for a tree that was copied without its repository.")] = None,
    pytest_options: Annotated[list[str] | None, typer.Argument(help="Passed on to pytest, after --.")] = None,
) -> None:
    """Run the GPU tests of this checkout and record what passed, on which kernel sources."""
    from peakattn_lab import records
    from peakattn_lab import selftest as suite

    with _sentences():
        root = records.checkout()
        if root is None:
            raise ValueError("selftest runs the tests of a checkout; clone the project and run it there.")
        facts = _torch_device("")[1]
        if facts.type == "cpu" and marker == "gpu":
            raise ValueError("there is no CUDA device here, so no GPU test can run; peakattn doctor says why.")
        record = suite.run(root, facts.name, facts.arch, marker, pytest_options or (), commit)
        path = out or default_records(facts, "selftest")
        records.append(path, record)
    _say(f"{record.passed} passed, {len(record.failed)} failed, {len(record.skipped)} skipped; record in {path}")
    raise typer.Exit(0 if record.ok else 1)


@app.command()
def docs(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 when something differs.")] = False,
) -> None:
    """Regenerate the tables and pictures of this checkout's documents from its records."""
    from peakattn_lab import docs as documents
    from peakattn_lab import records

    with _sentences():
        root = records.checkout()
        if root is None:
            raise ValueError("docs rewrites the documents of a checkout; clone the project and run it there.")
        changes = documents.update(root, check=check)
    for change in changes:
        _say(change + ("; run make docs" if check else ": rewritten"))
    raise typer.Exit(1 if changes and check else 0)


def default_records(device: Device, name: str) -> Path:
    """``benchmarks/results/<gpu>/<name>.jsonl`` of the checkout, or the same under the user's data folder."""
    import platformdirs

    from peakattn.device import KNOWN
    from peakattn_lab import records

    folder = next((short for short, known in KNOWN.items() if known.name == device.name), device.slug)
    root = records.checkout()
    base = root / "benchmarks" / "results" if root else Path(platformdirs.user_data_dir("peakattn")) / "results"
    return base / folder / f"{name}.jsonl"


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
    with _progress("measuring", len(wanted)) as step:
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
    _show_table(f"host cost of one eager call, {facts.name}", *hostcost.table(rows), left=2)
    for name, reason in reasons.items():
        _say(f"{name}: {reason}")
    _say(f"records in {path}")


def _show_cells(rows: Sequence[records.Record]) -> None:
    from peakattn_lab import compare

    found = compare.cells(rows)
    for mode in dict.fromkeys(cell.mode for cell in found):
        members = [cell for cell in found if cell.mode == mode]
        _show_table(f"{_MODE_TITLES[mode]}, {compare.unit(members)[0]}", *compare.table(members), left=1)
        for note in compare.notes(members):
            _say(note)


_MODE_TITLES = {"kernel": "kernel time (CUDA graph)", "eager": "eager, cold L2", "host": "host time", "wall": "wall time"}


def _draw(rows: Sequence[records.Record], path: Path, facts: Device) -> None:
    from peakattn_lab import compare, plots
    from peakattn_lab.docs import cells_of

    found = cells_of(rows, None)
    if any(row.speed_known for cell in found for row in cell.rows.values()):
        plots.bars(found, path, f"{facts.name}, {compare.unit(found)[0]}, {found[0].mode} time")
        _say(f"picture in {path}")


def _list_bench() -> None:
    from peakattn_lab import baselines, problems

    sets = [[s.name, str(len(s.problems)), s.why] for s in problems.SETS.values()]
    _show_table("problem sets", ["name", "problems", "what"], sets, left=3)
    facts = _torch_device("")[1]
    rows = [[r.name, r.title, r.unavailable(facts) or "ready"] for r in baselines.RIVALS.values()]
    _show_table("rivals", ["name", "what", "here"], rows, left=3)


def _records_of(path: Path) -> list[records.Record]:
    from peakattn_lab import records

    if not path.is_file():
        raise ValueError(f"there is no file {path}; give a record file that peakattn bench wrote.")
    return records.read(path)


def _listed(text: str) -> list[str]:
    """The words of a comma-separated option; ``none`` is no word."""
    return [word.strip() for word in text.split(",") if word.strip() not in ("", "none")]


def _device(name: str) -> Device:
    from peakattn.device import CPU, Device

    if name == "current":
        return _torch_device("")[1]
    return CPU if name == "cpu" else Device.named(name)


def _torch_device(name: str) -> tuple[torch.device, Device]:
    """A torch device, by default the current CUDA device or else the CPU, and its facts."""
    import torch

    from peakattn.device import Device

    try:
        where = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"device is {name!r}; allowed are cpu, cuda and cuda:<index>.") from None
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}; allowed are cpu, cuda and cuda:<index>.")
    if where.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("there is no CUDA device here; peakattn doctor says why. Leave out --device to use the CPU.")
        where = torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)
        torch.cuda.set_device(where)
    return where, Device.of(where)


def _window(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        left, right = (int(side) for side in text.split(","))
    except ValueError:
        raise ValueError(f"window is {text!r}; write LEFT,RIGHT, such as 255,0, with -1 for an unlimited side.") from None
    return left, right


@contextlib.contextmanager
def _sentences() -> Iterator[None]:
    """Errors that a user can mend are shown as their sentence, with exit code 2."""
    try:
        yield
    except (ValueError, TypeError, OSError, RuntimeError, ImportError) as error:
        typer.echo(f"peakattn: {error}", err=True)
        raise typer.Exit(2) from error


def _say(text: str) -> None:
    typer.echo(text)


def _say_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def _show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> None:
    """A table with its first ``left`` columns aligned left. Where output is not a terminal it is as wide as it needs to be."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {
        "FASTER": "green",
        "ok": "green",
        "SLOWER": "red",
        "missing": "yellow",
        "WRONG": "bold red",
        "failed": "bold red",
    }
    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(text, style=colours.get(text, "")) for text in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.measure(table, options=console.options.update(max_width=1000)).maximum, 1))
    console.print(table)


@contextlib.contextmanager
def _progress(what: str, total: int | None = None) -> Iterator[Any]:
    """A progress bar on stderr while the block runs; call what it yields with a description at each step."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        steps = -1

        def step(description: str) -> None:
            nonlocal steps
            steps += 1
            progress.update(task, description=description, completed=steps)

        yield step
