"""What the GPU kernels compile to for a named architecture, with no GPU: registers, spills, tensor-core instructions."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from peakattn import backends, dispatch
from peakattn.backends.contract import Artifacts
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab import problems
from peakattn_lab.wording import failure, knobs

HEAD_DIMS = (64, 128, 256)

# SASS opcodes worth a column: tensor-core instructions of each generation, bulk and asynchronous copies, exponentials.
_TENSOR_CORE = ("HMMA", "HGMMA", "UTCHMMA", "UTCQMMA", "QGMMA", "IMMA")
_COPIES = ("UTMALDG", "UTMASTG", "LDGSTS")


@dataclass(frozen=True)
class Compiled:
    """One kernel under its default config: what the compiler made, or why there is nothing."""

    kernel: str
    problem: AttentionProblem
    config: dict[str, Any] | None = None
    artifacts: tuple[Artifacts, ...] = ()
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON values, without the machine code."""
        made = [
            {k: v for k, v in dataclasses.asdict(a).items() if k not in ("ptx", "sass")} | {"spills": a.spill_instructions}
            for a in self.artifacts
        ]
        problem = problems.to_dict(self.problem)
        return {"kernel": self.kernel, "problem": problem, "config": self.config, "reason": self.reason, "artifacts": made}


def arch_number(text: str) -> int:
    """``sm_90``, ``sm_90a`` or ``90`` as 90, or ValueError."""
    match = re.fullmatch(r"(?:sm_)?(\d{2,3})[af]?", text)
    if match is None:
        raise ValueError(f"arch is {text!r}; write it as sm_90 or 90.")
    return int(match[1])


def typical_problems(head_dims: Sequence[int] = HEAD_DIMS) -> list[AttentionProblem]:
    """Causal bf16 problems of 4,096 tokens, both directions."""
    return [
        problems.make(4096, dim, batch=4, heads=2048 // dim if 2048 % dim == 0 else 16, causal=True, direction=direction)
        for direction in ("fwd", "bwd")
        for dim in head_dims
    ]


def survey(
    arch: int,
    kernels: Sequence[str] = (),
    head_dims: Sequence[int] = HEAD_DIMS,
) -> Iterator[Compiled]:
    """Every GPU kernel (or those named) that takes a typical problem on ``arch``, under its default config."""
    device = Device.for_arch(arch)
    for kernel_id in kernels or [k for k in backends.KERNELS if not k.startswith("cpu.")]:
        if kernel_id not in backends.KERNELS:
            raise ValueError(f"kernel {kernel_id!r} is unknown; known are {', '.join(backends.KERNELS)}.")
        direction = kernel_id.split(".")[1].split("_")[0]
        for problem in typical_problems(head_dims):
            if problem.direction == direction:
                yield compile_one(kernel_id, problem, device)


def compile_one(kernel_id: str, problem: AttentionProblem, device: Device) -> Compiled:
    """What one kernel's default config compiles to on a device that need not be here."""
    backend = kernel_id.split(".")[0]
    reason = dispatch.unavailable(backend)
    if reason is not None:
        return Compiled(kernel_id, problem, reason=reason)
    try:
        kernel = backends.load(kernel_id)
    except ImportError as error:
        return Compiled(kernel_id, problem, reason=f"cannot be imported: {error}")
    reason = kernel.reject(problem, device)
    if reason is not None:
        return Compiled(kernel_id, problem, reason=reason)
    config = kernel.default_config(problem, device)
    knobs = dataclasses.asdict(config)
    try:
        made = tuple(backends.toolchain(backend).artifacts(kernel_id, problem, config, device.arch))
    except Exception as error:  # a compiler fails in its own ways; the other kernels are still worth a row
        return Compiled(kernel_id, problem, knobs, reason=f"does not compile ({failure(error)})")
    return Compiled(kernel_id, problem, knobs, made)


def table(found: Sequence[Compiled]) -> tuple[list[str], list[list[str]]]:
    """(header, rows): one row for each device function; spills are loads and stores of local memory, in all and a tile."""
    header = ["kernel", "function", "head_dim", "config", "registers", "threads", "smem KiB", "spills (a tile)"]
    header += ["tensor core", "copies", "exp2 etc. (MUFU)"]
    body = []
    for one in found:
        for a in one.artifacts:
            body.append(
                [
                    one.kernel,
                    a.name,
                    str(one.problem.head_dim),
                    knobs(one.config or {}),
                    str(a.registers),
                    str(a.num_threads),
                    f"{a.shared_bytes / 1024:.1f}",
                    f"{a.spill_instructions} ({a.loop_spills})",
                    _counts(a.opcodes, _TENSOR_CORE),
                    _counts(a.opcodes, _COPIES),
                    str(a.opcodes.get("MUFU", 0)),
                ]
            )
    return header, body


def notes(found: Sequence[Compiled]) -> list[str]:
    """Why kernels are missing from the table, each said once."""
    return list(dict.fromkeys(f"{one.kernel}, head_dim {one.problem.head_dim}: {one.reason}" for one in found if one.reason))


def _counts(opcodes: dict[str, int], names: Sequence[str]) -> str:
    return ", ".join(f"{opcodes[name]} {name}" for name in names if opcodes.get(name)) or "0"


def default_arch() -> int:
    """The architecture of this machine's GPU, or Hopper's."""
    return Device.of(torch.device("cuda")).arch if torch.cuda.is_available() else 90
