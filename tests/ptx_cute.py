"""What ``ptx_hopper`` lacks to run the PTX of CuTe DSL kernels: its spellings, and TMA boxes of any number of dimensions.

Only tiles with the 128-byte swizzle are known: widths that are multiples of 64.
"""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import torch

import ptx_hopper
import ptx_interpreter as base
from peakattn.backends.cute.toolchain import Compiled, CuteLaunch
from peakattn.backends.driver import Tma
from ptx_hopper import Barrier, swizzled
from ptx_interpreter import POISON, WARP, Array, Instruction, Step, form


class Block(ptx_hopper.Block):
    """The threads of one block, whose TMA boxes have the dimensions of their descriptor."""

    def write_stores(self, thread: int) -> None:
        for start, tma, coordinates in self.stores.pop(thread, []):
            tensor, here, box = place(tma, coordinates)
            data = self.shared[where(start, tma)].view(np.uint16).reshape(tma.block_shape)
            tensor[here] = data[box]


def place(tma: Tma, coordinates: list[int]) -> tuple[Array, tuple[slice, ...], tuple[slice, ...]]:
    """The tensor as its descriptor has it, in 16-bit integers; the part of it that a box meets; and that part of the box."""
    described = tma.tensor_map(0)
    x = tma.tensor.view(torch.int16)
    tensor = x.as_strided(described.shape, described.strides, x.storage_offset()).numpy().view(np.uint16)
    starts = coordinates[::-1]
    assert len(starts) == tensor.ndim
    assert min(starts) >= 0
    ends = [min(a + n, size) for a, n, size in zip(starts, tma.block_shape, tensor.shape, strict=True)]
    here = tuple(slice(a, max(a, b)) for a, b in zip(starts, ends, strict=True))
    return tensor, here, tuple(slice(0, s.stop - s.start) for s in here)


def where(start: int, tma: Tma) -> Array:
    """Addresses of a box's bytes in shared memory."""
    assert start % 1024 == 0, "a swizzled box begins at a multiple of 1024 bytes"
    assert tma.swizzle == 3
    assert tma.block_shape[-1] == 64
    return swizzled(start + np.arange(2 * int(np.prod(tma.block_shape))))


@form(r"cp\.async\.bulk\.tensor\.[45]d\.shared::cta\.global\.tile\.mbarrier::complete_tx::bytes\.L2::cache_hint")
def _tma_load(i: Instruction) -> Step:
    to, source, signal = re.findall(r"\[[^\[\]]*\]", i.text)
    address, names = ptx_hopper._coordinates(source)

    def step(b: Block, threads: Array) -> None:
        assert threads.size == 1, "one thread starts a copy"
        tma = b.tensor_map(address, threads)
        tensor, here, box = place(tma, [int(b.get(name, "s32", threads)[0]) for name in names])
        data = np.zeros(tma.block_shape, np.uint16)
        data[box] = tensor[here]
        addresses = where(int(b.address(to, "u32", threads)[0]), tma)
        b.shared[addresses] = POISON
        b.barrier(signal, threads).loads.append((addresses, data.view(np.uint8).reshape(-1)))

    return step  # type: ignore[return-value]


@form(r"cp\.async\.bulk\.tensor\.[45]d\.global\.shared::cta\.tile\.bulk_group\.L2::cache_hint")
def _tma_store(i: Instruction) -> Step:
    target, source = re.findall(r"\[[^\[\]]*\]", i.text)
    address, names = ptx_hopper._coordinates(target)

    def step(b: Block, threads: Array) -> None:
        assert threads.size in (1, WARP), "a store is of a warp, however many lanes are there"
        tma = b.tensor_map(address, threads)
        start = int(b.address(source, "u32", threads)[0])
        if (b.unfenced[where(start, tma)] >= 0).any():
            raise RuntimeError("TMA stores what a thread wrote and nobody fenced")
        b.stores.setdefault(int(threads[0]), []).append((start, tma, [int(b.get(n, "s32", threads)[0]) for n in names]))

    return step  # type: ignore[return-value]


@form(r"mbarrier\.init\.shared\.b64")
def _barrier_init(i: Instruction) -> Step:
    def step(b: Block, threads: Array) -> None:
        (address,) = b.address(i.operands[0], "u32", threads)
        (count,) = b.get(i.operands[1], "u32", threads)
        b.barriers[int(address)] = Barrier(int(count), int(count))

    return step  # type: ignore[return-value]


@form(r"mbarrier\.arrive(\.expect_tx)?\.shared\.b64")
def _barrier_arrive(i: Instruction) -> Step:
    expects = ".expect_tx" in i.opcode

    def step(b: Block, threads: Array) -> None:
        barrier = b.barrier(i.operands[1], threads)
        number = int(b.get(i.operands[2], "u32", threads).sum())
        if expects:
            barrier.expected += number
        barrier.arrivals -= threads.size if expects else number
        if barrier.arrivals < 0:
            raise RuntimeError("more threads arrive than the barrier's phase waits for")
        b.events += barrier.settle()

    return step  # type: ignore[return-value]


@form(r"mbarrier\.try_wait\.parity\.shared\.b64")
def _barrier_try_wait(i: Instruction) -> Step:
    return ptx_hopper._barrier_try_wait(i)


@form(r"vote\.sync\.any\.pred")
def _vote_any(i: Instruction) -> Step:
    def step(b: base.Block, threads: Array) -> None:
        base._whole_warps(threads)
        votes = b.get(i.operands[1], "pred", threads).reshape(-1, WARP).any(axis=1)
        b.put(i.operands[0], np.repeat(votes, WARP), threads)

    return step


@form(r"min\.relu\.s32")
def _min_relu(i: Instruction) -> Step:
    return base._compute(i, lambda x, y: np.maximum(np.minimum(x, y), 0))


@form(r"halves\.b64")
def _halves(i: Instruction) -> Step:
    """A mov between 64 bits and their two halves."""

    def step(b: base.Block, threads: Array) -> None:
        if i.operands[0].startswith("{"):
            value = b.get(i.operands[1], "u64", threads)
            for n, name in enumerate(i.list(0)):
                b.put(name, (value >> np.uint64(32 * n)).astype(np.uint32), threads)
        else:
            lower, upper = (b.get(name, "u32", threads).astype(np.uint64) for name in i.list(1))
            b.put(i.operands[0], upper << np.uint64(32) | lower, threads)

    return step


@form(r"lg2\.approx(\.ftz)?\.f32")
def _lg2(i: Instruction) -> Step:
    return base._compute(i, np.log2)


def readable(ptx: str) -> str:
    """PTX in which the names that each piece of inline assembly has for itself differ from all others."""
    numbers = itertools.count()

    def own(found: re.Match[str]) -> str:
        number = next(numbers)
        text = re.sub(r"\b(LAB_WAIT|DONE)\b", lambda label: f"{label[1]}_{number}", found[0])
        return re.sub(r"(?<![\w%.])(P1|p)(?!\w)", "%p999999", text)

    ptx = re.sub(r"// begin inline asm.*?// end inline asm", own, ptx, flags=re.DOTALL)
    return re.sub(r"mov(\.b64\s+(?:\{|%\w+, \{))", r"halves\1", ptx)


def run(launch: CuteLaunch, compiled: Compiled, blocks: int | None = None) -> None:
    """The launch with tensors of the CPU, by ``blocks`` blocks one after another, where a block may take several tiles."""
    present = {name: value for name, value in launch.args.items() if value is not None}  # None is no parameter here
    compiled = dataclasses.replace(compiled, ptx=readable(compiled.ptx))
    ptx_hopper.run(compiled, dataclasses.replace(launch, args=present), [launch.args["lse"]], blocks, block=Block)
