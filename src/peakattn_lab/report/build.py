"""One report of everything that was recorded: an HTML file that needs no network and no scripts, and the same in Markdown.

A section is a function from what was found to its parts: tables, pictures and sentences.  One without records says in a
line which command would make them.  Nothing here decides what a number means: tables and verdicts come from the modules
that own them, and a speed without a green gate has no number there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from peakattn_lab import records
from peakattn_lab.report.parts import MODELS, Found, Part, Picture, Table
from peakattn_lab.report.sections import SECTIONS


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it; without parts, ``missing`` says how to get some."""

    key: str
    title: str
    parts: tuple[Part, ...]
    missing: str


def load(paths: Iterable[Path]) -> Found:
    """Every row of record files, and of the ``.jsonl`` and packed ``.jsonl.gz`` files under folders."""
    found = Found()
    for path in paths:
        if not path.exists():
            raise ValueError(f"there is no {path}; give record files (JSON lines) or folders of them.")
        found.files += sorted(p for e in ("", records.PACKED) for p in path.rglob(f"*.jsonl{e}")) if path.is_dir() else [path]
    for file in found.files:
        kind = records.kind_of_file(file)
        if kind not in MODELS:
            found.unread.append(f"{file.name} holds no records of a known kind and is left out")
            continue
        found.rows.setdefault(kind, []).extend(records.read_as(MODELS[kind], file))
    for rows in found.rows.values():
        rows.sort(key=lambda row: row.provenance.time)
    return found


def build(found: Found, on_section: Callable[[str], None] = lambda title: None) -> list[Section]:
    """All sections, in order."""
    built = []
    for key, (title, missing, parts) in SECTIONS.items():
        on_section(title)
        built.append(Section(key, title, tuple(parts(found)), missing))
    return built


def html(sections: Sequence[Section], found: Found) -> str:
    """The report as one HTML document."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.tests |= {"table": lambda x: isinstance(x, Table), "picture": lambda x: isinstance(x, Picture)}
    environment.filters["mark"] = _mark
    text = resources.files("peakattn_lab.report").joinpath("template.html").read_text(encoding="utf-8")
    return environment.from_string(text).render(sections=sections, title=title(found), summary=summary(found))


def markdown(sections: Sequence[Section], found: Found, pictures: Path, beside: Path) -> str:
    """The report as Markdown; its pictures are written into the folder ``pictures``, with links as seen from ``beside``."""
    import os

    lines = [f"# {title(found)}", *summary(found)]
    for section in sections:
        lines.append(f"## {section.title}")
        lines += [] if section.parts else [section.missing]
        for part in section.parts:
            if isinstance(part, Table):
                lines += [f"**{part.title}**"] if part.title else []
                lines.append(_markdown_table(part))
            elif isinstance(part, Picture):
                pictures.mkdir(parents=True, exist_ok=True)
                path = pictures / f"{part.name}.png"
                path.write_bytes(part.png)
                lines.append(f"![{part.alt}]({Path(os.path.relpath(path, beside)).as_posix()})")
            else:
                lines.append(part)
    return "\n\n".join(lines) + "\n"


def title(found: Found) -> str:
    """The report's heading."""
    return "peakattn: " + (", ".join(found.devices) or "no records")


def summary(found: Found) -> list[str]:
    """What the report is made from, and what was left out."""
    counts = Counter({kind: len(rows) for kind, rows in found.rows.items()})
    rows = ", ".join(f"{n} {kind}" for kind, n in counts.most_common()) or "none"
    made = f"Made from {len(found.files)} record files; rows: {rows}."
    return [made, *(f"{line}." for line in found.unread)]


def _markdown_table(table: Table) -> str:
    lines = [table.header, *table.rows]
    text = ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines]
    rule = "|" + "".join("---|" if i < table.left else "---:|" for i in range(len(table.header)))
    return "\n".join([text[0], rule, *text[1:]])


_MARKS = {
    "good": re.compile(r"FASTER|ok|passed"),
    "bad": re.compile(r"SLOWER|WRONG.*|ABOVE|failed|crashed|hung|wrong|no speed.*"),
    "dull": re.compile(r"UNCLEAR|SAME|pruned|stale|only in .*|-"),
}


def _mark(cell: str) -> str:
    """The class of a cell whose word is a verdict."""
    return next((name for name, words in _MARKS.items() if words.fullmatch(cell)), "")
