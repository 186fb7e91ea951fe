"""What every command shares: options turned into values, sentences, tables, progress."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    import torch

    from peakattn.device import Device
    from peakattn_lab import records


def results_folder() -> Path:
    """``benchmarks/results`` of the checkout, or the same under the user's data folder."""
    import platformdirs

    from peakattn_lab import provenance

    root = provenance.checkout()
    return root / "benchmarks" / "results" if root else Path(platformdirs.user_data_dir("peakattn")) / "results"


def default_records(device: Device, name: str) -> Path:
    """``<gpu>/<name>.jsonl`` of the results."""
    from peakattn.device import KNOWN

    folder = next((short for short, known in KNOWN.items() if known.name == device.name), device.slug)
    return results_folder() / folder / f"{name}.jsonl"


def records_of(path: Path) -> list[records.Record]:
    from peakattn_lab import records

    if not path.is_file():
        raise ValueError(f"there is no file {path}; give a record file that peakattn bench wrote.")
    return records.read(path)


def words(text: str) -> list[str]:
    """The words of a comma-separated option; ``none`` is no word."""
    return [word.strip() for word in text.split(",") if word.strip() not in ("", "none")]


def device_named(name: str) -> Device:
    from peakattn.device import CPU, Device

    if name == "current":
        return torch_device("")[1]
    return CPU if name == "cpu" else Device.named(name)


def torch_device(name: str) -> tuple[torch.device, Device]:
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


def window_of(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        left, right = (int(side) for side in text.split(","))
    except ValueError:
        raise ValueError(f"window is {text!r}; write LEFT,RIGHT, such as 255,0, with -1 for an unlimited side.") from None
    return left, right


@contextlib.contextmanager
def sentences() -> Iterator[None]:
    """Errors that a user can mend are shown as their sentence, with exit code 2."""
    try:
        yield
    except (ValueError, TypeError, OSError, RuntimeError, ImportError) as error:
        typer.echo(f"peakattn: {error}", err=True)
        raise typer.Exit(2) from error


def say(text: str) -> None:
    typer.echo(text)


def say_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> None:
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
def progress(what: str, total: int | None = None) -> Iterator[Any]:
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
