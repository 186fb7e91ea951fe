"""Measuring configs in a worker process: inputs and oracle once for each problem, every timed output held to them.

with MeasuringWorker("cuda:0") as worker:
    [one] = worker.measure(MeasureJob("triton.fwd", problem, (config,)), timeout=60)
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from peakattn import backends, plan
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab import problems, timing
from peakattn_lab.baselines import Tensors
from peakattn_lab.gate import Gate, GateResult
from peakattn_lab.sweep.jobs import MeasureJob, Measurement
from peakattn_lab.wording import failure
from peakattn_lab.workers import Setup, Worker, check_context

_SAMPLE_SECONDS = 0.4e-3
_MAX_CALLS = 64
_HOPELESS = 3.0  # times slower than what is wanted: one sample says enough
_SLOWER = 1.1  # the fastest of three samples is that much slower: no more are needed
_CPU_SETS = 2
_CPU_CACHE = 8 << 20


class Measurer:
    """The function of a MeasureJob on one torch device."""

    def __init__(self, torch_device: str) -> None:
        self.where = torch.device(torch_device)
        if self.where.type == "cuda":
            torch.cuda.set_device(self.where)
        self.device = Device.of(self.where)
        self._finish = timing.finisher(self.where)
        self._arenas: OrderedDict[AttentionProblem, Arena] = OrderedDict()

    def __call__(self, job: MeasureJob) -> list[Measurement]:
        arena = self._arena(job.problem)
        ready: dict[int, Bound] = {}
        found: dict[int, Measurement] = {}
        for i, config in enumerate(job.configs):
            try:
                bound = arena.bind(job.kernel, config)
                bound.settle(self._finish)
                ready[i] = bound
            except Exception as error:  # a compiler or a driver fails in its own ways
                check_context(self._finish, error)
                found[i] = Measurement(config, "failed", failure(error))
        try:
            samples = self._samples(job, ready)
        except Exception as error:
            check_context(self._finish, error)
            return [found.get(i) or Measurement(config, "failed", failure(error)) for i, config in enumerate(job.configs)]
        for i, bound in ready.items():
            result = arena.check(bound.outputs[0])
            micro = tuple(round(s * 1e6, 3) for s in samples[i]) if result.passed else ()
            status: Any = "ok" if result.passed else "wrong"
            found[i] = Measurement(job.configs[i], status, result.message, micro, bound.calls_per_sample)
        return [found[i] for i in range(len(job.configs))]

    def _samples(self, job: MeasureJob, ready: dict[int, Bound]) -> dict[int, list[float]]:
        if len(job.configs) == 1:
            limit = None if job.stop_above_us is None else job.stop_above_us / 1e6
            return {i: screen(bound, limit, job.seconds, self._finish) for i, bound in ready.items()}
        if not ready:
            return {}
        samplers: dict[str, timing.Sampler] = {str(i): bound for i, bound in ready.items()}
        timed = timing.interleave(samplers, job.seconds, finish=self._finish)
        return {i: timed[str(i)] for i in ready}

    def _arena(self, problem: AttentionProblem) -> Arena:
        if problem in self._arenas:
            self._arenas.move_to_end(problem)
            return self._arenas[problem]
        while self._arenas and self._is_full():
            self._arenas.popitem(last=False)
            torch.cuda.empty_cache()
        self._arenas[problem] = arena = Arena(problem, self.where, self.device)
        return arena

    def _is_full(self) -> bool:
        if self.where.type == "cpu":
            return True
        free, total = torch.cuda.mem_get_info(self.where)
        return free < total // 2


class Arena:
    """One problem's inputs, several sets of them so that none stays in cache, and its oracle."""

    def __init__(self, problem: AttentionProblem, where: torch.device, device: Device) -> None:
        self.problem, self.device = problem, device
        sets = timing.input_sets(problem.bytes, device.l2_bytes or _CPU_CACHE)
        sets = min(sets, _CPU_SETS) if where.type == "cpu" else sets
        self.inputs = [problems.inputs(problem, where, seed) for seed in range(sets)]
        self.gate = Gate(problem, self.inputs[0])
        self.scale = 1.0 / math.sqrt(problem.head_dim)
        self.softcap = problems.SOFTCAP if problem.softcap else 0.0
        self.arguments = [self._arguments(tensors) for tensors in self.inputs]

    def _arguments(self, tensors: Tensors) -> tuple[Any, ...]:
        """What stands before the outputs in a launch: q, k, v of a forward; also out, lse, dout and dlse of a backward."""
        if self.problem.direction == "fwd":
            return tensors
        import peakattn

        q, k, v, dout = tensors
        with torch.no_grad():
            out, lse = peakattn.attention(q, k, v, return_lse=True, **problems.options(self.problem))
        return q, k, v, out, lse, dout, None

    def bind(self, kernel_id: str, fields: dict[str, Any]) -> Bound:
        """A kernel under a config on every input set; ValueError when it does not take the problem."""
        kernel = backends.load(kernel_id)
        config = kernel.Config(**fields)
        reason = kernel.reject(self.problem, self.device)
        if reason is not None:
            raise ValueError(f"{kernel_id} does not take this problem: {reason}")
        calls, outputs = [], []
        prepared: Callable[..., Any] | None = None
        for arguments in self.arguments:
            made = self._outputs(arguments)
            if prepared is None:
                prepare = getattr(kernel, "prepare", None)
                if prepare is None:
                    prepared = _launcher(kernel.launch, self.problem, config)
                else:
                    prepared = prepare(self.problem, config, *arguments, *made)
            calls.append(_call(prepared, (*arguments, *made, self.scale, self.softcap)))
            outputs.append(tuple(x for x in (made[:1] if self.problem.direction == "fwd" else made) if x is not None))
        return Bound(calls, outputs, self.device.type == "cuda")

    def _outputs(self, arguments: Sequence[Any]) -> tuple[torch.Tensor | None, ...]:
        """Filled with NaN, so that what a kernel does not write is seen."""
        problem = self.problem
        made: tuple[torch.Tensor | None, ...]
        if problem.direction == "fwd":
            q = arguments[0]
            made = plan.new_out(q, problem.head_dim_v), plan.new_lse(q) if problem.return_lse else None
        else:
            needs = (problem.needs_dq, problem.needs_dk, problem.needs_dv)
            made = tuple(torch.empty_like(x) if need else None for x, need in zip(arguments, needs, strict=False))
        for x in made:
            if x is not None:
                x.fill_(math.nan)
        return made

    def check(self, outputs: Tensors) -> GateResult:
        """Hold the outputs on input set 0 to the oracle."""
        return self.gate.check(outputs, remember=False)  # hundreds of configs would fill the memory


class Bound:
    """A config on every input set, as a sampler: a sample is several calls one after another through the input sets."""

    def __init__(self, calls: Sequence[timing.Call], outputs: Sequence[Tensors], cuda: bool) -> None:
        self.outputs = outputs
        self.calls_per_sample = 1
        self._calls, self._cuda = itertools.cycle(calls), cuda
        self.first = 0.0  # seconds of one call, once settled

    def settle(self, synchronize: Callable[[], None]) -> None:
        """Run once to load the code, once for an estimate, and decide how many calls a sample takes."""
        for _ in range(2):
            resolve = self()
            synchronize()
            self.first = resolve()
        self.calls_per_sample = max(1, min(_MAX_CALLS, math.ceil(_SAMPLE_SECONDS / max(self.first, 1e-7))))

    def __call__(self) -> Callable[[], float]:
        count = self.calls_per_sample
        if not self._cuda:
            began = time.perf_counter()
            for _ in range(count):
                next(self._calls)()
            seconds = (time.perf_counter() - began) / count
            return lambda: seconds
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            next(self._calls)()
        end.record()
        return lambda: start.elapsed_time(end) / 1e3 / count


def screen(bound: Bound, limit: float | None, seconds: float, synchronize: Callable[[], None]) -> list[float]:
    """Seconds per call of one config: one sample if it is hopeless against ``limit``, three if clearly slower, else six and
    more while ``seconds`` last."""
    if limit is not None and bound.first > _HOPELESS * limit:
        bound.settle(synchronize)  # a host that paused between two events must not cost a config its chance
        if bound.first > _HOPELESS * limit:
            return [bound.first]
    samples: list[float] = []
    while True:
        resolve = bound()
        synchronize()
        samples.append(resolve())
        if limit is not None and len(samples) == 3 and min(samples) > _SLOWER * limit:
            return samples
        if len(samples) >= timing.MIN_ROUNDS and sum(samples) * bound.calls_per_sample >= seconds:
            return samples


def _launcher(launch: Callable[..., Any], problem: AttentionProblem, config: Any) -> Callable[..., Any]:
    return lambda *args: launch(problem, config, *args)


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: function(*args)


class Measures(Protocol):
    """What a sweep needs of a MeasuringWorker."""

    def __enter__(self) -> Any: ...
    def __exit__(self, *exc: object) -> None: ...
    def measure(self, job: MeasureJob, timeout: float) -> list[Measurement]: ...


class MeasuringWorker(Worker):
    """A worker that measures on one torch device, such as ``cuda:0`` or ``cpu``, and keeps each problem's inputs and oracle.

    ``setup`` replaces what it does in its process: a function that returns a function of a MeasureJob.
    """

    def __init__(self, torch_device: str, setup: Setup | None = None) -> None:
        super().__init__(setup or functools.partial(Measurer, torch_device))

    def measure(self, job: MeasureJob, timeout: float = 60.0) -> list[Measurement]:
        """One Measurement for each config of the job, in order. A worker that is lost gives the same failure to all of them."""
        outcome = self.call(job, timeout)
        if outcome.status == "done":
            return list(outcome.value)
        return [Measurement(config, outcome.status, outcome.message) for config in job.configs]
