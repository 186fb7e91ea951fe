"""Rooflines of attention: what a device allows a problem at most, and how near the records come.

A roof is a rate that no kernel can pass, in useful TFLOP/s so that roofs and points share one axis:

    tensor   the dense tensor-core rate of the problem's dtype
    memory   bandwidth times arithmetic intensity: ``problem.flops / problem.bytes``, every byte moved once
    exp      one ex2 for each visible pair, 16 per clock and SM, at the highest clock that was observed

A backward that recomputes S and dP in a second device function executes more products and twice the exps, which lowers
its own tensor and exp roofs.  A point above a roof is an error of the time, the counts or the roof, and never good news.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peakattn.device import KNOWN, Device
from peakattn.problem import AttentionProblem
from peakattn_lab import compare, problems
from peakattn_lab.baselines import is_ours
from peakattn_lab.records import Record

MODES = ("kernel", "eager")  # the others do not measure the device
ROOFS = ("tensor", "memory", "exp")

# The rate of CUDA's programming guide for every GPU in FACTS; 16.0 was measured on an H200.
EX2_PER_CLOCK_PER_SM = 16


@dataclass(frozen=True)
class Facts:
    """What Device does not say of a GPU, None where no figure with a source is known."""

    max_sm_mhz: float
    tf32_tflops: float  # dense, of NVIDIA's datasheet
    matmul_tflops: tuple[float, float] | None = None  # measured: bf16, 8192 x 8192 x 8192, lowest and highest
    copy_gbps: float | None = None  # measured: device to device, reads and writes
    measured: str = ""


# A100: datasheet boost clock. H100: the clock that its driver reports as the highest. H200: the highest observed.
FACTS: dict[str, Facts] = {
    KNOWN["a100"].name: Facts(1410, 156),
    KNOWN["h100"].name: Facts(1980, 494.7),
    KNOWN["h200"].name: Facts(1980, 494.7, (740, 800), 4240, "2026-11-29, driver 580.159"),
}

# Backwards that recompute S and dP in a device function for dk and dv and again in one for dq.
_TWO_PASS_KERNELS = frozenset({"triton.bwd"})


@dataclass(frozen=True)
class Point:
    """One problem under its roofs; with a record, what was reached."""

    problem: AttentionProblem
    passes: int  # device functions that recompute
    roofs: dict[str, float]  # of ROOFS those that are known, useful TFLOP/s
    record: Record | None = None

    @property
    def intensity(self) -> float:
        """Useful FLOPs for each byte that must move."""
        return self.problem.flops / self.problem.bytes

    @property
    def height(self) -> float:
        """What was reached, without a record the lowest roof: useful TFLOP/s."""
        return min(self.roofs.values(), default=0.0) if self.record is None else self.record.tflops

    @property
    def bound(self) -> str | None:
        """The name of the lowest roof, None where none is known."""
        return min(self.roofs, key=self.roofs.__getitem__, default=None)

    @property
    def errors(self) -> list[str]:
        """A sentence for each roof that the record is above."""
        row = self.record
        if row is None:
            return []
        return [
            f"{row.contender} on {problems.label(self.problem)} ({row.mode}, run {row.provenance.run}): {row.tflops:.1f} "
            f"TFLOP/s is above its {name} roof of {roof:.1f}; the time, the counts or the roof is wrong."
            for name, roof in self.roofs.items()
            if row.tflops > roof
        ]


@dataclass(frozen=True)
class Roofline:
    """Points of one device; without records, the predicted bounds of problems."""

    device: Device
    points: tuple[Point, ...]
    left_out: tuple[str, ...] = ()

    @property
    def measured(self) -> bool:
        """True when the points are records."""
        return any(point.record is not None for point in self.points)

    @property
    def errors(self) -> list[str]:
        """Sentences that name every row above a roof."""
        return [error for point in self.points for error in point.errors]

    def exit_code(self) -> int:
        """1 when a point is above a roof."""
        return int(bool(self.errors))

    def table(self) -> tuple[list[str], list[list[str]]]:
        """(header, rows) of text; roofs in useful TFLOP/s, for the kernel that ran."""
        header = ["problem", *(["contender"] if self.measured else []), "FLOP/byte", *ROOFS, "bound by", "us at least"]
        return header + (["TFLOP/s", "of roof"] if self.measured else []), [self._line(point) for point in self.points]

    def _line(self, point: Point) -> list[str]:
        row, bound = point.record, point.bound
        line = [problems.label(point.problem), *([row.contender if row else ""] if self.measured else [])]
        line += [f"{point.intensity:.0f}", *(f"{point.roofs[name]:.0f}" if name in point.roofs else "" for name in ROOFS)]
        line += [bound or "", _microseconds(point.problem.flops / point.roofs[bound] / 1e6) if bound else ""]
        if row is not None:
            share = f"{row.tflops / point.roofs[bound]:.0%}" if bound else ""
            line += [f"{row.tflops:.1f}", "ABOVE" if point.errors else share]
        return line

    def notes(self) -> list[str]:
        """Errors first, then where the roofs come from, measured ceilings beside them, and what was left out."""
        device, facts = self.device, FACTS.get(self.device.name)
        lines = self.errors
        matmul = copy = ""
        if facts is not None and facts.matmul_tflops is not None:
            low, high = facts.matmul_tflops
            matmul = f"; measured {low:.0f} to {high:.0f} in a bf16 matmul ({facts.measured})"
            rates = [p.record.tflops for p in self.points if p.record is not None and _half(p.problem)]
            if over := sum(rate > high for rate in rates):
                lines.append(f"points above the measured matmul: {over}; power decides that rate, it is no roof")
        if facts is not None and facts.copy_gbps is not None:
            copy = f"; measured {facts.copy_gbps / 1e3:.2f} in a device copy ({facts.measured})"
        if device.peak_tflops:
            lines.append(f"tensor: {device.peak_tflops:.0f} TFLOP/s of the datasheet, dense bf16 and f16{matmul}")
        if facts is not None and any(point.problem.dtype == torch.float32 for point in self.points):
            lines.append(
                f"tensor, f32: {facts.tf32_tflops:g} TFLOP/s of the datasheet, dense TF32; full accuracy takes more products"
            )
        if device.peak_gbps:
            lines.append(f"memory: {device.peak_gbps / 1e3:.2f} TB/s of the datasheet{copy}")
        if any("exp" in point.roofs for point in self.points):
            clock = f"{facts.max_sm_mhz:.0f} MHz" if facts is not None else "no clock"
            if self.measured:
                clock = f"the highest observed clock of each row, where none was observed at {clock}"
            rate = f"{EX2_PER_CLOCK_PER_SM} ex2 per clock on each of {device.num_sms} SMs"
            lines.append(f"exp: {rate} at {clock}, one for each visible pair")
        if any(point.passes > 1 for point in self.points):
            kernels = ", ".join(sorted({p.record.kernel or "" for p in self.points if p.record is not None and p.passes > 1}))
            lines.append(f"{kernels} recomputes S, dP and the exps in a second device function: its roofs are lower")
        unknown = {
            f"{name} of {str(p.problem.dtype).removeprefix('torch.')}"
            for p in self.points
            for name in ("tensor", "exp")
            if name not in p.roofs
        }
        if unknown:
            lines.append(f"no roof is known for {', '.join(sorted(unknown))} on {device.name}; the real bound may be lower")
        return lines + list(self.left_out)


def of_records(rows: Iterable[Record], device: Device | None = None, mode: str = "kernel") -> Roofline:
    """The records of one device in one timing mode; of several runs of a problem the last. ``device`` picks among several."""
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} does not time the device; allowed are {', '.join(MODES)}.")
    rows = list(rows)
    names = dict.fromkeys(row.provenance.device for row in rows)
    if device is None:
        if len(names) != 1:
            raise ValueError(f"the records are of {', '.join(names) or 'no device'}; name one device, for its roofs.")
        device = _by_name(next(iter(names)))
    cells = compare.cells(row for row in rows if row.provenance.device == device.name and row.mode == mode)
    found = [(cell.problem, row) for cell in cells for row in cell.rows.values()]
    if not found:
        raise ValueError(
            f"there is no record of {device.name} in mode {mode}; the records are of {', '.join(names) or 'nothing'}."
        )
    reasons = dict.fromkeys(
        f"{row.contender} on {problems.label(problem)} has no point: {row.reason}"
        for problem, row in found
        if not row.speed_known
    )
    return Roofline(
        device,
        tuple(_point(problem, device, row) for problem, row in found if row.speed_known and problem.flops),
        tuple(reasons),
    )


def of_problems(found: Iterable[AttentionProblem], device: Device) -> Roofline:
    """Predicted bounds of problems on a device that need not be here."""
    return Roofline(device, tuple(_point(problem, device, None) for problem in found if problem.flops))


def _by_name(name: str) -> Device:
    for device in KNOWN.values():
        if device.name == name:
            return device
    raise ValueError(f"no roofs are known of {name}; known are {', '.join(device.name for device in KNOWN.values())}.")


def _point(problem: AttentionProblem, device: Device, row: Record | None) -> Point:
    passes = 1
    if problem.direction == "bwd" and row is not None and row.kernel in _TWO_PASS_KERNELS:
        passes = problem.needs_dq + (problem.needs_dk or problem.needs_dv)
    facts = FACTS.get(device.name)
    observed = row.observed.get("sm_mhz") if row is not None else None
    mhz = observed[-1] if observed else facts.max_sm_mhz if facts else 0.0
    # Input sets that fit into the L2 cache are served from there, faster than from memory.
    from_memory = row is None or row.input_sets * problem.bytes > device.l2_bytes
    roofs = {
        "tensor": _peak_tflops(problem, device) * problem.flops / _executed_flops(problem, passes),
        "memory": device.peak_gbps / 1e3 * problem.flops / problem.bytes if from_memory else 0.0,
        "exp": device.num_sms * EX2_PER_CLOCK_PER_SM * mhz / 1e6 * problem.flops / (_pairs(problem) * passes),
    }
    return Point(problem, passes, {name: roof for name, roof in roofs.items() if roof}, row)


def _peak_tflops(problem: AttentionProblem, device: Device) -> float:
    if _half(problem):
        return device.peak_tflops
    facts = FACTS.get(device.name)
    return facts.tf32_tflops if facts else 0.0


def _microseconds(us: float) -> str:
    return f"{us:.1f}" if us >= 10 else f"{us:.2g}"


def _half(problem: AttentionProblem) -> bool:
    return problem.dtype in (torch.float16, torch.bfloat16)


def _pairs(problem: AttentionProblem) -> int:
    return problem.batch * problem.num_heads_q * problem.visible_pairs


def _executed_flops(problem: AttentionProblem, passes: int) -> float:
    """Useful FLOPs and those of S, and dP where it is needed, that every pass after the first repeats."""
    again = 2.0 * _pairs(problem) * problem.head_dim
    if problem.needs_dq or problem.needs_dk:
        again += 2.0 * _pairs(problem) * problem.head_dim_v
    return problem.flops + max(passes - 1, 0) * again


# The picture.

# Ours dark and saturated; rivals lighter, told apart by their markers in greyscale.
_OURS = ("#1b4f8f", "#2a7f62", "#7a3b8f")
_RIVALS = ("#8c8c8c", "#e08b3a", "#5aa5d6", "#8fc08a", "#c07fb0")
_MARKERS = "osD^vP*X"
_PREDICTED = "predicted bound"
_INK, _EXP, _MEASURED = "#303030", "#b03030", "#909090"


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
        _scale(axes, roofline.device, members)
        shown = _draw_roofs(axes, roofline.device, members) | shown
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


def _scale(axes: Any, device: Device, members: Sequence[Point]) -> None:
    """Logarithmic axes that hold every point, the corner under the memory roof and the highest roof but that of memory."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    intensities, heights = [p.intensity for p in members], [p.height for p in members]
    flat = [roof for p in members for name, roof in p.roofs.items() if name != "memory"] or heights
    peak = max((p.roofs["tensor"] for p in members if "tensor" in p.roofs), default=max(flat))
    corner = [peak * 1e3 / device.peak_gbps] if device.peak_gbps else []
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(min(intensities + corner) / 3, max(intensities + corner) * 2.5)
    axes.set_ylim(min([*heights, min(flat) / 4]) / 2, max([*flat, *heights]) * 1.6)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1000:g}k" if x >= 1000 else f"{x:g}"))
        axis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=7)
    axes.grid(color="#ececec")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_roofs(axes: Any, device: Device, members: Sequence[Point]) -> dict[str, Any]:
    """Lines of one panel: of each roof the highest for its number of passes. Returns what the legend must explain."""
    flat: dict[tuple[str, int], float] = {}
    for point in members:
        for name in ("tensor", "exp"):
            if name in point.roofs:
                key = (name, point.passes)
                flat[key] = max(flat.get(key, 0.0), point.roofs[name])
    left, right = axes.get_xlim()
    top = axes.get_ylim()[1]
    peak = max((roof for (name, _), roof in flat.items() if name == "tensor"), default=top)
    slope = device.peak_gbps / 1e3
    facts = FACTS.get(device.name)
    legend: dict[str, Any] = {}
    if slope:
        line = axes.plot([left, peak / slope], [left * slope, peak], color=_INK, lw=1.2)[0]
        legend[f"memory, {slope:.2f} TB/s"] = line
    if facts is not None and facts.copy_gbps is not None:
        measured = facts.copy_gbps / 1e3
        line = axes.plot([left, peak / measured], [left * measured, peak], color=_MEASURED, lw=1.0, ls=":")[0]
        legend[f"measured copy, {measured:.2f} TB/s"] = line
    if facts is not None and facts.matmul_tflops is not None and _half(members[0].problem):
        low, high = facts.matmul_tflops
        legend[f"measured matmul, {low:.0f} to {high:.0f} TFLOP/s"] = axes.axhspan(low, high, color="#e3ebf5", zorder=0)
    for (name, passes), roof in flat.items():
        again = "" if passes == 1 else f", {passes} passes"
        width = 1.2 if passes == 1 else 0.8
        if name == "tensor":
            axes.plot([roof / slope if slope else left, right], [roof, roof], color=_INK, lw=width)
            axes.text(right, roof * 0.97, f"tensor {roof:.0f}{again}", fontsize=7, color=_INK, ha="right", va="top")
        else:
            axes.plot([left, right], [roof, roof], color=_EXP, lw=width, ls="--")
            axes.text(left * 1.1, roof * 1.02, f"exp {roof:.0f}{again}", fontsize=7, color=_EXP, va="bottom")
    return legend


def _panels(points: Sequence[Point]) -> dict[str, list[Point]]:
    panels: dict[str, list[Point]] = {}
    for point in points:
        problem = point.problem
        direction = {"fwd": "forward", "bwd": "backward"}[problem.direction]
        dim = f"{problem.head_dim}" + (f"/{problem.head_dim_v}" if problem.head_dim_v != problem.head_dim else "")
        panels.setdefault(f"{direction}, {str(problem.dtype).removeprefix('torch.')}, head_dim {dim}", []).append(point)
    return panels
