"""NVIDIA's assemblers and disassemblers: where they are, which one reads a cubin, and what they make of a file."""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from peakattn.backends import cubin

# Where a toolkit installs, beside PATH.
_TOOLKIT = Path("/usr/local/cuda/bin")

_LINE = re.compile(r'^\s*//## File "(?P<file>[^"]*)", line (?P<line>\d+)|^\s+/\*(?P<address>[0-9a-f]{4,})\*/\s', re.MULTILINE)


@functools.cache
def find(name: str) -> tuple[Path, ...]:
    """Every program of that name here: those that Triton carries, of pip's nvidia packages, on PATH, of a CUDA toolkit."""
    folders = []
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        folders.append(Path(spec.origin).parent / "backends" / "nvidia" / "bin")
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        folders += sorted(Path(root).glob("*/bin"))
    found = [folder / name for folder in folders]
    on_path = shutil.which(name)
    found += ([Path(on_path)] if on_path else []) + [_TOOLKIT / name]
    return tuple(dict.fromkeys(path.resolve() for path in found if path.is_file()))


def one(name: str) -> Path:
    """The first program of that name, or ValueError that says how to get one."""
    programs = find(name)
    if not programs:
        raise ValueError(
            f"{name} is not here; it comes with triton, with pip install nvidia-cuda-{name}, or with a CUDA toolkit."
        )
    return programs[0]


@functools.cache
def version(program: Path) -> str:
    """The release of one of these programs, such as ``12.8.93``; ValueError when it is none of them."""
    done = _run([program, "--version"])
    match = re.search(r"\bV(\d+\.\d+\.\d+)", done.stdout)
    if match is None:
        raise ValueError(f"{program} does not say its version like a tool of CUDA; name a ptxas, nvdisasm or cuobjdump.")
    return match[1]


def disassembler(binary: bytes) -> Path:
    """The nvdisasm of the cubin's own age where there is one, else any: it then lists, and does not analyse."""
    programs = find("nvdisasm")
    new = cubin.abi(binary) == cubin.NEW_ABI
    fitting = (path for path in programs if (int(version(path).split(".")[0]) >= 13) == new)
    return next(fitting, None) or one("nvdisasm")


def source_lines(binary: bytes) -> dict[int, tuple[str, int]]:
    """(file, line) of each instruction address of a cubin with one kernel; empty when it carries no line information."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(binary)
        done = _run([disassembler(binary), "-g", "-c", file])
    if done.returncode:
        raise RuntimeError(f"nvdisasm cannot read the cubin: {done.stderr.strip()}")
    found: dict[int, tuple[str, int]] = {}
    where = None
    for match in _LINE.finditer(done.stdout):
        if match["file"] is not None:
            where = match["file"], int(match["line"])
        elif where is not None:
            found[int(match["address"], 16)] = where
    return found


def assemble(ptx: str, ptxas: Path) -> bytes:
    """The cubin that a ptxas makes of PTX, for the PTX's own target and with line information."""
    target = re.search(r"^\.target\s+(sm_\w+)", ptx, re.MULTILINE)
    if target is None:
        raise ValueError("the PTX names no target, so it cannot be assembled.")
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx, encoding="utf-8")
        done = _run([ptxas, "-lineinfo", f"--gpu-name={target[1]}", source, "-o", made])
        if done.returncode:
            said = next((line for line in done.stderr.splitlines() if line.strip()), "no message")
            raise ValueError(f"{ptxas.name} {version(ptxas)} does not assemble this PTX: {said}")
        return made.read_bytes()


def listing(binary: bytes) -> str:
    """The SASS listing of a cubin."""
    return cubin.disassemble(binary, one("cuobjdump"))


def ptxas_of(text: str) -> Path:
    """The ptxas that a path or a name such as ``ptxas-blackwell`` means."""
    path = Path(text)
    if path.is_file():
        return path.resolve()
    programs = find(text) if path.name == text else ()
    if not programs:
        known = [str(p) for name in ("ptxas", "ptxas-blackwell") for p in find(name)]
        raise ValueError(f"there is no ptxas {text}; here are {', '.join(known) or 'none'}.")
    return programs[0]


def _run(command: list[str | Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace", check=False)
