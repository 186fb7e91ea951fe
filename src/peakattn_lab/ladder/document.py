"""A ladder in Markdown: its tables, and a section for each rung."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from peakattn_lab import ladder
from peakattn_lab.ladder import tables
from peakattn_lab.ladder.rows import Cell, RungRecord, stale

Markdown = Callable[[Sequence[str], Sequence[Sequence[str]]], str]


def measured(found: Sequence[Cell], where: str, markdown: Markdown) -> str:
    """TFLOP/s of every rung on every problem, the code of the last problem's rungs, and where it was measured."""
    title, header, body = tables.code(found[-1])
    notes = [f"{where}."]
    old = changed([row for cell in found for row in cell.rows.values()])
    if old:
        notes.append(f"Measured before the last change of {', '.join(old)}.")
    parts = ["TFLOP/s:", markdown(*tables.overview(found)).rstrip(), f"{title}:", markdown(header, body).rstrip()]
    return "\n".join(["", *(part + "\n" for part in parts), "  \n".join(notes), ""])


def changed(rows: Sequence[RungRecord]) -> list[str]:
    """Rungs whose code has changed since these rows were measured."""
    languages = dict.fromkeys(row.rung.split(".")[1] for row in rows if row.rung is not None)
    return stale(rows, {rung.id: rung.source_hash for language in languages for rung in ladder.rungs(language)})


def rungs(language: str) -> str:
    """A section for each rung: its idea, what was expected, why it came so, and the source's figures, said to be theirs."""
    parts = []
    for rung in ladder.rungs(language):
        lines = [f"### {rung.step}. {rung.name.partition(' ')[2]}", "", rung.idea, "", f"- Predicted: {rung.prediction}"]
        lines.append(f"- Why it came so: {rung.why or 'not measured yet.'}")
        if rung.published:
            lines.append(f"- The source's figures, on its GPU: {tables.published(rung)}.")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(["", *parts, f"The source is {ladder.source(language)}.", ""])
