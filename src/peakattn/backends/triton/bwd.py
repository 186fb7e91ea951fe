"""Backward attention in portable Triton, sm_80 to sm_121: deterministic, no atomics, only the gradients asked for.

Three device functions:

1. rows:   delta = rowsum(dout * out) - dlse and lse in base 2, negated, for every query row
2. dk, dv: one program per key block and kv head; K and V stay, the query heads of the group and their row blocks pass by
3. dq:     one program per row block and query head; Q and dout stay, the key blocks pass by

    p  = exp2(s * qk_scale - lse * log2(e))        recomputed in 2 and again in 3
    dv = p^T dout        dp = dout v^T        ds = p * (dp - delta)        dk = scale ds^T q        dq = scale ds k

Because s and dp are recomputed, seven products are executed where five count; in return each gradient is written once,
by one program, in an order that does not depend on timing, and grouped kv heads need no atomics either.  Function 2
works on the transposes s^T = k q^T and dp^T = v dout^T, so that p^T and ds^T are left operands straight from registers.

Loops over blocks come in three phases as in the forward: masked, mask-free, masked.  Masked elements of p and ds are
replaced by 0, which in 2 keeps each key row to itself whatever stands in other rows of K and V.  In 3 a masked row of K
meets a weight of 0, and 0 * NaN is NaN: a row block that ends with a NaN is computed again key by key (``_repair``).
``device_bwd.py`` has the device code.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from peakattn.backends import binding
from peakattn.backends.binding import Workspace
from peakattn.backends.triton import toolchain
from peakattn.backends.triton.device_bwd import (
    attention_bwd_dkdv_kernel,
    attention_bwd_dq_kernel,
    attention_bwd_rows_kernel,
)
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
from peakattn.backends.triton.toolchain import KernelLaunch, Tma
from peakattn.device import Device
from peakattn.problem import AttentionProblem

_ROW_BLOCK = 128  # rows of the scratch are a multiple of this, so that no block reads beyond them
_ROWS_ELEMENTS = 8192  # elements of a tile of function 1


@dataclass(frozen=True)
class Config:
    """Knobs of the dk, dv and the dq functions. ``tma`` needs sm_90 or newer, and is ignored where TMA cannot address."""

    dkdv_block_m: int
    dkdv_block_n: int
    dq_block_m: int
    dq_block_n: int
    dkdv_num_warps: int = 4
    dkdv_num_stages: int = 2
    dkdv_maxnreg: int | None = None
    dq_num_warps: int = 4
    dq_num_stages: int = 2
    dq_maxnreg: int | None = None
    tma: bool = False

    def __post_init__(self) -> None:
        power_of_two("dkdv_block_m", self.dkdv_block_m, 16, _ROW_BLOCK)
        power_of_two("dkdv_block_n", self.dkdv_block_n, 16, 256)
        power_of_two("dq_block_m", self.dq_block_m, 16, _ROW_BLOCK)
        power_of_two("dq_block_n", self.dq_block_n, 16, 256)
        check_launch_knobs(self.dkdv_num_warps, self.dkdv_num_stages, self.dkdv_maxnreg, "dkdv_")
        check_launch_knobs(self.dq_num_warps, self.dq_num_stages, self.dq_maxnreg, "dq_")


def reject(problem: AttentionProblem, device: Device) -> str | None:
    return unsupported(problem, device)


def default_config(problem: AttentionProblem, device: Device) -> Config:
    """Reasoned from shared memory, registers and spills of the compiled code; unmeasured on any GPU but sm_90."""
    dim = max(padded(problem.head_dim), padded(problem.head_dim_v))
    # On sm_120 descriptors cost more registers than pointers do: 195 spills instead of none at head_dim 64.
    tma = has_tma(problem, device) and device.arch < 120
    if device.type != "cuda":
        return Config(32, 32, 32, 32)
    if problem.dtype == torch.float32:
        # Exact float32 products run on the FMA units, with whole rows of a tile in registers.
        if dim <= 64:
            return Config(32, 32, 32, 32, 8, 1, None, 8, 1)
        return Config(16, 16, 16, 16, 8, 1, None, 8, 1)
    if device.arch == 90 and tma:
        # The fastest of six tiles for each function in the sweep of 2026-11-29 on an H200, bf16; see the notebook.
        if dim <= 64:
            return Config(64, 64, 64, 64, 4, 3, None, 4, 2 if problem.mask_name == "full" else 3, tma=True)
        if dim <= 128:
            return Config(64, 64, 128, 64, 4, 2, None, 8, 3, tma=True)
        return Config(64, 64, 128, 32, 8, 2, None, 8, 3, tma=True)
    if dim <= 64:
        return Config(64, 64, 128, 64, 4, 2, None, 8, 2, tma=tma)
    if dim <= 128:
        return Config(32, 64, 64, 32, 4, 2, None, 4, 2, tma=tma)
    return Config(32, 32, 32, 32, 8, 1, None, 8, 1, tma=tma)


def search_space(problem: AttentionProblem, device: Device) -> Iterable[Config]:
    """All pairs of a legal dk, dv shape and a legal dq shape. The two functions are independent: tune one, then the other."""
    tma = has_tma(problem, device)
    shapes = list(itertools.product((16, 32, 64, 128), (16, 32, 64, 128), (4, 8), (1, 2, 3)))
    dkdv = [shape for shape in shapes if _fits(problem, device, shape[1], shape[0], *shape[2:], dkdv=True)]
    dq = [shape for shape in shapes if _fits(problem, device, *shape, dkdv=False)]
    for (dkdv_m, dkdv_n, dkdv_warps, dkdv_stages), (dq_m, dq_n, dq_warps, dq_stages) in itertools.product(dkdv, dq):
        yield Config(dkdv_m, dkdv_n, dq_m, dq_n, dkdv_warps, dkdv_stages, None, dq_warps, dq_stages, None, tma)


def _fits(
    problem: AttentionProblem, device: Device, resident: int, streamed: int, num_warps: int, num_stages: int, *, dkdv: bool
) -> bool:
    """Whether a function with ``resident`` rows that stay and ``streamed`` rows a step fits the device."""
    size, threads = problem.dtype.itemsize, 32 * num_warps
    dims = padded(problem.head_dim) + padded(problem.head_dim_v)
    acc = resident * (dims if dkdv else padded(problem.head_dim))
    scores = resident * streamed
    if problem.dtype == torch.float32:
        registers_fit = acc <= 32 * threads and scores <= 4 * threads
    else:
        registers_fit = acc + 2.5 * scores <= REGISTERS_FOR_TILES * threads
    shared = smem_bytes(size * dims * resident, num_stages * streamed * (size * dims + 8))
    return registers_fit and (device.type != "cuda" or shared <= device.smem_per_block)


def workspace(problem: AttentionProblem, config: Config) -> Workspace:
    """Scratch memory by name: shape and dtype."""
    padded_q = -(-problem.seqlen_q // _ROW_BLOCK) * _ROW_BLOCK
    shape = (problem.batch * problem.num_heads_q, padded_q)
    return {"neg_delta": (shape, torch.float32), "neg_lse": (shape, torch.float32)}


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
) -> list[KernelLaunch]:
    """``scratch`` is memory as ``workspace`` describes it; it is allocated here when None."""
    if scratch is None:
        scratch = binding.allocate(workspace(problem, config), q.device)
    padded_q = scratch["neg_delta"].shape[-1]
    heads_q, heads_kv = problem.batch * problem.num_heads_q, problem.batch * problem.num_heads_kv
    block_d, block_dv = padded(problem.head_dim), padded(problem.head_dim_v)
    use_tma = config.tma and addressable(problem, q, k, v, dout)
    bounds, flags = mask_arguments(problem)
    tensors = {"q": q, "k": k, "v": v, "dout": dout, **scratch}
    numbers = {
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        **strides("q", q),
        **strides("k", k),
        **strides("v", v),
        **strides("do", dout),
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "padded_q": padded_q,
        **bounds,
    }
    constexprs = {
        "GROUP": problem.group,
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        **flags,
        "SOFTCAP": problem.softcap,
        "PRECISION": precision(problem),
    }
    size = problem.dtype.itemsize * (problem.head_dim + problem.head_dim_v)
    made = []

    rows_block = max(16, min(_ROW_BLOCK, _ROWS_ELEMENTS // block_dv))
    num_blocks = padded_q // rows_block
    dl = (0, 0, 0) if dlse is None else dlse.stride()
    args: dict[str, Any] = {
        "out": out,
        "dout": dout,
        "lse": lse,
        "dlse": dlse,
        **scratch,
        **strides("o", out),
        **strides("do", dout),
        "stride_dlb": dl[0],
        "stride_dlh": dl[1],
        "stride_dls": dl[2],
        "seqlen_q": problem.seqlen_q,
        "padded_q": padded_q,
        "num_heads_q": problem.num_heads_q,
        "num_m_blocks": num_blocks,
    }
    row_constexprs = {"HEAD_DIM_V": problem.head_dim_v, "BLOCK_DV": block_dv, "BLOCK_M": rows_block}
    made.append(KernelLaunch(attention_bwd_rows_kernel, (heads_q * num_blocks, 1, 1), args, row_constexprs, 4, 1))

    if dk is not None or dv is not None:
        block_m, block_n = config.dkdv_block_m, config.dkdv_block_n
        num_blocks = -(-problem.seqlen_k // block_n)
        args = {
            **tensors,
            "dk": dk,
            "dv": dv,
            "q_tma": descriptor(use_tma, q, block_m),
            "dout_tma": descriptor(use_tma, dout, block_m),
            "neg_delta_tma": Tma(scratch["neg_delta"], (1, block_m)) if use_tma else None,
            "neg_lse_tma": Tma(scratch["neg_lse"], (1, block_m)) if use_tma else None,
            **numbers,
            **strides("dk", k if dk is None else dk),
            **strides("dv", v if dv is None else dv),
            "num_heads_kv": problem.num_heads_kv,
            "num_heads": heads_kv,
            "num_n_blocks": num_blocks,
            "section": heads_together(problem, problem.group * problem.seqlen_q * size, heads_kv),
        }
        blocks = {
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            # The hardware fills in zeros beyond the last row, and p is 0 there.
            "EVEN_M": use_tma or problem.seqlen_q % block_m == 0,
            "NUM_STAGES": config.dkdv_num_stages,
        }
        made.append(
            KernelLaunch(
                attention_bwd_dkdv_kernel,
                (heads_kv * num_blocks, 1, 1),
                args,
                constexprs | blocks,
                config.dkdv_num_warps,
                config.dkdv_num_stages,
                config.dkdv_maxnreg,
            )
        )

    if dq is not None:
        block_m, block_n = config.dq_block_m, config.dq_block_n
        num_blocks = -(-problem.seqlen_q // block_m)
        args = {
            **tensors,
            "dq": dq,
            "k_tma": descriptor(use_tma, k, block_n),
            "v_tma": descriptor(use_tma, v, block_n),
            **numbers,
            **strides("dq", dq),
            "num_heads_q": problem.num_heads_q,
            "num_heads": heads_q,
            "num_m_blocks": num_blocks,
            "section": heads_together(problem, problem.seqlen_k * size // max(problem.group, 1), heads_q),
        }
        blocks = {
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "EVEN_N": problem.seqlen_k % block_n == 0,
        }
        made.append(
            KernelLaunch(
                attention_bwd_dq_kernel,
                (heads_q * num_blocks, 1, 1),
                args,
                constexprs | blocks,
                config.dq_num_warps,
                config.dq_num_stages,
                config.dq_maxnreg,
            )
        )
    return [launch for launch in made if launch.grid[0]]


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
    launches_in = functools.partial(launches, problem, config, *tensors, 1.0, 0.0)
    return binding.prepare_with_scratch(launches_in, tensors, workspace(problem, config), toolchain.bind)


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
