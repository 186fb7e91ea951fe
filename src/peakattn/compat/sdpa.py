"""``torch.nn.functional.scaled_dot_product_attention``'s signature and semantics over ``peakattn.attention``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from peakattn.api import attention
from peakattn.dispatch import NoKernelError


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    fallback: bool = False,
) -> torch.Tensor:
    """Attention over ``[..., num_heads, seqlen, head_dim]``, or ``[num_heads, seqlen, head_dim]``.

    As torch's function: ``is_causal`` aligns the diagonal to the top-left corner, ``enable_gqa`` lets groups of query
    heads share a kv head, and without it the leading dimensions broadcast. ``attn_mask`` and ``dropout_p`` are
    refused; with ``fallback=True`` torch computes whatever is refused here.
    """
    try:
        _refuse(attn_mask, dropout_p)
        return _attention(query, key, value, is_causal, scale, enable_gqa)
    except (TypeError, ValueError, NotImplementedError, NoKernelError):
        if not fallback:
            raise
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _refuse(attn_mask: torch.Tensor | None, dropout_p: float) -> None:
    if attn_mask is not None:
        raise NotImplementedError(
            "attn_mask is not supported: peakattn computes full, causal and windowed masks from their rule. Use "
            "is_causal=True, or peakattn.attention(window_size=...), or fallback=True to let torch compute this call."
        )
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"dropout_p is {dropout_p}; allowed is 0.0. Pass fallback=True to let torch compute calls with dropout."
        )


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float | None, enable_gqa: bool
) -> torch.Tensor:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; pass a torch.Tensor of [..., num_heads, seqlen, head_dim].")
        if x.dim() < 3:
            raise ValueError(
                f"{name} has {x.dim()} dimensions, shape {tuple(x.shape)}; it must be [..., num_heads, seqlen, head_dim] "
                "with at least three."
            )
    # Heads share kv heads when asked to; every other leading dimension broadcasts.
    shared = 3 if enable_gqa else 2
    try:
        lead = torch.broadcast_shapes(*(x.shape[:-shared] for x in (query, key, value)))
    except RuntimeError:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("query", query), ("key", key), ("value", value)))
        raise ValueError(
            f"the leading dimensions of {shapes} do not broadcast; make them equal, or pass enable_gqa=True where "
            "groups of query heads share a kv head."
        ) from None
    q, k, v = (x.expand(*lead, *x.shape[-shared:]) for x in (query, key, value))
    shape = q.shape[:-1]
    q, k, v = (x.flatten(0, -4) if x.dim() > 4 else x[None] if x.dim() == 3 else x for x in (q, k, v))
    out = attention(
        *(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)), causal=is_causal, softmax_scale=scale, alignment="top_left"
    )
    return out.transpose(1, 2).reshape(*shape, value.shape[-1])
