"""One kernel called with everything settable: checked, timed, and marked for a profiler."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from peakattn import backends, dispatch, plan
from peakattn.backends.contract import Artifacts
from peakattn.device import Device
from peakattn.problem import AttentionProblem, Direction
from peakattn_lab import ladder, problems
from peakattn_lab.accuracy import Error, errors_of
from peakattn_lab.baselines import Tensors

_WARMUP_SECONDS = 0.3  # of launches before the first timed one: compilation, and clocks that ramp up
_OUTPUTS = {"fwd": ("out", "lse"), "bwd": ("dq", "dk", "dv")}


@dataclass(frozen=True)
class Kernel:
    """A kernel by its id: the library's, or a rung of a ladder."""

    id: str
    module: ModuleType
    rung: ladder.Rung | None = None

    @classmethod
    def named(cls, kernel_id: str) -> Kernel:
        """ValueError with the ids there are, or with what is missing to load it."""
        if kernel_id.startswith("ladder."):
            rung = ladder.rung(kernel_id)
            _installed(rung.language)
            return cls(kernel_id, rung.kernel, rung)
        if kernel_id not in backends.KERNELS:
            raise ValueError(
                f"kernel {kernel_id!r} is unknown; known are {', '.join(backends.KERNELS)}, and rungs such as "
                "ladder.triton.step5."
            )
        _installed(kernel_id.split(".")[0])
        return cls(kernel_id, backends.load(kernel_id))

    @property
    def direction(self) -> Direction:
        return "bwd" if self.rung is None and self.id.split(".")[1].startswith("bwd") else "fwd"

    def config(self, problem: AttentionProblem, device: Device, knobs: dict[str, Any]) -> Any:
        """The config that a call would get, or the default, with ``knobs`` in place of its own; ValueError names the knobs."""
        reason = self.module.reject(problem, device)
        if reason is not None:
            raise ValueError(f"{self.id} does not take {problem} on {device.name}: {reason}.")
        if self.rung is not None and self.rung.kernel_id is None:
            chosen = self.module.default_config(problem, device)
        else:
            library_id = self.id if self.rung is None else self.rung.kernel_id
            chosen = dispatch.choose(problem, device, library_id).config
        names = [f.name for f in dataclasses.fields(chosen)]
        knobs = dict(knobs)
        threads = knobs.pop("num_threads", None)
        if threads is not None and "num_threads" in names:
            knobs["num_threads"] = threads
        elif threads is not None and "num_warps" in names:
            if threads % 32:
                raise ValueError(f"num_threads is {threads}; {self.id} counts warps, so it is a multiple of 32.")
            knobs["num_warps"] = threads // 32
        elif threads is not None:
            raise ValueError(f"{self.id} has no knob for num_threads; its knobs are {', '.join(names)}.")
        for name in knobs:
            if name not in names:
                raise ValueError(f"{self.id} has no knob {name}; its knobs are {', '.join(names) or 'none'}.")
        return dataclasses.replace(chosen, **knobs)

    def artifacts(self, problem: AttentionProblem, config: Any, arch: int) -> list[Artifacts]:
        """What its compiler makes of it."""
        if self.rung is not None:
            return self.rung.artifacts(problem, config, arch)
        made: list[Artifacts] = backends.toolchain(self.id.split(".")[0]).artifacts(self.id, problem, config, arch)
        return made


@dataclass(frozen=True)
class Result:
    """``seconds`` are those of each timed launch, with launch gaps in them on a GPU."""

    kernel: str
    problem: AttentionProblem
    config: Any
    device: Device
    errors: list[Error] | None  # None when the check was skipped
    seconds: list[float]
    artifacts: list[Artifacts] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """What breaks the error budget, in sentences; no speed is reported then."""
        return [error.wrong for error in self.errors or () if error.wrong]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def tflops(self) -> float:
        """Useful TFLOP/s at the median time."""
        return self.problem.flops / self.median / 1e12


def run(
    kernel: Kernel,
    problem: AttentionProblem,
    config: Any,
    where: torch.device,
    *,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    iterations: int = 10,
    check: bool = True,
    seed: int = 0,
) -> Result:
    """Warm up, then ``iterations`` launches and nothing else inside a profiler range, then hold their outputs to the oracle."""
    device = Device.of(where)
    scale = 1.0 / math.sqrt(problem.head_dim) if softmax_scale is None else softmax_scale
    if not 0 < scale < math.inf:
        raise ValueError(f"softmax_scale is {scale}; a kernel by itself takes a positive one: the API folds others into q.")
    inputs = problems.inputs(problem, where, seed)
    options = {**problems.options(problem), "softmax_scale": scale}
    if softcap is not None:
        options["softcap"] = softcap
    before = _before_outputs(problem, inputs, options)
    outputs = _outputs(problem, inputs)
    launch = plan.prepared(kernel.module, problem, config, (*before, *outputs), where)
    arguments = (*before, *outputs, scale, softcap or 0.0)

    def call() -> None:
        launch(*arguments)

    _warm(call, where)
    for x in outputs:
        if x is not None:
            x.fill_(math.nan)
    seconds = _timed(call, iterations, where)
    named = {name: x for name, x in zip(_OUTPUTS[problem.direction], outputs, strict=True) if x is not None}
    errors = errors_of(problem, inputs, named, options) if check else None
    made = kernel.artifacts(problem, config, device.arch) if device.type == "cuda" else []
    return Result(kernel.id, problem, config, device, errors, seconds, made)


def _installed(backend: str) -> None:
    reason = dispatch.unavailable(backend)
    if reason is not None:
        raise ValueError(f"{backend} cannot be used here: {reason}.")


def _before_outputs(problem: AttentionProblem, inputs: Tensors, options: dict[str, Any]) -> tuple[Any, ...]:
    """What stands before the outputs in a launch; a backward gets out and lse from the library's own forward."""
    if problem.direction == "fwd":
        return inputs
    import peakattn

    q, k, v, dout = inputs
    with torch.no_grad():
        out, lse = peakattn.attention(q, k, v, return_lse=True, **options)
    return q, k, v, out, lse, dout, None


def _outputs(problem: AttentionProblem, inputs: Tensors) -> tuple[torch.Tensor | None, ...]:
    if problem.direction == "fwd":
        q = inputs[0]
        return plan.new_out(q, problem.head_dim_v), plan.new_lse(q) if problem.return_lse else None
    return tuple(map(torch.empty_like, inputs[:3]))


def _warm(call: Callable[[], None], where: torch.device) -> None:
    began = time.perf_counter()
    call()
    while where.type == "cuda" and time.perf_counter() - began < _WARMUP_SECONDS:
        call()
        torch.cuda.synchronize(where)


def _timed(call: Callable[[], None], iterations: int, where: torch.device) -> list[float]:
    if where.type == "cpu":
        seconds = []
        for _ in range(iterations):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
        return seconds
    events = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
    torch.cuda.synchronize(where)
    with _profiled():
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        torch.cuda.synchronize(where)
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]


@contextlib.contextmanager
def _profiled() -> Iterator[None]:
    """What ``ncu --profile-from-start off`` and ``nsys --capture-range cudaProfilerApi`` look for."""
    runtime = torch.cuda.cudart()
    runtime.cudaProfilerStart()
    torch.cuda.nvtx.range_push("peakattn run")
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()
        runtime.cudaProfilerStop()


def tables(result: Result) -> list[tuple[str, list[str], list[list[str]]]]:
    """Errors, time, and what the compiler made, as (title, header, rows)."""
    made = []
    if result.errors is not None:
        header = ["output", "largest error", "RMS", "torch, same dtype", "RMS", ""]
        rows = [
            [e.name, *(f"{x:.2e}" for x in (e.largest, e.rms, e.torch_largest, e.torch_rms)), "WRONG" if e.wrong else "ok"]
            for e in result.errors
        ]
        made.append(("against float64", header, rows))
    if result.seconds and not result.wrong:
        micro = [s * 1e6 for s in result.seconds]
        row = [str(len(micro)), *(f"{x:.1f}" for x in (result.median * 1e6, min(micro), max(micro))), f"{result.tflops:.3g}"]
        made.append(("time of a launch, us", ["launches", "median", "min", "max", "TFLOP/s"], [row]))
    if result.artifacts:
        header = ["function", "registers", "threads", "spills (a tile)", "smem KiB"]
        rows = [
            [
                a.name,
                str(a.registers),
                str(a.num_threads),
                f"{a.spill_instructions} ({a.loop_spills})",
                f"{a.shared_bytes / 1024:.1f}",
            ]
            for a in result.artifacts
        ]
        made.append(("compiled", header, rows))
    return made


def to_dict(result: Result) -> dict[str, Any]:
    """JSON values; no time on a red check."""
    return {
        "kernel": result.kernel,
        "problem": problems.to_dict(result.problem),
        "config": dataclasses.asdict(result.config),
        "device": result.device.name,
        "errors": None if result.errors is None else [dataclasses.asdict(e) for e in result.errors],
        "seconds": [] if result.wrong else result.seconds,
        "tflops": None if result.wrong else result.tflops,
        "functions": [
            {
                "name": a.name,
                "registers": a.registers,
                "num_threads": a.num_threads,
                "spills": a.spill_instructions,
                "loop_spills": a.loop_spills,
                "shared_bytes": a.shared_bytes,
            }
            for a in result.artifacts
        ],
    }
