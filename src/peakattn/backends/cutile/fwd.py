"""Forward attention in cuTile, sm_80 and newer.

One block owns one or more tiles of ``block_m`` query rows of one head and runs over the key blocks that these rows can
see, with an online softmax in base 2 and the scale folded into its one multiply-add.  The key blocks come in three loops:
those the left edge of a window cuts, those every row sees whole (no mask code in that loop at all), and those the right
edge or the end of the keys cuts, where blocks may be narrower.  K is transposed by the order of its load.  What a thread
does, where a tile lies, TMA and the pipeline of loads are the compiler's; ``occupancy``, ``num_ctas`` and the latency
hints are what it can be told.

Two row tiles read K and V once, and share nothing else: on sm_90 the compiler then gives each a warpgroup of its own.
Both would compute their softmax at the same time, so the second one starts its first softmax late (``stagger``).

A masked score is replaced by -inf, so K may hold anything where it is masked.  V may not: its weight there is 0, and
0 * NaN is NaN.  A row tile that ends with a NaN is computed again key by key with selected products (``repair``);
that path is slow, and compiled only for problems with a mask.  ``device_fwd.py`` has the device code.

Takes any strides and head sizes.  Limited by what the compiler overlaps: a second block on the SM (``occupancy``), or the
other warpgroup of the block (``row_tiles``), covers what one warpgroup leaves idle.
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
_SECTION_BYTES = 8 << 20  # of K and V
_OTHER_THREADS, _OTHER_REGISTERS = 128, 32  # those that copy


@dataclass(frozen=True)
class Config:
    """Knobs, all but the tile sizes and ``row_tiles`` hints.

    ``occupancy`` is how many blocks of an SM the compiler makes room for, ``num_ctas`` how many SMs share a tile;
    a latency says how far ahead K and V are worth loading, 0 leaves it to the compiler, and so does 0 for
    ``num_worker_warps``.

    ``block_masked`` is the width of the key blocks that a mask cuts, 0 that of the others.  The sum of a row is kept as
    ``row_sums`` sums until the loops end: 8 and more are added within a thread, and many do not wait for each other.

    A block computes ``row_tiles`` tiles of ``block_m`` rows.  Every second one starts its first softmax later by
    ``stagger`` exponentials that wait for each other, some 30 cycles each; half of a key block's time is best.
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
    row_tiles: int = 1
    stagger: int = 0

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
        between("row_tiles", self.row_tiles, 1, 4, "tiles of a block")
        between("stagger", self.stagger, 0, 256 if self.row_tiles > 1 else 0, "exponentials, and 0 where row_tiles is 1")

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
        return _hopper_config(problem, dim)
    if dim > 128:
        return Config(64, 64) if device.arch in (100, 103) else Config(64, 32, 1)
    if device.arch in (100, 103) and problem.seqlen_q > 2048:
        return Config(128, 128)
    return Config(64, 64)


def _hopper_config(problem: AttentionProblem, dim: int) -> Config:
    masked = problem.mask_name != "full"
    two_tiles = problem.aligned and problem.seqlen_q > 64
    if dim > 128:
        if not two_tiles:
            return Config(64, 64)
        if masked and problem.softcap:
            return Config(128, 128, 1, num_worker_warps=8, row_sums=32)
        return Config(64, 128, 1, block_masked=64, row_sums=16, row_tiles=2, stagger=20 if masked else 0)
    # With one block an SM, what comes before and after the loop is not hidden, and has to be little beside it.
    many_keys = 2048 if dim > 64 and not masked else 4096
    wide = two_tiles and problem.visible_pairs >= many_keys * problem.seqlen_q
    if masked:  # edges of a window, a cap, or bounds of a head size leave too few registers for wide scores
        wide &= problem.window_left is None and not problem.softcap and dim == problem.head_dim == problem.head_dim_v
    if dim > 64:
        if wide:
            return Config(64, 256, 1, block_masked=128, row_sums=1 if masked else 8, row_tiles=2, stagger=65)
        return Config(64, 128, block_masked=64, row_sums=64)
    if wide and not masked:
        return Config(64, 256, 1, block_masked=64, row_sums=64, row_tiles=2, stagger=50)
    return Config(64, 64, 4, row_sums=16)


def search_space(problem: AttentionProblem, device: Device) -> Iterable[Config]:
    """Tiles whose scores and output fit the registers that an occupancy leaves a thread, each with a few hints."""
    dims = padded(problem.head_dim), padded(problem.head_dim_v)
    one_tile = itertools.product(
        (16, 32, 64, 128, 256),
        (16, 32, 64, 128, 256),
        (1, 2, 3, 4),
        (0, 8),
        ((1, 1), (8, 1), (16, 1), (32, 1), (64, 2)),
        (None,),
    )
    two_tiles = itertools.product((64,), (64, 128, 256), (1,), (0,), ((1, 2), (8, 2), (16, 2), (64, 2)), (0, 20, 50, 65, 80))
    for block_m, block_n, occupancy, warps, (row_sums, narrower), stagger in itertools.chain(one_tile, two_tiles):
        row_tiles = 1 if stagger is None else 2
        # Of tiles with more rows than the query has, or more keys, only the smallest that holds them makes sense.
        if block_m * row_tiles > padded(problem.seqlen_q) or block_n > padded(problem.seqlen_k):
            continue
        if device.arch != 90 and (warps or row_tiles > 1):
            continue
        if warps and block_m < 128:
            continue
        shared = problem.dtype.itemsize * (row_tiles * block_m * dims[0] + block_n * sum(dims))
        if device.type == "cuda" and shared * occupancy > device.smem_per_sm:
            continue
        block_masked = 0 if narrower == 1 else block_n // narrower
        if row_sums > (block_masked or block_n):
            continue
        config = Config(
            block_m, block_n, occupancy, num_worker_warps=warps, block_masked=block_masked, row_sums=row_sums,
            row_tiles=row_tiles, stagger=stagger or 0,
        )  # fmt: skip
        granted = (_SM_REGISTERS // occupancy - _OTHER_THREADS * _OTHER_REGISTERS) // (32 * _computing_warps(config))
        if registers_needed(problem, config) <= min(granted, _MOST_REGISTERS):
            yield config


def registers_needed(problem: AttentionProblem, config: Config) -> int:
    """Of a thread that computes: scores, sums and output are in registers at one time, beside some that any config needs."""
    rows = config.row_tiles * config.block_m // config.num_ctas
    numbers = config.block_n + config.row_sums + padded(problem.head_dim_v)
    return rows * numbers // (32 * _computing_warps(config)) + 24


def _computing_warps(config: Config) -> int:
    """Two row tiles have a warpgroup each where the SM has no other block to give the registers to."""
    return config.num_worker_warps or _WARPS * (2 if config.row_tiles > 1 and config.occupancy == 1 else 1)


def _device_code() -> Any:
    from peakattn.backends.cutile.device_fwd import attention_fwd_kernel

    return attention_fwd_kernel


def _heads_per_section(problem: AttentionProblem, config: Config) -> int:
    """As ``tiles.heads_per_section``, but where blocks of several row tiles all take as long, no more than 8 MB of K and V.

    Measured on an H200 on 2026-11-30 with 1, 2, 4 and 16 heads (docs/notebook/cutile.md): a block that waits for a load has
    no other beside it.
    """
    if config.row_tiles == 1 or problem.mask_name != "full":
        return tiles.heads_per_section(problem)
    head_bytes = problem.dtype.itemsize * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    heads_kv = max(1, _SECTION_BYTES // max(head_bytes, 1))
    return min(heads_kv * problem.group, problem.batch * problem.num_heads_q)


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
    num_m_blocks = -(-problem.seqlen_q // (config.row_tiles * config.block_m))
    heads = problem.batch * problem.num_heads_q
    where, block_axis = grid(num_m_blocks, heads, _heads_per_section(problem, config))
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
        "TILES": config.row_tiles,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_MASKED": config.block_masked or config.block_n,
        "ROW_SUMS": min(config.row_sums, config.block_masked or config.block_n),
        "KEEP_ROWS": config.block_n < 256,  # wider scores need the registers
        "STAGGER": config.stagger,
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
