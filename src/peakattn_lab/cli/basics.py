"""doctor, demo, explain, selftest, docs."""

from __future__ import annotations

from typing import Annotated

import typer

from peakattn_lab.cli.console import (
    default_records,
    device_named,
    say,
    say_json,
    sentences,
    show_table,
    torch_device,
    window_of,
)
from peakattn_lab.cli.options import (
    AsJson,
    Batch,
    Causal,
    Commit,
    Dtype,
    HeadDim,
    HeadDimV,
    Heads,
    KvHeads,
    Out,
    Seqlen,
    SeqlenK,
    Softcap,
    Window,
)


def doctor(
    as_json: AsJson = False,
) -> None:
    """What is installed, which backends work and why not, GPU, driver, caches. Exit code 0 when the main job can run."""
    from peakattn_lab import doctor as examination

    findings = examination.examine()
    ok = examination.healthy(findings)
    if as_json:
        say_json({"healthy": ok, "findings": [finding.model_dump() for finding in findings]})
    else:
        rows = [[f.group, f.name, f.status, f.detail, f.fix or ""] for f in findings]
        show_table("", ["", "", "status", "detail", "what mends it"], rows, left=5)
        say("The main job works." if ok else "The main job does not work: see the rows that say failed.")
    raise typer.Exit(0 if ok else 1)


def demo(
    seconds: Annotated[float, typer.Option(help="Seconds for each thing that is timed.")] = 4.0,
) -> None:
    """A real sentence encoder with peakattn as its attention: checked, timed, and compiled for a GPU. No network."""
    from peakattn_lab import demo as job

    with sentences():
        ok = job.demo(say, show_table, seconds)
    raise typer.Exit(0 if ok else 1)


def explain(
    batch: Batch = 1,
    seqlen: Seqlen = 4096,
    seqlen_k: SeqlenK = None,
    heads: Heads = 16,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = 128,
    head_dim_v: HeadDimV = None,
    dtype: Dtype = "bfloat16",
    causal: Causal = False,
    window: Window = None,
    softcap: Softcap = None,
    alignment: Annotated[str, typer.Option(help="bottom_right or top_left.")] = "bottom_right",
    backward: Annotated[bool, typer.Option(help="The backward pass.")] = False,
    device: Annotated[str, typer.Option(help="current, cpu, or a GPU that need not be here, such as h200.")] = "current",
    backend: Annotated[str | None, typer.Option(help="A backend or a kernel id that must be used.")] = None,
) -> None:
    """Which kernel and config a problem gets, and why every other kernel refuses. Nothing is compiled."""
    from peakattn import api
    from peakattn_lab import problems

    with sentences():
        where = device_named(device)
        problem = problems.of_options(
            batch=batch,
            seqlen_q=seqlen,
            seqlen_k=seqlen_k,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=dtype,
            device_type=where.type,
            backward=backward,
            causal=causal,
            window_size=window_of(window),
            softcap=softcap,
            alignment=alignment,
            return_lse=backward,
        )
        text = api.describe(problem, where, backend)
    say(text)
    raise typer.Exit(0 if "chosen:" in text or "no kernel is needed" in text else 1)


def selftest(
    marker: Annotated[str, typer.Option(help="pytest marker expression of the tests to run.")] = "gpu",
    out: Out = None,
    commit: Commit = None,
    pytest_options: Annotated[list[str] | None, typer.Argument(help="Passed on to pytest, after --.")] = None,
) -> None:
    """Run the GPU tests of this checkout and record what passed, on which kernel sources."""
    from peakattn_lab import provenance, records
    from peakattn_lab import selftest as suite

    with sentences():
        root = provenance.checkout()
        if root is None:
            raise ValueError("selftest runs the tests of a checkout; clone the project and run it there.")
        facts = torch_device("")[1]
        if facts.type == "cpu" and marker == "gpu":
            raise ValueError("there is no CUDA device here, so no GPU test can run; peakattn doctor says why.")
        record = suite.run(root, facts.name, facts.arch, marker, pytest_options or (), commit)
        path = out or default_records(facts, "selftest")
        records.append(path, record)
    say(f"{record.counts}; record in {path}")
    raise typer.Exit(0 if record.ok else 1)


def docs(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 when something differs.")] = False,
) -> None:
    """Regenerate the tables and pictures of this checkout's documents from its records."""
    from peakattn_lab import docs as documents
    from peakattn_lab import provenance

    with sentences():
        root = provenance.checkout()
        if root is None:
            raise ValueError("docs rewrites the documents of a checkout; clone the project and run it there.")
        changes = documents.update(root, check=check)
    for change in changes:
        say(change + ("; run make docs" if check else ": rewritten"))
    raise typer.Exit(1 if changes and check else 0)
