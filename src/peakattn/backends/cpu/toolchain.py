"""The CPU backend runs on torch alone: always there, nothing to compile, no machine code to show."""

from __future__ import annotations

from typing import Any

import torch

from peakattn.backends.contract import Artifacts
from peakattn.problem import AttentionProblem


def unavailable() -> str | None:
    """None: torch brings everything this backend needs."""
    return None


def version() -> str:
    """The version of torch."""
    return f"torch {torch.__version__}"


def artifacts(kernel: str, problem: AttentionProblem, config: Any, arch: int) -> list[Artifacts]:
    """Nothing is compiled, so there is nothing to inspect."""
    return []
