"""The layouts that Triton chose: which warp computes what, and each trip through shared memory, from its TTGIR.

TTGIR is the last stage that still looks like the program, with the layout of every tensor written out.  Other compilers
have no such stage, or keep it to themselves; there the machine code is all that can be read.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from peakattn import backends
from peakattn_lab.inspection.kernel import Inspection
from peakattn_lab.inspection.loops import Table

_MMA = re.compile(r"^#(\w+) = #ttg\.nvidia_mma<\{(.*)\}>", re.MULTILINE)
_PRODUCT = re.compile(r"= (?:tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma) .*->\s*tensor<([\dx]+)x\w+, #(\w+)>")
_ANY_PRODUCT = re.compile(r"\b(?:tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma)\b")
_LOOP = re.compile(r"^(\s*).*\bscf\.(?:for|while)\b.*\{\s*$")
_OPERATION = re.compile(r"\b(ttn?g\.(?:local_\w+|convert_layout|async_\w+)|tt\.(?:reduce|load|trans|descriptor_load))\b")
_BUFFER = re.compile(r"^\s*%(\w+) = ttg\.local_alloc (?:%\w+ )?: .*-> !ttg\.memdesc<([\dx]+)x([a-z]\w*), #")
# A value that goes from registers into shared memory, and where it will be read back in another layout.
_FROM_REGISTERS = re.compile(r"ttg\.local_alloc %\w+ : \(tensor<")
_BITS = re.compile(r"\d+")
_ROUND_TRIPS = "register tiles through shared memory"


@dataclass(frozen=True)
class Product:
    """A product of a hot loop: its result, and how the warps share it."""

    shape: tuple[int, int]
    layout: str
    warps: tuple[int, int]
    instruction: tuple[int, int]

    @property
    def copies(self) -> int:
        """How many times each element is computed: more than once when the warps cover more than the tile."""
        covered = [w * i for w, i in zip(self.warps, self.instruction, strict=True)]
        return math.prod(max(1, c // size) for c, size in zip(covered, self.shape, strict=True))

    @property
    def whole_rows(self) -> bool:
        """True when no row is spread over several warps, so that maxima and sums of rows need no shared memory."""
        return self.warps[1] == 1


@dataclass(frozen=True)
class LoopLayout:
    """One innermost loop with products."""

    products: tuple[Product, ...]
    operations: dict[str, int]


@dataclass(frozen=True)
class Layouts:
    """What the TTGIR of one device function says. ``buffers`` are (name, shape, bytes) of shared memory."""

    function: str
    loops: tuple[LoopLayout, ...]
    buffers: tuple[tuple[str, str, int], ...]


def of(found: Inspection) -> list[Layouts]:
    """The layouts of each device function; none for a backend that has no TTGIR."""
    if found.kernel.split(".")[0] != "triton":
        return []
    toolchain = backends.toolchain("triton")
    launches = toolchain.launches_of(backends.load(found.kernel), found.problem, found.config)
    compiled = [toolchain.compile_launch(launch, found.device.arch) for launch in launches]
    return [read(one.metadata.name, one.asm["ttgir"]) for one in compiled]


def read(function: str, ttgir: str) -> Layouts:
    """The layouts in the TTGIR of a device function."""
    layouts = {name: _pairs(body) for name, body in _MMA.findall(ttgir)}
    lines = ttgir.splitlines()
    loops = tuple(_loop(body, layouts) for body in _hot_bodies(lines))
    buffers = []
    for line in lines:
        if match := _BUFFER.match(line):
            size = math.prod(map(int, match[2].split("x")))
            bits = _BITS.search(match[3])
            buffers.append((match[1], f"{match[2]} {match[3]}", size * int(bits[0]) // 8 if bits else 0))
    return Layouts(function, loops, tuple(buffers))


def _pairs(body: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """(warps, instruction) along rows and columns of an mma layout."""
    found = []
    for name in ("warpsPerCTA", "instrShape"):
        match = re.search(rf"{name} = \[([\d, ]+)\]", body)
        sizes = [int(size) for size in match[1].split(",")] if match else [1, 1]
        found.append((sizes[0], sizes[1]))
    return found[0], found[1]


def _hot_bodies(lines: list[str]) -> list[list[str]]:
    """The bodies of loops that hold products and no other such loop. A loop ends at a brace of its own indentation."""
    spans = []
    for start, line in enumerate(lines):
        if match := _LOOP.match(re.sub(r" loc\(.*\)$", "", line)):
            closing = match[1] + "}"
            end = next((i for i in range(start + 1, len(lines)) if lines[i].startswith(closing)), len(lines))
            if any(_ANY_PRODUCT.search(inner) for inner in lines[start + 1 : end]):
                spans.append((start, end))
    inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    return [lines[start + 1 : end] for start, end in inner]


def _loop(body: list[str], layouts: dict[str, tuple[tuple[int, int], tuple[int, int]]]) -> LoopLayout:
    products = []
    operations: Counter[str] = Counter()
    for line in body:
        operations.update(name.split(".")[1] for name in _OPERATION.findall(line)[:1])
        operations[_ROUND_TRIPS] += bool(_FROM_REGISTERS.search(line))
        if (match := _PRODUCT.search(line)) and match[2] in layouts:
            shape = [int(size) for size in match[1].split("x")]
            warps, instruction = layouts[match[2]]
            products.append(Product((shape[-2], shape[-1]), match[2], warps, instruction))
    return LoopLayout(tuple(products), {name: count for name, count in sorted(operations.items()) if count})


def tables(found: list[Layouts]) -> list[Table]:
    """Who computes what, what moves, and where it is kept; equal loops in one row."""
    if not found:
        return []
    header = ["function", "loop", "result", "layout", "warps", "instruction", "whole rows", "computed"]
    products: dict[tuple[str, ...], list[str]] = {}
    moves: dict[tuple[str, ...], list[str]] = {}
    for one in found:
        for n, loop in enumerate(one.loops, 1):
            for p in loop.products:
                times = "once" if p.copies == 1 else f"{p.copies} times"
                row = (one.function, _by(p.shape), f"#{p.layout}", _by(p.warps), _by(p.instruction))
                products.setdefault((*row, "yes" if p.whole_rows else "no", times), []).append(str(n))
            operations = ", ".join(f"{count} {name}" for name, count in loop.operations.items()) or "none"
            moves.setdefault((one.function, operations), []).append(str(n))
    rows = [[key[0], _numbers(loops), *key[1:]] for key, loops in products.items()]
    made: list[Table] = [("products of the hot loops in TTGIR, rows x columns", header, rows)] if rows else []
    if moves:
        rows = [[key[0], _numbers(loops), key[1]] for key, loops in moves.items()]
        made.append(("layout changes and memory in the hot loops of TTGIR", ["function", "loop", "operations"], rows))
    buffers = [[one.function, name, shape, f"{size / 1024:.1f}"] for one in found for name, shape, size in one.buffers]
    if buffers:
        made.append(("shared-memory buffers in TTGIR", ["function", "buffer", "shape", "KiB"], buffers))
    return made


def notes(found: list[Layouts], kernel: str) -> list[str]:
    """What the layouts mean, in sentences."""
    if not found:
        return [f"{kernel} has no layouts to show: only Triton's compiler writes them down (TTGIR)."]
    said = []
    for one in found:
        for p in (p for loop in one.loops for p in loop.products):
            if p.copies > 1:
                covered = _by((p.warps[0] * p.instruction[0], p.warps[1] * p.instruction[1]))
                said.append(
                    f"{one.function}: {_by(p.warps)} warps of {_by(p.instruction)} cover {covered} of a {_by(p.shape)} result, "
                    f"so that each product is computed {p.copies} times; take fewer warps or a larger tile."
                )
        spread = max((p.warps[1] for loop in one.loops for p in loop.products), default=1)
        if spread > 1:
            said.append(
                f"{one.function}: each row of scores is spread over {spread} warps, "
                "so that its maximum and sum go through shared memory behind barriers."
            )
        if any(loop.operations.get(_ROUND_TRIPS) for loop in one.loops):
            said.append(f"{one.function}: a tile goes from registers through shared memory into a product, on every pass.")
    return list(dict.fromkeys(said))


def to_dict(found: list[Layouts]) -> list[dict[str, Any]]:
    """JSON values."""
    return [dataclasses.asdict(one) for one in found]


def _by(pair: tuple[int, int]) -> str:
    return f"{pair[0]} x {pair[1]}"


def _numbers(loops: list[str]) -> str:
    return ", ".join(dict.fromkeys(loops))
