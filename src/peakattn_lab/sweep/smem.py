"""Shared memory as Triton lays it out: which buffers a kernel that streams tiles holds, for how long, and where they go.

The pipeliner keeps ``num_stages - 1`` copies of a tile that passes by, and ``num_stages`` where wgmma reads them from
shared memory while the next one arrives.  Scores pass through shared memory where warps lie along their columns.
Without pipelining (one stage) a tile lives only as long as its product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Buffer:
    """One allocation of shared memory, alive from ``start`` until before ``end`` in the order of the program."""

    size: int
    start: int
    end: int
    align: int = 16

    def meets(self, start: int, end: int) -> bool:
        return self.start < end and start < self.end


def allocate(buffers: Sequence[Buffer]) -> int:
    """Bytes that Triton's allocator needs for buffers that stand in the order of the program.

    The largest go first, each to the lowest place that nothing alive at the same time has claimed; what overlaps all the
    same is moved behind its neighbours (the storage allocation of Gergov, SODA 1999, as Triton does it).  A plain sum is
    right for most configs, but not where alignment leaves gaps.
    """
    order = sorted(range(len(buffers)), key=lambda i: -buffers[i].size)
    places = [0] * len(buffers)
    free: list[tuple[int, int, int]] = [(0, 0, max(b.end for b in buffers))]  # from this offset up, in this span of time
    waiting = list(order)
    while waiting:
        free.sort(key=lambda span: span[0])
        offset, start, end = free.pop(0)
        chosen = next(
            (
                i
                for i in waiting
                if buffers[i].meets(start, end) and not any(buffers[i].meets(first, last) for _, first, last in free)
            ),
            None,
        )
        if chosen is None:
            continue
        one = buffers[chosen]
        places[chosen] = up(offset, one.align)
        free.append((places[chosen] + one.size, max(start, one.start), min(end, one.end)))
        if start < one.start:
            free.append((offset, start, one.end))
        if one.end < end:
            free.append((offset, one.start, end))
        waiting.remove(chosen)
    while clashes := _clashes(buffers, places, order):
        colours: dict[int, int] = {}
        for i in order:
            taken = {colours[j] for j in clashes.get(i, ()) if j in colours}
            colours[i] = next(c for c in range(len(buffers)) if c not in taken)
        for i in order:
            if colours[i]:
                places[i] = up(max(places[j] + buffers[j].size for j in clashes[i]), buffers[i].align)
    return max(place + one.size for place, one in zip(places, buffers, strict=True))


def _clashes(buffers: Sequence[Buffer], places: Sequence[int], order: Sequence[int]) -> dict[int, list[int]]:
    """For each buffer those that share bytes with it while both are alive."""
    found: dict[int, list[int]] = {}
    for i in order:
        a = buffers[i]
        for j in order:
            b = buffers[j]
            together = a.meets(b.start, b.end) and places[i] < places[j] + b.size and places[j] < places[i] + a.size
            if i != j and together:
                found.setdefault(i, []).append(j)
    return found


_LOOP = 100  # time that one loop over tiles takes in the order of the program
_TMA_ALIGN, _ROWS_ALIGN = 1024, 128


@dataclass(frozen=True)
class Stream:
    """A device function in which some tiles stay and others pass by, in one or more loops."""

    staying: tuple[int, ...]  # bytes of tiles that stay
    passing: tuple[tuple[int, int], ...]  # bytes of a tile that passes by, and of the row statistics beside it
    scratch: int  # of scores that change hands between warps
    loops: int
    num_stages: int
    wgmma: bool
    tma: bool
    ahead: bool = False  # the first tile is loaded ahead of the loops, and the last one's product comes behind them
    in_registers: bool = False  # what stays is read from shared memory once
    again: bool = False  # a tile that passes by is an operand of two products

    def buffers(self) -> list[Buffer]:
        # wgmma reads a tile from shared memory while the next one arrives.
        depth = self.num_stages if self.wgmma and self.num_stages > 1 else self.num_stages - 1
        align = _TMA_ALIGN if self.tma or self.wgmma else 16
        end = (self.loops + 2) * _LOOP
        found = []
        for size in self.staying:
            found.append(
                Buffer(size, 0, 2 if self.in_registers else end, _TMA_ALIGN if self.wgmma or self.in_registers else 16)
            )
            if self.in_registers:
                found.append(Buffer(8, 0, 2))
        if self.ahead:
            read_by_wgmma = self.loops * _LOOP + _LOOP // 2
            found.append(Buffer(self.passing[0][0], 3, read_by_wgmma if self.wgmma and depth > 1 else 5, align))
            found += [Buffer(8, 3, 4)] * self.tma
        for loop in range(1, self.loops + 1):
            found += self._loop(loop * _LOOP, self.passing, depth, align)
        if self.ahead:
            found += self._loop((self.loops + 1) * _LOOP, self.passing[1:], depth, align)
        return found

    def _loop(self, at: int, passing: Sequence[tuple[int, int]], depth: int, align: int) -> list[Buffer]:
        found = []
        if depth:
            end = at + _LOOP - 10
            for i, (tile, rows) in enumerate(passing):
                found.append(Buffer(depth * tile, at + i, end - i, align))
                if rows:
                    found.append(Buffer((self.num_stages - 1) * rows, at + i, end - i, _ROWS_ALIGN if self.tma else 16))
            if self.tma:
                for i, (_, rows) in enumerate(passing):
                    found.append(Buffer(8 * depth, at + 10 + i, end - 10 - i))
                    found += [Buffer(8 * (self.num_stages - 1), at + 10 + i, end - 10 - i)] * bool(rows)
            middle = at + _LOOP // 2
            return found + ([Buffer(self.scratch, middle, middle + 1)] if self.scratch else [])
        # Nothing is pipelined: a tile lives until its product, and with mma.sync only until it is in registers.
        step = _LOOP // (len(passing) + 1)
        kept = self.again and (self.wgmma or not self.tma)
        for i, (tile, rows) in enumerate(passing):
            begin = at + i * step
            found.append(Buffer(tile, begin, at + _LOOP - 1 if kept else begin + step - 1, align))
            if self.tma:
                found.append(Buffer(8, begin, begin + 2))
                then = begin + step - 1
                found += [Buffer(rows, then, then + 1, _ROWS_ALIGN), Buffer(8, then, then + 1)] * bool(rows)
        if self.scratch:
            late = at + (len(passing) - 1) * step + (step if self.tma else 1)
            found += [Buffer(self.scratch, late, late + 1)] * (2 if kept and passing[0][1] else 1)
        return found


def up(value: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-value // unit) * unit
