"""autotune() and the store: what is tuned and when, that the winner deserves it, and that a stored row still counts."""

from __future__ import annotations

import ast
import concurrent.futures
import dataclasses
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import peakattn
from peakattn import AttentionProblem, Device, dispatch, plan, race, reference, store, trial, tuned
from peakattn.backends import KERNELS, load, sources
from peakattn.device import CPU

autotuning = importlib.import_module("peakattn.autotune")  # the package's own name for it is the function
fwd = importlib.import_module("peakattn.backends.cpu.fwd")

DEFAULT = {"block_m": 256, "block_n": 512}
OTHER = {"block_m": 128, "block_n": 512}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty store, and no plan from before or for after."""
    folder = tmp_path / "store"
    monkeypatch.setenv("PEAKATTN_STORE", str(folder))
    monkeypatch.setattr(store, "_unsaved", {})
    autotuning._forget_plans()
    yield folder
    autotuning._forget_plans()


def inputs(seqlen: int = 64, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, seqlen, heads, 16, **options) for heads in (4, 2, 2))
    return q, k, v


def pace(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[dict[str, Any]], float]) -> list[dict[str, Any]]:
    """Timing that depends on the config alone; gives the configs that are timed, as they come."""
    timed: list[dict[str, Any]] = []
    prepare = trial._Trial.prepare

    def fake(self: trial._Trial, candidate: trial.Candidate) -> Any:
        found = prepare(self, candidate)
        timed.append(candidate.fields)
        sampler = None if found.sampler is None else lambda: lambda: seconds(candidate.fields)
        return dataclasses.replace(found, sampler=sampler)

    monkeypatch.setattr(trial._Trial, "prepare", fake)
    return timed


def only_128_is_fast(config: dict[str, Any]) -> float:
    return 1e-3 if config["block_m"] == 128 else 2e-3


def row(config: dict[str, Any], speedup: tuple[float, float, float] | None = (1.0, 1.0, 1.0), **values: Any) -> store.Measured:
    now = {"kernel": "cpu.fwd", "kernel_hash": sources.kernel_hash("cpu.fwd"), "compiler": f"torch {torch.__version__}"}
    return store.Measured(**{**now, "config": config, "problem": "p", "time": "2026-11-29", "speedup": speedup, **values})


def stored(*rows: store.Measured) -> AttentionProblem:
    problem = AttentionProblem.of(*inputs())
    store.save(CPU.slug, store.Tuning(CPU.name, problem.key(), rows))
    return problem


# The race.


def run(speeds: list[Callable[[int], float]], seconds: float = 1e9, per_round: float = 1.0) -> list[race.Lane]:
    """A race of calls that take ``speeds[i](round)`` seconds."""
    counts = [0] * len(speeds)
    now = iter(range(10**6))

    def sampler(i: int) -> race.Sampler:
        def sample() -> Callable[[], float]:
            counts[i] += 1
            return lambda: speeds[i](counts[i])

        return sample

    return race.run([sampler(i) for i in range(len(speeds))], seconds, clock=lambda: next(now) * per_round)


def test_a_race_ends_when_one_is_separated_and_losers_leave_it() -> None:
    lanes = run([lambda n: 1.0 + 0.01 * (n % 3), lambda n: 2.0, lambda n: 0.5 + 0.01 * (n % 2), lambda n: 0.8])
    assert race.winner([lane.speedup for lane in lanes]) == 2
    assert len(lanes[1].seconds) == race.MIN_ROUNDS
    assert len(lanes[0].seconds) <= 2 * race.MIN_ROUNDS


def test_drift_that_meets_everybody_does_not_decide() -> None:
    """Clocks fall by half during the race; in absolute time the first rounds of the slower call beat the last of the faster."""
    lanes = run([lambda n: 1.0 + 0.1 * n, lambda n: 0.98 * (1.0 + 0.1 * n)])
    assert lanes[1].speedup == pytest.approx((1 / 0.98,) * 3)
    assert race.winner([lane.speedup for lane in lanes]) == 1


def test_noise_is_a_tie_and_the_first_wins() -> None:
    lanes = run([lambda n: 1.0, lambda n: 0.97 + 0.05 * (n % 2)], seconds=40)
    assert len(lanes[0].seconds) >= 40, "it went on for as long as it might"
    speedups = [lane.speedup for lane in lanes]
    assert race.winner(speedups) == 0
    assert race.is_tied(speedups, 0)


@pytest.mark.parametrize(
    ("speedups", "index"),
    [
        ([(1, 1, 1)], 0),
        ([(1, 1, 1), (1.2, 0.99, 1.4)], 0),  # perhaps faster is not enough
        ([(1, 1, 1), (1.1, 1.05, 1.15), (1.12, 1.06, 1.18)], 1),  # tied: the earlier one
        ([(1, 1, 1), (1.1, 1.05, 1.11), (1.2, 1.15, 1.25)], 2),
        ([(1, 1, 1), (1.01, 0.9, 1.3), (1.2, 1.15, 1.25)], 2),  # as fast as the fastest, perhaps, but perhaps slow
        ([(0.9, 0.8, 1.0), (0.98, 0.95, 1.3), (1.5, 1.4, 1.6)], 2),  # the first need not be the anchor
    ],
)
def test_the_winner_is_surely_faster_than_the_first(speedups: Any, index: int) -> None:
    assert race.winner(speedups) == index


# Tuning inside a call.


def test_nothing_is_tuned_outside_the_block(kept: Path) -> None:
    peakattn.attention(*inputs())
    assert plan.before_choosing is None
    assert not kept.exists()


def test_a_new_shape_is_tuned_once_and_remembered(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = pace(monkeypatch, only_128_is_fast)
    q, k, v = inputs()
    with peakattn.autotune(configs=4) as report:
        out = peakattn.attention(q, k, v)
        assert len(timed) == 4
        assert timed[0] == DEFAULT
        peakattn.attention(q, k, v)
        peakattn.attention(*inputs(63))  # another length of the same class
    assert len(timed) == 4
    assert len(report.tunings) == 1
    assert report.seconds > 0
    assert "2.000 x the default" in str(report)
    exact, low = (reference.attention(q, k, v, dtype=dtype)[0] for dtype in (torch.float64, torch.float32))
    reference.check(out, exact, low)
    assert "stored config (block_m=128, block_n=512)" in peakattn.explain(q, k, v)
    assert plan.before_choosing is None
    with peakattn.autotune() as report:
        peakattn.attention(q, k, v)
    assert str(report) == "nothing was tuned"


def test_only_what_is_out_of_date_is_timed_again(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = pace(monkeypatch, only_128_is_fast)
    q, k, v = inputs()
    with peakattn.autotune(configs=4):
        peakattn.attention(q, k, v)
    [path] = kept.rglob("*.json")
    data = json.loads(path.read_text())
    [old] = [one for one in data["measured"] if one["config"] == OTHER]
    old["compiler"] = "an older one"
    path.write_text(json.dumps(data))
    timed.clear()
    with peakattn.autotune(configs=4):
        peakattn.attention(q, k, v)
    assert timed == [DEFAULT, OTHER]
    assert len(json.loads(path.read_text())["measured"]) == 4
    assert "stored config (block_m=128, block_n=512)" in peakattn.explain(q, k, v)


def test_another_process_uses_the_winner_and_tunes_nothing(kept: Path) -> None:
    stored(row(DEFAULT), row(OTHER, (1.5, 1.4, 1.6)))
    code = """
import torch, peakattn
torch.set_num_threads(1)
q, k = torch.randn(1, 64, 4, 16), torch.randn(1, 64, 2, 16)
with peakattn.autotune() as report:
    peakattn.attention(q, k, k)
print(report, peakattn.explain(q, k, k))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "nothing was tuned" in done.stdout
    assert "cpu.fwd with stored config (block_m=128, block_n=512)" in done.stdout


def test_a_hot_call_asks_no_store(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(row(DEFAULT), row(OTHER, (1.5, 1.4, 1.6)))
    q, k, v = inputs()
    peakattn.attention(q, k, v)
    monkeypatch.setattr(store, "lookup", None)
    peakattn.attention(q, k, v)


def test_choosing_times_nothing(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "measure", None)
    with peakattn.autotune():
        assert dispatch.choose(AttentionProblem.of(*inputs()), CPU).config_source == "default"


def test_a_backward_is_tuned_with_its_own_scale_and_is_right(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of a backward is made for tensors of a call with any scale; tuning must neither fail on that nor keep it."""
    pace(monkeypatch, only_128_is_fast)
    q, k, v = (x.requires_grad_() for x in inputs())
    options: dict[str, Any] = {"causal": True, "window_size": (20, 0), "softmax_scale": 0.9, "softcap": 5.0}
    with peakattn.autotune(configs=3) as report:
        out, lse = peakattn.attention(q, k, v, return_lse=True, **options)
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        grads = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    assert [rows[0].kernel for rows, _ in report.tunings] == ["cpu.fwd", "cpu.bwd"]
    assert not [r.reason for rows, _ in report.tunings for r in rows if r.reason]
    exact, low = (
        reference.attention_backward(q, k, v, dout, dlse, dtype=dtype, **options) for dtype in (torch.float64, torch.float32)
    )
    for grad, want, rough in zip(grads, exact, low, strict=True):
        reference.check(grad, want, rough)


def test_traced_calls_are_tuned_too(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = pace(monkeypatch, only_128_is_fast)
    with peakattn.autotune(configs=2):
        torch.ops.peakattn.attention_fwd(*inputs())
    assert len(timed) == 2


def test_a_given_config_is_not_tuned(kept: Path) -> None:
    with peakattn.autotune() as report:
        peakattn.attention(*inputs(), config=OTHER)
    assert not report.tunings


def test_nothing_is_tuned_under_graph_capture(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(trial, "measure", None)
    problem = dataclasses.replace(AttentionProblem.of(*inputs()), device_type="cuda")
    with peakattn.autotune() as report:
        assert plan.before_choosing is not None
        plan.before_choosing(problem, Device.named("h200"), None, inputs())
    assert not report.tunings


def test_a_fast_wrong_config_and_one_that_raises_are_rows_with_a_reason(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pace(monkeypatch, lambda config: 1e-3 if config != DEFAULT else 2e-3)
    prepare = fwd.prepare

    def broken(problem: AttentionProblem, config: Any, *tensors: Any) -> Any:
        if config.block_n == 256:
            raise RuntimeError("no memory\nat all")
        right = prepare(problem, config, *tensors)

        def launch(*args: Any) -> None:
            right(*args)
            args[3][-1, -1, -1, -1] += 1.0

        return launch if config.block_m == 128 else right

    monkeypatch.setattr(fwd, "prepare", broken)
    with peakattn.autotune(configs=5) as report:
        peakattn.attention(*inputs())
    [(rows, _)] = report.tunings
    reasons = {(r.config["block_m"], r.config["block_n"]): r.reason for r in rows}
    assert reasons[128, 512].startswith("AssertionError: out ")
    assert reasons[256, 256] == "RuntimeError: no memory"
    assert "(block_m=256, block_n=1024)" in peakattn.explain(*inputs()), "the first of those that are fast and right"


def test_a_default_that_fails_gives_its_place_to_the_next(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(problem: AttentionProblem, config: Any, *tensors: Any) -> Any:
        if config.block_m == 256:
            raise RuntimeError("no")
        return lambda *args: fwd.launch(problem, config, *args)

    monkeypatch.setattr(fwd, "prepare", fails)
    with peakattn.autotune(configs=2, seconds=0.0) as report:
        peakattn.attention(*inputs())
    [(rows, _)] = report.tunings
    assert [r.config for r in rows] == [OTHER, DEFAULT]
    assert rows[0].speedup == (1.0, 1.0, 1.0)
    assert rows[1].speedup is None


def test_the_shortlist_begins_with_the_default_and_goes_outwards(kept: Path) -> None:
    found = [c.fields for c in autotuning.shortlist(AttentionProblem.of(*inputs()), CPU, None, 6)]
    assert found[0] == DEFAULT
    assert all(sum(config[name] != DEFAULT[name] for name in config) == 1 for config in found[1:])
    everything = autotuning.shortlist(AttentionProblem.of(*inputs()), CPU, None, 100)
    assert len({c.name for c in everything}) == len(everything) == 16


def test_the_shortlist_has_the_default_of_every_kernel_that_takes_the_problem(kept: Path) -> None:
    """On a GPU that need not be here: another backend's kernel competes without a line about it."""
    h200 = Device.named("h200")
    q, k, v = (torch.empty(4, 4096, 16, 128, dtype=torch.bfloat16, device="meta") for _ in range(3))
    problem = dataclasses.replace(AttentionProblem.of(q, k, v, causal=True), device_type="cuda")
    found = autotuning.shortlist(problem, h200, None, 8)
    plain = dispatch.choose(problem, h200, stored=False)
    assert found[0] == trial.Candidate(plain.kernel_id, plain.config)
    for kernel_id in autotuning.takers(problem, h200, None):
        assert trial.Candidate(kernel_id, load(kernel_id).default_config(problem, h200)) in found


@pytest.mark.gpu
def test_a_gpu_is_tuned_both_ways_and_never_under_capture(kept: Path) -> None:
    q, k, v = (torch.randn(2, 1024, 4, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3))
    with torch.no_grad():
        peakattn.attention(q, k, v, causal=True)
        graph = torch.cuda.CUDAGraph()
        with peakattn.autotune(configs=3, seconds=0.5) as report, torch.cuda.graph(graph):
            peakattn.attention(q, k, v, causal=True)
    assert not report.tunings
    with peakattn.autotune(configs=3, seconds=0.5) as report:
        out = peakattn.attention(q, k, v, causal=True)
        out.sum().backward()
    assert [rows[0].problem[:3] for rows, _ in report.tunings] == ["fwd", "bwd"]
    for rows, _ in report.tunings:
        assert len(rows) == 3
        assert rows[0].mode == "events"
        assert rows[0].us is not None
        assert rows[0].us > 1
    assert "stored config" in peakattn.explain(q, k, v, causal=True)
    exact, low = (reference.attention(q, k, v, dtype=dtype, causal=True)[0] for dtype in (torch.float64, torch.bfloat16))
    reference.check(out, exact, low)


@pytest.mark.parametrize(("configs", "seconds"), [(0, 1.0), (4, -1.0)])
def test_nonsense_is_refused_in_a_sentence(configs: int, seconds: float) -> None:
    with pytest.raises(ValueError, match="allowed are 1 and up"), peakattn.autotune(configs, seconds):
        pass


# The store.


def test_given_comes_before_stored_before_tuned_before_default(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = AttentionProblem.of(*inputs())
    assert dispatch.choose(problem, CPU).config_source == "default"
    entry = tuned.Entry("cpu.fwd", {}, {"block_m": 64, "block_n": 64}, {"date": "today"})
    monkeypatch.setattr(tuned, "lookup", lambda device, problem, kernel=None: entry)
    assert dispatch.choose(problem, CPU).config_source == "tuned"
    stored(row(DEFAULT), row(OTHER, (1.5, 1.4, 1.6)))
    choice = dispatch.choose(problem, CPU)
    assert (choice.config_source, choice.config.block_m) == ("stored", 128)
    assert dispatch.choose(problem, CPU, config={"block_m": 32, "block_n": 32}).config_source == "given"
    assert dispatch.choose(problem, CPU, stored=False).config_source == "tuned"


@pytest.mark.parametrize(
    ("spoilt", "reason"),
    [
        ({"kernel_hash": "0" * 16}, "the sources of cpu.fwd have changed since it was measured; tune it again"),
        ({"compiler": "torch 1.0"}, "it was measured with torch 1.0, and this is torch"),
        ({"config": {"block_m": -1, "block_n": 64}}, "is illegal"),
        ({"config": {"tile": 64}}, "is illegal"),
    ],
)
def test_a_row_that_no_longer_counts_is_passed_over_with_the_reason(kept: Path, spoilt: Any, reason: str) -> None:
    stored(
        row(DEFAULT),
        row({"block_m": 64, "block_n": 128}, (1.1, 1.05, 1.2)),
        row(**{"config": OTHER, "speedup": (2, 2, 2), **spoilt}),
    )
    said = peakattn.explain(*inputs())
    assert "with stored config (block_m=64, block_n=128)" in said
    assert f"refused: stored cpu.fwd: {reason}" in said or reason in said


def test_rows_that_were_held_against_a_default_that_is_gone_do_not_count(kept: Path) -> None:
    stored(row(DEFAULT, kernel="gone.fwd"), row(OTHER, (2.0, 1.9, 2.1)))
    said = peakattn.explain(*inputs())
    assert "default config" in said
    assert "gone.fwd is not a kernel of this version" in said


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 2}', '{"schema": 1, "device": "cpu", "key": {}, "measured": []}'])
def test_a_damaged_file_is_passed_over_with_the_reason(kept: Path, text: str) -> None:
    problem = stored(row(DEFAULT))
    [path] = kept.rglob("*.json")
    path.write_text(text)
    assert dispatch.choose(problem, CPU).config_source == "default"
    assert "tune again" in peakattn.explain(*inputs())
    with peakattn.autotune(configs=1, seconds=0.0):
        peakattn.attention(*inputs())
    assert json.loads(path.read_text())["measured"][0]["config"] == DEFAULT


def test_only_what_is_new_is_replaced_when_rows_are_added(kept: Path) -> None:
    problem = stored(row(DEFAULT), row(OTHER, (1.5, 1.4, 1.6)))
    new = {"block_m": 64, "block_n": 128}
    found = store.add(CPU, problem.key(), [row(DEFAULT), row(new, (1.1, 1.0, 1.2))])
    assert [r.config for r in found.measured] == [DEFAULT, OTHER, new]
    found = store.add(CPU, problem.key(), [row(OTHER), row(new, (1.1, 1.0, 1.2))])
    assert [r.config for r in found.measured] == [OTHER, new], "rows of another anchor cannot be ranked with these"
    assert store.read(CPU, problem.key()) == found


@pytest.mark.parametrize("where", ["off", "a file"])
def test_without_a_place_for_files_the_process_remembers(kept: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    if where == "a file":
        kept.write_text("in the way")
        where = str(kept)
    monkeypatch.setenv("PEAKATTN_STORE", where)
    problem = stored(row(DEFAULT), row(OTHER, (1.5, 1.4, 1.6)))
    assert dispatch.choose(problem, CPU).config_source == "stored"
    assert not list(kept.glob("*/*"))
    store._unsaved.clear()
    assert dispatch.choose(problem, CPU).config_source == "default"


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PEAKATTN_STORE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.folder() == tmp_path / "peakattn" / "store"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.folder() == Path.home() / ".cache" / "peakattn" / "store"
    monkeypatch.setenv("PEAKATTN_STORE", "OFF")
    assert store.folder() is None


def test_readers_and_writers_never_meet_half_a_file(kept: Path) -> None:
    problem = stored(row(DEFAULT))
    rows = [row({"block_m": 32 * i, "block_n": 64}, (1.1, 1.0, 1.2)) for i in range(1, 60)]

    def write(start: int) -> None:
        for one in rows[start::3]:
            store.add(CPU, problem.key(), [row(DEFAULT), one])

    def read() -> int:
        return sum(len(found.measured) > 0 for found in (store.read(CPU, problem.key()) for _ in range(100)) if found)

    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        writing = [pool.submit(write, start) for start in range(3)]
        reading = [pool.submit(read) for _ in range(2)]
        assert [done.result() for done in reading] == [100, 100]
        for done in writing:
            done.result()
    assert [p.suffix for p in kept.rglob("*.*")] == [".json"]


def test_every_shape_class_has_its_own_file(kept: Path) -> None:
    key = AttentionProblem.of(*inputs()).key()
    others = [{**key, name: value} for name, value in (("group", 4), ("softcap", True), ("aligned", False), ("head_dim_v", 8))]
    assert len({store._name("cpu", k) for k in (key, *others)}) == 5


# Kernel sources.


@pytest.mark.parametrize("kernel_id", KERNELS)
def test_the_sources_of_a_kernel_are_what_its_syntax_trees_import(kernel_id: str) -> None:
    """They are found by a pattern, because parsing takes longer than all else that a process does before its first launch."""
    package = KERNELS[kernel_id].rpartition(".")[0]
    files = {path for path in sources.kernel_sources(kernel_id) if path.suffix == ".py"}
    wanted = {KERNELS[kernel_id].rpartition(".")[2]}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == package:
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module == "peakattn.backends":
                wanted |= {alias.name for alias in node.names if alias.name == "tiles"}
            elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{package}."):
                wanted.add(node.module.removeprefix(f"{package}."))
            elif isinstance(node, ast.Import):
                wanted |= {a.name.removeprefix(f"{package}.") for a in node.names if a.name.startswith(f"{package}.")}
    assert {path.stem for path in files} == wanted
