"""What every cuTile rung has on the host: its knobs, what it refuses, and the arguments of its launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from peakattn.backends.cutile import toolchain
from peakattn.backends.cutile.common import between, padded, power_of_two, unsupported, worker_warps
from peakattn.backends.cutile.toolchain import Array, TileLaunch
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab.ladder import hosting

_MOST_BLOCKS = 2**24 - 1


@dataclass(frozen=True)
class Config:
    """A tile, and what the compiler is told: blocks on an SM, blocks that share a tile, warps that compute; 0 is its choice."""

    block_m: int
    block_n: int
    occupancy: int = 0
    num_ctas: int = 1
    num_worker_warps: int = 0

    def __post_init__(self) -> None:
        power_of_two("block_m", self.block_m, 16, 256)
        power_of_two("block_n", self.block_n, 16, 256)
        power_of_two("num_ctas", self.num_ctas, 1, 16)
        between("occupancy", self.occupancy, 0, 32, "where 0 is the compiler's choice")
        worker_warps("num_worker_warps", self.num_worker_warps)


def reject(problem: AttentionProblem, device: Device) -> str | None:
    """A rung shows one idea, not everything that a call may ask for."""
    if problem.direction != "fwd":
        return "rungs compute the forward only"
    if problem.mask_name == "window" or problem.softcap:
        return "rungs compute full and causal attention without a softcap; the library's kernel takes the rest"
    if problem.head_dim != problem.head_dim_v:
        return "rungs take one head_dim for q, k and v; the library's kernel takes the rest"
    if problem.dtype.itemsize != 2:
        return f"rungs take float16 and bfloat16, and the tensors are {problem.dtype}; the library's kernel takes the rest"
    return unsupported(problem, device)


def launch_of(
    device_code: Callable[[], Any],
    problem: AttentionProblem,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    softmax_scale: float,
) -> list[TileLaunch]:
    """One block for each row block of each head; nothing when there is no output."""
    if problem.empty:
        return []
    args: dict[str, Any] = {
        "q": Array(q),
        "k": Array(k),
        "v": Array(v),
        "out": Array(out),
        "lse": None if lse is None else Array(lse, (0, 1, 2), ()),
        "softmax_scale": softmax_scale,
        "offset": problem.offset,
    }
    constexprs = {
        "GROUP": problem.group,
        "BLOCK_D": padded(problem.head_dim),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "CAUSAL": problem.causal,
        "EVEN_N": problem.seqlen_k % config.block_n == 0,
        "STORE_LSE": lse is not None,
    }
    hints = {
        "occupancy": config.occupancy or None,
        "num_ctas": config.num_ctas,
        "num_worker_warps": config.num_worker_warps or None,
    }
    blocks = -(-problem.seqlen_q // config.block_m) * problem.batch * problem.num_heads_q
    if blocks > _MOST_BLOCKS:
        raise ValueError(f"{blocks} blocks are more than a grid's first dimension takes; the library's kernel takes them.")
    return [TileLaunch(device_code, (blocks, 1, 1), args, constexprs, hints)]


# launch and prepare of the kernel contract, for a rung that describes its launches.
entry_points = functools.partial(hosting.entry_points, toolchain)
