"""Backward attention on the CPU: dq, dk and dv, also through lse; deterministic.

The same two ways as the forward.  torch's fused kernel takes everything but softcap, dlse, unequal head dims and
numbers that are not finite; it has no form that computes fewer than all three gradients.  Tiled torch code in float32
takes the rest: per tile it recomputes P from lse, then

    dv += P^T dout     dS = P * (dout V^T - delta)     dq += scale * dS K     dk += scale * dS^T Q

with delta = rowsum(dout * out) - dlse, and dS also times 1 - tanh^2 under softcap.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from peakattn.backends.cpu.tile_ops import (
    Config,
    all_finite,
    grouped,
    heads_first,
    key_blocks,
    masked_matmul,
    query_blocks,
    scores,
    tile_mask,
    torch_calls,
    ungrouped,
)
from peakattn.device import Device
from peakattn.problem import AttentionProblem

__all__ = ["Config", "default_config", "launch", "reject", "search_space"]


def reject(problem: AttentionProblem, device: Device) -> str | None:
    if device.type != "cpu":
        return f"it computes on the CPU, and the tensors are on {device.name}"
    return None


def default_config(problem: AttentionProblem, device: Device) -> Config:
    return Config()


def search_space(problem: AttentionProblem, device: Device) -> Iterable[Config]:
    for block_m in (64, 128, 256, 512):
        for block_n in (128, 256, 512, 1024):
            yield Config(block_m, block_n)


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
    fits = problem.head_dim == problem.head_dim_v and not softcap and dlse is None
    if fits and _launch_torch(problem, config, q, k, v, out, lse, dout, dq, dk, dv, softmax_scale):
        return
    _launch_tiled(problem, config, q, k, v, out, lse, dout, dlse, dq, dk, dv, softmax_scale, softcap)


def _launch_torch(
    problem: AttentionProblem,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    softmax_scale: float,
) -> bool:
    """True when the result stands; False when a number in it is not finite and the tiled code must decide."""
    calls = list(torch_calls(problem, config.block_m))
    grads = (dq, dk, dv)
    sums = grads if len(calls) == 1 else [_zeros(x) for x in grads]
    dtype = problem.dtype if _has_matmul(problem.dtype) else torch.float32
    q, k, v, out, dout = (heads_first(x.to(dtype)) for x in (q, k, v, out, dout))
    for call in calls:
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout[:, call.heads, call.rows],
            q[:, call.heads, call.rows],
            k[:, :, call.keys],
            v[:, :, call.keys],
            out[:, call.heads, call.rows],
            lse[:, call.heads, call.rows],
            0.0,
            call.is_causal,
            attn_mask=call.bias,
            scale=softmax_scale,
        )
        if problem.mask_name != "full" and not all_finite(parts):
            return False
        where = ((call.rows, call.heads), (call.keys, slice(None)), (call.keys, slice(None)))
        for total, (seen, heads), part in zip(sums, where, parts, strict=True):
            if total is None:
                continue
            part = part.transpose(1, 2)
            if len(calls) == 1:
                total[:, seen] = part
                total[:, : seen.start] = 0.0
                total[:, seen.stop :] = 0.0
            else:
                total[:, seen, heads] += part
    if len(calls) != 1:
        _store(grads, sums)
    return True


@functools.cache
def _has_matmul(dtype: torch.dtype) -> bool:
    """Whether the CPU multiplies matrices of this dtype itself.

    Where it does not, torch's backward converts inside its products: 4 to 20 times the time of a float32 backward
    (bfloat16, AVX2, torch 2.13).
    """
    if dtype == torch.float16:
        return torch.cpu._is_amx_fp16_supported()
    return dtype == torch.float32 or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@torch.autocast("cpu", enabled=False)  # backward() may be called inside autocast, which would take the products to bfloat16
def _launch_tiled(
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
    dq_sum, dk_sum, dv_sum = sums = [_zeros(x) for x in (dq, dk, dv)]
    heads = problem.num_heads_kv
    for rows, keys in query_blocks(problem, config.block_m):
        num_rows = rows.stop - rows.start
        q_i, dout_i, out_i = (grouped(x[:, rows], heads) for x in (q, dout, out))
        q_i = q_i * softmax_scale
        lse_i = grouped(lse[:, :, rows].transpose(1, 2).unsqueeze(-1), heads)
        delta = (dout_i * out_i).sum(-1, keepdim=True)
        if dlse is not None:
            delta -= grouped(dlse[:, :, rows].transpose(1, 2).unsqueeze(-1), heads)
        for block in key_blocks(keys, config.block_n):
            k_j, v_j = (x[:, block].transpose(1, 2).float() for x in (k, v))
            visible = tile_mask(problem, rows, block)
            if visible is not None:
                visible = visible.repeat(problem.group, 1)
            masked, seen_by = (None, None) if visible is None else (~visible, visible.T)
            s = scores(q_i, k_j, softcap, visible)
            p = torch.sub(s, lse_i).exp_()
            if masked is not None:
                p.masked_fill_(masked, 0.0)  # a NaN in lse would stand there too
            if dv_sum is not None:
                dv_sum[:, block] += masked_matmul(p.mT, dout_i, seen_by).transpose(1, 2)
            if dq_sum is None and dk_sum is None:
                continue
            ds = (dout_i @ v_j.mT).sub_(delta).mul_(p)
            if softcap:
                ds *= 1.0 - (s / softcap).square()
            if masked is not None:
                ds.masked_fill_(masked, 0.0)
            if dq_sum is not None:
                dq_sum[:, rows] += softmax_scale * ungrouped(masked_matmul(ds, k_j, visible), num_rows)
            if dk_sum is not None:
                dk_sum[:, block] += masked_matmul(ds.mT, q_i, seen_by).transpose(1, 2)
    _store((dq, dk, dv), sums)


def _zeros(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else torch.zeros(grad.shape, dtype=torch.float32)


def _store(grads: Iterable[torch.Tensor | None], sums: Iterable[torch.Tensor | None]) -> None:
    for grad, total in zip(grads, sums, strict=True):
        if grad is not None and total is not None:
            grad.copy_(total)
