"""A numpy interpreter of PTX, so that tensor-core kernels for sm_80 can be held to the oracle with no GPU.

It runs one block at a time, all threads that stand at the same instruction at once.  Each instruction form is one function
below; a form that is not there is refused, and so is whatever the kernels have no business doing:

- global memory holds the tensors that were added and nothing else: a byte outside a tensor's own elements cannot be
  touched, not even one between its rows, and only an output can be written,
- shared memory begins as NaN; what cp.async brings is NaN from the moment of the copy until the waiting thread's
  wait_group, which is the worst that hardware may do,
- with ``warp_order`` a warp runs up to its next barrier before another one moves, so that a barrier that is missing leaves
  a warp with NaN, or with what another warp has overwritten,
- ldmatrix, mma.sync, shuffles and votes want whole warps, and a barrier every thread of the block.

Shared-memory reads and writes that meet a bank twice are counted in ``conflicts``.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from peakattn.backends.binding import Int64
from peakattn.backends.codecache import Compiled

WARP = 32
ALL_LANES = 0xFFFFFFFF
POISON = 0xFF  # two such bytes are a NaN in float16 and bfloat16, four in float32

Array = np.ndarray
Step = Callable[["Block", Array], None]

DTYPES: dict[str, Any] = {
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "bu" for bits in (16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (16, 32, 64)},
    "f32": np.dtype("f4"),
    "f16": np.dtype("u2"),
    "bf16": np.dtype("u2"),
    "pred": np.dtype(bool),
}


class Memory:
    """Tensors in one address space."""

    _BASE = 1 << 20
    _GAP = 4096

    def __init__(self) -> None:
        self._bytes = np.zeros(0, np.uint8)
        self._readable = np.zeros(0, bool)
        self._writable = np.zeros(0, bool)
        self._places: dict[int, int] = {}

    def add(self, x: torch.Tensor, writable: bool = False) -> int:
        """The address of ``x``; of its storage only the elements that ``x`` has can be reached."""
        storage = _storage(x)
        start = self._bytes.size + self._GAP
        elements = np.zeros((storage.size // x.element_size(), x.element_size()), bool)
        every = torch.arange(len(elements)).as_strided(x.shape, x.stride(), x.storage_offset())
        elements[every.flatten().numpy()] = True
        self._bytes = np.concatenate([self._bytes, np.zeros(self._GAP, np.uint8), storage])
        reachable = np.concatenate([np.zeros(self._GAP, bool), elements.reshape(-1)])
        self._readable = np.concatenate([self._readable, reachable])
        self._writable = np.concatenate([self._writable, reachable & writable])
        padding = -self._bytes.size % 256
        self._bytes, self._readable, self._writable = (
            np.pad(a, (0, padding)) for a in (self._bytes, self._readable, self._writable)
        )
        self._places[id(x)] = start
        return self._BASE + start + int(x.storage_offset()) * x.element_size()

    def fetch(self, x: torch.Tensor) -> None:
        """Brings what was written to ``x`` back into it."""
        storage = _storage(x)
        start = self._places[id(x)]
        storage[:] = self._bytes[start : start + storage.size]

    def read(self, addresses: Array, count: int) -> Array:
        """``count`` bytes from each address."""
        return self._bytes[self._indices(addresses, count, self._readable, "read")]

    def write(self, addresses: Array, data: Array) -> None:
        self._bytes[self._indices(addresses, data.shape[1], self._writable, "written")] = data

    def _indices(self, addresses: Array, count: int, allowed: Array, what: str) -> Array:
        if np.any(addresses % count):
            raise IndexError(f"{count} bytes at {hex(int(addresses[addresses % count > 0][0]))} are not aligned")
        indices = addresses.astype(np.int64)[:, None] - self._BASE + np.arange(count)
        inside = (indices >= 0) & (indices < allowed.size)
        if not (inside.all() and allowed[indices].all()):
            raise IndexError(f"memory that is no element of a tensor for it is {what}")
        return indices


def _storage(x: torch.Tensor) -> Array:
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).numpy()


@dataclass(frozen=True)
class Instruction:
    """One line of PTX."""

    text: str
    guard: str | None
    negated: bool
    opcode: str
    operands: tuple[str, ...]

    def list(self, i: int) -> list[str]:
        """The registers of a ``{a, b, ...}`` operand, or the one register."""
        return [part.strip() for part in self.operands[i].strip("{}").split(",")]

    @property
    def type(self) -> str:
        return self.opcode.split(".")[-1]


class Program:
    """A kernel's PTX, decoded once."""

    def __init__(self, ptx: str, function: str) -> None:
        start = ptx.index("{", ptx.index(f".entry {function}("))
        lines = [line.split("//")[0].strip() for line in ptx[start + 1 : ptx.rindex("}")].splitlines()]
        self.widths = {m[2]: DTYPES[m[1]] for line in lines if (m := re.match(r"\.reg \.(\w+)\s+(%\w+)<", line))}
        self.labels: dict[str, int] = {}
        self.code: list[Instruction] = []
        statement = ""
        scopes: list[dict[str, str]] = []  # the names of registers that a block of lines has for itself
        for line in lines:
            if not statement and line in ("{", "}"):
                scopes = [*scopes, {}] if line == "{" else scopes[:-1]
                continue
            if not statement and scopes and (own := re.match(r"\.reg \.\w+\s+(%[a-z]+)(\d+);$", line)):
                scopes[-1][own[1] + own[2]] = f"{own[1]}{_OWN_NAMES + len(self.code)}{own[2]}"
                continue
            if not statement and line.startswith((".reg", ".loc", ".pragma", "{", "}")):
                continue
            for name, own_name in itertools.chain.from_iterable(scope.items() for scope in scopes):
                line = re.sub(rf"{name}\b", own_name, line)
            if label := re.match(r"(\$?\w+):$", line):
                self.labels[label[1]] = len(self.code)
                continue
            statement = f"{statement} {line}".strip()
            if statement.endswith(";"):
                self.code.append(_parse(statement))
                statement = ""
        self._steps: dict[int, Step] = {}

    def step(self, place: int) -> Step:
        """What an instruction does; decoded when it is first reached."""
        if place not in self._steps:
            self._steps[place] = _decode(self.code[place])
        return self._steps[place]


_LINE = re.compile(r"(?:@(!?)(%p\d+)\s+)?([\w.:]+)\s*(.*?);$")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+")


_CONTROL = {"bra", "bra.uni", "ret", "bar.sync", "bar.red.or.pred"}
_OWN_NAMES = 10**6  # above all numbers that the compiler gives to a function's registers


def _parse(line: str) -> Instruction:
    found = _LINE.match(line)
    if found is None:
        raise NotImplementedError(f"the interpreter cannot read {line!r}")
    operands = tuple(part.strip() for part in _OPERAND.findall(found[4]) if part.strip())
    return Instruction(line, found[2], found[1] == "!", found[3], operands)


class Block:
    """The threads of one block, their registers and their shared memory."""

    def __init__(self, program: Program, num_threads: int, shared_bytes: int, args: Sequence[int], memory: Memory, block: int):
        self.program, self.args, self.memory, self.block = program, args, memory, block
        self.num_threads = num_threads
        self.registers: dict[str, Array] = {}
        self.shared = np.full(shared_bytes, POISON, np.uint8)
        self.conflicts = 0
        self.commits = np.zeros(num_threads, int)  # groups of copies that each thread has closed
        self.copies: list[tuple[Array, Array, Array, Array]] = []  # threads, their open groups, addresses, bytes

    def run(self, warp_order: Sequence[int] | None = None) -> None:
        """Up to the last thread's end. Threads of the lowest instruction go first, so that branches meet again."""
        at = np.zeros(self.num_threads, int)
        ended, waiting = np.zeros((2, self.num_threads), bool)
        warps = np.arange(self.num_threads) // WARP
        while not ended.all():
            ready = ~ended & ~waiting
            if not ready.any():
                if ended.any() or len(set(at)) > 1:
                    raise RuntimeError("not all threads of the block meet at one barrier")
                barrier = self.program.code[at[0]]
                if barrier.opcode == "bar.red.or.pred":
                    everyone = np.arange(self.num_threads)
                    found = self.get(barrier.operands[2], "pred", everyone).any()
                    self.put(barrier.operands[0], np.full(self.num_threads, found), everyone)
                at += 1
                waiting[:] = False
                continue
            if warp_order is not None:
                ready &= warps == next(w for w in warp_order if (ready & (warps == w)).any())
            place = int(at[ready].min())
            ahead = at[ready & (at > place)]
            here = np.flatnonzero(ready & (at == place))
            place, taken = self._straight(place, int(ahead.min()) if ahead.size else len(self.program.code), here)
            at[here] = place
            if place < len(self.program.code) and taken.size:
                instruction = self.program.code[place]
                at[here] += 1
                if instruction.opcode == "ret":
                    ended[taken] = True
                elif instruction.opcode.startswith("bar."):
                    at[taken] -= 1
                    waiting[taken] = True
                else:
                    at[taken] = self.program.labels[instruction.operands[0]]

    def _straight(self, place: int, end: int, threads: Array) -> tuple[int, Array]:
        """Runs up to ``end`` or to the next branch, barrier or return; that place, and which threads are to obey it."""
        while place < end:
            instruction = self.program.code[place]
            active = threads
            if instruction.guard is not None:
                active = threads[self.registers[instruction.guard][threads] != instruction.negated]
            if instruction.opcode in _CONTROL:
                if active.size:
                    return place, active
            elif active.size:
                try:
                    self.program.step(place)(self, active)
                except Exception as error:
                    raise RuntimeError(f"{instruction.text}  in block {self.block}: {error}") from error
            place += 1
        return place, threads[:0]

    # Registers.

    def get(self, name: str, kind: str, threads: Array) -> Array:
        """The values of an operand as ``kind``; a wider register gives its lower part."""
        dtype = DTYPES[kind]
        if name in self.registers:
            values = self.registers[name][threads]
        elif name in ("%tid.x", "%laneid", "%ctaid.x"):
            values = {"%tid.x": threads, "%laneid": threads % WARP, "%ctaid.x": np.full_like(threads, self.block)}[name]
        elif name.startswith("%"):
            raise RuntimeError(f"{name} is read before it is written")
        else:
            values = np.full(threads.size, _constant(name) & (1 << 64) - 1, np.uint64)
        if kind == "pred":
            return values.astype(bool)
        return values.astype(f"u{dtype.itemsize}").view(dtype)

    def put(self, name: str, values: Array, threads: Array) -> None:
        """Writes a register; a narrower value is extended with zeros."""
        register = self.registers.get(name)
        if register is None:
            dtype = self.program.widths[name.rstrip("0123456789")]
            register = self.registers[name] = np.zeros(self.num_threads, dtype if dtype.kind == "b" else f"u{dtype.itemsize}")
        if values.dtype.kind != "b":
            values = values.view(f"u{values.dtype.itemsize}")
        register[threads] = values

    def address(self, operand: str, kind: str, threads: Array) -> Array:
        """``[register + constant]``."""
        name, _, constant = operand.strip("[]").partition("+")
        return self.get(name.strip(), kind, threads).astype(np.int64) + int(constant or 0)

    # Shared memory.

    def reach(self, addresses: Array, count: int) -> Array:
        """Indices of ``count`` bytes from each address."""
        if np.any(addresses % count) or np.any(addresses < 0) or np.any(addresses + count > self.shared.size):
            raise IndexError(f"{count} bytes of shared memory are not aligned or not inside")
        return addresses[:, None] + np.arange(count)

    def count_conflicts(self, addresses: Array, count: int) -> None:
        """Of accesses by whole warps: as many threads as fill 128 bytes go together, and wait for a bank they share."""
        if addresses.size % WARP == 0:
            for together in (addresses // 4).reshape(-1, min(128 // count, WARP)):
                words = np.unique(together[:, None] + np.arange(max(count // 4, 1)))
                self.conflicts += np.bincount(words % WARP).max() - 1


def _constant(text: str) -> int:
    if text.startswith("0f"):
        return int(text[2:], 16)
    return 0 if re.fullmatch(r"[a-zA-Z_]\w*", text) else int(text, 0)  # a symbol is the start of shared memory


# Instructions. A function decodes one form; its pattern lists all modifiers that it knows.

_FORMS: list[tuple[re.Pattern[str], Callable[[Instruction], Step]]] = []


def form(pattern: str) -> Callable[[Callable[[Instruction], Step]], Callable[[Instruction], Step]]:
    def register(decode: Callable[[Instruction], Step]) -> Callable[[Instruction], Step]:
        _FORMS.append((re.compile(pattern), decode))
        return decode

    return register


def _decode(i: Instruction) -> Step:
    for pattern, decode in _FORMS:
        if pattern.fullmatch(i.opcode):
            return decode(i)
    raise NotImplementedError(f"the interpreter has no instruction {i.opcode!r}; give it one")


def _compute(i: Instruction, function: Callable[..., Array], kind: str | None = None) -> Step:
    """destination = function(sources), all of one type."""
    kind = kind or i.type
    destination, *sources = i.operands

    def step(b: Block, threads: Array) -> None:
        b.put(destination, function(*(b.get(s, kind, threads) for s in sources)), threads)

    return step


@form(r"mov\.(b16|b32|b64|u16|u32|u64|f32|pred)")
def _mov(i: Instruction) -> Step:
    if i.type == "b32" and i.operands[1].startswith("{"):
        lower, upper = i.list(1)
        return lambda b, threads: b.put(
            i.operands[0],
            b.get(upper, "u16", threads).astype(np.uint32) << 16 | b.get(lower, "u16", threads),
            threads,
        )
    return _compute(i, lambda x: x)


@form(r"cvta\.to\.global\.u64")
def _cvta(i: Instruction) -> Step:
    return _compute(i, lambda x: x)


@form(r"ld\.param\.(b32|b64|u32|u64|f32)")
def _ld_param(i: Instruction) -> Step:
    index = int(re.findall(r"_param_(\d+)\]", i.operands[1])[0])
    unsigned = DTYPES["u" + i.type[1:]]
    return lambda b, threads: b.put(i.operands[0], np.full(threads.size, b.args[index], unsigned), threads)


_INTEGERS = "[su](16|32|64)"
_INTEGER = {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum}


@form(rf"(add|sub|min|max)\.{_INTEGERS}")
def _integer(i: Instruction) -> Step:
    return _compute(i, _INTEGER[i.opcode[:3]])


@form(r"neg\.s(16|32|64)")
def _neg(i: Instruction) -> Step:
    return _compute(i, np.negative)


@form(rf"mul\.lo\.{_INTEGERS}")
def _mul_lo(i: Instruction) -> Step:
    return _compute(i, np.multiply)


@form(rf"mad\.lo\.{_INTEGERS}")
def _mad_lo(i: Instruction) -> Step:
    return _compute(i, lambda x, y, z: x * y + z)


@form(r"mul\.wide\.[su](16|32)")
def _mul_wide(i: Instruction) -> Step:
    wide = DTYPES[f"{i.type[0]}{2 * int(i.type[1:])}"]
    return _compute(i, lambda x, y: x.astype(wide) * y.astype(wide))


@form(r"mul\.hi\.[su]32")
def _mul_hi(i: Instruction) -> Step:
    wide = DTYPES[f"{i.type[0]}64"]
    return _compute(i, lambda x, y: (x.astype(wide) * y.astype(wide) >> 32).astype(x.dtype))


@form(r"div\.[su](16|32)")
def _div_integer(i: Instruction) -> Step:
    """Towards zero."""

    def divide(x: Array, y: Array) -> Array:
        a, b = x.astype(np.int64), y.astype(np.int64)
        return (np.sign(a) * np.sign(b) * (abs(a) // abs(b))).astype(x.dtype)

    return _compute(i, divide)


@form(r"rem\.[su](16|32)")
def _rem(i: Instruction) -> Step:
    return _compute(i, np.fmod)


_LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}


@form(r"(and|or|xor|not)\.(b16|b32|b64|pred)")
def _logic(i: Instruction) -> Step:
    return _compute(i, _LOGIC[i.opcode.split(".")[0]])


@form(r"(shl|shr)\.[bsu](16|32|64)")
def _shift(i: Instruction) -> Step:
    shift = np.left_shift if i.opcode.startswith("shl") else np.right_shift
    destination, x, by = i.operands
    return lambda b, threads: b.put(
        destination, shift(b.get(x, i.type, threads), b.get(by, "u32", threads).astype(DTYPES[i.type])), threads
    )


@form(r"bfi\.b32")
def _bfi(i: Instruction) -> Step:
    def insert(x: Array, into: Array, start: Array, length: Array) -> Array:
        mask = ((np.uint64(1) << length.astype(np.uint64)) - np.uint64(1) << start.astype(np.uint64)).astype(np.uint32)
        return (into & ~mask) | (x << start & mask)

    return _compute(i, insert)


@form(r"selp\.(b16|b32|u32|b64|f32)")
def _selp(i: Instruction) -> Step:
    destination, x, y, condition = i.operands
    return lambda b, threads: b.put(
        destination,
        np.where(b.get(condition, "pred", threads), b.get(x, i.type, threads), b.get(y, i.type, threads)),
        threads,
    )


# Comparisons; those that end in u are also true of a NaN.
_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": lambda x, y: (x < y) | (x > y),
    "ltu": lambda x, y: ~(x >= y),
    "leu": lambda x, y: ~(x > y),
    "gtu": lambda x, y: ~(x <= y),
    "geu": lambda x, y: ~(x < y),
    "neu": lambda x, y: ~(x == y),
    "nan": lambda x, y: np.isnan(x) | np.isnan(y),
}


@form(r"setp\.(lt|le|gt|ge|eq|ne)\.([bsu](16|32|64)|f32)|setp\.(ltu|leu|gtu|geu|neu|nan)\.f32")
def _setp(i: Instruction) -> Step:
    return _compute(i, _COMPARE[i.opcode.split(".")[1]])


_FLOAT = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs, "div": np.divide}


@form(r"(add|sub|mul)(\.rn)?\.f32|(neg|abs)\.f32|div\.rn\.f32")
def _float(i: Instruction) -> Step:
    return _compute(i, _FLOAT[i.opcode[:3]])


@form(r"(max|min)(\.NaN)?\.f32")
def _extreme(i: Instruction) -> Step:
    """Without .NaN the number of the two wins."""
    functions = {"max": np.fmax, "min": np.fmin, "max.NaN": np.maximum, "min.NaN": np.minimum}
    return _compute(i, functions[i.opcode.removesuffix(".f32")])


@form(r"fma\.rn\.f32")
def _fma(i: Instruction) -> Step:
    return _compute(i, lambda x, y, z: (x.astype(np.float64) * y + z).astype(np.float32))


@form(r"fma\.rm\.f32")
def _fma_down(i: Instruction) -> Step:
    """Rounded towards minus infinity."""

    def down(x: Array, y: Array, z: Array) -> Array:
        exact = x.astype(np.float64) * y + z
        nearest = exact.astype(np.float32)
        return np.where(nearest > exact, np.nextafter(nearest, np.float32(-np.inf)), nearest)

    return _compute(i, down)


@form(r"cvt\.sat\.f32\.f32")
def _saturate(i: Instruction) -> Step:
    """Into 0 to 1, and a NaN to 0."""
    return _compute(i, lambda x: np.where(np.isnan(x), np.float32(0), np.clip(x, np.float32(0), np.float32(1))))


@form(r"rcp\.(rn|approx\.ftz)\.f32")
def _rcp(i: Instruction) -> Step:
    return _compute(i, lambda x: np.float32(1) / x)


@form(r"ex2\.approx\.ftz\.f32")
def _ex2(i: Instruction) -> Step:
    def exp2(x: Array) -> Array:
        y = np.exp2(x.astype(np.float64)).astype(np.float32)
        return np.where(y < np.finfo(np.float32).tiny, np.float32(0), y)

    return _compute(i, exp2)


@form(rf"cvt\.{_INTEGERS}\.{_INTEGERS}|cvt\.rn\.f32\.[su]32")
def _cvt(i: Instruction) -> Step:
    to = DTYPES[i.opcode.split(".")[-2]]
    return _compute(i, lambda x: x.astype(to))


@form(r"cvt\.f32\.(f16|bf16)")
def _cvt_from_16(i: Instruction) -> Step:
    return _compute(i, lambda x: widened(x, i.type))


@form(r"cvt\.rn\.(f16|bf16)\.f32")
def _cvt_to_16(i: Instruction) -> Step:
    kind = i.opcode.split(".")[2]
    return _compute(i, lambda x: rounded(x, kind))


@form(r"cvt\.rn\.(f16|bf16)x2\.f32")
def _cvt_to_pair(i: Instruction) -> Step:
    """The first source becomes the upper half."""
    kind = i.opcode.split(".")[2].removesuffix("x2")
    return _compute(i, lambda x, y: rounded(x, kind).astype(np.uint32) << 16 | rounded(y, kind))


def rounded(x: Array, kind: str) -> Array:
    """float32 to the bits of a 16-bit float, to nearest even."""
    if kind == "f16":
        return x.astype(np.float16).view(np.uint16)
    bits = x.view(np.uint32).astype(np.uint64)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, nearest).astype(np.uint16)


def widened(bits: Array, kind: str) -> Array:
    """The bits of a 16-bit float to float32."""
    return bits.view(np.float16).astype(np.float32) if kind == "f16" else (bits.astype(np.uint32) << 16).view(np.float32)


@form(r"(ld|st)\.(global|shared)(\.v2|\.v4)?\.(b16|u16|b32|u32|f32|b64|u64)")
def _load_or_store(i: Instruction) -> Step:
    loads, is_shared = i.opcode.startswith("ld"), ".shared" in i.opcode
    values, address = (i.list(0), i.operands[1]) if loads else (i.list(1), i.operands[0])
    unsigned = np.dtype(f"u{DTYPES[i.type].itemsize}")
    size = unsigned.itemsize * len(values)

    def step(b: Block, threads: Array) -> None:
        addresses = b.address(address, "u32" if is_shared else "u64", threads)
        if is_shared:
            b.count_conflicts(addresses, size)
        if loads:
            data = b.shared[b.reach(addresses, size)] if is_shared else b.memory.read(addresses, size)
            for column, name in enumerate(values):
                b.put(name, np.ascontiguousarray(data.view(unsigned)[:, column]), threads)
            return
        data = np.stack([b.get(name, "u" + i.type[1:], threads) for name in values], axis=1).view(np.uint8)
        if is_shared:
            b.shared[b.reach(addresses, size)] = data
        else:
            b.memory.write(addresses, data)

    return step


@form(r"cp\.async\.cg\.shared\.global")
def _cp_async(i: Instruction) -> Step:
    to, source, size, *read = i.operands

    def step(b: Block, threads: Array) -> None:
        assert size == "16"
        target = b.reach(b.address(to, "u32", threads), 16)
        counts = b.get(read[0], "u32", threads) if read else np.full(threads.size, 16)
        assert set(counts) <= {0, 16}
        data = np.zeros((threads.size, 16), np.uint8)
        reads = counts == 16
        data[reads] = b.memory.read(b.address(source, "u64", threads)[reads], 16)
        b.shared[target] = POISON
        b.copies.append((threads, b.commits[threads], target, data))

    return step


@form(r"cp\.async\.commit_group")
def _commit_group(i: Instruction) -> Step:
    def step(b: Block, threads: Array) -> None:
        b.commits[threads] += 1

    return step


@form(r"cp\.async\.wait_group")
def _wait_group(i: Instruction) -> Step:
    def step(b: Block, threads: Array) -> None:
        finished = np.full(b.num_threads, -1)
        finished[threads] = b.commits[threads] - int(i.operands[0])
        waiting = b.copies
        b.copies = []
        for owners, groups, target, data in waiting:
            here = groups < finished[owners]
            b.shared[target[here]] = data[here]
            if not here.all():
                b.copies.append((owners[~here], groups[~here], target[~here], data[~here]))

    return step


@form(r"bar\.warp\.sync")
def _bar_warp(i: Instruction) -> Step:
    return lambda b, threads: _whole_warps(threads)


def _whole_warps(threads: Array) -> None:
    starts = threads.reshape(-1, WARP)[:, :1] if threads.size % WARP == 0 else None
    if starts is None or np.any(threads.reshape(-1, WARP) != starts + np.arange(WARP)):
        raise RuntimeError("not all lanes of a warp are here")


@form(r"shfl\.sync\.(bfly|idx)\.b32")
def _shfl(i: Instruction) -> Step:
    destination, source, lane, clamp, lanes = i.operands

    def step(b: Block, threads: Array) -> None:
        _whole_warps(threads)
        assert (b.get(clamp, "u32", threads) == 31).all()
        assert (b.get(lanes, "u32", threads) == ALL_LANES).all()
        values, which = (b.get(x, "u32", threads).reshape(-1, WARP) for x in (source, lane))
        if "bfly" in i.opcode:
            which = which ^ np.arange(WARP, dtype=np.uint32)
        register, _, inside = destination.partition("|")
        b.put(register, np.take_along_axis(values, which.astype(np.int64), axis=1).reshape(-1), threads)
        if inside:
            b.put(inside, np.ones(threads.size, bool), threads)

    return step


@form(r"vote\.sync\.ballot\.b32")
def _ballot(i: Instruction) -> Step:
    destination, condition, lanes = i.operands

    def step(b: Block, threads: Array) -> None:
        _whole_warps(threads)
        assert (b.get(lanes, "u32", threads) == ALL_LANES).all()
        bits = b.get(condition, "pred", threads).reshape(-1, WARP).astype(np.uint32) << np.arange(WARP, dtype=np.uint32)
        b.put(destination, np.repeat(bits.sum(axis=1, dtype=np.uint32), WARP), threads)

    return step


@form(r"ldmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16")
def _ldmatrix(i: Instruction) -> Step:
    registers, transposed = i.list(0), ".trans" in i.opcode

    def step(b: Block, threads: Array) -> None:
        _whole_warps(threads)
        given = b.address(i.operands[1], "u32", threads).reshape(-1, WARP)
        for matrix, name in enumerate(registers):
            addresses = given[:, 8 * matrix : 8 * matrix + 8]
            for rows in addresses:
                b.conflicts += np.bincount(rows // 16 % 8).max() - 1
            rows = b.shared[b.reach(addresses.reshape(-1), 16)].view(np.uint16).reshape(-1, 8, 8)
            rows = rows.transpose(0, 2, 1) if transposed else rows
            # Lane 4 g + t has row g, columns 2 t and 2 t + 1.
            b.put(name, np.ascontiguousarray(rows).reshape(-1, 2).view(np.uint32).reshape(-1), threads)

    return step


# Row and column of each element of the fragments of mma.m16n8k16: [lane, register, half].
_G, _T = (x[:, None, None] for x in np.divmod(np.arange(WARP), 4))
_R, _E = np.arange(4)[:, None], np.arange(2)
_A = np.broadcast_arrays(_G + 8 * (_R % 2), 2 * _T + _E + 8 * (_R // 2))
_B = np.broadcast_arrays(2 * _T + _E + 8 * _R[:2], _G)
_C = [x[..., 0] for x in np.broadcast_arrays(_G + 8 * (_R // 2) + 0 * _E, 2 * _T + _R % 2 + 0 * _E)]


@form(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(f16\.f16|bf16\.bf16)\.f32")
def _mma(i: Instruction) -> Step:
    kind = "bf16" if "bf16" in i.opcode else "f16"
    d, a, b_, c = (i.list(n) for n in range(4))

    def fragment(b: Block, names: list[str], threads: Array) -> Array:
        return np.stack([b.get(name, "u32", threads) for name in names], axis=1).reshape(-1, WARP, len(names))

    def step(b: Block, threads: Array) -> None:
        _whole_warps(threads)
        num_warps = threads.size // WARP
        x = np.zeros((num_warps, 16, 16), np.float32)
        y = np.zeros((num_warps, 16, 8), np.float32)
        z = np.zeros((num_warps, 16, 8), np.float32)
        for target, (rows, columns), names in ((x, _A, a), (y, _B, b_)):
            halves = fragment(b, names, threads).view(np.uint16).reshape(num_warps, WARP, len(names), 2)
            target[:, rows, columns] = widened(halves, kind)
        z[:, _C[0], _C[1]] = fragment(b, c, threads).view(np.float32)
        result = (x @ y + z)[:, _C[0], _C[1]].reshape(-1, 4)
        for n, name in enumerate(d):
            b.put(name, np.ascontiguousarray(result[:, n]), threads)

    return step


def parameters(values: Iterable[Any], memory: Memory, written: Sequence[torch.Tensor]) -> list[Any]:
    """A launch's arguments as its kernel reads them; tensors go to ``memory``, where ``written`` alone can be written."""
    made: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            made.append(memory.add(value, writable=any(value is x for x in written)))
        elif isinstance(value, float):
            made.append(struct.unpack("I", struct.pack("f", value))[0])
        elif isinstance(value, Int64):
            made.append(value.value)
        elif isinstance(value, int):
            made.append(value & 0xFFFFFFFF)
        else:
            made.append(0 if value is None else value)
    return made


def run_blocks(blocks: Iterable[Block], warp_order: Sequence[int] | None = None) -> int:
    """Runs blocks one after another, and returns the number of bank conflicts."""
    conflicts = 0
    with np.errstate(all="ignore"):
        for block in blocks:
            block.run(warp_order)
            conflicts += block.conflicts
    return int(conflicts)


def run(compiled: Compiled, launch: Any, written: Sequence[torch.Tensor], warp_order: Sequence[int] | None = None) -> int:
    """Runs a launch whose tensors are on the CPU, and returns the number of bank conflicts; see ``parameters``."""
    program, memory = Program(compiled.ptx, compiled.name), Memory()
    args = parameters(launch.args.values(), memory, written)
    shape = launch.num_threads, launch.shared_bytes
    conflicts = run_blocks((Block(program, *shape, args, memory, i) for i in range(launch.grid[0])), warp_order)
    for x in written:
        memory.fetch(x)
    return conflicts
