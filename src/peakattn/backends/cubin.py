"""Reading machine code: what kernels take, from a cubin's ELF sections, and opcode counts from its disassembly."""

from __future__ import annotations

import importlib.util
import math
import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from peakattn.backends.contract import Artifacts

# Attribute codes of the .nv.info sections (EIFMT_SVAL records: format 4, code, 16-bit length, payload).
_REGISTERS = 0x2F
_FRAME = 0x11
_MAX_THREADS = 0x05
_REQUIRED_THREADS = 0x10
# Shared memory that the system takes of each block from sm_90 on, counted in the section of a kernel.
_SYSTEM_SHARED = 1024
# The ELF flavours of compilers before and from CUDA 13; the flags word holds the architecture in another byte.
OLD_ABI, NEW_ABI = 51, 65
_ARCH_SHIFT = {OLD_ABI: 0, NEW_ABI: 8}
# The products: mma.sync, wgmma, tcgen05.
TENSOR_CORE_OPCODES = ("HMMA", "HGMMA", "UTCHMMA")
_WARPGROUP_OPCODES = {"HGMMA", "UTCHMMA"}

# One instruction of a listing: its address, perhaps a predicate, its opcode and operands.
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+((?:@!?U?P\w+\s+)?)([A-Z][^;]*?)\s*;", re.MULTILINE)
_TARGET = re.compile(r"0x([0-9a-f]+)")


@dataclass(frozen=True)
class Entry:
    """A kernel of a cubin. Shared memory is the static part; what a launch adds stands in no file."""

    name: str
    registers: int  # per thread, at launch
    frame_bytes: int  # of local memory, per thread
    static_shared_bytes: int
    num_threads: int | None  # required or the most of a block, where the kernel says it


def entry(cubin: bytes, name: str) -> Entry:
    """Kernel ``name`` of an ELF cubin; ValueError when it is not there."""
    found = {one.name: one for one in entries(cubin)}
    if name not in found:
        raise ValueError(f"the cubin has no kernel {name!r}; it has {', '.join(found) or 'none'}.")
    return found[name]


def entries(cubin: bytes) -> list[Entry]:
    """Every kernel of an ELF cubin."""
    registers, frames = _by_symbol(cubin)
    sections = dict(_sections(cubin))
    shared = {name: header[5] for name, _, header in _section_table(cubin) if name.startswith(".nv.shared.")}
    reserved = _SYSTEM_SHARED if arch(cubin) >= 90 else 0
    made = []
    for symbol, count in registers.items():
        if f".text.{symbol}" not in sections:
            continue
        threads = {c: payload for c, payload in _records(sections.get(f".nv.info.{symbol}", b"")) if len(payload) == 12}
        limits = threads.get(_REQUIRED_THREADS) or threads.get(_MAX_THREADS)
        size = max(shared.get(f".nv.shared.{symbol}", 0) - reserved, 0)
        num_threads = math.prod(struct.unpack("<3I", limits)) if limits else None
        made.append(Entry(symbol, count, frames.get(symbol, 0), size, num_threads))
    return made


def _by_symbol(cubin: bytes) -> tuple[dict[str, int], dict[str, int]]:
    """Registers and local-memory frames of device functions, by name."""
    names = _symbols(cubin)
    registers: dict[str, int] = {}
    frames: dict[str, int] = {}
    for section, data in _sections(cubin):
        if section != ".nv.info":
            continue
        for code, payload in _records(data):
            if code in (_REGISTERS, _FRAME) and len(payload) == 8:
                symbol, value = struct.unpack("<II", payload)
                (registers if code == _REGISTERS else frames)[names[symbol]] = value
    return registers, frames


def abi(cubin: bytes) -> int:
    """The ELF flavour: ``OLD_ABI`` or ``NEW_ABI``. A disassembler analyses only what is of its own age."""
    return cubin[7]


def arch(cubin: bytes) -> int:
    """The architecture that a cubin is for, as 90 for sm_90."""
    (flags,) = struct.unpack_from("<I", cubin, 0x30)
    return flags >> _ARCH_SHIFT.get(abi(cubin), 0) & 0xFF


def disassemble(cubin: bytes, cuobjdump: str | Path | None = None) -> str:
    """The SASS listing of a cubin, by a ``cuobjdump`` program; unless given, the toolkit's, else the one of Triton."""
    cuobjdump = cuobjdump or _cuobjdump()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        done = subprocess.run([str(cuobjdump), "-sass", str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{cuobjdump} cannot read the cubin: {done.stderr.strip()}")
    return done.stdout


def _cuobjdump() -> str:
    found = shutil.which("cuobjdump")
    spec = None if found else importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        found = str(Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump")
    if found is None:
        raise RuntimeError("cuobjdump is not there; it comes with the CUDA toolkit and with the package triton.")
    return found


def artifacts(
    cubin: bytes, name: str, arch: int, ptx: str | None = None, shared_bytes: int | None = None, num_threads: int | None = None
) -> Artifacts:
    """What a compiler made of a device function. Shared memory and threads are the machine code's own unless given."""
    found = entry(cubin, name)
    sass = disassemble(cubin)
    return Artifacts(
        name=name,
        arch=arch,
        registers=found.registers,
        frame_bytes=found.frame_bytes,
        shared_bytes=found.static_shared_bytes if shared_bytes is None else shared_bytes,
        num_threads=num_threads or found.num_threads or 0,
        opcodes=count_opcodes(sass),
        loops=tensor_loops(sass),
        ptx=ptx or None,
        sass=sass,
    )


def count_opcodes(sass: str) -> dict[str, int]:
    """How often each opcode head (HGMMA, UTMALDG, STL, ...) stands in a cuobjdump listing."""
    return dict(Counter(i.head for i in instructions(sass)))


@dataclass(frozen=True)
class Instruction:
    """One line of a listing: ``opcode`` with all its suffixes, ``text`` with predicate and operands."""

    address: int
    opcode: str
    text: str

    @property
    def head(self) -> str:
        """The opcode without suffixes."""
        return re.split(r"[^A-Z0-9]", self.opcode, maxsplit=1)[0]


def instructions(listing: str) -> list[Instruction]:
    """The instructions of a cuobjdump listing, in order."""
    return [Instruction(int(m[1], 16), m[3].split(maxsplit=1)[0], m[2] + m[3]) for m in _INSTRUCTION.finditer(listing)]


def hot_loops(sass: str) -> list[tuple[Instruction, ...]]:
    """The innermost loops with tensor-core instructions, each pass over which is one tile.

    A loop is what a backward branch spans in a cuobjdump listing, unless the kernel ends in between: retries of a
    barrier wait stand behind the last instruction and jump back from there.  Where a kernel has products of warpgroups,
    loops with products of single warps are for rare rows, and no part of the tile that they stand in.
    """
    loops = []
    for function in sass.split("Function :"):
        code = instructions(function)
        spans = {
            (int(target[1], 16), i.address)
            for i in code
            if i.head == "BRA" and (target := _TARGET.search(i.text)) and int(target[1], 16) < i.address
        }
        bodies = {span: tuple(i for i in code if span[0] <= i.address <= span[1]) for span in sorted(spans)}
        heads = {span: {i.head for i in body} for span, body in bodies.items()}
        products = {i.head for i in code} & set(TENSOR_CORE_OPCODES)
        wanted = products & _WARPGROUP_OPCODES or products
        hot = [span for span in bodies if "EXIT" not in heads[span] and heads[span] & wanted]
        for span in hot:
            inside = [other for other in bodies if other != span and span[0] <= other[0] and other[1] <= span[1]]
            if not any(other in hot for other in inside):
                rare = [other for other in inside if heads[other] & products]
                loops.append(tuple(i for i in bodies[span] if not any(a <= i.address <= b for a, b in rare)))
    return loops


def tensor_loops(sass: str) -> list[dict[str, int]]:
    """Opcode counts of each hot loop: what a tile costs, and whether it spills."""
    return [dict(Counter(i.head for i in body)) for body in hot_loops(sass)]


def _sections(elf: bytes) -> list[tuple[str, bytes]]:
    return [(name, data) for name, data, _ in _section_table(elf)]


def _section_table(elf: bytes) -> list[tuple[str, bytes, tuple[int, ...]]]:
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file; pass the bytes of a cubin.")
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    # name, type, flags, address, offset, size, link, info, alignment, entry size
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, offset + i * size) for i in range(count)]
    strings = headers[names_index]
    table = elf[strings[4] : strings[4] + strings[5]]
    no_bits = 8
    return [(_string(table, h[0]), b"" if h[1] == no_bits else elf[h[4] : h[4] + h[5]], h) for h in headers]


def _symbols(elf: bytes) -> list[str]:
    table = _section_table(elf)
    for _, data, header in table:
        if header[1] == 2:  # SHT_SYMTAB
            strings = table[header[6]][1]
            return [_string(strings, struct.unpack_from("<I", data, i)[0]) for i in range(0, len(data), 24)]
    return []


def _records(data: bytes) -> list[tuple[int, bytes]]:
    found, at = [], 0
    while at + 4 <= len(data):
        form, code, length = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == 4:  # EIFMT_SVAL; in other formats the value stands in the length field
            found.append((code, data[at : at + length]))
            at += length
    return found


def _string(table: bytes, start: int) -> str:
    return table[start : table.index(b"\0", start)].decode()
