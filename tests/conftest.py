"""Fixtures for every test: NaN-poisoned allocations, the ``gpu`` marker, and the targets that semantics are tested on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import peakattn
from peakattn.backends import BACKENDS, KERNELS

os.environ["PEAKATTN_STORE"] = "off"  # what was tuned on this machine decides nothing in a test that does not ask for it


@dataclass(frozen=True)
class Target:
    """Where a semantic test runs: tensors on ``device``, computed by kernel ``backend``."""

    device: str
    backend: str

    @property
    def dtype(self) -> torch.dtype:
        """What a test computes in when any dtype will do: float32, where the kernel takes it."""
        return torch.float16 if "_sm" in self.backend else torch.float32

    @property
    def rounding(self) -> dict[str, Any]:
        """Tolerances for two ways to one result in that dtype; torch's own for float32."""
        return {"rtol": 2e-3, "atol": 2e-3} if self.dtype == torch.float16 else {}

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        """``peakattn.attention`` on this target; a kernel that refuses the problem skips the test, with its sentence."""
        try:
            return peakattn.attention(q, k, v, backend=self.backend, **options)
        except peakattn.NoKernelError as refusal:
            pytest.skip(str(refusal))

    def __str__(self) -> str:
        return self.backend


# Each forward kernel by its id.
TARGETS = [
    Target("cpu", "cpu.fwd"),
    *(Target("cuda", kernel_id) for kernel_id in KERNELS if ".fwd" in kernel_id and not kernel_id.startswith("cpu.")),
]
# Each backend with a backward, under the forward that it prefers.
TRAINERS = [Target("cpu" if name == "cpu" else "cuda", name) for name in BACKENDS if f"{name}.bwd" in KERNELS]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture, targets in (("target", TARGETS), ("trainer", TRAINERS)):
        if fixture in metafunc.fixturenames:
            params = [pytest.param(t, marks=(pytest.mark.gpu,) if t.device == "cuda" else (), id=str(t)) for t in targets]
            metafunc.parametrize(fixture, params)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; `make gpu-test` runs it on one")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def nan_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that peakattn allocates without clearing holds NaN, so that an element nobody wrote is seen.

    FlashAttention's varlen preprocess bug passed alone and failed after other tests; it would have failed at once here.
    """
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = allocate(*args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__", "").startswith("peakattn.") and x.is_floating_point():
            x.fill_(float("nan"))
        return x

    return wrapper
