"""Forward attention for Hopper in Gluon: one TMA producer warp, one to three wgmma consumer warpgroups.

A block owns ``block_m`` query rows of one head, shared out among ``num_consumers`` warpgroups.  The producer
warp loads Q once and streams K and V through two rings of ``num_stages`` tiles, each slot with a barrier for
"full" and one for "empty".  A consumer runs a two-stage software pipeline over the key tiles, from right to left:

    S_next = Q K_next^T      issued, not waited for        tensor core
    O *= exp2(m_older - m)                                 under the first product
    O += P V                 issued, not waited for        tensor core
    wait for S_next; m, p = exp2(S_next - m), l            under the second product
    wait for O; P = p                                      P never leaves registers

Tiles are visited in three loops: those the right edge cuts (causal, window, end of the keys), those no edge
cuts, which contain no mask code at all, and those the left edge of a window cuts.

A masked score is replaced, never multiplied, so K may hold anything where it is masked.  P is 0 there, and
0 * V is NaN when V holds NaN or inf: a row block whose output has a NaN is therefore computed again, key by
key over visible keys alone, by ``_repair``.  So is one with scores so large (1e7 and more) that the rounding of a
row's maximum, which weights and their sum share, leaves the range of exp2.  That path is slow and taken only then; the
price otherwise is one test for each row block.

Takes float16 and bfloat16, tensors that TMA can address, head_dim up to 256.  ``device_fwd_sm90.py`` has the device code.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from peakattn.backends import tiles
from peakattn.backends.triton import toolchain
from peakattn.backends.triton.device_fwd_sm90 import attention_fwd_kernel
from peakattn.backends.triton.toolchain import KernelLaunch, Tma
from peakattn.device import Device
from peakattn.problem import AttentionProblem

_REGISTERS = 64 * 1024  # per SM
_PRODUCER_REGISTERS = {1: 24, 2: 24, 3: 32}  # by num_consumers: consumers get 232 to 240, 240 and 160
_BARRIER_BYTES = 1024  # barriers and the reductions' scratch


@dataclass(frozen=True)
class Config:
    """Knobs. ``occupancy`` blocks share an SM, each with its part of the registers.

    ``pingpong``: consumers take turns to issue products. ``persistent``: a block per place on the GPU, which takes
    one tile after another.
    """

    block_m: int
    block_n: int
    num_consumers: int = 2
    num_stages: int = 2
    occupancy: int = 1
    pingpong: bool = False
    persistent: bool = False

    def __post_init__(self) -> None:
        if self.num_consumers not in (1, 2, 3):
            raise ValueError(f"num_consumers is {self.num_consumers}; allowed are 1, 2 and 3.")
        if self.block_m not in (64 * self.num_consumers, 128 * self.num_consumers):
            raise ValueError(f"block_m is {self.block_m}; each of the {self.num_consumers} consumers takes 64 or 128 rows.")
        if self.block_n not in (32, 64, 128):
            raise ValueError(f"block_n is {self.block_n}; allowed are 32, 64 and 128.")
        if not 2 <= self.num_stages <= 8:
            raise ValueError(f"num_stages is {self.num_stages}; allowed are 2 to 8: a tile is awaited while the last is read.")
        if self.occupancy not in (1, 2, 3):
            raise ValueError(f"occupancy is {self.occupancy}; allowed are 1, 2 and 3 blocks on an SM.")
        if self.pingpong and self.num_consumers == 1:
            raise ValueError("pingpong takes turns between consumers; give num_consumers 2 or 3, or pingpong=False.")


def reject(problem: AttentionProblem, device: Device) -> str | None:
    """Why this kernel does not take the problem, or None."""
    if device.type != "cuda" or device.arch != 90:
        return f"it is written for compute capability 9.0 (Hopper) and the device is {device.name}; triton.fwd runs elsewhere"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"wgmma multiplies float16 and bfloat16 here and the tensors are {problem.dtype}; triton.fwd takes float32"
    if not problem.aligned:
        return "TMA needs 16-byte aligned addresses and strides, and q, k or v has others; make them contiguous for this kernel"
    if problem.head_dim_v % 8:
        return f"TMA writes out in rows of 16-byte multiples and head_dim_v is {problem.head_dim_v}; pad it to a multiple of 8"
    if problem.seqlen_k == 0:
        return "there are no keys to load; triton.fwd writes the zeros"
    return None


def default_config(problem: AttentionProblem, device: Device) -> Config:
    """The fastest or near it in each class of the sweep of 2026-11-29 on an H200, bf16; see the notebook."""
    widest, _ = _widths(problem)
    if widest == 64 and problem.mask_name == "full":
        if problem.seqlen_k < 2048:
            return Config(block_m=64, block_n=128, num_consumers=1, num_stages=2, occupancy=2)
        return Config(block_m=192, block_n=128, num_consumers=3, num_stages=2, persistent=True)
    if widest == 64:
        return Config(block_m=64, block_n=64, num_consumers=1, num_stages=3, occupancy=3)
    if widest == 128:
        return Config(block_m=128, block_n=128, num_consumers=2, num_stages=2)
    return Config(block_m=128, block_n=64, num_consumers=2, num_stages=2)


def search_space(problem: AttentionProblem, device: Device) -> Iterable[Config]:
    """Every config that fits the shared memory and the registers of an SM."""
    for num_consumers, rows, block_n, num_stages, occupancy in itertools.product(
        (1, 2, 3), (64, 128), (32, 64, 128), (2, 3, 4), (1, 2, 3)
    ):
        for pingpong, persistent in itertools.product((False, True), repeat=2):
            if pingpong and num_consumers == 1:
                continue
            block_m = rows * num_consumers
            config = Config(block_m, block_n, num_consumers, num_stages, occupancy, pingpong, persistent)
            if misfit(problem, config, device) is None:
                yield config


def misfit(problem: AttentionProblem, config: Config, device: Device) -> str | None:
    """Why a config cannot run, or None: shared memory, registers of a consumer thread."""
    shared, limit = shared_bytes(problem, config), min(device.smem_per_block, device.smem_per_sm // config.occupancy - 1024)
    if shared > limit:
        return (
            f"{config} needs {shared} bytes of shared memory a block and {limit} are there; take smaller tiles or fewer stages"
        )
    needed, given = registers_needed(problem, config), _consumer_registers(config)
    if needed > given:
        return f"{config} needs about {needed} registers in a consumer thread and {given} are there; take smaller tiles"
    return None


def shared_bytes(problem: AttentionProblem, config: Config) -> int:
    """Shared memory of one block: Q, the two rings, barriers.  A consumer's part of Q also stages its output."""
    size, (dim, dim_v) = problem.dtype.itemsize, _widths(problem)
    tiles = config.block_m * dim + config.num_stages * config.block_n * (dim + dim_v)
    return size * tiles + _BARRIER_BYTES


def registers_needed(problem: AttentionProblem, config: Config) -> int:
    """Registers of a consumer thread at their peak: scores, output, P, and what addresses and the softmax take."""
    rows = config.block_m // config.num_consumers
    return rows * (config.block_n + _widths(problem)[1] + config.block_n // 2) // 128 + 36 * rows // 64 - 8


def _widths(problem: AttentionProblem) -> tuple[int, int]:
    """Tile widths of Q and K, and of V: TMA fills the columns past head_dim with zeros.

    The first is never the smaller, because out passes through Q's shared memory.
    """
    dim, dim_v = (64 if d <= 64 else 128 if d <= 128 else 256 for d in (problem.head_dim, problem.head_dim_v))
    return max(dim, dim_v), dim_v


def _base_registers(config: Config) -> int:
    """Registers a thread starts with: an even share of the SM, which the partitions then trade."""
    threads = 128 * (config.num_consumers + 1)
    return min(_REGISTERS // (config.occupancy * threads) // 8 * 8, 248)


def _consumer_registers(config: Config) -> int:
    total = _base_registers(config) * (config.num_consumers + 1) - _PRODUCER_REGISTERS[config.num_consumers]
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
) -> list[KernelLaunch]:
    """The one launch of this kernel; nothing when there is no output."""
    if problem.empty:
        return []
    rows = config.block_m // config.num_consumers
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    dim, dim_v = _widths(problem)
    left, right = tiles.edges(problem)
    num_m_blocks = -(-problem.seqlen_q // config.block_m)
    total_heads = problem.batch * problem.num_heads_q
    num_tiles = num_m_blocks * total_heads
    names = {"q": q, "k": k, "v": v}
    args: dict[str, Any] = {
        "q_desc": Tma(q, (1, rows, 1, dim), layout),
        "k_desc": Tma(k, (1, config.block_n, 1, dim), layout),
        "v_desc": Tma(v, (1, config.block_n, 1, dim_v), layout),
        "out_desc": Tma(out, (1, rows, 1, dim_v), layout),
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        "lse": lse,
        **{f"stride_{n}{d}": x.stride(i) for n, x in names.items() for i, d in enumerate("bsh")},
        "seqlen_k": problem.seqlen_k,
        "num_heads_q": problem.num_heads_q,
        "group": problem.group,
        "total_heads": total_heads,
        "num_m_blocks": num_m_blocks,
        "num_tiles": num_tiles,
        "heads_per_section": tiles.heads_per_section(problem),
        "left": left,
        "right": right,
        "softmax_scale": softmax_scale,
        "softcap": softcap if problem.softcap else None,
    }
    constexprs = {
        "NUM_CONSUMERS": config.num_consumers,
        "NUM_STAGES": config.num_stages,
        "EVEN_K": problem.seqlen_k % config.block_n == 0,
        "SOFTCAP": problem.softcap,
        "PINGPONG": config.pingpong,
        "CONSUMER_REGISTERS": _consumer_registers(config),
        "PRODUCER_REGISTERS": _PRODUCER_REGISTERS[config.num_consumers],
    }
    programs = min(num_tiles, config.occupancy * _device(q).num_sms) if config.persistent else num_tiles
    return [
        KernelLaunch(
            fn=attention_fwd_kernel,
            grid=(programs, 1, 1),
            args=args,
            constexprs=constexprs,
            num_warps=4,  # of the first consumer; the other partitions bring their own
            num_stages=config.num_stages,
            maxnreg=_base_registers(config),
        )
    ]


def _device(q: torch.Tensor) -> Device:
    return Device.of(q.device) if q.device.type == "cuda" else Device.for_arch(90)


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


def prepare(
    problem: AttentionProblem,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> Callable[..., None]:
    """``launch`` for tensors like these, with everything but the addresses and the two numbers settled."""
    return toolchain.bind(launches(problem, config, q, k, v, out, lse, 1.0, 0.0), (q, k, v, out, lse))
