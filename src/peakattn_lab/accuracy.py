"""How far outputs are from float64, beside what torch errs in the same dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from peakattn.problem import AttentionProblem
from peakattn_lab.baselines import Tensors
from peakattn_lab.gate import Expected, Gate


@dataclass(frozen=True)
class Error:
    """Of one output: the largest and the root mean square difference to float64, ours and torch's."""

    name: str
    largest: float
    rms: float
    torch_largest: float
    torch_rms: float
    wrong: str | None  # what breaks the error budget, as a sentence


def errors_of(
    problem: AttentionProblem, inputs: Tensors, outputs: dict[str, torch.Tensor], options: dict[str, Any]
) -> list[Error]:
    """The worst of each output in the slices that the gate looks at. ``options`` are the keywords of the call."""
    gate = Gate(problem, inputs, options=options)
    found = []
    for name, x in outputs.items():
        each = [_error(gate, name, actual, expected) for actual, expected in gate.pairs(name, x)]
        found.append(max(each, key=lambda e: (e.wrong is not None, e.largest)))
    return found


def _error(gate: Gate, name: str, actual: torch.Tensor, expected: Expected) -> Error:
    wrong = None
    try:
        gate.hold(name, actual, expected)
    except AssertionError as error:
        wrong = str(error)
    oracle = expected.oracle
    return Error(name, *_distance(actual, oracle), *_distance(expected.low_precision, oracle), wrong)


def _distance(a: torch.Tensor, oracle: torch.Tensor) -> tuple[float, float]:
    """(largest, root mean square) of the difference where the oracle is finite."""
    difference = (a.double() - oracle)[torch.isfinite(oracle)]
    if not difference.numel():
        return 0.0, 0.0
    return float(difference.abs().max()), float(difference.square().mean().sqrt())
