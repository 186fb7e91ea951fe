"""What the cute rungs for Hopper have on the host: their knobs, what they refuse, and the arguments of their launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from peakattn.backends.cute import fwd_sm90, toolchain
from peakattn.backends.cute.toolchain import CuteLaunch, Tma
from peakattn.backends.tiles import heads_per_section
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab.ladder import hosting

ROWS = 64  # query rows of a consumer: those of one wgmma
_WARPGROUP = 128
_REGISTERS = 64 * 1024  # per SM

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"]  # q, k, v, out, lse


@dataclass(frozen=True)
class Config:
    """A tile, the warpgroups that share its rows, the tiles of K and of V in flight, the blocks that share an SM."""

    block_m: int
    block_n: int
    num_consumers: int = 1
    num_stages: int = 1
    occupancy: int = 1

    def __post_init__(self) -> None:
        if self.num_consumers not in (1, 2, 3) or self.block_m != ROWS * self.num_consumers:
            raise ValueError(
                f"block_m is {self.block_m} and num_consumers {self.num_consumers}; 1 to 3 consumers take 64 rows each."
            )
        if self.block_n % 16 or not 16 <= self.block_n <= 256:
            raise ValueError(f"block_n is {self.block_n}; allowed are multiples of 16 from 16 to 256.")
        if not 1 <= self.num_stages <= 8 or not 1 <= self.occupancy <= 4:
            raise ValueError(
                f"num_stages is {self.num_stages} and occupancy {self.occupancy}; allowed are 1 to 8 stages and 1 to 4 blocks."
            )


def beyond_a_rung(problem: AttentionProblem) -> str | None:
    """A rung shows one idea, not everything that a call may ask for: what no rung takes, or None."""
    if problem.direction != "fwd":
        return "rungs compute the forward only"
    if problem.mask_name == "window" or problem.softcap:
        return "rungs compute full and causal attention without a softcap; the library's kernels take the rest"
    if problem.head_dim != problem.head_dim_v or problem.head_dim > 128:
        return "rungs take one head_dim up to 128 for q, k and v; the library's kernels take the rest"
    return None


def reject(problem: AttentionProblem, device: Device) -> str | None:
    """Why a rung for Hopper does not take the problem, or None."""
    return beyond_a_rung(problem) or fwd_sm90.reject(problem, device)


def width(problem: AttentionProblem) -> int:
    """Columns of a tile; TMA fills those past head_dim with zeros, and writes none of them."""
    return 64 if problem.head_dim <= 64 else 128


def one_warpgroup(problem: AttentionProblem, device: Device) -> Config:
    """As many blocks on an SM as registers and shared memory let in."""
    return Config(ROWS, 128, occupancy=3 if width(problem) == 64 else 2)


def several_warpgroups(problem: AttentionProblem, device: Device) -> Config:
    """The tile of the library's kernel."""
    consumers = 3 if width(problem) == 64 else 2
    return Config(ROWS * consumers, 128, num_consumers=consumers, num_stages=2)


def only(default: Callable[[AttentionProblem, Device], Any]) -> Callable[[AttentionProblem, Device], Iterable[Any]]:
    """The search space of a rung whose config is part of its idea."""

    def search_space(problem: AttentionProblem, device: Device) -> Iterable[Any]:
        yield default(problem, device)

    return search_space


def registers(config: Config) -> tuple[int, int]:
    """Of a producer thread and of a consumer thread: the block's even share, traded among its warpgroups."""
    share = _REGISTERS // (_WARPGROUP * (config.num_consumers + 1)) // 8 * 8
    producer = 32 if config.num_consumers == 3 else 24
    consumer = (share * (config.num_consumers + 1) - producer) // config.num_consumers // 8 * 8
    return producer, min(consumer, 240)


def launch_of(
    device_code: Callable[[], Any],
    problem: AttentionProblem,
    config: Config,
    tensors: Tensors,
    softmax_scale: float,
    *,
    num_threads: int,
    barriers: int,
    extra_bytes: int = 0,
    constexprs: dict[str, Any] | None = None,
) -> list[CuteLaunch]:
    """One block for each row block of each head, longest first; nothing when there is no output.

    Shared memory holds Q, the tiles of K and V, ``extra_bytes`` and ``barriers`` mbarriers.
    """
    if problem.empty:
        return []
    q, k, v, out, lse = tensors
    dim, size = width(problem), problem.dtype.itemsize
    total_heads = problem.batch * problem.num_heads_q
    num_m_blocks = -(-problem.seqlen_q // config.block_m)
    args: dict[str, Any] = {
        "q_map": _tma(q, ROWS),
        "k_map": _tma(k, config.block_n),
        "v_map": _tma(v, config.block_n),
        "out_map": _tma(out, ROWS),
        "lse": lse,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "num_heads_q": problem.num_heads_q,
        "group": problem.group,
        "num_m_blocks": num_m_blocks,
        "total_heads": total_heads,
        "heads_per_section": heads_per_section(problem),
        "offset": problem.offset,
        "softmax_scale": softmax_scale,
        "softcap": 0.0,
    }
    constants = {
        "dtype": problem.dtype,
        "dim": dim,
        "block_n": config.block_n,
        "causal": problem.causal,
        "occupancy": config.occupancy,
        **(constexprs or {}),
    }
    tiles = size * dim * (config.block_m + 2 * config.num_stages * config.block_n)
    shared = tiles + extra_bytes + 8 * barriers
    return [CuteLaunch(device_code, (num_m_blocks * total_heads, 1, 1), num_threads, shared, args, constants)]


def one_warpgroup_launch(
    device_code: Callable[[], Any],
    problem: AttentionProblem,
    config: Config,
    tensors: Tensors,
    softmax_scale: float,
    *,
    extra_bytes: int = 0,
) -> list[CuteLaunch]:
    """``launch_of`` blocks that copy and compute by themselves: a barrier for Q, one for K, one for V."""
    if config.num_consumers != 1 or config.num_stages != 1:
        raise ValueError(
            f"num_consumers is {config.num_consumers} and num_stages {config.num_stages}; this rung has one warpgroup and one "
            "tile of K and of V, so give it 1 and 1."
        )
    return launch_of(
        device_code,
        problem,
        config,
        tensors,
        softmax_scale,
        num_threads=_WARPGROUP,
        barriers=3,
        extra_bytes=extra_bytes,
    )


def specialized(
    device_code: Callable[[], Any],
    problem: AttentionProblem,
    config: Config,
    tensors: Tensors,
    softmax_scale: float,
    *,
    turns: bool = False,
) -> list[CuteLaunch]:
    """``launch_of`` a producer warpgroup and consumers: a barrier for Q, and four for each stage of K and V."""
    if turns and config.num_consumers == 1:
        raise ValueError("num_consumers is 1; this rung takes turns between consumers, so give it 2 or 3.")
    constexprs = {
        "num_consumers": config.num_consumers,
        "num_stages": config.num_stages,
        "registers": registers(config),
    }
    return launch_of(
        device_code,
        problem,
        config,
        tensors,
        softmax_scale,
        num_threads=_WARPGROUP * (config.num_consumers + 1),
        barriers=1 + 4 * config.num_stages,
        constexprs=constexprs,
    )


def _tma(tensor: torch.Tensor, rows: int) -> Tma:
    return Tma(tensor, (1, 1, rows, 64), swizzle=3)


# launch and prepare of the kernel contract, for a rung that describes its launches.
entry_points = functools.partial(hosting.entry_points, toolchain)
