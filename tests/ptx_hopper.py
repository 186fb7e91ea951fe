"""Hopper's asynchronous instructions for ``ptx_interpreter``: mbarriers, TMA and wgmma, so that kernels for sm_90 need no GPU.

Warps run one after another, each until it finds a barrier that is not complete, and every asynchronous operation does the
worst that hardware may do:

- what TMA loads is NaN in shared memory from the copy's beginning until somebody waits for its barrier,
- what TMA stores is read when the storing thread waits for it, and must have been fenced from the threads that wrote it,
- a wgmma reads its operands, in shared memory and in registers, when it is waited for, and its accumulator is NaN until then;
  so a slot of a ring that is released too early, or a register that is touched in flight, shows in the result.

Descriptors of wgmma and boxes of TMA are decoded as the PTX ISA has them, for the 128-byte swizzle.  A block in which nobody
can go on is a deadlock, and says where its warps stand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import ptx_interpreter as base
from peakattn.backends.codecache import Compiled
from peakattn.backends.driver import Counter, Tma
from ptx_interpreter import POISON, WARP, Array, Instruction, Memory, Step, form, widened

_MAPS_AT = 1 << 40  # addresses that stand for the TMA descriptors among the parameters
_SWIZZLE_128B = 3
_TRY_WAIT = "mbarrier.try_wait.parity.shared::cta.b64"


class Program(base.Program):
    """A kernel's PTX, with registers that inline assembly declares by name."""

    def __init__(self, ptx: str, function: str) -> None:
        super().__init__(ptx, function)
        self.widths |= {name: np.dtype(bool) for name in re.findall(r"\.reg \.pred (\w+);", ptx)}


@dataclass
class Barrier:
    """An mbarrier: threads and bytes that the current phase still waits for."""

    count: int
    arrivals: int
    expected: int = 0
    phase: int = 0
    loads: list[tuple[Array, Array]] = field(default_factory=list)  # on their way: where to, and what

    def settle(self) -> bool:
        """Ends the phase when nothing is missing any more."""
        if self.arrivals or self.expected:
            return False
        self.phase, self.arrivals = self.phase + 1, self.count
        return True


@dataclass
class Product:
    """One wgmma of one warp, issued and not yet computed."""

    instruction: Instruction
    accumulate: bool
    descriptors: list[int]  # of A, unless it is in registers, and of B


class Block(base.Block):
    """The threads of one block of a kernel for Hopper."""

    def __init__(self, *args: Any, num_blocks: int) -> None:
        super().__init__(*args)
        self.num_blocks = num_blocks
        self.barriers: dict[int, Barrier] = {}
        self.events = 0  # that may let another warp go on
        self.stalled = False
        self.meetings: dict[int, tuple[int, list[int]]] = {}  # bar.sync: threads that are awaited, warps that are there
        warps = self.num_threads // WARP
        self.open: list[list[Product]] = [[] for _ in range(warps)]
        self.groups: list[list[list[Product]]] = [[] for _ in range(warps)]
        self.flying: list[dict[str, Array]] = [{} for _ in range(warps)]  # accumulators, by register
        self.stores: dict[int, list[tuple[int, Tma, list[int]]]] = {}  # of a thread
        self.unfenced = np.full(self.shared.size, -1)  # the warp that wrote a byte and has not fenced it for TMA

    def get(self, name: str, kind: str, threads: Array) -> Array:
        if name == "%nctaid.x":
            return np.full(threads.size, self.num_blocks, np.uint32).view(base.DTYPES[kind])
        if found := re.search(r"_param_(\d+)$", name):
            return np.full(threads.size, _MAPS_AT + int(found[1]), np.uint64)
        return super().get(name, kind, threads)

    def tensor_map(self, operand: str, threads: Array) -> Tma:
        return self.args[int(self.address(operand, "u64", threads)[0]) - _MAPS_AT]  # type: ignore[return-value]

    def barrier(self, operand: str, threads: Array) -> Barrier:
        (address,) = set(self.address(operand, "u32", threads).tolist())
        return self.barriers[address]

    # Warps, in turn.

    def run(self, warp_order: Sequence[int] | None = None) -> None:
        order = warp_order or range(self.num_threads // WARP)
        self.at = np.zeros(self.num_threads, int)
        self.ended = np.zeros(self.num_threads, bool)
        self.waiting: set[int] = set()
        while not self.ended.all():
            before = self.events
            for warp in order:
                self._run_warp(warp)
            if self.events == before:
                places = {w: self.program.code[self.at[w * WARP]].text for w in order if not self.ended[w * WARP]}
                raise RuntimeError(f"nobody can go on in block {self.block}; the warps stand at {places}")
        for thread in self.stores:
            self.write_stores(thread)

    def _run_warp(self, warp: int) -> None:
        lanes = np.arange(warp * WARP, (warp + 1) * WARP)
        self.stalled = False
        while warp not in self.waiting and not self.stalled:
            ready = lanes[~self.ended[lanes]]
            if not ready.size:
                return
            place = int(self.at[ready].min())
            ahead = self.at[ready][self.at[ready] > place]
            here = ready[self.at[ready] == place]
            place, taken = self._straight(place, int(ahead.min()) if ahead.size else len(self.program.code), here)
            self.at[here] = place
            if place == len(self.program.code) or not taken.size:
                continue
            instruction = self.program.code[place]
            self.at[here] += 1
            if instruction.opcode == "ret":
                self.ended[taken] = True
                self.events += 1
            elif instruction.opcode == "bar.sync":
                self._meet(warp, instruction, taken)
            else:
                self.at[taken] = self.program.labels[instruction.operands[0]]

    def _meet(self, warp: int, instruction: Instruction, threads: Array) -> None:
        base._whole_warps(threads)
        number, *count = (int(self.get(name, "u32", threads)[0]) for name in instruction.operands)
        awaited, there = self.meetings.setdefault(number, (count[0] if count else self.num_threads, []))
        assert awaited == (count[0] if count else self.num_threads), "two numbers of threads at one barrier"
        there.append(warp)
        self.waiting.add(warp)
        if len(there) * WARP == awaited:
            del self.meetings[number]
            self.waiting -= set(there)
            self.events += 1

    # Asynchronous operations, when they end.

    def land(self, barrier: Barrier) -> None:
        """What TMA brings for this barrier is there."""
        for where, data in barrier.loads:
            self.shared[where] = data
            barrier.expected -= data.size
        if barrier.loads:
            barrier.loads = []
            self.events += barrier.settle()

    def multiply(self, warp: int, group: list[Product]) -> None:
        """The products of a group, one after another."""
        lanes = np.arange(warp * WARP, (warp + 1) * WARP)
        done: dict[str, Array] = {}
        for product in group:
            i = product.instruction
            kind, columns = i.type, int(re.findall(r"m64n(\d+)k16", i.opcode)[0])
            names, factor = i.list(0), i.list(1)
            if len(factor) == 4:
                halves = np.stack([self.get(name, "u32", lanes) for name in factor], axis=1).view(np.uint16)
                a = np.zeros((16, 16), np.float32)
                a[base._A[0], base._A[1]] = widened(halves.reshape(WARP, 4, 2), kind)
            else:
                a = widened(self.factor(product.descriptors[0], 16 * (warp % 4) + np.arange(16), False), kind)
            b = widened(self.factor(product.descriptors[-1], np.arange(columns), i.operands[-1] == "1"), kind)
            result = (a @ b.T).reshape(2, 8, columns // 8, 4, 2)  # half, g, tile, t, e
            result = result.transpose(1, 3, 2, 0, 4).reshape(WARP, columns // 2)
            for n, name in enumerate(names):
                old = self.flying[warp][name] if product.accumulate else np.float32(0)
                self.flying[warp][name] = done[name] = (result[:, n] + old).astype(np.float32)
        for name, values in done.items():
            self.put(name, values, lanes)
            del self.flying[warp][name]

    def factor(self, descriptor: int, rows: Array, down: bool) -> Array:
        """[rows, 16] of a factor in shared memory; ``down`` where its 16 are rows there and its rows columns."""
        assert descriptor >> 62 == 1, "the interpreter knows the 128-byte swizzle"
        assert descriptor >> 49 & 7 == 0
        start, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
        r, k = rows[:, None], np.arange(16)
        if down:
            addresses = start + r // 64 * leading + r % 64 * 2 + k // 8 * stride + k % 8 * 128
        else:
            addresses = start + r // 8 * stride + r % 8 * 128 + k * 2
        return self.shared.view(np.uint16)[swizzled(addresses) // 2]

    def write_stores(self, thread: int) -> None:
        for start, tma, coordinates in self.stores.pop(thread, []):
            where, inside = box(start, tma, coordinates)
            data = self.shared[where].view(np.uint16).reshape(inside.shape)
            corner_of(tma, coordinates)[: inside[:, 0].sum(), : inside[0].sum()] = data[: inside[:, 0].sum(), : inside[0].sum()]


def swizzled(addresses: Array) -> Array:
    return addresses ^ (addresses >> 7 & 7) << 4


def bits(tma: Tma) -> Array:
    """The tensor of a descriptor in its order of dimensions, as 16-bit integers."""
    return tma.tensor.view(torch.int16).permute(tma.order).numpy().view(np.uint16)


def corner_of(tma: Tma, coordinates: list[int]) -> Array:
    """The rows and columns of the tensor from those of the coordinates on."""
    column, row, *outer = coordinates
    return bits(tma)[tuple(reversed(outer))][row:, column:]


def box(start: int, tma: Tma, coordinates: list[int]) -> tuple[Array, Array]:
    """Addresses of a box's bytes in shared memory, row by row, and which of its elements lie inside the tensor."""
    rows, columns = tma.block_shape[-2:]
    assert start % 1024 == 0, "a swizzled box begins at a multiple of 1024 bytes"
    assert tma.swizzle == _SWIZZLE_128B
    assert columns * 2 == 128
    where = swizzled(start + np.arange(rows * 128))
    shape = bits(tma).shape
    inside = (coordinates[1] + np.arange(rows) < shape[-2])[:, None] & (coordinates[0] + np.arange(columns) < shape[-1])
    return where, inside


# Instructions.


@form(r"cvta\.param\.u64")
def _cvta_param(i: Instruction) -> Step:
    return base._compute(i, lambda x: x)


@form(r"selp\.[us](16|32|64)")
def _selp_integer(i: Instruction) -> Step:
    destination, x, y, condition = i.operands

    def step(b: base.Block, threads: Array) -> None:
        chosen = b.get(condition, "pred", threads)
        b.put(destination, np.where(chosen, b.get(x, i.type, threads), b.get(y, i.type, threads)), threads)

    return step


@form(r"prefetch\.tensormap|fence\.mbarrier_init\.release\.cluster|wgmma\.fence\.sync\.aligned|cp\.async\.bulk\.commit_group")
def _nothing(i: Instruction) -> Step:
    return lambda b, threads: None


@form(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32")
def _setmaxnreg(i: Instruction) -> Step:
    return lambda b, threads: base._whole_warps(threads)


@form(r"elect\.sync")
def _elect(i: Instruction) -> Step:
    def step(b: base.Block, threads: Array) -> None:
        base._whole_warps(threads)
        b.put(i.operands[0].split("|")[1], threads % WARP == 0, threads)

    return step


@form(r"vote\.sync\.all\.pred")
def _vote_all(i: Instruction) -> Step:
    def step(b: base.Block, threads: Array) -> None:
        base._whole_warps(threads)
        b.put(i.operands[0], np.full(threads.size, b.get(i.operands[1], "pred", threads).all()), threads)

    return step


@form(r"atom\.global\.add\.u32")
def _atomic_add(i: Instruction) -> Step:
    def step(b: base.Block, threads: Array) -> None:
        (address,) = b.address(i.operands[1], "u64", threads)[:, None]
        old = b.memory.read(address, 4).view(np.uint32).reshape(-1)
        b.memory.write(address, (old + b.get(i.operands[2], "u32", threads)).view(np.uint8).reshape(1, 4))
        b.put(i.operands[0], old, threads)

    return step


@form(r"ld\.volatile\.shared\.u32")
def _load_volatile(i: Instruction) -> Step:
    def step(b: base.Block, threads: Array) -> None:
        data = b.shared[b.reach(b.address(i.operands[1], "u32", threads), 4)]
        b.put(i.operands[0], np.ascontiguousarray(data).view(np.uint32).reshape(-1), threads)

    return step


@form(r"stmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16")
def _stmatrix(i: Instruction) -> Step:
    registers = i.list(1)

    def step(b: Block, threads: Array) -> None:
        base._whole_warps(threads)
        given = b.address(i.operands[0], "u32", threads)
        for matrix, name in enumerate(registers):
            addresses = given[8 * matrix : 8 * matrix + 8]
            b.conflicts += np.bincount(addresses // 16 % 8).max() - 1
            where = b.reach(addresses, 16)
            b.shared[where] = b.get(name, "u32", threads).reshape(8, 4).view(np.uint8)
            b.unfenced[where] = threads[0] // WARP

    return step  # type: ignore[return-value]


@form(r"mbarrier\.init\.shared::cta\.b64")
def _barrier_init(i: Instruction) -> Step:
    def step(b: Block, threads: Array) -> None:
        (address,) = b.address(i.operands[0], "u32", threads)
        (count,) = b.get(i.operands[1], "u32", threads)
        assert address % 8 == 0
        assert address + 8 <= b.shared.size
        b.barriers[int(address)] = Barrier(int(count), int(count))

    return step  # type: ignore[return-value]


@form(r"mbarrier\.arrive(\.expect_tx)?\.release\.cta\.shared::cta\.b64")
def _barrier_arrive(i: Instruction) -> Step:
    def step(b: Block, threads: Array) -> None:
        barrier = b.barrier(i.operands[1], threads)
        if len(i.operands) > 2:
            barrier.expected += int(b.get(i.operands[2], "u32", threads).sum())
        barrier.arrivals -= threads.size
        if barrier.arrivals < 0:
            raise RuntimeError("more threads arrive than the barrier's phase waits for")
        b.events += barrier.settle()

    return step  # type: ignore[return-value]


@form(re.escape(_TRY_WAIT))
def _barrier_try_wait(i: Instruction) -> Step:
    def step(b: Block, threads: Array) -> None:
        barrier = b.barrier(i.operands[1], threads)
        b.land(barrier)
        (parity,) = set(b.get(i.operands[2], "u32", threads).tolist())
        ended = barrier.phase % 2 != parity
        b.stalled |= not ended
        b.put(i.operands[0], np.full(threads.size, ended), threads)

    return step  # type: ignore[return-value]


def _coordinates(operand: str) -> tuple[str, list[str]]:
    """``[map, {c0, c1, ...}]``."""
    address, coordinates = re.findall(r"\[([^,]+), \{([^}]*)\}\]", operand)[0]
    return address, [c.strip() for c in coordinates.split(",")]


@form(r"cp\.async\.bulk\.tensor\.4d\.shared::cluster\.global\.mbarrier::complete_tx::bytes")
def _tma_load(i: Instruction) -> Step:
    to, source, signal = re.findall(r"\[[^\[\]]*\]", i.text)
    address, names = _coordinates(source)

    def step(b: Block, threads: Array) -> None:
        assert threads.size == 1, "one thread starts a copy"
        tma = b.tensor_map(address, threads)
        coordinates = [int(b.get(name, "s32", threads)[0]) for name in names]
        where, inside = box(int(b.address(to, "u32", threads)[0]), tma, coordinates)
        rows, columns = inside.shape
        data = np.zeros((rows, columns), np.uint16)
        part = corner_of(tma, coordinates)[:rows, :columns]
        data[: part.shape[0], : part.shape[1]] = part
        b.shared[where] = POISON
        b.barrier(signal, threads).loads.append((where, data.view(np.uint8).reshape(-1)))

    return step  # type: ignore[return-value]


@form(r"cp\.async\.bulk\.tensor\.4d\.global\.shared::cta\.bulk_group")
def _tma_store(i: Instruction) -> Step:
    target, source = re.findall(r"\[(?:[^\[\]])*\]", i.text)
    address, names = _coordinates(target)

    def step(b: Block, threads: Array) -> None:
        assert threads.size == 1, "one thread starts a copy"
        tma = b.tensor_map(address, threads)
        coordinates = [int(b.get(name, "s32", threads)[0]) for name in names]
        start = int(b.address(source, "u32", threads)[0])
        where, _ = box(start, tma, coordinates)
        if (b.unfenced[where] >= 0).any():
            raise RuntimeError("TMA stores what a thread wrote and nobody fenced")
        b.stores.setdefault(int(threads[0]), []).append((start, tma, coordinates))

    return step  # type: ignore[return-value]


@form(r"cp\.async\.bulk\.wait_group\.read")
def _tma_store_wait(i: Instruction) -> Step:
    def step(b: Block, threads: Array) -> None:
        assert i.operands[0] == "0"
        for thread in threads:
            b.write_stores(int(thread))

    return step  # type: ignore[return-value]


@form(r"fence\.proxy\.async\.shared::cta")
def _fence_proxy(i: Instruction) -> Step:
    def step(b: Block, threads: Array) -> None:
        b.unfenced[b.unfenced == threads[0] // WARP] = -1

    return step  # type: ignore[return-value]


@form(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.(f16\.f16|bf16\.bf16)")
def _wgmma(i: Instruction) -> Step:
    names, factor = i.list(0), i.list(1)
    in_registers = len(factor) == 4

    def step(b: Block, threads: Array) -> None:
        base._whole_warps(threads)
        warp = int(threads[0]) // WARP
        descriptors = []
        for name in [i.operands[2]] if in_registers else [factor[0], i.operands[2]]:
            (descriptor,) = set(b.get(name, "u64", threads).tolist())
            descriptors.append(descriptor)
        accumulate = bool(b.get(i.operands[3], "pred", threads).all()) if i.operands[3] != "1" else True
        for name in names:
            if name not in b.flying[warp]:
                old = b.get(name, "f32", threads) if name in b.registers else np.zeros(WARP, np.float32)
                b.flying[warp][name] = old.copy()
                b.put(name, np.full(WARP, np.nan, np.float32), threads)
        b.open[warp].append(Product(i, accumulate, descriptors))

    return step  # type: ignore[return-value]


@form(r"wgmma\.commit_group\.sync\.aligned")
def _wgmma_commit(i: Instruction) -> Step:
    def step(b: Block, threads: Array) -> None:
        warp = int(threads[0]) // WARP
        b.groups[warp].append(b.open[warp])
        b.open[warp] = []

    return step  # type: ignore[return-value]


@form(r"wgmma\.wait_group\.sync\.aligned")
def _wgmma_wait(i: Instruction) -> Step:
    newer = int(i.operands[0])

    def step(b: Block, threads: Array) -> None:
        base._whole_warps(threads)
        warp = int(threads[0]) // WARP
        while len(b.groups[warp]) > newer:
            b.multiply(warp, b.groups[warp].pop(0))

    return step  # type: ignore[return-value]


def run(
    compiled: Compiled,
    launch: Any,
    written: Sequence[torch.Tensor],
    grid: int | None = None,
    warp_order: Sequence[int] | None = None,
    block: type[Block] = Block,
) -> int:
    """``ptx_interpreter.run`` by ``grid`` blocks, where a block may take several tiles.

    A ``Counter`` is zero for the launch, and must be zero for the next one.
    """
    program, memory = Program(compiled.ptx, compiled.name), Memory()
    counter = torch.zeros(1, dtype=torch.int32)
    values = (counter if isinstance(value, Counter) else value for value in launch.args.values())
    args = base.parameters(values, memory, (*written, counter))
    blocks, shape = grid or launch.grid[0], (launch.num_threads, launch.shared_bytes)
    conflicts = base.run_blocks((block(program, *shape, args, memory, i, num_blocks=blocks) for i in range(blocks)), warp_order)
    for x in written:
        memory.fetch(x)
    if any(isinstance(value, Counter) for value in launch.args.values()):
        memory.fetch(counter)
        assert counter.item() == 0, "the next launch begins with the counter of this one"
    return conflicts
