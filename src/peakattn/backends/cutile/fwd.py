"""Forward attention in cuTile, sm_80 and newer.

One block owns ``block_m`` query rows of one head and runs over the key blocks that these rows can see, with an online
softmax in base 2 and the scale folded into its one multiply-add.  The key blocks come in three loops: those the left edge
of a window cuts, those every row sees whole (no mask code in that loop at all), and those the right edge or the end of
the keys cuts.  K is transposed by the order of its load.  What a thread does, where a tile lies, TMA and the pipeline of
loads are the compiler's; ``occupancy``, ``num_ctas`` and the latency hints are what it can be told.

A masked score is replaced by -inf, so K may hold anything where it is masked.  V may not: its weight there is 0, and
0 * NaN is NaN.  A row block that ends with a NaN is computed again key by key with selected products (``repair``);
that path is slow, and compiled only for problems with a mask.  ``device_fwd.py`` has the device code.

Takes any strides and head sizes.  Limited by what the compiler overlaps: a second block on the SM (``occupancy``), or with
``num_worker_warps=8`` the other warpgroup of the block, covers what one warpgroup leaves idle.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from peakattn.backends import tiles
from peakattn.backends.binding import Bound
from peakattn.backends.cutile import toolchain
from peakattn.backends.cutile.common import (
    between,
    grid,
    mask_arguments,
    padded,
    power_of_two,
    tf32,
    unsupported,
    worker_warps,
)
from peakattn.backends.cutile.toolchain import Array, TileLaunch
from peakattn.device import Device
from peakattn.problem import AttentionProblem

_WARPS = 4  # that compute, where the compiler chooses
_SM_REGISTERS = 64 * 1024
_MOST_REGISTERS = 255
_OTHER_THREADS, _OTHER_REGISTERS = 128, 32  # those that copy


@dataclass(frozen=True)
class Config:
    """Knobs, all but the tile sizes hints.

    ``occupancy`` is how many blocks of an SM the compiler makes room for, ``num_ctas`` how many SMs share a tile;
    a latency says how far ahead K and V are worth loading, 0 leaves it to the compiler, and so does 0 for
    ``num_worker_warps``.

    ``block_masked`` is the width of the key blocks that a mask cuts, 0 that of the others.  The sum of a row is kept as
    ``row_sums`` sums until the loops end: 8 and more are added within a thread, and many do not wait for each other.
    """

    block_m: int
    block_n: int
    occupancy: int = 2
    num_ctas: int = 1
    k_latency: int = 2
    v_latency: int = 4
    num_worker_warps: int = 0
    opt_level: int = 3
    block_masked: int = 0
    row_sums: int = 1

    def __post_init__(self) -> None:
        power_of_two("block_m", self.block_m, 16, 256)
        power_of_two("block_n", self.block_n, 16, 256)
        power_of_two("num_ctas", self.num_ctas, 1, 16)
        between("occupancy", self.occupancy, 1, 32, "blocks on an SM")
        between("opt_level", self.opt_level, 0, 3, "where 3 is the most")
        for name in ("k_latency", "v_latency"):
            between(name, getattr(self, name), 0, 10, "where 0 is the compiler's own choice")
        worker_warps("num_worker_warps", self.num_worker_warps)
        if self.block_masked:
            power_of_two("block_masked", self.block_masked, 16, self.block_n)
        power_of_two("row_sums", self.row_sums, 1, 64)

    @property
    def hints(self) -> dict[str, Any]:
        return {
            "occupancy": self.occupancy,
            "num_ctas": self.num_ctas,
            "num_worker_warps": self.num_worker_warps or None,
            "opt_level": self.opt_level,
        }


def reject(problem: AttentionProblem, device: Device) -> str | None:
    return unsupported(problem, device)


def default_config(problem: AttentionProblem, device: Device) -> Config:
    """sm_90: the fastest of a grid on an H200, see docs/notebook/cutile.md.

    sm_100 and newer: the tiles that NVIDIA measured as best for such a kernel on B200 and DGX Spark.  The rest is reasoned
    from registers and spills of the compiled code, and unmeasured.
    """
    dim = max(padded(problem.head_dim), padded(problem.head_dim_v))
    if problem.dtype == torch.float32:
        return Config(32, 32, 1) if dim <= 128 else Config(16, 32, 1)
    if problem.seqlen_q <= 16:
        return Config(16, 64 if dim <= 128 else 32)
    if device.arch == 90:
        if dim > 128:
            return Config(128, 128, 1, num_worker_warps=8, row_sums=32) if problem.aligned else Config(64, 64)
        if dim > 64:
            return Config(64, 128, block_masked=64, row_sums=64)
        return Config(64, 64, 4, row_sums=16 if problem.window_right is None else 8)
    if dim > 128:
        return Config(64, 64) if device.arch in (100, 103) else Config(64, 32, 1)
    if device.arch in (100, 103) and problem.seqlen_q > 2048:
        return Config(128, 128)
    return Config(64, 64)


def search_space(problem: AttentionProblem, device: Device) -> Iterable[Config]:
    """Tiles whose scores and output fit the registers that an occupancy leaves a thread, each with a few hints."""
    dims = padded(problem.head_dim), padded(problem.head_dim_v)
    for block_m, block_n, occupancy, warps, (row_sums, narrower) in itertools.product(
        (16, 32, 64, 128, 256), (16, 32, 64, 128, 256), (1, 2, 3, 4), (0, 8), ((1, 1), (8, 1), (16, 1), (32, 1), (64, 2))
    ):
        # Of a tile with fewer rows than the query has, or fewer keys, only the smallest that holds them makes sense.
        if block_m > padded(problem.seqlen_q) or block_n > padded(problem.seqlen_k):
            continue
        if warps and (device.arch != 90 or block_m < 128):
            continue
        shared = problem.dtype.itemsize * (block_m * dims[0] + block_n * sum(dims))
        if device.type == "cuda" and shared * occupancy > device.smem_per_sm:
            continue
        block_masked = 0 if narrower == 1 else block_n // narrower
        if row_sums > (block_masked or block_n):
            continue
        config = Config(block_m, block_n, occupancy, num_worker_warps=warps, block_masked=block_masked, row_sums=row_sums)
        computing = 32 * (warps or _WARPS)
        granted = (_SM_REGISTERS // occupancy - _OTHER_THREADS * _OTHER_REGISTERS) // computing
        if registers_needed(problem, config) <= min(granted, _MOST_REGISTERS):
            yield config


def registers_needed(problem: AttentionProblem, config: Config) -> int:
    """Of a thread that computes: scores, sums and output are in registers at one time, beside some that any config needs."""
    rows = config.block_m // config.num_ctas
    numbers = config.block_n + config.row_sums + padded(problem.head_dim_v)
    return rows * numbers // (32 * (config.num_worker_warps or _WARPS)) + 24


def _device_code() -> Any:
    from peakattn.backends.cutile.device_fwd import attention_fwd_kernel

    return attention_fwd_kernel


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
) -> list[TileLaunch]:
    """The one launch of this kernel; nothing when there is no output."""
    if problem.empty:
        return []
    num_m_blocks = -(-problem.seqlen_q // config.block_m)
    heads = problem.batch * problem.num_heads_q
    where, block_axis = grid(num_m_blocks, heads, tiles.heads_per_section(problem))
    bounds, flags = mask_arguments(problem)
    args: dict[str, Any] = {
        "q": Array(q),
        "k": Array(k),
        "v": Array(v),
        "out": Array(out),
        "lse": None if lse is None else Array(lse, (0, 1, 2), ()),
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        **bounds,
    }
    constexprs = {
        "GROUP": problem.group,
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": padded(problem.head_dim),
        "BLOCK_DV": padded(problem.head_dim_v),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_MASKED": config.block_masked or config.block_n,
        "ROW_SUMS": min(config.row_sums, config.block_masked or config.block_n),
        **flags,
        "EVEN_N": problem.seqlen_k % config.block_n == 0,
        "SOFTCAP": problem.softcap,
        "ACCURATE": problem.dtype == torch.float32,
        "TF32": tf32(problem),
        "STORE_LSE": lse is not None,
        "K_LATENCY": config.k_latency,
        "V_LATENCY": config.v_latency,
        "BLOCK_AXIS": block_axis,
    }
    return [TileLaunch(_device_code, where, args, constexprs, config.hints)]


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
