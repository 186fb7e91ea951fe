"""The oracle: attention in float64, forward and backward, and the error budget that kernels are held to.

Everything is computed a block of query rows at a time, so memory is O(seqlen).  Masks come from
``AttentionProblem.mask``.  A position that the mask hides is selected away, whatever stands in k or v there.
The same code in a lower ``dtype`` is what torch would do without a fused kernel: both products in that dtype,
the softmax in float32.  A kernel may err twice as much as that, plus rounding.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from peakattn.problem import AttentionProblem

_ROWS = 256

# Rounding bands in units of the dtype's epsilon, of the largest element and of the root mean square. The 16-bit types
# round once, at the end; in float32 every step of a sum does, and tiles add in another order than torch.
_BANDS = {torch.float16: (1.0, 1.0), torch.bfloat16: (1.0, 1.0), torch.float32: (8.0, 8.0), torch.float64: (8.0, 8.0)}


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out [batch, seqlen_q, num_heads_q, head_dim_v]`` and ``lse [batch, num_heads_q, seqlen_q]``.

    Takes the keywords of ``peakattn.attention``. Products are computed in ``dtype``, the softmax in float64 when
    ``dtype`` is float64 and in float32 otherwise; ``lse`` has the softmax's type.
    """
    call = _Call(q, k, v, dtype, options)
    problem = call.problem
    out = torch.zeros(*call.q.shape[:-1], problem.head_dim_v, dtype=dtype, device=q.device)
    lse = torch.full(call.q.shape[:-1], -math.inf, dtype=call.softmax_dtype, device=q.device)
    for rows in call.row_blocks():
        scores, visible = call.scores(rows)
        lse[..., rows] = torch.logsumexp(scores, -1)
        p = torch.exp(scores - lse[..., rows, None]).masked_fill(~visible, 0.0)
        out[..., rows, :] = _visible_product(p.to(dtype), call.v, visible)
    return call.fold_q(out), lse.reshape(problem.batch, problem.num_heads_q, problem.seqlen_q)


def attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    absolute: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``dq``, ``dk`` and ``dv`` in the shapes of q, k and v, given the gradients of out and (optionally) lse.

    ``absolute`` sums the absolute values of all terms instead: what rounding is relative to where terms cancel.
    """
    call = _Call(q, k, v, dtype, options)
    out, lse = attention(q, k, v, dtype=dtype, **options)
    out, dout = call.unfold_q(out), call.unfold_q(dout.to(dtype))
    lse = lse.reshape(call.q.shape[:-1])
    delta = (dout * out).to(call.softmax_dtype)
    q_factor, k_factor, v_factor = call.q, call.k, call.v
    if absolute:
        delta, dout = -delta.abs(), dout.abs()
        q_factor, k_factor, v_factor = q_factor.abs(), k_factor.abs(), v_factor.abs()
    delta = delta.sum(-1)
    if dlse is not None:
        dlse = dlse.to(call.softmax_dtype).reshape(delta.shape)
        delta = delta - (dlse.abs() if absolute else dlse)
    dq = torch.zeros_like(call.q)
    dk, dv = torch.zeros_like(call.k), torch.zeros_like(call.v)
    for rows in call.row_blocks():
        scores, visible = call.scores(rows)
        p = torch.exp(scores - lse[..., rows, None]).masked_fill(~visible, 0.0)
        dp = (dout[..., rows, :] @ v_factor.transpose(-1, -2)).to(call.softmax_dtype)
        ds = p * (dp - delta[..., rows, None])
        if call.softcap:
            ds = ds * (1 - (scores / call.softcap) ** 2)
        ds = ds.masked_fill(~visible, 0.0).to(dtype)
        dq[..., rows, :] = _visible_product(ds, k_factor, visible) * call.scale
        down = visible.transpose(-1, -2)
        dk += _visible_product(ds.transpose(-1, -2), q_factor[..., rows, :], down).sum(2, keepdim=True) * call.scale
        dv += _visible_product(p.to(dtype).transpose(-1, -2), dout[..., rows, :], down).sum(2, keepdim=True)
    return call.fold_q(dq), dk.squeeze(2).transpose(1, 2), dv.squeeze(2).transpose(1, 2)


def check(
    actual: torch.Tensor,
    oracle: torch.Tensor,
    low_precision: torch.Tensor,
    name: str = "out",
    dtype: torch.dtype | None = None,
    terms: torch.Tensor | None = None,
) -> None:
    """AssertionError, in a sentence, unless ``actual`` keeps within the error budget.

    ``low_precision`` is the reference in the dtype of the inputs; ``dtype`` (default: actual's) is the type whose
    rounding is granted. ``terms``, sums of absolute terms, grants one rounding of the largest: a sum that cancels to
    nothing has its rounding all the same, and torch's may be small by chance. Infinities and NaN must stand exactly where
    the oracle has them.
    """
    if actual.shape != oracle.shape:
        raise AssertionError(f"{name} has shape {tuple(actual.shape)}; the oracle has {tuple(oracle.shape)}.")
    got, want, low = (x.detach().to(actual.device, torch.float64) for x in (actual, oracle, low_precision))
    for kind, test in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = test(got) != test(want)
        # A value beyond the dtype's range is an infinity there.
        if kind != "NaN":
            wrong &= want.abs() < torch.finfo(actual.dtype).max
        if wrong.any():
            where = tuple(int(i) for i in wrong.nonzero()[0])
            raise AssertionError(
                f"{name} differs from the oracle in {int(wrong.sum())} places of {kind}; the first is {where}: "
                f"{float(got[where])}, oracle {float(want[where])}."
            )
    finite = torch.isfinite(want) & torch.isfinite(got)
    if not finite.any():
        return
    error, want = (got - want)[finite], want[finite]
    low_error = (low[finite] - want).nan_to_num(0.0, 0.0, 0.0)
    eps = torch.finfo(dtype or actual.dtype).eps
    max_band, rms_band = _BANDS[dtype or actual.dtype]
    cancelled = 0.0 if terms is None else eps * float(terms.double().nan_to_num(0.0, 0.0, 0.0).max())
    largest = float(error.abs().max())
    allowed = 2 * float(low_error.abs().max()) + max_band * eps * float(want.abs().max()) + cancelled
    if largest > allowed:
        raise AssertionError(
            f"{name} errs by {largest:.3e}; allowed is {allowed:.3e} (twice torch in the same dtype, and rounding)."
        )
    rms, allowed = _rms(error), 2 * _rms(low_error) + rms_band * eps * _rms(want) + cancelled
    if rms > allowed:
        raise AssertionError(
            f"{name} has RMS error {rms:.3e}; allowed is {allowed:.3e} (twice torch in the same dtype, and rounding)."
        )


class _Call:
    """One call's tensors as [batch, num_heads_kv, group, seqlen, head_dim] in the computing dtype."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, options: dict[str, Any]) -> None:
        options = {name: value for name, value in options.items() if name not in ("backend", "config", "return_lse")}
        self.problem = AttentionProblem.of(q, k, v, **options)
        scale = options.get("softmax_scale")
        self.scale = 1 / math.sqrt(self.problem.head_dim) if scale is None else scale
        self.softcap = options.get("softcap")
        self.softmax_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.q = self.unfold_q(q.detach().to(dtype))
        self.k, self.v = (x.detach().to(dtype).transpose(1, 2).unsqueeze(2) for x in (k, v))

    def unfold_q(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).unflatten(1, (self.problem.num_heads_kv, self.problem.group))

    def fold_q(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1, 2).transpose(1, 2)

    def row_blocks(self) -> list[slice]:
        return [slice(i, min(i + _ROWS, self.problem.seqlen_q)) for i in range(0, self.problem.seqlen_q, _ROWS)]

    def scores(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of some query rows, -inf where hidden, and the boolean [rows, seqlen_k] of what is visible."""
        keys = torch.arange(self.problem.seqlen_k, device=self.q.device)
        visible = self.problem.mask(torch.arange(rows.start, rows.stop, device=self.q.device), keys)
        scores = (self.q[..., rows, :] @ self.k.transpose(-1, -2)).to(self.softmax_dtype) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        return scores.masked_fill(~visible, -math.inf), visible


def _visible_product(weights: torch.Tensor, values: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """``weights @ values`` in which a value that is not finite counts only where ``visible``."""
    finite = torch.isfinite(values)
    if finite.all():
        return weights @ values
    product = weights @ values.masked_fill(~finite, 0.0)
    seen = visible.to(torch.float32)
    plus, minus, nan = ((seen @ test(values).to(torch.float32)) > 0 for test in (torch.isposinf, torch.isneginf, torch.isnan))
    product = product.masked_fill(plus, math.inf).masked_fill(minus, -math.inf)
    return product.masked_fill(nan | (plus & minus), math.nan)


def _rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())
