"""Hardware counters of profiled launches: which are asked for, and reading them back from a report or its CSV.

Values are kept in base units: nanoseconds, bytes, hertz, percent.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Sections that every version of Nsight Compute has, for any GPU: they bring the breakdown, the stalls and the launch.
SECTIONS = ("SpeedOfLight", "WarpStateStats", "LaunchStats", "Occupancy")

DURATION = "gpu__time_duration.sum"
SM_CLOCK = "sm__cycles_elapsed.avg.per_second"
MEMORY_CLOCK = "dram__cycles_elapsed.avg.per_second"
ACTIVE_CYCLES = "sm__cycles_active.avg"
INSTRUCTIONS = "smsp__inst_executed.sum"
ISSUE = "smsp__issue_active.avg.pct_of_peak_sustained_active"
EXP_PIPE = "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active"
# In order of trust: on Hopper the first counts warpgroup products too, and newer GPUs have only the second.
TENSOR_PIPE = (
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
)
L2_TO_SM = "l1tex__m_xbar2l1tex_read_bytes.sum"
L2_HITS = "lts__t_sector_hit_rate.pct"
L2 = "lts__throughput.avg.pct_of_peak_sustained_elapsed"
DRAM = "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"
DRAM_READ, DRAM_WRITE = "dram__bytes_read.sum", "dram__bytes_write.sum"
COMPUTE = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
MEMORY = "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
# Operations of the tensor cores by operand type, the total before its dense part. An older family, with "op_hmma" in its
# name, reads zero for warpgroup products and is left alone.
TENSOR_OPERATIONS = {
    "bfloat16": ("sm__ops_path_tensor_src_bf16_dst_fp32.sum", "sm__ops_path_tensor_src_bf16_dst_fp32_sparsity_off.sum"),
    "float16": (
        "sm__ops_path_tensor_src_fp16_dst_fp32.sum",
        "sm__ops_path_tensor_src_fp16_dst_fp32_sparsity_off.sum",
        "sm__ops_path_tensor_src_fp16.sum",
    ),
    "float32": ("sm__ops_path_tensor_src_tf32_dst_fp32.sum", "sm__ops_path_tensor_src_tf32_dst_fp32_sparsity_off.sum"),
}
METRICS = (
    *(DURATION, SM_CLOCK, MEMORY_CLOCK, ACTIVE_CYCLES, INSTRUCTIONS, ISSUE, EXP_PIPE, *TENSOR_PIPE),
    *(L2_TO_SM, L2_HITS, L2, DRAM, DRAM_READ, DRAM_WRITE, COMPUTE, MEMORY, OCCUPANCY),
    *(name for names in TENSOR_OPERATIONS.values() for name in names),
)

_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
_UNIT = re.compile(r"(sm|smsp|idc|l1tex|lts|ltc|dram|fbpa)__([\w.]+)\.pct_of_peak_sustained_elapsed")
_COMPUTE_UNITS = ("sm", "smsp", "idc")
_LIMIT = re.compile(r"launch__occupancy_limit_(\w+)")

_PREFIX = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_TIME = {"nsecond": 1.0, "ns": 1.0, "usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6, "second": 1e9, "s": 1e9}


@dataclass(frozen=True)
class Counters:
    """One profiled launch."""

    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arch: int
    metrics: dict[str, float]

    def get(self, *names: str) -> float | None:
        """The first of these metrics that was collected."""
        return next((self.metrics[name] for name in names if name in self.metrics), None)

    @property
    def duration_us(self) -> float | None:
        ns = self.get(DURATION)
        return None if ns is None else ns / 1e3

    @property
    def stalls(self) -> dict[str, float]:
        """Cycles that a warp waits for each instruction issued, by reason, the longest first."""
        found = {m[1].replace("_", " "): v for name, v in self.metrics.items() if (m := _STALL.fullmatch(name))}
        found.pop("selected", None)
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def breakdown(self, compute: bool) -> dict[str, float]:
        """Percent of its peak for each unit under the headline, the busiest first; units of the SM, or of the memories."""
        found = {
            f"{m[1]}: {_readable(m[2])}": value
            for name, value in self.metrics.items()
            if (m := _UNIT.fullmatch(name)) and (m[1] in _COMPUTE_UNITS) == compute and "throughput" not in m[2]
        }
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def limits(self) -> dict[str, float]:
        """Blocks an SM that each resource allows."""
        return {m[1].replace("_", " "): v for name, v in self.metrics.items() if (m := _LIMIT.fullmatch(name))}

    def tensor_operations(self, dtype: str, num_sms: int) -> tuple[float, str] | None:
        """(operations that the tensor cores executed, how that is known), or None.

        Where no counter of operations is there, or it reads zero for this kind of product, the pipe's active cycles tell:
        a pipe that is always active does the datasheet's rate.
        """
        for name in TENSOR_OPERATIONS.get(dtype, ()):
            if self.metrics.get(name):
                return self.metrics[name], "counted"
        rate, share, cycles = _DENSE_RATE.get(self.arch), self.get(*TENSOR_PIPE), self.get(ACTIVE_CYCLES)
        if rate is None or share is None or cycles is None or dtype == "float32" or not num_sms:
            return None
        return rate * num_sms * cycles * share / 100, "from pipe cycles, within some percent"


# Dense bf16 operations with float32 sums for each clock and SM: the datasheet's rate over SMs and boost clock.
_DENSE_RATE = {80: 2048, 90: 4096, 100: 8192}


def read_csv(text: str) -> list[Counters]:
    """The launches in what ``ncu --csv`` prints: ``--page raw``, a column for each metric, or a row for each metric."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    if not rows or "Kernel Name" not in rows[0]:
        raise ValueError(
            "this is no CSV of Nsight Compute; make it with: ncu --import FILE --csv --page raw --print-units base"
        )
    found = _long(rows) if "Metric Name" in rows[0] else _wide(rows)
    if not any(one.metrics for one in found):
        raise ValueError("this CSV has no raw metrics; make it with: ncu --import FILE --csv --page raw --print-units base")
    return found


def _wide(rows: list[dict[str, str]]) -> list[Counters]:
    units: dict[str, str] = {}
    if not rows[0]["ID"]:
        units, rows = rows[0], rows[1:]
    made = []
    for row in rows:
        metrics = {
            name: v for name, text in row.items() if "__" in name and (v := _value(text, units.get(name, ""))) is not None
        }
        made.append(_counters(row, metrics))
    return made


def _long(rows: list[dict[str, str]]) -> list[Counters]:
    launches: dict[str, tuple[dict[str, str], dict[str, float]]] = {}
    for row in rows:
        _, metrics = launches.setdefault(row["ID"], (row, {}))
        value = _value(row["Metric Value"], row.get("Metric Unit", ""))
        if value is not None and "__" in row["Metric Name"]:
            metrics[row["Metric Name"]] = value
    return [_counters(row, metrics) for row, metrics in launches.values()]


def _counters(row: dict[str, str], metrics: dict[str, float]) -> Counters:
    major, _, minor = row.get("CC", "").partition(".")
    arch = 10 * int(major) + int(minor) if major.isdigit() and minor.isdigit() else 0
    return Counters(row["Kernel Name"], _sizes(row.get("Grid Size", "")), _sizes(row.get("Block Size", "")), arch, metrics)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in re.findall(r"\d+", text))


def _value(text: str | None, unit: str) -> float | None:
    try:
        return float((text or "").replace(",", "")) * scale_of(unit)
    except ValueError:
        return None


def scale_of(unit: str) -> float:
    """What a value in this unit is multiplied with to be in base units."""
    head, _, per = unit.partition("/")
    if head in _TIME:
        return _TIME[head]
    match = re.fullmatch(r"([KMGT]?)(byte|hz|cycle|inst|sector)", head)
    scale = _PREFIX[match[1]] if match else 1.0
    return scale * 1e9 / _TIME[per] if per in _TIME else scale


def read_report(path: Path) -> list[Counters] | None:
    """The launches of an ``.ncu-rep`` file by the ncu-report package; None where it is not installed."""
    if importlib.util.find_spec("ncu_report") is None:
        return None
    ncu_report = importlib.import_module("ncu_report")
    report = ncu_report.load_report(str(path))
    actions = [a for i in range(report.num_ranges()) for a in _actions(report.range_by_idx(i))]
    return [_action(action) for action in actions]


def _actions(found: Any) -> list[Any]:
    return [found.action_by_idx(i) for i in range(found.num_actions())]


def _action(action: Any) -> Counters:
    metrics: dict[str, float] = {}
    for name in action.metric_names():
        metric = action.metric_by_name(name)
        value = metric.value()
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            metrics[name] = float(value) * scale_of(str(metric.unit() or ""))

    def sizes(what: str) -> tuple[int, ...]:
        return tuple(int(metrics.get(f"launch__{what}_dim_{axis}", 1)) for axis in "xyz")

    major, minor = (metrics.get(f"device__attribute_compute_capability_{part}", 0.0) for part in ("major", "minor"))
    return Counters(action.name(), sizes("grid"), sizes("block"), int(10 * major + minor), metrics)


def _readable(name: str) -> str:
    return name.removesuffix(".avg").removesuffix(".sum").replace("_", " ")
