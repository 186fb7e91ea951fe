"""The error budget."""

from __future__ import annotations

import pytest
import torch

from peakattn import reference


def test_a_gradient_that_cancels_is_granted_one_rounding_of_its_terms() -> None:
    """The softmax of one key is 1 whatever q is, so dq is the rounding of a difference, and torch's may be 0 by chance."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, n, 1, 8) for n in (5, 1, 1, 5))
    want = reference.attention_backward(q, k, v, dout)[0]
    terms = reference.attention_backward(q, k, v, dout, absolute=True)[0]
    assert (terms >= want.abs()).all()
    assert want.abs().max() < 1e-12
    rounding = torch.finfo(torch.float32).eps * float(terms.max())
    by_chance = torch.zeros_like(q)
    within, beyond = (torch.full_like(q, factor * rounding) for factor in (0.9, 1.1))
    reference.check(within, want, by_chance, "dq", terms=terms)
    with pytest.raises(AssertionError, match="dq errs"):
        reference.check(beyond, want, by_chance, "dq", terms=terms)
    with pytest.raises(AssertionError, match="dq errs"):
        reference.check(within, want, by_chance, "dq")
