"""The flash-attn package's functions over ``peakattn.attention``: same names, arguments, layouts and alignment.

Tensors are ``[batch, seqlen, num_heads, head_dim]``, the diagonal ends in the bottom-right corner, and fewer kv heads
than query heads are shared by groups.  ``dropout_p`` and ``alibi_slopes`` are refused.  ``deterministic`` may be
either: the backward always is.
"""

from __future__ import annotations

from typing import Any

import torch

from peakattn.api import attention


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``out``, or ``(out, softmax_lse, None)`` with ``return_attn_probs``: no probabilities exist without dropout."""
    if dropout_p != 0.0:
        raise NotImplementedError(f"dropout_p is {dropout_p}; allowed is 0.0: peakattn has no dropout.")
    if alibi_slopes is not None:
        raise NotImplementedError("alibi_slopes is given; allowed is None: peakattn adds no bias to the scores.")
    options: dict[str, Any] = {
        "causal": causal,
        "window_size": tuple(window_size),
        "softmax_scale": softmax_scale,
        "softcap": softcap if softcap != 0.0 else None,
    }
    if not return_attn_probs:
        return attention(q, k, v, **options)
    out, lse = attention(q, k, v, return_lse=True, **options)
    return out, lse, None


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_func`` on ``kv [batch, seqlen, 2, num_heads_kv, head_dim]``."""
    k, v = _unpacked("kv", kv, 2)
    return flash_attn_func(
        *(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    )


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """``flash_attn_func`` on ``qkv [batch, seqlen, 3, num_heads, head_dim]``."""
    q, k, v = _unpacked("qkv", qkv, 3)
    return flash_attn_func(
        *(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    )


def _unpacked(name: str, packed: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    if not isinstance(packed, torch.Tensor):
        raise TypeError(f"{name} is a {type(packed).__name__}; pass a torch.Tensor.")
    if packed.dim() != 5 or packed.shape[2] != count:
        raise ValueError(f"{name} has shape {tuple(packed.shape)}; it must be [batch, seqlen, {count}, num_heads, head_dim].")
    return packed.unbind(2)
