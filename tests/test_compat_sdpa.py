"""compat.sdpa against torch's own function: same values, gradients, layouts; refusals by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from peakattn.compat.sdpa import scaled_dot_product_attention as sdpa


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype) + 0.25


@pytest.mark.parametrize(
    ("q", "k", "v", "options"),
    [
        pytest.param((2, 4, 9, 16), (2, 4, 13, 16), (2, 4, 13, 16), {}, id="full"),
        pytest.param((2, 4, 9, 16), (2, 4, 13, 16), (2, 4, 13, 16), {"is_causal": True}, id="causal is top-left, more keys"),
        pytest.param((2, 4, 13, 16), (2, 4, 9, 16), (2, 4, 9, 16), {"is_causal": True}, id="causal is top-left, more queries"),
        pytest.param((4, 9, 16), (4, 9, 16), (4, 9, 16), {"is_causal": True}, id="three dimensions"),
        pytest.param((2, 3, 4, 9, 16), (2, 3, 4, 7, 16), (2, 3, 4, 7, 16), {}, id="two batch dimensions"),
        pytest.param((2, 4, 9, 16), (1, 4, 7, 16), (4, 7, 16), {}, id="leading dimensions broadcast"),
        pytest.param((2, 4, 9, 16), (2, 1, 7, 16), (2, 1, 7, 16), {}, id="one kv head broadcasts"),
        pytest.param((2, 6, 9, 16), (2, 2, 7, 16), (2, 2, 7, 16), {"enable_gqa": True}, id="grouped heads"),
        pytest.param((2, 4, 9, 16), (2, 4, 9, 16), (2, 4, 9, 24), {}, id="head_dim of v differs"),
        pytest.param((2, 4, 9, 16), (2, 4, 9, 16), (2, 4, 9, 16), {"scale": 0.7}, id="scale"),
    ],
)
def test_values_and_gradients_are_torchs(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], options: dict[str, Any]
) -> None:
    ours = [normal(*shape).requires_grad_() for shape in (q, k, v)]
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    out, expected = (f(x[0], x[1], x[2], **options) for f, x in ((sdpa, ours), (F.scaled_dot_product_attention, theirs)))
    assert out.shape == expected.shape
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected)
    dout = normal(*out.shape)
    out.backward(dout)
    expected.backward(dout)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    q, k, v = (normal(2, 2, 40, 32, dtype=dtype) for _ in range(3))
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    error = (sdpa(q, k, v, is_causal=True).double() - exact).abs().max()
    assert (
        error
        <= 2 * (F.scaled_dot_product_attention(q, k, v, is_causal=True).double() - exact).abs().max() + torch.finfo(dtype).eps
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [({"attn_mask": torch.ones(5, 5, dtype=torch.bool)}, "attn_mask"), ({"dropout_p": 0.5}, "dropout_p")],
)
def test_what_is_not_honoured_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    q = normal(1, 2, 5, 8)
    with pytest.raises(NotImplementedError, match=f"{named} is .*fallback=True"):
        sdpa(q, q, q, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fallback_hands_the_call_to_torch(dtype: torch.dtype) -> None:
    q = normal(1, 2, 5, 8, dtype=dtype)
    mask = torch.ones(5, 5, dtype=torch.bool).tril() if dtype == torch.float32 else None
    expected = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    assert torch.equal(sdpa(q, q, q, attn_mask=mask, fallback=True), expected)


def test_heads_that_differ_need_enable_gqa() -> None:
    with pytest.raises(ValueError, match=r"do not broadcast.*enable_gqa=True"):
        sdpa(normal(1, 4, 5, 8), normal(1, 2, 5, 8), normal(1, 2, 5, 8))


@pytest.mark.parametrize(
    ("query", "error", "sentence"),
    [([1.0], TypeError, "query is a list"), (torch.ones(5, 8), ValueError, "query has 2 dimensions")],
)
def test_bad_input_is_a_sentence(query: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        sdpa(query, normal(1, 2, 5, 8), normal(1, 2, 5, 8))
