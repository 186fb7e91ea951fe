"""NVRTC, NVIDIA's run-time compiler for CUDA C++: is it there, what it makes of a kernel, and how that is launched.

A kernel describes its launch as a ``CudaLaunch`` value: a source file, the name of its ``extern "C"`` function, run-time
arguments in the order of the function's parameters, and compile-time constants, which become ``-D`` options.  A source
includes nothing but files beside it; no toolkit, header or host compiler is needed.  The arguments become parameters:

    torch.Tensor, Counter, None   .u64       an address; None is the null pointer
    Tma                           .b8[128]   a TMA descriptor by value: __grid_constant__, 64-byte aligned
    int, Int64                    .u32, .u64
    float                         .f32

The parameter list of the PTX is held against the description, so that a launch cannot pass something else.  Machine
code and PTX are kept on disk under a hash of all they were made from; ``driver`` launches them.  A process that finds
its kernel there never loads NVRTC.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from peakattn.backends import binding, codecache, cubin, driver, load
from peakattn.backends.binding import Bound, Int64, meta_tensors
from peakattn.backends.codecache import Compiled
from peakattn.backends.contract import Artifacts
from peakattn.backends.driver import Counter, Tma
from peakattn.problem import AttentionProblem

FOLDER = Path(__file__).resolve().parent

_BACKEND = "cuda"
_BINDINGS = "cuda-bindings"
# NVRTC's package by the major version of the bindings that load it, which is that of the driver's CUDA too.
_NVRTC = {"12": "nvidia-cuda-nvrtc-cu12"}
_NEWEST_NVRTC = "nvidia-cuda-nvrtc"
_ARCH_SPECIFIC = 90  # from here on the machine code is for one architecture, with all its instructions
_OPTIONS = ("-std=c++17", "-default-device")
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_ENTRY = re.compile(r"\.visible \.entry (\w+)\((.*?)\)\s*\.maxntid (\d+)", re.DOTALL)
_PARAM = re.compile(r"\.param\s+(?:\.align \d+\s+)?\.(\w+)(?:\s+\.ptr(?:\s+\.\w+(?:\s+\d+)?)*)?\s+\w+(\[\d+\])?")
_KINDS = {"u32": "32-bit integer", "u64": "address or 64-bit integer", "f32": "float32", "b8[128]": "tensor map"}
_LOG_LINES = 30

_kept = codecache.Kept(_BACKEND)


@dataclass(frozen=True)
class CudaLaunch:
    """One launch of a device function: run-time arguments in order, and compile-time constants by name."""

    source: Path
    function: str
    grid: tuple[int, int, int]
    num_threads: int
    shared_bytes: int  # dynamic shared memory
    args: dict[str, Any]  # torch.Tensor, Tma, int (32 bits), Int64, float, Counter or None
    constants: dict[str, int | str] = field(default_factory=dict)


@functools.cache
def unavailable() -> str | None:
    """Why NVRTC cannot be used here, or None."""
    try:
        importlib.metadata.version(_BINDINGS)
        importlib.metadata.version(_package())
    except importlib.metadata.PackageNotFoundError as missing:
        return f"the package {missing.name} is not installed"
    return None


@functools.cache
def version() -> str:
    return f"{_package()} {importlib.metadata.version(_package())}"


def _package() -> str:
    return _NVRTC.get(importlib.metadata.version(_BINDINGS).split(".")[0], _NEWEST_NVRTC)


def compile_launch(launch: CudaLaunch, arch: int) -> Compiled:
    """The machine code of a launch for ``sm_<arch>``: from this process, from disk, or from NVRTC, with no GPU."""
    key = _key(launch, arch)
    return _kept.get(key, lambda: _compile(launch, arch, key))


def bind(launches: Sequence[CudaLaunch], tensors: Sequence[torch.Tensor | None]) -> Bound:
    """What ``binding.bind`` makes of launches of this compiler."""
    return binding.bind(launches, tensors, _kernel)


def run(launches: Sequence[CudaLaunch]) -> None:
    """Launches at once, with nothing kept."""
    binding.run(launches, bind)


def artifacts(kernel: str, problem: AttentionProblem, config: Any, arch: int) -> list[Artifacts]:
    """What the compiler makes of a kernel's device functions for ``sm_<arch>``; works with no GPU."""
    softcap = 0.5 if problem.softcap else 0.0
    return artifacts_of(load(kernel).launches(problem, config, *meta_tensors(problem), 1.0, softcap), arch)


def artifacts_of(launches: Sequence[CudaLaunch], arch: int) -> list[Artifacts]:
    """The same of given launches, which need not be those of a kernel of the library."""
    made = [(compile_launch(launch, arch), launch) for launch in launches]
    return [cubin.artifacts(c.cubin, c.name, arch, c.ptx, x.shared_bytes, x.num_threads) for c, x in made]


# Compiling.


def _compile(launch: CudaLaunch, arch: int, key: str) -> Compiled:
    from cuda.bindings import nvrtc

    def call(function: Any, *args: Any) -> Any:
        status, *results = function(*args)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"{function.__name__} failed with {status.name}.")
        return results[0] if results else None

    def text(size: Any, read: Any) -> bytes:
        buffer = b" " * call(size, program)
        call(read, program, buffer)
        return buffer

    source, *headers = _sources(launch.source).items()
    names = [name.encode() for name, _ in headers]
    texts = [content.encode() for _, content in headers]
    program = call(nvrtc.nvrtcCreateProgram, source[1].encode(), source[0].encode(), len(headers), texts, names)
    try:
        constants = (f"-D{name}={value}" for name, value in launch.constants.items())
        options = [option.encode() for option in (f"-arch={_chip(arch)}", *_OPTIONS, *constants)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).rstrip(b"\0\n ").decode(errors="replace")
            raise RuntimeError(_failure(launch, arch, key, log or status.name))
        code = text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        ptx = text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).rstrip(b"\0").decode()
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Compiled(key, _checked_name(launch, ptx), code, ptx)


def _chip(arch: int) -> str:
    return f"sm_{arch}{'a' if arch >= _ARCH_SPECIFIC else ''}"


def _failure(launch: CudaLaunch, arch: int, key: str, log: str) -> str:
    """The sentence of a compile that failed, with the beginning of the log and the file that has all of it."""
    constants = ", ".join(f"{name}={value}" for name, value in launch.constants.items())
    message = f"{version()} cannot compile {launch.source.name} for {_chip(arch)} with {constants}"
    with contextlib.suppress(OSError):
        file = codecache.folder(_BACKEND) / f"{key}.log"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(log, encoding="utf-8")
        message += f"; its whole log is in {file}"
    return f"{message}:\n" + "\n".join(log.splitlines()[:_LOG_LINES])


def _checked_name(launch: CudaLaunch, ptx: str) -> str:
    """The function's name, after its parameters and block in ``ptx`` were held against the launch."""
    entries = {name: (params, threads) for name, params, threads in _ENTRY.findall(ptx)}
    if launch.function not in entries:
        raise RuntimeError(
            f"{launch.source.name} has no function {launch.function!r} with launch bounds; "
            f"it has {', '.join(entries) or 'none'}."
        )
    params, threads = entries[launch.function]
    found = [_KINDS.get(kind + size, kind + size) for kind, size in _PARAM.findall(params)]
    wanted = [_expected(value) for value in launch.args.values()]
    if found != wanted:
        raise RuntimeError(
            f"{launch.function} of {launch.source.name} takes {', '.join(found)}, and the launch passes {', '.join(wanted)}; "
            "give the device function the arguments of the launch, in their order."
        )
    if int(threads) != launch.num_threads:
        raise RuntimeError(f"{launch.function} was compiled for {threads} threads, and the launch has {launch.num_threads}.")
    return launch.function


def _expected(value: Any) -> str:
    if value is None or isinstance(value, (torch.Tensor, Counter, Int64)):
        return _KINDS["u64"]
    if isinstance(value, Tma):
        return _KINDS["b8[128]"]
    if isinstance(value, float):
        return _KINDS["f32"]
    if isinstance(value, int) and not isinstance(value, bool):
        return _KINDS["u32"]
    raise TypeError(f"{value!r} is no argument of a launch; pass a tensor, Tma, int, Int64, float, Counter or None.")


# Keys.


def _key(launch: CudaLaunch, arch: int) -> str:
    """A hash of everything that the machine code is made from."""
    args = tuple((name, _expected(value)) for name, value in launch.args.items())
    constants = tuple(sorted(launch.constants.items()))
    texts = _hash_of_sources(launch.source)
    facts = (launch.source.name, launch.function, launch.num_threads, args, constants, _chip(arch), _OPTIONS, version(), texts)
    return f"{launch.source.stem}-sm_{arch}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}"


@functools.cache
def _hash_of_sources(source: Path) -> str:
    return hashlib.sha256(repr(_sources(source)).encode()).hexdigest()


def _sources(source: Path) -> dict[str, str]:
    """The text of a source and then of all that it includes, by name; from its own folder, else from this one."""
    texts: dict[str, str] = {}
    waiting = [source.name]
    while waiting:
        name = waiting.pop()
        if name not in texts:
            beside = source.parent / name
            texts[name] = (beside if beside.is_file() else FOLDER / name).read_text(encoding="utf-8")
            waiting += _INCLUDE.findall(texts[name])
    return texts


# Launching.


def _kernel(launch: CudaLaunch, device: int, slots: dict[int, int], scalars: dict[str, int]) -> driver.Kernel:
    """A compiled launch as parameters in ABI order."""
    compiled = compile_launch(launch, binding.arch_of(device))
    function = driver.loaded(compiled.key, compiled.cubin, compiled.name, launch.shared_bytes, device)
    params = binding.parameters(launch.args, slots, scalars, null=bytes(8))
    return driver.Kernel(function, launch.grid, launch.num_threads, launch.shared_bytes, params)
