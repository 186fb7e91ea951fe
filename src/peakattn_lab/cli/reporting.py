"""report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peakattn_lab.cli.console import progress, results_folder, say, sentences


def report(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Record files, or folders of them; benchmarks/results if none.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    markdown: Annotated[
        Path | None, typer.Option(help="Also write Markdown here, with its pictures in a folder beside it.")
    ] = None,
) -> None:
    """Everything that was recorded in one HTML file that needs no network: rivals, rooflines, sweeps, tuned configs, tests."""
    from peakattn_lab.report import build as reports
    from peakattn_lab.report.sections import SECTIONS

    with sentences():
        found = reports.load(files or [results_folder()])
        with progress("report", len(SECTIONS)) as step:
            sections = reports.build(found, on_section=step)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(reports.html(sections, found), encoding="utf-8")
        say(f"report in {out}")
        if markdown is not None:
            markdown.parent.mkdir(parents=True, exist_ok=True)
            pictures = markdown.with_name(f"{markdown.stem}_pictures")
            markdown.write_text(reports.markdown(sections, found, pictures, markdown.parent), encoding="utf-8")
            say(f"Markdown in {markdown}, its pictures in {pictures}")
    for line in reports.summary(found):
        say(line)
    for section in sections:
        if not section.parts:
            say(f"{section.title}: {section.missing}")
