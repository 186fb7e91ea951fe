"""attention(): the public call. Its docstring is the mathematics; everything it means is in problem.py."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch.compiler import is_dynamo_compiling

from peakattn import dispatch, ops
from peakattn.device import Device
from peakattn.plan import ForwardPlan, check_of, remember
from peakattn.problem import AttentionProblem, check_options, check_tensors

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))

_active_modes = torch._C._len_torch_dispatch_stack

_MAX_RECENT = 4

_plans: dict[Any, ForwardPlan] = {}
# Options -> the last few plans under them, each with a check of q, k and v.
_recent: dict[Any, tuple[tuple[Callable[..., bool], ForwardPlan], ...]] = {}


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = ...,
    window_size: tuple[int | None, int | None] | None = ...,
    softmax_scale: float | None = ...,
    softcap: float | None = ...,
    alignment: str = ...,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
    config: Any = ...,
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = ...,
    window_size: tuple[int | None, int | None] | None = ...,
    softmax_scale: float | None = ...,
    softcap: float | None = ...,
    alignment: str = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
    config: Any = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    alignment: str = "bottom_right",
    return_lse: bool = False,
    backend: str | None = None,
    config: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention, differentiable in q, k and v.

    ::

        s[i, j] = softmax_scale * <q[i], k[j]>            then softcap * tanh(s / softcap) when softcap is given
        p[i, :] = softmax of s[i, j] over the visible j   out[i] = sum_j p[i, j] v[j]
        lse[i]  = log(sum over visible j of exp(s[i, j]))

        j is visible from i when  i + offset - left <= j <= i + offset + right
        offset = seqlen_k - seqlen_q for alignment "bottom_right", 0 for "top_left"
        (left, right) = window_size, None or -1 for an unlimited side; causal caps right at 0

    Args:
        q: ``[batch, seqlen_q, num_heads_q, head_dim]``, float16, bfloat16 or float32, any strides.
        k: ``[batch, seqlen_k, num_heads_kv, head_dim]``; num_heads_kv divides num_heads_q, and query head h reads
            kv head ``h // (num_heads_q // num_heads_kv)``.
        v: ``[batch, seqlen_k, num_heads_kv, head_dim_v]``. head_dim and head_dim_v are 1 to 256.
        causal: hide the keys after a query's own position.
        window_size: ``(left, right)``: how many keys before and after a query's position it sees.
        softmax_scale: any finite number; default ``1 / sqrt(head_dim)``.
        softcap: a positive bound on the scores, as in Gemma 2.
        alignment: which corner of the score matrix the diagonal ends in, "bottom_right" or "top_left".
        return_lse: also return ``lse``, natural log, float32, ``[batch, num_heads_q, seqlen_q]``, differentiable.
        backend: a backend ("triton") or a kernel ("triton.fwd_sm90") that must be used; never another instead.
        config: the kernel's Config, or a dict of its fields, instead of the tuned or default one.

    Returns:
        ``out [batch, seqlen_q, num_heads_q, head_dim_v]`` in q's dtype and memory order, or ``(out, lse)``.
        A query that sees no key has out 0, lse -inf and no gradient.

    Raises:
        TypeError, ValueError: an argument is wrong; the sentence says which, and what is allowed.
        NoKernelError: no kernel takes the problem; the message lists each kernel's reason.

    The algorithm is FlashAttention-2 (Dao, arXiv:2307.08691): online softmax over tiles of keys, O(seqlen) memory.
    """
    if is_dynamo_compiling():
        return _traceable(q, k, v, causal, window_size, softmax_scale, softcap, alignment, return_lse, backend, config)
    options = (causal, window_size, alignment, softcap is None, return_lse, backend, config)
    plan = None
    try:
        for check, recent in _recent.get(options, ()):
            if check(q, k, v):
                plan = recent
                break
    except TypeError:  # an unhashable option, such as a config given as a dict
        pass
    if plan is None or (plan.needs_grad and not torch.is_grad_enabled()) or _active_modes():
        return _unprepared(
            options, q, k, v, causal, window_size, softmax_scale, softcap, alignment, return_lse, backend, config
        )
    q_address, k_address, v_address = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if (
        (q_address | k_address | v_address) & plan.low_bits
        or not (softmax_scale is None or (type(softmax_scale) is float and 0 < softmax_scale < math.inf))
        or not (softcap is None or (type(softcap) is float and 0 < softcap < math.inf))
    ):
        return _unprepared(
            options, q, k, v, causal, window_size, softmax_scale, softcap, alignment, return_lse, backend, config
        )
    if softmax_scale is None:
        softmax_scale = plan.scale
    if softcap is None:
        softcap = 0.0
    if plan.simple is not None:
        out = torch.empty_like(q)
        plan.simple((q_address, k_address, v_address, out.data_ptr(), 0, softmax_scale, softcap))
        return out
    if plan.needs_grad:
        return ops.differentiable(q, k, v, (plan, softmax_scale, softcap, return_lse))
    out, lse = plan(q, k, v, softmax_scale, softcap)
    return (out, lse) if return_lse else out  # type: ignore[return-value]


def explain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, backend: str | None = None, config: Any = None, **options: Any
) -> str:
    """Which kernel and config ``attention`` would use for this call, and why every other kernel refuses.

    Takes the arguments of ``attention``; nothing is compiled or launched.
    """
    problem = AttentionProblem.of(q, k, v, **options)
    return describe(problem, Device.of(q.device), backend, config)


def describe(problem: AttentionProblem, device: Device, backend: str | None = None, config: Any = None) -> str:
    """``explain`` for a problem and a device that need not be here."""
    lines = [f"{problem} on {device.name}"]
    if problem.empty or problem.seqlen_k == 0:
        return lines[0] + "\nno kernel is needed: there is nothing to compute"
    try:
        choice = dispatch.choose(problem, device, backend, config)
    except dispatch.NoKernelError as error:
        return str(error)
    lines.append(f"chosen: {choice}")
    lines += [f"refused: {kernel_id}: {reason}" for kernel_id, reason in choice.refusals.items()]
    return "\n".join(lines)


def _positive_scale(q: torch.Tensor, softmax_scale: float) -> tuple[torch.Tensor, float]:
    """Kernels fold a positive scale into the exponential; any other sign goes into q, and autograd carries it back."""
    check_options(False, None, softmax_scale, None, "bottom_right")
    if softmax_scale > 0:
        return q, float(softmax_scale)
    return (-q, -float(softmax_scale)) if softmax_scale < 0 else (q * 0, 1.0)


def _unprepared(
    options: tuple[Any, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window_size: tuple[int | None, int | None] | None,
    softmax_scale: float | None,
    softcap: float | None,
    alignment: str,
    return_lse: bool,
    backend: str | None,
    config: Any,
) -> Any:
    """A call that no recent plan fits: everything is checked, and the plan is found or made.

    ``options`` is what ``_recent`` files the plan under.
    """
    if (
        type(q) not in _PLAIN
        or type(k) not in _PLAIN
        or type(v) not in _PLAIN
        or q.is_meta
        or _active_modes()
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_any_autocast_enabled()
    ):
        return _traceable(q, k, v, causal, window_size, softmax_scale, softcap, alignment, return_lse, backend, config)
    given = q
    if softmax_scale is not None:
        q, softmax_scale = _positive_scale(q, softmax_scale)
    requires_grad = q.requires_grad or k.requires_grad or v.requires_grad
    needs_grad = requires_grad and torch.is_grad_enabled()
    problem = AttentionProblem.of(
        *(q, k, v),
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alignment=alignment,
        return_lse=return_lse or needs_grad,
    )
    strides = (q.stride(), k.stride(), v.stride())
    try:
        key: Any = (problem, *strides, q.device, backend, config, needs_grad)
        plan = _plans.get(key)
    except TypeError:
        key = plan = None
    if plan is None:
        plan = ForwardPlan(problem, q, k, v, backend, config, needs_grad)
        if key is not None:
            remember(_plans, key, plan)
    # A check sees requires_grad but not the grad mode: a plan for such tensors under no_grad could be taken for training.
    check = check_of(q, k, v) if key is not None and q is given and needs_grad == requires_grad else None
    if check is not None:
        others = [pair for pair in _recent.get(options, ()) if pair[1] is not plan]
        # Plans for any address come last: a check does not see addresses, and they would serve aligned tensors too.
        _recent[options] = tuple(sorted([(check, plan), *others][:_MAX_RECENT], key=lambda pair: not pair[1].low_bits))
    scale, cap = plan.scale if softmax_scale is None else softmax_scale, 0.0 if softcap is None else float(softcap)
    if needs_grad:
        return ops.differentiable(q, k, v, (plan, scale, cap, return_lse))
    out, lse = plan(q, k, v, scale, cap)
    return (out, lse) if return_lse else out


def _traceable(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window_size: tuple[int | None, int | None] | None,
    softmax_scale: float | None,
    softcap: float | None,
    alignment: str,
    return_lse: bool,
    backend: str | None,
    config: Any,
) -> Any:
    """The same call through the custom op: under torch.compile, torch.func, autocast, fake tensors and subclasses."""
    tensors = all(isinstance(x, torch.Tensor) for x in (q, k, v))
    device = q.device.type if tensors else "meta"
    if device != "meta" and torch.is_autocast_enabled(device):
        # Before check_tensors: one dtype is what autocast is asked for.
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        with torch.autocast(device, enabled=False):
            return attention(
                *(q, k, v),
                causal=causal,
                window_size=window_size,
                softmax_scale=softmax_scale,
                softcap=softcap,
                alignment=alignment,
                return_lse=return_lse,  # type: ignore[call-overload]
                backend=backend,
                config=config,
            )
    check_tensors(q, k, v)
    left, right = check_options(causal, window_size, softmax_scale, softcap, alignment)
    if softmax_scale is not None and softmax_scale <= 0:
        q, softmax_scale = _positive_scale(q, softmax_scale)
    transformed = torch._C._are_functorch_transforms_active()
    needs_grad = torch.is_grad_enabled() and (transformed or q.requires_grad or k.requires_grad or v.requires_grad)
    encoded = None if config is None else _encode(config)
    op = ops.Transformed.apply if transformed else torch.ops.peakattn.attention_fwd
    out, lse = op(q, k, v, left, right, alignment, softmax_scale, softcap, return_lse or needs_grad, backend, encoded)
    return (out, lse) if return_lse else out


def _encode(config: Any) -> str:
    return json.dumps(config if isinstance(config, dict) else dataclasses.asdict(config))


# What torch.compiler.assume_constant_result does, without importing all of Dynamo at `import peakattn`.
_encode._dynamo_marked_constant = True  # type: ignore[attr-defined]
