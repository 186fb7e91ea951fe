"""Statistics, verdicts and the interleaved loop, with clocks and samplers that are made up."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from peakattn_lab import timing


def test_interval_holds_the_median_as_often_as_it_says():
    rng = random.Random(1)
    held = 0
    for _ in range(2000):
        low, high = timing.interval([rng.expovariate(1.0) for _ in range(25)])
        held += low <= 0.6931 <= high
    assert held / 2000 > 0.94


@pytest.mark.parametrize("n", [1, 2, 5, 6, 7, 100])
def test_interval_is_ordered_and_contains_the_median(n):
    samples = [float(i) for i in range(n)]
    low, high = timing.interval(samples)
    assert low <= statistics.median(samples) <= high
    if n <= 6:
        assert (low, high) == (0.0, n - 1.0)


@pytest.mark.parametrize(
    ("factor", "noise", "verdict"),
    [
        (1.10, 0.01, "FASTER"),
        (0.90, 0.01, "SLOWER"),
        (1.001, 0.0005, "SAME"),
        (1.01, 0.20, "UNCLEAR"),  # the interval holds 1: no win, and too wide to call it the same
    ],
)
def test_verdicts(factor, noise, verdict):
    rng = random.Random(3)
    ours = [1 + noise * rng.uniform(-1, 1) for _ in range(40)]
    other = [factor * (1 + noise * rng.uniform(-1, 1)) for _ in range(40)]
    assert timing.compare(ours, other).verdict == verdict


def test_drift_that_hits_both_alike_does_not_hide_a_difference():
    drift = [1 + 0.05 * i for i in range(30)]
    assert timing.compare(drift, [1.02 * d for d in drift]).verdict == "FASTER"


def test_few_rounds_are_unclear_and_unpaired_ones_are_refused():
    assert timing.compare([1.0] * 5, [2.0] * 5).verdict == "UNCLEAR"
    with pytest.raises(ValueError, match="cannot be paired"):
        timing.compare([1.0], [1.0, 2.0])


def made_up(clock: list[float], cost: float) -> timing.Sampler:
    def sample() -> Callable[[], float]:
        clock[0] += cost
        return lambda: cost

    return sample


def test_interleave_throws_the_warm_up_away_and_stops_on_time():
    clock, finished, observed = [0.0], [], []
    samplers = {"a": made_up(clock, 0.010), "b": made_up(clock, 0.015)}
    samples = timing.interleave(
        samplers,
        0.5,
        finish=lambda: finished.append(1),
        on_round=lambda: observed.append(1),
        clock=lambda: clock[0],
    )
    assert len(samples["a"]) == len(samples["b"]) == len(observed)
    assert 14 <= len(samples["a"]) <= 16  # three quarters of 0.5 s, at 25 ms a round
    assert 4 <= len(finished) - len(observed) <= 6
    assert set(samples["a"]) == {0.010}


def test_interleave_takes_enough_rounds_of_slow_calls_and_stops_early_when_quiet():
    clock = [0.0]
    assert len(timing.interleave({"slow": made_up(clock, 9.0)}, 1.0, clock=lambda: clock[0])["slow"]) == timing.MIN_ROUNDS
    clock = [0.0]
    samples = timing.interleave({"quiet": made_up(clock, 0.001)}, 60.0, clock=lambda: clock[0])
    assert len(samples["quiet"]) == 40


@pytest.mark.parametrize("rounds", [2, 100])
def test_a_given_number_of_rounds_is_kept_whatever_the_time(rounds):
    clock = [0.0]
    samples = timing.interleave({"quiet": made_up(clock, 0.5)}, 10.0, clock=lambda: clock[0], rounds=rounds)
    assert len(samples["quiet"]) == rounds
    assert clock[0] == pytest.approx(0.5 * (5 + rounds)), "and a quarter of the time before them"


def test_input_sets_exceed_the_l2_cache():
    assert timing.input_sets(200 << 20, 60 << 20) == 2
    assert timing.input_sets(10 << 20, 60 << 20) * (10 << 20) > 2 * (60 << 20)
    assert timing.input_sets(0, 60 << 20) == 64


def test_wall_and_host_samplers_give_seconds_per_call():
    calls: list[int] = []
    seconds = timing.wall_sampler([lambda: calls.append(1)])()()
    assert 0 < seconds < 1e-3
    waited: list[int] = []
    sample = timing.host_sampler([lambda: calls.append(2)], lambda: waited.append(1))
    assert 0 < sample()() < 1e-2
    assert waited == [1]


class FakeDriver:
    """The CUDA driver's answers about a graph of two kernels, a memset between them, and the second kernel again."""

    def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> int:
        count._obj.value = 4
        if nodes is not None:
            nodes[:] = [11, 12, 13, 14]
        return 0

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        kind._obj.value = 2 if node.value == 12 else 0
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: Any, params: Any) -> int:
        if node.value == 11:
            params._obj.function = 21  # a function of a module
        else:
            params._obj.kernel = 22  # a kernel of a library
        return 0

    def cuFuncGetName(self, name: Any, function: Any) -> int:
        assert function.value == 21
        name._obj.value = b"attention_fwd_kernel"
        return 0

    def cuKernelGetName(self, name: Any, kernel: Any) -> int:
        assert kernel.value == 22
        name._obj.value = b"_ZN5flash11fwd_kernelEv"
        return 0


def test_the_kernels_of_a_graph_are_named_once_each():
    driver = FakeDriver()
    assert timing.graph_kernels(7, driver) == ["attention_fwd_kernel", "_ZN5flash11fwd_kernelEv"]
    driver.cuFuncGetName = lambda name, function: 1  # type: ignore[method-assign]
    assert timing.graph_kernels(7, driver) == []
    assert timing.graph_kernels(7, object()) == []


class FakeCuda:
    """As much of torch.cuda as a graph sampler touches: every call takes one millisecond of device time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.recording = 0.0, None
        fake = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.time = 0.0

            def record(self) -> None:
                self.time = fake.now

            def elapsed_time(self, end: Event) -> float:
                return end.time - self.time

        class Graph:
            calls = 0
            ready = False

            def __init__(self, keep_graph: bool) -> None:
                assert keep_graph

            def raw_cuda_graph(self) -> int:
                return 7

            def instantiate(self) -> None:
                self.ready = True

            def replay(self) -> None:
                assert self.ready
                fake.now += self.calls

        class Capture:
            def __init__(self, graph: Graph, stream: Any, capture_error_mode: str) -> None:
                self.graph = graph

            def __enter__(self) -> None:
                fake.recording = self.graph

            def __exit__(self, *error: object) -> None:
                fake.recording = None

        class Stream:
            def synchronize(self) -> None: ...

        for name, value in (("Event", Event), ("CUDAGraph", Graph), ("graph", Capture), ("current_stream", Stream)):
            monkeypatch.setattr(timing.torch.cuda, name, value)

    def call(self, result: str) -> Callable[[], str]:
        def run() -> str:
            if self.recording is None:
                self.now += 1.0
            else:
                self.recording.calls += 1
            return result

        return run


def test_graph_sampler_rotates_through_the_inputs_and_keeps_the_outputs(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(timing, "graph_kernels", lambda graph: [f"kernel of {graph}"])
    sampler = timing.GraphSampler([cuda.call("a"), cuda.call("b"), cuda.call("c")])
    assert sampler.calls == 3
    assert sampler.outputs == ["a", "b", "c"]
    assert sampler.kernels == ["kernel of 7"]
    assert sampler()() == pytest.approx(1e-3)


def test_eager_sampler_overwrites_the_cache_outside_the_timed_span(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    sample = timing.eager_sampler([cuda.call("a")], cuda.call("flush"))
    assert sample()() == pytest.approx(1e-3)
    assert cuda.now == 2.0


def test_loops_are_interleaved_and_the_first_is_not_kept():
    order: list[str] = []
    held = contextlib.nullcontext
    samples = timing.time_loops(
        {"a": (lambda: order.append("a"), held), "b": (lambda: order.append("b"), held)}, lambda: None, loops=2, repeats=3
    )
    assert [len(s) for s in samples.values()] == [2, 2]
    assert "".join(order) == "aaabbb" * 3


def test_contexts_are_entered_outside_the_timed_span():
    @contextlib.contextmanager
    def slow():
        time.sleep(0.05)
        yield

    for sampler in (timing.wall_sampler([lambda: None], slow), timing.host_sampler([lambda: None], lambda: None, slow)):
        assert sampler()() < 0.01
