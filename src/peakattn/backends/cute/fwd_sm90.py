"""Forward attention for Hopper in CuTe DSL: TMA producer, wgmma consumers, and a softmax that asks for no maximum.

A block owns ``block_m`` query rows of one head, 64 for each of its consumer warpgroups.  One producer warp loads Q
and streams K and V through two rings of ``num_stages`` tiles, each slot with a barrier for "full" and one for "empty".
A consumer goes over the key tiles from right to left, and overlaps its own work:

    S_next = Q K_next^T      issued                     tensor core
    O += P V                 issued                     tensor core
    wait for S_next
    P = exp2(S_next - origin), sums                     under the second product
    wait for O; P rounded, in registers

The origin of a row is the maximum of the tiles that were computed exactly: the first one, and those that an edge (causal,
window, end of the keys) cuts.  Softmax does not depend on the origin, so in tiles that no edge cuts a row keeps the one it
has, and neither looks for a maximum nor rescales O.  What remains for each score is one multiply-add, one exp2, one
addition and half a conversion.  The sums that are needed anyway tell whether a score outgrew the origin by so much that P
would lose range.  A warp in which that happened, which is rare, computes its scores again by warp-level products, takes
the true maximum, and moves the origin.  FlashAttention-4 skips small rescales of O, after it looked for the maximum
(arXiv 2603.05451); leaving out the maximum itself goes one step further.

With ``pack_heads`` a tile's rows are those of all query heads of a group: row r of a consumer is position r // group of head
r % group, so one pass over K and V serves the group.  A TMA descriptor of five dimensions (columns, head of the group,
position, kv head, batch) brings the rows in that order, and takes the output back.  A group that does not divide 64 leaves
rows idle.  FlashAttention-3 has the idea as PackGQA, and gathers the rows by addresses where we let TMA do it.

A masked score is replaced, never multiplied, so K may hold anything where it is masked.  P is 0 there, and 0 * V is NaN
when V holds NaN or inf: rows whose output has one are computed again, key by key, from visible keys alone.

Takes float16 and bfloat16, tensors that TMA can address, head_dim up to 256.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from peakattn.backends import tiles
from peakattn.backends.binding import Bound
from peakattn.backends.cute import toolchain
from peakattn.backends.cute.toolchain import CuteLaunch, Int64, Tma
from peakattn.backends.driver import Counter, TensorMap
from peakattn.device import Device
from peakattn.problem import AttentionProblem

_REGISTERS = 64 * 1024  # per SM
_PRODUCER_REGISTERS = {1: 24, 2: 24, 3: 32}  # by num_consumers
_WIDTHS = (64, 96, 128, 192, 256)  # of tiles; TMA fills the columns past head_dim with zeros
SCHEDULES = ("single", "static", "dynamic")
_TILE_NUMBERS_BYTES = 2 * (2 * 8 + 4)  # two slots of a number and two barriers


@dataclass(frozen=True)
class Config:
    """Knobs. ``occupancy`` blocks share an SM, each with its part of the registers.

    ``pingpong``: consumers take turns to issue products. ``schedule``: "single" gives each block one tile; "static" and
    "dynamic" start as many blocks as the GPU holds, and a block goes on to a tile that is fixed, or that is next in turn.
    ``separate_out``: output has shared memory of its own; without, it passes through the ring of V. ``pack_heads``: the
    query heads of a group share tiles.
    """

    block_m: int
    block_n: int
    num_stages: int = 2
    occupancy: int = 1
    pingpong: bool = False
    schedule: str = "single"
    separate_out: bool = False
    pack_heads: bool = False

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
        if self.pingpong and self.num_consumers == 1:
            raise ValueError("pingpong takes turns between consumers; give block_m 128 or 192, or pingpong=False.")

    @property
    def num_consumers(self) -> int:
        """Warpgroups that multiply, each with 64 rows."""
        return self.block_m // 64

    def positions(self, group: int) -> int:
        """Query positions of a tile for ``group`` query heads a kv head: a position's heads stay in one consumer."""
        return self.num_consumers * (64 // group) if self.pack_heads else self.block_m


@dataclass(frozen=True)
class GroupedTma(Tma):
    """A TMA descriptor over [batch, seqlen, kv head, head of its group, head_dim], seen in a tensor with query heads."""

    group: int = 1

    def tensor_map(self, slot: int) -> TensorMap:
        return Tma(self.tensor.unflatten(2, (-1, self.group)), self.block_shape, self.swizzle, self.order).tensor_map(slot)


def reject(problem: AttentionProblem, device: Device) -> str | None:
    """Why this kernel does not take the problem, or None."""
    if device.type != "cuda" or device.arch != 90:
        return f"it is written for compute capability 9.0 (Hopper) and the device is {device.name}; cute.fwd_sm80 runs there"
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
    """The fastest or near it in each class of the sweeps of 2026-11-29 on an H200, bf16; see the notebook.

    Heads are packed where that takes away at least a quarter of the rows of tiles, since each tile reads all its K and V
    anew.  Tiles are of 64 rows then, unless that makes several for a group and more than there are SMs: larger ones read less.
    """
    usual = _long_default(problem)
    plain = _short_default(problem, device) if problem.seqlen_q <= 64 else usual
    if _unpackable(problem) is not None:
        return plain
    packed = _short_default(problem, device, pack_heads=True)
    if problem.seqlen_q > packed.positions(problem.group) and _num_tiles(problem, packed) > device.num_sms:
        packed = dataclasses.replace(usual, pack_heads=True)
    rows = {config: config.block_m * _num_tiles(problem, config) for config in (packed, plain)}
    return packed if 4 * rows[packed] <= 3 * rows[plain] else plain


def _short_default(problem: AttentionProblem, device: Device, pack_heads: bool = False) -> Config:
    """The default for few queries: one consumer."""
    if max(_tile_widths(problem)) > 128:
        return Config(64, 64, schedule="dynamic", pack_heads=pack_heads)
    config = Config(64, 128, schedule="dynamic", pack_heads=pack_heads)
    crowded = _num_tiles(problem, config) > device.num_sms
    if pack_heads:
        return config if crowded else dataclasses.replace(config, num_stages=3)  # an SM to itself: more loads on their way
    return Config(64, 64, num_stages=3, occupancy=2, schedule="dynamic") if crowded else config


def _long_default(problem: AttentionProblem) -> Config:
    """The default for queries that fill tiles by themselves."""
    dim, short = max(_tile_widths(problem)), problem.seqlen_k < 2048
    if dim == 64 and short:
        return Config(64, 64, num_stages=3, occupancy=3, schedule="dynamic", separate_out=True)
    if dim == 64:
        return Config(192, 128, num_stages=3, schedule="dynamic", separate_out=True)
    if dim == 96 and not short:
        return Config(192, 96, schedule="dynamic", separate_out=True)
    if dim == 96:
        return Config(128, 128, num_stages=3, schedule="dynamic", separate_out=True)
    if dim == 128:
        return Config(128, 128, schedule="dynamic", separate_out=True)
    if dim == 192:
        return Config(128, 80, schedule="dynamic", separate_out=True)
    return Config(128, 64, schedule="dynamic")


def search_space(problem: AttentionProblem, device: Device) -> Iterable[Config]:
    """Every config of these knobs that fits the shared memory and the registers of an SM."""
    packing = (False, True) if _unpackable(problem) is None else (False,)
    for block_m, block_n, num_stages, occupancy, pingpong, schedule, separate_out, pack_heads in itertools.product(
        (64, 128, 192),
        (64, 80, 96, 112, 128, 144, 160, 176, 192),
        (2, 3, 4),
        (1, 2, 3),
        (False, True),
        SCHEDULES,
        (False, True),
        packing,
    ):
        if (pingpong and block_m == 64) or (not separate_out and num_stages * block_n < block_m):
            continue
        config = Config(block_m, block_n, num_stages, occupancy, pingpong, schedule, separate_out, pack_heads)
        if misfit(problem, config, device) is None:
            yield config


def misfit(problem: AttentionProblem, config: Config, device: Device) -> str | None:
    """Why a config cannot run, or None: heads to pack, shared memory, registers of a consumer thread."""
    if config.pack_heads and (reason := _unpackable(problem)) is not None:
        return reason
    shared, limit = shared_bytes(problem, config), min(device.smem_per_block, device.smem_per_sm // config.occupancy - 1024)
    if shared > limit:
        return (
            f"{config} needs {shared} bytes of shared memory a block and {limit} are there; take smaller tiles or fewer stages"
        )
    needed, given = registers_needed(problem, config), _consumer_registers(config)
    if needed > given:
        return f"{config} needs about {needed} registers in a consumer thread and {given} are there; take smaller tiles"
    return None


def _unpackable(problem: AttentionProblem) -> str | None:
    """Why the query heads of a group cannot share tiles, or None."""
    if 1 < problem.group <= 64:
        return None
    return (
        f"pack_heads puts the 2 to 64 query heads of a kv head into the 64 rows of a consumer, and here a kv head has "
        f"{problem.group}; give pack_heads=False"
    )


def _num_tiles(problem: AttentionProblem, config: Config) -> int:
    heads = problem.num_heads_kv if config.pack_heads else problem.num_heads_q
    return problem.batch * heads * -(-problem.seqlen_q // config.positions(problem.group))


def shared_bytes(problem: AttentionProblem, config: Config) -> int:
    """Shared memory of one block: Q, the two rings, the output where it has a place of its own, and 8-byte barriers."""
    size, (dim, dim_v) = problem.dtype.itemsize, _tile_widths(problem)
    tiles = config.block_m * (dim + dim_v * config.separate_out) + config.num_stages * config.block_n * (dim + dim_v)
    barriers = 2 * config.num_consumers + 4 * config.num_stages + 1
    return size * tiles + 8 * barriers + _TILE_NUMBERS_BYTES


def registers_needed(problem: AttentionProblem, config: Config) -> int:
    """Registers of a consumer thread at their peak: scores, output, P, and what addresses and the softmax take."""
    return (config.block_n + _tile_widths(problem)[1] + config.block_n // 2) // 2 + 28


def _tile_widths(problem: AttentionProblem) -> tuple[int, int]:
    """Widths of the tiles of Q and K, and of V."""
    dim, dim_v = (next(w for w in _WIDTHS if d <= w) for d in (problem.head_dim, problem.head_dim_v))
    return dim, dim_v


def _base_registers(config: Config) -> int:
    """Registers a thread starts with: an even share of the SM, which the warpgroups then trade."""
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
) -> list[CuteLaunch]:
    """The one launch of this kernel; nothing when there is no output."""
    if problem.empty:
        return []
    if config.pack_heads and (reason := _unpackable(problem)) is not None:
        raise ValueError(f"{reason}.")
    dim, dim_v = _tile_widths(problem)
    left, right = tiles.edges(problem)
    masked = left is not None or right is not None
    # Heads of tiles: packed, a tile belongs to a kv head and has all query heads of its group.
    pack = problem.group if config.pack_heads else 1
    total_heads = problem.batch * problem.num_heads_q // pack
    num_tiles = _num_tiles(problem, config)
    args: dict[str, Any] = {
        "q_map": _tma(q, 64, dim, pack),
        "k_map": _tma(k, config.block_n, dim),
        "v_map": _tma(v, config.block_n, dim_v),
        "out_map": _tma(out, 64, dim_v, pack),
        "q": q if masked else None,
        "k": k if masked else None,
        "v": v if masked else None,
        "lse": lse,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "num_heads": problem.num_heads_q // pack,
        "group": problem.group // pack,
        "total_heads": total_heads,
        "num_m_blocks": num_tiles // total_heads,
        "num_tiles": num_tiles,
        "heads_per_section": tiles.heads_per_section(problem) // pack,
        "left": left,
        "right": right,
    }
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        for dimension, place in (("batch", 0), ("row", 1), ("head", 2)):
            args[f"{name}_{dimension}"] = Int64(tensor.stride(place)) if masked else None
    args["counter"] = Counter() if config.schedule == "dynamic" else None
    args |= {"softmax_scale": softmax_scale, "softcap": softcap}
    constexprs = {
        "dtype": problem.dtype,
        "dim": dim,
        "dim_v": dim_v,
        "block_n": config.block_n,
        "num_consumers": config.num_consumers,
        "num_stages": config.num_stages,
        "heads_per_tile": pack,
        "schedule": config.schedule,
        "pingpong": config.pingpong,
        "separate_out": config.separate_out,
        "longest_first": right is not None,
        "ragged": problem.seqlen_k % config.block_n != 0,
        "softcap": problem.softcap,
        "occupancy": config.occupancy,
        "registers": (_PRODUCER_REGISTERS[config.num_consumers], _consumer_registers(config)),
    }
    programs = min(num_tiles, config.occupancy * _device(q).num_sms) if config.schedule != "single" else num_tiles
    return [
        CuteLaunch(
            device_code=_device_code,
            grid=(programs, 1, 1),
            num_threads=128 * (config.num_consumers + 1),
            shared_bytes=shared_bytes(problem, config),
            args=args,
            constexprs=constexprs,
        )
    ]


def _device_code() -> Any:
    from peakattn.backends.cute.device_fwd_sm90 import Forward

    return Forward


def _tma(tensor: torch.Tensor, rows: int, width: int, pack: int = 1) -> Tma:
    """Boxes as wide as the swizzle: 128 bytes where the tile is a multiple of that, else 64."""
    box, swizzle = (64, 3) if width % 64 == 0 else (32, 2)
    if pack > 1:
        return GroupedTma(tensor, (1, 1, rows // pack, pack, box), swizzle, order=(0, 2, 1, 3, 4), group=pack)
    return Tma(tensor, (1, 1, rows, box), swizzle)


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
) -> Bound:
    """``launch`` for tensors like these, with everything but the addresses and the two numbers settled."""
    return toolchain.bind(launches(problem, config, q, k, v, out, lse, 1.0, 0.0), (q, k, v, out, lse))
