"""Documents are regenerated from records, and a check sees what differs."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from lab.records_of import PROBLEM, record
from peakattn.device import Device
from peakattn_lab import cli, docs, hostcost, problems, provenance, records, selftest

README = """# title
<!-- peakattn:table h200/prefill -->
old
<!-- peakattn:end -->
between
<!-- peakattn:plot h200/prefill -->
<!-- peakattn:end -->
<!-- peakattn:host h200/host -->
<!-- peakattn:end -->
<!-- peakattn:selftest h200/selftest -->
<!-- peakattn:end -->
after
"""


@pytest.fixture
def root(tmp_path):
    results = tmp_path / "benchmarks" / "results" / "h200"
    for problem, scale in ((PROBLEM, 1.0), (problems.make(4096, 128, batch=4, heads=16, causal=True), 0.6)):
        for name, us in (("peakattn", 800.0), ("fa3", 900.0), ("sdpa.flash", 1600.0)):
            kernel: dict[str, Any] = {"kernel": "cpu.fwd", "kernel_hash": "0" * 16} if name == "peakattn" else {}
            records.append(results / "prefill.jsonl", record(name, us * scale, problem, **kernel))
    row = hostcost.HostRow.of("inference", "peakattn", [13.0, 12.0])
    floor = hostcost.HostRow.of("inference", hostcost.FLOOR, [10.0])
    for one in hostcost.to_records([floor, row], Device.named("h200")):
        records.append(results / "host.jsonl", one)
    hashes = {"cpu.fwd": "0" * 16, "cpu.bwd": records.kernel_hash("cpu.bwd")}
    where = provenance.here("NVIDIA H200", 90)
    tests = {"passed": 7, "failed": [], "skipped": {"test_a": "needs sm_100"}, "seconds": 3.0}
    suite = selftest.SelftestRecord.model_validate({"provenance": where, "marker": "gpu", "kernels": hashes, **tests})
    records.append(results / "selftest.jsonl", suite)
    (tmp_path / "README.md").write_text(README)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("<!-- peakattn:plot h200/prefill -->\n<!-- peakattn:end -->\n")
    return tmp_path


def test_tables_and_pictures_are_made_and_then_agree(root):
    changes = docs.update(root)
    assert len(changes) == 3
    text = (root / "README.md").read_text()
    assert "| fwd bf16 d128 full 4k b4 h16 | 687 | 344 | 611 | 1.125 [" in text
    assert "geometric mean 1.125 x the best rival of each of 2 problems" in text
    assert "Measured before the last change of cpu.fwd." in text
    assert "| inference | peakattn | 12.00 | 13.00 | 1.20 |  |" in text
    assert "![h200/prefill: TFLOP/s of every contender](docs/images/h200-prefill.png)" in text
    assert "(../docs/images/h200-prefill.png)" in (root / "docs" / "page.md").read_text()
    assert "GPU tests: 7 passed, 0 failed, 1 skipped on NVIDIA H200" in text
    assert "Changed since: cpu.fwd." in text
    assert text.startswith("# title\n")
    assert "between" in text
    assert "old" not in text
    assert (root / "docs" / "images" / "h200-prefill.png").read_bytes().startswith(b"\x89PNG")
    assert docs.update(root, check=True) == []


def test_check_sees_edited_tables_and_pictures_of_other_records(root, monkeypatch):
    monkeypatch.setattr(provenance, "checkout", lambda: root)
    docs.update(root)
    assert CliRunner().invoke(cli.app, ["docs", "--check"]).exit_code == 0
    readme = root / "README.md"
    readme.write_text(readme.read_text().replace("687", "999"))
    records.append(root / "benchmarks" / "results" / "h200" / "prefill.jsonl", record("fa3", 700.0))
    before = readme.read_text()
    result = CliRunner().invoke(cli.app, ["docs", "--check"])
    assert result.exit_code == 1
    assert "README.md differs from the records; run make docs" in result.output
    assert "h200-prefill.png was made from other records" in result.output
    assert readme.read_text() == before


def test_what_was_not_measured_says_so(root):
    (root / "README.md").write_text("<!-- peakattn:plot b200/prefill -->\n<!-- peakattn:end -->\n")
    docs.update(root)
    assert "Not measured yet: there is no benchmarks/results/b200/prefill.jsonl.\n<!--" in (root / "README.md").read_text()
    assert docs.update(root, check=True) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- peakattn:table h200/prefill eager -->\n<!-- peakattn:end -->\n", "no records of mode 'eager'"),
        ("<!-- peakattn:table h200/prefill -->\n", "without its <!-- peakattn:end -->"),
    ],
)
def test_markers_that_cannot_be_filled_are_named(root, text, message):
    (root / "README.md").write_text(text)
    with pytest.raises(ValueError, match=message):
        docs.update(root)


def test_the_documents_of_this_checkout_agree_with_their_records():
    root = provenance.checkout()
    assert root is not None
    assert docs.update(root, check=True) == []
