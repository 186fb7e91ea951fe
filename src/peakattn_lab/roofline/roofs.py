"""Rooflines of attention: what a device allows a problem at most, and how near the records come.

A roof is a rate that no kernel can pass, in useful TFLOP/s so that roofs and points share one axis.  Each is what one part
of the device can do in a second over what the problem asks of it at least; all counts come from ``problem.py``, so that
causal and window masks, grouped heads and skipped gradients are in every roof.

    tensor   the dense tensor-core rate of the dtype; float32 at full accuracy takes three TF32 products
    fma      float32 products outside the tensor cores, for the kernels that make them so
    memory   every input byte read and every output byte written once
    l2       each block reads its own tiles and those of the other side that it can see, for kernels whose tiles are in
             the record
    shared   a wgmma reads its second operand from shared memory again for every 64 rows; on sm_90, 16-bit types
    exp      one ex2 for each visible pair

A backward that recomputes S and dP in a second device function executes more products and twice the exps, which lowers
its own roofs.  A point above a roof is an error of the time, the counts or the roof, and never good news.  Measured
ceilings stand beside the roofs: what simple programs reached on the same GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from peakattn.device import KNOWN, Device
from peakattn.problem import AttentionProblem
from peakattn_lab import compare, problems
from peakattn_lab.provenance import known_device
from peakattn_lab.records import Record
from peakattn_lab.roofline import ceilings
from peakattn_lab.roofline.ceilings import Ceiling, CeilingRecord
from peakattn_lab.roofline.work import ceiling_names, limits_of, work_of

MODES = ("kernel", "eager")  # the others do not measure the device
ROOFS = ("tensor", "fma", "memory", "l2", "shared", "exp")

# Backwards that recompute S and dP in a device function for dk and dv and again in one for dq.
_TWO_PASS_KERNELS = frozenset({"triton.bwd"})


@dataclass(frozen=True)
class Point:
    """One problem under its roofs; with a record, what was reached. All rates are useful TFLOP/s."""

    problem: AttentionProblem
    passes: int  # device functions that recompute
    roofs: dict[str, float]  # of ROOFS those that are known
    record: Record | None = None
    ceilings: dict[str, float] = field(default_factory=dict)  # of ROOFS those that were measured

    @property
    def intensity(self) -> float:
        """Useful FLOPs for each byte that must move."""
        return self.problem.flops / self.problem.bytes

    @property
    def height(self) -> float:
        """What was reached, without a record the lowest roof."""
        return min(self.roofs.values(), default=0.0) if self.record is None else self.record.tflops

    @property
    def bound(self) -> str | None:
        """The name of the lowest roof, None where none is known."""
        return min(self.roofs, key=self.roofs.__getitem__, default=None)

    @property
    def attainable(self) -> float | None:
        """The lowest of the roofs, each at its measured ceiling where there is one; None without measured ceilings."""
        return min((self.roofs | self.ceilings).values()) if self.ceilings else None

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
    ceilings: Mapping[str, Ceiling] = field(default_factory=dict)

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

    @functools.cached_property
    def known(self) -> list[str]:
        """Those of ROOFS that some point has, as a roof or a measured ceiling."""
        return [name for name in ROOFS if any(name in point.roofs or name in point.ceilings for point in self.points)]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """(header, rows) of text; roofs in useful TFLOP/s, for the kernel that ran."""
        header = ["problem", *(["contender"] if self.measured else []), "FLOP/byte", *self.known, "bound by", "us at least"]
        header += ["TFLOP/s", "of roof"] if self.measured else []
        header += ["attainable"] if self.ceilings else []
        header += ["of it"] if self.ceilings and self.measured else []
        return header, [self._line(point) for point in self.points]

    def _line(self, point: Point) -> list[str]:
        row, bound, attainable = point.record, point.bound, point.attainable
        line = [problems.label(point.problem), *([row.contender if row else ""] if self.measured else [])]
        line += [f"{point.intensity:.0f}", *(_figure(point, name) for name in self.known)]
        line += [bound or "", _microseconds(point.problem.flops / point.roofs[bound] / 1e6) if bound else ""]
        if row is not None:
            share = f"{row.tflops / point.roofs[bound]:.0%}" if bound else ""
            line += [f"{row.tflops:.1f}", "ABOVE" if point.errors else share]
        if self.ceilings:
            line += [f"{attainable:.0f}" if attainable else ""]
            line += [f"{row.tflops / attainable:.0%}" if attainable else ""] if row is not None else []
        return line

    def notes(self) -> list[str]:
        """Errors first, then where the roofs come from, measured ceilings beside them, and what was left out."""
        above = sum(p.record.tflops > p.attainable for p in self.points if p.record is not None and p.attainable)
        lines = self.errors
        if above:
            lines.append(f"points above the measured ceilings: {above}; power decides those, they are no roofs")
        lines += [note for name in self.known for note in self._sources(name)]
        if any(point.passes > 1 for point in self.points):
            kernels = ", ".join(sorted({p.record.kernel or "" for p in self.points if p.record is not None and p.passes > 1}))
            lines.append(f"{kernels} recomputes S, dP and the exps in a second device function: its roofs are lower")
        unknown = {
            f"{name} of {str(p.problem.dtype).removeprefix('torch.')}"
            for p in self.points
            for name in ("tensor", "exp")
            if name not in p.roofs and not (name == "tensor" and "fma" in p.roofs)
        }
        if unknown:
            lines.append(
                f"no roof is known for {', '.join(sorted(unknown))} on {self.device.name}; the real bound may be lower"
            )
        return lines + list(self.left_out)

    def _sources(self, roof: str) -> list[str]:
        """What a roof's figures are and the measured ceilings beside them: a line for each kind of number."""
        facts = ceilings.FACTS.get(self.device.name)
        clock = f"{facts.max_sm_mhz:.0f} MHz" if facts is not None else "no clock"
        if self.measured:
            clock = f"the highest observed clock of each row, where none was observed at {clock}"
        sms = f"each of {self.device.num_sms} SMs at {clock}"
        says = {
            "fma": "{:.4g} TFLOP/s of the datasheet, float32",
            "memory": "{:.2f} TB/s of the datasheet",
            "l2": f"{{:.2f}} TB/s of the white paper at {clock}, with the tile in each record",
            "shared": f"{ceilings.SHARED_BYTES_PER_CLOCK_PER_SM} bytes per clock on {sms}, of wgmma's second operand",
            "exp": f"{ceilings.EX2_PER_CLOCK_PER_SM} ex2 per clock on {sms}, one for each visible pair",
            "tf32": "{:.4g} TFLOP/s of the datasheet, TF32; three products for full accuracy, else one",
            **dict.fromkeys(("bfloat16", "float16"), "{:.0f} TFLOP/s of the datasheet, dense"),
        }
        names = {ceiling_names(p.problem).get(roof, roof) for p in self.points if roof in p.roofs or roof in p.ceilings}
        lines = []
        for name in sorted(names):
            rate = ceilings.documented(self.device).get(name)
            what = says.get(roof, says.get(name, ""))
            known = what.format(rate) if rate or "{" not in what else "no documented figure"
            lines.append(f"{roof}{f', {name}' if roof == 'tensor' else ''}: {known}{self._measured(name)}")
        return lines

    def _measured(self, name: str) -> str:
        found = self.ceilings.get(name)
        if found is None:
            return ""
        spread = f"{found.low:.4g} to {found.high:.4g}" if found.low != found.high else f"{found.rate:.4g}"
        return f"; measured {spread} {ceilings.UNITS[name]} ({found.source})"


def of_records(
    rows: Iterable[Record], device: Device | None = None, mode: str = "kernel", measured: Iterable[CeilingRecord] = ()
) -> Roofline:
    """The records of one device in one timing mode; of several runs of a problem the last. ``device`` picks among several.

    ``measured`` are the records of ceilings, of any device.
    """
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
    beside = ceilings.of_device(device, measured)
    points = (_point(problem, device, row, beside) for problem, row in found if row.speed_known and problem.flops)
    return Roofline(device, tuple(points), tuple(reasons), beside)


def of_problems(found: Iterable[AttentionProblem], device: Device, measured: Iterable[CeilingRecord] = ()) -> Roofline:
    """Predicted bounds of problems on a device that need not be here."""
    beside = ceilings.of_device(device, measured)
    return Roofline(device, tuple(_point(problem, device, None, beside) for problem in found if problem.flops), (), beside)


def errors_of(rows: Iterable[Record]) -> list[str]:
    """Sentences on rows above a roof of their device, whose roofs need not be known; rows of a host's time have none."""
    found = []
    for row in rows:
        device = known_device(row.provenance.device)
        problem = problems.from_dict(row.problem)
        if device is not None and row.mode in MODES and row.speed_known and problem.flops:
            found += _point(problem, device, row, {}).errors
    return found


def _by_name(name: str) -> Device:
    device = known_device(name)
    if device is None:
        raise ValueError(f"no roofs are known of {name}; known are {', '.join(device.name for device in KNOWN.values())}.")
    return device


def _point(problem: AttentionProblem, device: Device, row: Record | None, beside: Mapping[str, Ceiling]) -> Point:
    passes = 1
    if problem.direction == "bwd" and row is not None and row.kernel in _TWO_PASS_KERNELS:
        passes = problem.needs_dq + (problem.needs_dk or problem.needs_dv)
    observed = row.observed.get("sm_mhz") if row is not None else None
    work = work_of(problem, passes, device, row)
    limits = limits_of(problem, device, observed[-1] if observed else 0.0)
    # 10^12 a second over 10^12 of work for each useful FLOP.
    roofs = {name: limits[name] * problem.flops / work[name] for name in ROOFS if limits.get(name) and work.get(name)}
    names = ceiling_names(problem)
    reached = {
        roof: beside[name].rate * problem.flops / work[roof]
        for roof, name in names.items()
        if name in beside and work.get(roof)
    }
    return Point(problem, passes, roofs, row, reached)


def _figure(point: Point, name: str) -> str:
    """A roof, or in brackets a measured ceiling where no roof is known."""
    if name in point.roofs:
        return f"{point.roofs[name]:.0f}"
    return f"({point.ceilings[name]:.0f})" if name in point.ceilings else ""


def _microseconds(us: float) -> str:
    return f"{us:.1f}" if us >= 10 else f"{us:.2g}"
