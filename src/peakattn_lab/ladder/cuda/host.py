"""What the CUDA rungs have on the host: their knobs, what they refuse, their launch, and what their layouts cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peakattn.backends.cuda import fwd_sm80, toolchain
from peakattn.backends.cuda.toolchain import CudaLaunch, Int64
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab.ladder import hosting

ROWS = 16  # query rows of one mma.sync
_BANKS, _WORD = 32, 4  # of shared memory, and the bytes that a bank serves at a time
_ELEMENTS = {torch.float16: "Half", torch.bfloat16: "BFloat"}


@dataclass(frozen=True)
class Config:
    """A tile of scores, the warps that share its rows, the tiles of K and of V in shared memory."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int = 1

    def __post_init__(self) -> None:
        if self.num_warps not in (1, 2, 4, 8) or self.block_m % (ROWS * self.num_warps) or not self.block_m <= 256:
            raise ValueError(
                f"block_m is {self.block_m} and num_warps {self.num_warps}; 1, 2, 4 or 8 warps take 16 rows each, or a "
                "multiple of that, up to 256 together."
            )
        if self.block_n % 16 or not 16 <= self.block_n <= 128:
            raise ValueError(f"block_n is {self.block_n}; allowed are multiples of 16 from 16 to 128.")
        if not 1 <= self.num_stages <= 4:
            raise ValueError(f"num_stages is {self.num_stages}; allowed are 1 to 4.")


def reject(problem: AttentionProblem, device: Device) -> str | None:
    """A rung shows one idea, not everything that a call may ask for: why it does not take the problem, or None."""
    if problem.direction != "fwd":
        return "rungs compute the forward only"
    if problem.mask_name == "window" or problem.softcap:
        return "rungs compute full and causal attention without a softcap; the library's kernels take the rest"
    if problem.head_dim != problem.head_dim_v or problem.head_dim > 128 or problem.head_dim % 16:
        return "rungs take one head_dim for q, k and v, a multiple of 16 up to 128; the library's kernels take the rest"
    return fwd_sm80.reject(problem, device)


def only(config: Config) -> tuple[Callable[..., Config], Callable[..., Iterable[Config]]]:
    """``default_config`` and ``search_space`` of a rung whose config is part of its idea."""

    def default_config(problem: AttentionProblem, device: Device) -> Config:
        return config

    def search_space(problem: AttentionProblem, device: Device) -> Iterable[Config]:
        yield config

    return default_config, search_space


def entry_points(
    device_code: str, shared_bytes: Callable[[AttentionProblem, Config], int]
) -> tuple[Callable[..., list[CudaLaunch]], Callable[..., None], Callable[..., Callable[..., None]]]:
    """``launches``, and ``launch`` and ``prepare`` of the kernel contract, for a rung with a source file beside this one."""

    def launches(
        problem: AttentionProblem, config: Config, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor | None, softmax_scale: float, softcap: float,
    ) -> list[CudaLaunch]:  # fmt: skip
        if problem.empty:
            return []
        num_m_blocks = -(-problem.seqlen_q // config.block_m)
        args: dict[str, Any] = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "softmax_scale": softmax_scale}
        for name, x in (("q", q), ("k", k), ("v", v), ("o", out)):
            args |= {f"stride_{name}{axis}": Int64(stride) for axis, stride in zip("bsh", x.stride()[:3], strict=True)}
        args |= {
            "seqlen_q": problem.seqlen_q,
            "seqlen_k": problem.seqlen_k,
            "num_heads_q": problem.num_heads_q,
            "group": problem.group,
            "num_m_blocks": num_m_blocks,
            "offset": problem.offset,
        }
        constants: dict[str, int | str] = {
            "ELEMENT": _ELEMENTS[problem.dtype],
            "HEAD_DIM": problem.head_dim,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "NUM_WARPS": config.num_warps,
            "NUM_STAGES": config.num_stages,
            "CAUSAL": int(problem.causal),
            "STORE_LSE": int(lse is not None),
        }
        grid = (num_m_blocks * problem.batch * problem.num_heads_q, 1, 1)
        source = Path(__file__).with_name(device_code)
        threads, shared = 32 * config.num_warps, shared_bytes(problem, config)
        return [CudaLaunch(source, "attention_fwd_kernel", grid, threads, shared, args, constants)]

    return launches, *hosting.entry_points(toolchain, launches)


def turns(row: int, weights: int = 0, scores: int = 0, shared_rows: bool = False) -> dict[str, int]:
    """How many turns a read in the loop takes, by what is read; 1 is the least.

    Rows of K and V begin ``row`` bytes apart, those of weights and of scores ``weights`` and ``scores`` bytes; 0 where they
    are not in shared memory.  With ``shared_rows`` two threads walk along each row of scores, else 32 lanes.
    """
    lanes = [divmod(lane, 4) for lane in range(32)]
    found = {"K": ways([g * row + 4 * t for g, t in lanes], 4), "V": ways([2 * t * row + 2 * g for g, t in lanes], 2)}
    if weights:
        found["weights"] = ways([g * weights + 4 * t for g, t in lanes], 4)
    if scores:
        half = scores // 8 * 4
        walk = [lane // 2 * scores + lane % 2 * half for lane in range(32)]
        found["scores"] = ways(walk if shared_rows else [4 * lane for lane in range(32)], 4)
    return found


def ldmatrix_turns(row: int) -> dict[str, int]:
    """The same of ldmatrix, which reads 16 bytes of each of 8 neighbouring rows at a time."""
    return dict.fromkeys(("K", "V"), ways([r * row for r in range(8)], 16))


def ways(addresses: Sequence[int], size: int) -> int:
    """How many times shared memory is asked for one access of a warp: lane i reads ``size`` bytes at ``addresses[i]``.

    As many lanes as fill 128 bytes go together; each bank gives one word a time, to all lanes that want that word.
    """
    at_once = min(_BANKS * _WORD // size, len(addresses))
    total = 0
    for first in range(0, len(addresses), at_once):
        words = {a // _WORD + i for a in addresses[first : first + at_once] for i in range(max(size // _WORD, 1))}
        total += max(sum(word % _BANKS == bank for word in words) for bank in range(_BANKS))
    return total
