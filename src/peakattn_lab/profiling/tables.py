"""Tables of profiles side by side: speed of light, breakdown, stalls, work and bytes against predictions, roofline, launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab import problems
from peakattn_lab.inspection import products_of
from peakattn_lab.inspection.loops import Table
from peakattn_lab.profiling import counters
from peakattn_lab.profiling.counters import Counters
from peakattn_lab.profiling.profilers import Profile
from peakattn_lab.provenance import known_device
from peakattn_lab.roofline import ceilings, traffic

_UNITS_SHOWN = 5
_STALLS_SHOWN = 8
_MAIN_SHARE = 0.2  # of a call's time, from which a kernel is one of those that do its work
_NAME_WIDTH = 44


@dataclass(frozen=True)
class Column:
    """One profiled launch of one contender."""

    profile: Profile
    kernel: Counters

    @property
    def label(self) -> str:
        name = self.kernel.name.split("(")[0].split("<")[0].split("::")[-1].removeprefix("void ")
        return f"{self.profile.job.name}: {name[:_NAME_WIDTH]}"

    @functools.cached_property
    def problem(self) -> AttentionProblem:
        return problems.from_dict(self.profile.job.problem)

    @property
    def dtype(self) -> str:
        return str(self.problem.dtype).removeprefix("torch.")

    @property
    def device(self) -> Device:
        """The GPU that was profiled; of a report that does not name it, a known one of its architecture."""
        name = self.profile.found.device if self.profile.found else None
        return known_device(name) or Device.for_arch(self.kernel.arch)

    @property
    def main(self) -> bool:
        """False for helpers that take little of the call's time."""
        total = sum(k.duration_us or 0.0 for k in self.profile.kernels)
        return (self.kernel.duration_us or 0.0) >= _MAIN_SHARE * total

    @property
    def executed(self) -> tuple[float, str] | None:
        return self.kernel.tensor_operations(self.dtype, self.device.num_sms)

    @property
    def needed(self) -> float | None:
        """What the algorithm needs of this function; of a rival's backward, whose functions are not known, None."""
        if not self.main or (self.problem.direction == "bwd" and self.profile.job.rival):
            return None
        products = products_of(self.kernel.name, self.problem)
        if products is None:
            return None
        return 2.0 * self.problem.batch * self.problem.num_heads_q * self.problem.visible_pairs * products[1]

    @property
    def predicted(self) -> tuple[float, str] | None:
        if self.profile.job.rival or not self.main:
            return None
        return traffic.l2_to_sm(self.kernel.name, self.problem, self.profile.config)

    @property
    def dram_bytes(self) -> float | None:
        read, written = self.kernel.get(counters.DRAM_READ), self.kernel.get(counters.DRAM_WRITE)
        return None if read is None or written is None else read + written

    @property
    def ratio(self) -> float | None:
        """Executed tensor operations over needed ones."""
        return self.executed[0] / self.needed if self.executed and self.needed else None


def columns_of(profiles: Sequence[Profile]) -> list[Column]:
    return [Column(profile, kernel) for profile in profiles for kernel in profile.kernels]


def main_column(profile: Profile) -> Column | None:
    """The kernel that takes most of the time."""
    return max((Column(profile, k) for k in profile.kernels), key=lambda c: c.kernel.duration_us or 0.0, default=None)


def tables(profiles: Sequence[Profile]) -> list[Table]:
    """Everything that the counters say, one column for each launch."""
    columns = columns_of(profiles)
    makers = (speed_of_light, breakdown, stalls, work, roofline, launch)
    return [table for table in (make(columns) for make in makers) if table[2]]


def speed_of_light(columns: Sequence[Column]) -> Table:
    """The headlines; none of them says which unit is busy."""
    rows = {
        "duration, us": lambda c: _number(c.kernel.duration_us, 1),
        "SM clock, GHz": lambda c: _scaled(c.kernel.get(counters.SM_CLOCK), 1e9, 2),
        "memory clock, GHz": lambda c: _scaled(c.kernel.get(counters.MEMORY_CLOCK), 1e9, 2),
        "compute (SM), %": lambda c: _number(c.kernel.get(counters.COMPUTE), 1),
        "memory, %": lambda c: _number(c.kernel.get(counters.MEMORY), 1),
        "L2, %": lambda c: _number(c.kernel.get(counters.L2), 1),
        "DRAM, %": lambda c: _number(c.kernel.get(counters.DRAM), 1),
        "tensor pipe active, %": lambda c: _number(c.kernel.get(*counters.TENSOR_PIPE), 1),
        "exp (XU) pipe, %": lambda c: _number(c.kernel.get(counters.EXP_PIPE), 1),
        "issue slots, %": lambda c: _number(c.kernel.get(counters.ISSUE), 1),
        "instructions, million": lambda c: _scaled(c.kernel.get(counters.INSTRUCTIONS), 1e6, 1),
    }
    return _table("speed of light", columns, rows)


def side_by_side(columns: Sequence[Column]) -> Table:
    """The headlines of many contenders, one row for each."""
    title, _, rows = speed_of_light(columns)
    labels = [column.profile.job.name for column in columns]
    return title, ["", *(row[0] for row in rows)], [[label, *(row[i] for row in rows)] for i, label in enumerate(labels, 1)]


def breakdown(columns: Sequence[Column]) -> Table:
    """The units under the headlines: the busiest of any column, compute first."""
    rows: dict[str, Callable[[Column], str]] = {}
    for compute in (True, False):
        busiest = dict.fromkeys(unit for c in columns for unit in list(c.kernel.breakdown(compute))[:_UNITS_SHOWN])
        for unit in busiest:
            rows[unit] = functools.partial(_unit, unit, compute)
    return _table("breakdown, % of each unit's peak", columns, rows)


def _unit(unit: str, compute: bool, column: Column) -> str:
    return _number(column.kernel.breakdown(compute).get(unit), 1)


def stalls(columns: Sequence[Column]) -> Table:
    """Why warps wait, in cycles for each instruction issued."""
    reasons = dict.fromkeys(reason for c in columns for reason in list(c.kernel.stalls)[:_STALLS_SHOWN])
    rows = {reason: functools.partial(_stall, reason) for reason in reasons}
    return _table("stalls, cycles for each instruction issued", columns, rows)


def _stall(reason: str, column: Column) -> str:
    return _number(column.kernel.stalls.get(reason), 2)


def work(columns: Sequence[Column]) -> Table:
    """Operations and bytes: measured, and what was predicted."""
    rows = {
        "tensor operations, G": lambda c: _scaled(c.executed[0] if c.executed else None, 1e9, 1),
        "the algorithm's, G": lambda c: _scaled(c.needed, 1e9, 1),
        "executed / needed": lambda c: _number(c.ratio, 3),
        "how counted": lambda c: c.executed[1] if c.executed else "-",
        "L2 to SM, GB": lambda c: _scaled(c.kernel.get(counters.L2_TO_SM), 1e9, 3),
        "predicted, GB": lambda c: _scaled(c.predicted[0] if c.predicted else None, 1e9, 3),
        "because": lambda c: c.predicted[1] if c.predicted else "-",
        "L2 hits, %": lambda c: _number(c.kernel.get(counters.L2_HITS), 1),
        "DRAM read, GB": lambda c: _scaled(c.kernel.get(counters.DRAM_READ), 1e9, 3),
        "DRAM written, GB": lambda c: _scaled(c.kernel.get(counters.DRAM_WRITE), 1e9, 3),
        "once each, GB": lambda c: _scaled(float(c.problem.bytes), 1e9, 3),
    }
    return _table("work and bytes against what they should be", columns, rows)


def roofline(columns: Sequence[Column]) -> Table:
    """Where a launch lies under the roofs: operations for each byte at two levels, and the share of the peak."""
    rows = {
        "executed TFLOP/s": lambda c: _rate(c, c.executed[0] if c.executed else None),
        "useful TFLOP/s": lambda c: _rate(c, c.needed),
        "peak of the datasheet": lambda c: _number(peak(c), 0),
        "useful share, %": lambda c: _share(c),
        "operations / DRAM byte": lambda c: _quotient(c.executed[0] if c.executed else None, c.dram_bytes, 0),
        "ridge of DRAM": lambda c: _quotient(peak(c), c.device.peak_gbps / 1e3, 0),
        "operations / L2 byte": lambda c: _quotient(c.executed[0] if c.executed else None, c.kernel.get(counters.L2_TO_SM), 0),
        "ridge of L2": lambda c: _quotient(peak(c), _l2_rate(c), 0),
    }
    return _table("roofline", columns, rows)


def launch(columns: Sequence[Column]) -> Table:
    """What was launched, and how much of an SM it fills."""
    rows = {
        "grid": lambda c: " x ".join(map(str, c.kernel.grid)),
        "threads": lambda c: " x ".join(map(str, c.kernel.block)),
        "registers": lambda c: _number(c.kernel.get("launch__registers_per_thread"), 0),
        "shared memory, KiB": lambda c: _scaled(c.kernel.get("launch__shared_mem_per_block"), 1024, 1),
        "waves": lambda c: _number(c.kernel.get("launch__waves_per_multiprocessor"), 2),
        "blocks an SM, by limit": lambda c: ", ".join(f"{n} {v:.0f}" for n, v in sorted(c.kernel.limits.items())) or "-",
        "warps active, %": lambda c: _number(c.kernel.get(counters.OCCUPANCY), 1),
    }
    return _table("launch and occupancy", columns, rows)


def peak(column: Column) -> float | None:
    """The datasheet's dense TFLOP/s for the products of this dtype."""
    name = "tf32" if column.dtype == "float32" else column.dtype
    return ceilings.documented(column.device).get(name)


def useful_rate(column: Column) -> float | None:
    """Needed TFLOP/s of a launch."""
    us = column.kernel.duration_us
    return column.needed / us / 1e6 if column.needed and us else None


def _l2_rate(column: Column) -> float | None:
    """TB/s from L2: measured where it was, else the documents'."""
    measured = ceilings.of_device(column.device).get("l2")
    return measured.rate if measured else ceilings.documented(column.device).get("l2")


def _rate(column: Column, flops: float | None) -> str:
    us = column.kernel.duration_us
    return _number(flops / us / 1e6 if flops and us else None, 1)


def _share(column: Column) -> str:
    rate, roof = useful_rate(column), peak(column)
    return _number(100 * rate / roof if rate and roof else None, 1)


def _table(title: str, columns: Sequence[Column], rows: Mapping[str, Callable[[Column], str]]) -> Table:
    body = [[name, *(show(c) for c in columns)] for name, show in rows.items()]
    return title, ["", *(c.label for c in columns)], [row for row in body if any(text != "-" for text in row[1:])]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _scaled(value: float | None, unit: float, digits: int) -> str:
    return _number(None if value is None else value / unit, digits)


def _quotient(a: float | None, b: float | None, digits: int) -> str:
    return _number(a / b if a and b else None, digits)
