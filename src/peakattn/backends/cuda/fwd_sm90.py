"""Forward attention for Hopper in CUDA C++: TMA, mbarriers and wgmma as raw PTX, compiled by NVRTC.

A block owns ``block_m`` query rows of one head, 64 for each of its consumer warpgroups.  One producer thread loads Q and
streams K and V through two rings of ``num_stages`` tiles in shared memory; each slot has a barrier for "full" and one for
"empty".  A consumer goes over the key tiles from the last to the first and keeps two products in flight:

    S_next = Q K_next^T      issued                     tensor core
    O += P V                 issued                     tensor core
    wait for S_next
    P = exp2(S_next - shift), sums                      under the second product
    wait for O; P rounded, in registers

Both products are wgmma with float32 accumulation; P is the register operand of the second and never leaves its lane.  The
softmax is exact and online in tiles that an edge cuts (causal, window, end of the keys).  With ``keep_origin`` a row keeps
its shift in all other tiles, where nobody looks for a maximum: the sums tell whether a score outgrew it, and a warp in which
that happened computes its scores again.  Without, each tile has its maximum and O is rescaled each time, as in
FlashAttention-3 (arXiv 2407.08608).

A masked score is replaced, never multiplied, so K may hold anything where it is masked.  The weight is 0 there, and 0 * V is
NaN when V holds NaN or inf: rows whose output has one are computed again from visible keys alone.

``fwd_sm90.cu`` has the device code, from top to bottom, ``attention_ops.cuh`` what it shares with ``fwd_sm80.cu``, and
``hopper_ops.cuh`` the instructions that it is written with.  The scheme is that of ``cute.fwd_sm90``, by hand.

Takes float16 and bfloat16, tensors that TMA can address, head_dim up to 256.  Products pay for head_dim in whole steps of
16, shared memory in whole boxes of 64.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from peakattn.backends import tiles
from peakattn.backends.binding import Bound
from peakattn.backends.cuda import toolchain
from peakattn.backends.cuda.toolchain import CudaLaunch, Int64
from peakattn.backends.driver import Counter, Tma
from peakattn.device import Device
from peakattn.problem import AttentionProblem

_ROWS = 64  # of queries a consumer has: the rows of one wgmma
_BOX = 64  # columns of a TMA box, 128 bytes
_SWIZZLE_128B = 3  # CUtensorMapSwizzle
_REGISTERS = 64 * 1024  # per SM
_PRODUCER_REGISTERS = {1: 24, 2: 24, 3: 32}  # by num_consumers
_OWN_REGISTERS = 28  # addresses and the softmax
_SYSTEM_SHARED = 1024  # bytes of shared memory that each block takes besides its own
_NEXT_TILES = 2  # numbers of tiles on their way to the consumers
_ELEMENTS = {torch.float16: "Half", torch.bfloat16: "BFloat"}
SCHEDULES = ("single", "static", "dynamic")


@dataclass(frozen=True)
class Config:
    """Knobs. ``occupancy`` blocks share an SM, each with its part of the registers.

    ``schedule``: "single" gives each block one tile; "static" and "dynamic" start as many blocks as the GPU holds, and a
    block goes on to a tile that is fixed, or that is next in turn.  ``separate_out``: output has shared memory of its own;
    without, it passes through the ring of V.  ``keep_origin``: no maximum in tiles that no edge cuts.
    """

    block_m: int
    block_n: int
    num_stages: int = 2
    occupancy: int = 1
    schedule: str = "dynamic"
    separate_out: bool = True
    keep_origin: bool = True

    def __post_init__(self) -> None:
        if self.block_m not in (64, 128, 192):
            raise ValueError(f"block_m is {self.block_m}; allowed are 64, 128 and 192: 64 rows for each of 1 to 3 consumers.")
        if self.block_n % 16 or not 16 <= self.block_n <= 256:
            raise ValueError(f"block_n is {self.block_n}; allowed are multiples of 16 from 16 to 256.")
        if not 2 <= self.num_stages <= 8:
            raise ValueError(f"num_stages is {self.num_stages}; allowed are 2 to 8: a tile is awaited while the last is read.")
        if self.occupancy not in (1, 2, 3):
            raise ValueError(f"occupancy is {self.occupancy}; allowed are 1, 2 and 3 blocks on an SM.")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule is {self.schedule!r}; allowed are {', '.join(SCHEDULES)}.")
        if not self.separate_out and self.num_stages * self.block_n < self.block_m:
            raise ValueError(
                f"num_stages x block_n is {self.num_stages} x {self.block_n} and block_m is {self.block_m}; output passes "
                "through the ring of V, which must hold as many rows, or has memory of its own by separate_out=True."
            )

    @property
    def num_consumers(self) -> int:
        """Warpgroups that multiply, each with 64 rows."""
        return self.block_m // _ROWS

    @property
    def num_threads(self) -> int:
        return 128 * (self.num_consumers + 1)


def reject(problem: AttentionProblem, device: Device) -> str | None:
    """Why this kernel does not take the problem, or None."""
    if device.type != "cuda" or device.arch != 90:
        return f"it is written for compute capability 9.0 (Hopper) and the device is {device.name}; cuda.fwd_sm80 runs there"
    if problem.dtype not in _ELEMENTS:
        return f"wgmma multiplies float16 and bfloat16 here and the tensors are {problem.dtype}; triton.fwd takes float32"
    if not problem.aligned:
        return "TMA needs 16-byte aligned addresses and strides, and q, k or v has others; make them contiguous for this kernel"
    if problem.head_dim_v % 8:
        return f"TMA writes out in rows of 16-byte multiples and head_dim_v is {problem.head_dim_v}; pad it to a multiple of 8"
    if problem.seqlen_k == 0:
        return "there are no keys to load; cuda.fwd_sm80 writes the zeros"
    return None


def default_config(problem: AttentionProblem, device: Device) -> Config:
    """In each class the tile with the best geometric mean of the cells measured on an H200 on 2026-11-29; see the notebook.

    head_dim 64 below and from 2,048 keys, 128 and 256 were measured, in bf16; the rest has what ``cute.fwd_sm90`` has.
    """
    dim = max(problem.head_dim, problem.head_dim_v)
    if problem.seqlen_q <= 64:
        # One consumer: a second would have no rows.
        return Config(64, 128 if dim <= 128 else 64)
    if dim <= 64 and problem.seqlen_k < 2048:
        return Config(64, 64, num_stages=3, occupancy=3)
    if dim <= 64:
        return Config(192, 128)
    if dim <= 128:
        return Config(128, 128)
    if dim <= 192:
        return Config(128, 80)
    return Config(128, 64, separate_out=False)


def search_space(problem: AttentionProblem, device: Device) -> Iterable[Config]:
    """Every config of these knobs that fits the shared memory and the registers of an SM."""
    for block_m, block_n, num_stages, occupancy, schedule, separate_out, keep_origin in itertools.product(
        (64, 128, 192), range(64, 208, 16), (2, 3, 4), (1, 2, 3), SCHEDULES, (False, True), (False, True)
    ):
        if separate_out or num_stages * block_n >= block_m:
            config = Config(block_m, block_n, num_stages, occupancy, schedule, separate_out, keep_origin)
            if misfit(problem, config, device) is None:
                yield config


def misfit(problem: AttentionProblem, config: Config, device: Device) -> str | None:
    """Why a config cannot run, or None: shared memory, registers of a consumer thread."""
    shared = shared_bytes(problem, config)
    limit = min(device.smem_per_block, device.smem_per_sm // config.occupancy - _SYSTEM_SHARED)
    if shared > limit:
        return (
            f"{config} needs {shared} bytes of shared memory a block and {limit} are there; take smaller tiles or fewer stages"
        )
    needed, given = registers_needed(problem, config), consumer_registers(config)
    if needed > given:
        return f"{config} needs about {needed} registers in a consumer thread and {given} are there; take smaller tiles"
    return None


def shared_bytes(problem: AttentionProblem, config: Config) -> int:
    """Shared memory of one block: Q, the two rings, the output where it has a place of its own, barriers, tile numbers."""
    row, row_v = (2 * _BOX * -(-d // _BOX) for d in (problem.head_dim, problem.head_dim_v))
    tiles_bytes = config.block_m * (row + row_v * config.separate_out) + config.num_stages * config.block_n * (row + row_v)
    barriers = 2 * config.num_consumers + 4 * config.num_stages + 2 * _NEXT_TILES + 1
    return tiles_bytes + 8 * barriers + 4 * _NEXT_TILES


def registers_needed(problem: AttentionProblem, config: Config) -> int:
    """Registers of a consumer thread at their peak: scores, output, P, and what addresses and the softmax take."""
    columns = -(-problem.head_dim_v // 16) * 16
    return (config.block_n + columns + config.block_n // 2) // 2 + _OWN_REGISTERS


def base_registers(config: Config) -> int:
    """Registers a thread starts with: an even share of the SM, which the warpgroups then trade."""
    return min(_REGISTERS // (config.occupancy * config.num_threads) // 8 * 8, 248)


def consumer_registers(config: Config) -> int:
    """Registers of a consumer thread after the producer's warpgroup gave most of its own away."""
    total = base_registers(config) * (config.num_consumers + 1) - _PRODUCER_REGISTERS[config.num_consumers]
    return min(total // config.num_consumers // 8 * 8, 240)


def launches(
    problem: AttentionProblem,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    softmax_scale: float,
    softcap: float,
) -> list[CudaLaunch]:
    """The one launch of this kernel; nothing when there is no output."""
    if problem.empty:
        return []
    left, right = tiles.edges(problem)
    num_m_blocks = -(-problem.seqlen_q // config.block_m)
    num_heads = problem.batch * problem.num_heads_q
    num_tiles = num_m_blocks * num_heads
    args: dict[str, Any] = {
        "q_map": _tma(q, _ROWS),
        "k_map": _tma(k, config.block_n),
        "v_map": _tma(v, config.block_n),
        "out_map": _tma(out, _ROWS),
        "q": q,
        "k": k,
        "v": v,
        "lse": lse,
        "counter": Counter() if config.schedule == "dynamic" else None,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
    }
    for name, x in (("q", q), ("k", k), ("v", v)):
        args |= {f"stride_{name}{axis}": Int64(stride) for axis, stride in zip("bsh", x.stride()[:3], strict=True)}
    args |= {
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "num_heads_q": problem.num_heads_q,
        "group": problem.group,
        "num_heads": num_heads,
        "num_m_blocks": num_m_blocks,
        "num_tiles": num_tiles,
        "section": tiles.heads_per_section(problem),
        "left": left or 0,
        "right": right or 0,
    }
    constants: dict[str, int | str] = {
        "ELEMENT": _ELEMENTS[problem.dtype],
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_N": config.block_n,
        "NUM_CONSUMERS": config.num_consumers,
        "NUM_STAGES": config.num_stages,
        "OCCUPANCY": config.occupancy,
        "SCHEDULE": config.schedule.upper(),
        "SEPARATE_OUT": int(config.separate_out),
        "KEEP_ORIGIN": int(config.keep_origin),
        "PRODUCER_REGISTERS": _PRODUCER_REGISTERS[config.num_consumers],
        "CONSUMER_REGISTERS": consumer_registers(config),
        "RAGGED": int(problem.seqlen_k % config.block_n != 0),
        "HAS_LEFT": int(left is not None),
        "HAS_RIGHT": int(right is not None),
        "SOFTCAP": int(problem.softcap),
        "STORE_LSE": int(lse is not None),
    }
    resident = config.occupancy * _device(q).num_sms
    return [
        CudaLaunch(
            toolchain.FOLDER / "fwd_sm90.cu",
            "attention_fwd_kernel",
            (num_tiles if config.schedule == "single" else min(num_tiles, resident), 1, 1),
            config.num_threads,
            shared_bytes(problem, config),
            args,
            constants,
        )
    ]


def _tma(tensor: torch.Tensor, rows: int) -> Tma:
    return Tma(tensor, (1, 1, rows, _BOX), _SWIZZLE_128B)


def _device(q: torch.Tensor) -> Device:
    return Device.of(q.device) if q.device.type == "cuda" else Device.for_arch(90)


def prepare(
    problem: AttentionProblem,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> Bound:
    """A function of (q, k, v, out, lse, softmax_scale, softcap) that launches and computes nothing else on the host."""
    return toolchain.bind(launches(problem, config, q, k, v, out, lse, 1.0, 0.0), (q, k, v, out, lse))


def launch(
    problem: AttentionProblem,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    softmax_scale: float,
    softcap: float,
) -> None:
    toolchain.run(launches(problem, config, q, k, v, out, lse, softmax_scale, softcap))
