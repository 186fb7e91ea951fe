"""The GPU test suite, with a record of what passed on which kernel sources."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import pydantic

from peakattn.backends import KERNELS
from peakattn_lab import provenance, records


class SelftestRecord(pydantic.BaseModel):
    """One run of the suite. ``kernels`` maps kernel id to the hash of its sources; tests are listed when they did not pass."""

    schema_version: int = records.SCHEMA
    provenance: provenance.Provenance
    marker: str
    kernels: dict[str, str | None]
    passed: int
    failed: list[str]
    skipped: dict[str, str]  # test -> reason
    seconds: float

    @property
    def ok(self) -> bool:
        """True when something ran and nothing failed."""
        return self.passed > 0 and not self.failed


def run(
    root: Path, device: str, arch: int, marker: str, extra: Sequence[str] = (), commit: str | None = None
) -> SelftestRecord:
    """Run pytest in the checkout with its output shown, and read what happened from its report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", marker, f"--junitxml={report}", *extra]
        subprocess.run(command, cwd=root, check=False)
        if not report.is_file():
            raise RuntimeError(f"pytest left no report; it was run as: {' '.join(command)}.")
        text = report.read_text(encoding="utf-8")
    passed, failed, skipped, seconds = parse(text)
    return SelftestRecord(
        provenance=provenance.here(device, arch, commit),
        marker=marker,
        kernels={kernel_id: records.kernel_hash(kernel_id) for kernel_id in KERNELS},
        passed=passed,
        failed=failed,
        skipped=skipped,
        seconds=seconds,
    )


def parse(report: str) -> tuple[int, list[str], dict[str, str], float]:
    """(passed, failed, skipped with reasons, seconds) of a JUnit report."""
    passed, failed, skipped, seconds = 0, [], {}, 0.0
    for case in ElementTree.fromstring(report).iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}".removeprefix("::")
        seconds += float(case.get("time") or 0)
        reason = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif reason is not None:
            skipped[name] = reason.get("message", "")
        else:
            passed += 1
    return passed, failed, skipped, round(seconds, 1)
