"""What differs between two kernels, two configs, or two compiler versions on the same PTX."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path

from peakattn.backends import cubin
from peakattn_lab import problems
from peakattn_lab.inspection import tools
from peakattn_lab.inspection.kernel import Function, Inspection, direction_of, facts_of, function_of, inspect
from peakattn_lab.inspection.loops import ALL_KINDS, Table


def counterpart(found: Inspection, against: str) -> Inspection:
    """The other side of a comparison: the same kernel under another config (a JSON object), or another kernel by its id."""
    if against.lstrip().startswith("{"):
        return inspect(found.kernel, found.problem, found.device.arch, against)
    if direction_of(against) != found.problem.direction:
        raise ValueError(f"{against} and {found.kernel} compute different directions; compare two forwards or two backwards.")
    return inspect(against, found.problem, found.device.arch)


def assembled(found: Inspection, ptxas: Path) -> Inspection:
    """The same kernel, its PTX assembled by another ptxas: what a change of the assembler alone does."""
    functions = []
    for f in found.functions:
        if f.facts.ptx is None:
            raise ValueError(f"{f.facts.name} has no PTX to assemble again; its compiler writes machine code directly.")
        binary = tools.assemble(f.facts.ptx, ptxas)
        sass, entry = tools.listing(binary), cubin.entry(binary, f.facts.name)
        facts = dataclasses.replace(
            f.facts,
            registers=entry.registers,
            frame_bytes=entry.frame_bytes,
            opcodes=cubin.count_opcodes(sass),
            loops=cubin.tensor_loops(sass),
            sass=sass,
        )
        functions.append(function_of(facts, found.problem, found.config, found.device))
    return dataclasses.replace(found, functions=tuple(functions))


def difference_table(a: Inspection, b: Inspection, names: tuple[str, str] | None = None) -> Table:
    """What differs between two kernels, configs or assemblers: knobs, facts, loops, opcode counts, side by side."""
    if names is None:
        names = (a.kernel, b.kernel) if a.kernel != b.kernel else ("config", "against")
    knobs = [{k: json.dumps(v) for k, v in dataclasses.asdict(one.config).items()} for one in (a, b)]
    rows = _changes("config", *knobs)
    for first, second in itertools.zip_longest(a.functions, b.functions):
        name = (first or second).facts.name
        if first and second and first.facts.name != second.facts.name:
            name = f"{first.facts.name} / {second.facts.name}"
        for side in (facts_of, _loop_facts, _opcode_facts):
            rows += _changes(name, *(side(f) if f else {} for f in (first, second)))
    return f"differences on {problems.label(a.problem)}", ["", "what", *names, "difference"], rows


def against_ptxas(found: Inspection, ptxas: Path) -> tuple[Table, list[str]]:
    """The differences that another ptxas makes on the same PTX, and what they mean, in sentences.

    Both sides are assembled here, so that nothing but the assembler differs.
    """
    own = tools.ptxas_of("ptxas-blackwell" if found.device.arch >= 100 and tools.find("ptxas-blackwell") else "ptxas")
    names = (f"{own.name} {tools.version(own)}", f"{ptxas.name} {tools.version(ptxas)}")
    table = difference_table(assembled(found, own), assembled(found, ptxas), names)
    if not table[2]:
        return table, [f"{names[0]} and {names[1]} make the same registers, spills and opcode counts of this PTX."]
    return table, ["Same PTX on both sides: these differences come from the assembler alone."]


def _loop_facts(f: Function) -> dict[str, str]:
    made = {}
    for n, (loop, work) in enumerate(zip(f.loops, f.work, strict=True), 1):
        made[f"loop {n}: instructions"] = str(len(loop.instructions))
        made |= {f"loop {n}: {kind}": str(loop.kinds.get(kind, 0)) for kind in ALL_KINDS}
        made[f"loop {n}: ratio"] = "not derivable" if work.ratio is None else f"{work.ratio:.2f}"
    return made


def _opcode_facts(f: Function) -> dict[str, str]:
    return {f"opcode {name}": str(count) for name, count in sorted(f.facts.opcodes.items())}


def _changes(where: str, a: dict[str, str], b: dict[str, str]) -> list[list[str]]:
    """Rows of what is not the same; an opcode that one side lacks is there 0 times."""
    rows = []
    for what in dict.fromkeys((*a, *b)):
        missing = "0" if what.startswith("opcode ") else "-"
        before, after = a.get(what, missing), b.get(what, missing)
        if before != after:
            numbers = all(re.fullmatch(r"\d+(\.\d+)?", text) for text in (before, after))
            rows.append([where, what, before, after, f"{float(after) - float(before):+g}" if numbers else ""])
    return rows
