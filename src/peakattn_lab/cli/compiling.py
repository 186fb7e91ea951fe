"""compiled, inspect: what compilers make of kernels, with no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peakattn_lab.cli.console import (
    progress,
    say,
    say_json,
    sentences,
    show_table,
)
from peakattn_lab.cli.options import AsJson, Batch, Causal, Dtype, HeadDim, HeadDimV, Heads, Seqlen

if TYPE_CHECKING:
    from peakattn_lab.inspection import Inspection, Table


def compiled(
    arch: Annotated[str, typer.Option(help="Architecture to compile for, such as sm_90; no GPU needed.")] = "",
    kernel: Annotated[list[str] | None, typer.Option(help="Kernel ids; all GPU kernels if none.")] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="Head sizes; 64, 128 and 256 if none.")] = None,
    as_json: AsJson = False,
) -> None:
    """Registers, shared memory, spills and tensor-core instructions of every kernel under its default config."""
    from peakattn_lab import compiled as survey

    with sentences():
        number = survey.arch_number(arch) if arch else survey.default_arch()
        with progress("compiling") as step:
            found = []
            for one in survey.survey(number, kernel or (), head_dim or survey.HEAD_DIMS):
                found.append(one)
                step(f"compiled {one.kernel}, head_dim {one.problem.head_dim}")
    if as_json:
        say_json([one.to_dict() for one in found])
    else:
        header, rows = survey.table(found)
        show_table(f"compiled for sm_{number}: causal bfloat16, 4,096 tokens, default configs", header, rows, left=4)
        for note in survey.notes(found):
            say(note)
    if not any(one.artifacts for one in found):
        raise typer.Exit(1)


def inspect(
    kernel: Annotated[str | None, typer.Argument(help="A kernel id, such as triton.fwd.")] = None,
    arch: Annotated[str | None, typer.Option(help="Such as sm_90; of this machine's GPU, or Hopper's.")] = None,
    head_dim: HeadDim = 128,
    head_dim_v: HeadDimV = None,
    seqlen: Seqlen = 4096,
    batch: Batch = 4,
    heads: Heads = 16,
    dtype: Dtype = "bfloat16",
    causal: Causal = False,
    config: Annotated[str | None, typer.Option(help='Knobs other than the default ones, as JSON: {"block_m": 64}.')] = None,
    against: Annotated[str | None, typer.Option(help="What to compare with: knobs as JSON, or another kernel id.")] = None,
    against_ptxas: Annotated[
        str | None, typer.Option(help="Compare with what another ptxas (a path, or ptxas-blackwell) makes of the same PTX.")
    ] = None,
    loop: Annotated[int | None, typer.Option(help="Print the machine code of this hot loop.")] = None,
    ptx: Annotated[bool, typer.Option("--ptx", help="Print PTX: all of it, or that of --loop.")] = False,
    lines: Annotated[bool, typer.Option("--lines", help="Also the instructions of each source line, loop by loop.")] = False,
    binary: Annotated[
        Path | None, typer.Option(help="A cubin or a library of somebody else, to read instead of a kernel.")
    ] = None,
    match: Annotated[str, typer.Option(help="Only kernels of --binary whose name this regular expression finds.")] = "",
    as_json: AsJson = False,
) -> None:
    """What one kernel compiles to, with no GPU: occupancy, layouts, hot loops, wasted products, source lines, differences."""
    from peakattn_lab import compiled, inspection

    with sentences():
        if (kernel is None) == (binary is None):
            raise ValueError("inspect takes a kernel id or --binary FILE, one of the two.")
        if binary is not None:
            return _inspect_binary(binary, match, loop)
        assert kernel is not None
        problem = inspection.make_problem(
            kernel,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            seqlen=seqlen,
            batch=batch,
            heads=heads,
            dtype=dtype,
            causal=causal,
        )
        number = compiled.default_arch() if arch is None else compiled.arch_number(arch)
        found = inspection.inspect(kernel, problem, number, config)
        if ptx or loop is not None:
            return say(_code(found, loop, ptx))
        if against_ptxas is not None:
            table, notes = inspection.against_ptxas(found, inspection.tools.ptxas_of(against_ptxas))
            return _show([table], notes)
        if against is not None:
            return _show([inspection.difference_table(found, inspection.counterpart(found, against))], [])
        layouts = inspection.layouts.of(found)
        if as_json:
            return say_json(inspection.to_dict(found) | {"layouts": inspection.layouts.to_dict(layouts)})
        tables = inspection.tables(found) + inspection.layouts.tables(layouts)
        notes = inspection.notes(found) + inspection.layouts.notes(layouts, kernel)
        if lines:
            more, remarks = inspection.lines.tables(found)
            tables, notes = tables + more, notes + remarks
    return _show(tables, notes)


def _inspect_binary(path: Path, match: str, loop: int | None) -> None:
    from peakattn_lab import inspection

    with progress("disassembling") as step:
        kernels = inspection.binaries.read(path, match, on_kernel=step)
    if loop is not None:
        return say(inspection.loop_listing([one for k in kernels for one in k.loops], loop))
    return _show(inspection.binaries.tables(kernels), inspection.binaries.notes(kernels))


def _code(found: Inspection, loop: int | None, ptx: bool) -> str:
    """The listing that was asked for: PTX or machine code, of one hot loop or of everything."""
    from peakattn_lab import inspection

    if not ptx:
        assert loop is not None
        return inspection.loop_listing(inspection.all_loops(found), loop)
    missing = [f.facts.name for f in found.functions if f.facts.ptx is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} has no PTX: its compiler writes machine code directly. Take --loop alone.")
    texts = [f.facts.ptx or "" for f in found.functions]
    if loop is None:
        return "\n".join(texts)
    return inspection.ptx.loop_listing([one for text in texts for one in inspection.ptx.hot_loops(text)], loop)


def _show(tables: Sequence[Table], notes: Sequence[str]) -> None:
    for title, header, rows in tables:
        show_table(title, header, rows, left=2)
    for note in notes:
        say(note)
