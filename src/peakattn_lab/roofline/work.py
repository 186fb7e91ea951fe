"""What each part of a device can do in a second, and what a problem asks of it at least: the two sides of every roof."""

from __future__ import annotations

import torch

from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab.records import Record
from peakattn_lab.roofline import ceilings, traffic

# Kernels that multiply float32 without tensor cores, unless torch's own setting allows TF32.
_FMA_KERNELS = frozenset({"triton.fwd", "triton.bwd"})
_WGMMA_ROWS = 64  # of the first operand of one wgmma, by the PTX ISA


def ceiling_names(problem: AttentionProblem) -> dict[str, str]:
    """Which ceiling of ``ceilings.UNITS`` limits which roof of a problem."""
    tensor = "tf32" if problem.dtype == torch.float32 else str(problem.dtype).removeprefix("torch.")
    return {"tensor": tensor, "fma": "float32", "memory": "memory", "l2": "l2", "exp": "exp"}


def limits_of(problem: AttentionProblem, device: Device, mhz: float) -> dict[str, float]:
    """What each part of the device can do, 10^12 a second; ``mhz`` is 0 where no clock was observed."""
    documented = ceilings.documented(device, mhz)
    limits = {roof: documented.get(name, 0.0) for roof, name in ceiling_names(problem).items()}
    facts = ceilings.FACTS.get(device.name)
    mhz = mhz or (facts.max_sm_mhz if facts is not None else 0.0)
    return limits | {"shared": device.num_sms * ceilings.SHARED_BYTES_PER_CLOCK_PER_SM * mhz / 1e6}


def work_of(problem: AttentionProblem, passes: int, device: Device, row: Record | None) -> dict[str, float]:
    """What the problem asks of each part of the device at least, in the units of ``limits_of``; 0 where nothing is known."""
    executed = _executed_flops(problem, passes)
    half = problem.dtype != torch.float32
    by_fma = not half and row is not None and row.kernel in _FMA_KERNELS
    # A rival's way of multiplying float32 is not known, so that only a single product is a roof.
    products = 3 if not half and row is None else 1
    # Input sets that fit into the L2 cache are served from there, faster than from memory.
    from_memory = row is None or row.input_sets * problem.bytes > device.l2_bytes
    return {
        "tensor": 0.0 if by_fma else products * executed,
        "fma": executed if by_fma else 0.0,
        "memory": problem.bytes if from_memory else 0.0,
        "l2": _l2_bytes(problem, row),
        "shared": executed / (2 * _WGMMA_ROWS) * problem.dtype.itemsize if half and device.arch == 90 else 0.0,
        "exp": _pairs(problem) * passes,
    }


def _l2_bytes(problem: AttentionProblem, row: Record | None) -> float:
    """Bytes that the SMs read from the L2 cache, by the tiles in the record; 0 where they are not known."""
    config = row.config if row is not None else None
    if not config:
        return 0.0
    functions = ["attention_fwd_kernel"]
    if problem.direction == "bwd":
        functions = ["dkdv"] * bool(problem.needs_dk or problem.needs_dv) + ["dq"] * problem.needs_dq
    found = [traffic.l2_to_sm(function, problem, config) for function in functions]
    return sum(known[0] for known in found if known is not None) if None not in found else 0.0


def _pairs(problem: AttentionProblem) -> int:
    return problem.batch * problem.num_heads_q * problem.visible_pairs


def _executed_flops(problem: AttentionProblem, passes: int) -> float:
    """Useful FLOPs and those of S, and dP where it is needed, that every pass after the first repeats."""
    again = 2.0 * _pairs(problem) * problem.head_dim
    if problem.needs_dq or problem.needs_dk:
        again += 2.0 * _pairs(problem) * problem.head_dim_v
    return problem.flops + max(passes - 1, 0) * again
