"""What toolchains share around a launch: arguments by slot, a prepared launch, and tensors without data to compile for."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from peakattn.backends import driver
from peakattn.problem import AttentionProblem, stand_in

SCALARS = ("softmax_scale", "softcap")  # run-time numbers, by name, in every kernel; they follow the tensors

Workspace = dict[str, tuple[tuple[int, ...], torch.dtype]]  # scratch memory of a kernel by name: shape and dtype


class Bound:
    """A prepared launch: call it with tensors, or hand ``addresses`` what ``Tensor.data_ptr`` says of them."""

    __slots__ = ("_present", "addresses")

    def __init__(self, addresses: Callable[[Sequence[Any]], None], tensors: Sequence[torch.Tensor | None]) -> None:
        self.addresses = addresses
        self._present = tuple(t is not None for t in tensors)

    def __call__(self, *args: Any) -> None:
        tensors = len(self._present)
        pointers = [a.data_ptr() if p else 0 for a, p in zip(args, self._present, strict=False)]
        self.addresses((*pointers, *args[tensors:]))


@dataclass(frozen=True)
class Int64:
    """An integer argument of 64 bits, such as a stride."""

    value: int


def bind(launches: Sequence[Any], tensors: Sequence[torch.Tensor | None], kernel: Callable[..., driver.Kernel]) -> Bound:
    """A function of (*tensors, softmax_scale, softcap) that launches; compiled and loaded once, for the current device.

    ``tensors`` are those from which ``launches`` was made; others of the same shapes, strides, dtypes and alignment may
    take their place.  ``kernel(launch, device index, slots by id, slots by name)`` compiles and loads one.
    """
    device = next(t.device.index for t in tensors if t is not None)
    kernels = [kernel(launch, device, *slots_of(tensors)) for launch in launches]
    return Bound(driver.chain([driver.launcher(one, device) for one in kernels]), tensors)


def run(launches: Sequence[Any], bind_all: Callable[..., Callable[..., None]]) -> None:
    """Launches at once, with nothing kept; ``bind_all`` takes launches and the tensors among their arguments."""
    if not launches:
        return
    values = [getattr(value, "tensor", value) for launch in launches for value in launch.args.values()]
    tensors = list({id(t): t for t in values if isinstance(t, torch.Tensor)}.values())
    numbers = [next((launch.args[name] for launch in launches if name in launch.args), 0.0) for name in SCALARS]
    bind_all(launches, tensors)(*tensors, *numbers)


def prepare_with_scratch(
    launches_in: Callable[[dict[str, torch.Tensor]], Sequence[Any]],
    tensors: Sequence[torch.Tensor | None],
    workspace: Workspace,
    bind_all: Callable[..., Callable[..., None]],
) -> Callable[..., None]:
    """``call(*tensors, softmax_scale, softcap)`` of a kernel with scratch memory, which each call takes from torch's allocator.

    ``launches_in(scratch)`` makes the launches on ``tensors`` and on memory as ``workspace`` describes it; ``bind_all`` is
    the toolchain's ``bind``.
    """
    device = next(t.device for t in tensors if t is not None)
    scratch = allocate(workspace, device)
    made = launches_in(scratch)
    if not made:
        return lambda *args: None
    bound = bind_all(made, (*tensors, *scratch.values()))
    likes = [stand_in(shape, dtype, device) for shape, dtype in workspace.values()]

    def call(*args: torch.Tensor | float | None) -> None:
        bound(*args[:-2], *map(torch.empty_like, likes), *args[-2:])

    return call


def allocate(workspace: Workspace, device: torch.device) -> dict[str, torch.Tensor]:
    """Scratch memory by name, with nothing in it."""
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in workspace.items()}


def parameters(
    args: dict[str, Any], slots: dict[int, int], scalars: dict[str, int], null: bytes | None = None
) -> tuple[driver.Param, ...]:
    """Arguments by value as parameters in their order; ``null`` is what a None becomes, nothing unless given."""
    params: list[driver.Param] = []
    for name, value in args.items():
        if isinstance(value, driver.Tma):
            params.append(value.tensor_map(slots[id(value.tensor)]))
        elif isinstance(value, torch.Tensor):
            params.append(driver.Pointer(slots[id(value)]))
        elif name in scalars:
            params.append(driver.Scalar(scalars[name]))
        elif isinstance(value, driver.Counter):
            params.append(value)
        elif isinstance(value, Int64):
            params.append(struct.pack("q", value.value))
        elif value is not None:
            params.append(struct.pack("f" if isinstance(value, float) else "i", value))
        elif null is not None:
            params.append(null)
    return tuple(params)


@functools.cache
def arch_of(index: int) -> int:
    """The architecture of a CUDA device, as 90 for sm_90."""
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def slots_of(tensors: Sequence[torch.Tensor | None]) -> tuple[dict[int, int], dict[str, int]]:
    """The slot of each tensor, by its ``id``, and of each run-time number, by its name."""
    by_id = {id(t): i for i, t in enumerate(tensors) if t is not None}
    return by_id, {name: len(tensors) + i for i, name in enumerate(SCALARS)}


def meta_tensors(problem: AttentionProblem) -> list[torch.Tensor | None]:
    """Tensors without data in the order of the kernel's launch, aligned or not as the problem says."""
    pad = 0 if problem.aligned else 1

    def tensor(seqlen: int, heads: int, dim: int) -> torch.Tensor:
        shape = (problem.batch, seqlen, heads, dim + pad)
        return torch.empty(shape, dtype=problem.dtype, device="meta")[..., :dim]

    rows = (problem.seqlen_q, problem.num_heads_q)
    keys = (problem.seqlen_k, problem.num_heads_kv)
    q, k, v = tensor(*rows, problem.head_dim), tensor(*keys, problem.head_dim), tensor(*keys, problem.head_dim_v)
    out = tensor(*rows, problem.head_dim_v)
    lse = torch.empty(problem.batch, problem.num_heads_q, problem.seqlen_q, dtype=torch.float32, device="meta")
    if problem.direction == "fwd":
        return [q, k, v, out, lse if problem.return_lse else None]
    needs = (problem.needs_dq, problem.needs_dk, problem.needs_dv)
    grads = [torch.empty_like(x) if need else None for x, need in zip((q, k, v), needs, strict=True)]
    return [q, k, v, out, lse, torch.empty_like(out), None, *grads]
