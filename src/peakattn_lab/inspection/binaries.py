"""Kernels that somebody else compiled: those of a cubin, or of the cubins inside a library, with no source and no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from peakattn.backends import cubin
from peakattn_lab.inspection import tools
from peakattn_lab.inspection.loops import Loop, Table, hot_loops, kinds_of, products_table

_ELF_MACHINE_CUDA = 190
_NAME_WIDTH = 200
_MOST_DISASSEMBLED = 12
_OPCODES_SHOWN = 12


@dataclass(frozen=True)
class BinaryKernel:
    """One kernel of a file. ``name`` is readable where a demangler is here, and without what templates add to it."""

    name: str
    arch: int
    facts: cubin.Entry
    opcodes: dict[str, int] | None = None  # None where there were too many to disassemble
    loops: tuple[Loop, ...] = ()


def read(path: Path, match: str = "", on_kernel: Callable[[str], None] = lambda name: None) -> list[BinaryKernel]:
    """The kernels of a file whose name the regular expression ``match`` finds; ValueError says what is missing.

    A library may hold hundreds, and a disassembly takes seconds: beyond a dozen, only what stands in their headers is read.
    """
    try:
        pattern = re.compile(match)
    except re.error as error:
        raise ValueError(f"match is {match!r}, which is no regular expression ({error}).") from None
    cubins = [(binary, cubin.entries(binary)) for binary in _cubins(path)]
    names = [entry.name for _, entries in cubins for entry in entries]
    readable = {name: _plain(text) for name, text in _demangled(names).items()}
    wanted = [
        (binary, entry)
        for binary, entries in cubins
        for entry in entries
        if pattern.search(readable[entry.name]) or pattern.search(entry.name)
    ]
    made = []
    for binary, entry in wanted:
        name = readable[entry.name]
        kernel = BinaryKernel(name, cubin.arch(binary), entry)
        if len(wanted) <= _MOST_DISASSEMBLED:
            on_kernel(name)
            sass = _listing(binary, entry.name)
            kernel = replace(kernel, opcodes=cubin.count_opcodes(sass), loops=tuple(hot_loops(sass)))
        made.append(kernel)
    if not made:
        some = "\n  ".join(dict.fromkeys(readable[name] for name in names[:10]))
        raise ValueError(f"no kernel of {path} is named like {match!r}; it has {len(names)}, such as\n  {some}")
    return made


def _cubins(path: Path) -> Iterator[bytes]:
    if not path.is_file():
        raise ValueError(f"there is no file {path}; give a cubin, or a library with device code.")
    with path.open("rb") as file:
        head = file.read(20)
    if head[:4] == b"\x7fELF" and int.from_bytes(head[18:20], "little") == _ELF_MACHINE_CUDA:
        yield path.read_bytes()
        return
    cuobjdump = tools.one("cuobjdump")
    with tempfile.TemporaryDirectory() as folder:
        command = [str(cuobjdump), "-xelf", "all", str(path.resolve())]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
        files = sorted(Path(folder).glob("*.cubin"))
        if not files:
            said = next((line for line in (done.stderr + done.stdout).splitlines() if line.strip()), "it says nothing")
            raise ValueError(f"{path} has no machine code of a GPU that cuobjdump {tools.version(cuobjdump)} finds: {said}")
        for one in files:
            yield one.read_bytes()


def _listing(binary: bytes, name: str) -> str:
    """The listing of one kernel."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(binary)
        command = [str(tools.one("cuobjdump")), "-sass", "-fun", name, str(file)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise RuntimeError(f"cuobjdump cannot read {name}: {done.stderr.strip()}")
    return done.stdout


def _demangled(names: Sequence[str]) -> dict[str, str]:
    program = shutil.which("cu++filt") or shutil.which("c++filt")
    if program is None or not names:
        return {name: name for name in names}
    done = subprocess.run([program], input="\n".join(names), capture_output=True, text=True, errors="replace", check=False)
    readable = done.stdout.splitlines()
    return dict(zip(names, readable, strict=True)) if len(readable) == len(names) else {name: name for name in names}


def tables(kernels: Sequence[BinaryKernel]) -> list[Table]:
    """What each kernel takes, its opcodes, and its hot loops."""
    header = ["kernel", "arch", "registers", "frame", "spills", "static smem KiB", "threads", "instructions", "opcodes"]
    rows = [
        [
            _short(k.name),
            f"sm_{k.arch}",
            str(k.facts.registers),
            str(k.facts.frame_bytes),
            "-" if k.opcodes is None else str(k.opcodes.get("LDL", 0) + k.opcodes.get("STL", 0)),
            f"{k.facts.static_shared_bytes / 1024:.1f}",
            str(k.facts.num_threads or "-"),
            "-" if k.opcodes is None else str(sum(k.opcodes.values())),
            ", ".join(f"{count} {name}" for name, count in Counter(k.opcodes).most_common(_OPCODES_SHOWN)),
        ]
        for k in kernels
    ]
    loops = [(_short(k.name), loop) for k in kernels for loop in k.loops]
    kinds = kinds_of([loop for _, loop in loops])
    loop_rows = [
        [str(n), name, str(len(loop.instructions)), *(str(loop.kinds.get(kind, 0)) for kind in kinds)]
        for n, (name, loop) in enumerate(loops, 1)
    ]
    made: list[Table] = [("kernels", header, rows)]
    if loops:
        made.append(("hot loops, instructions of one warp", ["loop", "kernel", "instructions a tile", *kinds], loop_rows))
        made.append(products_table(loops))
    return made


def notes(kernels: Sequence[BinaryKernel]) -> list[str]:
    """What the tables do not say, in sentences."""
    said = "Shared memory that a launch asks for stands in no file; warp-specialised kernels move registers between warps "
    made = [said + "(USETMAXREG), so that registers are those of a thread as launched."]
    if any(k.opcodes is None for k in kernels):
        made.append(
            f"{len(kernels)} kernels are too many to disassemble; narrow --match to {_MOST_DISASSEMBLED} or fewer for "
            "opcodes, spills and loops."
        )
    return made


def _plain(name: str) -> str:
    """A name without what C++ templates add to it for pages: parameters, namespaces, wrapped numbers."""
    bare = re.sub(r"\b\w+::", "", re.sub(r">\(.*", ">", name).removeprefix("void "))
    return re.sub(r"\bC<(\d+)>", r"\1", bare).replace("tuple<", "<").replace("> ", ">").replace(" >", ">")


def _short(name: str) -> str:
    return name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 1]}…"
