"""Budget equations: what a config takes of shared memory and registers, before anything is compiled, held to the compiler.

Each kernel has a formula of the shared memory of each of its device functions.  A kernel without one here is asked for
its own ``shared_bytes(problem, config)``.  Where a formula and the compiler differ, the difference is a finding.

The formulas of Triton's kernels say which tiles are held and for how long, ``smem`` what its allocator makes of that.
For 16-bit tensors and two stages or more they are exact to the byte for all but one in two hundred configs that were
tried.  Not in them: tiles that Triton converts through scratch memory in loops of a single stage, and row statistics
that change their layout beside products of float32 (at most 512 bytes).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from peakattn import backends
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab.sweep.smem import Stream, allocate, up

# Accumulators of more float32 registers than this a thread spill by the thousand, and nothing so slow has ever won.
MOST_ACCUMULATORS = 512
_OTHER_REGISTERS = 48  # addresses, row statistics, copies
MOST_REGISTERS = 255

Shared = dict[str, int]  # bytes of each device function


@dataclass(frozen=True)
class Estimate:
    """Bytes of shared memory of the largest device function, accumulators and registers of a thread; None where unknown."""

    shared_bytes: int | None = None
    accumulators: int | None = None
    registers: int | None = None


@dataclass(frozen=True)
class Formula:
    """The equations of one kernel. ``registers`` gives (accumulators, registers) of a thread at their peak."""

    shared: Callable[[AttentionProblem, Any, Device], Shared]
    registers: Callable[[AttentionProblem, Any, Device], tuple[int, int]]


def estimate(kernel_id: str, problem: AttentionProblem, config: Any, device: Device) -> Estimate:
    """What a config takes, by the kernel's formula or by what its module says of itself."""
    if device.type != "cuda":
        return Estimate()
    formula = FORMULAS.get(kernel_id)
    if formula is not None:
        accumulators, registers = formula.registers(problem, config, device)
        return Estimate(max(formula.shared(problem, config, device).values()), accumulators, registers)
    kernel = backends.load(kernel_id)
    shared = kernel.shared_bytes(problem, config) if hasattr(kernel, "shared_bytes") else None
    needed = kernel.registers_needed(problem, config) if hasattr(kernel, "registers_needed") else None
    return Estimate(shared, None, needed)


def misfit(found: Estimate, device: Device) -> str | None:
    """Why a config cannot run or cannot win, as a sentence; None for one that is worth compiling."""
    if found.shared_bytes is not None and found.shared_bytes > device.smem_per_block:
        return f"the budget equation says {found.shared_bytes} bytes of shared memory; a block has {device.smem_per_block}."
    if found.accumulators is not None and found.accumulators > MOST_ACCUMULATORS:
        return (
            f"its accumulators alone need {found.accumulators} registers a thread; more than {MOST_ACCUMULATORS} spill so much "
            "that nothing is gained by compiling them."
        )
    return None


# Formulas.


def _loops(problem: AttentionProblem, even: bool) -> int:
    """Loops over key tiles: one that no edge cuts, and one for each edge that cuts tiles."""
    left, right = problem.window_left is not None, problem.window_right is not None or not even
    return 1 + left + right


def _padded(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


def _has_wgmma(problem: AttentionProblem, rows: int, num_warps: int, device: Device) -> bool:
    return device.arch == 90 and problem.dtype.itemsize == 2 and num_warps % 4 == 0 and rows >= 64


def _uses_tma(problem: AttentionProblem, config: Any, device: Device) -> bool:
    return bool(config.tma and device.arch >= 90 and problem.aligned and problem.dtype.itemsize == 2)


def _scratch(rows: int, columns: int, dim: int, size: int, num_warps: int, wgmma: bool) -> int:
    """Bytes of a tile of scores that passes between warps: they lie along its columns when the product is wider than high."""
    if size == 4:
        # Products of float32 read both operands from shared memory, and row statistics change their layout for the output.
        return size * rows * columns + 4 * rows * (columns != dim)
    if num_warps == 1 or wgmma or rows >= dim:
        return 0
    return max(size * rows * columns, 4 * rows * num_warps)  # row statistics between warps come first, in its place


def _fwd_shared(problem: AttentionProblem, config: Any, device: Device) -> Shared:
    size, d, dv = problem.dtype.itemsize, _padded(problem.head_dim), _padded(problem.head_dim_v)
    wgmma, tma = _has_wgmma(problem, config.block_m, config.num_warps, device), _uses_tma(problem, config, device)
    scratch = _scratch(config.block_m, config.block_n, dv, size, config.num_warps, wgmma)
    if config.overlap and wgmma and 16 * config.num_warps > config.block_m:
        # The product that is issued ahead does not know of the one that takes its P, and spreads warps over the keys.
        scratch = size * config.block_m * config.block_n
    stream = Stream(
        staying=(size * config.block_m * d,),
        passing=((size * config.block_n * d, 0), (size * config.block_n * dv, 0)),
        scratch=scratch,
        loops=_loops(problem, problem.seqlen_k % config.block_n == 0),
        num_stages=config.num_stages,
        wgmma=wgmma,
        tma=tma,
        ahead=config.overlap,
        in_registers=config.q_registers and tma,
    )
    return {"attention_fwd_kernel": allocate(stream.buffers())}


def _fwd_registers(problem: AttentionProblem, config: Any, device: Device) -> tuple[int, int]:
    threads, dv = 32 * config.num_warps, _padded(problem.head_dim_v)
    scores, acc = config.block_m * config.block_n, config.block_m * dv
    # P takes the place of the scores that it was made of; Q, where it stays in registers, has two values in each.
    q = config.block_m * _padded(problem.head_dim) // 2 if config.q_registers and _uses_tma(problem, config, device) else 0
    return -(-(scores + acc) // threads), -(-(scores * (1 + config.overlap) + acc + q) // threads) + _OTHER_REGISTERS


def _bwd_shared(problem: AttentionProblem, config: Any, device: Device) -> Shared:
    size, d, dv = problem.dtype.itemsize, _padded(problem.head_dim), _padded(problem.head_dim_v)
    tma = _uses_tma(problem, config, device)
    m, n, warps = config.dkdv_block_m, config.dkdv_block_n, config.dkdv_num_warps
    wgmma = _has_wgmma(problem, n, warps, device)
    dkdv = Stream(
        staying=(size * n * d, size * n * dv),
        passing=((size * m * d, 4 * m), (size * m * dv, 4 * m)),
        scratch=_scratch(n, m, min(d, dv), size, warps, wgmma),
        loops=_loops(problem, True),
        num_stages=config.dkdv_num_stages,
        wgmma=wgmma,
        tma=tma,
        again=True,
    )
    m, n, warps = config.dq_block_m, config.dq_block_n, config.dq_num_warps
    wgmma = _has_wgmma(problem, m, warps, device)
    dq = Stream(
        staying=(size * m * d, size * m * dv),
        passing=((size * n * d, 0), (size * n * dv, 0)),
        scratch=_scratch(m, n, d, size, warps, wgmma),
        loops=_loops(problem, problem.seqlen_k % n == 0),
        num_stages=config.dq_num_stages,
        wgmma=wgmma,
        tma=tma,
        again=True,
    )
    found = {"attention_bwd_dq_kernel": allocate(dq.buffers())} if problem.needs_dq else {}
    if problem.needs_dk or problem.needs_dv:
        found["attention_bwd_dkdv_kernel"] = allocate(dkdv.buffers())
    return found


def _bwd_registers(problem: AttentionProblem, config: Any, device: Device) -> tuple[int, int]:
    d, dv = _padded(problem.head_dim), _padded(problem.head_dim_v)
    found = []
    for rows, columns, dims, num_warps in (
        (config.dkdv_block_n, config.dkdv_block_m, d + dv, config.dkdv_num_warps),
        (config.dq_block_m, config.dq_block_n, d, config.dq_num_warps),
    ):
        threads, scores, acc = 32 * num_warps, rows * columns, rows * dims
        found.append((-(-(2 * scores + acc) // threads), -(-(5 * scores // 2 + acc) // threads) + _OTHER_REGISTERS))
    return max(found)


# What a partition of fwd_sm90 is told passes through shared memory, and row sums between its warps: bytes by the number of
# consumers, read from Triton 3.6.
_TOLD = {1: 236, 2: 360, 3: 364}


def _fwd_sm90_shared(problem: AttentionProblem, config: Any, device: Device) -> Shared:
    size, consumers = problem.dtype.itemsize, config.num_consumers
    d, dv = (max(64, _padded(dim)) for dim in (problem.head_dim, problem.head_dim_v))
    tiles = config.block_m * max(d, dv) + config.num_stages * config.block_n * (max(d, dv) + dv)
    # Q of each consumer, K and V of each stage: a barrier for full and one for empty.
    barriers = 2 * up(8 * consumers, 16) + 4 * up(8 * config.num_stages, 16)
    turns = 8 * (consumers + 2) * config.pingpong
    return {"attention_fwd_kernel": size * tiles + barriers + turns + _TOLD[consumers]}


def _fwd_sm90_registers(problem: AttentionProblem, config: Any, device: Device) -> tuple[int, int]:
    rows, dv = config.block_m // config.num_consumers, max(64, _padded(problem.head_dim_v))
    accumulators = rows * (config.block_n + dv) // 128
    return accumulators, accumulators + _OTHER_REGISTERS


FORMULAS: dict[str, Formula] = {
    "triton.fwd": Formula(_fwd_shared, _fwd_registers),
    "triton.fwd_sm90": Formula(_fwd_sm90_shared, _fwd_sm90_registers),
    "triton.bwd": Formula(_bwd_shared, _bwd_registers),
}
