"""The Triton compiler: is it there, what it makes of a kernel, and how a compiled kernel is launched.

A kernel describes its device functions as ``KernelLaunch`` values, which need no GPU and no real tensors.  The same
description is compiled here for a named architecture (``artifacts``), bound to a fast launch on the GPU (``bind``), or
executed by Triton's interpreter on CPU tensors (``run`` under TRITON_INTERPRET=1).
"""

from __future__ import annotations

import functools
import importlib.util
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from peakattn.backends import binding, cubin, driver, load
from peakattn.backends.binding import SCALARS, meta_tensors
from peakattn.backends.contract import Artifacts
from peakattn.problem import AttentionProblem

_MIN_TRITON = (3, 6)

_compiled: dict[Any, Any] = {}


@dataclass(frozen=True)
class Tma:
    """A tensor that a kernel reads or writes through a TMA descriptor of ``block_shape``; ``layout`` is for Gluon."""

    tensor: torch.Tensor
    block_shape: tuple[int, ...]
    layout: Any = None

    @property
    def strides(self) -> tuple[int, ...]:
        """Element strides; a dimension of one element gets a legal one, whatever the tensor says."""
        unit = 16 // self.tensor.element_size()
        pairs = zip(self.tensor.stride()[:-1], self.tensor.shape[:-1], strict=True)
        return (*(stride if size > 1 else unit for stride, size in pairs), 1)


@dataclass(frozen=True)
class KernelLaunch:
    """One launch of a device function: run-time arguments and compile-time constants by name."""

    fn: Any
    grid: tuple[int, int, int]
    args: dict[str, Any]  # torch.Tensor, Tma, int, float or None
    constexprs: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.maxnreg is not None:
            options["maxnreg"] = self.maxnreg
        return options


@functools.cache
def unavailable() -> str | None:
    """Why Triton cannot be used here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed; it comes with torch's CUDA builds on Linux, or by: pip install triton"
    import triton

    if tuple(int(x) for x in triton.__version__.split(".")[:2]) < _MIN_TRITON:
        return f"triton {triton.__version__} is installed and 3.6 or newer is needed; upgrade it with: pip install -U triton"
    return None


def version() -> str:
    import triton

    return f"triton {triton.__version__}"


def cache_folder() -> Path:
    """Where Triton keeps what it compiled."""
    import triton

    return Path(triton.knobs.cache.dir)


def interpreting() -> bool:
    """True when kernels run on CPU tensors in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def compile_launch(launch: KernelLaunch, arch: int) -> Any:
    """The compiled kernel of a launch for ``sm_<arch>``; needs no GPU. Kept in this process, and by Triton on disk."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import native_specialize_impl

    backend = make_backend(GPUTarget("cuda", arch, 32))
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    hints: dict[tuple[int, ...], str] = {}
    for index, param in enumerate(launch.fn.params):
        name = param.name
        if name in launch.constexprs:
            signature[name], constants[(index,)] = "constexpr", launch.constexprs[name]
            continue
        value = launch.args[name]
        kind, hint = native_specialize_impl(type(backend), _descriptor(value), False, not param.do_not_specialize, True)
        signature[name] = kind
        if kind == "constexpr":
            constants[(index,)] = value
        elif isinstance(hint, str) and hint:
            hints[(index,)] = hint
    key = (launch.fn, arch, *(tuple(d.items()) for d in (signature, constants, hints, launch.options)))
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = _compiled[key] = _compile(launch, backend, signature, constants, hints)
    return compiled


def _compile(
    launch: KernelLaunch,
    backend: Any,
    signature: dict[str, str],
    constants: dict[tuple[int, ...], Any],
    hints: dict[tuple[int, ...], str],
) -> Any:
    import triton
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    source_type = GluonASTSource if getattr(launch.fn, "is_gluon", lambda: False)() else ASTSource
    source = source_type(launch.fn, signature, constants, {path: backend.parse_attr(hint) for path, hint in hints.items()})
    return triton.compile(source, target=backend.target, options=launch.options)


def bind(launches: Sequence[KernelLaunch], tensors: Sequence[torch.Tensor | None]) -> Callable[..., None]:
    """A function of (*tensors, softmax_scale, softcap) that launches; compiled and loaded once, for the current device.

    ``tensors`` are those from which ``launches`` was made; others of the same shapes, strides, dtypes and
    alignment may take their place.
    """
    if interpreting():
        return functools.partial(_interpret, launches, tensors)
    return binding.bind(launches, tensors, _kernel)


def run(launches: Sequence[KernelLaunch]) -> None:
    """Launches at once, with nothing kept; in the interpreter when it is on."""
    binding.run(launches, bind)


def launches_of(kernel: ModuleType, problem: AttentionProblem, config: Any) -> list[KernelLaunch]:
    """The launches of a kernel's module on tensors without data: what is compiled where there is no GPU."""
    softcap = 0.5 if problem.softcap else 0.0
    return list(kernel.launches(problem, config, *meta_tensors(problem), 1.0, softcap))


def artifacts(kernel: str, problem: AttentionProblem, config: Any, arch: int) -> list[Artifacts]:
    """What the compiler makes of a kernel's device functions for ``sm_<arch>``; works with no GPU."""
    return artifacts_of(launches_of(load(kernel), problem, config), arch)


def artifacts_of(launches: Sequence[KernelLaunch], arch: int) -> list[Artifacts]:
    """The same of given launches, which need not be those of a kernel of the library."""
    made = []
    for launch in launches:
        compiled = compile_launch(launch, arch)
        meta = compiled.metadata
        # Triton's own asm["sass"] stops at the first line it cannot parse, and misses half of a warp-specialised kernel.
        threads = 32 * meta.num_warps  # warp-specialised partitions included
        made.append(cubin.artifacts(compiled.asm["cubin"], meta.name, arch, compiled.asm["ptx"], meta.shared, threads))
    return made


def _descriptor(value: Any) -> Any:
    """Triton's own descriptor of a Tma argument; anything else as it is."""
    if not isinstance(value, Tma):
        return value
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
    from triton.tools.tensor_descriptor import TensorDescriptor

    args = (value.tensor, list(value.tensor.shape), list(value.strides), list(value.block_shape))
    return TensorDescriptor(*args) if value.layout is None else GluonDescriptor(*args, value.layout)


def _interpret(launches: Sequence[KernelLaunch], tensors: Sequence[torch.Tensor | None], *args: Any) -> None:
    """What a bound function does in the interpreter: the launches with other tensors and numbers in their places."""
    given = {id(t): arg for t, arg in zip(tensors, args, strict=False) if t is not None}
    scalars = dict(zip(SCALARS, args[len(tensors) :], strict=True))
    for launch in launches:
        final = {}
        for name, value in launch.args.items():
            if isinstance(value, Tma):
                final[name] = _descriptor(Tma(given[id(value.tensor)], value.block_shape, value.layout))
            elif isinstance(value, torch.Tensor):
                final[name] = given[id(value)]
            else:
                final[name] = scalars.get(name, value)
        launch.fn[launch.grid](**final, **launch.constexprs, **launch.options)


def _kernel(launch: KernelLaunch, device: int, slots: dict[int, int], scalars: dict[str, int]) -> driver.Kernel:
    """A compiled launch as parameters in ABI order: arguments that were not specialised away, then two scratch pointers."""
    compiled = compile_launch(launch, binding.arch_of(device))
    metadata = compiled.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise RuntimeError(
            f"{metadata.name} asks for {metadata.global_scratch_size} bytes of global scratch memory, which is not given."
        )
    maps = iter(metadata.tensordesc_meta or [])
    params: list[driver.Param] = []
    for name, kind in compiled.src.signature.items():
        value = launch.args.get(name)
        if kind == "constexpr":
            continue
        if isinstance(value, Tma):
            meta = next(maps)
            shape, strides = tuple(value.tensor.shape), value.strides
            slot = slots[id(value.tensor)]
            params.append(
                driver.TensorMap(slot, value.tensor.dtype, shape, strides, tuple(meta["block_size"]), meta["swizzle"])
            )
            params += [struct.pack("i", n) for n in shape] + [struct.pack("q", n) for n in strides]
        elif isinstance(value, torch.Tensor):
            params.append(driver.Pointer(slots[id(value)]))
        elif name in scalars:
            params.append(driver.Scalar(scalars[name]))
        else:
            params.append(struct.pack({"i32": "i", "i64": "q", "fp32": "f", "u1": "?"}[kind], value))
    params += [bytes(8), bytes(8)]
    function = driver.loaded(metadata.hash, compiled.asm["cubin"], metadata.name, metadata.shared, device)
    return driver.Kernel(function, launch.grid, 32 * compiled.metadata.num_warps, metadata.shared, tuple(params))
