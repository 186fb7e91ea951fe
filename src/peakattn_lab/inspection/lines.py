"""Which source lines the instructions of a hot loop come from: the static half of a profiler's source page."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import peakattn
import peakattn_lab
from peakattn.backends import cubin
from peakattn_lab.inspection import ptx as ptx_loops
from peakattn_lab.inspection import tools
from peakattn_lab.inspection.kernel import Function, Inspection
from peakattn_lab.inspection.loops import Table

_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.MULTILINE)
_PTX_INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.]*)\b[^:]*;")
_SHOWN = 16
_OPCODES_SHOWN = 6
_SOURCE_WIDTH = 64

Place = tuple[str, int]  # file, line


@dataclass(frozen=True)
class LineCounts:
    """Instructions of one hot loop by source line. ``unit`` is SASS or PTX; ``note`` says what is less than exact."""

    unit: str
    counts: dict[Place, Counter[str]]
    note: str | None = None


def of_function(function: Function) -> list[LineCounts]:
    """For each hot loop; of the machine code where it can be traced to lines, else of the PTX. ValueError when neither can."""
    facts = function.facts
    # Its file names as they are today serve both ways, as an assembler writes what stands here into the machine code.
    code = _FILE.sub(lambda found: found[0].replace(found[2], _today(found[2])), facts.ptx or "")
    if not re.search(r"^\s*\.loc\s", code, re.MULTILINE):
        raise ValueError(f"{facts.name} has no line information: its compiler wrote none into the PTX.")
    found = _same_code(code, facts.sass or "")
    if found is None:
        note = "no assembler here makes the same machine code of this PTX, so PTX instructions are counted"
        return [LineCounts("PTX", _ptx_counts(code, loop), note) for loop in ptx_loops.hot_loops(code)]
    places = tools.source_lines(found)
    made = []
    for loop in function.loops:
        counts: dict[Place, Counter[str]] = defaultdict(Counter)
        for i in loop.instructions:
            counts[places.get(i.address, ("", 0))][i.head] += 1
        made.append(LineCounts("SASS", counts))
    return made


def _same_code(ptx: str, sass: str) -> bytes | None:
    """The kernel assembled again with line information, by an assembler that makes the same instructions of it."""
    wanted = [i.text for i in cubin.instructions(sass)]
    for ptxas in (*tools.find("ptxas"), *tools.find("ptxas-blackwell")):
        try:
            binary = tools.assemble(ptx, ptxas)
        except ValueError:
            continue
        if [i.text for i in cubin.instructions(tools.listing(binary))] == wanted:
            return binary
    return None


def _today(file: str) -> str:
    """Where a source file of these packages is now.

    A compiler's cache knows a kernel by its text: what it gives out may have been compiled in another checkout, which may
    have moved or gone since. The lines are the same there, or the kernel would have been compiled anew.
    """
    for package in (peakattn, peakattn_lab):
        _, inside, tail = file.rpartition(f"/{package.__name__}/")
        if inside and (here := Path(package.__path__[0], tail)).exists():
            return str(here)
    return file


def _ptx_counts(whole: str, loop: str) -> dict[Place, Counter[str]]:
    files = dict(_FILE.findall(whole))
    counts: dict[Place, Counter[str]] = defaultdict(Counter)
    place = ("", 0)
    for line in loop.splitlines():
        if where := _LOC.match(line):
            place = files.get(where[1], ""), int(where[2])
        elif found := _PTX_INSTRUCTION.match(line):
            counts[place][found[1].split(".")[0]] += 1
    return counts


def tables(found: Inspection) -> tuple[list[Table], list[str]]:
    """A table for each hot loop whose lines differ from those of the loops before it, and what could not be traced."""
    made: list[Table] = []
    said = []
    seen = []
    for function in (f for f in found.functions if f.loops):
        try:
            loops = of_function(function)
        except ValueError as error:
            said.append(str(error))
            continue
        for number, counts in enumerate(loops, 1):
            if counts not in seen:
                made.append(table(function.facts.name, number, counts))
            seen.append(counts)
            if counts.note:
                said.append(f"{function.facts.name}: {counts.note}.")
    return made, list(dict.fromkeys(said))


def table(name: str, number: int, found: LineCounts) -> Table:
    """The lines with most instructions, their share of the loop, and which they are."""
    total = sum(sum(opcodes.values()) for opcodes in found.counts.values())
    ordered = sorted(found.counts.items(), key=lambda item: (-sum(item[1].values()), item[0]))
    rows = [
        [
            _place(place),
            _source(place),
            str(sum(opcodes.values())),
            f"{sum(opcodes.values()) / total:.1%}",
            _counts(opcodes),
        ]
        for place, opcodes in ordered[:_SHOWN]
    ]
    if rest := ordered[_SHOWN:]:
        count = sum(sum(opcodes.values()) for _, opcodes in rest)
        rows.append([f"{len(rest)} more lines", "", str(count), f"{count / total:.1%}", ""])
    title = f"{name}, loop {number}: {found.unit} instructions by source line"
    return title, ["line", "source", "instructions", "share", "opcodes"], rows


def hottest(found: LineCounts) -> str:
    """The line with most instructions of a loop, in a phrase."""
    total = sum(sum(opcodes.values()) for opcodes in found.counts.values())
    place, opcodes = max(found.counts.items(), key=lambda item: sum(item[1].values()))
    return f"{_place(place)} with {sum(opcodes.values()) / total:.0%} of the loop's instructions: {_source(place)}"


def _counts(opcodes: Counter[str]) -> str:
    text = ", ".join(f"{count} {name}" for name, count in opcodes.most_common(_OPCODES_SHOWN))
    return text + (", …" if len(opcodes) > _OPCODES_SHOWN else "")


def _place(place: Place) -> str:
    return f"{Path(place[0]).name}:{place[1]}" if place[0] else "no line"


def _source(place: Place) -> str:
    try:
        text = Path(place[0]).read_text(encoding="utf-8").splitlines()[place[1] - 1].strip()
    except (OSError, IndexError):
        return ""
    return text if len(text) <= _SOURCE_WIDTH else text[: _SOURCE_WIDTH - 1] + "…"
