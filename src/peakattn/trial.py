"""Configs tried on a call's own tensors: compiled, held to the oracle, timed side by side, stored."""

from __future__ import annotations

import dataclasses
import datetime
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from peakattn import plan, race, reference, store
from peakattn.backends import load, toolchain
from peakattn.device import Device
from peakattn.problem import AttentionProblem

Tensors = tuple[torch.Tensor | None, ...]  # in the order of a launch

_SOFTCAP = 30.0  # a launch needs a number; which one it is decides nothing
_SAMPLE_SECONDS = 0.5e-3  # long against the resolution of clocks and events
_MAX_CALLS = 64
_KV = {"fwd": (1, 2), "bwd": (1, 2, 8, 9)}  # where tensors with kv heads stand in a launch


@dataclass(frozen=True)
class Candidate:
    """A kernel under a config."""

    kernel: str
    config: Any

    @classmethod
    def of(cls, row: store.Measured) -> Candidate:
        """What a stored row measured."""
        return cls(row.kernel, load(row.kernel).Config(**row.config))

    @property
    def fields(self) -> dict[str, Any]:
        """The config as JSON values."""
        return dataclasses.asdict(self.config)

    @property
    def name(self) -> tuple[str, str]:
        """The name of its row."""
        return store.name_of(self.kernel, self.fields)


def measure(
    problem: AttentionProblem, device: Device, candidates: Sequence[Candidate], tensors: Tensors, seconds: float
) -> list[store.Measured]:
    """Check and time the candidates on a call's tensors, and store a row for each; its outputs are overwritten.

    The first candidate is the anchor; where it fails, the first that does not takes its place.
    """
    with torch.no_grad():
        trial = _Trial(problem, device, tensors)
        results = {candidate: trial.prepare(candidate) for candidate in candidates}
        racing = {candidate: result.sampler for candidate, result in results.items() if result.sampler is not None}
        began = time.perf_counter()
        lanes = dict(zip(racing, race.run(list(racing.values()), seconds, finish=trial.wait), strict=True)) if racing else {}
        share = (time.perf_counter() - began) / max(len(lanes), 1)
    rows = [
        row_of(
            problem,
            candidate,
            lanes.get(candidate),
            mode="wall" if device.type == "cpu" else "events",
            compile_seconds=round(result.seconds, 4),
            timing_seconds=round(share, 4) if candidate in lanes else 0.0,
            reason=result.reason,
        )
        for candidate, result in sorted(results.items(), key=lambda item: item[1].sampler is None)
    ]
    store.add(device, problem.key(), rows)
    return rows


def row_of(problem: AttentionProblem, candidate: Candidate, lane: race.Lane | None, **values: Any) -> store.Measured:
    """The row of a candidate that was measured now, or that failed when it has no lane."""
    from peakattn.backends.sources import kernel_hash

    if lane is not None:
        micro = statistics.median(lane.seconds) * 1e6
        values |= {
            "us": round(micro, 4),
            "tflops": round(problem.flops / micro / 1e6, 3),
            "speedup": tuple(round(x, 5) for x in lane.speedup),
            "rounds": len(lane.seconds),
        }
    return store.Measured(
        kernel=candidate.kernel,
        config=candidate.fields,
        kernel_hash=kernel_hash(candidate.kernel),
        compiler=toolchain(candidate.kernel.split(".")[0]).version(),
        problem=str(problem),
        time=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **values,
    )


@dataclass(frozen=True)
class _Prepared:
    seconds: float  # of compiling and the first launch
    sampler: race.Sampler | None = None
    reason: str = ""


class _Trial:
    """One call's tensors, and the oracle's answer for one slice of it: the last, where index arithmetic breaks first."""

    def __init__(self, problem: AttentionProblem, device: Device, tensors: Tensors) -> None:
        self.problem, self.device = problem, device
        self.tensors = [None if t is None else t.detach() for t in tensors]
        self.numbers = (1.0 / math.sqrt(problem.head_dim), _SOFTCAP if problem.softcap else 0.0)
        options: dict[str, Any] = {
            "window_size": (problem.window_left, problem.window_right),
            "alignment": problem.alignment,
            "softcap": _SOFTCAP if problem.softcap else None,
        }
        q, k, v = (self._slice(i) for i in range(3))
        exact, low = (reference.attention(q, k, v, dtype=dtype, **options) for dtype in (torch.float64, problem.dtype))
        self._answers: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}  # by index of the output
        if problem.direction == "fwd":
            self._answers = {3: ("out", exact[0], low[0]), 4: ("lse", exact[1], low[1])}
        else:
            # The call's own out and lse belong to its own scale, which is not known here.
            for index, answer in ((3, exact[0]), (4, exact[1])):
                self.tensors[index] = self.tensors[index].clone()  # type: ignore[union-attr]
                self._slice(index).copy_(answer)
            dout, dlse = self._slice(5), None if self.tensors[6] is None else self._slice(6)
            grads = [
                reference.attention_backward(q, k, v, dout, dlse, dtype=dtype, **options)
                for dtype in (torch.float64, problem.dtype)
            ]
            self._answers = {7 + i: (name, grads[0][i], grads[1][i]) for i, name in enumerate(("dq", "dk", "dv"))}

    def prepare(self, candidate: Candidate) -> _Prepared:
        """Compile a candidate, run it once, and hold it to the oracle."""
        for index in self._answers:
            if self.tensors[index] is not None:
                self.tensors[index].fill_(math.nan)  # type: ignore[union-attr]  # what is not written shows
        began = time.perf_counter()
        try:
            where = next(t.device for t in self.tensors if t is not None)
            launch = plan.prepared(load(candidate.kernel), self.problem, candidate.config, tuple(self.tensors), where)
            launch(*self.tensors, *self.numbers)
            self.wait()
            seconds = time.perf_counter() - began
            for index, (name, exact, low) in self._answers.items():
                if self.tensors[index] is not None:
                    rounding = torch.float16 if name == "lse" and self.problem.dtype.itemsize == 2 else None
                    reference.check(self._slice(index), exact, low, name, rounding)
        except Exception as error:  # a compiler fails in its own ways, and the other configs are still worth a try
            self.wait()
            return _Prepared(time.perf_counter() - began, reason=f"{type(error).__name__}: {error}".splitlines()[0])
        return _Prepared(seconds, self._sampler(lambda: launch(*self.tensors, *self.numbers)))

    def wait(self) -> None:
        """For the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(next(t.device for t in self.tensors if t is not None))

    def _sampler(self, call: Callable[[], None]) -> race.Sampler:
        """Samples of so many calls that clocks and events can tell them apart."""
        sample = _wall if self.device.type == "cpu" else _events
        resolve = sample(call, 1)
        self.wait()
        calls = max(1, min(_MAX_CALLS, math.ceil(_SAMPLE_SECONDS / max(resolve(), 1e-7))))
        return lambda: sample(call, calls)

    def _slice(self, index: int) -> torch.Tensor:
        """The last batch entry and kv head of a tensor, or all query heads that read it; in an lse, heads come second."""
        x, group = self.tensors[index], self.problem.group
        assert x is not None
        heads = slice(-1, None) if index in _KV[self.problem.direction] else slice(-group, None)
        return x[-1:, heads] if x.dim() == 3 else x[-1:, :, heads]


def _wall(call: Callable[[], None], calls: int) -> Callable[[], float]:
    began = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = (time.perf_counter() - began) / calls
    return lambda: seconds


def _events(call: Callable[[], None], calls: int) -> Callable[[], float]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    return lambda: start.elapsed_time(end) / 1e3 / calls
