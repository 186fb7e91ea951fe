"""Forward attention on the CPU.

Two ways to the same result:

- torch's fused kernel, for everything but softcap and unequal head dims.  It knows the full mask and the top-left
  causal one; any other mask is cut into blocks of query rows, each with its visible keys and a ``[block_m, keys]`` bias.
- tiled torch code with an online softmax in float32, for the rest, and again for inputs that are not finite: torch's
  kernel multiplies a masked V by 0 and takes a row of NaN scores for a masked one.

Memory is O(seqlen) on both.  Limited by torch's matrix products; no configs are worth a search on most problems.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable

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

__all__ = ["Config", "default_config", "launch", "prepare", "reject", "search_space"]


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


def prepare(
    problem: AttentionProblem,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> Callable[..., None]:
    """``launch`` for tensors like these. Where one call of torch's kernel does it all, nothing else is left in between."""
    calls = list(itertools.islice(torch_calls(problem, config.block_m), 2)) if _fits_torch(problem, softcap=0.0) else []
    dense = all(heads_first(x).data_ptr() == x.data_ptr() for x in (q, k, v))
    whole = len(calls) == 1 and calls[0].bias is None and calls[0].heads.step == 1 and problem.seqlen_k <= calls[0].keys.stop
    if not (dense and whole):
        return functools.partial(launch, problem, config)
    is_causal = calls[0].is_causal

    def once(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        scale: float,
        softcap: float,
    ) -> None:
        fused = _fused(problem, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal, None, scale)
        if fused is None:
            _launch_tiled(problem, config, q, k, v, out, lse, scale, softcap)
            return
        out.copy_(fused[0].transpose(1, 2))
        if lse is not None:
            lse.copy_(fused[1])

    return once


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
    if not (_fits_torch(problem, softcap) and _launch_torch(problem, config, q, k, v, out, lse, softmax_scale)):
        _launch_tiled(problem, config, q, k, v, out, lse, softmax_scale, softcap)


def _fits_torch(problem: AttentionProblem, softcap: float) -> bool:
    return problem.head_dim == problem.head_dim_v and not (problem.softcap or softcap)


def _fused(
    problem: AttentionProblem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    bias: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Out and lse of torch's kernel, heads first, or None when a number is not finite that a mask or a NaN may have spoilt."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale
    )
    return (out, lse) if all_finite((lse,) if problem.mask_name == "full" else (out, lse)) else None


def _launch_torch(
    problem: AttentionProblem,
    config: Config,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    softmax_scale: float,
) -> bool:
    """True when the result stands; False when a number in it is not finite and the tiled code must decide."""
    q, k, v = (heads_first(x) for x in (q, k, v))
    _clear_rows_without_keys(problem, out, lse)
    for call in torch_calls(problem, config.block_m):
        q_i, k_i, v_i = q[:, call.heads, call.rows], k[:, :, call.keys], v[:, :, call.keys]
        fused = _fused(problem, q_i, k_i, v_i, call.is_causal, call.bias, softmax_scale)
        if fused is None:
            return False
        out[:, call.rows, call.heads] = fused[0].transpose(1, 2)
        if lse is not None:
            lse[:, call.heads, call.rows] = fused[1]
    return True


def _launch_tiled(
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
    _clear_rows_without_keys(problem, out, lse)
    for rows, keys in query_blocks(problem, config.block_m):
        q_i = grouped(q[:, rows], problem.num_heads_kv) * softmax_scale
        m_i = q_i.new_full((*q_i.shape[:3], 1), -math.inf)
        l_i = torch.zeros_like(m_i)
        acc = q_i.new_zeros(*q_i.shape[:3], problem.head_dim_v)
        for block in key_blocks(keys, config.block_n):
            visible = tile_mask(problem, rows, block)
            if visible is not None:
                visible = visible.repeat(problem.group, 1)
            qk = scores(q_i, k[:, block].transpose(1, 2).float(), softcap, visible)
            m_new = torch.maximum(m_i, qk.amax(-1, keepdim=True))
            shift = m_new.masked_fill(m_new == -math.inf, 0.0)  # no key seen yet: -inf - -inf would be NaN
            p = qk.sub_(shift).exp_()
            alpha = torch.exp(m_i - shift)
            l_i = l_i * alpha + p.sum(-1, keepdim=True)
            acc = acc.mul_(alpha).add_(masked_matmul(p, v[:, block].transpose(1, 2).float(), visible))
            m_i = m_new
        num_rows = rows.stop - rows.start
        out[:, rows] = ungrouped(acc / l_i, num_rows).to(out.dtype)
        if lse is not None:
            lse[:, :, rows] = ungrouped(m_i + torch.log(l_i), num_rows).squeeze(-1).transpose(1, 2)


def _clear_rows_without_keys(problem: AttentionProblem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    seen = [rows for rows, _ in query_blocks(problem, max(problem.seqlen_q, 1))]
    start, stop = (seen[0].start, seen[0].stop) if seen else (0, 0)
    for rows in (slice(0, start), slice(stop, problem.seqlen_q)):
        out[:, rows] = 0.0
        if lse is not None:
            lse[:, :, rows] = -math.inf
