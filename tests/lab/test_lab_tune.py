"""peakattn tune: heats and finals, what is timed again and what is not, lost workers, and the store as a table and a file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lab.records_of import record
from peakattn import dispatch, race, store, tuned
from peakattn.backends import sources
from peakattn.device import CPU
from peakattn.trial import Candidate
from peakattn_lab import problems, records, workers
from peakattn_lab.cli import app
from peakattn_lab.tune import cost as tunecost
from peakattn_lab.tune import stored
from peakattn_lab.tune import tuner as tune
from peakattn_lab.tune.racer import Raced, RaceJob, Racer

PROBLEM = problems.on_device(problems.make(64, 16, heads=2, dtype=torch.float32), "cpu")
DEFAULT = {"block_m": 256, "block_n": 512}
BEST = {"block_m": 512, "block_n": 1024}  # the last of the search space


class FakeWorker:
    """Does RaceJobs by a table of speeds; keeps the jobs. ``status`` may end a config, or the worker, instead."""

    def __init__(self, seconds: Callable[[dict[str, Any]], float], status: Callable[[dict[str, Any]], str] = lambda c: "ok"):
        self.seconds, self.status = seconds, status
        self.jobs: list[RaceJob] = []

    def call(self, job: RaceJob, timeout: float) -> workers.Outcome:
        self.jobs.append(job)
        statuses = [self.status(config) for _, config in job.candidates]
        if "crashed" in statuses:
            return workers.Outcome("crashed", message="the worker process was ended by signal 11 (SIGSEGV)")
        anchor = self.seconds(job.candidates[0][1])
        found = []
        for (_, config), status in zip(job.candidates, statuses, strict=True):
            own = self.seconds(config)
            lane = race.Lane([own] * 8, [anchor / own] * 8)
            found.append(Raced(status, "said", lane if status == "ok" else None, 0.5, 0.25))  # type: ignore[arg-type]
        return workers.Outcome("done", found)

    def close(self) -> None:
        pass

    @property
    def timed(self) -> list[list[dict[str, Any]]]:
        return [[config for _, config in job.candidates] for job in self.jobs]


def only_the_last_is_fast(config: dict[str, Any]) -> float:
    return 1e-3 if config == BEST else 2e-3


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEAKATTN_STORE", str(tmp_path / "store"))
    monkeypatch.setattr(store, "_unsaved", {})
    return tmp_path


def tuner(kept: Path, worker: FakeWorker, **options: Any) -> tune.Tuner:
    return tune.Tuner(torch.device("cpu"), kept / "tune.jsonl", worker=worker, **options)


def winner(rows: list[store.Measured]) -> dict[str, Any]:
    timed = [row for row in rows if row.speedup is not None]
    return timed[race.winner([row.speedup for row in timed if row.speedup is not None])].config


def test_the_whole_space_runs_in_heats_with_the_default_and_the_best_meet_in_finals(kept: Path) -> None:
    worker = FakeWorker(only_the_last_is_fast)
    one = tuner(kept, worker, finalists=3)
    rows = one.tune(PROBLEM)
    assert all(job[0] == DEFAULT for job in worker.timed)
    assert max(map(len, worker.timed)) <= tune.HEAT
    assert len(rows) == 16
    assert winner(rows) == BEST
    assert BEST in worker.timed[-1]
    assert len(worker.timed[-1]) <= 4
    choice = dispatch.choose(PROBLEM, CPU)
    assert (choice.config_source, dataclasses.asdict(choice.config)) == ("stored", BEST)
    written = records.read_as(tune.TuneRecord, kept / "tune.jsonl")
    assert len(written) == sum(map(len, worker.timed))
    assert one.compile_seconds == 0.5 * len(written)
    assert {row.final for row in written} == {True, False}
    assert written[-1].anchor["config"] == DEFAULT
    assert records.kind_of(json.loads((kept / "tune.jsonl").read_text().splitlines()[0])) == "tune"


def test_a_second_run_times_nothing(kept: Path) -> None:
    tuner(kept, FakeWorker(only_the_last_is_fast)).tune(PROBLEM)
    worker = FakeWorker(only_the_last_is_fast)
    rows = tuner(kept, worker).tune(PROBLEM)
    assert worker.jobs == []
    assert winner(rows) == BEST
    again = FakeWorker(only_the_last_is_fast)
    tuner(kept, again, again=True).tune(PROBLEM)
    assert len({json.dumps(config) for job in again.timed for config in job}) == 16


def test_an_interrupted_run_goes_on_where_it_stopped(kept: Path) -> None:
    worker = FakeWorker(only_the_last_is_fast)
    call = worker.call

    def interrupted(job: RaceJob, timeout: float) -> workers.Outcome:
        if len(worker.jobs) == 2:
            raise KeyboardInterrupt
        return call(job, timeout)

    worker.call = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        tuner(kept, worker).tune(PROBLEM)
    before = [config for job in worker.timed for config in job[1:]]
    rest = FakeWorker(only_the_last_is_fast)
    rows = tuner(kept, rest, finalists=2).tune(PROBLEM)
    heats = [config for job in rest.timed[:-1] for config in job[1:]]
    assert before
    assert not [config for config in heats if config in before]
    assert winner(rows) == BEST


def test_a_config_that_is_added_is_all_that_is_timed(kept: Path) -> None:
    fwd = dispatch.choose(PROBLEM, CPU).kernel
    some = [Candidate("cpu.fwd", fwd.Config(64, n)) for n in (128, 256)]
    tuner(kept, FakeWorker(only_the_last_is_fast), finalists=1).tune(PROBLEM, None, some)
    worker = FakeWorker(only_the_last_is_fast)
    new = Candidate("cpu.fwd", fwd.Config(**BEST))
    rows = tuner(kept, worker, finalists=1).tune(PROBLEM, None, [*some, new])
    assert worker.timed == [[DEFAULT, BEST]]
    assert len(rows) == 4
    assert winner(rows) == BEST


def test_when_the_kernel_changes_everything_is_timed_again(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner(kept, FakeWorker(only_the_last_is_fast)).tune(PROBLEM)
    monkeypatch.setattr(sources, "kernel_hash", lambda kernel_id: "changed")
    assert dispatch.choose(PROBLEM, CPU).config_source == "default"
    worker = FakeWorker(only_the_last_is_fast)
    tuner(kept, worker).tune(PROBLEM)
    assert len({json.dumps(config) for job in worker.timed for config in job}) == 16


def test_the_default_stands_unless_something_is_surely_faster(kept: Path) -> None:
    worker = FakeWorker(lambda config: 2e-3 if config == DEFAULT else 3e-3)
    assert winner(tuner(kept, worker).tune(PROBLEM)) == DEFAULT
    assert dataclasses.asdict(dispatch.choose(PROBLEM, CPU).config) == DEFAULT


def test_a_crash_costs_one_config_and_a_wrong_one_never_wins(kept: Path) -> None:
    crashing, wrong = {"block_m": 64, "block_n": 128}, {"block_m": 64, "block_n": 256}
    status = {json.dumps(crashing): "crashed", json.dumps(wrong): "wrong"}
    worker = FakeWorker(
        lambda c: 1e-4 if c in (crashing, wrong) else only_the_last_is_fast(c), lambda c: status.get(json.dumps(c), "ok")
    )
    rows = tuner(kept, worker).tune(PROBLEM)
    assert winner(rows) == BEST
    reasons = {json.dumps(row.config): row.reason for row in rows if row.reason}
    assert set(reasons) == set(status)
    assert "SIGSEGV" in reasons[json.dumps(crashing)]
    resumed = FakeWorker(only_the_last_is_fast)
    tuner(kept, resumed).tune(PROBLEM)
    assert resumed.jobs == [], "what failed is remembered, too"


def test_a_default_that_fails_is_an_error_in_a_sentence(kept: Path) -> None:
    worker = FakeWorker(only_the_last_is_fast, lambda config: "wrong" if config == DEFAULT else "ok")
    with pytest.raises(RuntimeError, match=r"cpu.fwd wrong under its own default.*peakattn bench"):
        tuner(kept, worker).tune(PROBLEM)


def test_the_worker_checks_times_and_reports_for_real() -> None:
    """In this process: two configs of the CPU kernel, one that its Config refuses."""
    found = Racer("cpu")(
        RaceJob(PROBLEM, (("cpu.fwd", DEFAULT), ("cpu.fwd", BEST), ("cpu.fwd", {"block_m": -1, "block_n": 1})), 0.0)
    )
    assert [one.status for one in found] == ["ok", "ok", "failed"]
    assert found[0].lane is not None
    assert found[0].lane.speedup == (1.0, 1.0, 1.0)
    assert "within the error budget" in found[1].message
    assert found[2].lane is None


def test_finalists_come_from_a_sweep_of_the_kernel_that_is_here(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    base = record("x", 1.0)
    for block_m, us, kernel_hash in ((64, 30.0, None), (128, 10.0, None), (256, 20.0, None), (512, 1.0, "old")):
        row = records.SweepRecord(
            provenance=base.provenance,
            problem=problems.to_dict(PROBLEM),
            kernel="cpu.fwd",
            kernel_hash=kernel_hash or sources.kernel_hash("cpu.fwd"),
            compiler="torch",
            config={"block_m": block_m, "block_n": 128},
            stage="screen",
            status="ok",
            samples_us=[us] * 3,
        )
        records.append(path, row)
    found = tune.from_sweep(path, PROBLEM, "cpu.fwd", 2)
    assert [candidate.fields["block_m"] for candidate in found] == [128, 256]
    other = dataclasses.replace(PROBLEM, seqlen_q=128)
    with pytest.raises(ValueError, match=r"no measured row of cpu.fwd on .* run peakattn sweep"):
        tune.from_sweep(path, other, "cpu.fwd", 2)


# The store for people.


def test_a_winner_is_exported_with_its_evidence_in_the_shipped_format(kept: Path) -> None:
    tuner(kept, FakeWorker(only_the_last_is_fast)).tune(PROBLEM)
    path = kept / "cpu.json"
    other = {"kernel": "cpu.fwd", "key": {"head_dim": 8}, "config": DEFAULT, "evidence": {"date": "before"}}
    path.write_text(json.dumps({"schema": 1, "device": "cpu", "entries": [other]}))
    for _ in range(2):  # the second replaces the first
        said = stored.export(path, CPU)
        assert said == [f"1 of 2 entries written to {path}"]
    first, new = tuned.parse(path.read_text(), "cpu.json")
    assert first.evidence == {"date": "before"}
    assert (new.kernel, new.config, new.key) == ("cpu.fwd", BEST, PROBLEM.key())
    assert {"date", "record", "tflops", "compiler", "kernel_hash", "beat"} <= set(new.evidence)
    assert "by 2.000 [2.000, 2.000], of 16 configs" in new.evidence["beat"]
    with pytest.raises(ValueError, match="is of cpu, and what is to be exported is of"):
        stored.export(path, dataclasses.replace(CPU, name="another"))


def test_what_has_no_evidence_or_no_gain_is_not_exported(kept: Path) -> None:
    rows = tuner(kept, FakeWorker(only_the_last_is_fast)).tune(PROBLEM)
    store.save("cpu", store.Tuning("cpu", PROBLEM.key(), tuple(dataclasses.replace(row, record="") for row in rows)))
    assert "no record; run peakattn tune" in stored.export(kept / "cpu.json", CPU)[0]
    store.save("cpu", store.Tuning("cpu", PROBLEM.key(), tuple(rows[:1])))
    assert "the default stands" in stored.export(kept / "cpu.json", CPU)[0]
    assert not (kept / "cpu.json").exists()


def test_stores_of_two_machines_are_merged_row_by_row(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuner(kept, FakeWorker(only_the_last_is_fast)).tune(PROBLEM)
    monkeypatch.setenv("PEAKATTN_STORE", str(kept / "mine"))
    later = dataclasses.replace(rows[1], us=1.0, time="2100-01-01")
    store.save("cpu", store.Tuning("cpu", PROBLEM.key(), (rows[0], later)))
    assert "14 configs taken" in stored.merge(kept / "store")[0]
    merged = store.read(CPU, PROBLEM.key())
    assert merged is not None
    assert merged.measured[1] == later
    assert len(merged.measured) == 16
    assert "nothing new" in stored.merge(kept / "store")[0]
    stale = tuple(dataclasses.replace(row, kernel_hash="old") for row in rows)
    store.save("cpu", store.Tuning("cpu", PROBLEM.key(), stale))
    assert "taken for ours, because the sources of cpu.fwd have changed" in stored.merge(kept / "store")[0]
    with pytest.raises(ValueError, match="neither a file nor a folder of a store"):
        stored.merge(kept / "nowhere")


def test_the_table_says_what_still_counts_and_stale_files_can_be_forgotten(kept: Path) -> None:
    rows = tuner(kept, FakeWorker(only_the_last_is_fast)).tune(PROBLEM)
    old = dataclasses.replace(PROBLEM, seqlen_q=128, seqlen_k=128)
    store.save("cpu", store.Tuning("cpu", old.key(), tuple(dataclasses.replace(row, kernel_hash="old") for row in rows)))
    (kept / "store" / "cpu" / "damaged-1.json").write_text("{")
    states = [row[-1] for row in stored.table(stored.matching())[1]]
    assert states[0].endswith("Remove it and tune again.")
    assert "have changed" in states[1]
    assert states[2] == "separated"
    assert len(stored.matching(["fwd", "128"])) == 1
    assert len(stored.details(stored.matching(["fwd", "64"])[0][1])[1]) == 16  # type: ignore[arg-type]
    assert len(stored.forget(stored.matching(), stale_only=True)) == 2
    assert len(stored.matching()) == 1


# The command.


def test_the_command_tunes_the_cpu_kernel_for_real(kept: Path) -> None:
    def run(*words: str) -> str:
        result = CliRunner().invoke(app, ["tune", *words])
        assert result.exit_code == 0, result.output
        return result.output

    out = ["--out", str(kept / "tune.jsonl"), "--device", "cpu"]
    said = run("cpu.fwd", "--set", "smoke", "--configs", "3", "--seconds", "0.1", *out)
    assert "fwd f32 d32 full 128" in said
    assert "bwd" not in said
    rows = records.read_as(tune.TuneRecord, kept / "tune.jsonl")
    assert {row.config["block_m"] for row in rows} >= {256}
    assert all(row.speedup is not None for row in rows)
    assert "fwd-float32-32-full-128-128" in run("--show")
    assert "timed by" in run("--show", "--only", "fwd")
    assert "cpu" in run("--export", str(kept / "cpu.json"), "--gpu", "cpu")
    assert "nothing new in it" in run("--merge", str(kept / "store"))
    assert "removed" in run("--forget", "all")
    assert "nothing in it" in run("--show")
    result = CliRunner().invoke(app, ["tune", "cpu.fwd", "--set", "smoke", "--only", "d64"])
    assert result.exit_code == 2


def test_the_cost_study_goes_through_every_state_in_fresh_processes() -> None:
    ran = []

    def program(configs: int, device: str, cache: Path, kept: str) -> dict[str, Any]:
        ran.append((configs, cache, kept))
        again = ran.count((configs, cache, kept)) > 1
        first = 0.1 if kept == "off" or again else 0.1 + configs
        return {"calls": [first, 0.1, 0.1], "compile_seconds": 2.0 * configs, "timing_seconds": 1.0}

    costs = list(tunecost.study((1, 4), "cpu", program=program))
    assert [(c.configs, c.state) for c in costs] == [
        *((0, state) for state in ("cold", "warm")),
        *((n, state) for n in (1, 4) for state in ("cold", "warm", "second")),
    ]
    assert len({cache for _, cache, _ in ran}) == 3
    assert len({kept for n, _, kept in ran if n == 4}) == 2, "the warm run has a store of its own"
    assert len(tunecost.table(costs)[1]) == 8
    notes = tunecost.notes(costs)
    assert len(notes) == 2
    assert all("+0 ms" in note and "within the 50 ms" in note for note in notes)


def test_the_program_of_the_cost_study_really_tunes(kept: Path) -> None:
    found = tunecost._program(1, "cpu", kept / "cache", str(kept / "store"))
    assert len(found["calls"]) == 5
    assert found["timing_seconds"] > 0
    assert len(list((kept / "store").rglob("*.json"))) == 5


def test_an_interrupted_cost_study_shows_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def study(*args: Any, **options: Any) -> Iterator[tunecost.Cost]:
        yield tunecost.Cost(0, "cold", (1.25,), 0.0, 0.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(tunecost, "study", study)
    result = CliRunner().invoke(app, ["tune", "--cost", "--device", "cpu"])
    assert result.exit_code != 0
    assert "1.250" in result.output
