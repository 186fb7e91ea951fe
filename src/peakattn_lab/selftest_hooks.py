"""A pytest plugin that writes down the outcome of each test as it comes, so that a run cut short loses nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

LOG = "PEAKATTN_SELFTEST_LOG"  # set by ``selftest`` for the pytest that it starts


class Outcomes:
    """Appends one JSON line a test to the log: test, outcome, reason, seconds."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        decided = report.when == "call" or report.outcome != "passed"  # setup and teardown only tell when they do not pass
        if decided:
            reason = report.longrepr[2] if report.outcome == "skipped" and isinstance(report.longrepr, tuple) else ""
            line = {
                "test": report.nodeid,
                "outcome": report.outcome,
                "reason": getattr(report, "wasxfail", "") or reason,
                "seconds": report.duration,
            }
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def pytest_configure(config: Any) -> None:
    """Registers the writer in the process that collects the outcomes, which under pytest-xdist is not a worker."""
    path = os.environ.get(LOG)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(Path(path)))
