"""Profilers on one kernel: Nsight Compute and Nsight Systems in child processes, and what is left where they cannot work.

A child prepares the kernel, checks its output and warms the GPU before the profiler looks at a single launch.  The clocks
are left as they are.  Where counters cannot be had, the reason is one of ``Outcome``, which is also the exit code, and the
substitutes are times by torch's profiler and the static counts of ``inspection``.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic

from peakattn import backends
from peakattn.device import Device
from peakattn_lab import inspection, ladder, problems, provenance, records
from peakattn_lab.profiling import counters, diagnosis, timeline
from peakattn_lab.profiling.counters import Counters
from peakattn_lab.profiling.diagnosis import Outcome, ProfileError
from peakattn_lab.profiling.target import Found, Job
from peakattn_lab.profiling.timeline import Timeline

_TIMEOUT = 400.0


class KernelRow(pydantic.BaseModel):
    """One profiled launch of a record; ``metrics`` in base units."""

    name: str
    grid: list[int]
    block: list[int]
    metrics: dict[str, float]


class ProfileRecord(pydantic.BaseModel):
    """One contender on one problem under a profiler; only rows whose output was right are written."""

    model_config = pydantic.ConfigDict(extra="forbid")

    schema_version: int = records.SCHEMA
    provenance: provenance.Provenance
    problem: dict[str, Any]
    contender: str
    kernel: str | None = None
    kernel_hash: str | None = None
    config: dict[str, Any] | None = None
    config_source: str | None = None
    version: str | None = None
    profiler: str
    gate: records.Gate
    warm_us: float | None = None
    observed: dict[str, Any] = {}
    profiled: list[KernelRow]

    def counters(self) -> list[Counters]:
        return [
            Counters(row.name, tuple(row.grid), tuple(row.block), self.provenance.arch, row.metrics) for row in self.profiled
        ]


@dataclass(frozen=True)
class Profile:
    """What a profiler found about one contender. ``found`` is None for a report that somebody brought."""

    job: Job
    kernels: tuple[Counters, ...]
    profiler: str
    found: Found | None = None
    timeline: Timeline | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The knobs that ran; none of a rival."""
        return (self.found.config if self.found else self.job.config) or {}

    def record(self, commit: str | None = None) -> ProfileRecord:
        """The row of this profile."""
        if self.found is None:
            raise ValueError("a report from elsewhere has no provenance, so it makes no record.")
        found = self.found
        return ProfileRecord(
            provenance=provenance.here(found.device, found.arch, commit),
            problem=self.job.problem,
            contender=self.job.name,
            kernel=self.job.kernel,
            kernel_hash=_hash_of(self.job),
            config=found.config,
            config_source=found.config_source,
            version=found.version,
            profiler=self.profiler,
            gate=records.Gate(passed=found.gate_passed, message=found.gate_message),
            warm_us=found.warm_us,
            observed=found.observed,
            profiled=[
                KernelRow(name=k.name, grid=list(k.grid), block=list(k.block), metrics=_kept(k.metrics)) for k in self.kernels
            ],
        )


def _hash_of(job: Job) -> str | None:
    """Of the source that ran, where it is ours."""
    if job.rung is not None:
        return ladder.rung(job.rung).source_hash
    return records.kernel_hash(job.kernel) if job.kernel else None


def _kept(metrics: dict[str, float]) -> dict[str, float]:
    """What a record keeps of hundreds of metrics: those that a table reads."""
    wanted = ("launch__", "smsp__average_warps_issue_stalled_")
    return {
        name: value
        for name, value in metrics.items()
        if name in counters.METRICS or name.startswith(wanted) or name.endswith(".pct_of_peak_sustained_elapsed")
    }


def child(job: Job, folder: Path) -> list[str]:
    """The command of the child process; it writes ``found.json``."""
    (folder / "job.json").write_text(job.model_dump_json(), encoding="utf-8")
    (folder / "found.json").unlink(missing_ok=True)
    return [sys.executable, "-m", "peakattn_lab.profiling.target", str(folder / "job.json"), str(folder / "found.json")]


def ncu_command(ncu: Path, report: Path, metrics: Sequence[str]) -> list[str]:
    """Nsight Compute on what stands between the marks: no clock control, a short fixed list of counters."""
    command = [str(ncu), "--profile-from-start", "off", "--clock-control", "none", "--force-overwrite", "-o", str(report)]
    for section in counters.SECTIONS:
        command += ["--section", section]
    return [*command, "--metrics", ",".join(metrics)]


def with_counters(job: Job, ncu: Path, folder: Path) -> Profile:
    """Run a job under Nsight Compute and read its report back; ProfileError when there is none or the output is wrong."""
    report = folder / re.sub(r"\W+", "_", job.name)
    metrics = list(counters.METRICS)
    target = child(job, folder)
    output, code = _run([*ncu_command(ncu, report, metrics), *target])
    unknown = {m for m in metrics if any(m in line for line in output.splitlines() if "==ERROR==" in line)}
    if code and unknown:
        output, code = _run([*ncu_command(ncu, report, [m for m in metrics if m not in unknown]), *target])
    found = _found(folder)
    if found is not None and not found.gate_passed:
        raise ProfileError(Outcome.WRONG, f"{job.name} computes a wrong output, so no figure is shown: {found.gate_message}")
    file = report.with_name(report.name + ".ncu-rep")
    if not file.is_file():
        raise diagnosis.diagnose(output)
    return Profile(job, tuple(read(file, ncu)), f"ncu {'.'.join(map(str, diagnosis.version(ncu)))}", found)


def read(report: Path, ncu: Path | None = None) -> list[Counters]:
    """The launches of a report file, by the ncu-report package or by ncu itself; of a ``.csv`` file, directly."""
    if not report.is_file():
        raise ValueError(f"there is no file {report}; give a report of Nsight Compute, or its raw page as CSV.")
    if report.suffix == ".csv":
        return counters.read_csv(report.read_text(encoding="utf-8", errors="replace"))
    by_package = counters.read_report(report)
    if by_package is not None:
        return by_package
    ncu = ncu or diagnosis.find("ncu")
    if ncu is None:
        raise ProfileError(
            Outcome.NO_TOOL, f"{report} is read by ncu, or by the package of: pip install ncu-report; neither is here."
        )
    command = [str(ncu), "--import", str(report), "--csv", "--page", "raw", "--print-units", "base"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=_TIMEOUT)
    if done.returncode:
        raise diagnosis.diagnose(done.stdout + done.stderr)
    return counters.read_csv(done.stdout)


def of_report(job: Job, report: Path, config: str | None = None, match: str = "") -> Profile:
    """A profile from a report that somebody brought; ``config`` is a JSON object of the knobs that differ from the default."""
    found = [k for k in read(report) if re.search(match, k.name)]
    if not found:
        raise ValueError(f"{report} has no kernel that is named like {match!r}.")
    device = Device.for_arch(found[0].arch)
    kernel = backends.load(job.kernel or "")
    knobs = inspection.configured(kernel.default_config(problems.from_dict(job.problem), device), config)
    job = job.model_copy(update={"config": dataclasses.asdict(knobs)})
    return Profile(job, tuple(found), f"the report {report.name}")


def last_record(path: Path, ours: Profile) -> ProfileRecord | None:
    """The last record of the same contender on the same problem; None where there is none."""
    rows = records.read_as(ProfileRecord, path)
    return next((r for r in reversed(rows) if r.contender == ours.job.name and r.problem == ours.job.problem), None)


def timeline_of(job: Job, folder: Path) -> tuple[Timeline, Found]:
    """The timeline of some calls, by Nsight Systems where it is, else by torch's profiler; RuntimeError when neither works."""
    nsys = diagnosis.find("nsys")
    job = job.model_copy(update={"mode": "timeline" if nsys else "trace"})
    if nsys is None:
        output, _ = _run(child(job, folder))
        found = _required(folder, output)
        return Timeline(found.calls, tuple(found.timeline), "torch's profiler"), found
    report = folder / (re.sub(r"\W+", "_", job.name) + ".nsys-rep")
    marks = ["--trace=cuda,nvtx", "--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--force-overwrite=true"]
    output, _ = _run([str(nsys), "profile", *marks, "-o", str(report), *child(job, folder)])
    found = _required(folder, output)
    stats = [str(nsys), "stats", "--report", "cuda_gpu_trace", "--format", "csv", str(report)]
    printed, _ = _run(stats)
    return timeline.of_nsys(printed, found.calls), found


def _required(folder: Path, output: str) -> Found:
    found = _found(folder)
    if found is None:
        raise RuntimeError(f"the child process failed: {diagnosis.said(output)}")
    if not found.gate_passed:
        raise ProfileError(Outcome.WRONG, f"the output is wrong, so no figure is shown: {found.gate_message}")
    return found


def _found(folder: Path) -> Found | None:
    file = folder / "found.json"
    return Found.model_validate_json(file.read_text(encoding="utf-8")) if file.is_file() else None


def _run(command: list[str]) -> tuple[str, int]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise ProfileError(Outcome.FAILED, f"{Path(command[0]).name} was still running after {_TIMEOUT:.0f} seconds.") from None
    return done.stdout + "\n" + done.stderr, done.returncode
