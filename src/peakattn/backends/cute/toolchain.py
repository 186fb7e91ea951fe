"""The CuTe DSL compiler: is it there, what it makes of a kernel, and how a compiled kernel is launched without it.

A kernel describes its launch as a ``CuteLaunch`` value.  The device code is in a module of its own (``device_*.py``),
which alone imports cutlass, and is loaded only to compile: a class, made with the launch's constants, whose jit-compiled
``__call__`` takes the run-time arguments in order and launches one device function with the same ones.  The compiler
turns each into one parameter:

    torch.Tensor   cute.Pointer       .u64 .ptr
    Counter        cute.Pointer       .u64 .ptr, to an Int32
    Tma            TMA copy atom      .b8[128], a CUtensorMap by value; its coordinate tensor becomes nothing,
                                      when the class makes it from a tensor of static shape
    int, Int64     Int32, Int64       .u32, .u64
    float          Float32            .f32
    None, constexprs, static layouts  nothing

The parameter list of the PTX is held against the description, so that a launch cannot pass something else.  Machine
code and PTX are kept on disk under a hash of all they were made from; ``driver`` launches them.  A process that finds
its kernel there never imports cutlass.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import re
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from peakattn.backends import binding, codecache, cubin, driver, load
from peakattn.backends.binding import Bound, Int64, meta_tensors
from peakattn.backends.codecache import Compiled
from peakattn.backends.contract import Artifacts
from peakattn.backends.driver import Counter, Tma
from peakattn.problem import AttentionProblem

_PACKAGE = "nvidia-cutlass-dsl"
_MIN_VERSION = (4, 8)  # the first whose functions can be named
_ARCH_SPECIFIC = 90  # from here on the machine code is for one architecture, with all its instructions
_POINTER_ALIGN = 16
_ENTRY = re.compile(r"\.visible \.entry (\w+)\((.*?)\)\s*\.reqntid (\d+)", re.DOTALL)
_PARAM = re.compile(r"\.param\s+(?:\.align \d+\s+)?\.(\w+)(\s+\.ptr)?[^,]*?(?:\[(\d+)\])?\s*(?:,|$)")

_kept = codecache.Kept("cute")


@dataclass(frozen=True)
class CuteLaunch:
    """One launch of a device function: run-time arguments in order, and compile-time constants by name."""

    device_code: Callable[[], Any]  # imports the class of the device code and returns it; called only to compile
    grid: tuple[int, int, int]
    num_threads: int
    shared_bytes: int  # dynamic shared memory
    args: dict[str, Any]  # torch.Tensor, Tma, int (32 bits), Int64, float or None
    constexprs: dict[str, Any] = field(default_factory=dict)


@functools.cache
def unavailable() -> str | None:
    """Why the CuTe DSL cannot be used here, or None."""
    try:
        found = importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"the package {_PACKAGE} is not installed"
    if tuple(int(x) for x in found.split(".")[:2]) < _MIN_VERSION:
        wanted = ".".join(map(str, _MIN_VERSION))
        return f"{_PACKAGE} {found} is installed and {wanted} or newer is needed; upgrade it with: pip install -U {_PACKAGE}"
    return None


@functools.cache
def version() -> str:
    return f"{_PACKAGE} {importlib.metadata.version(_PACKAGE)}"


def compile_launch(launch: CuteLaunch, arch: int) -> Compiled:
    """The machine code of a launch for ``sm_<arch>``: from this process, from disk, or from the compiler, with no GPU."""
    key = _key(launch, arch)
    return _kept.get(key, lambda: _compile(launch, arch, key))


def bind(launches: Sequence[CuteLaunch], tensors: Sequence[torch.Tensor | None]) -> Bound:
    """What ``binding.bind`` makes of launches of this compiler."""
    return binding.bind(launches, tensors, _kernel)


def run(launches: Sequence[CuteLaunch]) -> None:
    """Launches at once, with nothing kept."""
    binding.run(launches, bind)


def artifacts(kernel: str, problem: AttentionProblem, config: Any, arch: int) -> list[Artifacts]:
    """What the compiler makes of a kernel's device functions for ``sm_<arch>``; works with no GPU."""
    softcap = 0.5 if problem.softcap else 0.0
    return artifacts_of(load(kernel).launches(problem, config, *meta_tensors(problem), 1.0, softcap), arch)


def artifacts_of(launches: Sequence[CuteLaunch], arch: int) -> list[Artifacts]:
    """The same of given launches, which need not be those of a kernel of the library."""
    made = [(compile_launch(launch, arch), launch) for launch in launches]
    return [cubin.artifacts(c.cubin, c.name, arch, c.ptx, x.shared_bytes, x.num_threads) for c, x in made]


# Compiling.


def _compile(launch: CuteLaunch, arch: int, key: str) -> Compiled:
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_ptr

    dtypes = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16, torch.float32: cutlass.Float32}

    def fake(value: Any) -> Any:
        if isinstance(value, Tma):
            value = value.tensor
        if isinstance(value, torch.Tensor):
            return make_ptr(dtypes[value.dtype], _POINTER_ALIGN, cute.AddressSpace.gmem, assumed_align=_POINTER_ALIGN)
        if isinstance(value, Counter):
            return make_ptr(cutlass.Int32, 0, cute.AddressSpace.gmem, assumed_align=4)
        if isinstance(value, Int64):
            return cutlass.Int64(0)
        return value if value is None else cutlass.Float32(0.0) if isinstance(value, float) else cutlass.Int32(0)

    function = launch.device_code()(**launch.constexprs)
    chip = f"sm_{arch}{'a' if arch >= _ARCH_SPECIFIC else ''}"
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # unrolled loops are meant, and a library does not talk
        options = f"--gpu-arch {chip} --keep-ptx --keep-cubin --dump-dir {folder}"
        made = cute.compile(function, *map(fake, launch.args.values()), options=options)
        ptx, code = made.__ptx__, made.__cubin__
    return Compiled(key, _checked_name(launch, ptx), code, ptx)


def _checked_name(launch: CuteLaunch, ptx: str) -> str:
    """The name of the one device function in ``ptx``, after its parameters and block were held against the launch."""
    entries = _ENTRY.findall(ptx)
    if len(entries) != 1:
        raise RuntimeError(f"{_name(launch)} has {len(entries)} device functions; a CuteLaunch describes one.")
    name, text, threads = entries[0]
    found = [_kind(*parts) for parts in _PARAM.findall(text)]
    wanted = [kind for value in launch.args.values() if (kind := _expected(value)) is not None]
    if found != wanted:
        raise RuntimeError(
            f"{_name(launch)} compiled to the parameters {', '.join(found)}, and the launch passes {', '.join(wanted)}; "
            "give the device function the arguments of the launch, in their order."
        )
    if int(threads) != launch.num_threads:
        raise RuntimeError(f"{_name(launch)} was compiled for {threads} threads, and the launch has {launch.num_threads}.")
    return name


def _name(launch: CuteLaunch) -> str:
    return f"{launch.device_code.__module__}.{launch.device_code.__qualname__}"


def _kind(scalar: str, pointer: str, size: str) -> str:
    if pointer:
        return "pointer"
    if scalar == "b8" and size:
        return "tensor map" if int(size) == 128 else f"{size} bytes"
    return {"u32": "int32", "u64": "int64", "f32": "float32"}.get(scalar, scalar)


def _expected(value: Any) -> str | None:
    kinds = {
        torch.Tensor: "pointer",
        Counter: "pointer",
        Tma: "tensor map",
        Int64: "int64",
        int: "int32",
        float: "float32",
        type(None): None,
    }
    for kind, name in kinds.items():
        if isinstance(value, kind) and not isinstance(value, bool):
            return name
    raise TypeError(f"{value!r} is no argument of a launch; pass a tensor, Tma, int, Int64, float or None.")


# Keys.


def _key(launch: CuteLaunch, arch: int) -> str:
    """A hash of everything that the machine code is made from."""

    def kind(value: Any) -> Any:
        tensor = value.tensor if isinstance(value, Tma) else value
        return (_expected(value), tensor.dtype if isinstance(tensor, torch.Tensor) else None)

    args = tuple((name, *kind(value)) for name, value in launch.args.items())
    constants = tuple(sorted(launch.constexprs.items()))
    module = launch.device_code.__module__
    facts = (_name(launch), launch.num_threads, args, constants, arch, version(), codecache.sources(module, __name__))
    return f"{module.split('.')[-1]}-sm_{arch}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}"


# Launching.


def _kernel(launch: CuteLaunch, device: int, slots: dict[int, int], scalars: dict[str, int]) -> driver.Kernel:
    """A compiled launch as parameters in ABI order."""
    compiled = compile_launch(launch, binding.arch_of(device))
    function = driver.loaded(compiled.key, compiled.cubin, compiled.name, launch.shared_bytes, device)
    params = binding.parameters(launch.args, slots, scalars)
    return driver.Kernel(function, launch.grid, launch.num_threads, launch.shared_bytes, params)
