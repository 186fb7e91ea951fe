"""Pictures of records: grouped bars of every contender for each problem. Readable on a light background, in greyscale too."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path

from peakattn.problem import AttentionProblem
from peakattn_lab import compare, problems

# Ours dark and saturated, rivals in lighter tones that differ in brightness.
_OURS = ("#1b4f8f", "#2a7f62", "#7a3b8f")
_RIVALS = ("#d9d9d9", "#f2b880", "#9ecae1", "#bdbdbd", "#c7e9c0", "#fdd0a2", "#dadaeb")


def bars(cells: Sequence[compare.Cell], path: Path, title: str, stamp: str = "") -> None:
    """Write a PNG of the cells of one mode. ``stamp`` goes into its metadata, so that a reader can tell what it was made from.

    Contenders without a trusted speed have no bar. Error bars are 95 % intervals of the median.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    unit, value = compare.unit(cells)
    names = [n for n in compare.contenders(cells) if any(n in c.rows and c.rows[n].speed_known for c in cells)]
    panels = _panels(cells)
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(max(4.5 * columns, 7.0), 3.2 * lines + 0.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    own = [n for n in names if compare.is_ours(n)]
    others = [n for n in names if not compare.is_ours(n)]
    colour = dict(zip(own, itertools.cycle(_OURS), strict=False)) | dict(zip(others, itertools.cycle(_RIVALS), strict=False))
    width = 0.84 / max(len(names), 1)
    shared = None
    for place, (panel, members) in enumerate(panels.items(), 1):
        axes = shared = figure.add_subplot(lines, columns, place, sharey=shared)
        for i, name in enumerate([*others, *own]):
            at, heights, below, above = [], [], [], []
            for x, cell in enumerate(members):
                record = cell.rows.get(name)
                if record is None or not record.speed_known:
                    continue
                height = value(record)
                # A rate's interval is that of the time, turned around.
                ends = [us / record.median_us for us in record.interval_us]
                low, high = sorted(height * end if unit == "us" else height / end for end in ends)
                at.append(x + (i - (len(names) - 1) / 2) * width)
                heights.append(height)
                below.append(height - low)
                above.append(high - height)
            axes.bar(
                at,
                heights,
                width,
                label=name,
                color=colour[name],
                edgecolor="#404040",
                linewidth=0.4,
                yerr=[below, above],
                error_kw={"linewidth": 0.8},
            )
        axes.set_xticks(range(len(members)), [_tick(cell.problem) for cell in members], fontsize=8)
        if place % columns == 1 or columns == 1:
            axes.set_ylabel(unit)
        axes.set_title(panel, fontsize=9, loc="left")
        axes.grid(axis="y", color="#e6e6e6")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        if place == 1:
            handles, labels = axes.get_legend_handles_labels()
            figure.legend(handles, labels, ncols=max(len(names), 1), fontsize=8, frameon=False, loc="outside lower left")
    figure.suptitle(textwrap.fill(title, 45 * columns), fontsize=8, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None, "Description": stamp})


def _panels(cells: Sequence[compare.Cell]) -> dict[str, list[compare.Cell]]:
    """One panel for each direction, dtype and head_dim."""
    panels: dict[str, list[compare.Cell]] = {}
    for cell in cells:
        direction = {"fwd": "forward", "bwd": "backward"}[cell.problem.direction]
        name = f"{direction}, {str(cell.problem.dtype).removeprefix('torch.')}, head_dim {cell.problem.head_dim}"
        panels.setdefault(name, []).append(cell)
    return panels


def _tick(problem: AttentionProblem) -> str:
    heads = f"\n{problem.num_heads_q}/{problem.num_heads_kv}" if problem.group > 1 else ""
    return f"{problem.mask_name}\n{problems.length(problem.seqlen_k)}{heads}"
