"""attention as PyTorch sees it: the autograd function of eager calls, and the custom ops that tracing needs.

``torch.ops.peakattn.attention_fwd`` and ``attention_bwd`` are opaque to torch.compile, have fakes whose strides equal
the eager ones, and carry autograd and vmap rules.  Eager calls use ``Attention`` instead: a custom op costs more on
the host than a whole launch.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from peakattn.plan import ForwardPlan, backward, new_lse, new_out, remember
from peakattn.problem import AttentionProblem, check_tensors

_plans: dict[Any, ForwardPlan] = {}


class Attention(torch.autograd.Function):
    """Eager autograd: ``differentiable(q, k, v, (plan, softmax_scale, softcap, return_lse))``."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: tuple[ForwardPlan, float, float, bool]
    ) -> Any:
        plan, scale, softcap, return_lse = call
        out, lse = plan(q, k, v, scale, softcap)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        if not return_lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None = None) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        plan, scale, softcap, _ = ctx.call
        if dout is None and dlse is None:
            return None, None, None, None
        if dout is None:
            dout = torch.zeros_like(out)
        needs = ctx.needs_input_grad[:3]
        tensors = (q, k, v, out, lse, dout, dlse)
        return (*backward(plan.problem, plan.backend, *tensors, needs, scale, softcap, plan.backwards), None)


# Function.apply first unwraps arguments of torch.func transforms, which never come this way: its base goes straight on.
differentiable = super(torch.autograd.Function, Attention).apply


@torch.library.custom_op("peakattn::attention_fwd", mutates_args=())
def attention_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window_left: int | None = None,
    window_right: int | None = None,
    alignment: str = "bottom_right",
    softmax_scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = True,
    backend: str | None = None,
    config: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out`` and ``lse``; lse is an empty tensor unless ``return_lse``. Causal is ``window_right=0``; config is JSON."""
    plan = _plan(q, k, v, (window_left, window_right), alignment, softcap, return_lse, backend, config)
    out, lse = plan(q, k, v, plan.scale if softmax_scale is None else softmax_scale, softcap or 0.0)
    return out, q.new_empty(0, dtype=torch.float32) if lse is None else lse


@attention_fwd.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window_left: int | None = None,
    window_right: int | None = None,
    alignment: str = "bottom_right",
    softmax_scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = True,
    backend: str | None = None,
    config: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_tensors(q, k, v)
    return new_out(q, v.shape[-1]), new_lse(q) if return_lse else q.new_empty(0, dtype=torch.float32)


@torch.library.custom_op("peakattn::attention_bwd", mutates_args=())
def attention_bwd(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    window_left: int | None,
    window_right: int | None,
    alignment: str,
    softmax_scale: float | None,
    softcap: float | None,
    needs: list[bool],
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``dq``, ``dk`` and ``dv``; one that ``needs`` does not ask for is an empty tensor."""
    problem = AttentionProblem.of(q, k, v, window_size=(window_left, window_right), softcap=softcap, alignment=alignment)
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    needed = (needs[0], needs[1], needs[2])
    grads = backward(problem, backend, q, k, v, out, lse, dout, dlse, needed, scale, softcap or 0.0)
    dq, dk, dv = (q.new_empty(0) if g is None else g for g in grads)
    return dq, dk, dv


@attention_bwd.register_fake
def _(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    window_left: int | None,
    window_right: int | None,
    alignment: str,
    softmax_scale: float | None,
    softcap: float | None,
    needs: list[bool],
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (torch.empty_like(x) if need else q.new_empty(0) for x, need in zip((q, k, v), needs, strict=True))
    return dq, dk, dv


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, left, right, alignment, scale, softcap, return_lse, backend, _ = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)
    ctx.options = left, right, alignment, scale, softcap
    ctx.return_lse, ctx.backend = return_lse, backend


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
    q, k, v, out, lse = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 11
    if not ctx.return_lse:
        raise RuntimeError(
            "attention_fwd was called with return_lse=False and has no lse for its backward; pass return_lse=True."
        )
    if dout is None:
        dout = torch.zeros_like(out)
    needs = list(ctx.needs_input_grad[:3])
    op = TransformedBackward.apply if torch._C._are_functorch_transforms_active() else torch.ops.peakattn.attention_bwd
    grads = op(dout, dlse, q, k, v, out, lse, *ctx.options, needs, ctx.backend)
    return (*(g if need else None for g, need in zip(grads, needs, strict=True)), *(None,) * 8)


torch.library.register_autograd("peakattn::attention_fwd", _backward, setup_context=_setup_context)


class Transformed(torch.autograd.Function):
    """The custom op for torch.func transforms, which do not take a custom op's own autograd rule."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return torch.ops.peakattn.attention_fwd(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        _setup_context(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return _backward(ctx, *grads)


class TransformedBackward(torch.autograd.Function):
    """``attention_bwd`` for torch.func transforms."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return torch.ops.peakattn.attention_bwd(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError(
            "peakattn.attention has no double backward; use F.scaled_dot_product_attention with its math backend."
        )


@attention_fwd.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
    folded = [_fold(x, dim, info.batch_size) for x, dim in zip(args[:3], in_dims[:3], strict=True)]
    out, lse = torch.ops.peakattn.attention_fwd(*folded, *args[3:])
    return_lse = args[8] if len(args) > 8 else True
    return (_unfold(out, info.batch_size), _unfold(lse, info.batch_size) if return_lse else lse), (0, 0 if return_lse else None)


@attention_bwd.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
    folded = [None if x is None else _fold(x, dim, info.batch_size) for x, dim in zip(args[:7], in_dims[:7], strict=True)]
    grads = torch.ops.peakattn.attention_bwd(*folded, *args[7:])
    needs = args[12]
    return tuple(_unfold(g, info.batch_size) if need else g for g, need in zip(grads, needs, strict=True)), tuple(
        0 if need else None for need in needs
    )


def _fold(x: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """The vmapped dimension folded into the batch."""
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _unfold(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.unflatten(0, (size, -1))


def _plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window_size: tuple[int | None, int | None],
    alignment: str,
    softcap: float | None,
    return_lse: bool,
    backend: str | None,
    config: str | None,
) -> ForwardPlan:
    aligned = not (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
    shapes = (
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
    )
    key = (shapes, window_size, alignment, softcap is None, return_lse, backend, config, aligned)
    plan = _plans.get(key)
    if plan is None:
        problem = AttentionProblem.of(
            q, k, v, window_size=window_size, softcap=softcap, alignment=alignment, return_lse=return_lse
        )
        given = None if config is None else json.loads(config)
        plan = remember(_plans, key, ForwardPlan(problem, q, k, v, backend, given))
    return plan
