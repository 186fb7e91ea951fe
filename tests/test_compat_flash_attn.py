"""compat.flash_attn: flash-attn's signatures, against the float64 oracle."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from peakattn import reference
from peakattn.compat import flash_attn


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) + 0.25


@pytest.mark.parametrize(
    ("options", "meaning"),
    [
        pytest.param({}, {}, id="full"),
        pytest.param({"causal": True}, {"causal": True}, id="causal is bottom-right"),
        pytest.param({"window_size": (3, 1)}, {"window_size": (3, 1)}, id="window"),
        pytest.param({"window_size": (3, -1), "causal": True}, {"window_size": (3, 0)}, id="causal caps the window"),
        pytest.param({"softcap": 5.0, "softmax_scale": 0.3}, {"softcap": 5.0, "softmax_scale": 0.3}, id="softcap and scale"),
        pytest.param({"deterministic": True}, {}, id="deterministic"),
    ],
)
def test_flash_attn_func_is_the_oracle(options: dict[str, Any], meaning: dict[str, Any]) -> None:
    q, k, v = normal(2, 7, 4, 16), normal(2, 11, 2, 16), normal(2, 11, 2, 16)
    expected, lse = reference.attention(q, k, v, **meaning)
    out, softmax_lse, probabilities = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(softmax_lse.double(), lse, rtol=1e-5, atol=1e-5)
    assert probabilities is None
    torch.testing.assert_close(flash_attn.flash_attn_func(q, k, v, **options), out)


def test_packed_functions_equal_the_unpacked_one() -> None:
    qkv = normal(2, 9, 3, 4, 16).requires_grad_()
    q, k, v = qkv.detach().unbind(2)
    expected = flash_attn.flash_attn_func(q, k, v, causal=True)
    out = flash_attn.flash_attn_qkvpacked_func(qkv, causal=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(flash_attn.flash_attn_kvpacked_func(q, qkv.detach()[:, :, 1:], causal=True), expected)
    out.sum().backward()
    assert qkv.grad is not None
    assert qkv.grad.shape == qkv.shape


def test_parameters_come_in_flash_attns_order() -> None:
    common = [
        "dropout_p",
        "softmax_scale",
        "causal",
        "window_size",
        "softcap",
        "alibi_slopes",
        "deterministic",
        "return_attn_probs",
    ]
    for name, tensors in (
        ("flash_attn_func", ["q", "k", "v"]),
        ("flash_attn_kvpacked_func", ["q", "kv"]),
        ("flash_attn_qkvpacked_func", ["qkv"]),
    ):
        assert list(inspect.signature(getattr(flash_attn, name)).parameters) == tensors + common


@pytest.mark.parametrize(
    ("options", "named"), [({"dropout_p": 0.1}, "dropout_p"), ({"alibi_slopes": torch.ones(4)}, "alibi_slopes")]
)
def test_what_is_not_honoured_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    q = normal(1, 5, 4, 8)
    with pytest.raises(NotImplementedError, match=f"{named} is .*allowed is"):
        flash_attn.flash_attn_func(q, q, q, **options)


def test_a_packed_tensor_of_another_shape_is_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"qkv has shape \(2, 9, 4, 16\); it must be \[batch, seqlen, 3"):
        flash_attn.flash_attn_qkvpacked_func(normal(2, 9, 4, 16))
