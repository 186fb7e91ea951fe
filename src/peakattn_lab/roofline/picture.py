"""The picture of a roofline: points under their roofs, a panel for each direction, dtype and head_dim."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from peakattn_lab.baselines import is_ours
from peakattn_lab.roofline.roofs import Point, Roofline

# Ours dark and saturated; rivals lighter, told apart by their markers in greyscale.
_OURS = ("#1b4f8f", "#2a7f62", "#7a3b8f")
_RIVALS = ("#8c8c8c", "#e08b3a", "#5aa5d6", "#8fc08a", "#c07fb0")
_MARKERS = "osD^vP*X"
_PREDICTED = "predicted bound"
_NEAR = 3  # roofs further above that of the products cannot bind, and would only flatten the picture
_INK, _EXP, _MEASURED, _L2 = "#303030", "#b03030", "#909090", "#2a7f62"


def draw(roofline: Roofline, path: Path, title: str = "", stamp: str = "") -> None:
    """Write a PNG, a panel for each direction, dtype and head_dim. ``stamp`` goes into its metadata."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not any(point.height for point in roofline.points):
        raise ValueError(f"there is no point to draw for {roofline.device.name}; give records with a speed, or problems.")
    panels = _panels(roofline.points)
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(max(4.6 * columns, 7.0), 3.9 * lines + 0.7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    looks = _looks(dict.fromkeys(map(_name, roofline.points)))
    shown: dict[str, Any] = {}
    for place, (panel, members) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(lines, columns, place)
        _scale(axes, roofline, members)
        shown = _draw_roofs(axes, roofline, members) | shown
        for point in members:
            colour, marker = looks[_name(point)]
            face = colour if point.problem.mask_name == "full" else "white"
            edge = "#d00000" if point.errors else colour
            axes.plot(point.intensity, point.height, marker, mfc=face, mec=edge, ms=6, mew=1.4, zorder=3)
        axes.set_title(panel, fontsize=9, loc="left")
        axes.set_xlabel("useful FLOP / byte", fontsize=8)
        if place % columns == 1 or columns == 1:
            axes.set_ylabel("useful TFLOP/s", fontsize=8)
    for name, (colour, marker) in looks.items():
        shown[name] = axes.plot([], [], marker, mfc=colour, mec=colour, ms=6)[0]
    figure.legend(shown.values(), shown.keys(), ncols=3 * columns, fontsize=8, frameon=False, loc="outside lower left")
    title = title or f"{roofline.device.name}: {'records' if roofline.measured else 'predicted bounds'} under their roofs"
    figure.suptitle(f"{title}; filled: full mask, hollow: causal or window", fontsize=9, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None, "Description": stamp})


def _name(point: Point) -> str:
    return _PREDICTED if point.record is None else point.record.contender


def _looks(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """A colour and a marker for each name."""
    own, rivals = itertools.cycle(_OURS), itertools.cycle(_RIVALS)
    markers = itertools.cycle(_MARKERS)
    return {name: (next(own if is_ours(name) or name == _PREDICTED else rivals), next(markers)) for name in names}


def _scale(axes: Any, roofline: Roofline, members: Sequence[Point]) -> None:
    """Logarithmic axes that hold every point, the corner under the memory roof, and the roofs that can bind."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    intensities, heights = [p.intensity for p in members], [p.height for p in members]
    flat = [roof for p in members for name, roof in p.roofs.items() if name not in ("memory", "l2")] or heights
    peak = max((p.roofs[name] for p in members for name in ("tensor", "fma") if name in p.roofs), default=max(flat))
    near = [roof for roof in flat if roof <= _NEAR * peak]
    corner = [peak * 1e3 / roofline.device.peak_gbps] if roofline.device.peak_gbps else []
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(min(intensities + corner) / 3, max(intensities + corner) * 2.5)
    axes.set_ylim(min([*heights, min(flat) / 4]) / 2, max([*near, *heights]) * 1.6)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1000:g}k" if x >= 1000 else f"{x:g}"))
        axis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=7)
    axes.grid(color="#ececec")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_roofs(axes: Any, roofline: Roofline, members: Sequence[Point]) -> dict[str, Any]:
    """Lines of one panel: of each roof the highest for its number of passes. Returns what the legend must explain."""
    flat: dict[tuple[str, int], float] = {}
    for point in members:
        for name in ("tensor", "fma", "shared", "exp"):
            if name in point.roofs:
                key = (name, point.passes)
                flat[key] = max(flat.get(key, 0.0), point.roofs[name])
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    peak = max((roof for (name, _), roof in flat.items() if name in ("tensor", "fma")), default=top)
    slope = roofline.device.peak_gbps / 1e3
    legend: dict[str, Any] = {}
    if slope:
        line = axes.plot([left, peak / slope], [left * slope, peak], color=_INK, lw=1.2)[0]
        legend[f"memory, {slope:.2f} TB/s"] = line
    copy = roofline.ceilings.get("memory")
    if copy is not None:
        line = axes.plot([left, peak / copy.rate], [left * copy.rate, peak], color=_MEASURED, lw=1.0, ls=":")[0]
        legend[f"measured copy, {copy.rate:.2f} TB/s"] = line
    product = roofline.ceilings.get(_dtype(members[0]))
    if product is not None and any(point.passes == 1 for point in members):
        band = axes.axhspan(product.low, product.high, color="#e3ebf5", zorder=0)
        legend[f"measured matmul, {product.low:.0f} to {product.high:.0f} TFLOP/s"] = band
    for point in members:
        l2 = point.roofs.get("l2", point.ceilings.get("l2"))
        if l2 is not None and bottom < l2 < top:
            legend["L2, by the point's tile"] = axes.plot(point.intensity, l2, "_", color=_L2, ms=9, mew=1.4)[0]
    for (name, passes), roof in flat.items():
        if roof > top:
            continue
        again = "" if passes == 1 else f", {passes} passes"
        width = 1.2 if passes == 1 else 0.8
        if name in ("tensor", "fma"):
            axes.plot([roof / slope if slope else left, right], [roof, roof], color=_INK, lw=width)
            axes.text(right, roof * 0.97, f"{name} {roof:.0f}{again}", fontsize=7, color=_INK, ha="right", va="top")
        else:
            axes.plot([left, right], [roof, roof], color=_EXP, lw=width, ls="--")
            # Roofs of different parts may be equal; their names stand apart.
            place = left * 1.1 if name == "exp" else (left * right) ** 0.5
            axes.text(place, roof * 1.02, f"{name} {roof:.0f}{again}", fontsize=7, color=_EXP, va="bottom")
    return legend


def _dtype(point: Point) -> str:
    """The ceiling that a point's products have."""
    name = str(point.problem.dtype).removeprefix("torch.")
    return "tf32" if name == "float32" and "fma" not in point.roofs else name


def _panels(points: Sequence[Point]) -> dict[str, list[Point]]:
    panels: dict[str, list[Point]] = {}
    for point in points:
        problem = point.problem
        direction = {"fwd": "forward", "bwd": "backward"}[problem.direction]
        dim = f"{problem.head_dim}" + (f"/{problem.head_dim_v}" if problem.head_dim_v != problem.head_dim else "")
        panels.setdefault(f"{direction}, {str(problem.dtype).removeprefix('torch.')}, head_dim {dim}", []).append(point)
    return panels
