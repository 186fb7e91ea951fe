"""What the hosts of all ladders share: the kernel contract's entry points, made of a description of launches."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from peakattn.problem import AttentionProblem

EntryPoints = tuple[Callable[..., None], Callable[..., Callable[..., None]]]


def entry_points(toolchain: ModuleType, launches: Callable[..., list[Any]]) -> EntryPoints:
    """``launch`` and ``prepare`` of the kernel contract, for launches that ``toolchain`` runs and binds."""

    def launch(problem: AttentionProblem, config: Any, *args: Any) -> None:
        toolchain.run(launches(problem, config, *args))

    def prepare(problem: AttentionProblem, config: Any, *tensors: Any) -> Callable[..., None]:
        bound: Callable[..., None] = toolchain.bind(launches(problem, config, *tensors, 1.0, 0.0), tensors)
        return bound

    return launch, prepare
