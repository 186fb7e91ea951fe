"""Plans: a problem's kernel, config and prepared launch, made once and then only called.

A plan holds for tensors of the shapes, strides, dtypes, device and alignment that it was made from.  The caches are
keyed by those; a hot call is one dictionary hit, the allocation of its outputs, and a launch.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from peakattn import dispatch
from peakattn.device import Device
from peakattn.problem import AttentionProblem, is_aligned, stand_in

# A check that sees types, dtypes, devices, sizes, strides, requires_grad and dispatch keys of some tensors in one call;
# reading all that from Python costs six times as much. Where torch has none, every call looks its plan up.
_TensorGuards: Any
try:
    from torch._C._dynamo.guards import TensorGuards as _TensorGuards
except ImportError:
    _TensorGuards = None

# Plans are small; the bound only keeps a process that never repeats a shape from growing without end.
_MAX_PLANS = 4096

_backward_plans: dict[Any, BackwardPlan] = {}

# Runs before a plan chooses, with the problem, its device, the backend asked for, and the tensors of the call, whose
# outputs are still free to be written. autotune() puts itself here while it is active; otherwise there is nothing.
before_choosing: Callable[[AttentionProblem, Device, str | None, tuple[torch.Tensor | None, ...]], None] | None = None


def new_out(q: torch.Tensor, head_dim_v: int) -> torch.Tensor:
    """An uninitialised ``[batch, seqlen_q, num_heads_q, head_dim_v]`` in q's memory order."""
    if head_dim_v == q.shape[-1]:
        return torch.empty_like(q)
    strides = q.stride()
    order = sorted(range(4), key=lambda i: -strides[i])
    shape = (*q.shape[:-1], head_dim_v)
    out = q.new_empty([shape[i] for i in order])
    return out.permute([order.index(i) for i in range(4)])


def new_lse(q: torch.Tensor) -> torch.Tensor:
    """An uninitialised float32 ``[batch, num_heads_q, seqlen_q]``."""
    return torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)


def check_of(*tensors: torch.Tensor) -> Callable[..., bool] | None:
    """Tells tensors like these from others, but for their addresses and the grad mode; None where torch cannot."""
    if _TensorGuards is None:
        return None
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    check: Callable[..., bool] = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


class ForwardPlan:
    """One forward problem, ready to be called. ``low_bits`` are those that no address of q, k or v may have set.

    ``addresses``, where there is one, launches on the addresses of q, k, v, out and lse; ``simple`` is the same for a plan
    that needs no more than that, an ``empty_like(q)`` and no lse: the shortest road that a call can take.  ``backwards``
    are the last backward plans of its calls, by what they compute, each with a check of q, k, v, out and dout.
    """

    __slots__ = (
        "_launch",
        "_like",
        "_lse_like",
        "addresses",
        "backend",
        "backwards",
        "choice",
        "low_bits",
        "needs_grad",
        "problem",
        "scale",
        "simple",
    )

    def __init__(
        self,
        problem: AttentionProblem,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        backend: str | None = None,
        config: Any = None,
        needs_grad: bool = False,
    ) -> None:
        self.problem = problem
        self.needs_grad = needs_grad
        self.backend = backend
        self.backwards: dict[Any, tuple[Callable[..., bool], BackwardPlan]] = {}
        self.scale = 1.0 / math.sqrt(problem.head_dim)
        self.low_bits = 15 if problem.aligned else 0
        self._like = problem.head_dim_v == problem.head_dim
        self._lse_like = (
            stand_in((problem.batch, problem.num_heads_q, problem.seqlen_q), torch.float32, q.device)
            if problem.return_lse
            else None
        )
        self.choice: dispatch.Choice | None = None
        self._launch: Callable[..., None] = _no_keys
        self.addresses: Callable[[Any], None] | None = None
        self.simple: Callable[[Any], None] | None = None
        if problem.empty or problem.seqlen_k == 0:
            return
        device = Device.of(q.device)
        tensors = (q, k, v, new_out(q, problem.head_dim_v), new_lse(q) if problem.return_lse else None)
        if before_choosing is not None and config is None:
            before_choosing(problem, device, backend, tensors)
        self.choice = choice = dispatch.choose(problem, device, backend, config)
        self._launch = prepared(choice.kernel, problem, choice.config, tensors, q.device)
        self.addresses = getattr(self._launch, "addresses", None)
        self.simple = self.addresses if self._like and not problem.return_lse else None

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, softcap: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``out``, and ``lse`` when the problem returns it."""
        out = torch.empty_like(q) if self._like else new_out(q, self.problem.head_dim_v)
        lse = None
        if self._lse_like is not None:
            lse = torch.empty_like(self._lse_like)
        if self.addresses is not None:
            lse_address = 0 if lse is None else lse.data_ptr()
            self.addresses((q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse_address, softmax_scale, softcap))
        else:
            self._launch(q, k, v, out, lse, softmax_scale, softcap)
        return out, lse


class BackwardPlan:
    """One backward problem, ready to be called."""

    __slots__ = ("_launch", "choice", "problem")

    def __init__(
        self, problem: AttentionProblem, tensors: tuple[torch.Tensor | None, ...], device: torch.device, backend: str | None
    ) -> None:
        self.problem = problem
        backend = dispatch.backward_backend(backend)
        if before_choosing is not None:
            before_choosing(problem, Device.of(device), backend, tensors)
        self.choice = dispatch.choose(problem, Device.of(device), backend)
        self._launch = prepared(self.choice.kernel, problem, self.choice.config, tensors, device)

    def __call__(self, *args: Any) -> None:
        self._launch(*args)


def backward(
    forward: AttentionProblem,
    backend: str | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    needs: tuple[bool, bool, bool],
    softmax_scale: float,
    softcap: float,
    known: dict[Any, tuple[Callable[..., bool], BackwardPlan]] | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Those of dq, dk and dv that ``needs`` asks for, in the memory orders of q, k and v.

    ``known`` is the ``backwards`` of the forward's plan: looked in first, and added to.
    """
    if forward.empty or forward.seqlen_k == 0:
        dq, dk, dv = (torch.zeros_like(x) if need else None for x, need in zip((q, k, v), needs, strict=True))
        return dq, dk, dv
    dq = torch.empty_like(q) if needs[0] else None
    dk = torch.empty_like(k) if needs[1] else None
    dv = torch.empty_like(v) if needs[2] else None
    if dlse is not None:
        dlse = dlse.contiguous()
    kind = None
    if known is not None:
        addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr() | dout.data_ptr()
        kind = (needs, dlse is None, addresses & 15 == 0)
        found = known.get(kind)
        if found is not None and found[0](q, k, v, out, dout):
            found[1](q, k, v, out, lse, dout, dlse, dq, dk, dv, softmax_scale, softcap)
            return dq, dk, dv
    tensors = (q, k, v, out, lse, dout, dlse, dq, dk, dv)
    wide = (q, k, v, out, dout)
    aligned = all(is_aligned(x) for x in wide)
    key = (forward, backend, needs, dlse is None, aligned, q.device.index, tuple(x.stride() for x in wide))
    plan = _backward_plans.get(key)
    if plan is None:
        problem = forward.backward(needs_dq=needs[0], needs_dk=needs[1], needs_dv=needs[2], aligned=aligned)
        plan = remember(_backward_plans, key, BackwardPlan(problem, tensors, q.device, backend))
    if known is not None:
        check = check_of(*wide)
        if check is not None:
            known[kind] = check, plan
    plan(*tensors, softmax_scale, softcap)
    return dq, dk, dv


def remember(plans: dict[Any, Any], key: Any, plan: Any) -> Any:
    """Puts a plan into a cache, which forgets its oldest when it is full."""
    if len(plans) >= _MAX_PLANS:
        plans.pop(next(iter(plans)), None)
    plans[key] = plan
    return plan


def prepared(
    kernel: ModuleType, problem: AttentionProblem, config: Any, tensors: tuple[torch.Tensor | None, ...], device: torch.device
) -> Callable[..., None]:
    """The kernel's launch for tensors like these, on their device even when another one is current."""
    launch: Callable[..., None] = functools.partial(kernel.launch, problem, config)
    prepare = getattr(kernel, "prepare", None)
    if prepare is not None:
        with _current(device):
            # A kernel tells arguments apart by identity, and attention(x, x, x) must not teach it that q, k and v are one.
            launch = prepare(problem, config, *(None if t is None else t.detach() for t in tensors))
    if device.type != "cuda" or torch.cuda.device_count() == 1:
        return launch

    def guarded(*args: Any) -> None:
        with _current(device):
            launch(*args)

    return guarded


def _no_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, scale: float, softcap: float
) -> None:
    out.zero_()
    if lse is not None:
        lse.fill_(-math.inf)


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
