"""Rungs under configs: what is checked, compiled and timed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from peakattn import dispatch
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab.ladder import Rung, experiment, rungs


@dataclass(frozen=True)
class Subject:
    """A rung under a config. ``label`` is its name in tables and records."""

    rung: Rung
    config: Any
    label: str
    config_source: str = "default"
    candidates: int = 1  # how many configs were timed to choose this one
    tuning_seconds: float = 0.0


def refusal(rung: Rung, problem: AttentionProblem, device: Device) -> str | None:
    """Why a rung cannot compute the problem here, or None."""
    reason = dispatch.unavailable(rung.language)
    if reason is not None:
        return reason
    refused: str | None = rung.kernel.reject(problem, device)
    return refused


def by_default(rung: Rung, problem: AttentionProblem, device: Device) -> Subject:
    """The rung under its default config; of the library's kernel, the config that a call gets where nobody tuned."""
    if rung.kernel_id is not None:
        choice = dispatch.choose(problem, device, rung.kernel_id, stored=False)
        return Subject(rung, choice.config, rung.id, choice.config_source)
    return Subject(rung, rung.kernel.default_config(problem, device), rung.id)


def candidates(rung: Rung, problem: AttentionProblem, device: Device) -> list[Subject]:
    """The default, and of a tuned rung every config of its search space."""
    first = by_default(rung, problem, device)
    if not rung.tuned:
        return [first]
    configs = dict.fromkeys([first.config, *rung.kernel.search_space(problem, device)])
    return [dataclasses.replace(first, config=config) for config in configs]


def of_experiment(language: str, name: str) -> list[Subject]:
    """The subjects of a side experiment, labelled by the knobs in which they differ."""
    about = experiment(language, name)
    found = []
    varying = [name for name in about.subjects[0][1] if len({repr(knobs.get(name)) for _, knobs in about.subjects}) > 1]
    for step, knobs in about.subjects:
        (rung,) = rungs(language, [str(step)])
        label = " ".join([rung.id, *(f"{name}={knobs[name]}" for name in varying)])
        found.append(Subject(rung, rung.kernel.Config(**knobs), label, "given"))
    return found
