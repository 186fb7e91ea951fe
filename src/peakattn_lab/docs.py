"""Tables and pictures of the documents, regenerated from records between markers.

``<!-- peakattn:table h200/prefill -->`` up to ``<!-- peakattn:end -->`` holds the table of
``benchmarks/results/h200/prefill.jsonl``; ``peakattn:plot`` holds a picture of it, written to ``docs/images``.
A mode may follow the name (``h200/prefill eager``); without one it is ``kernel``, or ``wall`` for CPU records.
``peakattn:host h200/host`` holds the table of the host's costs, ``peakattn:selftest h200/selftest`` a line on the last
run of the GPU tests.

A marker whose records do not exist yet says so in the document.

    peakattn docs             rewrite them
    peakattn docs --check     exit 1 and say what differs
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import pydantic

from peakattn_lab import compare, hostcost, plots, records, selftest

_MARKED = re.compile(
    r"(?P<open><!-- peakattn:(?P<what>table|plot|host|selftest) (?P<name>[\w./-]+)(?: (?P<mode>\w+))? -->\n)"
    r"(?P<body>.*?)(?P<close><!-- peakattn:end -->)",
    re.DOTALL,
)
_OPEN = re.compile(r"^<!-- peakattn:(?:table|plot|host|selftest) ", re.MULTILINE)


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
    path = root / "benchmarks" / "results" / f"{match['name']}.jsonl"
    if not path.is_file():
        return f"Not measured yet: there is no {path.relative_to(root).as_posix()}.\n"
    if match["what"] == "host":
        return _host(path)
    if match["what"] == "selftest":
        return _selftest(path)
    found = cells_of(records.read(path), match["mode"])
    if not found:
        raise ValueError(f"{path.relative_to(root)} has no records of mode {match['mode']!r}, which {document} asks for.")
    if match["what"] == "table":
        return markdown(*compare.table(found), unit=compare.unit(found)[0]) + "\n" + caption(found) + "\n"
    name = "-".join(filter(None, (match["name"].replace("/", "-"), match["mode"])))
    picture = root / "docs" / "images" / f"{name}.png"
    stamp = _stamp(found)
    if not (picture.is_file() and stamp.encode() in picture.read_bytes()):
        pictures.append(f"{picture.relative_to(root)} was made from other records")
        if not check:
            plots.bars(found, picture, _where(found), stamp)
    up = "../" * (len(document.relative_to(root).parts) - 1)
    return f"![{match['name']}: {compare.unit(found)[0]} of every contender]({up}docs/images/{picture.name})\n"


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
    rows = [row for cell in found for row in cell.rows.values()]
    lines = [note for note in compare.notes(found) if "geometric mean" in note]
    lines.append(_where(found) + ".")
    old = records.stale(rows)
    if old:
        lines.append(f"Measured before the last change of {', '.join(old)}.")
    return "\n".join(f"{line}  " if i < len(lines) - 1 else line for i, line in enumerate(lines)) + "\n"


def _where(found: Sequence[compare.Cell]) -> str:
    where = [row.provenance for cell in found for row in cell.rows.values()]
    one = where[0]
    days = sorted({p.time[:10] for p in where})
    commits = sorted({(p.commit or "no commit")[:10] + (" with changes" if p.dirty else "") for p in where})
    tools = ", ".join(f"{name} {one.versions[name]}" for name in ("torch", "triton", "cuda", "cudnn") if name in one.versions)
    driver = f", driver {one.driver}" if one.driver else ""
    modes = ", ".join(sorted({f"{cell.mode} time" for cell in found}))
    return f"{one.device}, {' to '.join(dict.fromkeys((days[0], days[-1])))}, {modes}, {tools}{driver}, {' and '.join(commits)}"


def _host(path: Path) -> str:
    latest: dict[tuple[str, str], records.HostRecord] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = records.HostRecord.model_validate_json(line)
        except pydantic.ValidationError as error:
            raise ValueError(f"{path} has a line that is not a host record: {error.errors()[0]['msg']}.") from None
        latest[row.kind, row.contender] = row
    found = list(latest.values())
    rows = [hostcost.HostRow.of(row.kind, row.contender, row.loops_us) for row in found]
    where = found[0].provenance
    return markdown(*hostcost.table(rows)) + f"\n{where.device}, {where.time[:10]}, torch {where.versions['torch']}.\n"


def _selftest(path: Path) -> str:
    last = selftest.SelftestRecord.model_validate_json(path.read_text(encoding="utf-8").splitlines()[-1])
    where = last.provenance
    tools = ", ".join(f"{name} {where.versions[name]}" for name in ("torch", "triton") if name in where.versions)
    counts = f"{last.passed} passed, {len(last.failed)} failed, {len(last.skipped)} skipped"
    changed = sorted(k for k, recorded in last.kernels.items() if recorded != records.kernel_hash(k))
    since = f" Changed since: {', '.join(changed)}." if changed else ""
    return f"GPU tests: {counts} on {where.device}, {where.time[:10]}, {tools}.{since}\n"


def _stamp(found: Sequence[compare.Cell]) -> str:
    """What a picture is made from: the records and the code that draws them."""
    rows = sorted(row.model_dump_json() for cell in found for row in cell.rows.values())
    made_from = [*rows, Path(plots.__file__).read_text(encoding="utf-8")]
    return "peakattn records " + hashlib.sha256("\n".join(made_from).encode()).hexdigest()[:24]
