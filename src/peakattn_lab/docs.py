"""Tables and pictures of the documents, regenerated from records between markers.

``<!-- peakattn:table h200/prefill -->`` up to ``<!-- peakattn:end -->`` holds the table of
``benchmarks/results/h200/prefill.jsonl``; ``peakattn:plot`` holds a picture of it, written to ``docs/images``.
A mode may follow the name (``h200/prefill eager``); without one it is ``kernel``, or ``wall`` for CPU records.
``peakattn:host h200/host`` holds the table of the host's costs, ``peakattn:selftest h200/selftest`` a line on the last
run of the GPU tests.  ``peakattn:ladder h200/ladder_triton`` holds the tables of a ladder, ``peakattn:ladderplot`` its
picture, and ``peakattn:rungs triton`` what the rungs say about themselves, which needs no records.

A marker whose records do not exist yet says so in the document.

    peakattn docs             rewrite them
    peakattn docs --check     exit 1 and say what differs
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from peakattn_lab import compare, hostcost, plots, records, selftest
from peakattn_lab.ladder import document as ladders
from peakattn_lab.ladder import figure, rows

_KINDS = "table|plot|host|selftest|ladder|ladderplot|rungs"
_MARKED = re.compile(
    rf"(?P<open><!-- peakattn:(?P<what>{_KINDS}) (?P<name>[\w./-]+)(?: (?P<mode>\w+))? -->\n)"
    r"(?P<body>.*?)(?P<close><!-- peakattn:end -->)",
    re.DOTALL,
)
_OPEN = re.compile(rf"^<!-- peakattn:(?:{_KINDS}) ", re.MULTILINE)


def documents(root: Path) -> list[Path]:
    """Every Markdown file that may hold markers."""
    return [p for p in [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))] if p.is_file()]


def update(root: Path, *, check: bool = False) -> list[str]:
    """Regenerate what stands between markers; what differed, as sentences. With ``check`` nothing is written."""
    changes = []
    for document in documents(root):
        text = document.read_text(encoding="utf-8")
        if len(_OPEN.findall(text)) != len(_MARKED.findall(text)):
            raise ValueError(f"{document} has a peakattn marker without its <!-- peakattn:end -->.")
        pictures: list[str] = []
        new = _MARKED.sub(lambda m: f"{m['open']}{_body(root, document, m, check, pictures)}{m['close']}", text)  # noqa: B023
        changes += pictures
        if new != text:
            changes.append(f"{document.relative_to(root)} differs from the records")
            if not check:
                document.write_text(new, encoding="utf-8")
    return changes


def _body(root: Path, document: Path, match: re.Match[str], check: bool, pictures: list[str]) -> str:
    what = match["what"]
    if what == "rungs":
        return ladders.rungs(match["name"])
    path = root / "benchmarks" / "results" / f"{match['name']}.jsonl"
    if not path.is_file():
        return f"Not measured yet: there is no {path.relative_to(root).as_posix()}.\n"
    if what == "host":
        return _host(path)
    if what == "selftest":
        return _selftest(path)
    if what.startswith("ladder"):
        climbed = rows.cells(records.read_as(rows.RungRecord, path))
        members: list[records.Record] = [row for cell in climbed for row in cell.rows.values()]
        if what == "ladder":
            return ladders.measured(climbed, _where(members), markdown)
        picture = _Picture("TFLOP/s of every rung", members, figure, functools.partial(figure.draw, climbed))
    else:
        found = cells_of(records.read(path), match["mode"])
        if not found:
            raise ValueError(f"{path.relative_to(root)} has no records of mode {match['mode']!r}, which {document} asks for.")
        if what == "table":
            return markdown(*compare.table(found), unit=compare.unit(found)[0]) + "\n" + caption(found) + "\n"
        members = [row for cell in found for row in cell.rows.values()]
        alt = f"{compare.unit(found)[0]} of every contender"
        picture = _Picture(alt, members, plots, functools.partial(plots.bars, found))
    name = "-".join(filter(None, (match["name"].replace("/", "-"), match["mode"])))
    file = root / "docs" / "images" / f"{name}.png"
    if not (file.is_file() and picture.stamp.encode() in file.read_bytes()):
        pictures.append(f"{file.relative_to(root)} was made from other records")
        if not check:
            picture.draw(file, _where(members), picture.stamp)
    up = "../" * (len(document.relative_to(root).parts) - 1)
    return f"![{match['name']}: {picture.alt}]({up}docs/images/{file.name})\n"


@dataclass(frozen=True)
class _Picture:
    """``draw`` takes the file, a title and the stamp, and is a function of the module ``drawn_by``."""

    alt: str
    rows: Sequence[records.Record]
    drawn_by: ModuleType
    draw: Callable[[Path, str, str], None]

    @property
    def stamp(self) -> str:
        """What it is made from: the records and the code that draws them."""
        made_from = [*sorted(row.model_dump_json() for row in self.rows), inspect.getsource(self.drawn_by)]
        return "peakattn records " + hashlib.sha256("\n".join(made_from).encode()).hexdigest()[:24]


def cells_of(rows: Sequence[records.Record], mode: str | None) -> list[compare.Cell]:
    """The cells of one mode; None is kernel time, or wall time where that is all there is."""
    found = compare.cells(rows)
    modes = {cell.mode for cell in found}
    mode = mode or next((m for m in ("kernel", "wall", "eager", "host") if m in modes), None)
    return [cell for cell in found if cell.mode == mode]


def markdown(header: Sequence[str], body: Sequence[Sequence[str]], unit: str = "") -> str:
    """A Markdown table; the unit goes into the first header cell."""
    first = f"{header[0]}, {unit}" if unit else header[0]
    lines = ["| " + " | ".join([first, *header[1:]]) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(line) + " |" for line in body)]) + "\n"


def caption(found: Sequence[compare.Cell]) -> str:
    """Means, where and when it was measured, and which kernels have changed since."""
    members = [row for cell in found for row in cell.rows.values()]
    lines = [note for note in compare.notes(found) if "geometric mean" in note]
    lines.append(_where(members) + ".")
    old = records.stale(members)
    if old:
        lines.append(f"Measured before the last change of {', '.join(old)}.")
    return "\n".join(f"{line}  " if i < len(lines) - 1 else line for i, line in enumerate(lines)) + "\n"


def _where(found: Sequence[records.Record]) -> str:
    where = [row.provenance for row in found]
    one = where[0]
    days = sorted({p.time[:10] for p in where})
    commits = sorted({(p.commit or "no commit")[:10] + (" with changes" if p.dirty else "") for p in where})
    tools = ", ".join(f"{name} {one.versions[name]}" for name in ("torch", "triton", "cuda", "cudnn") if name in one.versions)
    driver = f", driver {one.driver}" if one.driver else ""
    modes = ", ".join(sorted({f"{row.mode} time" for row in found}))
    return f"{one.device}, {' to '.join(dict.fromkeys((days[0], days[-1])))}, {modes}, {tools}{driver}, {' and '.join(commits)}"


def _host(path: Path) -> str:
    latest = {(row.kind, row.contender): row for row in records.read_as(records.HostRecord, path)}
    found = list(latest.values())
    rows = [hostcost.HostRow.of(row.kind, row.contender, row.loops_us) for row in found]
    where = found[0].provenance
    return markdown(*hostcost.table(rows)) + f"\n{where.device}, {where.time[:10]}, torch {where.versions['torch']}.\n"


def _selftest(path: Path) -> str:
    last = selftest.SelftestRecord.model_validate_json(path.read_text(encoding="utf-8").splitlines()[-1])
    where = last.provenance
    tools = ", ".join(f"{name} {where.versions[name]}" for name in ("torch", "triton") if name in where.versions)
    changed = sorted(k for k, recorded in last.kernels.items() if recorded != records.kernel_hash(k))
    since = f" Changed since: {', '.join(changed)}." if changed else ""
    return f"GPU tests: {last.counts} on {where.device}, {where.time[:10]}, {tools}.{since}\n"
