"""Forward attention in CuTe DSL with the instructions of Ampere: FlashAttention-2 for sm_80 and newer, also sm_120.

A block owns ``block_m`` query rows of one head and goes over the key tiles that these rows can see, with an online softmax
in base 2 and the scale folded into its one multiply-add.  K and V have one tile each in shared memory and arrive by
cp.async: V under Q K^T, the next K under the softmax and P V.  ldmatrix reads the operands of the next step of k while
the tensor cores (mma.sync m16n8k16) work on this one, and P stays in registers.  The key tiles come in three loops: those
the left edge of a window cuts, those every row sees whole, with no mask code, and those the right edge or the end of the
keys cuts.  ``device_fwd_sm80.py`` has the device code, and is loaded only to compile.

A masked score is replaced by -inf, and rows and columns past the tensors are read as zeros.  V may still hold NaN where it
is masked; its weight there is 0, and 0 * NaN is NaN: a row that ends with a NaN is computed again from its visible keys
alone (``Forward.repair``), which is compiled only for problems with a mask.

Takes float16 and bfloat16 with 16-byte aligned rows, and head sizes that are multiples of 8.  Limited by its one tile of K
and of V: a block that waits for a copy can only be covered by a second block on the same SM.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from peakattn.backends.binding import Bound
from peakattn.backends.cute import toolchain
from peakattn.backends.cute.toolchain import CuteLaunch, Int64
from peakattn.device import Device
from peakattn.problem import AttentionProblem

_VECTOR = 8  # elements of one 16-byte copy
_WARP_ROWS = 16  # rows of one tensor-core product
_REGISTERS_FOR_TILES = 215  # of 255 a thread keeps the rest for addresses, row statistics and operands on their way
_L2_SECTION_BYTES = 16 << 20  # K and V of the heads whose row blocks are scheduled together


@dataclass(frozen=True)
class Config:
    """Knobs. Each warp owns 16 rows of every ``num_threads / 2``."""

    block_m: int
    block_n: int
    num_threads: int = 128

    def __post_init__(self) -> None:
        if self.num_threads not in (32, 64, 128, 256):
            raise ValueError(f"num_threads is {self.num_threads}; allowed are 32, 64, 128 and 256.")
        rows = _WARP_ROWS * self.num_threads // 32
        if self.block_m % rows or not rows <= self.block_m <= 256:
            raise ValueError(
                f"block_m is {self.block_m}; allowed are multiples of {rows} up to 256, since each of the "
                f"{self.num_threads // 32} warps takes 16 rows at a time (2 * block_m is a multiple of num_threads)."
            )
        if self.block_n % 16 or not 16 <= self.block_n <= 256:
            raise ValueError(f"block_n is {self.block_n}; allowed are multiples of 16 from 16 to 256.")


def reject(problem: AttentionProblem, device: Device) -> str | None:
    """Why this kernel does not take the problem, or None."""
    if device.type != "cuda":
        return f"it needs a CUDA device and the tensors are on {device.name}"
    if device.arch < 80:
        return f"it needs compute capability 8.0 or newer and {device.name} has {device.arch / 10}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"it multiplies float16 and bfloat16 and the tensors are {problem.dtype}; triton.fwd takes float32"
    for name, dim in (("head_dim of q and k", problem.head_dim), ("head_dim of v", problem.head_dim_v)):
        if dim % _VECTOR:
            return f"it copies rows in vectors of 8 elements and the {name} is {dim}; pad it to a multiple of 8"
    if not problem.aligned:
        return "it copies 16 bytes at a time, and q, k or v has rows that do not start at such addresses; make them contiguous"
    return None


def default_config(problem: AttentionProblem, device: Device) -> Config:
    """Reasoned from registers and shared memory of the compiled code, with two blocks on an SM where they fit; unmeasured."""
    dim = max(_padded(problem.head_dim), _padded(problem.head_dim_v))
    small = device.smem_per_block < 128 * 1024  # sm_86, sm_89, sm_120
    if problem.seqlen_q <= 16:
        return Config(16, 64 if dim <= 128 else 32, 32)
    if device.arch in (100, 103):  # the compiler pairs registers there, and larger tiles spill
        return Config(64, 64 if dim <= 128 else 32, 128)
    if dim <= 64:
        return Config(128, 64, 128)
    if dim <= 128:
        whole = all(_padded(d) % 64 == 0 for d in (problem.head_dim, problem.head_dim_v))
        return Config(128, 48 if whole and not small else 32, 128)
    if small:
        return Config(64, 32, 128)
    return Config(128, 64, 256)


def search_space(problem: AttentionProblem, device: Device) -> Iterable[Config]:
    """Every config of these knobs that fits the shared memory and the registers of an SM."""
    for block_m, block_n, num_threads in itertools.product((16, 32, 64, 96, 128, 192), range(16, 144, 16), (32, 64, 128, 256)):
        if block_m % (num_threads // 2) == 0:
            config = Config(block_m, block_n, num_threads)
            if misfit(problem, config, device) is None:
                yield config


def misfit(problem: AttentionProblem, config: Config, device: Device) -> str | None:
    """Why a config cannot run, or None."""
    uneven = _uneven(problem, config)
    if uneven is not None:
        return uneven
    shared = shared_bytes(problem, config)
    if shared > device.smem_per_block:
        return (
            f"{config} needs {shared} bytes of shared memory, (block_m + 2 block_n) head_dim elements, and {device.name} has "
            f"{device.smem_per_block}; take smaller tiles"
        )
    registers = config.block_m * (_padded(problem.head_dim_v, 16) + config.block_n * 3 // 2) // config.num_threads
    if registers > _REGISTERS_FOR_TILES:
        return f"{config} needs {registers} registers a thread for its tiles and {_REGISTERS_FOR_TILES} are there for them"
    return None


def _uneven(problem: AttentionProblem, config: Config) -> str | None:
    """Why the threads cannot copy the tiles in whole passes, or None."""
    for dim in (_padded(problem.head_dim), _padded(problem.head_dim_v)):
        rows = config.num_threads * _VECTOR // (64 if dim % 64 == 0 else 32)
        if config.block_m % rows or config.block_n % rows:
            return (
                f"block_m {config.block_m} and block_n {config.block_n} must be multiples of {rows}, which is how many rows of "
                f"{dim} elements {config.num_threads} threads copy at a time"
            )
    return None


def shared_bytes(problem: AttentionProblem, config: Config) -> int:
    """Shared memory of one block: Q, K and V tiles; the output takes their place."""
    dim, dim_v = _padded(problem.head_dim), _padded(problem.head_dim_v)
    loads = config.block_m * dim + config.block_n * (dim + dim_v)
    return problem.dtype.itemsize * max(loads, config.block_m * dim_v)


def _padded(dim: int, multiple: int = 32) -> int:
    """Columns of a tile in shared memory."""
    return -(-dim // multiple) * multiple


def _device_code() -> Any:
    from peakattn.backends.cute.device_fwd_sm80 import Forward

    return Forward


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
    if (uneven := _uneven(problem, config)) is not None:
        raise ValueError(f"{uneven}.")
    num_heads = problem.batch * problem.num_heads_q
    num_m_blocks = -(-problem.seqlen_q // config.block_m)
    widest = problem.seqlen_q + problem.seqlen_k  # a window beyond that is cut to fit 32 bits
    left, right = problem.window_left, problem.window_right
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
        "section": _section(problem, num_heads),
        "offset": problem.offset,
        "window_left": 0 if left is None else min(left, widest),
        "window_right": 0 if right is None else min(right, widest),
    }
    shared = shared_bytes(problem, config)
    constexprs = {
        "dtype": problem.dtype,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "block_m": config.block_m,
        "block_n": config.block_n,
        "num_threads": config.num_threads,
        "shared_bytes": shared,
        "has_left": left is not None,
        "has_right": right is not None,
        "softcap": problem.softcap,
    }
    return [CuteLaunch(_device_code, (num_m_blocks * num_heads, 1, 1), config.num_threads, shared, args, constexprs)]


def _section(problem: AttentionProblem, num_heads: int) -> int:
    """Heads scheduled together: one when all blocks take equally long, else as many as L2 holds K and V of.

    The longest blocks of many heads first fill the tail of a masked launch.
    """
    if problem.mask_name == "full":
        return 1
    kv_bytes = problem.dtype.itemsize * problem.seqlen_k * (problem.head_dim + problem.head_dim_v) // problem.group
    return max(1, min(_L2_SECTION_BYTES // max(kv_bytes, 1), num_heads))


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
