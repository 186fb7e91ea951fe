"""KERNELS: kernel id -> module, imported on demand. A literal, so that nothing is imported or registered here."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

KERNELS: dict[str, str] = {
    "cpu.fwd": "peakattn.backends.cpu.fwd",
    "cpu.bwd": "peakattn.backends.cpu.bwd",
    "triton.fwd": "peakattn.backends.triton.fwd",
    "triton.fwd_sm90": "peakattn.backends.triton.fwd_sm90",
    "triton.bwd": "peakattn.backends.triton.bwd",
    "cute.fwd_sm80": "peakattn.backends.cute.fwd_sm80",
    "cute.fwd_sm90": "peakattn.backends.cute.fwd_sm90",
    "cutile.fwd": "peakattn.backends.cutile.fwd",
    "cutile.bwd": "peakattn.backends.cutile.bwd",
    "cuda.fwd_sm90": "peakattn.backends.cuda.fwd_sm90",  # first of its backend where it runs
    "cuda.fwd_sm80": "peakattn.backends.cuda.fwd_sm80",
}

# The extra of this package that brings a backend's compiler; torch brings Triton on Linux.
EXTRAS: dict[str, str] = {"cpu": "", "triton": "triton", "cutile": "cutile", "cute": "cute", "cuda": "cuda"}

BACKENDS = tuple(dict.fromkeys(kernel_id.split(".")[0] for kernel_id in KERNELS))


@functools.cache
def load(kernel_id: str) -> ModuleType:
    """The module of a kernel; import errors of a missing optional package pass through."""
    return importlib.import_module(KERNELS[kernel_id])


@functools.cache
def toolchain(backend: str) -> ModuleType:
    """``backends/<backend>/toolchain.py``."""
    return importlib.import_module(f"peakattn.backends.{backend}.toolchain")
