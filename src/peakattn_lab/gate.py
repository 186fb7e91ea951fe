"""Correctness before speed: the very outputs that were timed, against the float64 oracle. No speed is reported on a red gate.

A few slices (one batch entry, one kv head with all query heads that read it) are checked at every position; the rest
of every output must be finite.  The oracle runs on the tensors' own device, in blocks of rows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from peakattn import reference
from peakattn.problem import AttentionProblem
from peakattn_lab import problems

SLICES = 2
_OUTPUTS = {"fwd": ("out", "lse"), "bwd": ("dq", "dk", "dv")}
_KV = ("k", "v", "dk", "dv")

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class GateResult:
    """``message`` is what was checked, or what is wrong."""

    passed: bool
    message: str


@dataclass(frozen=True)
class Expected:
    """What one output is in a slice: float64, and torch's own in the problem's dtype."""

    slice: str
    oracle: torch.Tensor
    low_precision: torch.Tensor


class Gate:
    """The oracle's answers for a few slices of one set of inputs; computed once, for any number of outputs.

    Outputs are ``out`` and perhaps ``lse``, or ``dq``, ``dk`` and ``dv``.  ``options`` are the keywords of the call, if they
    are not those of the problem.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        tensors: Tensors,
        seed: int = 0,
        options: dict[str, Any] | None = None,
        slices: int = SLICES,
    ) -> None:
        self.problem = problem
        self.slices = choose_slices(problem, seed, slices)
        self._passed: list[tuple[torch.Tensor, ...]] = []
        self._expected: list[dict[str, Expected]] = []
        options = problems.options(problem) if options is None else options
        for batch, head in self.slices:
            q, k, v, *dout = (self._cut(n, x, batch, head) for n, x in zip(("q", "k", "v", "dout"), tensors, strict=False))
            answers: list[tuple[torch.Tensor, ...]] = []
            for dtype in (torch.float64, problem.dtype):
                if problem.direction == "fwd":
                    answers.append(reference.attention(q, k, v, dtype=dtype, **options))
                else:
                    answers.append(reference.attention_backward(q, k, v, dout[0], dtype=dtype, **options))
            where = f"batch {batch}, kv head {head}"
            names = _OUTPUTS[problem.direction]
            self._expected.append({n: Expected(where, a, b) for n, a, b in zip(names, *answers, strict=True)})

    def check(self, outputs: Tensors, *, remember: bool = True) -> GateResult:
        """Hold (out,), (out, lse) or (dq, dk, dv) to the oracle's error budget. Copies of what passed before pass at once.

        ``remember=False`` is for outputs that nobody will check again: those that pass stay in memory otherwise.
        """
        names = _OUTPUTS[self.problem.direction][: len(outputs)]
        if any(len(known) == len(outputs) and all(map(torch.equal, outputs, known)) for known in self._passed):
            return self._green(names)
        try:
            for name, x in zip(names, outputs, strict=True):
                if name != "lse" and not bool(torch.isfinite(x).all()):
                    raise AssertionError(f"{name} has values that are not finite, for finite inputs.")
            for name, x in zip(names, outputs, strict=True):
                for actual, expected in self.pairs(name, x):
                    self.hold(name, actual, expected)
        except AssertionError as error:
            return GateResult(False, str(error))
        if remember:
            self._passed.append(tuple(outputs))
        return self._green(names)

    def pairs(self, name: str, output: torch.Tensor) -> list[tuple[torch.Tensor, Expected]]:
        """Each slice of an output, and what it should be."""
        return [
            (self._cut(name, output, *where), expected[name])
            for where, expected in zip(self.slices, self._expected, strict=True)
        ]

    def hold(self, name: str, actual: torch.Tensor, expected: Expected) -> None:
        """AssertionError, in a sentence, when a slice of an output breaks the error budget."""
        dtype = torch.float32 if name == "lse" else self.problem.dtype
        reference.check(actual, expected.oracle, expected.low_precision, f"{name} of {expected.slice}", dtype=dtype)

    def _green(self, names: Sequence[str]) -> GateResult:
        slices = ", ".join(f"batch {b} kv head {h}" for b, h in self.slices)
        return GateResult(True, f"{', '.join(names)} within the error budget at every position of {slices}; finite everywhere")

    def _cut(self, name: str, x: torch.Tensor, batch: int, head: int) -> torch.Tensor:
        """The slice of one tensor that belongs to a batch entry and a kv head."""
        queries = slice(head * self.problem.group, (head + 1) * self.problem.group)
        if name == "lse":
            return x[batch : batch + 1, queries]
        return x[batch : batch + 1, :, slice(head, head + 1) if name in _KV else queries]


def choose_slices(problem: AttentionProblem, seed: int, count: int = SLICES) -> list[tuple[int, int]]:
    """(batch, kv head) pairs: the last one, where index arithmetic breaks first, and others by chance."""
    last = (problem.batch - 1, problem.num_heads_kv - 1)
    others = [(b, h) for b in range(problem.batch) for h in range(problem.num_heads_kv) if (b, h) != last]
    return [last, *random.Random(seed).sample(others, min(count - 1, len(others)))]
