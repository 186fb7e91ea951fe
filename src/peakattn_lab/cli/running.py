"""run: one kernel, everything settable; the target for a profiler."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from peakattn_lab.cli.console import say, say_json, sentences, show_table, torch_device, window_of
from peakattn_lab.cli.options import AsJson, Batch, Causal, Dtype, HeadDim, HeadDimV, SeqlenK, Softcap, TorchDevice, Window


def run(
    kernel: Annotated[str, typer.Argument(help="A kernel id, such as triton.fwd, or a rung: ladder.triton.step5.")],
    dtype: Dtype = "bfloat16",
    head_dim: HeadDim = 128,
    head_dim_v: HeadDimV = None,
    batch: Batch = 1,
    seqlen_q: Annotated[int, typer.Option("--seqlen-q", "--seqlen", help="Query length in tokens.")] = 4096,
    seqlen_k: SeqlenK = None,
    num_heads: Annotated[int, typer.Option("--num-heads", "--heads", help="Query heads.")] = 16,
    num_heads_kv: Annotated[
        int | None,
        typer.Option("--num-heads-kv", "--kv-heads", help="Key and value heads; as many as query heads unless given."),
    ] = None,
    softmax_scale: Annotated[float | None, typer.Option(help="1/sqrt(head_dim) unless given.")] = None,
    softcap: Softcap = None,
    causal: Causal = False,
    window: Window = None,
    return_lse: Annotated[bool, typer.Option(help="Also compute lse, forward.")] = True,
    block_m: Annotated[int | None, typer.Option(help="Query rows of a tile.")] = None,
    block_n: Annotated[int | None, typer.Option(help="Keys of a tile.")] = None,
    num_threads: Annotated[int | None, typer.Option(help="Threads of a block; of kernels that count warps, 32 each.")] = None,
    config: Annotated[str | None, typer.Option(help='Any knobs of the kernel, as JSON: {"num_stages": 2}.')] = None,
    iterations: Annotated[int, typer.Option(help="Timed launches, which a profiler sees.")] = 10,
    skip_check: Annotated[bool, typer.Option("--skip-check", help="Do not hold the outputs to the oracle.")] = False,
    device: TorchDevice = "",
    as_json: AsJson = False,
) -> None:
    """One kernel on one problem: error against the oracle, time, TFLOP/s, registers, spills. Exit code 1 when it is wrong.

    Warm-up comes first; then exactly --iterations launches stand between cudaProfilerStart and cudaProfilerStop, as ncu
    --profile-from-start off and nsys --capture-range cudaProfilerApi want them.
    """
    from peakattn_lab import problems, runone

    with sentences():
        if iterations < 1:
            raise ValueError(f"iterations is {iterations}; allowed are 1 and more.")
        where, facts = torch_device(device)
        chosen = runone.Kernel.named(kernel)
        problem = problems.of_options(
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            heads=num_heads,
            kv_heads=num_heads_kv,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=dtype,
            device_type=where.type,
            backward=chosen.direction == "bwd",
            causal=causal,
            window_size=window_of(window),
            softmax_scale=softmax_scale,
            softcap=softcap,
            return_lse=return_lse,
        )
        knobs = _knobs(config, block_m=block_m, block_n=block_n, num_threads=num_threads)
        settled = chosen.config(problem, facts, knobs)
        result = runone.run(
            chosen, problem, settled, where,
            softmax_scale=softmax_scale, softcap=softcap, iterations=iterations, check=not skip_check,
        )  # fmt: skip
    if as_json:
        say_json(runone.to_dict(result))
    else:
        say(f"{kernel} on {facts.name}: {problem}")
        say(f"{settled}")
        for title, header, rows in runone.tables(result):
            show_table(title, header, rows, left=1)
        for sentence in result.wrong:
            say(sentence)
    if result.wrong:
        raise typer.Exit(1)


def _knobs(text: str | None, **options: int | None) -> dict[str, Any]:
    """Knobs of the JSON object and of the options, which may not contradict each other."""
    given: dict[str, Any] = {}
    if text is not None:
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f'config is {text!r}, which is no JSON ({error}); write it as {{"num_stages": 2}}.') from None
        if not isinstance(given, dict):
            raise ValueError(f'config is {text!r}; write an object of knobs, such as {{"num_stages": 2}}.')
    for name, value in options.items():
        if value is None:
            continue
        if given.get(name, value) != value:
            raise ValueError(f"{name} is {value} as an option and {given[name]} in config; give it once.")
        given[name] = value
    return given
