"""What tests of every backend hold a forward to: the error budget of SEMANTICS against the float64 oracle, and masked keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from peakattn import reference
from peakattn.problem import AttentionProblem

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Forward = Callable[[Tensors, dict[str, Any]], tuple[torch.Tensor, torch.Tensor]]  # out and lse of (q, k, v) under options


def check(
    out: torch.Tensor, lse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> None:
    want_out, want_lse = reference.attention(q, k, v, **options)
    low_out, low_lse = reference.attention(q, k, v, dtype=q.dtype, **options)
    reference.check(out, want_out, low_out, "out")
    if lse is not None:
        # Float32 holds it, but with 16-bit inputs torch's own kernel takes exp to 20 bits.
        reference.check(lse, want_lse, low_lse, "lse", torch.float32 if q.dtype == torch.float32 else torch.float16)


def check_masked_keys(forward: Forward, tensors: Tensors, options: dict[str, Any], value: float) -> None:
    """Keys 20 and 41 of 44 become ``value``: of 40 rows those that do not see them stay as they were."""
    clean_out, clean_lse = forward(tensors, options)
    q, k, v = tensors
    problem = AttentionProblem.of(q, k, v, **options)
    for key in (20, 41):
        k[:, key], v[:, key] = value, value
    out, lse = forward(tensors, options)
    blind = [i for i in range(40) if not any(a <= key < b for a, b in [problem.key_range(i)] for key in (20, 41))]
    assert len(blind) > 10
    reference.check(out[:, blind], clean_out[:, blind].double(), clean_out[:, blind])
    torch.testing.assert_close(lse[..., blind], clean_lse[..., blind], rtol=0, atol=0)
    seeing = [i for i in range(40) if i not in blind]
    assert torch.isnan(out[:, seeing].float()).any()
