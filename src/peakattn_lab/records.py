"""Records: one schema'd JSON line per measurement, appended as it comes, with everything needed to trust or repeat it."""

from __future__ import annotations

import ast
import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pydantic

from peakattn.backends import KERNELS
from peakattn_lab import problems, timing

SCHEMA = 1
RUN_ID = uuid.uuid4().hex[:12]


class Provenance(pydantic.BaseModel):
    """Where and with what a row was measured. ``dirty`` says that sources differed from the commit."""

    time: str  # UTC, ISO 8601
    run: str  # rows of one run were interleaved with each other
    commit: str | None
    dirty: bool | None
    device: str
    arch: int
    driver: str | None
    platform: str
    python: str
    versions: dict[str, str]  # packages, and the CUDA and cuDNN that torch was built with


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
        return sorted(self.samples_us)[len(self.samples_us) // 2]

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
            file.seek(0)
            data = file.read()
            whole = data.rfind(b"\n") + 1
            if whole < size:
                file.truncate(whole)
        file.write(record.model_dump_json(exclude_defaults=False).encode() + b"\n")
        file.flush()


def read(path: Path) -> list[Record]:
    """All rows of a file; a truncated last line is left out. Damage elsewhere is a ValueError that names the line."""
    if not path.exists():
        return []
    text = path.read_bytes().decode("utf-8", errors="replace")
    lines = text.split("\n")
    if lines[-1]:
        lines[-1] = ""
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = Record.model_validate_json(line)
        except pydantic.ValidationError as error:
            what = error.errors()[0]
            where = ".".join(map(str, what["loc"]))
            raise ValueError(
                f"{path}, line {number} is not a record: {where} {what['msg']}; remove or repair that line."
            ) from None
        if row.schema_version != SCHEMA:
            raise ValueError(f"{path}, line {number} has schema {row.schema_version}; this version reads schema {SCHEMA}.")
        rows.append(row)
    return rows


def done(rows: Iterable[Record], device: str) -> set[tuple[str, str, str]]:
    """Keys that need not be measured again on this device: there is a speed, or a reason; and the kernel has not changed."""
    return {
        row.key
        for row in rows
        if row.provenance.device == device and (row.kernel is None or row.kernel_hash == kernel_hash(row.kernel))
    }


# Provenance.


def provenance(device: str, arch: int, commit: str | None = None) -> Provenance:
    """Where this process measures, now. ``commit`` is that of a tree which was copied without its repository."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    where = Provenance(time=now, device=device, arch=arch, **_constant_provenance())
    return where if where.commit else where.model_copy(update={"commit": commit})


@functools.cache
def _constant_provenance() -> dict[str, Any]:
    from peakattn_lab import observe

    commit, dirty = git_state()
    return {
        "run": RUN_ID,
        "commit": commit,
        "dirty": dirty,
        "driver": observe.driver_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Versions of what decides speed: packages that are installed, CUDA and cuDNN."""
    import torch

    found = {}
    for package in ("peakattn", "torch", "triton", "cuda-tile", "nvidia-cutlass-dsl", "fa3-fwd", "flash-attn-4"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def checkout() -> Path | None:
    """The root of the checkout that this package runs from, or None when it was installed from a wheel."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").is_file() and (root / "tests").is_dir() else None


def git_state() -> tuple[str | None, bool | None]:
    """(commit, dirty) of the checkout; (None, None) outside one or without git."""
    root = checkout()
    if root is None:
        return None, None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--", "src", "pyproject.toml")
    except (OSError, subprocess.SubprocessError):
        return None, None
    return commit, bool(changed)


def _git(root: Path, *arguments: str) -> str:
    result = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=20)
    return result.stdout.strip()


# Kernel sources.


@functools.cache
def kernel_hash(kernel_id: str) -> str | None:
    """A hash of a kernel's module and of what it imports from its own backend; None for a kernel that is gone.

    Blank lines and comment lines do not count.
    """
    if kernel_id not in KERNELS:
        return None
    digest = hashlib.sha256()
    for path in sorted(kernel_sources(kernel_id)):
        digest.update(path.name.encode())
        lines = path.read_text(encoding="utf-8").splitlines()
        digest.update("\n".join(s.rstrip() for s in lines if s.strip() and not s.lstrip().startswith("#")).encode())
    return digest.hexdigest()[:16]


def kernel_sources(kernel_id: str) -> set[Path]:
    """The kernel's file, every file of its backend that it imports, and CUDA sources of the same name."""
    backends = Path(__file__).resolve().parent.parent / "peakattn" / "backends"
    package = KERNELS[kernel_id].rpartition(".")[0]
    folder = backends / package.rpartition(".")[2]
    found: set[Path] = set()
    queue = [KERNELS[kernel_id].rpartition(".")[2]]
    while queue:
        path = folder / f"{queue.pop()}.py"
        if path in found or not path.is_file():
            continue
        found.add(path)
        found.update(folder.glob(f"{path.stem}.cu*"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == package:
                queue.extend(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(package + "."):
                queue.append(node.module.removeprefix(package + "."))
            elif isinstance(node, ast.Import):
                queue.extend(a.name.removeprefix(package + ".") for a in node.names if a.name.startswith(package + "."))
    return found


def stale(rows: Sequence[Record]) -> list[str]:
    """Kernel ids whose sources have changed since these rows were measured."""
    return sorted({row.kernel for row in rows if row.kernel and row.kernel_hash != kernel_hash(row.kernel)})
