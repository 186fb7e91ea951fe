"""The timeline of some calls: is the GPU busy, what does one call launch, and which kernel takes the time."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from dataclasses import dataclass

from peakattn_lab.inspection.loops import Table
from peakattn_lab.profiling.target import Launch


@dataclass(frozen=True)
class Timeline:
    """``launches`` of ``calls`` calls one after another, and what recorded them."""

    calls: int
    launches: tuple[Launch, ...]
    source: str

    @property
    def busy(self) -> float:
        """The share of the time from the first start to the last end in which some kernel ran."""
        ordered = sorted(self.launches, key=lambda launch: launch.start)
        busy, reached = 0.0, ordered[0].start
        for launch in ordered:
            end = launch.start + launch.duration
            busy += max(0.0, end - max(launch.start, reached))
            reached = max(reached, end)
        return busy / max(reached - ordered[0].start, 1e-9)

    @property
    def kernels(self) -> dict[str, list[float]]:
        """Durations by kernel, the one that takes most of the time first."""
        found: dict[str, list[float]] = defaultdict(list)
        for launch in self.launches:
            found[launch.name].append(launch.duration)
        return dict(sorted(found.items(), key=lambda item: -sum(item[1])))

    def table(self) -> Table:
        total = sum(sum(times) for times in self.kernels.values())
        rows = [
            [
                name,
                f"{len(times) / self.calls:g}",
                f"{min(times):.1f}",
                f"{statistics.median_high(times):.1f}",
                f"{sum(times) / total:.0%}",
            ]
            for name, times in self.kernels.items()
        ]
        return f"timeline of {self.calls} calls, {self.source}", ["kernel", "a call", "us, least", "us, median", "share"], rows

    def answer(self) -> str:
        """Whether the GPU is the limit, in a sentence."""
        gaps = 1 - self.busy
        limit = "the kernels are the limit" if gaps < 0.05 else "the host or the launches are a limit, not only the kernels"
        return f"busy {self.busy:.0%} of {self.calls} calls in a row, so {limit}"


def of_nsys(text: str, calls: int) -> Timeline:
    """From ``nsys stats --report cuda_gpu_trace --format csv``."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("Start (ns)")), None)
    if start is None:
        raise ValueError("nsys stats printed no cuda_gpu_trace table.")
    rows = csv.DictReader(lines[start:])
    launches = [
        Launch(name=row["Name"], start=float(row["Start (ns)"]) / 1e3, duration=float(row["Duration (ns)"]) / 1e3)
        for row in rows
        if row.get("GrdX")
    ]
    return Timeline(calls, tuple(launches), "Nsight Systems")
