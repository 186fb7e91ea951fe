"""The bench: prepare every contender on a problem, time them interleaved, check the timed outputs, make records."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from peakattn import dispatch
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab import baselines, observe, problems, provenance, records, timing
from peakattn_lab.baselines import Contender, Tensors
from peakattn_lab.gate import Gate
from peakattn_lab.records import Record
from peakattn_lab.wording import failure

MODES: dict[str, tuple[timing.Mode, ...]] = {"cuda": ("kernel", "eager", "host"), "cpu": ("wall",)}

# How a problem's time budget is shared among the modes that are asked for.
_SHARES = {"kernel": 0.7, "eager": 0.2, "host": 0.1, "wall": 1.0}
_CPU_BYTES = 4 << 30
_CPU_CACHE = 8 << 20
_MAX_CPU_SETS = 8


@dataclass
class Bench:
    """One device with its observer. ``run`` yields records problem by problem, as they are measured."""

    torch_device: torch.device
    seconds: float  # of measuring, per problem
    modes: Sequence[timing.Mode] = ()
    commit: str | None = None  # of a tree that was copied without its repository
    rounds: int | None = None  # of measuring, instead of as many as the seconds allow
    device: Device = field(init=False)
    observer: observe.Observer = field(init=False)
    _finish: Callable[[], None] = field(init=False)

    def __post_init__(self) -> None:
        self.device = Device.of(self.torch_device)
        allowed = MODES[self.device.type]
        self.modes = tuple(self.modes) or allowed
        for mode in self.modes:
            if mode not in allowed:
                raise ValueError(f"mode {mode!r} is none of {self.device.type}; allowed are {', '.join(allowed)}.")
        self._finish = timing.finisher(self.torch_device)
        index = self.torch_device.index or 0
        self.observer = observe.of_cuda(index) if self.device.type == "cuda" else observe.Observer(None)

    def run(
        self,
        found: Sequence[AttentionProblem],
        contenders: Sequence[Contender],
        done: set[tuple[str, str, str]] = frozenset(),  # type: ignore[assignment]
        on_problem: Callable[[AttentionProblem], None] = lambda problem: None,
    ) -> Iterator[Record]:
        """Records of every problem, contender and mode. A problem is left out when ``done`` holds all of its records."""
        for problem in found:
            problem = problems.on_device(problem, self.device.type)
            on_problem(problem)
            name = records.problem_key(problems.to_dict(problem))
            if all((name, c.name, mode) in done for c in contenders for mode in self.modes):
                continue
            with self._stream():
                yield from self._problem(problem, contenders)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _stream(self) -> contextlib.AbstractContextManager[Any]:
        # A graph cannot be captured on the default stream, and a backward launches where its forward did.
        if self.device.type == "cpu":
            return contextlib.nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self.torch_device))

    def _problem(self, problem: AttentionProblem, contenders: Sequence[Contender]) -> Iterator[Record]:
        sets = timing.input_sets(problem.bytes, self.device.l2_bytes or _CPU_CACHE)
        if self.device.type == "cpu":
            sets = min(sets, _MAX_CPU_SETS)
        too_large = self._too_large(problem, sets, len(contenders))
        if too_large is not None:
            for contender in contenders:
                yield from (self._record(problem, contender, mode, skipped=too_large) for mode in self.modes)
            return
        tensors = [problems.inputs(problem, self.torch_device, seed) for seed in range(sets)]
        ready: dict[str, _Ready] = {}
        for contender in contenders:
            reason = contender.unavailable(self.device) or contender.reject(problem)
            if reason is None:
                try:
                    ready[contender.name] = _Ready.of(contender, problem, tensors)
                    self._finish()
                except Exception as error:  # a rival may fail in any way; the others are measured all the same
                    reason = failure(error)
                    yield from self._lost(problem, contender, reason)
            if reason is not None:
                yield from (self._record(problem, contender, mode, skipped=reason) for mode in self.modes)
        if not ready:
            return
        gate = Gate(problem, tensors[0])
        total = sum(_SHARES[mode] for mode in self.modes)
        for mode in self.modes:
            yield from self._mode(problem, mode, ready, gate, self.seconds * _SHARES[mode] / total)

    def _mode(
        self, problem: AttentionProblem, mode: timing.Mode, ready: dict[str, _Ready], gate: Gate, seconds: float
    ) -> Iterator[Record]:
        samplers: dict[str, timing.Sampler] = {}
        overwrite = timing.l2_overwriter(self.device.l2_bytes) if mode == "eager" else lambda: None
        for name, one in ready.items():
            try:
                samplers[name] = one.sampler(mode, overwrite, self._finish)
            except Exception as error:  # what cannot be captured in a graph can still be timed in the other modes
                reason = f"cannot be timed in this mode: {failure(error)}"
                yield from self._lost(problem, one.contender, reason)
                yield self._record(problem, one.contender, mode, one, skipped=reason)
        if not samplers:
            return
        # A host sample must not queue behind another contender's kernel, so its sampler waits for the device itself.
        samples = timing.interleave(samplers, seconds, finish=self._finish, on_round=self.observer.read, rounds=self.rounds)
        observed = self.observer.summary()
        for name, sampler in samplers.items():
            one = ready[name]
            result = gate.check(one.outputs(sampler))
            yield self._record(
                problem,
                one.contender,
                mode,
                one,
                samples_us=[round(s * 1e6, 4) for s in samples[name]],
                calls_per_sample=getattr(sampler, "calls", 1),
                gate=records.Gate(passed=result.passed, message=result.message),
                observed=observed,
            )

    def _record(
        self, problem: AttentionProblem, contender: Contender, mode: timing.Mode, ready: _Ready | None = None, **values: Any
    ) -> Record:
        if ready is not None:
            values |= {"ran": ready.ran, "input_sets": len(ready.bound)}
            if ready.choice is not None:
                values |= {
                    "kernel": ready.choice.kernel_id,
                    "kernel_hash": records.kernel_hash(ready.choice.kernel_id),
                    "config": baselines.config_fields(ready.choice.config),
                    "config_source": ready.choice.config_source,
                }
        return Record(
            provenance=provenance.here(self.device.name, self.device.arch, self.commit),
            problem=problems.to_dict(problem),
            contender=contender.name,
            version=contender.version(),
            mode=mode,
            **values,
        )

    def _lost(self, problem: AttentionProblem, contender: Contender, reason: str) -> Iterator[Record]:
        """Nothing, unless the failure took the CUDA context with it: then a record of each mode for --resume, and an error."""
        try:
            self._finish()
        except Exception as error:
            for mode in self.modes:
                yield self._record(problem, contender, mode, skipped=reason)
            raise RuntimeError(
                f"{contender.name} broke the CUDA context on {problem} ({reason}); nothing more can be measured in this "
                "process. Run the same command again with --resume: it leaves this contender's problem out."
            ) from error

    def _too_large(self, problem: AttentionProblem, sets: int, contenders: int) -> str | None:
        needed = problem.bytes * sets * (1 + contenders)
        limit = torch.cuda.mem_get_info(self.torch_device)[0] // 2 if self.device.type == "cuda" else _CPU_BYTES
        if needed <= limit:
            return None
        return (
            f"{sets} input sets of {contenders} contenders need {needed / 2**30:.1f} GiB; allowed are {limit / 2**30:.1f} GiB."
        )


@dataclass
class _Ready:
    """A contender bound to every input set and run once on each."""

    contender: Contender
    bound: list[baselines.Bound]
    ran: list[str]
    choice: dispatch.Choice | None
    result: Any = None  # of the last call on set 0 outside a graph

    @classmethod
    def of(cls, contender: Contender, problem: AttentionProblem, tensors: Sequence[Tensors]) -> _Ready:
        bound = [baselines.bind(contender, problem, one) for one in tensors]
        for one in bound:
            one()
        choice = baselines.choice_of(contender, problem)
        # Other packages launch without an operator; a CUDA graph names their kernels.
        return cls(contender, bound, baselines.what_ran(bound[0]) if contender.package == "torch" else [], choice)

    def sampler(self, mode: timing.Mode, overwrite_l2: Callable[[], Any], synchronize: Callable[[], None]) -> timing.Sampler:
        held = self.contender.held
        calls = [one.call for one in self.bound]
        if mode == "kernel":
            graph = timing.GraphSampler(calls, held)
            self.ran = graph.kernels or self.ran
            return graph

        def first() -> None:
            self.result = self.bound[0].call()

        calls[0] = first
        if mode == "eager":
            return timing.eager_sampler(calls, overwrite_l2, held)
        if mode == "host":
            return timing.host_sampler(calls, synchronize, held)
        return timing.wall_sampler(calls, held)

    def outputs(self, sampler: timing.Sampler) -> Tensors:
        """What was computed from set 0 while it was timed."""
        return self.bound[0].read(sampler.outputs[0] if isinstance(sampler, timing.GraphSampler) else self.result)
