"""Backward attention in cuTile, sm_80 and newer: deterministic, no atomics, only the gradients asked for.

Three tile functions:

1. rows:   delta = rowsum(dout * out) - dlse and lse, in base 2 for 16-bit tensors, negated, for every query row
2. dk, dv: one block per key block and kv head; K and V stay, the query heads of the group and their row blocks pass by
3. dq:     one block per row block and query head; Q and dout stay, the key blocks pass by

    p  = exp2(s * qk_scale - lse * log2(e))        recomputed in 2 and again in 3
    dv = p^T dout        dp = dout v^T        ds = p * (dp - delta)        dk = scale ds^T q        dq = scale ds k

Because s and dp are recomputed, seven products are executed where five count; in return each gradient is written once,
by one block, in an order that does not depend on timing, and grouped kv heads need no atomics either.  Function 2 works
on the transposes s^T = k q^T and dp^T = v dout^T, so that p^T and ds^T are left operands straight from registers.

Loops over blocks come in three phases as in the forward: masked, mask-free, masked.  Masked elements of p and ds are
replaced by 0, which in 2 keeps each key row to itself whatever stands in other rows of K and V.  In 3 a masked row of K
meets a weight of 0, and 0 * NaN is NaN: a row block that ends with a NaN is computed again key by key (``repair``).
``device_bwd.py`` has the device code.  Limited by those two products more, and by registers at head_dim 256.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from peakattn.backends import binding, tiles
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

_ROW_ELEMENTS = 8192  # of a tile of function 1
_ROW_UNIT = 4  # rows of the scratch are a multiple of this, for aligned strides


@dataclass(frozen=True)
class Config:
    """Knobs of the dk, dv and the dq functions; ``fwd.Config`` says what the hints mean.

    ``dkdv_split`` launches function 2 once for dk and once for dv: one more product, and half the sums in registers.
    """

    dkdv_block_m: int
    dkdv_block_n: int
    dq_block_m: int
    dq_block_n: int
    dkdv_occupancy: int = 1
    dq_occupancy: int = 1
    dkdv_latency: int = 2
    dq_latency: int = 2
    dkdv_split: bool = False
    dkdv_worker_warps: int = 0
    dq_worker_warps: int = 0
    opt_level: int = 3

    def __post_init__(self) -> None:
        for name in ("dkdv_block_m", "dkdv_block_n", "dq_block_m", "dq_block_n"):
            power_of_two(name, getattr(self, name), 16, 256)
        for name in ("dkdv_occupancy", "dq_occupancy"):
            between(name, getattr(self, name), 1, 32, "blocks on an SM")
        for name in ("dkdv_latency", "dq_latency"):
            between(name, getattr(self, name), 0, 10, "where 0 is the compiler's own choice")
        worker_warps("dkdv_worker_warps", self.dkdv_worker_warps)
        worker_warps("dq_worker_warps", self.dq_worker_warps)
        between("opt_level", self.opt_level, 0, 3, "where 3 is the most")

    @property
    def dkdv_hints(self) -> dict[str, Any]:
        return self._hints(self.dkdv_occupancy, self.dkdv_worker_warps)

    @property
    def dq_hints(self) -> dict[str, Any]:
        return self._hints(self.dq_occupancy, self.dq_worker_warps)

    def _hints(self, occupancy: int, warps: int) -> dict[str, Any]:
        return {"occupancy": occupancy, "num_worker_warps": warps or None, "opt_level": self.opt_level}


def reject(problem: AttentionProblem, device: Device) -> str | None:
    return unsupported(problem, device)


def default_config(problem: AttentionProblem, device: Device) -> Config:
    """On sm_90 the fastest of a grid on an H200, see the notebook; elsewhere reasoned from registers and spills, unmeasured."""
    dim = max(padded(problem.head_dim), padded(problem.head_dim_v))
    if problem.dtype == torch.float32:
        return Config(32, 32, 32, 32) if dim <= 64 else Config(16, 16, 16, 16)
    if device.arch == 90:
        if dim <= 64:
            return Config(128, 64, 64, 64, 2, 2)
        if dim <= 128:
            return Config(64, 64, 128, 64, 2, 1, dq_latency=0, dq_worker_warps=8)
        return Config(64, 64, 64, 64, dq_latency=0, dkdv_worker_warps=8)
    if device.arch in (100, 103):
        if dim <= 64:
            return Config(64, 64, 64, 64, 2, 2)
        return Config(64, 64, 64, 64) if dim <= 128 else Config(64, 64, 64, 32, dkdv_split=True)
    if dim <= 64 or (dim <= 128 and device.arch >= 120):
        return Config(32, 32, 32, 32)
    return Config(16, 32, 32, 16)


def search_space(problem: AttentionProblem, device: Device) -> Iterable[Config]:
    """All pairs of a dk, dv shape and a dq shape. The two functions are independent: tune one, then the other."""
    # Eight worker warps share the rows that stay, where a block has an SM to itself.
    shapes = list(itertools.product((32, 64, 128), (32, 64, 128), ((1, 0), (2, 0), (1, 8))))
    dims, dim = padded(problem.head_dim) + padded(problem.head_dim_v), padded(problem.head_dim)
    dkdv = [
        (*shape, split)
        for shape in shapes
        for split in ((False, True) if dims > 256 else (False,))
        if _fits(problem, device, shape[1], shape[0], shape[2][0], dims // (2 if split else 1))
    ]
    dq = [shape for shape in shapes if _fits(problem, device, shape[0], shape[1], shape[2][0], dim)]
    for (dkdv_m, dkdv_n, (dkdv_occupancy, dkdv_warps), split), (dq_m, dq_n, (dq_occupancy, dq_warps)) in itertools.product(
        dkdv, dq
    ):
        yield Config(
            *(dkdv_m, dkdv_n, dq_m, dq_n, dkdv_occupancy, dq_occupancy),
            dkdv_split=split,
            dkdv_worker_warps=dkdv_warps,
            dq_worker_warps=dq_warps,
        )


def _fits(problem: AttentionProblem, device: Device, resident: int, streamed: int, occupancy: int, columns: int) -> bool:
    """Whether a function with ``resident`` rows that stay, each with ``columns`` sums, fits an SM ``occupancy`` times."""
    registers = resident * (columns + 5 * streamed // 2)
    dims = padded(problem.head_dim) + padded(problem.head_dim_v)
    shared = problem.dtype.itemsize * dims * (resident + streamed)
    fits_shared = device.type != "cuda" or shared * occupancy <= device.smem_per_sm
    return registers * occupancy <= 64 * 1024 and fits_shared


def workspace(problem: AttentionProblem, config: Config) -> binding.Workspace:
    """Scratch memory by name: shape and dtype."""
    shape = (problem.batch, problem.num_heads_q, -(-problem.seqlen_q // _ROW_UNIT) * _ROW_UNIT)
    return {"neg_delta": (shape, torch.float32), "neg_lse": (shape, torch.float32)}


def _rows_code() -> Any:
    from peakattn.backends.cutile.device_bwd import attention_bwd_rows_kernel

    return attention_bwd_rows_kernel


def _dkdv_code() -> Any:
    from peakattn.backends.cutile.device_bwd import attention_bwd_dkdv_kernel

    return attention_bwd_dkdv_kernel


def _dq_code() -> Any:
    from peakattn.backends.cutile.device_bwd import attention_bwd_dq_kernel

    return attention_bwd_dq_kernel


def launches(
    problem: AttentionProblem,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    softmax_scale: float,
    softcap: float,
    scratch: dict[str, torch.Tensor] | None = None,
) -> list[TileLaunch]:
    """``scratch`` is memory as ``workspace`` describes it; it is allocated here when None."""
    if scratch is None:
        scratch = binding.allocate(workspace(problem, config), q.device)
    heads_q, heads_kv = problem.batch * problem.num_heads_q, problem.batch * problem.num_heads_kv
    block_d, block_dv = padded(problem.head_dim), padded(problem.head_dim_v)
    bounds, flags = mask_arguments(problem)
    # The rows past the end are never written, and read as what the load says.
    rows = {name: _rows_array(x, problem.seqlen_q) for name, x in scratch.items()}
    inputs = {"q": Array(q), "k": Array(k), "v": Array(v), "dout": Array(dout)}
    scalars = {"softmax_scale": softmax_scale, "softcap": softcap}
    constexprs = {
        "GROUP": problem.group,
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        **flags,
        "SOFTCAP": problem.softcap,
        "ACCURATE": problem.dtype == torch.float32,
        "TF32": tf32(problem),
    }
    made = []

    block_m = max(16, min(128, _ROW_ELEMENTS // block_dv))
    where, block_axis = grid(-(-problem.seqlen_q // block_m), heads_q, heads_q)
    args: dict[str, Any] = {
        "out": Array(out),
        "dout": Array(dout),
        "lse": _rows_array(lse, problem.seqlen_q),
        "dlse": None if dlse is None else _rows_array(dlse, problem.seqlen_q),
        **rows,
    }
    row_constexprs = {
        "BLOCK_M": block_m,
        "BLOCK_DV": block_dv,
        "HAS_DLSE": dlse is not None,
        "ACCURATE": problem.dtype == torch.float32,
        "BLOCK_AXIS": block_axis,
    }
    made.append(TileLaunch(_rows_code, where, args, row_constexprs, {"opt_level": config.opt_level}))

    for some_dk, some_dv in ((dk, None), (None, dv)) if config.dkdv_split else ((dk, dv),):
        if some_dk is None and some_dv is None:
            continue
        block_m, block_n = config.dkdv_block_m, config.dkdv_block_n
        section = max(tiles.heads_per_section(problem) // problem.group, 1)
        where, block_axis = grid(-(-problem.seqlen_k // block_n), heads_kv, section)
        args = {
            **inputs,
            "dk": None if some_dk is None else Array(some_dk),
            "dv": None if some_dv is None else Array(some_dv),
            **rows,
            **scalars,
            **bounds,
        }
        blocks = {
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "EVEN_M": problem.seqlen_q % block_m == 0,
            "NEEDS_DK": some_dk is not None,
            "NEEDS_DV": some_dv is not None,
            "LATENCY": config.dkdv_latency,
            "BLOCK_AXIS": block_axis,
        }
        made.append(TileLaunch(_dkdv_code, where, args, constexprs | blocks, config.dkdv_hints))

    if dq is not None:
        block_m, block_n = config.dq_block_m, config.dq_block_n
        where, block_axis = grid(-(-problem.seqlen_q // block_m), heads_q, tiles.heads_per_section(problem))
        args = {
            **inputs,
            "dq": Array(dq),
            **rows,
            **scalars,
            **bounds,
        }
        blocks = {
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "EVEN_N": problem.seqlen_k % block_n == 0,
            "LATENCY": config.dq_latency,
            "BLOCK_AXIS": block_axis,
        }
        made.append(TileLaunch(_dq_code, where, args, constexprs | blocks, config.dq_hints))
    return [launch for launch in made if math.prod(launch.grid)]


def prepare(
    problem: AttentionProblem,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
) -> Callable[..., None]:
    """``call(*the same tensors, softmax_scale, softcap)``; each call takes its scratch memory from torch's allocator."""
    tensors = (q, k, v, out, lse, dout, dlse, dq, dk, dv)
    made = functools.partial(launches, problem, config, *tensors, 1.0, 0.0)
    return binding.prepare_with_scratch(made, tensors, workspace(problem, config), toolchain.bind)


def launch(
    problem: AttentionProblem,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    softmax_scale: float,
    softcap: float,
) -> None:
    tensors = (q, k, v, out, lse, dout, dlse, dq, dk, dv)
    prepare(problem, config, *tensors)(*tensors, softmax_scale, softcap)


def _rows_array(x: torch.Tensor, seqlen_q: int) -> Array:
    return Array(x, (0, 1, 2), (), seqlen_q)
