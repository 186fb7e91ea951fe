"""Forward attention in portable Triton, sm_80 to sm_121.

One program owns ``block_m`` query rows of one head and runs over the key blocks that these rows can see, with an
online softmax in base 2.  The key blocks come in three loops: those the left edge of a window cuts, those every row
sees whole (no mask code in that loop at all), and those the right edge or the end of the keys cuts.

``overlap`` issues the next block's Q K^T before the softmax of this one, so that on Hopper the tensor cores work
under the softmax; it costs the registers of a second score tile.

A masked score is replaced by -inf, so K may hold anything where it is masked.  V may not: its weight there is 0, and
0 * NaN is NaN.  A row block that ends with a NaN is computed again key by key with selected products (``_repair``);
that path is slow, and compiled only for problems with a mask.

K and V come through TMA descriptors on sm_90 and newer when the tensors are aligned and 16-bit, and by pointers with
any strides otherwise.  Limited by Triton's scheduling: a program's softmax and products overlap only as far as
``overlap`` and a second block on the same SM let them.  ``device_fwd.py`` has the device code.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from peakattn.backends.triton import toolchain
from peakattn.backends.triton.device_fwd import attention_fwd_kernel
from peakattn.backends.triton.tile_ops import (
    REGISTERS_FOR_TILES,
    addressable,
    check_launch_knobs,
    descriptor,
    has_tma,
    heads_together,
    mask_arguments,
    padded,
    power_of_two,
    precision,
    smem_bytes,
    strides,
    unsupported,
)
from peakattn.backends.triton.toolchain import KernelLaunch
from peakattn.device import Device
from peakattn.problem import AttentionProblem


@dataclass(frozen=True)
class Config:
    """Knobs. ``tma`` needs sm_90 or newer, and is ignored for tensors that TMA cannot address.

    ``q_registers`` reads Q by a descriptor too, which makes Triton keep it in registers instead of shared memory.
    """

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2
    maxnreg: int | None = None
    tma: bool = False
    q_registers: bool = False
    overlap: bool = False

    def __post_init__(self) -> None:
        power_of_two("block_m", self.block_m, 16, 256)
        power_of_two("block_n", self.block_n, 16, 256)
        check_launch_knobs(self.num_warps, self.num_stages, self.maxnreg)


def reject(problem: AttentionProblem, device: Device) -> str | None:
    return unsupported(problem, device)


def default_config(problem: AttentionProblem, device: Device) -> Config:
    """Reasoned from shared memory, registers and spills of the compiled code; unmeasured on any GPU but sm_90."""
    dim = max(padded(problem.head_dim), padded(problem.head_dim_v))
    tma = has_tma(problem, device)
    if device.type != "cuda":
        return Config(32, 32)
    if problem.dtype == torch.float32:
        # Exact float32 products run on the FMA units, with whole rows of a tile in registers.
        return {64: Config(64, 32, 8, 1), 128: Config(32, 32, 8, 1), 256: Config(16, 32, 8, 1)}[max(dim, 64)]
    if problem.seqlen_q <= 16:
        return Config(16, 64 if dim <= 128 else 32, 4, 2, tma=tma)
    if device.arch == 90 and tma:
        if dim <= 64:
            return Config(128, 128, 8, 2, tma=True, q_registers=True, overlap=True)
        if dim <= 128:
            return Config(128, 64, 8, 3, tma=True, overlap=True)
        return Config(128, 64, 8, 2, tma=True)
    if dim <= 64:
        return Config(128, 64, 8, 2, tma=tma)
    if dim <= 128:
        return Config(64, 64, 4, 2, tma=tma)
    return Config(64, 32, 8, 2, tma=tma)


def search_space(problem: AttentionProblem, device: Device) -> Iterable[Config]:
    tma = has_tma(problem, device)
    for block_m, block_n, num_warps, num_stages, overlap, q_registers in itertools.product(
        (16, 32, 64, 128), (16, 32, 64, 128), (4, 8), (1, 2, 3, 4), (False, True), (False, True)
    ):
        # Of a tile with fewer rows than the query has, or fewer keys, only the smallest that holds them makes sense.
        if block_m > padded(problem.seqlen_q) or block_n > padded(problem.seqlen_k) or (q_registers and not tma):
            continue
        config = Config(block_m, block_n, num_warps, num_stages, None, tma, q_registers, overlap)
        if _fits(problem, config, device):
            yield config


def _fits(problem: AttentionProblem, config: Config, device: Device) -> bool:
    size, threads = problem.dtype.itemsize, 32 * config.num_warps
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    q_tile, k_tile, v_tile = config.block_m * d, config.block_n * d, config.block_n * dv
    scores, acc = config.block_m * config.block_n, config.block_m * dv
    if problem.dtype == torch.float32:
        # Operands of FMA products are whole in registers; beyond these sizes they spill by the hundred.
        registers_fit = acc <= 32 * threads and scores <= 8 * threads and not config.overlap
    else:
        in_registers = q_tile // 2 if config.q_registers or device.arch < 90 else 0
        registers_fit = acc + scores * (1.5 + config.overlap) + in_registers <= REGISTERS_FOR_TILES * threads
    shared = smem_bytes(
        size * q_tile * (not config.q_registers), size * config.num_stages * (k_tile + v_tile), size * k_tile * config.overlap
    )
    return registers_fit and (device.type != "cuda" or shared <= device.smem_per_block)


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
) -> list[KernelLaunch]:
    if problem.empty:
        return []
    num_heads = problem.batch * problem.num_heads_q
    num_m_blocks = -(-problem.seqlen_q // config.block_m)
    use_tma = config.tma and addressable(problem, q, k, v)
    kv_bytes = problem.dtype.itemsize * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    bounds, flags = mask_arguments(problem)
    args: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        "lse": lse,
        "q_tma": descriptor(use_tma and config.q_registers, q, config.block_m),
        "k_tma": descriptor(use_tma, k, config.block_n),
        "v_tma": descriptor(use_tma, v, config.block_n),
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        **strides("q", q),
        **strides("k", k),
        **strides("v", v),
        **strides("o", out),
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "num_heads_q": problem.num_heads_q,
        "num_heads": num_heads,
        "num_m_blocks": num_m_blocks,
        "section": heads_together(problem, kv_bytes // problem.group, num_heads),
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
        **flags,
        "EVEN_N": problem.seqlen_k % config.block_n == 0,
        "SOFTCAP": problem.softcap,
        "PRECISION": precision(problem),
        "OVERLAP": config.overlap,
    }
    grid = (num_m_blocks * num_heads, 1, 1)
    return [
        KernelLaunch(attention_fwd_kernel, grid, args, constexprs, config.num_warps, config.num_stages, config.maxnreg),
    ]


def prepare(
    problem: AttentionProblem,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> Callable[..., None]:
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
