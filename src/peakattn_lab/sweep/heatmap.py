"""Heatmaps of a sweep: one knob against another, the best over the others in each cell, a panel for each problem."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peakattn_lab import problems
from peakattn_lab.records import SweepRecord
from peakattn_lab.sweep import predict
from peakattn_lab.sweep import tables as sweeptables

DEFAULT = (("block_m", "block_n"), ("num_warps", "num_stages"))
_COLOURS = "viridis"


@dataclass(frozen=True)
class Panel:
    """``cells[i][j]`` is the best row with the i-th value of the first knob and the j-th of the second, None where none ran."""

    title: str
    knobs: tuple[str, str]
    values: tuple[tuple[Any, ...], tuple[Any, ...]]
    cells: tuple[tuple[SweepRecord | None, ...], ...]
    measured: bool

    def rate(self, row: SweepRecord | None) -> float | None:
        """Useful TFLOP/s, measured or else predicted."""
        if row is None:
            return None
        us = sweeptables.time_of(row)
        return problems.from_dict(row.problem).flops / us / 1e6 if us else None

    @property
    def rates(self) -> list[list[float | None]]:
        return [[self.rate(row) for row in line] for line in self.cells]

    @property
    def best(self) -> SweepRecord | None:
        """The row of the fastest cell."""
        rows = [row for line in self.cells for row in line if row is not None]
        return max(rows, key=lambda row: self.rate(row) or 0.0, default=None)


def panels(rows: Iterable[SweepRecord], knobs: tuple[str, str]) -> list[Panel]:
    """One for each problem; ValueError when a config has no such knob."""
    found = []
    for members in predict.by_problem(rows).values():
        first = members[0]
        for knob in knobs:
            if knob not in first.config:
                raise ValueError(f"{first.kernel} has no knob {knob!r}; its knobs are {', '.join(first.config)}.")
        values = tuple(tuple(sorted({r.config[knob] for r in members}, key=_order)) for knob in knobs)
        best: dict[tuple[Any, Any], SweepRecord] = {}
        for row in sweeptables.fastest(members):
            best.setdefault((row.config[knobs[0]], row.config[knobs[1]]), row)
        cells = tuple(tuple(best.get((i, j)) for j in values[1]) for i in values[0])
        measured = any(r.speed_known for r in members)
        found.append(Panel(problems.label(problems.from_dict(first.problem)), knobs, (values[0], values[1]), cells, measured))
    return found


def draw(found: Sequence[Panel], path: Path, title: str, stamp: str = "") -> None:
    """Write a PNG. Empty cells are configs that did not run; the fastest cell of a panel has a frame."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    columns = min(4, len(found))
    lines = -(-len(found) // columns)
    width = max(len(p.values[1]) for p in found) * 0.62 + 1.3
    height = max(len(p.values[0]) for p in found) * 0.45 + 1.2
    figure = Figure(figsize=(max(columns * width, 5.0), lines * height + 0.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for place, panel in enumerate(found, 1):
        axes = figure.add_subplot(lines, columns, place)
        rates = [[math.nan if r is None else r for r in line] for line in panel.rates]
        top = max((r for line in rates for r in line if not math.isnan(r)), default=1.0)
        axes.imshow(rates, cmap=_COLOURS, vmin=0.0, vmax=top, aspect="auto")
        axes.set_facecolor("#eeeeee")
        for i, line in enumerate(panel.cells):
            for j, row in enumerate(line):
                if row is None:
                    continue
                red, green, blue, _ = colormaps[_COLOURS](rates[i][j] / top)
                dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.5
                axes.text(j, i, _text(rates[i][j], row), ha="center", va="center", fontsize=7, color="w" if dark else "k")
                if row is panel.best:
                    axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, edgecolor="#d62728", linewidth=1.8))
        axes.set_xticks(range(len(panel.values[1])), map(str, panel.values[1]), fontsize=8)
        axes.set_yticks(range(len(panel.values[0])), map(str, panel.values[0]), fontsize=8)
        axes.set_xlabel(panel.knobs[1], fontsize=8)
        axes.set_ylabel(panel.knobs[0], fontsize=8)
        axes.set_title(panel.title, fontsize=8, loc="left")
    figure.suptitle(textwrap.fill(title, round(13 * figure.get_figwidth())), fontsize=9, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None, "Description": stamp})


def terminal(panel: Panel) -> Any:
    """The panel as a rich table, a cell's background its share of the fastest."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    best = panel.best
    top = (panel.rate(best) if best is not None else None) or 1.0
    table = Table(title=panel.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"{panel.knobs[0]} \\ {panel.knobs[1]}", no_wrap=True)
    for value in panel.values[1]:
        table.add_column(str(value), justify="right", no_wrap=True)
    for value, line in zip(panel.values[0], panel.cells, strict=True):
        cells = []
        for row in line:
            rate = panel.rate(row)
            if row is None or rate is None:
                cells.append(Text("-", style="dim"))
                continue
            text = f"{_text(rate, row)}{'<' if row is best else ' '}"
            cells.append(Text(text, style=_style(rate / top)))
        table.add_row(str(value), *cells)
    return table


def unit(panel: Panel) -> str:
    """What a cell shows."""
    return ("" if panel.measured else "predicted ") + "TFLOP/s, the best over the other knobs; * spills, < the fastest"


def _text(rate: float, row: SweepRecord) -> str:
    return f"{rate:.0f}" + "*" * bool(row.spills) if rate >= 10 else f"{rate:.2g}" + "*" * bool(row.spills)


def _style(share: float) -> str:
    """Blue to green to yellow, with a readable foreground."""
    steps = ("#440154", "#3b528b", "#21918c", "#5ec962", "#fde725")
    place = min(int(share * len(steps)), len(steps) - 1)
    return f"{'white' if place < 3 else 'black'} on {steps[place]}"


def _order(value: Any) -> tuple[bool, str | float]:
    """Numbers by size; None and flags behind them by name."""
    return (False, float(value)) if isinstance(value, int) and not isinstance(value, bool) else (True, str(value))
