"""The timing protocol: contenders interleaved round by round, raw samples kept, medians with an interval, verdicts.

A *sampler* starts one sample and returns a function that gives its seconds per call once the round has finished.
A round takes one sample of every contender, in random order, so that all of them meet the same clocks, power and
temperature.  Rounds before the clocks have settled are thrown away.

Four modes:

``kernel``  device time: a CUDA graph of several calls that rotates through input sets larger than the L2 cache
``eager``   device time between events around one call after the L2 cache was overwritten; contains launch gaps
``host``    wall time of the Python call itself, with the device idle before it
``wall``    wall time of calls on a CPU
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from peakattn.race import Sampler, interval

Mode = Literal["kernel", "eager", "host", "wall"]
MODE_TITLES = {"kernel": "kernel time (CUDA graph)", "eager": "eager, cold L2", "host": "host time", "wall": "wall time"}
Verdict = Literal["SAME", "FASTER", "SLOWER", "UNCLEAR"]
Call = Callable[[], Any]
Held = Callable[[], contextlib.AbstractContextManager[Any]]  # a context that calls need; entered outside the timed span

MIN_ROUNDS = 6  # the fewest samples whose range is a 95 % interval of the median
_QUIET_ROUNDS = 40
_QUIET = 0.002  # stop early once every median is known to 0.2 %
_SAME = 0.005  # a difference that lies within 0.5 % is none
_WARMUP_SHARE = 0.25
_SAMPLE_SECONDS = 1.5e-3  # long against event resolution and graph launch
_MAX_GRAPH_CALLS = 64
_KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL


# Statistics.


@dataclass(frozen=True)
class Comparison:
    """How many times faster ours is than the other, with an interval; above 1 ours is faster."""

    ratio: float
    low: float
    high: float
    verdict: Verdict


def compare(ours: Sequence[float], other: Sequence[float]) -> Comparison:
    """Paired by round: sample i of both was taken side by side. An interval that holds 1 is never called a win."""
    if len(ours) != len(other):
        raise ValueError(f"{len(ours)} samples cannot be paired with {len(other)}; compare samples of one interleaved run.")
    ratios = [b / a for a, b in zip(ours, other, strict=True)]
    low, high = interval(ratios)
    return Comparison(statistics.median(ratios), low, high, _verdict(low, high, len(ratios)))


def _verdict(low: float, high: float, rounds: int) -> Verdict:
    if rounds < MIN_ROUNDS:
        return "UNCLEAR"
    if low >= 1 - _SAME and high <= 1 + _SAME:
        return "SAME"
    if low > 1:
        return "FASTER"
    return "SLOWER" if high < 1 else "UNCLEAR"


# The loop.


def finisher(where: torch.device) -> Callable[[], None]:
    """What waits for a GPU to finish its work; a CPU's is finished when a call returns."""
    return functools.partial(torch.cuda.synchronize, where) if where.type == "cuda" else lambda: None


def interleave(
    samplers: dict[str, Sampler],
    seconds: float,
    *,
    finish: Callable[[], None] = lambda: None,
    on_round: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    rounds: int | None = None,
) -> dict[str, list[float]]:
    """Seconds per call, one sample of every contender a round, until ``seconds`` have passed or the medians are quiet.

    The first quarter of the time settles the clocks and is not kept.  ``finish`` waits for the device at the end of a
    round; ``on_round`` then observes it.  At least ``MIN_ROUNDS`` rounds are kept, however long they take; exactly
    ``rounds`` of them where that is given.
    """
    order = list(samplers)
    shuffle = random.Random(0).shuffle
    samples: dict[str, list[float]] = {name: [] for name in samplers}

    def round_() -> dict[str, float]:
        shuffle(order)
        started = {name: samplers[name]() for name in order}
        finish()
        return {name: resolve() for name, resolve in started.items()}

    began = clock()
    round_()
    while clock() - began < _WARMUP_SHARE * seconds:
        round_()
    while True:
        for name, value in round_().items():
            samples[name].append(value)
        on_round()
        kept = len(samples[order[0]])
        if kept < (rounds or MIN_ROUNDS):
            continue
        if rounds is not None or clock() - began >= seconds:
            return samples
        if kept >= _QUIET_ROUNDS and kept % 8 == 0 and all(map(_is_quiet, samples.values())):
            return samples


def _is_quiet(samples: Sequence[float]) -> bool:
    low, high = interval(samples)
    return high - low <= 2 * _QUIET * statistics.median(samples)


# Samplers.


def wall_sampler(calls: Sequence[Call], held: Held = contextlib.nullcontext) -> Sampler:
    """Wall time on a CPU; short calls are repeated until the clock's resolution does not matter."""
    trials = []
    for _ in range(3):
        with held():
            began = time.perf_counter()
            calls[0]()
            trials.append(time.perf_counter() - began)
    repeats = max(1, min(1000, round(_SAMPLE_SECONDS / max(min(trials), 1e-7))))
    rotation = itertools.cycle(calls)

    def sample() -> Callable[[], float]:
        chosen = [next(rotation) for _ in range(repeats)]
        with held():
            began = time.perf_counter()
            for call in chosen:
                call()
            seconds = (time.perf_counter() - began) / repeats
        return lambda: seconds

    return sample


def host_sampler(calls: Sequence[Call], synchronize: Callable[[], None], held: Held = contextlib.nullcontext) -> Sampler:
    """Wall time of the Python call alone; the device is idle when it starts and is not waited for."""
    rotation = itertools.cycle(calls)

    def sample() -> Callable[[], float]:
        call = next(rotation)
        synchronize()
        with held():
            began = time.perf_counter()
            result = call()
            seconds = time.perf_counter() - began
        del result
        return lambda: seconds

    return sample


def eager_sampler(calls: Sequence[Call], overwrite_l2: Callable[[], Any], held: Held = contextlib.nullcontext) -> Sampler:
    """Device time between two events around one call, the L2 cache overwritten before it."""
    rotation = itertools.cycle(calls)

    def sample() -> Callable[[], float]:
        call = next(rotation)
        start, end = _event(), _event()
        overwrite_l2()
        with held():
            start.record()
            call()
            end.record()
        return lambda: start.elapsed_time(end) / 1e3

    return sample


class GraphSampler:
    """Device time of a CUDA graph of several calls, one after another through the input sets.

    ``outputs[i]`` are what the last call on input set i writes at every replay: the timed outputs.  ``kernels`` are the
    names of the device functions in the graph: what really runs.
    Must be made and used under ``torch.cuda.stream`` of one side stream, on which the calls have already run once.
    """

    def __init__(self, calls: Sequence[Call], held: Held = contextlib.nullcontext) -> None:
        with held():
            self._capture(calls)

    def _capture(self, calls: Sequence[Call]) -> None:
        stream = torch.cuda.current_stream()
        start, end = _event(), _event()
        start.record()
        calls[0]()
        end.record()
        stream.synchronize()
        wanted = math.ceil(_SAMPLE_SECONDS * 1e3 / max(start.elapsed_time(end), 1e-3))
        rounds = math.ceil(min(wanted, _MAX_GRAPH_CALLS) / len(calls))
        self.calls = max(rounds, 1) * len(calls)
        self.outputs: list[Any] = [None] * len(calls)
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)  # to read its nodes
        # A backward launches from autograd's own thread, which the default mode would refuse.
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            for i in range(self.calls):
                self.outputs[i % len(calls)] = None
                self.outputs[i % len(calls)] = calls[i % len(calls)]()
        self.kernels = graph_kernels(self.graph.raw_cuda_graph())
        self.graph.instantiate()

    def __call__(self) -> Callable[[], float]:
        start, end = _event(), _event()
        start.record()
        self.graph.replay()
        end.record()
        return lambda: start.elapsed_time(end) / 1e3 / self.calls


class _KernelNode(ctypes.Structure):  # CUDA_KERNEL_NODE_PARAMS_v2
    _fields_ = [
        ("function", ctypes.c_void_p),
        ("shape", ctypes.c_uint * 7),
        ("params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


def graph_kernels(graph: int, driver: Any = None) -> list[str]:
    """The device functions that a captured CUgraph launches, each once, in order; empty where the driver cannot tell.

    ``driver`` is the CUDA driver's library, or what stands for it in a test.
    """

    def ask(name: str, *args: Any) -> None:
        if getattr(driver, name)(*args):
            raise OSError(f"{name} failed")

    names: list[str] = []
    try:
        driver = driver or ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_size_t()
        ask("cuGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(count))
        nodes = (ctypes.c_void_p * count.value)()
        ask("cuGraphGetNodes", ctypes.c_void_p(graph), nodes, ctypes.byref(count))
        for node in map(ctypes.c_void_p, nodes):
            kind, params, name = ctypes.c_int(), _KernelNode(), ctypes.c_char_p()
            ask("cuGraphNodeGetType", node, ctypes.byref(kind))
            if kind.value != _KERNEL_NODE:
                continue
            ask("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(params))
            if params.kernel:
                ask("cuKernelGetName", ctypes.byref(name), ctypes.c_void_p(params.kernel))
            else:
                ask("cuFuncGetName", ctypes.byref(name), ctypes.c_void_p(params.function))
            names.append((name.value or b"").decode(errors="replace"))
    except (OSError, AttributeError):  # the names are worth having, the times are worth more
        return []
    return list(dict.fromkeys(names))


def l2_overwriter(l2_bytes: int) -> Callable[[], Any]:
    """A call that writes twice the L2 cache's size on the current device."""
    buffer = torch.empty(2 * max(l2_bytes, 1 << 20), dtype=torch.int8, device="cuda")
    return buffer.zero_


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def input_sets(bytes_of_one: int, l2_bytes: int) -> int:
    """How many input sets the calls rotate through: at least two, and together more than twice the L2 cache."""
    return max(2, min(64, math.ceil(2 * l2_bytes / max(bytes_of_one, 1)) + 1))


def time_loops(
    calls: dict[str, tuple[Call, Held]], synchronize: Callable[[], None], *, loops: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds per call of ``loops`` loops of ``repeats`` calls each, interleaved, the device idle before each loop."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for loop in range(-1, loops):  # the loop before the first warms up
        for name, (call, held) in calls.items():
            synchronize()
            with held():
                began = time.perf_counter()
                for _ in range(repeats):
                    call()
                seconds = (time.perf_counter() - began) / repeats
            synchronize()
            if loop >= 0:
                samples[name].append(seconds)
    return samples
