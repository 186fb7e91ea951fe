"""Device: the facts about a GPU that choosing and tuning need, as a value that can be faked.

This is the only module that asks torch.cuda anything.  ``Device.named("h200")`` describes a GPU that is
not in this machine, for compile-only work, static sweeps and tests.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """One device. ``arch`` is 10 x major + minor of the compute capability (90 for Hopper), 0 for a CPU."""

    type: str
    name: str
    arch: int = 0
    num_sms: int = 1
    smem_per_block: int = 0  # bytes, the opt-in limit of one block
    smem_per_sm: int = 0  # bytes
    l2_bytes: int = 0
    peak_tflops: float = 0.0  # dense bf16 / fp16 tensor-core rate of the datasheet
    peak_gbps: float = 0.0  # memory bandwidth of the datasheet

    @property
    def slug(self) -> str:
        """The name as a file name: ``nvidia_h200``."""
        return "_".join("".join(c if c.isalnum() else " " for c in self.name.lower()).split())

    @classmethod
    def of(cls, device: torch.device) -> Device:
        """The facts of a torch device; CUDA devices are asked once per index."""
        if device.type == "cuda":
            return _cuda_device(torch.cuda.current_device() if device.index is None else device.index)
        return CPU

    @classmethod
    def named(cls, name: str) -> Device:
        """A known GPU by short name, one of ``KNOWN``; it need not be in this machine."""
        try:
            return KNOWN[name.lower()]
        except KeyError:
            raise ValueError(f"device {name!r} is unknown; known are {', '.join(KNOWN)}.") from None

    @classmethod
    def for_arch(cls, arch: int) -> Device:
        """The first known GPU of a compute capability, for compile-only work."""
        for device in KNOWN.values():
            if device.arch == arch:
                return device
        raise ValueError(f"arch {arch} is unknown; known are {', '.join(str(d.arch) for d in KNOWN.values())}.")


CPU = Device(type="cpu", name="cpu")

_KB = 1024
_MB = 1024 * 1024

# Shared memory: the table of compute capabilities in NVIDIA's CUDA C++ Programming Guide. SMs, L2, peaks: NVIDIA's
# datasheets and architecture white papers, dense rates with float32 accumulation; the H200's L2 as its driver reports it.
KNOWN: dict[str, Device] = {
    "a100": Device("cuda", "NVIDIA A100-SXM4-80GB", 80, 108, 163 * _KB, 164 * _KB, 40 * _MB, 312, 2039),
    "a10": Device("cuda", "NVIDIA A10", 86, 72, 99 * _KB, 100 * _KB, 6 * _MB, 125, 600),
    "l40s": Device("cuda", "NVIDIA L40S", 89, 142, 99 * _KB, 100 * _KB, 96 * _MB, 362, 864),
    "h200": Device("cuda", "NVIDIA H200", 90, 132, 227 * _KB, 228 * _KB, 60 * _MB, 989, 4800),
    "h100": Device("cuda", "NVIDIA H100 80GB HBM3", 90, 132, 227 * _KB, 228 * _KB, 50 * _MB, 989, 3350),
    "b200": Device("cuda", "NVIDIA B200", 100, 148, 227 * _KB, 228 * _KB, 126 * _MB, 2250, 8000),
    "rtx5090": Device("cuda", "NVIDIA GeForce RTX 5090", 120, 170, 99 * _KB, 100 * _KB, 96 * _MB, 209, 1792),
    "spark": Device("cuda", "NVIDIA GB10", 121, 48, 99 * _KB, 100 * _KB, 24 * _MB, 125, 273),
}


@functools.cache
def _cuda_device(index: int) -> Device:
    props = torch.cuda.get_device_properties(index)
    known = next((d for d in KNOWN.values() if d.name == props.name), None)
    return Device(
        type="cuda",
        name=props.name,
        arch=10 * props.major + props.minor,
        num_sms=props.multi_processor_count,
        smem_per_block=getattr(props, "shared_memory_per_block_optin", props.shared_memory_per_block),
        smem_per_sm=props.shared_memory_per_multiprocessor,
        l2_bytes=props.L2_cache_size,
        peak_tflops=known.peak_tflops if known else 0.0,
        peak_gbps=known.peak_gbps if known else 0.0,
    )
