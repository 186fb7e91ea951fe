"""Sweeps: the grid, workers that are lost, rows for every fate, resuming, predictions, heatmaps. Times are made up."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import time
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from typer.testing import CliRunner

from peakattn import backends
from peakattn.device import CPU, Device
from peakattn.problem import Direction
from peakattn_lab import cli, problems, records, workers
from peakattn_lab.records import FunctionFacts, SweepRecord
from peakattn_lab.sweep import budget, heatmap, measure, predict
from peakattn_lab.sweep import jobs as sweep_jobs
from peakattn_lab.sweep import tables as sweeptables
from peakattn_lab.sweep.grid import Candidate, candidates, code_class, from_both_ends, source_problems
from peakattn_lab.sweep.jobs import Compiled, CompileJob, MeasureJob, Measurement
from peakattn_lab.sweep.run import Sweep

HOPPER = Device.named("h200")
PROBLEMS = [problems.make(n, 64, batch=4, heads=8) for n in (1024, 4096)]
KNOBS: dict[str, list[Any]] = {
    "num_warps": [4],
    "num_stages": [2, 3],
    "tma": [False],
    "q_registers": [False],
    "overlap": [False],
}
FACTS = FunctionFacts(
    name="attention_fwd_kernel",
    registers=128,
    frame_bytes=0,
    shared_bytes=32768,
    num_threads=128,
    spills=0,
    loop_spills=0,
    tensor_core=16,
    instruction="HGMMA",
    mufu=64,
    blocks=4,
    limiter="registers",
    loop={"tensor core": 16, "MUFU": 64, "float": 200},
    waste=1.0,
)


# Stand-ins for compilers and GPUs.


def compile_many(jobs, processes, stop):
    """Tiles of 16 keys do not compile, those of 32 take too much shared memory."""
    for job in jobs:
        if job.config["block_n"] == 16:
            yield Compiled(job, error="does not compile: ptxas gave up.")
        elif job.config["block_n"] == 32:
            yield Compiled(job, (FACTS.model_copy(update={"shared_bytes": 10**6}),), 1.0)
        else:
            yield Compiled(job, (FACTS,), 1.0)


def microseconds(config):
    return 10000 / config["block_m"] + config["block_n"] / 100 + config["num_stages"]


FATES: dict[tuple[int, int], Any] = {(16, 64): "wrong", (16, 128): "crashed", (32, 64): "hung", (32, 128): "failed"}


class Worker:
    """Every kind of end, by the config; ``jobs`` are what all workers were asked."""

    jobs: ClassVar[list[MeasureJob]] = []

    def __init__(self, torch_device):
        assert torch_device == "cuda"

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def measure(self, job, timeout):
        self.jobs.append(job)
        return [self._one(config) for config in job.configs]

    def _one(self, config):
        fate = FATES.get((config["block_m"], config["block_n"]))
        if fate is not None:
            return Measurement(config, fate, "a sentence.")
        us = microseconds(config)
        return Measurement(config, "ok", "checked", tuple(us + 0.001 * i for i in range(8)), 4)


@pytest.fixture
def runner(monkeypatch):
    Worker.jobs.clear()
    runner = Sweep("triton.fwd", HOPPER, torch.device("cuda"), compile_many=compile_many, worker=Worker)
    monkeypatch.setattr(runner, "_observe", dict)
    return runner


def grid(knobs=KNOBS, found=PROBLEMS):
    return [c for p in found for c in candidates("triton.fwd", p, HOPPER, "space", knobs)]


# The grid.


def test_the_grid_starts_with_the_default_and_has_each_config_once():
    kernel = backends.load("triton.fwd")
    found = candidates("triton.fwd", PROBLEMS[1], HOPPER)
    assert found[0].config == dataclasses.asdict(kernel.default_config(PROBLEMS[1], HOPPER))
    configs = [json.dumps(c.config) for c in found]
    assert len(set(configs)) == len(configs)
    space = {json.dumps(dataclasses.asdict(c)) for c in kernel.search_space(PROBLEMS[1], HOPPER)}
    assert space <= set(configs)


def test_knobs_restrict_the_grid_and_extend_it():
    found = candidates("triton.fwd", PROBLEMS[1], HOPPER, "space", {**KNOBS, "block_m": [64, 256], "block_n": [24, 64]})
    assert {(c.config["block_m"], c.config["block_n"]) for c in found} == {(64, 24), (64, 64), (256, 24), (256, 64)}
    assert all("block_n is 24" in str(c.reason) for c in found if c.config["block_n"] == 24)  # illegal, and a row all the same
    with pytest.raises(ValueError, match="no knob 'tile'; its knobs are block_m"):
        candidates("triton.fwd", PROBLEMS[1], HOPPER, "space", {"tile": [1]})


def test_the_grid_of_the_source_needs_its_knobs():
    with pytest.raises(ValueError, match=r"num_warps; triton\.fwd_sm90 has block_m"):
        candidates("triton.fwd_sm90", PROBLEMS[1], HOPPER, "source")


def test_lengths_share_code_unless_the_compiler_sees_a_difference():
    def classes(*found):
        config = {"block_m": 64, "block_n": 64}
        return len({code_class(Candidate(p, config)) for p in found})

    assert classes(problems.make(2048, 64), problems.make(4096, 64)) == 1
    assert classes(problems.make(2048, 64), problems.make(2048, 64, causal=True)) == 2  # a mask
    assert classes(problems.make(2048, 64), problems.make(2000, 64)) == 2  # a tile that is cut
    assert classes(problems.make(64, 64), problems.make(2048, 64, batch=2, heads=3)) == 1  # no matter how many tiles and heads
    assert classes(problems.make(64, 40, heads=2), problems.make(64, 40, heads=3)) == 2  # a stride that is a multiple of 16
    assert classes(problems.make(64, 64, window=(60, 0)), problems.make(64, 64, window=(64, 0))) == 2  # an edge that cuts none
    assert classes(*source_problems()) == 2


@pytest.mark.parametrize("kernel_id", ["triton.fwd", "triton.fwd_sm90", "triton.bwd"])
def test_triton_makes_one_code_of_a_class(kernel_id, monkeypatch):
    pytest.importorskip("triton")
    toolchain, kernel = backends.toolchain("triton"), backends.load(kernel_id)
    monkeypatch.setattr(toolchain, "_compiled", {})
    monkeypatch.setattr(toolchain, "_compile", lambda launch, backend, *seen: (launch.fn, repr(seen), repr(launch.options)))
    codes: dict[Any, set[Any]] = {}
    direction: Direction = "bwd" if kernel_id == "triton.bwd" else "fwd"
    lengths, heads = ((1, 1), (17, 17), (512, 512), (4096, 4096), (64, 1000)), ((1, 1), (3, 3), (8, 8), (6, 2))
    windows = ((None, None), (None, 0), (100, 0))
    for seqlens, head_dim, batch, pair, window in itertools.product(lengths, (40, 64), (1, 2), heads, windows):
        problem = problems.make(seqlens, head_dim, batch=batch, heads=pair, window=window, direction=direction)
        config = kernel.default_config(problem, HOPPER)
        found = [toolchain.compile_launch(one, 90) for one in toolchain.launches_of(kernel, problem, config)]
        codes.setdefault(code_class(Candidate(problem, dataclasses.asdict(config))), set()).add(tuple(found))
    assert {len(found) for found in codes.values()} == {1}


def test_heavy_configs_are_compiled_neither_first_nor_last():
    found = [[Candidate(PROBLEMS[0], {}, None, budget.Estimate(registers=r))] for r in (90, 50, 10, 40, 20, 30)]
    assert [m[0].estimate.registers for m in from_both_ends(found)] == [90, 10, 50, 20, 40, 30]


# Sweeping.


def test_whatever_becomes_of_a_config_is_a_row(runner):
    found = grid()
    rows = list(runner.run(found))
    first = [r for r in rows if r.stage != "final"]
    assert len(first) == len(found)
    assert {r.key for r in first} == {runner._record(c, "static", "compiled").key for c in found}
    assert {r.status for r in first} == {"ok", "pruned", "uncompiled", "wrong", "crashed", "hung", "failed"}
    for row in first:
        assert (row.reason is None) == (row.status == "ok")
        assert row.speed_known == (row.status == "ok") == bool(row.samples_us)
    assert any("1000000 bytes of shared memory" in str(r.reason) for r in first if r.status == "pruned")
    assert str(next(r for r in first if r.status == "uncompiled").reason).endswith("ptxas gave up.")


def test_finalists_are_timed_side_by_side_and_the_slow_ones_stop_early(runner):
    rows = list(runner.run(grid()))
    finals = [r for r in rows if r.stage == "final"]
    assert {r.problem["seqlen_q"] for r in finals} == {1024, 4096}
    side_by_side = [job for job in Worker.jobs if len(job.configs) > 1]
    assert len(side_by_side) == 2
    fastest = min(microseconds(r.config) for r in rows if r.status == "ok")
    assert all(r.interval_us[0] <= 1.05 * (fastest + 0.01) for r in finals)
    limits = [job.stop_above_us for job in Worker.jobs if len(job.configs) == 1]
    assert limits[0] is None
    assert min(x for x in limits if x is not None) == pytest.approx(fastest, abs=0.01)


def test_a_sweep_goes_on_where_it_was_stopped(runner, tmp_path):
    path = tmp_path / "sweep.jsonl"
    whole = len(list(runner.run(grid())))
    for row in itertools.islice(runner.run(grid()), 10):
        records.append(path, row)
    asked = len(Worker.jobs)
    before = records.read_as(SweepRecord, path)
    rest = list(runner.run(grid(), before))
    assert len(before) + len(rest) == whole
    assert not {r.key for r in before} & {r.key for r in rest if r.stage != "final"}
    assert list(runner.run(grid(), before + rest)) == []
    assert len(Worker.jobs) > asked


def test_a_changed_kernel_or_compiler_is_swept_again(runner, monkeypatch):
    rows = list(runner.run(grid()))
    monkeypatch.setattr(records, "kernel_hash", lambda kernel: "another")
    assert len(list(runner.run(grid(), rows))) == len(rows)
    monkeypatch.undo()
    runner.compiler = "triton 99"
    assert len([r for r in runner.run(grid(), rows) if r.stage != "final"]) == len(grid())


def test_without_a_gpu_the_model_predicts():
    runner = Sweep("triton.fwd", HOPPER, compile_many=compile_many)
    rows = list(runner.run(grid()))
    assert {r.status for r in rows} == {"compiled", "pruned", "uncompiled"}
    assert all((r.predicted_us or 0) > 0 for r in rows if r.status == "compiled")
    assert list(runner.run(grid(), rows)) == []  # a static sweep resumes, too
    again = Sweep("triton.fwd", HOPPER, torch.device("cuda"), compile_many=compile_many, worker=Worker)
    assert not any(again._is_current(r) for r in rows if r.status == "compiled")  # and does not count as measured


def test_an_error_of_the_compile_thread_is_not_lost(runner):
    def broken(jobs, processes, stop):
        yield from compile_many(list(jobs)[:1], processes, stop)
        raise RuntimeError("no more processes")

    runner.compile_many = broken
    with pytest.raises(RuntimeError, match="no more processes"):
        list(runner.run(grid()))


def test_a_worker_that_is_lost_among_finalists_takes_no_times_away(runner):
    class Unlucky(Worker):
        def measure(self, job, timeout):
            if len(job.configs) > 1:
                return [Measurement(config, "crashed", "a sentence.") for config in job.configs]
            return super().measure(job, timeout)

    runner.worker = Unlucky
    rows = list(runner.run(grid()))
    assert not [r for r in rows if r.stage == "final"]
    assert all(sweeptables.fastest(members)[0].speed_known for members in predict.by_problem(rows).values())


# Real processes.


def moody():
    def job(mood):
        if mood == "exit":
            os._exit(3)
        if mood == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if mood == "hang":
            time.sleep(60)
        if mood == "error":
            raise ValueError("first line\nsecond line")
        if mood == "spoilt":
            raise workers.SpoiltError("the context is gone")
        return os.getpid()

    return job


def test_a_lost_worker_costs_one_job():
    with workers.Worker(moody) as worker:
        first = worker.call("work", 60).value
        assert worker.call("work", 60).value == first
        assert worker.call("error", 60) == workers.Outcome("failed", message="ValueError: first line")
        assert worker.call("work", 60).value == first  # an error it can catch does not end it
        for mood, status, word in (
            ("exit", "crashed", "exit code 3"),
            ("segfault", "crashed", "SIGSEGV"),
            ("spoilt", "failed", "the context is gone"),
        ):
            before = worker.call("work", 60).value
            outcome = worker.call(mood, 60)
            assert (outcome.status, word in outcome.message) == (status, True)
            assert worker.call("work", 60).value != before
        assert worker.call("hang", 0.3).status == "hung"
        assert worker.call("work", 60).status == "done"


def broken_setup():
    raise ImportError("no such library")


def test_a_worker_that_cannot_start_says_why():
    with measure.MeasuringWorker("cpu", setup=broken_setup) as worker:
        [one] = worker.measure(MeasureJob("cpu.fwd", PROBLEMS[0], ({"block_m": 64},)), timeout=60)
    assert one.status == "failed"
    assert "no such library" in one.message


def crashing_compiler():
    def compiled(job):
        if job.config["block_m"] == 32:
            os._exit(11)
        return (FACTS,)

    return compiled


def test_a_crash_of_the_compiler_costs_one_config():
    jobs = [CompileJob("triton.fwd", PROBLEMS[0], {"block_m": m}, HOPPER) for m in (16, 32, 64, 128)]
    made = {done.job.config["block_m"]: done for done in sweep_jobs.compile_many(jobs, 2, setup=crashing_compiler)}
    assert {m: done.functions == (FACTS,) for m, done in made.items()} == {16: True, 32: False, 64: True, 128: True}
    assert "exit code 11" in str(made[32].error)


# Measuring, on the CPU and in this process.


def test_what_was_timed_was_checked(monkeypatch):
    problem = problems.on_device(problems.make(64, 32, heads=2, dtype=torch.float32), "cpu")
    kernel = backends.load("cpu.fwd")
    good, bad = (dataclasses.asdict(c) for c in itertools.islice(kernel.search_space(problem, CPU), 2))

    def launch(problem, config, q, k, v, out, lse, scale, softcap):
        kernel.launch(problem, config, q, k, v, out, lse, scale, softcap)
        if dataclasses.asdict(config) == bad:
            out[0, 0, 0, 0] += 1.0

    fake = SimpleNamespace(Config=kernel.Config, reject=kernel.reject, launch=launch)
    monkeypatch.setattr(backends, "load", lambda kernel_id: fake)
    measurer = measure.Measurer("cpu")
    [one] = measurer(MeasureJob("cpu.fwd", problem, (good,), seconds=0.0))
    assert one.status == "ok"
    assert len(one.samples_us) >= 6
    both = measurer(MeasureJob("cpu.fwd", problem, (good, bad), seconds=0.01))
    assert [m.status for m in both] == ["ok", "wrong"]
    assert both[1].samples_us == ()
    assert "errs by" in both[1].message


def test_a_backward_is_measured_too():
    problem = problems.on_device(problems.make(64, 32, heads=2, dtype=torch.float32, direction="bwd"), "cpu")
    config = dataclasses.asdict(backends.load("cpu.bwd").default_config(problem, CPU))
    [one] = measure.Measurer("cpu")(MeasureJob("cpu.bwd", problem, (config,), seconds=0.0))
    assert (one.status, one.message[:10]) == ("ok", "dq, dk, dv")


def test_a_config_that_the_kernel_refuses_is_a_sentence():
    problem = problems.on_device(problems.make(64, 32, heads=2), "cpu")
    [one] = measure.Measurer("cpu")(MeasureJob("cpu.fwd", problem, ({"block_m": -1, "block_n": 64},)))
    assert one.status == "failed"
    assert "block_m" in one.message


@pytest.mark.parametrize(("us", "samples"), [(350.0, 1), (150.0, 3), (105.0, 6), (90.0, 6)])
def test_a_slow_config_gets_few_samples(us, samples):
    class Fixed(measure.Bound):
        def __call__(self):
            return lambda: us / 1e6

    bound = Fixed([], [], cuda=False)
    bound.first = us / 1e6
    assert len(measure.screen(bound, 100e-6, 0.0, lambda: None)) == samples
    assert sum(measure.screen(bound, None, 2e-3, lambda: None)) >= 2e-3


# Prediction.


def rows_of(times):
    """Rows of one problem by {(block_m, block_n): (measured, instructions in the loop)}; more instructions are slower."""
    base = Sweep("triton.fwd", HOPPER, compile_many=compile_many)
    found = []
    for (m, n), (us, instructions) in times.items():
        config = {"block_m": m, "block_n": n, "num_warps": 4, "num_stages": 2}
        facts = FACTS.model_copy(update={"loop": {**FACTS.loop, "float": instructions}})
        made = Compiled(CompileJob("triton.fwd", PROBLEMS[0], config, HOPPER), (facts,), 1.0)
        found.append(base._record(Candidate(PROBLEMS[0], config), "screen", "ok", made, samples_us=[us] * 6))
    return found


def test_a_pause_of_the_host_does_not_cost_a_config_its_chance():
    class Paused(measure.Bound):
        """Ten microseconds a call, but for one that the host interrupts."""

        def __init__(self) -> None:
            super().__init__([lambda: None], [], cuda=True)
            self.taken = 0

        def __call__(self):
            self.taken += 1
            return lambda taken=self.taken: 5e-3 if taken == 2 else 10e-6

    bound = Paused()
    bound.settle(lambda: None)
    assert bound.first == 5e-3
    samples = measure.screen(bound, 10e-6, 0.0, lambda: None)
    assert len(samples) == 6
    assert max(samples) == 10e-6
    assert bound.calls_per_sample > 1


def test_a_right_prediction_is_a_hit_and_a_reversed_one_is_none():
    tiles = [(64, n) for n in (16, 32, 64, 128)]
    right = rows_of({tile: (100.0 + 50 * i, 2000 * (i + 1) * tile[1] // 16) for i, tile in enumerate(tiles)})
    [hit] = predict.hits(right)
    assert (hit.hit, hit.measured, hit.winners, hit.lost) == (True, 4, 1, 0.0)
    assert hit.correlation == pytest.approx(1.0)
    wrong = rows_of({tile: (300.0 - 50 * i, 2000 * (i + 1) * tile[1] // 16) for i, tile in enumerate(tiles)})
    [miss] = predict.hits(wrong)
    assert not miss.hit
    assert miss.lost == pytest.approx(1.0)
    assert miss.correlation == pytest.approx(-1.0)
    assert predict.hit_table([hit, miss])[1][-1][4] == "50%"


def test_the_model_charges_for_waste_spills_and_few_blocks():
    config, problem = {"block_m": 64, "block_n": 64}, PROBLEMS[1]

    def us(**changes):
        return predict.predicted_us("triton.fwd", problem, config, [FACTS.model_copy(update=changes)], HOPPER)

    assert us(waste=2.0) > us()
    assert us(loop={**FACTS.loop, "local memory": 100}) > us()
    assert us(blocks=1) > us()
    assert us(instruction="HMMA") > us()
    assert us(loop={}) is None


def test_the_model_knows_what_loads_and_other_blocks_hide():
    """A tile that is not asked for ahead of its use is waited for; warps of one block wait together, blocks do not."""

    def us(stages: int, **changes: Any) -> float:
        config = {"block_m": 64, "block_n": 64, "num_stages": stages}
        found = predict.predicted_us("triton.fwd", PROBLEMS[1], config, [FACTS.model_copy(update=changes)], HOPPER)
        assert found is not None
        return found

    assert us(1) > us(2) >= us(3) == us(4)
    full = problems.make(4096, 64, batch=4, heads=8)
    wide = {"block_m": 128, "block_n": 64, "num_stages": 3}

    def alone(blocks: int, threads: int) -> float:
        facts = FACTS.model_copy(update={"blocks": blocks, "num_threads": threads})
        return predict.predicted_us("triton.fwd", full, wide, [facts], HOPPER) or 0.0

    assert alone(2, 128) < alone(1, 256), "as many warps, in two blocks and in one"


def test_a_causal_problem_has_half_the_tiles():
    assert predict.visible_tiles(problems.make(1024, 64), 64, 64) == 16 * 16
    assert predict.visible_tiles(problems.make(1024, 64, causal=True), 64, 64) == 16 * 17 // 2
    assert predict.visible_tiles(problems.make(1024, 64, causal=True), 128, 32) == sum(4 * (i + 1) for i in range(8))


def test_the_last_row_of_a_config_counts_but_never_over_a_final_time():
    [screen] = rows_of({(64, 64): (100.0, 10)})
    final = screen.model_copy(update={"stage": "final", "samples_us": [90.0] * 6})
    changed = screen.model_copy(update={"kernel_hash": "another"})
    for order, kept in (([screen, final], final), ([final, screen], final), ([final, changed], changed)):
        assert list(predict.by_problem(order).values()) == [[kept]]


# What is shown.


def test_a_heatmap_shows_the_best_over_the_other_knobs(tmp_path):
    rows = rows_of({(64, 64): (100.0, 10), (64, 128): (80.0, 10), (128, 64): (50.0, 10)})
    slower = rows[2].model_copy(update={"config": {**rows[2].config, "num_stages": 3}, "samples_us": [70.0] * 6})
    pruned = rows[0].model_copy(update={"status": "pruned", "config": {**rows[0].config, "block_m": 256}, "samples_us": []})
    [panel] = heatmap.panels([*rows, slower, pruned], ("block_m", "block_n"))
    assert panel.values == ((64, 128, 256), (64, 128))
    assert panel.cells[1][0] == panel.best == rows[2]
    assert panel.cells[1][1] is None
    assert panel.cells[2] == (None, None)
    assert panel.rates[1][0] == pytest.approx(PROBLEMS[0].flops / 50.0 / 1e6)
    with pytest.raises(ValueError, match="no knob 'tile'"):
        heatmap.panels(rows, ("block_m", "tile"))
    file = tmp_path / "heat.png"
    heatmap.draw([panel], file, "title", "stamp")
    assert file.read_bytes().startswith(b"\x89PNG")
    assert heatmap.terminal(panel).row_count == 3


def test_the_tables_say_what_became_of_each_config(runner):
    rows = list(runner.run(grid()))
    header, body = sweeptables.summary_table(rows)
    for line in body:
        assert sum(map(int, line[1:-2])) == len(grid()) / 2
    assert {"wrong", "crashed", "hung"} <= set(header)
    _, winners = sweeptables.winners_table(rows)
    assert winners[0][4] == "+0.0%"
    assert any(line.startswith("2 hung") or " hung, such as" in line for line in sweeptables.reasons(rows))


# The command.


def run(*arguments, code=0):
    result = CliRunner().invoke(cli.app, ["sweep", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_a_static_sweep_for_real(tmp_path):
    """Two configs of one problem, by the compiler, in processes of their own."""
    if backends.toolchain("triton").unavailable():
        pytest.skip("Triton is not installed")
    path = tmp_path / "sweep.jsonl"
    options = ["triton.fwd", "--device", "h200", "--grid", "source", "--seqlen", 512, "--only", "full", "--out", path]
    options += ["--knob", "block_m=64", "--knob", "block_n=32", "--knob", "num_warps=4", "--knob", "num_stages=2,3"]
    said = run(*options, "--budget", "--plot", tmp_path / "heat.png")
    assert "2 of 2 compilations have the formula's shared memory to the byte" in said
    rows = records.read_as(SweepRecord, path)
    assert [r.status for r in rows] == ["compiled", "compiled"]
    for row in rows:
        [one] = row.functions
        assert one.instruction == "HGMMA"
        assert one.shared_bytes == row.shared_estimate
        assert (one.spills, (row.compile_seconds or 0) > 0, (row.predicted_us or 0) > 0) == (0, True, True)
    assert sorted(p.name for p in tmp_path.glob("*.png")) == ["heat_block_m_block_n.png", "heat_num_warps_num_stages.png"]
    assert run(*options, "--resume").count("compiled") >= 1
    assert len(records.read_as(SweepRecord, path)) == 2
    assert "compiled" in run("--show", path)
    assert "sweep on a GPU first" in run("--hit-rate", path, code=2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "sweep takes a kernel id"),
        (["triton.none", "--device", "h200"], "kernel 'triton.none' is unknown"),
        (["triton.fwd", "--device", "h200", "--knob", "block_m"], "knob is 'block_m'; write NAME=VALUE"),
        (["triton.fwd", "--device", "h200", "--only", "d512"], "has all the words 'd512'"),
        (["triton.fwd", "--device", "h200", "--grid", "all"], "grid is 'all'; allowed are space, source"),
        (["--show", "nothing.jsonl"], "there is no file nothing.jsonl"),
    ],
)
def test_mistakes_are_sentences(arguments, sentence):
    assert sentence in " ".join(run(*arguments, code=2).split())
