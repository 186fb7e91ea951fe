"""Rungs held to the oracle, on small problems with an edge each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch

from peakattn import plan
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab import problems
from peakattn_lab.gate import Gate, GateResult
from peakattn_lab.ladder import Rung
from peakattn_lab.ladder.subjects import Subject, by_default, refusal
from peakattn_lab.wording import failure


def check_problems(dtype: torch.dtype, device: Device, head_dims: Sequence[int]) -> list[AttentionProblem]:
    """Lengths that no tile divides, more queries than keys and fewer, grouped heads; tiny in an interpreter."""
    few, many = (300, 421) if device.type == "cuda" else (37, 70)
    shapes = (
        ((many, many), (2, 2), False),
        ((few, many), (4, 2), True),  # keys before the first query
        ((many, few), (2, 1), True),  # rows that see no key
        ((1, few), (2, 2), True),
    )
    made = [
        problems.make(lengths, head_dim, batch=2, heads=heads, causal=causal, dtype=dtype)
        for head_dim in head_dims
        for lengths, heads, causal in shapes
    ]
    return [dataclasses.replace(problem, device_type=device.type, return_lse=True) for problem in made]


def check(subject: Subject, problem: AttentionProblem, tensors: Sequence[torch.Tensor]) -> GateResult:
    """One call into outputs that were filled with NaN, out and lse held to the oracle."""
    q, k, v = tensors
    out, lse = plan.new_out(q, problem.head_dim_v).fill_(math.nan), plan.new_lse(q).fill_(math.nan)
    subject.rung.kernel.launch(problem, subject.config, q, k, v, out, lse, 1.0 / math.sqrt(problem.head_dim), 0.0)
    every = problem.batch * problem.num_heads_kv
    return Gate(problem, tensors, slices=every).check((out, lse))


def check_all(
    rungs: Sequence[Rung], found: Sequence[AttentionProblem], where: torch.device
) -> Iterator[tuple[Rung, AttentionProblem, GateResult | str]]:
    """Each rung on each problem: the gate's result, or why the rung does not take it."""
    device = Device.of(where)
    for problem in found:
        tensors = problems.inputs(problem, where, seed=0)
        for rung in rungs:
            reason = refusal(rung, problem, device)
            if reason is not None:
                yield rung, problem, reason
                continue
            try:
                yield rung, problem, check(by_default(rung, problem, device), problem, tensors)
            except Exception as error:  # a compiler or a driver fails in its own ways
                yield rung, problem, GateResult(False, failure(error))
