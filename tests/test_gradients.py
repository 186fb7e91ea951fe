"""What a backward means, on every backend: dq, dk and dv against the oracle, also through lse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import peakattn
from cases import ALL, BY_NAME, CASES, Case
from conftest import Target
from peakattn import plan, reference
from peakattn.backends import load
from peakattn.problem import AttentionProblem

PAIRS = [pytest.param(case, dtype, id=f"{case}-{str(dtype)[6:]}") for case in CASES for dtype in case.dtypes]


def leaves(case: Case, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    return [x.requires_grad_() for x in case.inputs(dtype, device)]


def gradients(
    trainer: Target,
    inputs: list[torch.Tensor],
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    out, lse = trainer.attention(*inputs, return_lse=True, **options)
    outputs, grads = zip(*[(x, g) for x, g in ((out, dout), (lse, dlse)) if g is not None], strict=True)
    try:
        return torch.autograd.grad(outputs, inputs, grads)
    except peakattn.NoKernelError as refusal:
        pytest.skip(str(refusal))


def check(
    grads: tuple[torch.Tensor, ...],
    inputs: list[torch.Tensor],
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    **options: Any,
) -> None:
    q, k, v = inputs
    wanted = reference.attention_backward(q, k, v, dout, dlse, **options)
    low = reference.attention_backward(q, k, v, dout, dlse, dtype=dout.dtype, **options)
    terms: tuple[torch.Tensor | None, ...] = (None, None, None)
    if dout.dtype == torch.float32:  # nothing is rounded once at the end, so what cancels keeps the rounding of its terms
        terms = reference.attention_backward(q, k, v, dout, dlse, absolute=True, **options)
    for name, got, want, rough, term in zip(("dq", "dk", "dv"), grads, wanted, low, terms, strict=True):
        reference.check(got, want, rough, name, terms=term)


@pytest.mark.parametrize(("case", "dtype"), PAIRS)
def test_backward(trainer: Target, case: Case, dtype: torch.dtype) -> None:
    if case.name == "huge_one_key" and trainer.device == "cuda":
        pytest.xfail("kernels compute weights again from lse, which float32 rounds to multiples of 8192 there")
    inputs = leaves(case, dtype, trainer.device)
    dout = case.dout(trainer.attention(*inputs, **case.options))
    grads = gradients(trainer, inputs, dout, **case.options)
    for x, grad in zip(inputs, grads, strict=True):
        assert grad.dtype == dtype
        assert grad.shape == x.shape
    check(grads, inputs, dout, **case.options)


@pytest.mark.parametrize("name", ["causal", "gqa_3", "softcap", "longer_q_bottom_right", "window_both", "narrow_v", "decode"])
@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("alone", [True, False], ids=["lse", "out_and_lse"])
def test_backward_through_lse(trainer: Target, name: str, dtype: torch.dtype, alone: bool) -> None:
    """FA#1817, FA#889: the gradient through a returned lse is no silent zero."""
    case = BY_NAME[name]
    inputs = leaves(case, dtype, trainer.device)
    out, lse = trainer.attention(*inputs, return_lse=True, **case.options)
    # A row without keys has no gradient, whatever is asked of its lse.
    dout, dlse = case.dout(out), case.dlse(lse)
    grads = gradients(trainer, inputs, None if alone else dout, dlse, **case.options)
    if alone:
        dout = torch.zeros_like(dout)
    assert any(g.abs().max() > 1e-3 for g in grads)
    check(grads, inputs, dout, dlse, **case.options)


def test_a_ready_backward_is_used_for_tensors_like_those_it_was_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = leaves(BY_NAME["full"], torch.float32, "cpu")
    made: list[tuple[bool, tuple[int, ...]]] = []
    used: list[bool] = []
    known, known_call = plan.BackwardPlan.__init__, plan.BackwardPlan.__call__

    def init(self: plan.BackwardPlan, problem: AttentionProblem, tensors: Any, *rest: Any) -> None:
        made.append((problem.aligned, tensors[5].stride()))
        known(self, problem, tensors, *rest)

    def call(self: plan.BackwardPlan, *args: Any) -> None:
        used.append(self.problem.aligned)
        known_call(self, *args)

    monkeypatch.setattr(plan.BackwardPlan, "__init__", init)
    monkeypatch.setattr(plan.BackwardPlan, "__call__", call)
    dout = torch.randn_like(q)
    shifted = torch.empty(dout.numel() + 1)[1:].view(dout.shape).copy_(dout)
    douts = [dout, dout.clone(), dout.transpose(1, 2).contiguous().transpose(1, 2), shifted, dout]
    grads = [torch.autograd.grad(peakattn.attention(q, k, v), (q, k, v), d) for d in douts]
    for again in grads[1:]:
        for one, other in zip(grads[0], again, strict=True):
            torch.testing.assert_close(one, other)
    contiguous, moved = dout.stride(), douts[2].stride()
    assert sorted(made) == sorted([(True, contiguous), (True, moved), (False, contiguous)])
    assert used == [True, True, True, False, True]


@pytest.mark.parametrize("name", ["longer_q_bottom_right", "window_past_keys", "five_by_two"])
def test_a_row_without_keys_has_no_gradient(trainer: Target, name: str) -> None:
    """PT#103749, PT#110213: not NaN, which the layer before would spread."""
    case = BY_NAME[name]
    inputs = leaves(case, torch.float32, trainer.device)
    problem = AttentionProblem.of(*inputs, **case.options)
    out, lse = trainer.attention(*inputs, return_lse=True, **case.options)
    dq, dk, dv = gradients(trainer, inputs, case.dout(out), case.dlse(lse), **case.options)
    blind = [i for i in range(problem.seqlen_q) if problem.key_range(i) == (0, 0)]
    assert blind
    assert (dq[:, blind] == 0).all()
    assert torch.isfinite(dk).all()
    assert torch.isfinite(dv).all()


@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (5, 3)}, {"causal": True, "softcap": 5.0}], ids=str)
@pytest.mark.parametrize("poisoned", ["k", "v"])
def test_a_masked_position_never_influences_a_gradient(trainer: Target, options: dict[str, Any], poisoned: str) -> None:
    """PT#101967 in the backward: dq of the rows that do not see a NaN key is what it is without it."""
    case = Case("masked", "", 40, 40, 4, 2, 32)
    inputs = list(case.inputs(torch.float32, trainer.device))
    dout = torch.ones(1, 40, 4, 32, device=trainer.device)
    clean = gradients(trainer, [x.requires_grad_() for x in inputs], dout, **options)
    inputs = [x.detach().clone() for x in inputs]
    inputs[1 if poisoned == "k" else 2][:, 39] = math.nan
    problem = AttentionProblem.of(*inputs, **options)
    dq, _, _ = gradients(trainer, [x.requires_grad_() for x in inputs], dout, **options)
    blind = [i for i in range(40) if problem.key_range(i)[1] <= 39]
    torch.testing.assert_close(dq[:, blind], clean[0][:, blind])


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1)], ids=str)
@pytest.mark.parametrize("options", [{"causal": True}, {"softcap": 4.0}], ids=str)
def test_some_inputs_are_frozen(trainer: Target, needs: tuple[int, ...], options: dict[str, Any]) -> None:
    """PT#136101: the gradients that are asked for are right, and no others appear."""
    case = BY_NAME["gqa_3"]
    q, k, v = inputs = case.inputs(torch.float32, trainer.device)
    for x, need in zip(inputs, needs, strict=True):
        x.requires_grad_(bool(need))
    out = trainer.attention(*inputs, **options)
    dout = case.dout(out)
    try:
        out.backward(dout)
    except peakattn.NoKernelError as refusal:
        pytest.skip(str(refusal))
    wanted = reference.attention_backward(q, k, v, dout, **options)
    for x, need, want in zip(inputs, needs, wanted, strict=True):
        assert (x.grad is not None) == bool(need)
        if x.grad is not None:
            torch.testing.assert_close(x.grad.double(), want, rtol=1e-3, atol=1e-4)


def test_only_what_is_asked_for_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """PT#136101: the kernel gets None for what nobody wants, and the problem says so."""
    seen: list[tuple[AttentionProblem, tuple[bool, ...]]] = []
    kernel = load("cpu.bwd")
    launch = kernel.launch

    def record(problem: AttentionProblem, config: Any, *args: Any) -> None:
        seen.append((problem, tuple(x is not None for x in args[7:10])))
        launch(problem, config, *args)

    monkeypatch.setattr(kernel, "launch", record)
    # A length that no other test uses: launches of known problems are prepared already.
    q, k, v = Case("needs", "", 43, 47, 2, 2, 8).inputs(torch.float32)
    v.requires_grad_()
    peakattn.attention(q, k, v).sum().backward()
    ((problem, given),) = seen
    assert given == (False, False, True)
    assert (problem.needs_dq, problem.needs_dk, problem.needs_dv) == given
    assert problem.flops < problem.backward(needs_dq=True, needs_dk=True, needs_dv=True, aligned=True).flops


def test_nothing_is_saved_when_nobody_wants_a_gradient() -> None:
    """FA#1383: grad mode is read before the function is applied."""
    q, k, v = BY_NAME["full"].inputs(torch.float32)
    assert peakattn.attention(q, k, v).grad_fn is None
    with torch.no_grad():
        assert peakattn.attention(q.requires_grad_(), k, v).grad_fn is None
    assert peakattn.attention(q, k, v).grad_fn is not None


def _sum(out: torch.Tensor) -> torch.Tensor:
    return out.sum()


def _transposed(out: torch.Tensor) -> torch.Tensor:
    return (out.transpose(1, 2).contiguous() * torch.arange(out.shape[1], device=out.device)[:, None]).sum()


def _split(out: torch.Tensor) -> torch.Tensor:
    first, second = out.split(out.shape[-1] // 2, dim=-1)
    return (torch.cat((second, first), dim=-1) ** 2).sum()


def _half(out: torch.Tensor) -> torch.Tensor:
    return out[..., ::2].sum() + out[:, 1::2].square().sum()


@pytest.mark.parametrize("loss", [_sum, _transposed, _split, _half])
@pytest.mark.parametrize("sizes", [(5, 5, 2, 2, 8), (1, 300, 2, 1, 64), (70, 70, 4, 2, 128)], ids=str)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_dout_of_any_strides(trainer: Target, loss: Any, sizes: tuple[int, ...], layout: str) -> None:
    """FA#325 (stride 0 from a sum), FA#355 (transposed, split, cat), PT#176915 (dout laid out unlike out)."""
    seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim = sizes
    case = Case("dout", "", seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim, layout=layout)
    q, k, v = inputs = leaves(case, torch.float32, trainer.device)
    out = trainer.attention(*inputs, causal=True)
    try:
        grads = torch.autograd.grad(loss(out), inputs)
    except peakattn.NoKernelError as refusal:
        pytest.skip(str(refusal))
    stand_in = out.detach().requires_grad_()
    (dout,) = torch.autograd.grad(loss(stand_in), stand_in)
    wanted = reference.attention_backward(q, k, v, dout.contiguous(), causal=True)
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad.double(), want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


@pytest.mark.parametrize("dout_layout", ["odd_rows", "stride2", "odd_offset", "expanded"])
def test_dout_of_any_alignment(trainer: Target, dout_layout: str) -> None:
    """PT#170813: mixes of strides in inputs and gradient."""
    from cases import LAYOUTS

    case = BY_NAME["qkv_slices"]
    inputs = leaves(case, torch.float16, trainer.device)
    out = trainer.attention(*inputs)
    dout = LAYOUTS[dout_layout](*[case.dout(out)] * 3)[1]
    check(gradients(trainer, inputs, dout), inputs, dout.contiguous())


@pytest.mark.parametrize("name", ["causal", "gqa_5", "softcap_window", "several_tiles", "mqa"])
@pytest.mark.parametrize("dtype", ALL)
def test_two_backwards_are_bitwise_equal(trainer: Target, name: str, dtype: torch.dtype) -> None:
    """FA#414, FA#321: no atomics in an order of their own."""
    case = BY_NAME[name]
    inputs = leaves(case, dtype, trainer.device)
    dout = case.dout(trainer.attention(*inputs, **case.options))
    first, second = (gradients(trainer, inputs, dout, **case.options) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["causal", "softcap", "window_both", "gqa_3"])
def test_gradients_do_not_depend_on_the_tiles(name: str) -> None:
    case = BY_NAME[name]
    q, k, v = inputs = case.inputs(torch.float32)
    problem = AttentionProblem.of(q, k, v, return_lse=True, **case.options)
    out, lse = peakattn.attention(q, k, v, return_lse=True, **case.options)
    dout, dlse = case.dout(out), case.dlse(lse)
    kernel = load("cpu.bwd")
    problem = problem.backward(needs_dq=True, needs_dk=True, needs_dv=True, aligned=True)
    for sizes in ((17, 9), (256, 512)):
        grads = tuple(torch.full_like(x, math.nan) for x in inputs)
        scale, softcap = case.head_dim**-0.5, case.options.get("softcap", 0.0)
        kernel.launch(problem, kernel.Config(*sizes), q, k, v, out, lse, dout, dlse, *grads, scale, softcap)
        check(grads, list(inputs), dout, dlse, **case.options)


def test_backward_right_after_the_kernel_that_writes_dout(trainer: Target) -> None:
    """FA#2481: nothing waits between them but the stream's own order."""
    case = BY_NAME["several_tiles"]
    inputs = leaves(case, torch.float16, trainer.device)
    out = trainer.attention(*inputs, causal=True)
    factor = torch.full((), 0.5, dtype=torch.float16, device=trainer.device)
    dout = case.dout(out) * factor
    wanted = gradients(trainer, inputs, dout, causal=True)
    for _ in range(5):
        grads = gradients(trainer, inputs, case.dout(out) * factor, causal=True)
        for got, want in zip(grads, wanted, strict=True):
            assert torch.equal(got, want)
