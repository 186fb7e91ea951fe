"""Forward attention in CUDA C++: FlashAttention-2 with tensor cores by hand, for sm_80 and newer.

A block owns ``block_m`` query rows of one head and goes over the key tiles that these rows can see, with an online softmax
in base 2 and the scale folded into its one multiply-add.  mma.sync m16n8k16 multiplies with float32 accumulation; Q stays
in registers where ``q_in_registers`` says so, and is else read again for each tile.  K and V lie in rings of
``num_stages`` tiles, filled by cp.async and read by ldmatrix, with rows swizzled or padded so that no bank is met twice.
P goes from the first product into the second without leaving its registers.  The key tiles come in three loops: those the
left edge of a window cuts, those every row sees whole, with no mask code, and those the right edge or the end of the keys
cuts.  ``fwd_sm80.cu`` has the device code, ``attention_ops.cuh`` what it shares with ``fwd_sm90.cu``, and ``tile_ops.cuh`` the
instructions that it is written with.

``stale_origin`` leaves the maximum out of the tiles that no edge cuts.  Softmax does not depend on what is subtracted, as
long as nothing overflows: a row takes its origin from its first whole tile and keeps it, so that later tiles have no
comparison, no shuffle and no rescaling.  Weights and sums have the exponents of float32.  A block whose sums or outputs
outgrew that in the end, which takes scores 44 (float16: 10) above the first tile's in natural logarithms, or infinities,
goes over its tiles again with the exact softmax.

A masked score is replaced by -inf, and rows and columns past the tensors are read as zeros.  V may still hold NaN where it
is masked; its weight there is 0, and 0 * NaN is NaN: a row that ends with a NaN is computed again from its visible keys
alone, which is compiled only for problems with a mask.

Takes float16 and bfloat16 with 16-byte aligned rows, and head sizes that are multiples of 8.  Limited by mma.sync, which
reaches about 60 % of Hopper's tensor cores, and below that by shared memory: each warp reads all of K and V.
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
from peakattn.device import Device
from peakattn.problem import AttentionProblem

_VECTOR = 8  # elements of one 16-byte copy
_TILE = 16  # rows and k-steps of one product
_REGISTERS = 255  # the most of a thread
# Addresses, row statistics and operands on their way: what the compiler takes for them, and the least it can do with.
_OWN_REGISTERS, _LEAST_OWN_REGISTERS = 90, 45
_SYSTEM_SHARED = 1024  # bytes of shared memory that each block takes besides its own
_ELEMENTS = {torch.float16: "Half", torch.bfloat16: "BFloat"}


@dataclass(frozen=True)
class Config:
    """Knobs. Each warp owns ``block_m / num_warps`` rows, 16 or more."""

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 1
    q_in_registers: bool = False
    swizzle: bool = True  # else rows in shared memory are padded
    occupancy: int = 1  # blocks on an SM for which the compiler must leave registers
    stale_origin: bool = False  # no maximum in tiles that no edge cuts

    def __post_init__(self) -> None:
        if self.num_warps not in (1, 2, 4, 8):
            raise ValueError(f"num_warps is {self.num_warps}; allowed are 1, 2, 4 and 8.")
        rows = _TILE * self.num_warps
        if self.block_m % rows or not rows <= self.block_m <= 256:
            raise ValueError(
                f"block_m is {self.block_m}; allowed are multiples of {rows} up to 256, since each of the "
                f"{self.num_warps} warps takes {_TILE} rows at a time."
            )
        if self.block_n % _TILE or not _TILE <= self.block_n <= 256:
            raise ValueError(f"block_n is {self.block_n}; allowed are multiples of {_TILE} from {_TILE} to 256.")
        if not 1 <= self.num_stages <= 4:
            raise ValueError(f"num_stages is {self.num_stages}; allowed are 1 to 4 tiles of K and of V in shared memory.")
        if not 1 <= self.occupancy <= 8:
            raise ValueError(f"occupancy is {self.occupancy}; allowed are 1 to 8 blocks on an SM.")

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps


def reject(problem: AttentionProblem, device: Device) -> str | None:
    """Why this kernel does not take the problem, or None."""
    if device.type != "cuda":
        return f"it needs a CUDA device and the tensors are on {device.name}"
    if device.arch < 80:
        return f"it needs compute capability 8.0 or newer and {device.name} has {device.arch / 10}"
    if problem.dtype not in _ELEMENTS:
        return f"it multiplies float16 and bfloat16 and the tensors are {problem.dtype}; triton.fwd takes float32"
    for name, dim in (("head_dim of q and k", problem.head_dim), ("head_dim of v", problem.head_dim_v)):
        if dim % _VECTOR:
            return f"it copies rows in vectors of 8 elements and the {name} is {dim}; pad it to a multiple of 8"
    if not problem.aligned:
        return "it copies 16 bytes at a time, and q, k or v has rows that do not start at such addresses; make them contiguous"
    return None


def default_config(problem: AttentionProblem, device: Device) -> Config:
    """The candidate that ``predicted_cycles`` finds fastest; unmeasured."""
    fitting = [c for c in _candidates(problem, device) if misfit(problem, c, device) is None]
    return min(fitting, key=lambda config: predicted_cycles(problem, config, device))


# The fastest tiles on an H200 in bf16 by head size up to, and whether an edge cuts rows (docs/notebook/cuda_fwd_sm80.md).
_HOPPER = {
    (64, False): (128, 64, 4, 3, True),
    (64, True): (128, 32, 4, 3, True),
    (128, False): (128, 64, 4, 1, False),
    (128, True): (128, 32, 4, 3, False),
    (256, False): (128, 16, 8, 3, True),
    (256, True): (64, 64, 4, 1, False),
}


def _candidates(problem: AttentionProblem, device: Device) -> list[Config]:
    """Warps of 32 rows, which read K and V half as often, where they fit into registers, and blocks of 8 to 1 warps of 16."""
    # Ten in natural logarithms is no rare growth, so float16 keeps the exact softmax.
    stale = problem.dtype == torch.bfloat16
    dim = max(_padded(problem.head_dim), _padded(problem.head_dim_v))
    wide: list[tuple[int, int, int, int, bool]] = []
    if 90 <= device.arch < 100:
        cut = problem.window_left is not None or problem.window_right is not None
        wide = [_HOPPER[next(limit for limit in (64, 128, 256) if dim <= limit), cut]]
    elif dim <= 64:
        wide = [(128, 64, 4, stages, True) for stages in (2, 1)]
    elif dim <= 128 and device.arch < 90:  # from sm_100 on it spills a lot
        wide = [(128, 32, 4, stages, False) for stages in (2, 1)]
    block_n, in_registers = (64, True) if dim <= 128 else (32, False)
    narrow = [(16 * warps, block_n, warps, stages, in_registers) for warps in (8, 4, 2, 1) for stages in (2, 1)]
    return [Config(*tile, stale_origin=stale) for tile in (*wide, *narrow)]


def search_space(problem: AttentionProblem, device: Device) -> Iterable[Config]:
    """Warps of 16 and 32 rows, with all other knobs, where the tiles fit the shared memory and registers of an SM."""
    for num_warps, rows, block_n in itertools.product((1, 2, 4, 8), (16, 32), (16, 32, 48, 64, 96, 128)):
        # An occupancy below these leaves every thread all registers that it can have.
        occupancies = {4: (1, 3, 4), 8: (1, 2)}.get(num_warps, (1,))
        for stages, in_registers, occupancy, (swizzle, stale) in itertools.product(
            (1, 2, 3), (False, True), occupancies, ((True, True), (True, False), (False, False))
        ):
            config = Config(rows * num_warps, block_n, num_warps, stages, in_registers, swizzle, occupancy, stale)
            if misfit(problem, config, device) is None:
                yield config


# A model of blocks against SMs.  An SM has 4 tensor cores, each fed by its own warps, and a block goes through a key tile
# in phases that wait for each other: copies and barriers, products, exponentials.  Other blocks on the same SM fill the
# gaps.  So a block alone takes the sum of its phases, many take what their busiest unit takes, and a launch takes what
# the SM with the most tiles takes.  Rates are those of sm_80, per SM and cycle; only ratios matter here.
_PRODUCT_FLOPS = 2048.0
_EXPONENTIALS = 16.0
_SHARED_BYTES = 128.0
_ISSUES = 128.0  # lanes
_SOFTMAX_ISSUES = 5.0  # instructions for a score, besides its exponential
_WAIT = 600.0  # two barriers, and the part of a copy from L2 that nothing of its own block covers
_PARTITIONS = 4


def predicted_cycles(problem: AttentionProblem, config: Config, device: Device) -> float:
    """Cycles of a launch by the model above; good for ranking tile shapes, not for predicting times."""
    m, n = config.block_m, config.block_n
    dim, dim_v = _padded(problem.head_dim), _padded(problem.head_dim_v)
    products = 2.0 * m * n * (dim + dim_v) / _PRODUCT_FLOPS
    softmax = m * n * max(1 / _EXPONENTIALS, _SOFTMAX_ISSUES / _ISSUES)
    kv_bytes = problem.dtype.itemsize * n * (dim + dim_v)
    q_bytes = 0 if config.q_in_registers else problem.dtype.itemsize * m * dim
    shared = (kv_bytes * (config.num_warps + 1) + q_bytes) / _SHARED_BYTES
    busy = max(products, softmax, shared)
    idle = _PARTITIONS / min(config.num_warps, _PARTITIONS)  # tensor cores and schedulers without a warp of this block
    alone = max(products * idle, shared) + softmax * idle + _WAIT / config.num_stages

    num_m_blocks = -(-problem.seqlen_q // m)
    num_blocks = max(num_m_blocks * problem.batch * problem.num_heads_q, 1)
    counts = [_key_tiles(problem, config, max(num_m_blocks - 1, 0) * i // 3) for i in range(4)]
    mean, longest = sum(counts) / len(counts), max(counts)
    most_blocks = -(-num_blocks // device.num_sms)
    together = min(most_blocks, resident_blocks(problem, config, device))
    return max(longest * alone, most_blocks * mean * max(busy, alone / together))


def _key_tiles(problem: AttentionProblem, config: Config, m_block: int) -> int:
    """Key tiles that a row block goes over, and one for its beginning and end."""
    first_row = m_block * config.block_m
    last_row = min(first_row + config.block_m, problem.seqlen_q) - 1
    begin, end = problem.key_range(first_row)[0], problem.key_range(last_row)[1]
    return max(-(-end // config.block_n) - begin // config.block_n, 0) + 1


def resident_blocks(problem: AttentionProblem, config: Config, device: Device) -> int:
    """Blocks that an SM holds at a time, by shared memory and registers."""
    of_shared = device.smem_per_sm // (shared_bytes(problem, config) + _SYSTEM_SHARED)
    registers = min(_tile_registers(problem, config) + _OWN_REGISTERS, _REGISTERS)
    of_registers = 65536 // (registers * config.num_threads)
    return max(min(of_shared, of_registers), 1)


def misfit(problem: AttentionProblem, config: Config, device: Device) -> str | None:
    """Why a config cannot run, or None."""
    shared = shared_bytes(problem, config)
    if shared > device.smem_per_block or config.occupancy * (shared + _SYSTEM_SHARED) > device.smem_per_sm:
        return (
            f"{config} needs {shared} bytes of shared memory, (block_m + 2 num_stages block_n) rows, and {device.name} has "
            f"{device.smem_per_block} for a block and {device.smem_per_sm} for an SM; take smaller tiles or fewer stages"
        )
    registers = _tile_registers(problem, config)
    limit = min(_REGISTERS, 65536 // (config.num_threads * config.occupancy)) - _LEAST_OWN_REGISTERS
    if registers > limit:
        return f"{config} needs {registers} registers a thread for its tiles and {limit} are there for them"
    return None


def _tile_registers(problem: AttentionProblem, config: Config) -> int:
    """Registers of a thread for the accumulator, the scores, and Q where it stays there."""
    rows = config.block_m / config.num_threads
    q = _padded(problem.head_dim) / 2 if config.q_in_registers else 0
    return int(rows * (_padded(problem.head_dim_v) + config.block_n + q))


def shared_bytes(problem: AttentionProblem, config: Config) -> int:
    """Shared memory of one block: a tile of Q, rings of K and V; the output takes their place."""

    def pitch(dim: int) -> int:
        chunks = _padded(dim) // _VECTOR
        return 16 * (chunks if config.swizzle else chunks + 1)  # an even number of chunks, padded to an odd one

    loads = config.block_m * pitch(problem.head_dim)
    loads += config.num_stages * config.block_n * (pitch(problem.head_dim) + pitch(problem.head_dim_v))
    return max(loads, config.block_m * pitch(problem.head_dim_v))


def _padded(dim: int) -> int:
    """Columns of a tile: whole steps of the products."""
    return -(-dim // _TILE) * _TILE


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
    num_heads = problem.batch * problem.num_heads_q
    num_m_blocks = -(-problem.seqlen_q // config.block_m)
    left, right = tiles.edges(problem)
    args: dict[str, Any] = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "softmax_scale": softmax_scale, "softcap": softcap}
    for name, x in (("q", q), ("k", k), ("v", v), ("o", out)):
        args |= {f"stride_{name}{axis}": Int64(stride) for axis, stride in zip("bsh", x.stride()[:3], strict=True)}
    args |= {
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "num_heads_q": problem.num_heads_q,
        "group": problem.group,
        "num_heads": num_heads,
        "num_m_blocks": num_m_blocks,
        "section": tiles.heads_per_section(problem) if problem.seqlen_k else 1,
        "left": left or 0,
        "right": right or 0,
    }
    constants: dict[str, int | str] = {
        "ELEMENT": _ELEMENTS[problem.dtype],
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "NUM_WARPS": config.num_warps,
        "NUM_STAGES": config.num_stages,
        "OCCUPANCY": config.occupancy,
        "Q_IN_REGISTERS": int(config.q_in_registers),
        "STALE_ORIGIN": int(config.stale_origin),
        "SWIZZLE": int(config.swizzle),
        "HAS_LEFT": int(left is not None),
        "HAS_RIGHT": int(right is not None),
        "SOFTCAP": int(problem.softcap),
        "STORE_LSE": int(lse is not None),
    }
    return [
        CudaLaunch(
            toolchain.FOLDER / "fwd_sm80.cu",
            "attention_fwd_kernel",
            (num_m_blocks * num_heads, 1, 1),
            config.num_threads,
            shared_bytes(problem, config),
            args,
            constants,
        )
    ]


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
