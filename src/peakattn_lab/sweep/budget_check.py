"""Budget equations held to the compiler: shared memory byte by byte, and how good the register estimate is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from peakattn import backends
from peakattn_lab import problems
from peakattn_lab.records import SweepRecord
from peakattn_lab.sweep.budget import FORMULAS, MOST_REGISTERS, Shared
from peakattn_lab.sweep.predict import consumers_of


@dataclass(frozen=True)
class Check:
    """One device function of one compiled row: formula against compiler, bytes."""

    row: SweepRecord
    function: str
    predicted: int
    compiled: int

    @property
    def excess(self) -> int:
        """What the compiler takes beyond the formula."""
        return self.compiled - self.predicted


def checks(rows: Iterable[SweepRecord]) -> list[Check]:
    """Every device function for which there is both a formula and a compilation, each config and code once."""
    found: dict[Any, Check] = {}
    for row in rows:
        if not row.functions:
            continue
        for name, predicted in shared_of(row).items():
            for one in row.functions:
                if one.name == name or (name == "" and len(row.functions) == 1):
                    key = (row.key[2], name, one.shared_bytes, predicted)
                    found.setdefault(key, Check(row, one.name, predicted, one.shared_bytes))
    return list(found.values())


def shared_of(row: SweepRecord) -> Shared:
    """The formula's bytes for each device function of a row; under an empty name for a kernel that speaks for itself."""
    problem = problems.from_dict(row.problem)
    config = backends.load(row.kernel).Config(**row.config)
    if row.kernel in FORMULAS:
        return FORMULAS[row.kernel].shared(problem, config, row.provenance.facts)
    kernel = backends.load(row.kernel)
    return {"": kernel.shared_bytes(problem, config)} if hasattr(kernel, "shared_bytes") else {}


def table(found: Sequence[Check]) -> tuple[list[str], list[list[str]]]:
    """(header, rows): for each device function and each difference, how many configs and an example."""
    groups: dict[tuple[str, int], list[Check]] = {}
    for one in found:
        groups.setdefault((one.function, one.excess), []).append(one)
    header = ["function", "compiler - formula", "configs", "formula", "compiler", "such as"]
    body = []
    for (function, excess), members in sorted(groups.items(), key=lambda item: (item[0][0], item[0][1] != 0, -len(item[1]))):
        first = members[0]
        example = f"{problems.label(problems.from_dict(first.row.problem))}: {first.row.config}"
        body.append(
            [
                function,
                f"{excess:+d}" if excess else "equal",
                str(len(members)),
                str(first.predicted),
                str(first.compiled),
                example,
            ]
        )
    return header, body


def findings(found: Sequence[Check], rows: Iterable[SweepRecord]) -> list[str]:
    """What the comparison says, in sentences: how many are equal, how far the others are off, how good the registers are."""
    if not found:
        return ["there is no formula, or nothing compiled, to compare."]
    off = [one for one in found if one.excess]
    said = [f"{len(found) - len(off)} of {len(found)} compilations have the formula's shared memory to the byte."]
    if off:
        low, high = min(o.excess for o in off), max(o.excess for o in off)
        said.append(f"{len(off)} differ, by {low:+d} to {high:+d} bytes; each is a finding to explain.")
    # What a warp-specialised kernel is launched with is not what its consumers have.
    whole = [r for r in rows if r.functions and consumers_of(r.kernel, r.config) is None]
    known = [(r.register_estimate, max(f.registers for f in r.functions), r.spills) for r in whole]
    known = [(e, c, s) for e, c, s in known if e is not None]
    if known:
        errors = sorted(abs(min(e or 0, MOST_REGISTERS) - c) for e, c, _ in known)
        said.append(
            f"the register estimate is within {errors[len(errors) // 2]} registers of the compiler for half of the rows, "
            f"and within {errors[9 * len(errors) // 10]} for nine tenths."
        )
        over = [(e or 0) > MOST_REGISTERS for e, _, _ in known]
        spilling = [s > 0 for _, _, s in known]
        agree = sum(o == s for o, s in zip(over, spilling, strict=True))
        said.append(
            f"it foretells spills (more than {MOST_REGISTERS}) rightly for {agree} of {len(known)} rows; {sum(spilling)} spill."
        )
    return said
