"""The user's store: what was measured on this machine, config by config, so that nothing is timed twice.

One JSON file for each GPU and shape class (``AttentionProblem.key()``), ``<folder>/<device slug>/<shape class>.json``::

    {"schema": 1, "device": "NVIDIA H200", "key": {...}, "measured": [
        {"kernel": "triton.fwd", "config": {...}, "us": 701.2, "speedup": [1.0, 1.0, 1.0], ...}, ...]}

The first row is the anchor: what would run without the store.  Every row says how many times faster than the anchor it
was when both were timed side by side, so that rows of different days can be ranked, and a config that is added later is
timed against the anchor alone.  A row counts as long as the sources of its kernel and its compiler are those that are
here.

The folder is ``PEAKATTN_STORE``, else ``$XDG_CACHE_HOME/peakattn/store`` or ``~/.cache/peakattn/store``; the value
``off`` leaves every file alone.  A file is replaced in one step, so that another process reads the old one or the new
one; of two that measure one shape class at the same moment, the later one's rows stay.  Where files cannot be written,
rows live as long as the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from peakattn import race
from peakattn.backends import KERNELS, load, toolchain
from peakattn.device import Device
from peakattn.problem import AttentionProblem

SCHEMA = 1

_unsaved: dict[str, Tuning] = {}  # by file name below the folder: what could not be written


@dataclass(frozen=True)
class Measured:
    """One config of one kernel: its time, or the reason why it has none."""

    kernel: str
    config: dict[str, Any]
    kernel_hash: str | None
    compiler: str
    problem: str
    time: str  # UTC, ISO 8601
    mode: str = ""  # how it was timed
    us: float | None = None
    tflops: float | None = None
    speedup: tuple[float, float, float] | None = None  # over the anchor: median, and the interval that holds it
    rounds: int = 0
    compile_seconds: float = 0.0
    timing_seconds: float = 0.0
    record: str = ""  # the file of records with the samples, where there is one
    reason: str = ""

    @property
    def name(self) -> tuple[str, str]:
        """What makes it another config."""
        return name_of(self.kernel, self.config)

    def stale(self) -> str | None:
        """Why it no longer speaks of what is here, as a sentence, or None."""
        from peakattn.backends.sources import kernel_hash

        if self.kernel not in KERNELS:
            return f"{self.kernel} is not a kernel of this version"
        if kernel_hash(self.kernel) != self.kernel_hash:
            return f"the sources of {self.kernel} have changed since it was measured"
        try:
            compiler = toolchain(self.kernel.split(".")[0]).version()
        except ImportError as error:
            return f"{error.name or error} is not installed"
        if compiler != self.compiler:
            return f"it was measured with {self.compiler}, and this is {compiler}"
        try:
            load(self.kernel).Config(**self.config)
        except (TypeError, ValueError) as error:
            return f"its config {self.config} is illegal: {error}"
        return None


@dataclass(frozen=True)
class Tuning:
    """Everything measured for one shape class on one device; the first row is the anchor."""

    device: str
    key: dict[str, Any]
    measured: tuple[Measured, ...]

    def winner(self, kernels: Collection[str]) -> tuple[Measured | None, dict[str, str]]:
        """The row to use among ``kernels``, and for each kernel whose rows were passed over the reason."""
        ignored: dict[str, str] = {}
        anchor = self.measured[0]
        reason = anchor.stale()
        if reason is not None:
            return None, {f"stored {anchor.kernel}": f"{reason}; tune it again"}
        rows = [row for row in self.measured if row.speedup is not None and row.kernel in kernels]
        while rows:
            best = rows[race.winner([row.speedup for row in rows if row.speedup is not None])]
            reason = best.stale()
            if reason is None:
                return best, ignored
            ignored[f"stored {best.kernel}"] = f"{reason}; tune it again"
            rows.remove(best)
        return None, ignored


def name_of(kernel: str, config: dict[str, Any]) -> tuple[str, str]:
    """Equal for equal configs of one kernel."""
    return kernel, json.dumps(config, sort_keys=True)


def folder() -> Path | None:
    """Where the store is, or None when it is off."""
    given = os.environ.get("PEAKATTN_STORE", "")
    if given.lower() == "off":
        return None
    if given:
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache else Path.home() / ".cache") / "peakattn" / "store"


def lookup(device: Device, problem: AttentionProblem, kernels: Collection[str]) -> tuple[Measured | None, dict[str, str]]:
    """The stored winner of the problem's shape class among ``kernels``, and what was ignored, with the reason."""
    try:
        found = read(device, problem.key())
    except ValueError as error:
        return None, {"the store": str(error)}
    return (None, {}) if found is None else found.winner(kernels)


def read(device: Device, key: dict[str, Any]) -> Tuning | None:
    """What is stored for a shape class; ValueError, in a sentence, for a file that is none of the store's."""
    name = _name(device.slug, key)
    if name in _unsaved:
        return _unsaved[name]
    where = folder()
    if where is None:
        return None
    try:
        text = (where / name).read_text(encoding="utf-8")
    except OSError:
        return None
    return parse(text, str(where / name))


def read_all() -> Iterator[tuple[Path, Tuning | ValueError]]:
    """Every file of the store in order, with what it holds or what is wrong with it."""
    where = folder()
    for path in sorted(where.glob("*/*.json")) if where else ():
        try:
            yield path, parse(path.read_text(encoding="utf-8"), str(path))
        except ValueError as error:
            yield path, error


def parse(text: str, name: str) -> Tuning:
    """A file's text as a Tuning, or ValueError in a sentence."""
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise ValueError(
                f"{name} has schema {data['schema']}; this version reads schema {SCHEMA}. Remove it and tune again."
            )
        rows = [Measured(**row) for row in data["measured"]]
        rows = [row if row.speedup is None else replace(row, speedup=_three(row.speedup)) for row in rows]
        if not rows:
            raise ValueError(f"{name} holds no measurement. Remove it and tune again.")
        return Tuning(data["device"], dict(data["key"]), tuple(rows))
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{name} is not a file of the store: {error!r}. Remove it and tune again.") from error


def dumps(tuning: Tuning) -> str:
    """The text of a file of the store."""
    rows = ",\n  ".join(json.dumps(asdict(row)) for row in tuning.measured)
    head = f'"schema": {SCHEMA}, "device": {json.dumps(tuning.device)}, "key": {json.dumps(tuning.key)}'
    return f'{{{head}, "measured": [\n  {rows}\n]}}\n'


def add(device: Device, key: dict[str, Any], rows: Sequence[Measured]) -> Tuning:
    """Put rows into the store; the first is the anchor that the others were held against.

    Rows of the same anchor stay, those of another one go, and a config that was there is replaced.
    """
    with contextlib.suppress(ValueError):
        found = read(device, key)
        if found is not None and found.measured[0].name == rows[0].name and found.measured[0].stale() is None:
            new = {row.name: row for row in rows}
            kept = [new.pop(row.name, row) for row in found.measured]
            rows = [*kept, *new.values()]
    tuning = Tuning(device.name, key, tuple(rows))
    save(device.slug, tuning)
    return tuning


def save(slug: str, tuning: Tuning) -> Path | None:
    """Write one file in one step; None when it could not be written, and is remembered in this process instead."""
    where, name = folder(), _name(slug, tuning.key)
    _unsaved.pop(name, None)
    if where is not None:
        with contextlib.suppress(OSError):
            path = where / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".part", delete=False) as file:
                file.write(dumps(tuning))
            os.replace(file.name, path)
            return path
    _unsaved[name] = tuning
    return None


def _name(slug: str, key: dict[str, Any]) -> str:
    """A file name that a person can find a shape class by, and that no other shape class has."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:8]
    words = "-".join(str(key.get(name, "")) for name in ("direction", "dtype", "head_dim", "mask", "seqlen_q", "seqlen_k"))
    return f"{slug}/{words}-{digest}.json"


def _three(values: Any) -> tuple[float, float, float]:
    if isinstance(values, list) and len(values) == 3 and all(isinstance(value, (int, float)) for value in values):
        median, low, high = values
        if 0 < low <= median <= high < math.inf:
            return median, low, high
    raise TypeError(f"speedup {values} is no median with its interval")
