"""Options that several commands have, so that they are called and explained alike everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# The problem.
Batch = Annotated[int, typer.Option(help="Batch size.")]
Heads = Annotated[int, typer.Option(help="Query heads.")]
HeadDim = Annotated[int, typer.Option(help="Size of a head of q and k.")]
HeadDimV = Annotated[int | None, typer.Option(help="Size of a head of v; as of q and k unless given.")]
KvHeads = Annotated[int | None, typer.Option(help="Key and value heads; as many as query heads unless given.")]
Seqlen = Annotated[int, typer.Option("--seqlen", help="Tokens; of the queries, where key lengths can be given.")]
SeqlenK = Annotated[int | None, typer.Option(help="Key length in tokens; as of the queries unless given.")]
Dtype = Annotated[str, typer.Option(help="float16, bfloat16 or float32.")]
Causal = Annotated[bool, typer.Option(help="Causal mask.")]
Window = Annotated[str | None, typer.Option(help="LEFT,RIGHT; -1 for an unlimited side.")]
Softcap = Annotated[float | None, typer.Option(help="Bound on the scores.")]

# Which problems, on what, against whom.
Only = Annotated[str | None, typer.Option(help="Only problems whose label has all these words, such as 'd128 causal'.")]
TorchDevice = Annotated[str, typer.Option(help="A torch device: cpu, cuda, cuda:1.")]
Rivals = Annotated[str | None, typer.Option(help="Comma-separated rivals, see peakattn bench --list, or none.")]
Processes = Annotated[int | None, typer.Option(help="Processes that compile; as many as there are CPUs unless given.")]

# What becomes of it.
Out = Annotated[Path | None, typer.Option(help="Records file (JSON lines) to append to.")]
Commit = Annotated[str | None, typer.Option(help="The commit, for a tree that was copied without its repository.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
