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
``overlap`` and a second block on the same SM let them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from peakattn.backends.triton import toolchain
from peakattn.backends.triton.tile_ops import (
    LN2,
    LOG2E,
    REGISTERS_FOR_TILES,
    addressable,
    any_nan,
    check_launch_knobs,
    descriptor,
    has_tma,
    heads_together,
    key_blocks,
    load_row,
    load_tile,
    mask_arguments,
    padded,
    power_of_two,
    precision,
    program_block,
    smem_bytes,
    store_tile,
    strides,
    tanh,
    unsupported,
    visible,
)
from peakattn.backends.triton.toolchain import KernelLaunch
from peakattn.device import Device
from peakattn.problem import AttentionProblem

# Base-2 scores beyond this are rounded by more than half, so that exp2(score - max) could miss 1 by any factor.
_EXACT = tl.constexpr(2.0**24)


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


@triton.jit
def _row_scale(m, qk_scale, power_scale):
    return tl.where(tl.abs(m) * qk_scale < _EXACT, qk_scale, power_scale)


@triton.jit
def _softmax(s, m_i, shift_i, l_i, qk_scale, power_scale, MASK: tl.constexpr):
    """Weights of a score tile, and the running maximum, its scaled value, the sum, and the factor for what came before.

    The weight is exp2(s * qk_scale - shift) in one FMA, with shift = max * qk_scale rounded.  The rounding is the same
    for the whole row and cancels, unless it is so large that exp2 of it overflows: such rows use the power of two above
    qk_scale, with which the product is exact.  Their scores differ by more than rounding or not at all.
    """
    m_new = tl.maximum(m_i, tl.max(s, 1))
    row_scale = _row_scale(m_new, qk_scale, power_scale)
    shift = m_new * row_scale
    origin = shift
    if MASK:
        origin = tl.where(m_new == float("-inf"), 0.0, shift)
    p = tl.exp2(s * row_scale[:, None] - origin[:, None])
    alpha = tl.exp2(shift_i - origin)
    return p, m_new, shift, l_i * alpha + tl.sum(p, 1), alpha


@triton.jit
def _repair(
    q,
    k,
    v,
    stride_qs,
    stride_qd,
    stride_ks,
    stride_kd,
    stride_vs,
    stride_vd,
    m_i,
    shift_i,
    m_offset,
    seqlen_q,
    first_key,
    last_key,
    offset,
    window_left,
    window_right,
    qk_scale,
    power_scale,
    cap_scale,
    softcap,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """The unnormalised output with masked keys selected away instead of multiplied by 0."""
    rows = m_offset + tl.arange(0, BLOCK_M)
    q_tile = load_tile(None, q, stride_qs, stride_qd, 0, 0, m_offset, seqlen_q, BLOCK_M, HEAD_DIM, BLOCK_D, True).to(tl.float32)
    row_scale = _row_scale(m_i, qk_scale, power_scale)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for key in tl.range(first_key, last_key, num_stages=1):
        k_row = load_row(k, stride_ks, stride_kd, key, HEAD_DIM, BLOCK_D)
        v_row = load_row(v, stride_vs, stride_vd, key, HEAD_DIM_V, BLOCK_DV)
        s = tl.sum(q_tile * k_row[None, :], 1)
        if SOFTCAP:
            s = softcap * tanh(s * cap_scale, False)
        p = tl.exp2(s * row_scale - shift_i)
        seen = visible(rows, key, offset, window_left, window_right, HAS_LEFT, HAS_RIGHT)
        acc += tl.where(seen[:, None], p[:, None] * v_row[None, :], 0.0)
    return acc


@triton.jit
def attention_fwd_kernel(
    q,
    k,
    v,
    out,
    lse,
    q_tma,
    k_tma,
    v_tma,
    softmax_scale,
    softcap,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_qd,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_kd,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_vd,
    stride_ob,
    stride_os,
    stride_oh,
    stride_od,
    seqlen_q,
    seqlen_k,
    num_heads_q,
    num_heads,
    num_m_blocks,
    section,
    offset,
    window_left,
    window_right,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    EVEN_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    m_block, head = program_block(num_m_blocks, num_heads, section, HAS_RIGHT)
    batch = head // num_heads_q
    head_q = head % num_heads_q
    head_kv = head_q // GROUP
    m_offset = m_block * BLOCK_M
    q += batch.to(tl.int64) * stride_qb + head_q.to(tl.int64) * stride_qh
    k += batch.to(tl.int64) * stride_kb + head_kv.to(tl.int64) * stride_kh
    v += batch.to(tl.int64) * stride_vb + head_kv.to(tl.int64) * stride_vh
    out += batch.to(tl.int64) * stride_ob + head_q.to(tl.int64) * stride_oh
    n_block_min, full_min, full_max, n_block_max = key_blocks(
        m_offset, seqlen_q, seqlen_k, offset, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    # Scores in base 2 are s * qk_scale; capped scores have the user's scale inside them already.
    qk_scale = tl.full([], LOG2E, tl.float32) if SOFTCAP else softmax_scale * LOG2E
    cap_scale = softmax_scale / softcap if SOFTCAP else softmax_scale
    power_scale = ((qk_scale.to(tl.int32, bitcast=True) & 0x7F800000) + 0x00800000).to(tl.float32, bitcast=True)

    rows = m_offset + tl.arange(0, BLOCK_M)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    shift_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    q_tile = load_tile(q_tma, q, stride_qs, stride_qd, batch, head_q, m_offset, seqlen_q, BLOCK_M, HEAD_DIM, BLOCK_D, True)

    last = n_block_max
    if OVERLAP:
        last = tl.maximum(n_block_max - 1, n_block_min)
        full_min = tl.minimum(full_min, last)
        full_max = tl.minimum(full_max, last)
        k_tile = load_tile(
            k_tma, k, stride_ks, stride_kd, batch, head_kv, n_block_min * BLOCK_N, seqlen_k, BLOCK_N, HEAD_DIM, BLOCK_D, True
        )
        s_next = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)
    # 0: the left edge of a window, 1: no mask, 2: the right edge or the end of the keys, 3: the last block under OVERLAP.
    for PHASE in tl.static_range(4):
        if (PHASE == 0 and HAS_LEFT) or PHASE == 1 or (PHASE == 2 and (HAS_RIGHT or not EVEN_N)) or (PHASE == 3 and OVERLAP):
            begin = n_block_min if PHASE == 0 else full_min if PHASE == 1 else full_max if PHASE == 2 else last
            end = full_min if PHASE == 0 else full_max if PHASE == 1 else last if PHASE == 2 else n_block_max
            for n_block in tl.range(begin, end):
                n_offset = n_block * BLOCK_N
                if OVERLAP:
                    s = s_next
                if not OVERLAP or PHASE != 3:
                    k_tile = load_tile(
                        k_tma,
                        k,
                        stride_ks,
                        stride_kd,
                        batch,
                        head_kv,
                        n_offset + BLOCK_N if OVERLAP else n_offset,
                        seqlen_k,
                        BLOCK_N,
                        HEAD_DIM,
                        BLOCK_D,
                        not EVEN_N and (OVERLAP or PHASE != 1),
                    )
                    s_next = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)
                if not OVERLAP:
                    s = s_next
                if SOFTCAP:
                    s = softcap * tanh(s * cap_scale, q_tile.dtype == tl.float32)
                if PHASE != 1 and (HAS_LEFT or HAS_RIGHT or not EVEN_N):
                    keys = n_offset + tl.arange(0, BLOCK_N)
                    seen = (keys < seqlen_k)[None, :]
                    if HAS_LEFT or HAS_RIGHT:
                        seen &= visible(rows[:, None], keys[None, :], offset, window_left, window_right, HAS_LEFT, HAS_RIGHT)
                    s = tl.where(seen, s, float("-inf"))
                p, m_i, shift_i, l_i, alpha = _softmax(s, m_i, shift_i, l_i, qk_scale, power_scale, PHASE != 1)
                v_tile = load_tile(
                    v_tma,
                    v,
                    stride_vs,
                    stride_vd,
                    batch,
                    head_kv,
                    n_offset,
                    seqlen_k,
                    BLOCK_N,
                    HEAD_DIM_V,
                    BLOCK_DV,
                    not EVEN_N and PHASE != 1,
                )
                acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)

    if HAS_LEFT or HAS_RIGHT:  # noqa: SIM102
        if any_nan(acc):
            acc = _repair(
                q,
                k,
                v,
                stride_qs,
                stride_qd,
                stride_ks,
                stride_kd,
                stride_vs,
                stride_vd,
                m_i,
                shift_i,
                m_offset,
                seqlen_q,
                n_block_min * BLOCK_N,
                tl.minimum(n_block_max * BLOCK_N, seqlen_k),
                offset,
                window_left,
                window_right,
                qk_scale,
                power_scale,
                cap_scale,
                softcap,
                BLOCK_M,
                HEAD_DIM,
                HEAD_DIM_V,
                BLOCK_D,
                BLOCK_DV,
                HAS_LEFT,
                HAS_RIGHT,
                SOFTCAP,
            )
    # A row without a visible key has sum 0 and keeps its acc of 0.
    acc = acc * (1.0 / tl.where(l_i == 0.0, 1.0, l_i))[:, None]
    store_tile(out, stride_os, stride_od, m_offset, seqlen_q, acc, BLOCK_M, HEAD_DIM_V, BLOCK_DV)
    if lse is not None:
        # The maximum in the natural base, rounded once, and what the sum is relative to: the maximum's shift, rounded too.
        rounding = m_i * _row_scale(m_i, qk_scale, power_scale) - shift_i
        rounding = tl.where(m_i == float("-inf"), 0.0, rounding)
        natural = 1.0 if SOFTCAP else softmax_scale
        lse_rows = lse + head.to(tl.int64) * seqlen_q + rows
        tl.store(lse_rows, m_i * natural + (tl.log2(l_i) - rounding) * LN2, mask=rows < seqlen_q)


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
