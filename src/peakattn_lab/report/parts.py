"""What the sections of a report are made from, and of: records by kind; tables, pictures and sentences."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from peakattn_lab.ladder.rows import RungRecord
from peakattn_lab.profiling.profilers import ProfileRecord
from peakattn_lab.records import HostRecord, Record, SweepRecord
from peakattn_lab.roofline.ceilings import CeilingRecord
from peakattn_lab.selftest import SelftestRecord
from peakattn_lab.tune.tuner import TuneRecord

MODELS: dict[str, type[pydantic.BaseModel]] = {
    "bench": Record,
    "sweep": SweepRecord,
    "tune": TuneRecord,
    "ladder": RungRecord,
    "profile": ProfileRecord,
    "host": HostRecord,
    "selftest": SelftestRecord,
    "ceilings": CeilingRecord,
}
Row = TypeVar("Row", bound=pydantic.BaseModel)


@dataclass(frozen=True)
class Table:
    """Cells of text; the first ``left`` columns are words. A folded table opens on a click."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1
    folded: bool = False


@dataclass(frozen=True)
class Picture:
    """A PNG; ``name`` is its file's stem beside a Markdown report."""

    name: str
    alt: str
    png: bytes

    @property
    def uri(self) -> str:
        """The picture itself as an address."""
        return "data:image/png;base64," + base64.b64encode(self.png).decode()


Part = Table | Picture | str


@dataclass
class Found:
    """Rows of record files by kind, oldest first, and lines that are of no known kind, as sentences."""

    rows: dict[str, list[Any]] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def of(self, model: type[Row]) -> list[Row]:
        """The rows of one model."""
        return self.rows.get(next(kind for kind, known in MODELS.items() if known is model), [])

    @property
    def devices(self) -> list[str]:
        """Names of the devices that rows are of."""
        return sorted({row.provenance.device for rows in self.rows.values() for row in rows})


def by_device(rows: Iterable[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Rows of each device, by its name."""
    groups: dict[str, list[Any]] = {}
    for row in rows:
        groups.setdefault(row.provenance.device, []).append(row)
    yield from sorted(groups.items())


def drawn(name: str, alt: str, draw: Callable[[Path], None]) -> Picture:
    """What ``draw`` writes into the path that it is given."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        draw(path)
        return Picture("".join(c if c.isalnum() else "-" for c in name.lower()), alt, path.read_bytes())
