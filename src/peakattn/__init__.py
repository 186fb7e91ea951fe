"""Exact attention at peak speed for PyTorch."""

from peakattn.api import attention, explain
from peakattn.autotune import autotune
from peakattn.device import Device
from peakattn.dispatch import NoKernelError
from peakattn.problem import AttentionProblem

__all__ = ["AttentionProblem", "Device", "NoKernelError", "attention", "autotune", "explain"]
__version__ = "0.1.0"
