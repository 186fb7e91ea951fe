"""The host's cost of one eager call: peakattn, torch SDPA, and the floor below which no call can be.

The floor is ``torch.empty_like`` plus a bare ``cuLaunchKernel`` of a kernel that does nothing, both in this process.
Times are microseconds from Python to the end of the call with the device idle before each loop; the best of several
loops, because everything that disturbs a host adds time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab import baselines, problems, provenance, records, timing
from peakattn_lab.baselines import Contender
from peakattn_lab.wording import failure

FLOOR = "floor"
KINDS = ("inference", "training forward", "training step")
_CPU_PROBLEM = problems.make(8, 16, heads=1, causal=True, dtype=torch.float32)
_LOOPS = 15
_REPEATS = 100  # fewer than the launches that a stream queues before a call waits

# Loads on every GPU since Maxwell: the driver compiles it.
_EMPTY_PTX = b""".version 6.0
.target sm_52
.address_size 64
.visible .entry empty(.param .u64 q, .param .u64 k, .param .u64 v, .param .u64 out) { ret; }
\0"""


@dataclass(frozen=True)
class HostRow:
    """One contender's best and median microseconds per call, in one kind of use."""

    kind: str
    contender: str
    best_us: float
    median_us: float
    loops_us: list[float]

    @classmethod
    def of(cls, kind: str, contender: str, loops_us: Sequence[float]) -> HostRow:
        """The row of some loops, microseconds per call each."""
        us = sorted(round(x, 3) for x in loops_us)
        return cls(kind, contender, us[0], us[len(us) // 2], us)


def measure(
    device: torch.device, contenders: Sequence[Contender], *, loops: int = _LOOPS
) -> tuple[list[HostRow], dict[str, str]]:
    """Rows of every kind of use, and the reasons of contenders that could not take part."""
    facts = Device.of(device)
    # A GPU works while the host goes on; on a CPU the arithmetic is part of the call, so there is next to none.
    problem = problems.make(128, 64, heads=4, causal=True) if facts.type == "cuda" else _CPU_PROBLEM
    problem = problems.on_device(problem, facts.type)
    tensors = problems.inputs(problem, device, seed=0)
    reasons: dict[str, str] = {}
    uses: dict[str, dict[str, timing.Call]] = {}
    for contender in contenders:
        reason = contender.unavailable(facts) or contender.reject(problem)
        if reason is None:
            try:
                uses[contender.name] = _uses(contender, problem, tensors)
            except Exception as error:  # a rival may fail in any way
                reason = failure(error)
        if reason is not None:
            reasons[contender.name] = reason
    rows = []
    for kind in KINDS:
        calls = {c.name: (uses[c.name][kind], c.held) for c in contenders if kind in uses.get(c.name, ())}
        if kind == "inference":
            calls = {FLOOR: (floor(tensors, facts), contextlib.nullcontext), **calls}
        for name, samples in timing.time_loops(calls, timing.finisher(device), loops=loops, repeats=_REPEATS).items():
            rows.append(HostRow.of(kind, name, [s * 1e6 for s in samples]))
    return rows, reasons


def _uses(contender: Contender, problem: AttentionProblem, tensors: baselines.Tensors) -> dict[str, timing.Call]:
    """The call of each kind of use, each tried once; a forward-only contender has no step."""
    function = contender.function(problem)
    inputs = tuple(contender.arrange(x).detach() for x in tensors)
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    calls: dict[str, timing.Call] = {
        "inference": functools.partial(function, *inputs),
        "training forward": functools.partial(function, *leaves),
    }
    with contender.held():
        calls["inference"]()
        dout = torch.randn_like(contender.out_of(calls["training forward"]()))
        step = functools.partial(_step, contender, function, leaves, dout)
        if contender.reject(problem.backward(needs_dq=True, needs_dk=True, needs_dv=True, aligned=True)) is None:
            step()
            calls["training step"] = step
    return calls


def _step(contender: Contender, function: Callable[..., Any], leaves: baselines.Tensors, dout: torch.Tensor) -> Any:
    return torch.autograd.grad(contender.out_of(function(*leaves)), leaves, dout)


def floor(tensors: baselines.Tensors, device: Device) -> Callable[[], None]:
    """``torch.empty_like`` and, on a GPU, a bare launch of an empty kernel with four pointers."""
    q = tensors[0]
    if device.type != "cuda":

        def allocate() -> None:
            torch.empty_like(q)

        return allocate
    cuda = ctypes.PyDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    for status in (
        cuda.cuModuleLoadData(ctypes.byref(module), _EMPTY_PTX),
        cuda.cuModuleGetFunction(ctypes.byref(function), module, b"empty"),
    ):
        if status:
            raise RuntimeError(f"the CUDA driver refused the empty kernel with error {status}.")
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (*tensors[:3], q)]
    params = (ctypes.c_void_p * 4)(*(ctypes.addressof(p) for p in pointers))
    stream = ctypes.c_void_p(torch.cuda.current_stream(q.device).cuda_stream)
    launch = cuda.cuLaunchKernel

    def call() -> None:
        torch.empty_like(q)
        launch(function, 1, 1, 1, 128, 1, 1, 0, stream, params, None)

    # ctypes keeps addresses, not owners.
    call.owners = (pointers, module)  # type: ignore[attr-defined]
    return call


def to_records(rows: Sequence[HostRow], device: Device, commit: str | None = None) -> list[records.HostRecord]:
    """Rows with their provenance."""
    where = provenance.here(device.name, device.arch, commit)
    return [records.HostRecord(provenance=where, kind=row.kind, contender=row.contender, loops_us=row.loops_us) for row in rows]


def table(rows: Sequence[HostRow]) -> tuple[list[str], list[list[str]]]:
    """(header, rows): microseconds per call, best loop; ratios to the floor and to the fastest of torch's own."""
    body = []
    for row in rows:
        same = {other.contender: other.best_us for other in rows if other.kind == row.kind}
        sdpa = [us for name, us in same.items() if name.startswith("sdpa")]
        floor_us = next((r.best_us for r in rows if r.contender == FLOOR), None)
        body.append(
            [
                row.kind,
                row.contender,
                f"{row.best_us:.2f}",
                f"{row.median_us:.2f}",
                f"{row.best_us / floor_us:.2f}" if floor_us else "",
                f"{row.best_us / min(sdpa):.2f}" if sdpa and row.contender != FLOOR else "",
            ]
        )
    return ["use", "contender", "us (best)", "us (median)", "x floor", "x SDPA"], body
