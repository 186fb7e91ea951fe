"""The ladder as a picture: a bar for each rung, rivals as lines, the gain over the rung before on each bar."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from peakattn_lab.ladder import tables
from peakattn_lab.ladder.rows import Cell

_RUNG, _LAST, _RIVAL = "#9ecae1", "#1b4f8f", "#b3541e"
_ROOMY = 12  # as many bars leave room for a gain with its unit


def draw(cells: Sequence[Cell], path: Path, title: str, stamp: str = "") -> None:
    """Write a PNG, a panel for each problem. ``stamp`` goes into its metadata: what it was made from.

    Rungs without a trusted speed have no bar. Error bars are 95 % intervals of the median.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(cells))
    lines = -(-len(cells) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.4 * lines + 0.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for place, cell in enumerate(cells, 1):
        axes = figure.add_subplot(lines, columns, place)
        steps = cell.steps
        for x, row in enumerate(steps):
            if not row.speed_known:
                continue
            low, high = (row.tflops * row.median_us / us for us in reversed(row.interval_us))
            axes.bar(
                x,
                row.tflops,
                0.75,
                color=_LAST if x == len(steps) - 1 else _RUNG,
                edgecolor="#404040",
                linewidth=0.4,
                yerr=[[row.tflops - low], [high - row.tflops]],
                error_kw={"linewidth": 0.8},
            )
            gain = cell.gain(row, cell.before(row))
            if gain is not None:
                text = f"{gain.ratio:.2f} x" if len(steps) <= _ROOMY else f"{gain.ratio:.2f}"
                axes.annotate(text, (x, high), ha="center", va="bottom", fontsize=7 if len(steps) <= _ROOMY else 6)
        for i, rival in enumerate(cell.rivals):
            if rival.speed_known:
                axes.axhline(rival.tflops, color=_RIVAL, linewidth=1.2 if rival is cell.best_rival else 0.6, linestyle="--")
                text = f"{rival.contender}, {rival.tflops:.0f}"
                left = len(steps) * i * 0.15 - 0.4  # side by side, since rivals may be equally fast
                axes.annotate(text, (left, rival.tflops), fontsize=7, color=_RIVAL, va="bottom", ha="left")
        ticks = [row.contender.removeprefix(row.rung or "").strip() or str(row.rung).rpartition(".step")[2] for row in steps]
        axes.set_xticks(range(len(steps)), ticks, fontsize=8)
        axes.set_title(tables.label(cell), fontsize=9, loc="left")
        axes.set_ylabel("TFLOP/s")
        axes.set_ylim(bottom=0)
        axes.margins(y=0.12)
        axes.grid(axis="y", color="#e6e6e6")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(textwrap.fill(title, 60 * columns), fontsize=8, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None, "Description": stamp})
