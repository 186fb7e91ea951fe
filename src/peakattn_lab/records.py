"""Records: one schema'd JSON line per measurement, appended as it comes, with everything needed to trust or repeat it."""

from __future__ import annotations

import gzip
import json
import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar, cast

import pydantic

from peakattn.backends.sources import kernel_hash
from peakattn_lab import problems, timing
from peakattn_lab.provenance import Provenance

SCHEMA = 1
PACKED = ".gz"  # a records file that was packed, because it has thousands of rows; it is read and not appended to

Row = TypeVar("Row", bound=pydantic.BaseModel)


class Gate(pydantic.BaseModel):
    passed: bool
    message: str


class Record(pydantic.BaseModel):
    """One contender on one problem in one timing mode. Times are microseconds per call; ``samples_us`` are raw, in order."""

    model_config = pydantic.ConfigDict(extra="forbid")

    schema_version: int = SCHEMA
    provenance: Provenance
    problem: dict[str, Any]
    contender: str
    mode: str  # a timing.Mode
    version: str | None = None  # of the contender's package
    kernel: str | None = None
    kernel_hash: str | None = None
    config: dict[str, Any] | None = None
    config_source: str | None = None
    ran: list[str] = []  # device functions in the CUDA graph, or operators that PyTorch dispatched
    input_sets: int = 1
    calls_per_sample: int = 1
    samples_us: list[float] = []
    gate: Gate | None = None
    skipped: str | None = None  # why there are no samples
    observed: dict[str, Any] = {}

    @property
    def speed_known(self) -> bool:
        """True when there are samples and the gate is green."""
        return bool(self.samples_us) and self.gate is not None and self.gate.passed

    @property
    def reason(self) -> str | None:
        """Why no speed may be shown, as a sentence."""
        if self.speed_known:
            return None
        if self.gate is not None and not self.gate.passed:
            return f"wrong: {self.gate.message}"
        return self.skipped or "not checked"

    @property
    def median_us(self) -> float:
        """Median time of a call in microseconds."""
        return statistics.median_high(self.samples_us)

    @property
    def interval_us(self) -> tuple[float, float]:
        """An interval that holds the median with 95 % confidence, microseconds."""
        return timing.interval(self.samples_us)

    @property
    def tflops(self) -> float:
        """Useful TFLOP/s at the median time."""
        return problems.from_dict(self.problem).flops / self.median_us / 1e6

    @property
    def key(self) -> tuple[str, str, str]:
        """(problem, contender, mode): what ``--resume`` looks for."""
        return problem_key(self.problem), self.contender, self.mode


class FunctionFacts(pydantic.BaseModel):
    """One device function as the compiler made it; ``blocks`` is how many an SM holds, ``limiter`` what allows no more."""

    name: str
    registers: int
    frame_bytes: int
    shared_bytes: int
    num_threads: int
    spills: int  # loads and stores of local memory
    loop_spills: int  # the same in the hot loop that has most of them
    tensor_core: int  # instructions
    instruction: str | None = None  # of the tensor cores: HMMA, HGMMA, ...
    mufu: int
    blocks: int
    limiter: str
    # The plainest hot loop, the one that most tiles go through: its instructions by kind, and executed over needed products.
    loop: dict[str, int] = {}
    waste: float | None = None


class SweepRecord(pydantic.BaseModel):
    """One config of one kernel on one problem: what became of it in a sweep, with the compiler's facts and perhaps a time.

    ``stage`` is ``static`` for what was found without a GPU, ``screen`` for a time that was taken on its own and
    may have been cut short, ``final`` for one that was taken interleaved with the other finalists of its problem.
    """

    model_config = pydantic.ConfigDict(extra="forbid")

    schema_version: int = SCHEMA
    provenance: Provenance
    problem: dict[str, Any]
    kernel: str
    kernel_hash: str | None
    compiler: str
    config: dict[str, Any]
    stage: Literal["static", "screen", "final"]
    status: Literal["compiled", "ok", "pruned", "uncompiled", "wrong", "failed", "crashed", "hung"]
    reason: str | None = None  # a sentence, unless the status is compiled or ok
    functions: list[FunctionFacts] = []
    compile_seconds: float | None = None
    shared_estimate: int | None = None
    register_estimate: int | None = None
    predicted_us: float | None = None
    samples_us: list[float] = []
    calls_per_sample: int = 1
    gate: str | None = None  # what was checked
    observed: dict[str, Any] = {}

    @property
    def speed_known(self) -> bool:
        """True when it was timed and its outputs were right."""
        return self.status == "ok" and bool(self.samples_us)

    @property
    def spills(self) -> int:
        return sum(f.spills for f in self.functions)

    @property
    def median_us(self) -> float:
        """Median time of a call in microseconds."""
        return statistics.median_high(self.samples_us)

    @property
    def interval_us(self) -> tuple[float, float]:
        """An interval that holds the median with 95 % confidence, microseconds; the range of fewer than six samples."""
        return timing.interval(self.samples_us)

    @property
    def key(self) -> tuple[str, str, str, str | None, str, str]:
        """(problem, kernel, config, kernel hash, compiler, device): what ``--resume`` looks for."""
        return (
            problem_key(self.problem),
            self.kernel,
            problem_key(self.config),
            self.kernel_hash,
            self.compiler,
            self.provenance.device,
        )


class HostRecord(pydantic.BaseModel):
    """The host's cost of one contender in one kind of use: microseconds per call of each loop, sorted."""

    model_config = pydantic.ConfigDict(extra="forbid")

    schema_version: int = SCHEMA
    provenance: Provenance
    kind: str
    contender: str
    loops_us: list[float]


def problem_key(problem: dict[str, Any]) -> str:
    """One line that is equal for equal problems."""
    return json.dumps(problem, sort_keys=True)


# Files.


def append(path: Path, record: pydantic.BaseModel) -> None:
    """Add one row. A damaged last line, left by a process that was killed, is cut off first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
        if size and file.read(1) != b"\n":
            file.seek(0)
            data = file.read()
            whole = data.rfind(b"\n") + 1
            if whole < size:
                file.truncate(whole)
        file.write(record.model_dump_json(exclude_defaults=False).encode() + b"\n")
        file.flush()


def read(path: Path) -> list[Record]:
    """The measurements of a file that ``peakattn bench`` wrote; see ``read_as``."""
    return read_as(Record, path)


def read_as(model: type[Row], path: Path) -> list[Row]:
    """All rows of a file, which gzip may have packed; a truncated last line is left out.

    Damage elsewhere is a ValueError that names the line.
    """
    if not path.exists():
        return []
    with _opened(path) as file:
        lines = file.read().split("\n")
    if lines[-1]:
        lines[-1] = ""
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = model.model_validate_json(line)
        except pydantic.ValidationError as error:
            raise ValueError(f"{path}, line {number} {_why_not(model, line, error)}") from None
        version = getattr(row, "schema_version", SCHEMA)
        if version != SCHEMA:
            raise ValueError(f"{path}, line {number} has schema {version}; this version reads schema {SCHEMA}.")
        rows.append(row)
    return rows


def _opened(path: Path) -> TextIO:
    """A records file to read, packed or not. Only a newline ends a line; bytes that are no UTF-8 are replaced."""
    opened = gzip.open if path.suffix == PACKED else open
    return cast(TextIO, opened(path, "rt", encoding="utf-8", errors="replace", newline="\n"))


def kind_of(row: Any) -> str | None:
    """What a parsed line is, by a field that only such rows have; None for anything else."""
    return next((kind for field, kind in _KINDS.items() if field in row), None) if isinstance(row, dict) else None


def kind_of_file(path: Path) -> str | None:
    """What the first row of a file is; None where there is none, or nothing known."""
    if not path.is_file():
        return None
    with _opened(path) as file:
        line = next((line for line in file if line.strip()), "")
    try:
        return kind_of(json.loads(line))
    except ValueError:
        return None


# The first field that a row has decides. A kind is a key of _WRITERS.
_KINDS = {
    "stage": "sweep",
    "anchor": "tune",
    "rung": "ladder",
    "profiled": "profile",
    "loops_us": "host",
    "marker": "selftest",
    "ceilings": "ceilings",
    "samples_us": "bench",
}
_WRITERS = {
    "bench": "measurements, written by peakattn bench",
    "sweep": "rows of a sweep, written by peakattn sweep",
    "ladder": "rungs of a ladder, written by peakattn ladder",
    "profile": "counters of a launch, written by peakattn profile",
    "tune": "rows of a tuning, written by peakattn tune",
    "host": "a host cost, written by peakattn bench --host",
    "selftest": "a test run, written by peakattn selftest",
    "ceilings": "measured ceilings, written by peakattn roofline --measure",
}


def _why_not(model: type[pydantic.BaseModel], line: str, error: pydantic.ValidationError) -> str:
    """The end of the sentence on a line that is no row of ``model``: another kind of row, or what is damaged."""
    try:
        kind = kind_of(json.loads(line))
    except ValueError:
        kind = None
    wanted = next((k for field, k in _KINDS.items() if field in model.model_fields), None)
    if kind is not None and wanted is not None and kind != wanted:
        return f"is {_WRITERS[kind]}; what is needed here are {_WRITERS[wanted]}."
    what = error.errors()[0]
    return f"is not a record: {'.'.join(map(str, what['loc']))} {what['msg']}; remove or repair that line."


def done(rows: Iterable[Record], device: str) -> set[tuple[str, str, str]]:
    """Keys that need not be measured again on this device: there is a speed, or a reason; and the kernel has not changed."""
    return {
        row.key
        for row in rows
        if row.provenance.device == device and (row.kernel is None or row.kernel_hash == kernel_hash(row.kernel))
    }


def stale(rows: Sequence[Record]) -> list[str]:
    """Kernel ids whose sources have changed since these rows were measured."""
    return sorted({row.kernel for row in rows if row.kernel and row.kernel_hash != kernel_hash(row.kernel)})
