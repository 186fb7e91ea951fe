"""Properties over random shapes, masks and devices: attention against the oracle, and what choosing promises."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import peakattn
from peakattn import dispatch, reference
from peakattn.backends import KERNELS, load
from peakattn.device import CPU, KNOWN, Device
from peakattn.problem import DTYPES, AttentionProblem, bucket

# The NaN poison is set up once for all examples of a test, which is what it is for.
SETTINGS = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

side = st.one_of(st.none(), st.integers(0, 40))
options = st.fixed_dictionaries(
    {},
    optional={
        "causal": st.booleans(),
        "window_size": st.tuples(side, side),
        "alignment": st.sampled_from(["bottom_right", "top_left"]),
        "softcap": st.floats(0.5, 30.0),
        "softmax_scale": st.floats(-2.0, 2.0),
    },
)
sizes = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 2),
        "seqlen_q": st.integers(0, 40),
        "seqlen_k": st.integers(0, 40),
        "num_heads_kv": st.integers(1, 3),
        "group": st.integers(1, 3),
        "head_dim": st.integers(1, 20),
        "head_dim_v": st.integers(1, 20),
    }
)


def tensors(size: dict[str, int], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch, heads = size["batch"], size["num_heads_kv"]
    shapes = (
        (batch, size["seqlen_q"], heads * size["group"], size["head_dim"]),
        (batch, size["seqlen_k"], heads, size["head_dim"]),
        (batch, size["seqlen_k"], heads, size["head_dim_v"]),
    )
    return [torch.randn(shape, generator=generator).add_(0.3) for shape in shapes]


@settings(SETTINGS, max_examples=120)
@given(size=sizes, options=options, seed=st.integers(0, 1000), block=st.one_of(st.none(), st.integers(1, 17)))
def test_attention_is_the_oracle(size: dict[str, int], options: dict[str, Any], seed: int, block: int | None) -> None:
    q, k, v = inputs = [x.requires_grad_() for x in tensors(size, seed)]
    config = None if block is None else {"block_m": block, "block_n": block + 3}
    out, lse = peakattn.attention(q, k, v, return_lse=True, config=config, **options)
    want_out, want_lse = reference.attention(q, k, v, **options)
    torch.testing.assert_close(out.double(), want_out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)
    dout, dlse = torch.ones_like(out).cumsum(-1), torch.ones_like(lse)
    grads = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    for got, want in zip(grads, reference.attention_backward(q, k, v, dout, dlse, **options), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3 * (1 + float(want.abs().sum()) ** 0.5))


@settings(SETTINGS, max_examples=60)
@given(size=sizes, options=options, seed=st.integers(0, 1000), data=st.data())
def test_what_is_hidden_does_not_matter(size: dict[str, int], options: dict[str, Any], seed: int, data: st.DataObject) -> None:
    """Any row's output is that of its visible keys alone."""
    q, k, v = tensors(size, seed)
    problem = AttentionProblem.of(q, k, v, **options)
    if problem.seqlen_q == 0:
        return
    row = data.draw(st.integers(0, problem.seqlen_q - 1))
    first, last = problem.key_range(row)
    out = peakattn.attention(q, k, v, **options)
    numbers = {name: x for name, x in options.items() if name in ("softcap", "softmax_scale")}
    alone = peakattn.attention(q[:, row : row + 1], k[:, first:last], v[:, first:last], **numbers)
    torch.testing.assert_close(out[:, row : row + 1], alone, rtol=1e-4, atol=1e-4)
    k[:, :first], k[:, last:], v[:, :first], v[:, last:] = float("nan"), float("inf"), float("inf"), float("nan")
    again = peakattn.attention(q, k, v, **options)
    torch.testing.assert_close(again[:, row], out[:, row], rtol=1e-4, atol=1e-4)


problems = st.builds(
    AttentionProblem,
    batch=st.integers(1, 70000),
    seqlen_q=st.integers(1, 200000),
    seqlen_k=st.integers(1, 200000),
    num_heads_q=st.sampled_from([4, 12, 64]),
    num_heads_kv=st.sampled_from([1, 2, 4]),
    head_dim=st.integers(1, 256),
    head_dim_v=st.integers(1, 256),
    dtype=st.sampled_from(DTYPES),
    window_left=st.one_of(st.none(), st.integers(0, 5000)),
    window_right=st.one_of(st.none(), st.integers(0, 5000)),
    alignment=st.sampled_from(["bottom_right", "top_left"]),
    softcap=st.booleans(),
    direction=st.sampled_from(["fwd", "bwd"]),
    aligned=st.booleans(),
)
devices = st.sampled_from([CPU, *KNOWN.values()])


@settings(SETTINGS, max_examples=200)
@given(problem=problems, device=devices)
def test_choosing(problem: AttentionProblem, device: Device) -> None:
    """The kernel takes the problem, the config is its own, the choice is always the same, and all of it is said."""
    if device.type == "cuda" and (reason := dispatch.unavailable("triton")) is not None:
        pytest.skip(reason)
    problem = dataclasses.replace(problem, device_type=device.type)
    choice = dispatch.choose(problem, device)
    assert choice.kernel is load(choice.kernel_id)
    assert choice.kernel.reject(problem, device) is None
    assert isinstance(choice.config, choice.kernel.Config)
    assert choice.config_source in ("default", "tuned")
    assert choice.kernel_id.split(".")[1].startswith(problem.direction)
    assert dispatch.choose(problem, device) == choice
    assert str(choice).startswith(f"{choice.kernel_id} with {choice.config_source} config (")
    assert all(reason and kernel_id in KERNELS for kernel_id, reason in choice.refusals.items())
    # Named, the same kernel comes; given, the very config.
    named = dispatch.choose(problem, device, choice.kernel_id, choice.config)
    assert (named.kernel_id, named.config, named.config_source) == (choice.kernel_id, choice.config, "given")


@settings(SETTINGS, max_examples=200)
@given(problem=problems, scale=st.integers(1, 3))
def test_counts_and_classes(problem: AttentionProblem, scale: int) -> None:
    assert 0 <= problem.flops <= 10 * problem.batch * problem.num_heads_q * problem.seqlen_q * problem.seqlen_k * 256
    assert problem.bytes > 0
    more = dataclasses.replace(problem, batch=problem.batch * scale)
    assert more.flops == pytest.approx(scale * problem.flops)
    assert more.key() == problem.key()
    for name in ("seqlen_q", "seqlen_k"):
        n, b = getattr(problem, name), problem.key()[name]
        assert b == bucket(n)
        assert b >= n > b // 2 or n == 1
