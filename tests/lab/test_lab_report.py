"""The report: one file that loads nothing, the same figures in Markdown, no speed without a green gate."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lab.records_of import PROBLEM, record
from peakattn_lab import cli, ladder, problems, records, selftest
from peakattn_lab.ladder.rows import RungRecord
from peakattn_lab.profiling.profilers import KernelRow, ProfileRecord
from peakattn_lab.report import build as report
from peakattn_lab.report import kernels as report_kernels
from peakattn_lab.report import sections as report_sections
from peakattn_lab.tune import tuner as tune

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"
_VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """What a browser would load, the text of cells, and whether every element is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.addresses, self.cells, self.tags = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        found = dict(attributes)
        self.ids += [found["id"]] if "id" in found else []
        self.addresses += [found[name] for name in ("src", "href", "srcset", "data", "action") if name in found]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


def written(path, *rows):
    for row in rows:
        records.append(path, row)
    return report.load([path])


def parts(section, found):
    """What a section makes of the rows."""
    return list(section(found))


def page(found):
    return report.html(report.build(found), found)


@pytest.fixture(scope="module")
def own():
    """The report of the records in this repository."""
    found = report.load([RESULTS])
    return found, report.build(found)


def test_every_section_is_there_and_those_with_records_are_filled(own):
    found, sections = own
    parsed = Page(report.html(sections, found))
    assert not parsed.open
    assert parsed.ids == [section.key for section in sections] == list(report_sections.SECTIONS)
    filled = {section.key for section in sections if section.parts}
    assert {"environment", "rivals", "rooflines", "tuned", "host", "selftests", "stale"} <= filled
    assert len(re.findall(r"data:image/png;base64,iVBOR", report.html(sections, found))) >= 3


def test_nothing_is_loaded_from_elsewhere_and_nothing_runs(own):
    found, sections = own
    text = report.html(sections, found)
    parsed = Page(text)
    assert all(address.startswith(("data:image/png;base64,", "#")) for address in parsed.addresses)
    assert not {"script", "link", "iframe", "object", "embed"} & set(parsed.tags)
    assert "url(" not in text
    assert "@import" not in text


def test_markdown_has_the_same_figures(own, tmp_path):
    found, sections = own
    text = report.markdown(sections, found, tmp_path / "some pictures", tmp_path)
    cells = Page(report.html(sections, found)).cells
    for cell in cells:
        assert cell.replace("|", "\\|") in text
    pictures = [part for section in sections for part in section.parts if isinstance(part, report.Picture)]
    linked = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert [(tmp_path / path).read_bytes() for path in linked] == [picture.png for picture in pictures]
    assert all(f"## {section.title}" in text for section in sections)


def test_figures_are_those_of_the_records(own):
    found, _ = own
    rows = [row for row in found.of(records.Record) if row.contender == "peakattn" and row.speed_known]
    table = next(part for part in report_sections.rivals(found) if isinstance(part, report.Table))
    shown = {line[0]: line[table.header.index("peakattn")] for line in table.rows}
    for row in rows:
        label = problems.label(problems.from_dict(row.problem))
        if label in shown:
            assert shown[label] == f"{row.tflops:.0f}"
    assert len(shown) >= 10


def test_a_later_run_of_named_kernels_does_not_replace_the_run_of_the_choice(tmp_path):
    def of_run(name, row):
        return row.model_copy(update={"provenance": row.provenance.model_copy(update={"run": name})})

    rows = [of_run("a", record("peakattn", 700.0)), of_run("a", record("fa3", 800.0))]
    rows += [of_run("b", record("peakattn:cuda.fwd_sm80", 1500.0)), of_run("b", record("fa3", 801.0))]
    tables = [
        part for part in parts(report_sections.rivals, written(tmp_path / "x.jsonl", *rows)) if isinstance(part, report.Table)
    ]
    assert [[name for name in table.header if name.startswith("peakattn")] for table in tables] == [
        ["peakattn"],
        ["peakattn:cuda.fwd_sm80"],
    ]


def test_without_records_each_section_says_what_makes_them(tmp_path):
    sections = report.build(report.load([tmp_path]))
    text = report.html(sections, report.load([tmp_path]))
    for section in sections:
        if section.key not in ("tuned", "ladders"):  # which are files of the packages
            assert not section.parts
            assert section.missing in text
    assert "peakattn sweep KERNEL makes them" in text


def test_words_from_records_are_text_and_no_elements(tmp_path):
    evil = "<script>alert(1)</script>"
    found = written(tmp_path / "x.jsonl", record(f"fa3 {evil}", 1000.0, ran=[evil]), record("peakattn", 900.0))
    text = page(found)
    assert evil not in text
    assert "&lt;script&gt;" in text


def test_a_red_gate_has_a_word_and_no_number(tmp_path):
    red = record("peakattn", 123.456, gate=records.Gate(passed=False, message="out errs"))
    found = written(tmp_path / "x.jsonl", red, record("fa3", 1000.0))
    text = page(found)
    assert "WRONG" in text
    assert "out errs" in text
    for number in (f"{red.tflops:.0f}", "123.4"):
        assert f">{number}<" not in text


def test_a_point_above_its_roof_is_said_first(tmp_path):
    found = written(tmp_path / "x.jsonl", record("peakattn", PROBLEM.flops / 1200 / 1e6))
    notes = [part for part in report_sections.rooflines(found) if isinstance(part, str)]
    assert "above its tensor roof" in notes[0]
    assert 'class="bad">ABOVE' in page(found)


def test_rows_of_changed_kernels_are_marked(tmp_path):
    old = record("peakattn", 1000.0, kernel="triton.fwd", kernel_hash="0" * 16)
    now = record("fa3", 900.0, kernel="triton.bwd", kernel_hash=records.kernel_hash("triton.bwd"))
    found = written(tmp_path / "x.jsonl", old, now)
    (table,) = parts(report_sections.stale, found)
    assert [line[2] for line in table.rows] == ["triton.fwd"]
    assert "Measured before the last change of triton.fwd." in page(found)
    fresh = written(tmp_path / "y.jsonl", now)
    assert list(report_sections.stale(fresh)) == ["Every row was measured on the kernel sources that are here now."]


def sweep_row(block_m, us, status="ok", **values):
    row = record("peakattn", us)
    return records.SweepRecord(
        provenance=row.provenance,
        problem=row.problem,
        kernel="triton.fwd",
        kernel_hash=records.kernel_hash("triton.fwd"),
        compiler="triton 3.6.0",
        config={"block_m": block_m, "block_n": 64, "num_warps": 4, "num_stages": 2},
        stage="final" if status == "ok" else "static",
        status=status,
        samples_us=row.samples_us if status == "ok" else [],
        **values,
    )


def test_sweeps_show_heatmaps_the_fastest_and_what_became_of_the_others(tmp_path):
    rows = [sweep_row(128, 800.0), sweep_row(64, 900.0), sweep_row(256, 1.0, "hung", reason="it took longer than 60 s")]
    found = parts(report_kernels.sweeps, written(tmp_path / "s.jsonl", *rows))
    pictures = [part for part in found if isinstance(part, report.Picture)]
    assert [p.name for p in pictures] == [
        "sweep-triton-fwd-nvidia-h200-block-m-block-n",
        "sweep-triton-fwd-nvidia-h200-num-warps-num-stages",
    ]
    tables = [part for part in found if isinstance(part, report.Table)]
    best = next(t for t in tables if "fastest" in t.title)
    assert [line[list(best.header).index("us")] for line in best.rows] == ["800.0", "900.0"]
    counts = next(t for t in tables if "what became" in t.title)
    assert dict(zip(counts.header, counts.rows[0], strict=True))["hung"] == "1"
    assert any("longer than 60 s" in part for part in found if isinstance(part, str))


def test_tunings_show_how_much_faster_than_untuned(tmp_path):
    row = record("peakattn", 500.0)
    made: dict[str, Any] = {
        "provenance": row.provenance,
        "problem": row.problem,
        "kernel": "triton.fwd",
        "kernel_hash": "0" * 16,
        "compiler": "triton 3.6.0",
        "anchor": {"kernel": "triton.fwd", "config": {}},
    }
    won = tune.TuneRecord(config={"block_m": 128}, speedup=(1.2, 1.19, 1.21), samples_us=[500.0], final=True, **made)
    lost = tune.TuneRecord(config={"block_m": 16}, speedup=None, message="out errs", **made)
    found = written(tmp_path / "t.jsonl", won, lost)
    table, sentence = parts(report_kernels.tunings, found)
    assert table.rows == [[problems.label(PROBLEM), "triton.fwd", "block_m=128", "1.200", "[1.190, 1.210]", "yes"]]
    assert sentence == "1 without a time: out errs"
    assert [line[2] for line in parts(report_sections.stale, found)[0].rows] == ["triton.fwd"]


def rung(step, us, **values):
    row = record(f"ladder.triton.step{step}" if step else "fa3", us)
    facts = records.FunctionFacts(
        name="attention_fwd_kernel",
        registers=200 + (step or 0),
        frame_bytes=0,
        shared_bytes=0,
        num_threads=128,
        spills=3,
        loop_spills=0,
        tensor_core=8,
        mufu=4,
        blocks=1,
        limiter="registers",
    )
    mine = {"rung": row.contender, "facts": facts, "executed_flops": 1.5 * PROBLEM.flops} if step else {"rung": None}
    return RungRecord(**(row.model_dump() | mine | values))


def test_ladders_show_each_rung_beside_the_one_before_and_the_best_rival(tmp_path):
    red = records.Gate(passed=False, message="out errs at [0, 0, 0, 0]")
    slow, fast, wrong = rung(1, 2000.0), rung(2, 1000.0), rung(3, 77.7, gate=red)
    found = written(tmp_path / "l.jsonl", fast, slow, rung(None, 800.0), wrong)
    made = parts(report_kernels.ladders, found)
    assert [part.name for part in made if isinstance(part, report.Picture)] == ["ladder-triton-nvidia-h200-kernel"]
    tables = [part for part in made if isinstance(part, report.Table)]
    speeds = next(table for table in tables if "gain over the rung before" in table.header)
    shown = [dict(zip(speeds.header, line, strict=True)) for line in speeds.rows]
    assert [line["rung"] for line in shown] == ["ladder.triton.step1", "ladder.triton.step2", "ladder.triton.step3", "fa3"]
    assert shown[1]["gain over the rung before"].startswith("2.00 x")
    assert shown[1]["of the best rival"] == "0.80"
    assert shown[2]["TFLOP/s"] == "-"
    assert "out errs" in str(shown[2])
    assert f"{wrong.tflops:.0f}" not in str([table.rows for table in tables])
    ideas = next(table for table in tables if "idea" in table.header)
    assert len(ideas.rows) == len(ladder.rungs("triton"))
    assert any("Measured before the last change of ladder.triton.step1" in part for part in made if isinstance(part, str))


def test_a_rung_above_a_roof_is_an_error_too(tmp_path):
    found = written(tmp_path / "l.jsonl", rung(1, PROBLEM.flops / 1500 / 1e6))
    error = parts(report_kernels.ladders, found)[0]
    assert "ladder.triton.step1" in error
    assert "above its tensor roof of 989.0" in error


def test_profiles_show_counters_side_by_side(tmp_path):
    row = record("peakattn:triton.fwd", 1.0)
    launch: dict[str, Any] = {
        "name": "attention_fwd_kernel",
        "grid": [64, 1, 1],
        "block": [128, 1, 1],
        "metrics": {"launch__registers_per_thread": 168.0},
    }
    profiles = [
        ProfileRecord(
            provenance=row.provenance,
            problem=row.problem,
            contender=name,
            kernel=kernel,
            config={"block_m": 128, "block_n": 64},
            profiler="ncu 2025.3",
            gate=records.Gate(passed=passed, message=""),
            profiled=[KernelRow(**launch)],
        )
        for name, kernel, passed in (("peakattn:triton.fwd", "triton.fwd", True), ("fa3", None, True), ("sdpa", None, False))
    ]
    tables = parts(report_kernels.profiles, written(tmp_path / "p.jsonl", *profiles))
    (launches,) = [table for table in tables if "launch" in table.title]
    assert ["registers", "168", "168"] in [list(line) for line in launches.rows]  # and none of the red gate


def test_runs_of_several_devices_stand_apart_and_the_last_counts(tmp_path):
    row = record("peakattn", 1000.0)
    where = row.provenance
    late = row.model_copy(update={"provenance": where.model_copy(update={"run": "late", "time": "2099-01-01T00:00:00+00:00"})})
    late = late.model_copy(update={"samples_us": [500.0] * 9})
    other = row.model_copy(update={"provenance": where.model_copy(update={"device": "NVIDIA B200"})})
    found = written(tmp_path / "x.jsonl", late, row, other)  # the file's order is not that of time
    titles = {t.title: t for t in report_sections.rivals(found) if isinstance(t, report.Table)}
    assert [title.split(",")[0] for title in titles] == ["NVIDIA B200", "NVIDIA H200"]
    table = titles["NVIDIA H200, forward, kernel time (CUDA graph), TFLOP/s"]
    assert table.rows[0][table.header.index("peakattn")] == f"{late.tflops:.0f}"


def test_test_runs_show_what_failed(tmp_path):
    row = selftest.SelftestRecord(
        provenance=record("peakattn", 1.0).provenance,
        marker="gpu",
        kernels={},
        passed=3,
        failed=["tests.x::test_y[a|b]"],
        skipped={"tests.x::z": "needs two GPUs\nmore"},
        seconds=2,
    )
    found = written(tmp_path / "x.jsonl", row)
    text, failed, skipped = parts(report_sections.selftests, found)
    assert "3 passed, 1 failed, 1 skipped in 2 s" in text
    assert failed.rows == [["tests.x::test_y[a|b]", "failed"]]
    assert skipped.rows == [["needs two GPUs", "1"]]
    assert "test_y[a\\|b]" in report.markdown(report.build(found), found, tmp_path, tmp_path)


def test_files_that_are_no_records(tmp_path):
    (tmp_path / "notes.jsonl").write_text('{"a": 1}\n')
    found = written(tmp_path / "x.jsonl", record("peakattn", 1.0))
    found = report.load([tmp_path])
    assert found.unread == ["notes.jsonl holds no records of a known kind and is left out"]
    assert "notes.jsonl" in page(found)
    with pytest.raises(ValueError, match=r"there is no .*gone; give record files"):
        report.load([tmp_path / "gone"])
    with (tmp_path / "x.jsonl").open("a") as file:
        file.write('{"samples_us": "damaged"}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2 is not a record"):
        report.load([tmp_path])


def test_the_command_writes_both(tmp_path):
    records.append(tmp_path / "x.jsonl", record("peakattn", 1000.0))
    out, text = tmp_path / "new" / "r.html", tmp_path / "other" / "r.md"
    said = CliRunner().invoke(cli.app, ["report", str(tmp_path / "x.jsonl"), "--out", str(out), "--markdown", str(text)])
    assert said.exit_code == 0, said.output
    assert out.read_text().startswith("<!DOCTYPE html>")
    links = re.findall(r"\]\((r_pictures/[^)]+)\)", text.read_text())
    assert links
    assert all((text.parent / link).is_file() for link in links)
    assert "Sweeps: No sweeps" in said.output
