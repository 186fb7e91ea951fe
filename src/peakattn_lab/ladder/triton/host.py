"""What every Triton rung has on the host: its knobs, what it refuses, and the arguments of its launch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from peakattn.backends.triton import toolchain
from peakattn.backends.triton.tile_ops import check_launch_knobs, padded, power_of_two, precision, unsupported
from peakattn.backends.triton.toolchain import KernelLaunch
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab.ladder import hosting


@dataclass(frozen=True)
class Config:
    """The knobs of the source: a tile, the warps that share it, the tiles in flight."""

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        power_of_two("block_m", self.block_m, 16, 256)
        power_of_two("block_n", self.block_n, 16, 256)
        check_launch_knobs(self.num_warps, self.num_stages, None)


def reject(problem: AttentionProblem, device: Device) -> str | None:
    """A rung shows one idea, not everything that a call may ask for."""
    if problem.direction != "fwd":
        return "rungs compute the forward only"
    if problem.mask_name == "window" or problem.softcap:
        return "rungs compute full and causal attention without a softcap; the library's kernels take the rest"
    if problem.head_dim != problem.head_dim_v or not problem.aligned:
        return "rungs take one head_dim for q, k and v, and aligned tensors; the library's kernels take the rest"
    return unsupported(problem, device)


def small(device: Device, problem: AttentionProblem) -> bool:
    """True where tiles must be small: in the interpreter, and for exact float32 products, which fill registers."""
    return device.type != "cuda" or problem.dtype == torch.float32


def arguments(
    problem: AttentionProblem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    softmax_scale: float,
) -> dict[str, Any]:
    """Run-time arguments by name: the tensors, their strides in elements, and the sizes."""
    strides = {
        f"stride_{name}{axis}": x.stride(i)
        for name, x in (("q", q), ("k", k), ("v", v), ("o", out))
        for i, axis in enumerate("bsh")
    }
    return {
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        "lse": lse,
        "softmax_scale": softmax_scale,
        **strides,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "num_heads_q": problem.num_heads_q,
        "group": problem.group,
        "offset": problem.offset,
    }


def launch_of(
    fn: Any, problem: AttentionProblem, config: Any, args: dict[str, Any], constexprs: dict[str, Any] | None = None
) -> list[KernelLaunch]:
    """One program for each row block of each head; nothing when there is no output."""
    if problem.empty:
        return []
    programs = -(-problem.seqlen_q // config.block_m) * problem.batch * problem.num_heads_q
    constants = {
        "CAUSAL": problem.causal,
        "HEAD_DIM": problem.head_dim,
        "BLOCK_D": padded(problem.head_dim),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "PRECISION": precision(problem),
        **(constexprs or {}),
    }
    return [KernelLaunch(fn, (programs, 1, 1), args, constants, config.num_warps, config.num_stages)]


# launch and prepare of the kernel contract, for a rung that describes its launches.
entry_points = functools.partial(hosting.entry_points, toolchain)
