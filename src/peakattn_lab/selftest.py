"""The GPU test suite, with a record of what passed on which kernel sources."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pydantic

from peakattn.backends import KERNELS
from peakattn_lab import provenance, records, selftest_hooks


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
    complete: bool = True  # False for a run that was cut short

    @property
    def counts(self) -> str:
        """How many passed, failed and were skipped, in words."""
        cut = "" if self.complete else ", cut short"
        return f"{self.passed} passed, {len(self.failed)} failed, {len(self.skipped)} skipped{cut}"

    @property
    def ok(self) -> bool:
        """True when the run came to its end, something ran, and nothing failed."""
        return self.complete and self.passed > 0 and not self.failed


def run(
    root: Path, device: str, arch: int, marker: str, extra: Sequence[str] = (), commit: str | None = None
) -> SelftestRecord:
    """Run pytest in the checkout with its output shown; a run that is interrupted or terminated counts as far as it came."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "outcomes.jsonl"
        command = [sys.executable, "-m", "pytest", "-p", selftest_hooks.__name__, "-m", marker, *extra]
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            code = subprocess.run(command, cwd=root, env={**os.environ, selftest_hooks.LOG: str(log)}, check=False).returncode
        except KeyboardInterrupt:
            code = None
        finally:
            signal.signal(signal.SIGTERM, before)
        if not log.is_file():
            raise RuntimeError(f"pytest ran no test; it was run as: {' '.join(command)}.")
        passed, failed, skipped, seconds = parse(log.read_text(encoding="utf-8"))
    return SelftestRecord(
        provenance=provenance.here(device, arch, commit),
        marker=marker,
        kernels={kernel_id: records.kernel_hash(kernel_id) for kernel_id in KERNELS},
        passed=passed,
        failed=failed,
        skipped=skipped,
        seconds=seconds,
        complete=code in (0, 1),
    )


def parse(log: str) -> tuple[int, list[str], dict[str, str], float]:
    """(passed, failed, skipped with reasons, seconds) of the lines of ``selftest_hooks``; a line cut short is left out."""
    outcomes: dict[str, dict[str, Any]] = {}
    seconds = 0.0
    for line in log.splitlines():
        try:
            case = json.loads(line)
        except ValueError:
            continue
        seconds += case["seconds"]
        known = outcomes.get(case["test"])
        if known is None or known["outcome"] != "failed":  # a failure stands, whatever its teardown says
            outcomes[case["test"]] = case
    by_outcome = {
        wanted: [test for test, case in outcomes.items() if case["outcome"] == wanted]
        for wanted in ("passed", "failed", "skipped")
    }
    reasons = {test: outcomes[test]["reason"] for test in by_outcome["skipped"]}
    return len(by_outcome["passed"]), by_outcome["failed"], reasons, round(seconds, 1)
