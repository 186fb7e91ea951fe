"""The cuTile compiler: is it there, what it makes of a kernel, and how a compiled kernel is launched without it.

A kernel describes its launch as a ``TileLaunch`` value.  The device code is in modules of its own (``device_*.py``),
which alone import cuda.tile, and are loaded only to compile.  A tile function's parameters are those of its machine code
in order, by the calling convention cutile_python_v2:

    Array        .u64 address, then each size and each stride in elements, 32 bits each, or 64 under ``wide``
    int          .u32
    float        .f32
    constexprs   nothing; None and a bool are constants too

A launch gives no block size and no shared memory: the driver reads both, and makes the TMA descriptors, from the machine
code.  The parameter table of the machine code is held against the description, so that a launch cannot pass something
else.  Machine code is kept on disk under a hash of all it was made from; ``driver`` launches it.  A process that finds its
kernel there never imports cuda.tile.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import os
import shutil
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from peakattn.backends import binding, codecache, cubin, driver, load
from peakattn.backends.binding import Bound, meta_tensors
from peakattn.backends.codecache import Compiled
from peakattn.backends.contract import Artifacts
from peakattn.problem import AttentionProblem, is_aligned

_PACKAGE = "cuda-tile"
_MIN_VERSION = (1, 6)
# The compiler's three packages; cuda.tile leaves them aside unless their versions agree in the first two numbers.
_COMPILER = ("nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm")
_ALIGNED_BYTES = 16
_INT32_MAX = 2**31 - 1
# Records of a parameter in a kernel's .nv.info section, and where their last word has its size. Which of the two a
# kernel has depends on how many parameters there are.
_PARAMETER_SIZE: dict[int, Callable[[int], int]] = {0x17: lambda word: word >> 18, 0x45: lambda word: word & 0xFFFFFF}

_kept = codecache.Kept("cutile")


@dataclass(frozen=True)
class Array:
    """A tensor argument, seen in dimensions ``order``; the sizes of dimensions ``static`` are compile-time constants.

    ``last`` is the size of the last dimension as the kernel sees it, where that is less than the tensor's.
    """

    tensor: torch.Tensor
    order: tuple[int, ...] = (0, 2, 1, 3)
    static: tuple[int, ...] = (3,)
    last: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.tensor.shape[i] for i in self.order)
        return shape if self.last is None else (*shape[:-1], self.last)

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements; a dimension of one element gets a legal stride, whatever the tensor says."""
        x = self.tensor
        unit = _ALIGNED_BYTES // x.element_size()
        free = [1 if i == x.ndim - 1 else unit for i in self.order]
        return tuple(x.stride(i) if x.shape[i] > 1 else legal for i, legal in zip(self.order, free, strict=True))

    @property
    def aligned(self) -> bool:
        """TMA can address it: unit last stride, 16-byte aligned address and other strides."""
        return is_aligned(self.tensor)

    @property
    def wide(self) -> bool:
        """Its elements are further apart than 32 bits count."""
        pairs = zip(self.shape, self.strides, strict=True)
        return sum((size - 1) * stride for size, stride in pairs if size) > _INT32_MAX or max(self.shape) > _INT32_MAX

    @property
    def facts(self) -> tuple[Any, ...]:
        """All that the compiler is told of it."""
        sizes = tuple(self.shape[i] if i in self.static else None for i in range(len(self.order)))
        return (self.tensor.dtype, sizes, self.strides[-1] == 1, 0 in self.strides, self.aligned, self.wide)


@dataclass(frozen=True)
class TileLaunch:
    """One launch of a tile function: run-time arguments in order, then compile-time constants in order."""

    device_code: Callable[[], Any]  # imports the tile function and returns it; called only to compile
    grid: tuple[int, int, int]
    args: dict[str, Any]  # Array, int (32 bits), float or None
    constexprs: dict[str, Any]
    hints: dict[str, Any] = field(default_factory=dict)  # keywords of cuda.tile.kernel


@functools.cache
def unavailable() -> str | None:
    """Why cuTile cannot be used here, or None."""
    found = _versions((_PACKAGE, *_COMPILER))
    if _PACKAGE not in found:
        return f"the package {_PACKAGE} is not installed"
    if _numbers(found[_PACKAGE]) < _MIN_VERSION:
        wanted = ".".join(map(str, _MIN_VERSION))
        return (
            f"{_PACKAGE} {found[_PACKAGE]} is installed and {wanted} or newer is needed; "
            f"upgrade it with: pip install -U '{_PACKAGE}[tileiras]'"
        )
    trio = {name: found[name] for name in _COMPILER if name in found}
    if len(trio) == len(_COMPILER) and len({_numbers(v) for v in trio.values()}) > 1:
        listed = ", ".join(f"{name} {v}" for name, v in trio.items())
        right = trio[_COMPILER[0]]
        wanted = " ".join(f"{name}=={right}" for name in _COMPILER[1:])
        return f"its compiler's packages do not fit together ({listed}); make them one version with: pip install {wanted}"
    if len(trio) < len(_COMPILER) and shutil.which("tileiras") is None and not _toolkit_has_tileiras():
        return f"{_PACKAGE} is installed without its compiler tileiras; add it with: pip install '{_PACKAGE}[tileiras]'"
    return None


@functools.cache
def version() -> str:
    found = _versions((_PACKAGE, _COMPILER[0]))
    return ", ".join(f"{name} {number}" for name, number in found.items())


def compile_launch(launch: TileLaunch, arch: int) -> Compiled:
    """The machine code of a launch for ``sm_<arch>``: from this process, from disk, or from the compiler, with no GPU."""
    key = _key(launch, arch)
    return _kept.get(key, lambda: _compile(launch, arch, key))


def bind(launches: Sequence[TileLaunch], tensors: Sequence[torch.Tensor | None]) -> Bound:
    """What ``binding.bind`` makes of launches of this compiler."""
    return binding.bind(launches, tensors, _kernel)


def run(launches: Sequence[TileLaunch]) -> None:
    """Launches at once, with nothing kept."""
    binding.run(launches, bind)


def artifacts(kernel: str, problem: AttentionProblem, config: Any, arch: int) -> list[Artifacts]:
    """What the compiler makes of a kernel's tile functions for ``sm_<arch>``; works with no GPU."""
    softcap = 0.5 if problem.softcap else 0.0
    return artifacts_of(load(kernel).launches(problem, config, *meta_tensors(problem), 1.0, softcap), arch)


def artifacts_of(launches: Sequence[TileLaunch], arch: int) -> list[Artifacts]:
    """The same of given launches, which need not be those of a kernel of the library."""
    made = [compile_launch(launch, arch) for launch in launches]
    return [cubin.artifacts(one.cubin, one.name, arch) for one in made]


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(".")[:2])


def _toolkit_has_tileiras() -> bool:
    homes = (os.environ.get("CUDA_HOME"), "/usr/local/cuda")
    return any(home is not None and (Path(home) / "bin" / "tileiras").is_file() for home in homes)


# Compiling.


def _compile(launch: TileLaunch, arch: int, key: str) -> Compiled:
    from cuda.tile import compilation

    kernel = launch.device_code()
    name = kernel._pyfunc.__name__
    parameters = [_constraint(value) for value in launch.args.values()] + list(launch.constexprs.values())
    convention = compilation.CallingConvention.cutile_python_v2()
    signature = compilation.KernelSignature(parameters, convention, symbol=name)
    made = io.BytesIO()
    hinted = kernel.replace_hints(**launch.hints)
    compilation.export_kernel(hinted, [signature], made, gpu_code=f"sm_{arch}", output_format="cubin")
    code = made.getvalue()
    _check_parameters(launch, name, code)
    return Compiled(key, name, code)


def _constraint(value: Any) -> Any:
    """What the compiler may assume of an argument."""
    import cuda.tile as ct
    from cuda.tile.compilation import ArrayConstraint, ScalarConstraint

    if value is None:
        return False
    if isinstance(value, float):
        return ScalarConstraint(ct.float32)
    if isinstance(value, int):
        return ScalarConstraint(ct.int32)
    dtype, sizes, unit_last, overlapping, aligned, wide = value.facts
    size = dtype.itemsize
    names = {torch.float16: ct.float16, torch.bfloat16: ct.bfloat16, torch.float32: ct.float32}
    ndim = len(sizes)
    return ArrayConstraint(
        names[dtype],
        ndim,
        index_dtype=ct.int64 if wide else ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=overlapping,
        stride_constant=(*(None,) * (ndim - 1), 1 if unit_last else None),
        stride_divisible_by=(*(_ALIGNED_BYTES // size if aligned else 1,) * (ndim - 1), 1),
        shape_constant=sizes,
        base_addr_divisible_by=_ALIGNED_BYTES if aligned else size,
    )


def _check_parameters(launch: TileLaunch, name: str, code: bytes) -> None:
    """RuntimeError unless the machine code takes what the launch passes."""
    found = _parameter_sizes(code, name)
    wanted = [len(part) for value in launch.args.values() for part in _packed(value)]
    if found != wanted:
        raise RuntimeError(
            f"{name} compiled to parameters of {found} bytes, and the launch passes {wanted}; "
            "give the tile function the arguments of the launch, in their order."
        )


def _parameter_sizes(code: bytes, name: str) -> list[int]:
    """Bytes of each parameter of a kernel, in order, from its records of them in the machine code."""
    sizes = {}
    for kind, payload in cubin._records(dict(cubin._sections(code))[f".nv.info.{name}"]):
        if kind in _PARAMETER_SIZE:
            _, ordinal, _, flags = struct.unpack("<IHHI", payload)
            sizes[ordinal] = _PARAMETER_SIZE[kind](flags)
    return [size for _, size in sorted(sizes.items())]


def _packed(value: Any) -> list[bytes]:
    """An argument as parameters; the address of an Array is 0."""
    if value is None:
        return []
    if isinstance(value, float):
        return [struct.pack("f", value)]
    if isinstance(value, int):
        return [struct.pack("i", value)]
    letter = "q" if value.wide else "i"
    return [bytes(8), *(struct.pack(letter, n) for n in (*value.shape, *value.strides))]


def _key(launch: TileLaunch, arch: int) -> str:
    """A hash of everything that the machine code is made from."""
    args = tuple((name, v.facts if isinstance(v, Array) else type(v).__name__) for name, v in launch.args.items())
    code = launch.device_code
    facts = (
        f"{code.__module__}.{code.__qualname__}",
        args,
        tuple(launch.constexprs.items()),
        tuple(sorted(launch.hints.items())),
        arch,
        version(),
        codecache.sources(code.__module__, __name__),
    )
    return f"{code.__name__.strip('_')}-sm_{arch}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}"


# Launching.


def _kernel(launch: TileLaunch, device: int, slots: dict[int, int], scalars: dict[str, int]) -> driver.Kernel:
    """A compiled launch as parameters in ABI order."""
    compiled = compile_launch(launch, binding.arch_of(device))
    params: list[driver.Param] = []
    for name, value in launch.args.items():
        packed: list[driver.Param] = list(_packed(value))
        if isinstance(value, Array):
            packed[0] = driver.Pointer(slots[id(value.tensor)])
        elif name in scalars:
            packed = [driver.Scalar(scalars[name])]
        params += packed
    function = driver.loaded(compiled.key, compiled.cubin, compiled.name, 0, device)
    return driver.Kernel(function, launch.grid, 1, 0, tuple(params))
