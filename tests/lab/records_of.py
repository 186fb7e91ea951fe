"""Made-up records, for tests of what is done with records."""

from __future__ import annotations

from typing import Any

from peakattn.problem import AttentionProblem
from peakattn_lab import problems, provenance, records

PROBLEM = problems.make(4096, 128, batch=4, heads=16)


def record(
    contender: str, us: float, problem: AttentionProblem = PROBLEM, *, rounds: int = 20, **values: Any
) -> records.Record:
    """A green row whose samples lie within 0.1 % of ``us`` microseconds."""
    defaults: dict[str, Any] = {
        "mode": "kernel",
        "samples_us": [us * (1 + 0.001 * (i % 3 - 1)) for i in range(rounds)],
        "gate": records.Gate(passed=True, message="fine"),
    }
    where = provenance.here("NVIDIA H200", 90)
    return records.Record(provenance=where, problem=problems.to_dict(problem), contender=contender, **(defaults | values))
