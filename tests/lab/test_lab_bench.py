"""The gate, the contenders and the bench, run for real on small CPU problems; tables from made-up records."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

from lab.records_of import PROBLEM, record
from peakattn.device import CPU, Device
from peakattn_lab import baselines, bench, compare, gate, hostcost, observe, problems, records, timing
from peakattn_lab.baselines import Contender

FORWARD, BACKWARD = (problems.on_device(p, "cpu") for p in problems.named("smoke").problems)
GROUPED = problems.on_device(problems.make((40, 56), 16, batch=2, heads=(4, 2), causal=True, dtype=torch.float32), "cpu")


@pytest.mark.parametrize("problem", [FORWARD, BACKWARD, GROUPED], ids=problems.label)
def test_the_gate_passes_what_is_right(problem):
    tensors = problems.inputs(problem, torch.device("cpu"), seed=0)
    result = gate.Gate(problem, tensors).check(baselines.bind(baselines.ours(), problem, tensors)())
    assert result.passed, result.message
    assert "within the error budget" in result.message


@pytest.mark.parametrize(
    ("problem", "which", "name"), [(FORWARD, 0, "out"), (BACKWARD, 0, "dq"), (BACKWARD, 1, "dk"), (BACKWARD, 2, "dv")]
)
def test_the_gate_sees_one_wrong_row_and_one_nan(problem, which, name):
    tensors = problems.inputs(problem, torch.device("cpu"), seed=0)
    checker = gate.Gate(problem, tensors)
    outputs = [x.clone() for x in baselines.bind(baselines.ours(), problem, tensors)()]
    outputs[which][-1, 5, -1] *= 1.01
    result = checker.check(outputs)
    assert not result.passed
    assert result.message.startswith(f"{name} of batch 0, kv head 1")
    outputs[which][0, 0, 0, 0] = float("nan")
    assert "not finite" in checker.check(outputs).message


def test_slices_of_the_gate_differ_and_include_the_last():
    found = gate.choose_slices(PROBLEM, seed=0)
    assert found[0] == (3, 15)
    assert len(set(found)) == 2
    assert gate.choose_slices(problems.make(8, 8, heads=1), seed=0) == [(0, 0)]


def test_sdpa_backends_agree_with_the_oracle_and_say_what_ran():
    tensors = problems.inputs(FORWARD, torch.device("cpu"), seed=0)
    checker = gate.Gate(FORWARD, tensors)
    for name, operator in (
        ("sdpa", "flash_attention_for_cpu"),
        ("sdpa.flash", "flash_attention_for_cpu"),
        ("sdpa.math", "softmax"),
    ):
        call = baselines.bind(baselines.rival(name), FORWARD, tensors)
        assert checker.check(call()).passed
        assert any(operator in ran for ran in baselines.what_ran(call)), name


@pytest.mark.parametrize(
    ("name", "problem", "reason"),
    [
        ("sdpa", problems.make(64, 64, window=(7, 0)), "no window"),
        ("sdpa", dataclasses.replace(PROBLEM, softcap=True), "no softcap"),
        ("sdpa", GROUPED, "aligned top-left"),
        ("sdpa.math", problems.make(65536, 64), "score matrices"),
        ("fa3", problems.named("backward").problems[0], "forward-only"),
        ("fa4", problems.named("demo").problems[0], "takes float16 and bfloat16"),
    ],
)
def test_rivals_refuse_what_they_cannot_do(name, problem, reason):
    assert reason in str(baselines.rival(name).reject(problem))


def test_rivals_that_are_missing_say_why(monkeypatch):
    assert "this is cpu" in str(baselines.rival("fa3").unavailable(CPU))
    assert "not on cpu" in str(baselines.rival("sdpa.cudnn").unavailable(CPU))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    baselines._import_failure.cache_clear()
    assert str(baselines.rival("fa4").unavailable(Device.named("h200"))).endswith("pip install flash-attn-4")
    baselines._import_failure.cache_clear()
    with pytest.raises(ValueError, match="known are sdpa"):
        baselines.rival("fa5")


def wrong(q, k, v):
    return v.clone()


def broken(q, k, v):
    raise RuntimeError("no such kernel\nand a long story")


def contender(name, function):
    return Contender(name, name, lambda device: None, lambda problem: None, lambda problem: function)


def test_bench_records_every_contender_with_the_reason_when_there_is_no_speed():
    runner = bench.Bench(torch.device("cpu"), seconds=0.1)
    found = [
        baselines.ours(),
        baselines.rival("sdpa"),
        baselines.rival("fa3"),
        contender("broken", broken),
        contender("wrong", wrong),
    ]
    rows = {row.contender: row for row in runner.run([FORWARD], found)}
    assert rows["peakattn"].speed_known
    assert rows["peakattn"].kernel == "cpu.fwd"
    assert rows["peakattn"].kernel_hash == records.kernel_hash("cpu.fwd")
    assert rows["peakattn"].config is not None
    assert rows["sdpa"].speed_known
    assert rows["fa3"].reason == "FlashAttention-3 needs sm_90; this is cpu."
    assert rows["broken"].reason == "RuntimeError: no such kernel"
    assert str(rows["wrong"].reason).startswith("wrong: out of batch")
    cell = compare.cells(rows.values())[0]
    assert set(cell.rows) == set(rows)
    assert cell.best_rival is rows["sdpa"]
    assert len(rows["peakattn"].samples_us) == len(rows["sdpa"].samples_us) >= timing.MIN_ROUNDS


def test_bench_leaves_out_what_is_done_and_what_is_too_large():
    runner = bench.Bench(torch.device("cpu"), seconds=0.05)
    rows = list(runner.run([FORWARD], [baselines.rival("sdpa")]))
    assert list(runner.run([FORWARD], [baselines.rival("sdpa")], records.done(rows, "cpu"))) == []
    assert len(list(runner.run([FORWARD], [baselines.rival("sdpa"), baselines.rival("fa3")], records.done(rows, "cpu")))) == 2
    huge = problems.make(1 << 20, 128, batch=8, heads=32)
    (row,) = runner.run([huge], [baselines.rival("sdpa")])
    assert "GiB" in str(row.reason)
    with pytest.raises(ValueError, match="allowed are wall"):
        bench.Bench(torch.device("cpu"), 1.0, modes=("kernel",))


def test_tables_show_ratio_and_verdict_against_the_best_rival():
    rows = [record("fa4", 900.0), record("sdpa.flash", 1600.0), record("peakattn", 850.0)]
    header, body = compare.table(compare.cells(rows))
    assert header == ["problem", "peakattn", "sdpa.flash", "fa4", "x best rival", "verdict"]
    assert body[0][-1] == "FASTER"
    assert body[0][-2].startswith("1.059")
    mean = compare.geometric_mean(compare.cells(rows), "peakattn")
    assert mean is not None
    assert mean[0] == pytest.approx(900 / 850, rel=2e-3)
    assert mean[1] == 1


def test_several_kernels_of_ours_have_their_ratios_behind_their_speeds():
    rows = [record("peakattn:cute.fwd_sm90", 850.0), record("peakattn:triton.fwd", 1800.0), record("fa4", 900.0)]
    header, body = compare.table(compare.cells(rows))
    assert header == ["problem", "cute.fwd_sm90", "triton.fwd", "fa4"]
    assert body[0][1].endswith(" (1.06 x)")
    assert body[0][2].endswith(" (0.50 x)")
    assert "x" not in body[0][3]


def test_a_red_gate_prints_no_speed():
    red = records.Gate(passed=False, message="out errs by 1.0; allowed is 0.1")
    rows = [record("peakattn", 850.0, gate=red), record("fa4", 900.0), record("fa3", 1.0, gate=red)]
    cells = compare.cells(rows)
    header, body = compare.table(cells)
    assert dict(zip(header, body[0], strict=True)) | {"problem": "", "fa4": ""} == {
        "problem": "",
        "peakattn": "WRONG",
        "fa3": "WRONG",
        "fa4": "",
        "x best rival": "",
        "verdict": "",
    }
    assert cells[0].best_rival is rows[1]
    assert compare.geometric_mean(cells, "peakattn") is None
    assert any("out errs by 1.0" in note for note in compare.notes(cells))


def test_only_rows_of_one_run_are_compared():
    first, second = record("fa4", 900.0), record("peakattn", 850.0)
    second.provenance.run = "another"
    (cell,) = compare.cells([first, second])
    assert set(cell.rows) == {"peakattn"}


def test_small_rates_are_shown_in_gflops_and_host_times_in_microseconds():
    assert compare.unit(compare.cells([record("sdpa", 1e9)]))[0] == "GFLOP/s"
    assert compare.unit(compare.cells([record("sdpa", 20.0, mode="host")]))[0] == "us"


def test_observer_keeps_readings_apart_and_sums_them_up():
    now = [0.0]
    values = iter(range(1000, 2000, 100))
    watcher = observe.Observer(lambda: {"sm_mhz": next(values), "throttle": observe.reasons(0x4)}, clock=lambda: now[0])
    for _ in range(10):
        watcher.read()
        now[0] += 0.03  # faster than readings are taken
    assert watcher.summary() == {"readings": 5, "sm_mhz": [1000, 1200, 1400], "throttle": ["power cap"]}
    assert watcher.summary() == {}
    assert observe.Observer(None).summary() == {}


def test_host_cost_names_the_floor_and_the_ratios():
    rows, reasons = hostcost.measure(
        torch.device("cpu"), [baselines.ours(), baselines.rival("sdpa"), baselines.rival("fa3")], loops=2
    )
    assert [(r.kind, r.contender) for r in rows][:3] == [
        ("inference", "floor"),
        ("inference", "peakattn"),
        ("inference", "sdpa"),
    ]
    assert {r.kind for r in rows} == set(hostcost.KINDS)
    assert "fa3" in reasons
    assert all(r.best_us <= r.median_us for r in rows)
    header, body = hostcost.table(rows)
    assert len(header) == len(body[0])
    assert records.HostRecord.model_validate_json(hostcost.to_records(rows, CPU)[0].model_dump_json()).contender == "floor"
