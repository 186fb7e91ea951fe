"""compiled, inspect: what compilers make of kernels, with no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peakattn_lab.cli.console import (
    progress,
    say,
    say_json,
    sentences,
    show_table,
)


def compiled(
    arch: Annotated[str, typer.Option(help="Architecture to compile for, such as sm_90; no GPU needed.")] = "",
    kernel: Annotated[list[str] | None, typer.Option(help="Kernel ids; all GPU kernels if none.")] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="Head sizes; 64, 128 and 256 if none.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
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
    head_dim: Annotated[int, typer.Option(help="Size of a head of q and k.")] = 128,
    head_dim_v: Annotated[int | None, typer.Option(help="Size of a head of v; as of q and k unless given.")] = None,
    seqlen: Annotated[int, typer.Option(help="Tokens.")] = 4096,
    batch: Annotated[int, typer.Option(help="Batch size.")] = 4,
    heads: Annotated[int, typer.Option(help="Heads.")] = 16,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "bfloat16",
    causal: Annotated[bool, typer.Option(help="Causal mask.")] = False,
    config: Annotated[str | None, typer.Option(help='Knobs other than the default ones, as JSON: {"block_m": 64}.')] = None,
    against: Annotated[str | None, typer.Option(help="What to compare with: knobs as JSON, or another kernel id.")] = None,
    loop: Annotated[int | None, typer.Option(help="Print the machine code of this hot loop.")] = None,
    cubin: Annotated[Path | None, typer.Option(help="A cubin file to read instead of a kernel.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The findings as JSON.")] = False,
) -> None:
    """What one kernel compiles to, with no GPU: occupancy, hot loops, wasted products, differences between two configs."""
    from peakattn_lab import compiled, inspection

    notes: list[str] = []
    with sentences():
        if cubin is not None and kernel is None:
            kernels = inspection.read_cubin(cubin)
            tables, loops = inspection.cubin_tables(kernels), [one for k in kernels for one in k.loops]
        elif kernel is not None and cubin is None:
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
            if as_json:
                return say_json(inspection.to_dict(found))
            tables, notes, loops = inspection.tables(found), inspection.notes(found), inspection.all_loops(found)
            if against is not None:
                tables, notes = [inspection.difference_table(found, inspection.counterpart(found, against))], []
        else:
            raise ValueError("inspect takes a kernel id or --cubin FILE, one of the two.")
        if loop is not None:
            return say(inspection.loop_listing(loops, loop))
    for title, header, rows in tables:
        show_table(title, header, rows, left=2)
    for note in notes:
        say(note)
    return None
