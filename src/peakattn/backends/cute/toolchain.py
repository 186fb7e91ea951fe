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

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import struct
import tempfile
import threading
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from peakattn.backends import cubin, driver, load
from peakattn.backends.binding import SCALARS, Bound, meta_tensors, slots_of
from peakattn.backends.contract import Artifacts
from peakattn.backends.driver import Counter, Tma
from peakattn.problem import AttentionProblem

_PACKAGE = "nvidia-cutlass-dsl"
_MIN_VERSION = (4, 8)  # the first whose functions can be named
_ARCH_SPECIFIC = 90  # from here on the machine code is for one architecture, with all its instructions
_POINTER_ALIGN = 16
_ENTRY = re.compile(r"\.visible \.entry (\w+)\((.*?)\)\s*\.reqntid (\d+)", re.DOTALL)
_PARAM = re.compile(r"\.param\s+(?:\.align \d+\s+)?\.(\w+)(\s+\.ptr)?[^,]*?(?:\[(\d+)\])?\s*(?:,|$)")

_compiled: dict[str, Compiled] = {}
_functions: dict[tuple[str, int, int], Any] = {}  # (key, shared bytes, device) -> loaded function
_compiling = threading.Lock()


@dataclass(frozen=True)
class Int64:
    """An integer argument of 64 bits, such as a stride."""

    value: int


@dataclass(frozen=True)
class CuteLaunch:
    """One launch of a device function: run-time arguments in order, and compile-time constants by name."""

    device_code: Callable[[], Any]  # imports the class of the device code and returns it; called only to compile
    grid: tuple[int, int, int]
    num_threads: int
    shared_bytes: int  # dynamic shared memory
    args: dict[str, Any]  # torch.Tensor, Tma, int (32 bits), Int64, float or None
    constexprs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Compiled:
    """Machine code of one device function."""

    key: str
    name: str
    cubin: bytes
    ptx: str


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
    with _compiling:  # the compiler keeps its state in globals
        compiled = _compiled.get(key)
        if compiled is None:
            compiled = _from_disk(key) or _to_disk(_compile(launch, arch, key))
            _compiled[key] = compiled
    return compiled


def bind(launches: Sequence[CuteLaunch], tensors: Sequence[torch.Tensor | None]) -> Bound:
    """A function of (*tensors, softmax_scale, softcap) that launches; compiled and loaded once, for the current device.

    ``tensors`` are those from which ``launches`` was made; others of the same shapes, strides, dtypes and
    alignment may take their place.
    """
    device = next(t.device.index for t in tensors if t is not None)
    kernels = [_kernel(launch, device, *slots_of(tensors)) for launch in launches]
    return Bound(driver.chain([driver.launcher(kernel, device) for kernel in kernels]), tensors)


def run(launches: Sequence[CuteLaunch]) -> None:
    """Launches at once, with nothing kept."""
    if not launches:
        return
    values = [value.tensor if isinstance(value, Tma) else value for launch in launches for value in launch.args.values()]
    tensors = list({id(t): t for t in values if isinstance(t, torch.Tensor)}.values())
    bind(launches, tensors)(*tensors, *(launches[0].args[name] for name in SCALARS))


def artifacts(kernel: str, problem: AttentionProblem, config: Any, arch: int) -> list[Artifacts]:
    """What the compiler makes of a kernel's device functions for ``sm_<arch>``; works with no GPU."""
    made = []
    for launch in load(kernel).launches(problem, config, *meta_tensors(problem), 1.0, 0.5 if problem.softcap else 0.0):
        compiled = compile_launch(launch, arch)
        facts = cubin.facts(compiled.cubin, compiled.name)
        sass = cubin.disassemble(compiled.cubin, _cuobjdump())
        made.append(
            Artifacts(
                name=compiled.name,
                arch=arch,
                registers=facts.registers,
                frame_bytes=facts.frame_bytes,
                shared_bytes=launch.shared_bytes,
                num_threads=launch.num_threads,
                opcodes=cubin.count_opcodes(sass),
                loops=cubin.tensor_loops(sass),
                ptx=compiled.ptx,
                sass=sass,
            )
        )
    return made


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``PEAKATTN_CACHE_DIR``, else ``peakattn`` in the user's cache folder."""
    given = os.environ.get("PEAKATTN_CACHE_DIR")
    root = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peakattn"
    return root / "cute"


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


# The cache on disk.


def _key(launch: CuteLaunch, arch: int) -> str:
    """A hash of everything that the machine code is made from."""

    def kind(value: Any) -> Any:
        tensor = value.tensor if isinstance(value, Tma) else value
        return (_expected(value), tensor.dtype if isinstance(tensor, torch.Tensor) else None)

    args = tuple((name, *kind(value)) for name, value in launch.args.items())
    constants = tuple(sorted(launch.constexprs.items()))
    module = launch.device_code.__module__
    facts = (_name(launch), launch.num_threads, args, constants, arch, version(), _sources(module))
    return f"{module.split('.')[-1]}-sm_{arch}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}"


@functools.cache
def _sources(module: str) -> str:
    """A hash of the sources of a module and of what it imports from its own package or this one; nothing is imported."""
    packages = (f"{module.rpartition('.')[0]}.", f"{__package__}.")
    texts: dict[str, str] = {}
    waiting = [module, __name__]
    while waiting:
        name = waiting.pop()
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or name in texts:
            continue
        texts[name] = text = Path(spec.origin).read_text(encoding="utf-8")
        if name == __name__:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module and f"{node.module}.".startswith(packages):
                waiting.append(node.module)
                source = importlib.util.find_spec(node.module)
                # To ask for a name inside a module that is no package would import that module, and cutlass with it.
                if source is not None and source.submodule_search_locations is not None:
                    waiting += [f"{node.module}.{alias.name}" for alias in node.names]
    return hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()


def _from_disk(key: str) -> Compiled | None:
    """A kept kernel; a file that is missing, cut short or damaged is none."""
    try:
        with zipfile.ZipFile(cache_folder() / f"{key}.zip") as file:  # every member has a checksum
            return Compiled(key, file.read("name").decode(), file.read("cubin"), file.read("ptx").decode())
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, zlib.error):
        return None


def _to_disk(compiled: Compiled) -> Compiled:
    """Keeps a kernel. Other processes see a whole file or none; a folder that cannot be written is no error."""
    with contextlib.suppress(OSError):
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as raw, zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as file:
                for name, content in (("name", compiled.name), ("cubin", compiled.cubin), ("ptx", compiled.ptx)):
                    file.writestr(name, content)
            os.replace(temporary, folder / f"{compiled.key}.zip")
        except BaseException:
            os.unlink(temporary)
            raise
    return compiled


# Launching.


def _kernel(launch: CuteLaunch, device: int, slots: dict[int, int], scalars: dict[str, int]) -> driver.Kernel:
    """A compiled launch as parameters in ABI order."""
    compiled = compile_launch(launch, _arch(device))
    params: list[driver.Param] = []
    for name, value in launch.args.items():
        if isinstance(value, Tma):
            params.append(value.tensor_map(slots[id(value.tensor)]))
        elif isinstance(value, torch.Tensor):
            params.append(driver.Pointer(slots[id(value)]))
        elif name in scalars:
            params.append(driver.Scalar(scalars[name]))
        elif isinstance(value, Counter):
            params.append(value)
        elif isinstance(value, Int64):
            params.append(struct.pack("q", value.value))
        elif value is not None:
            params.append(struct.pack("f" if isinstance(value, float) else "i", value))
    loaded = (compiled.key, launch.shared_bytes, device)
    function = _functions.get(loaded)
    if function is None:
        function = _functions[loaded] = driver.load_function(compiled.cubin, compiled.name, launch.shared_bytes)
    return driver.Kernel(function, launch.grid, launch.num_threads, launch.shared_bytes, tuple(params))


@functools.cache
def _arch(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def _cuobjdump() -> str:
    """NVIDIA's cuobjdump: from the CUDA toolkit, else the one that comes with Triton."""
    found = shutil.which("cuobjdump")
    spec = None if found else importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        found = str(Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump")
    if found is None:
        raise RuntimeError("cuobjdump is not there; it comes with the CUDA toolkit and with the package triton.")
    return found
