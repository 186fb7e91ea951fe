"""Correctness before speed: the very outputs that were timed, against the float64 oracle. No speed is reported on a red gate.

A few slices (one batch entry, one kv head with all query heads that read it) are checked at every position; the rest
of every output must be finite.  The oracle runs on the tensors' own device, in blocks of rows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from peakattn import reference
from peakattn.problem import AttentionProblem
from peakattn_lab import problems

_SLICES = 2
_NAMES = {"fwd": ("out",), "bwd": ("dq", "dk", "dv")}


@dataclass(frozen=True)
class GateResult:
    """``message`` is what was checked, or what is wrong."""

    passed: bool
    message: str


class Gate:
    """The oracle's answers for a few slices of one set of inputs; computed once, for any number of outputs."""

    def __init__(self, problem: AttentionProblem, tensors: Sequence[torch.Tensor], seed: int = 0) -> None:
        self.problem = problem
        self.slices = choose_slices(problem, seed)
        self._passed: list[tuple[torch.Tensor, ...]] = []
        options = problems.options(problem)
        self._expected: list[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = []
        for batch, head in self.slices:
            q, k, v, *dout = self._cut(tensors, batch, head)
            answers: list[tuple[torch.Tensor, ...]] = []
            for dtype in (torch.float64, problem.dtype):
                if problem.direction == "fwd":
                    answers.append(reference.attention(q, k, v, dtype=dtype, **options)[:1])
                else:
                    answers.append(reference.attention_backward(q, k, v, dout[0], dtype=dtype, **options))
            self._expected.append((answers[0], answers[1]))

    def check(self, outputs: Sequence[torch.Tensor]) -> GateResult:
        """Hold (out,) or (dq, dk, dv) to the oracle's error budget. Bitwise copies of what passed before pass at once."""
        if any(all(map(torch.equal, outputs, known)) for known in self._passed):
            return self._green()
        names = _NAMES[self.problem.direction]
        try:
            for name, x in zip(names, outputs, strict=True):
                if not bool(torch.isfinite(x).all()):
                    raise AssertionError(f"{name} has values that are not finite, for finite inputs.")
            for (batch, head), (oracle, low_precision) in zip(self.slices, self._expected, strict=True):
                for name, actual, want, low in zip(names, self._cut(outputs, batch, head), oracle, low_precision, strict=True):
                    reference.check(actual, want, low, f"{name} of batch {batch}, kv head {head}", dtype=self.problem.dtype)
        except AssertionError as error:
            return GateResult(False, str(error))
        self._passed.append(tuple(outputs))
        return self._green()

    def _green(self) -> GateResult:
        names = _NAMES[self.problem.direction]
        slices = ", ".join(f"batch {b} kv head {h}" for b, h in self.slices)
        return GateResult(True, f"{', '.join(names)} within the error budget at every position of {slices}; finite everywhere")

    def _cut(self, tensors: Sequence[torch.Tensor], batch: int, head: int) -> list[torch.Tensor]:
        """The slice of each tensor, in the order q, k, v, dout or out or dq, dk, dv: the second and third have kv heads."""
        group = self.problem.group
        query = (slice(batch, batch + 1), slice(None), slice(head * group, (head + 1) * group))
        kv = (slice(batch, batch + 1), slice(None), slice(head, head + 1))
        return [x[kv] if i in (1, 2) else x[query] for i, x in enumerate(tensors)]


def choose_slices(problem: AttentionProblem, seed: int) -> list[tuple[int, int]]:
    """(batch, kv head) pairs: the last one, where index arithmetic breaks first, and others by chance."""
    last = (problem.batch - 1, problem.num_heads_kv - 1)
    others = [(b, h) for b in range(problem.batch) for h in range(problem.num_heads_kv) if (b, h) != last]
    return [last, *random.Random(seed).sample(others, min(_SLICES - 1, len(others)))]
