"""Named problem sets, as data: what gets measured, and why these sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from peakattn.problem import DTYPES, AttentionProblem, Direction

SOFTCAP = 30.0  # the bound on scores in problems that have one


@dataclass(frozen=True)
class ProblemSet:
    """Problems that are measured together; ``on_cpu`` says that a CPU finishes them in minutes."""

    name: str
    why: str
    problems: tuple[AttentionProblem, ...]
    on_cpu: bool = False


def make(
    seqlen: int | tuple[int, int],
    head_dim: int,
    *,
    batch: int = 1,
    heads: int | tuple[int, int] = 8,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    direction: Direction = "fwd",
) -> AttentionProblem:
    """A problem in few words; pairs are (query, key) lengths and (query, kv) heads."""
    seqlen_q, seqlen_k = (seqlen, seqlen) if isinstance(seqlen, int) else seqlen
    heads_q, heads_kv = (heads, heads) if isinstance(heads, int) else heads
    left, right = window if window is not None else (None, None)
    return AttentionProblem(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads_q=heads_q,
        num_heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=dtype,
        window_left=left,
        window_right=0 if causal else right,
        direction=direction,
        return_lse=direction == "bwd",
    )


def _cells(direction: Direction) -> tuple[AttentionProblem, ...]:
    """18 cells of 16,384 tokens a call with num_heads x head_dim = 2048, so that every cell has the same width of model."""
    return tuple(
        make(seqlen, head_dim, batch=16384 // seqlen, heads=2048 // head_dim, causal=causal, direction=direction)
        for head_dim in (64, 128, 256)
        for causal in (False, True)
        for seqlen in (1024, 4096, 16384)
    )


_F32 = torch.float32

_ALL = (
    ProblemSet("prefill", "forward, bf16, head_dim 64 / 128 / 256, full and causal, 1k / 4k / 16k", _cells("fwd")),
    ProblemSet("backward", "backward of the same 18 cells", _cells("bwd")),
    ProblemSet(
        "gqa",
        "grouped heads of served models: 4, 8 and 32 query heads per kv head",
        tuple(
            make(seqlen, 128, batch=8192 // seqlen, heads=heads, causal=True, direction=direction)
            for direction in ("fwd", "bwd")
            for heads in ((32, 8), (64, 8), (32, 1))
            for seqlen in (2048, 8192)
        ),
    ),
    ProblemSet(
        "dims",
        "forward, bf16, the head sizes that need tiles of other widths: 96 and 192",
        tuple(
            make(seqlen, head_dim, batch=16384 // seqlen, heads=1536 // head_dim, causal=causal)
            for head_dim in (96, 192)
            for causal in (False, True)
            for seqlen in (1024, 4096, 16384)
        ),
    ),
    ProblemSet(
        "served",
        "forward of served models: 32 query heads on 8 kv heads, causal, 2k to 32k; and float16",
        (
            *(make(seqlen, 128, batch=32768 // seqlen, heads=(32, 8), causal=True) for seqlen in (2048, 8192, 32768)),
            *(
                make(4096, head_dim, batch=4, heads=2048 // head_dim, causal=causal, dtype=torch.float16)
                for head_dim in (64, 128, 256)
                for causal in (False, True)
            ),
        ),
    ),
    ProblemSet(
        "small",
        "so little work that the host's cost is what one waits for",
        tuple(
            make(seqlen, 64, heads=4, causal=causal, direction=direction)
            for direction in ("fwd", "bwd")
            for seqlen, causal in ((16, False), (128, True), (512, True))
        ),
        on_cpu=True,
    ),
    ProblemSet(
        "demo",
        "a sentence encoder (12 heads of 32, batches of sentences) and a long causal context",
        (
            make(128, 32, batch=32, heads=12, dtype=_F32),
            make(256, 32, batch=8, heads=12, dtype=_F32),
            make(4096, 64, heads=8, causal=True, dtype=_F32),
        ),
        on_cpu=True,
    ),
    ProblemSet(
        "cpu",
        "float32 and bfloat16 on a CPU, forward and backward, full, causal and window",
        tuple(
            make(seqlen, 64, batch=2, causal=causal, window=window, dtype=dtype, direction=direction)
            for direction in ("fwd", "bwd")
            for dtype in (_F32, torch.bfloat16)
            for seqlen, causal, window in ((512, False, None), (2048, True, None), (2048, True, (255, 0)))
        ),
        on_cpu=True,
    ),
    ProblemSet(
        "smoke",
        "does the bench work at all: seconds on any machine",
        (make(128, 32, heads=2, dtype=_F32), make(128, 32, heads=2, causal=True, dtype=_F32, direction="bwd")),
        on_cpu=True,
    ),
)

SETS: dict[str, ProblemSet] = {s.name: s for s in _ALL}


def named(name: str) -> ProblemSet:
    """The set of that name, or ValueError with the names there are."""
    try:
        return SETS[name]
    except KeyError:
        raise ValueError(f"problem set {name!r} is unknown; known are {', '.join(SETS)}.") from None


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a name such as ``bfloat16``, or ValueError with those there are."""
    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    if name not in known:
        raise ValueError(f"dtype is {name!r}; allowed are float16, bfloat16 and float32.")
    return known[name]


def of_options(
    *,
    batch: int,
    seqlen_q: int,
    seqlen_k: int | None,
    heads: int,
    kv_heads: int | None,
    head_dim: int,
    head_dim_v: int | None,
    dtype: str,
    device_type: str,
    backward: bool = False,
    **options: Any,
) -> AttentionProblem:
    """The problem of a call with tensors of these sizes; ``options`` are keywords of ``attention``."""
    kind = dtype_named(dtype)
    keys, kv = seqlen_q if seqlen_k is None else seqlen_k, heads if kv_heads is None else kv_heads
    shapes = ((seqlen_q, heads, head_dim), (keys, kv, head_dim), (keys, kv, head_dim_v or head_dim))
    q, k, v = (torch.empty(batch, *shape, dtype=kind, device="meta") for shape in shapes)
    problem = on_device(AttentionProblem.of(q, k, v, **options), device_type)
    return problem.backward(needs_dq=True, needs_dk=True, needs_dv=True, aligned=problem.aligned) if backward else problem


def matching(found: Sequence[AttentionProblem], words: str | None) -> list[AttentionProblem]:
    """Those whose label has all the words, or ValueError with the labels there are."""
    wanted = [p for p in found if all(word in label(p).split() for word in (words or "").split())]
    if not wanted:
        raise ValueError(f"no problem has all the words {words or ''!r}; there are\n  " + "\n  ".join(map(label, found)))
    return wanted


def on_device(problem: AttentionProblem, device_type: str) -> AttentionProblem:
    """The same problem with its tensors on ``cpu`` or ``cuda``."""
    return dataclasses.replace(problem, device_type=device_type)


def to_dict(problem: AttentionProblem) -> dict[str, Any]:
    """The problem as JSON values; ``from_dict`` reads it back."""
    return {**dataclasses.asdict(problem), "dtype": str(problem.dtype).removeprefix("torch.")}


def from_dict(data: dict[str, Any]) -> AttentionProblem:
    """The problem that ``to_dict`` wrote."""
    return AttentionProblem(**{**data, "dtype": getattr(torch, data["dtype"])})


def label(problem: AttentionProblem) -> str:
    """A short name for tables and axes: ``fwd bf16 d128 causal 4k``, with batch, heads and lengths where they matter."""
    dtype = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}[problem.dtype]
    dim = f"d{problem.head_dim}" + (f"/{problem.head_dim_v}" if problem.head_dim_v != problem.head_dim else "")
    mask = problem.mask_name
    if mask == "window":
        mask = f"window {'-' if problem.window_left is None else problem.window_left}"
    lengths = length(problem.seqlen_q)
    if problem.seqlen_q != problem.seqlen_k:
        lengths += f"x{length(problem.seqlen_k)}"
    heads = f"{problem.num_heads_q}" + (f"/{problem.num_heads_kv}" if problem.group > 1 else "")
    return f"{problem.direction} {dtype} {dim} {mask} {lengths} b{problem.batch} h{heads}"


def length(tokens: int) -> str:
    """``4096`` as ``4k``; lengths that are no multiple of 1024 as they are."""
    return f"{tokens // 1024}k" if tokens and tokens % 1024 == 0 else str(tokens)


def inputs(problem: AttentionProblem, device: torch.device, seed: int) -> tuple[torch.Tensor, ...]:
    """Random normal q, k, v, and dout for a backward; never zeros, on which hardware runs faster than on real data."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(seqlen: int, heads: int, dim: int) -> torch.Tensor:
        return torch.randn(problem.batch, seqlen, heads, dim, dtype=problem.dtype, device=device, generator=generator)

    q = normal(problem.seqlen_q, problem.num_heads_q, problem.head_dim)
    k = normal(problem.seqlen_k, problem.num_heads_kv, problem.head_dim)
    v = normal(problem.seqlen_k, problem.num_heads_kv, problem.head_dim_v)
    if problem.direction == "fwd":
        return q, k, v
    return q, k, v, normal(problem.seqlen_q, problem.num_heads_q, problem.head_dim_v)


def options(problem: AttentionProblem) -> dict[str, Any]:
    """The keywords of ``peakattn.attention`` that make this problem of its tensors."""
    chosen: dict[str, Any] = {}
    if problem.alignment != "bottom_right":
        chosen["alignment"] = problem.alignment
    if problem.causal:
        chosen["causal"] = True
    elif problem.mask_name == "window":
        chosen["window_size"] = (problem.window_left, problem.window_right)
    if problem.softcap:
        chosen["softcap"] = SOFTCAP
    return chosen
