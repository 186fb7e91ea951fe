"""Two record files against each other: verdicts, ratios that cancel drift, rows without a verdict, caveats, exit codes."""

from __future__ import annotations

import random

import pytest
from typer.testing import CliRunner

from lab.records_of import PROBLEM, record
from peakattn_lab import cli, problems, provenance, records, regress

RED = records.Gate(passed=False, message="out errs at [0, 0, 0, 0]")
OTHER = problems.make(1024, 64, batch=16, heads=32, causal=True)


def run(name, rows):
    """The rows as one run of that name."""
    return [row.model_copy(update={"provenance": row.provenance.model_copy(update={"run": name})}) for row in rows]


def only_case(result, contender="peakattn"):
    (case,) = [case for case in result.cases if case.contender == contender]
    return case


@pytest.mark.parametrize(
    ("us", "verdict", "code"), [(1000.0, "SAME", 0), (1004.0, "SAME", 0), (900.0, "FASTER", 0), (1100.0, "SLOWER", 1)]
)
def test_verdicts_of_absolute_times(us, verdict, code):
    result = regress.compare_runs(run("a", [record("peakattn", 1000.0)]), run("b", [record("peakattn", us, rounds=33)]))
    case = only_case(result)
    assert case.verdict == verdict
    assert case.ratio.ratio == pytest.approx(1000.0 / us, rel=2e-3)
    assert case.ratio.low <= case.ratio.ratio <= case.ratio.high
    assert case.reference is None
    assert result.exit_code() == code
    assert any("absolute times: a drift of clocks" in note for note in result.notes())


def test_a_rival_of_the_same_run_cancels_drift_and_is_named():
    a = run("a", [record("peakattn", 1000.0), record("fa3", 900.0), record("sdpa", 2000.0)])
    b = run("b", [record("peakattn", 1100.0), record("fa3", 990.0), record("sdpa", 2200.0)])
    result = regress.compare_runs(a, b)
    case = only_case(result)
    assert (case.verdict, case.reference) == ("SAME", "fa3")
    assert case.ratio.ratio == pytest.approx(1.0, rel=1e-6)
    assert only_case(result, "fa3").verdict == "SLOWER"  # in absolute times: this is the drift
    assert result.exit_code() == 0  # which fails nothing
    assert any("1 case of peakattn relative to fa3 of the same run" in note for note in result.notes())
    assert only_case(regress.compare_runs(a, b, relative_to="sdpa")).reference == "sdpa"
    absolute = regress.compare_runs(a, b, relative_to="time")
    assert only_case(absolute).verdict == "SLOWER"
    assert absolute.exit_code() == 1


def test_a_loss_against_the_rival_is_seen_through_faster_clocks():
    a = run("a", [record("peakattn", 1000.0), record("fa3", 900.0)])
    b = run("b", [record("peakattn", 1000.0, rounds=50), record("fa3", 810.0, rounds=50)])
    assert only_case(regress.compare_runs(a, b)).verdict == "SLOWER"


@pytest.mark.parametrize(
    "rival",
    [
        {"version": "9.9"},  # another version is another measure
        {"gate": RED},
        {"samples_us": [900.0] * 12},  # not of the same rounds
    ],
)
def test_a_rival_that_is_no_measure_in_b_is_not_used(rival):
    a = run("a", [record("peakattn", 1000.0), record("fa3", 900.0)])
    b = run("b", [record("peakattn", 1000.0), record("fa3", 900.0, **rival)])
    assert only_case(regress.compare_runs(a, b)).reference is None
    assert only_case(regress.compare_runs(a, b, relative_to="fa3")).reference is None


def test_a_rival_that_is_missing_in_one_file_or_unknown():
    a, b = run("a", [record("peakattn", 1.0), record("fa3", 1.0)]), run("b", [record("peakattn", 1.0)])
    result = regress.compare_runs(a, b)
    assert only_case(result).reference is None
    assert only_case(result, "fa3").verdict == "only in A"
    with pytest.raises(ValueError, match="no rival in both files; allowed are auto, time"):
        regress.compare_runs(a, b, relative_to="fa3")


def test_few_samples_are_unclear_and_overlap_is_too():
    few = regress.compare_runs(run("a", [record("peakattn", 1000.0)]), run("b", [record("peakattn", 500.0, rounds=6)]))
    assert only_case(few).verdict == "UNCLEAR"
    assert few.exit_code() == 0
    assert few.exit_code(("SLOWER", "UNCLEAR")) == 1
    noisy = [1000.0 * (1 + 0.1 * (i % 5 - 2)) for i in range(20)]
    wide = regress.compare_runs(run("a", [record("peakattn", 1.0, samples_us=noisy)]), run("b", [record("peakattn", 1010.0)]))
    assert only_case(wide).verdict == "UNCLEAR"
    with pytest.raises(ValueError, match="allowed are SAME, FASTER, SLOWER, UNCLEAR"):
        few.exit_code(("slower",))


@pytest.mark.parametrize(("count_a", "count_b"), [(15, 40), (60, 8)])
def test_equal_speeds_are_rarely_called_different(count_a, count_b):
    draw = random.Random(1)

    def noisy(count):
        return run(
            str(draw.random()), [record("peakattn", 1.0, samples_us=[draw.lognormvariate(7, 0.05) for _ in range(count)])]
        )

    rounds = 60
    found = [only_case(regress.compare_runs(noisy(count_a), noisy(count_b))).ratio for _ in range(rounds)]
    assert sum(ratio.low <= 1 <= ratio.high for ratio in found) >= 0.93 * rounds


def test_no_speed_on_a_red_gate():
    result = regress.compare_runs(run("a", [record("peakattn", 1000.0)]), run("b", [record("peakattn", 123.0, gate=RED)]))
    case = only_case(result)
    assert case.verdict == "WRONG in B"
    assert case.ratio is None
    assert result.exit_code() == 1
    text = str(result.table()) + str(result.notes())
    assert "123" not in text
    assert "in B: wrong: out errs" in text
    mended = regress.compare_runs(run("a", [record("peakattn", 123.0, gate=RED)]), run("b", [record("peakattn", 1000.0)]))
    assert only_case(mended).verdict == "WRONG in A"
    assert mended.exit_code() == 0


def test_a_speed_that_is_gone_fails_and_one_that_never_was_does_not():
    without = record("peakattn", 1.0, samples_us=[], gate=None, skipped="needs sm_90")
    lost = regress.compare_runs(run("a", [record("peakattn", 1.0)]), run("b", [without]))
    assert only_case(lost).verdict == "no speed in B"
    assert lost.exit_code() == 1
    never = regress.compare_runs(run("a", [without]), run("b", [without]))
    assert only_case(never).verdict == "no speed in either"
    assert never.exit_code() == 0


def test_cases_of_one_file_are_listed_and_nothing_in_common_is_an_error():
    a = run("a", [record("peakattn", 1000.0), record("peakattn", 50.0, OTHER)])
    b = run("b", [record("peakattn", 1000.0), record("peakattn", 9.0, mode="host")])
    result = regress.compare_runs(a, b)
    assert [case.verdict for case in result.cases] == ["SAME", "only in A", "only in B"]
    header, rows = result.table()
    assert all(len(row) == len(header) for row in rows)
    assert rows[1][header.index("A us")] == "50.0"
    assert rows[1][header.index("B us")] == ""
    assert result.exit_code() == 0
    for other in ([record("peakattn", 1.0, OTHER)], []):
        with pytest.raises(ValueError, match="no case in common"):
            regress.compare_runs([record("peakattn", 1.0)], other)


def test_conditions_that_differ_are_caveats():
    a = run("a", [record("peakattn", 1000.0)])
    where = a[0].provenance
    other = where.model_copy(
        update={"device": "NVIDIA B200", "driver": "590", "versions": where.versions | {"triton": "9.0", "peakattn": "7"}}
    )
    half = {**problems.to_dict(OTHER), "dtype": "float16"}
    b = [row.model_copy(update={"provenance": other}) for row in (a[0], a[0].model_copy(update={"problem": half}))]
    caveats = regress.compare_runs(a, b).caveats
    assert "caveat: device is NVIDIA H200 in A and NVIDIA B200 in B" in caveats
    assert "caveat: dtype is bfloat16 in A and bfloat16, float16 in B" in caveats
    assert [line.split()[1] for line in caveats] == ["device", "driver", "dtype", "triton"]
    assert regress.compare_runs(a, a).caveats == ()


def test_of_several_runs_in_a_file_the_last_counts():
    a = run("old", [record("peakattn", 5000.0), record("fa3", 1.0)]) + run("new", [record("peakattn", 1000.0)])
    case = only_case(regress.compare_runs(a, run("b", [record("peakattn", 1000.0), record("fa3", 1.0)])))
    assert (case.verdict, case.reference) == ("SAME", None)


def test_tolerance_is_what_counts_as_the_same():
    a, b = run("a", [record("peakattn", 1000.0)]), run("b", [record("peakattn", 1030.0)])
    assert only_case(regress.compare_runs(a, b)).verdict == "SLOWER"
    assert only_case(regress.compare_runs(a, b, tolerance=0.05)).verdict == "SAME"
    with pytest.raises(ValueError, match="0 up to 1"):
        regress.compare_runs(a, b, tolerance=5)


def test_problems_are_matched_whole():
    assert PROBLEM != OTHER
    result = regress.compare_runs([record("peakattn", 1.0), record("peakattn", 2.0, OTHER)], [record("peakattn", 2.0, OTHER)])
    assert [case.verdict for case in result.cases] == ["only in A", "SAME"]


def host(contender, us, kind="inference", loops=15):
    where = provenance.here("NVIDIA H200", 90)
    found = sorted(us * (1 + 0.001 * (i % 5)) for i in range(loops))
    return records.HostRecord(provenance=where, kind=kind, contender=contender, loops_us=found)


def test_the_host_costs_of_two_runs():
    a = [host("peakattn", 99.0), host("peakattn", 10.0), host("floor", 7.0), host("peakattn", 30.0, "training step")]
    b = [host("peakattn", 12.0), host("floor", 7.0), host("sdpa.flash", 20.0)]
    result = regress.compare_hosts(a, b)
    assert [(c.label, c.contender, c.verdict) for c in result.cases] == [
        ("inference", "peakattn", "SLOWER"),  # the last row of a kind counts
        ("inference", "floor", "SAME"),
        ("training step", "peakattn", "only in A"),
        ("inference", "sdpa.flash", "only in B"),
    ]
    assert result.exit_code() == 1
    header, rows = result.table()
    assert dict(zip(header, rows[0], strict=True))["B us"] == "12.0"
    with pytest.raises(ValueError, match="host costs are compared in absolute times"):
        regress.compare_hosts(a, b, relative_to="fa3")
    with pytest.raises(ValueError, match="no case in common"):
        regress.compare_hosts(a, [])


def test_compare_takes_two_files_of_one_kind(tmp_path):
    costs, times = tmp_path / "host.jsonl", tmp_path / "prefill.jsonl"
    records.append(costs, host("peakattn", 10.0))
    records.append(times, record("peakattn", 1000.0))
    runner = CliRunner()
    for path in (costs, times):
        said = runner.invoke(cli.app, ["compare", str(path), str(path)])
        assert said.exit_code == 0, said.output
        assert "SAME" in said.output
    mixed = runner.invoke(cli.app, ["compare", str(costs), str(times)])
    assert mixed.exit_code == 2
    assert "is a host cost, written by peakattn bench --host; what is needed here are measurements" in mixed.output
