"""What toolchains share around a launch: arguments by slot, a prepared launch, and tensors without data to compile for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from peakattn.problem import AttentionProblem

SCALARS = ("softmax_scale", "softcap")  # run-time numbers, by name, in every kernel; they follow the tensors


class Bound:
    """A prepared launch: call it with tensors, or hand ``addresses`` what ``Tensor.data_ptr`` says of them."""

    __slots__ = ("_present", "addresses")

    def __init__(self, addresses: Callable[[Sequence[Any]], None], tensors: Sequence[torch.Tensor | None]) -> None:
        self.addresses = addresses
        self._present = tuple(t is not None for t in tensors)

    def __call__(self, *args: Any) -> None:
        tensors = len(self._present)
        pointers = [a.data_ptr() if p else 0 for a, p in zip(args, self._present, strict=False)]
        self.addresses((*pointers, *args[tensors:]))


def slots_of(tensors: Sequence[torch.Tensor | None]) -> tuple[dict[int, int], dict[str, int]]:
    """The slot of each tensor, by its ``id``, and of each run-time number, by its name."""
    by_id = {id(t): i for i, t in enumerate(tensors) if t is not None}
    return by_id, {name: len(tensors) + i for i, name in enumerate(SCALARS)}


def meta_tensors(problem: AttentionProblem) -> list[torch.Tensor | None]:
    """Tensors without data in the order of the kernel's launch, aligned or not as the problem says."""
    pad = 0 if problem.aligned else 1

    def tensor(seqlen: int, heads: int, dim: int) -> torch.Tensor:
        shape = (problem.batch, seqlen, heads, dim + pad)
        return torch.empty(shape, dtype=problem.dtype, device="meta")[..., :dim]

    rows = (problem.seqlen_q, problem.num_heads_q)
    keys = (problem.seqlen_k, problem.num_heads_kv)
    q, k, v = tensor(*rows, problem.head_dim), tensor(*keys, problem.head_dim), tensor(*keys, problem.head_dim_v)
    out = tensor(*rows, problem.head_dim_v)
    lse = torch.empty(problem.batch, problem.num_heads_q, problem.seqlen_q, dtype=torch.float32, device="meta")
    if problem.direction == "fwd":
        return [q, k, v, out, lse if problem.return_lse else None]
    needs = (problem.needs_dq, problem.needs_dk, problem.needs_dv)
    grads = [torch.empty_like(x) if need else None for x, need in zip((q, k, v), needs, strict=True)]
    return [q, k, v, out, lse, torch.empty_like(out), None, *grads]
