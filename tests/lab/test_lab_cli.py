"""The command line, in this process: what it prints, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lab.records_of import record
from peakattn_lab import cli, compiled, doctor, provenance, records, selftest

runner = CliRunner()


def run(*arguments, code=0):
    result = runner.invoke(cli.app, [*arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_help_imports_neither_torch_nor_the_lab():
    source = (
        "import sys, peakattn_lab.cli\n"
        "heavy = {'torch', 'rich.table', 'pydantic', 'matplotlib', 'peakattn', 'peakattn_lab.bench'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == 0


def test_doctor_finds_that_the_main_job_works():
    said = json.loads(run("doctor", "--json"))
    assert said["healthy"]
    findings = {(f["group"], f["name"]): f for f in said["findings"]}
    assert findings["main job", "cpu"]["status"] == "ok"
    assert "agree with the float64 oracle" in findings["main job", "cpu"]["detail"]
    assert findings["backends", "cpu"]["status"] == "ok"
    assert findings["laboratory", "pydantic"]["status"] == "ok"


def test_doctor_fails_when_the_main_job_does(monkeypatch):
    def fail(*arguments):
        raise RuntimeError("out errs by 1.0")

    monkeypatch.setattr(doctor, "_attend", fail)
    said = run("doctor", code=1)
    assert "out errs by 1.0" in said
    assert "The main job does not work" in said


def test_doctor_names_the_line_that_installs_what_is_missing(monkeypatch):
    from peakattn import dispatch

    reason = 'cuda-tile is not installed; install it with: pip install "peakattn[cutile]"'
    monkeypatch.setattr(dispatch, "unavailable", lambda backend: None if backend == "cpu" else reason)
    triton = next(f for f in doctor._backends() if f.name == "triton")
    assert triton.status == "missing"
    assert triton.fix == 'install it with: pip install "peakattn[cutile]"'


def test_explain_for_a_gpu_that_is_not_here():
    said = run("explain", "--device", "h200", "--causal", "--seqlen", "8192", "--heads", "32", "--kv-heads", "8")
    assert "heads 32/8, head_dim 128, causal on NVIDIA H200" in said
    assert "chosen: cute.fwd_sm90" in said
    assert "chosen: cpu.bwd" in run("explain", "--device", "cpu", "--backward", "--window", "255,0")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--head-dim", "300"], "head_dim of q and k is 300; allowed are 1 to 256."),
        (["--heads", "6", "--kv-heads", "4"], "is not a multiple of num_heads_kv 4"),
        (["--window", "7"], "write LEFT,RIGHT"),
        (["--device", "h300"], "known are a100"),
        (["--dtype", "int8"], "allowed are float16, bfloat16 and float32"),
        (["--backend", "vulkan"], "allowed are cpu, triton"),
    ],
)
def test_explain_says_what_is_wrong(arguments, sentence):
    assert sentence in run("explain", *arguments, code=2)


def test_bench_on_the_cpu_records_draws_and_resumes(tmp_path):
    out, picture = tmp_path / "rows.jsonl", tmp_path / "bars.png"
    options = ("bench", "--set", "smoke", "--device", "cpu", "--rivals", "sdpa,fa3", "--seconds", "0.2", "--out", str(out))
    said = run(*options, "--plot", str(picture))
    assert "fwd f32 d32 full 128" in said
    assert "x best rival" in said
    assert "fa3: FlashAttention-3 needs sm_90; this is cpu." in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = records.read(out)
    assert len(rows) == 6
    again = run(*options, "--resume")
    assert len(records.read(out)) == 6
    assert "fwd f32 d32 full 128" in again
    run(*options, "--only", "bwd")
    assert len(records.read(out)) == 9
    run(*options, "--only", "fwd", "--backend", "auto", "--backend", "cpu")
    timed = {row.contender for row in records.read(out)[9:] if row.speed_known}
    assert timed == {"peakattn", "peakattn:cpu", "sdpa"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--set", "nothing"], "problem set 'nothing' is unknown"),
        (["--rivals", "fa9"], "rival 'fa9' is unknown"),
        (["--set", "smoke", "--only", "d512"], "no problem has all the words 'd512'"),
        (["--mode", "graph"], "allowed are wall"),
        (["--device", "tpu"], "allowed are cpu, cuda"),
    ],
)
def test_bench_says_what_is_wrong(arguments, sentence, tmp_path):
    options = [] if "--device" in arguments else ["--device", "cpu"]
    assert sentence in run("bench", *arguments, *options, "--out", str(tmp_path / "rows.jsonl"), code=2)


def test_bench_lists_sets_and_rivals():
    said = run("bench", "--list")
    assert "prefill" in said
    assert "FlashAttention-4" in said


def test_a_red_gate_of_ours_fails_the_command(tmp_path, monkeypatch):
    from peakattn_lab import bench

    red = records.Gate(passed=False, message="out errs")
    monkeypatch.setattr(bench.Bench, "run", lambda *arguments, **options: [record("peakattn", 1.0, gate=red)])
    said = run("bench", "--set", "smoke", "--device", "cpu", "--out", str(tmp_path / "rows.jsonl"), code=1)
    assert "WRONG" in said
    assert "wrong: out errs" in said


def test_compiled_for_hopper_without_a_gpu():
    pytest.importorskip("triton")
    found = json.loads(run("compiled", "--arch", "sm_90", "--kernel", "triton.fwd", "--head-dim", "64", "--json"))
    assert found[0]["reason"] is None, found
    made = found[0]["artifacts"][0]
    assert made["name"] == "attention_fwd_kernel"
    assert 0 < made["registers"] <= 255
    assert made["opcodes"].get("HGMMA", 0) + made["opcodes"].get("HMMA", 0) > 0


def test_compiled_says_why_a_kernel_is_missing(monkeypatch):
    from peakattn import dispatch

    monkeypatch.setattr(dispatch, "unavailable", lambda backend: "the package triton is not installed")
    assert "triton.fwd, head_dim 64: the package triton is not installed" in run("compiled", "--arch", "90", code=1)
    assert "write it as sm_90" in run("compiled", "--arch", "hopper", code=2)
    assert "known are" in run("compiled", "--arch", "sm_90", "--kernel", "triton.none", code=2)
    assert compiled.arch_number("sm_90a") == 90


SUITE = """
import pytest

def test_a(): pass

def test_b(): raise ValueError

@pytest.fixture
def broken(): raise ValueError

def test_c(broken): pass

def test_d(): pytest.skip("needs sm_100")

@pytest.mark.xfail(reason="known")
def test_e(): raise ValueError

def test_f():
    if INTERRUPT: raise KeyboardInterrupt
"""


@pytest.mark.parametrize("interrupt", [False, True])
def test_selftest_records_what_passed_on_which_sources(tmp_path, monkeypatch, interrupt):
    (tmp_path / "test_suite.py").write_text(SUITE.replace("INTERRUPT", str(interrupt)))
    monkeypatch.setattr(provenance, "checkout", lambda: tmp_path)
    out = tmp_path / "selftest.jsonl"
    said = run("selftest", "--marker", "not gpu", "--out", str(out), "--", "-q", code=1)
    assert f"{1 if interrupt else 2} passed, 2 failed, 2 skipped{', cut short' if interrupt else ''}" in said
    row = selftest.SelftestRecord.model_validate_json(out.read_text())
    assert row.kernels["cpu.fwd"] == records.kernel_hash("cpu.fwd")
    assert row.failed == ["test_suite.py::test_b", "test_suite.py::test_c"]
    assert list(row.skipped) == ["test_suite.py::test_d", "test_suite.py::test_e"]
    assert "needs sm_100" in row.skipped["test_suite.py::test_d"]
    assert row.complete is not interrupt
    assert not row.ok
