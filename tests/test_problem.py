"""AttentionProblem: the mask rule, the counts and the shape class."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from peakattn.problem import AttentionProblem, bucket, is_aligned

FULL = AttentionProblem(2, 10, 10, 4, 2, 8, 16, torch.float32)


def masked(seqlen_q: int, seqlen_k: int, **options: Any) -> AttentionProblem:
    q, k = torch.empty(1, seqlen_q, 1, 8), torch.empty(1, seqlen_k, 1, 8)
    return AttentionProblem.of(q, k, k, **options)


def visible(i: int, j: int, problem: AttentionProblem, left: int | None, right: int | None) -> bool:
    """SEMANTICS in plain words: the query stands at its own position, and sees so far to the left and to the right."""
    position = i + (problem.seqlen_k - problem.seqlen_q if problem.alignment == "bottom_right" else 0)
    return (left is None or j >= position - left) and (right is None or j <= position + right)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(6, 6), (3, 8), (8, 3), (1, 5), (5, 1), (4, 0), (0, 4)])
@pytest.mark.parametrize("window", [(None, None), (0, 0), (2, None), (None, 1), (1, 2), (20, 20)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
def test_the_mask_rule(
    seqlen_q: int, seqlen_k: int, window: tuple[int | None, int | None], causal: bool, alignment: str
) -> None:
    problem = masked(seqlen_q, seqlen_k, window_size=window, causal=causal, alignment=alignment)
    left, right = window
    if causal:
        right = 0 if right is None else min(right, 0)
    want = torch.tensor(
        [[visible(i, j, problem, left, right) for j in range(seqlen_k)] for i in range(seqlen_q)], dtype=torch.bool
    ).reshape(seqlen_q, seqlen_k)
    assert torch.equal(problem.mask(torch.arange(seqlen_q), torch.arange(seqlen_k)), want)
    assert problem.visible_pairs == int(want.sum())
    assert seqlen_q == 0 or problem.visible_keys == int(want.any(0).sum())
    for i in range(seqlen_q):
        seen = want[i].nonzero().flatten().tolist()
        assert problem.key_range(i) == ((seen[0], seen[-1] + 1) if seen else (0, 0))


def test_minus_one_is_unlimited_and_causal_is_a_window() -> None:
    assert masked(5, 5, window_size=(-1, -1)) == masked(5, 5)
    assert masked(5, 5, window_size=(-1, 0)) == masked(5, 5, causal=True)
    assert masked(5, 5, window_size=(3, 9), causal=True) == masked(5, 5, window_size=(3, 0))


@pytest.mark.parametrize(
    ("options", "name"),
    [({}, "full"), ({"causal": True}, "causal"), ({"window_size": (3, 0)}, "window"), ({"window_size": (None, 2)}, "window")],
    ids=str,
)
def test_mask_name(options: dict[str, Any], name: str) -> None:
    assert masked(5, 5, **options).mask_name == name
    assert masked(5, 5, **options).causal == (name == "causal")


def test_a_problem_is_a_value() -> None:
    assert hash(FULL) == hash(dataclasses.replace(FULL))
    with pytest.raises(dataclasses.FrozenInstanceError):
        FULL.batch = 3  # type: ignore[misc]


def test_flops_are_those_of_the_visible_pairs() -> None:
    assert FULL.flops == 2 * 4 * 100 * 2 * (8 + 16)
    causal = dataclasses.replace(FULL, window_right=0)
    assert causal.flops == FULL.flops * 55 / 100
    backward = FULL.backward(needs_dq=True, needs_dk=True, needs_dv=True, aligned=True)
    # S and dP again, dQ, dK, dV: three products over head_dim and two over head_dim_v.
    assert backward.flops == 2 * 4 * 100 * 2 * (3 * 8 + 2 * 16)
    for needs in itertools.product((False, True), repeat=3):
        part = FULL.backward(needs_dq=needs[0], needs_dk=needs[1], needs_dv=needs[2], aligned=True)
        assert part.flops <= backward.flops


def test_bytes_count_each_tensor_once() -> None:
    q, k, v, out, lse = 2 * 10 * 4 * 8, 2 * 10 * 2 * 8, 2 * 10 * 2 * 16, 2 * 10 * 4 * 16, 2 * 10 * 4
    assert FULL.bytes == 4 * (q + k + v + out)
    assert dataclasses.replace(FULL, return_lse=True).bytes == 4 * (q + k + v + out + lse)
    backward = FULL.backward(needs_dq=True, needs_dk=True, needs_dv=True, aligned=True)
    assert backward.bytes == 4 * (2 * q + 2 * k + 2 * v + 2 * out + lse)


def test_bytes_leave_out_keys_that_no_query_sees() -> None:
    """A window over a long cache, or the first rows of a top-left mask, read a part of K and V and write all of dK and dV."""
    window = dataclasses.replace(FULL, seqlen_q=2, seqlen_k=100, window_left=7, window_right=0)
    q, k, v, out = 2 * 2 * 4 * 8, 2 * 100 * 2 * 8, 2 * 100 * 2 * 16, 2 * 2 * 4 * 16
    assert window.bytes == 4 * (q + (k + v) * 9 // 100 + out)
    assert dataclasses.replace(window, window_left=None, alignment="top_left").bytes == 4 * (q + (k + v) * 2 // 100 + out)
    backward = window.backward(needs_dq=True, needs_dk=True, needs_dv=True, aligned=True)
    assert backward.bytes == 4 * (2 * q + (k + v) * 9 // 100 + k + v + 2 * out + 2 * 2 * 4)


def test_the_key_holds_shape_classes_and_no_run_time_number() -> None:
    """FLA#533, FLA#1147: a new length does not make a new class; tilelang#1250: a much larger one does."""
    q = torch.empty(1, 1000, 4, 64)
    keys = [AttentionProblem.of(q, q, q, softmax_scale=scale, softcap=cap).key() for scale, cap in ((0.1, 5.0), (0.2, 9.0))]
    assert keys[0] == keys[1]
    near, far = torch.empty(1, 1001, 4, 64), torch.empty(1, 8192, 4, 64)
    plain = AttentionProblem.of(q, q, q).key()
    assert AttentionProblem.of(near, near, near).key() == plain
    assert AttentionProblem.of(far, far, far).key() != plain
    assert "batch" not in plain


def test_bucket() -> None:
    assert [bucket(n) for n in (0, 1, 2, 3, 4, 5, 1023, 1024, 1025)] == [1, 1, 2, 4, 4, 8, 1024, 1024, 2048]


@pytest.mark.parametrize(
    ("x", "aligned"),
    [
        (torch.empty(2, 5, 3, 8), True),
        (torch.empty(2, 3, 5, 8).transpose(1, 2), True),
        (torch.empty(2, 5, 3, 6), False),
        (torch.empty(2, 5, 3, 16)[..., ::2], False),
        (torch.empty(2, 5, 3, 9)[..., :8], False),
        (torch.empty(2 * 5 * 3 * 8 + 1)[1:].view(2, 5, 3, 8), False),
        (torch.empty(2, 5, 1, 8).expand(2, 5, 3, 8), False),
        (torch.empty(1, 5, 1, 8), True),
    ],
    ids=["contiguous", "transposed", "row of 24 bytes", "last stride 2", "row of 36 bytes", "offset", "stride 0", "size 1"],
)
def test_alignment(x: torch.Tensor, aligned: bool) -> None:
    assert is_aligned(x) == aligned


def test_a_problem_prints_as_one_line() -> None:
    text = str(masked(5, 7, window_size=(3, 0), softcap=2.0))
    assert text == "fwd float32 batch 1, seqlen 5 x 7, heads 1, head_dim 8, window(3, 0), softcap"
    assert "heads 4/2, head_dim 8/16" in str(FULL)
