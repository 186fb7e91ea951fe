"""What a forward call means, on every target, against the float64 oracle and its error budget."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import oracle
import peakattn
from cases import ALL, BY_NAME, CASES, Case
from conftest import Target
from peakattn import reference
from peakattn.backends import load
from peakattn.device import CPU, Device
from peakattn.problem import AttentionProblem

PAIRS = [pytest.param(case, dtype, id=f"{case}-{str(dtype)[6:]}") for case in CASES for dtype in case.dtypes]


@pytest.mark.parametrize(("case", "dtype"), PAIRS)
def test_forward(target: Target, case: Case, dtype: torch.dtype) -> None:
    q, k, v = case.inputs(dtype, target.device)
    out, lse = target.attention(q, k, v, return_lse=True, **case.options)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert out.shape == (*q.shape[:-1], v.shape[-1])
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    oracle.check(out, lse, q, k, v, **case.options)
    # Without lse the same numbers come out: the flag is no other kernel's (FA#2729).
    torch.testing.assert_close(target.attention(q, k, v, **case.options), out, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["longer_q_bottom_right", "five_by_two", "window_past_keys", "no_keys"])
@pytest.mark.parametrize("dtype", ALL)
def test_a_row_without_keys_is_zero_and_its_lse_minus_infinity(target: Target, name: str, dtype: torch.dtype) -> None:
    """PT#103749, PT#103963, FI#4452; and onnxruntime#28904: not the mean of V, which is finite and no NaN test sees."""
    case = BY_NAME[name]
    q, k, v = case.inputs(dtype, target.device)
    out, lse = target.attention(q, k, v, return_lse=True, **case.options)
    problem = AttentionProblem.of(q, k, v, **case.options)
    blind = [i for i in range(problem.seqlen_q) if problem.key_range(i) == (0, 0)]
    assert blind
    assert (out[:, blind] == 0).all()
    assert (lse[:, :, blind] == -math.inf).all()
    seeing = [i for i in range(problem.seqlen_q) if i not in blind]
    assert torch.isfinite(lse[:, :, seeing]).all()


MASKED = [
    {"causal": True},
    {"causal": True, "alignment": "top_left"},
    {"window_size": (5, 3)},
    {"causal": True, "softcap": 5.0},
]


@pytest.mark.parametrize("options", MASKED, ids=str)
@pytest.mark.parametrize("poisoned", ["k", "v", "kv"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_masked_position_never_influences_a_row(target: Target, options: dict[str, Any], poisoned: str, value: float) -> None:
    """PT#101967: 0 * NaN is NaN, so a masked V must be selected away. Keys 20 and 39 are hidden from most rows."""
    case = Case("masked", "", 40, 40, 4, 2, 32)
    q, k, v = case.inputs(target.dtype, target.device)
    clean = target.attention(q, k, v, return_lse=True, **options)
    problem = AttentionProblem.of(q, k, v, **options)
    for name, x in (("k", k), ("v", v)):
        if name in poisoned:
            x[:, [20, 39]] = value
    out, lse = target.attention(q, k, v, return_lse=True, **options)
    ranges = [problem.key_range(i) for i in range(40)]
    blind = [i for i, (first, last) in enumerate(ranges) if not any(first <= j < last for j in (20, 39))]
    assert len(blind) >= 20
    torch.testing.assert_close(out[:, blind], clean[0][:, blind], **target.rounding)
    torch.testing.assert_close(lse[:, :, blind], clean[1][:, :, blind])
    # And where they are seen, they show.
    seeing = [i for i in range(40) if i not in blind]
    if math.isnan(value):
        assert out[:, seeing].isnan().all()


def test_a_cache_tail_that_nobody_sees_may_hold_anything(target: Target) -> None:
    """Top-left with more keys than queries: the tail of a cache is uninitialised memory."""
    case = BY_NAME["longer_k_top_left"]
    q, k, v = case.inputs(target.dtype, target.device)
    clean = target.attention(q, k, v, **case.options)
    k[:, case.seqlen_q :], v[:, case.seqlen_q :] = math.nan, math.inf
    torch.testing.assert_close(target.attention(q, k, v, **case.options), clean, **target.rounding)


def test_visible_nan_is_not_hidden(target: Target) -> None:
    """A row whose every score is NaN is not a row without keys."""
    q, k, v = BY_NAME["full"].inputs(target.dtype, target.device)
    out, lse = target.attention(q, k * math.nan, v, return_lse=True)
    assert out.isnan().all()
    assert lse.isnan().all()


@pytest.mark.parametrize("name", ["causal", "odd_lengths", "gqa_3", "window_left", "softcap", "longer_q_bottom_right"])
@pytest.mark.parametrize("dtype", ALL)
def test_the_result_does_not_depend_on_the_config(target: Target, name: str, dtype: torch.dtype) -> None:
    case = BY_NAME[name]
    q, k, v = case.inputs(dtype, target.device)
    kernel = load(target.backend)
    device = Device.of(q.device)
    problem = AttentionProblem.of(q, k, v, return_lse=True, **case.options)
    if (reason := kernel.reject(problem, device)) is not None:
        pytest.skip(reason)
    space = list(kernel.search_space(problem, device))
    for config in (space[0], space[len(space) // 2], space[-1]):
        out, lse = target.attention(q, k, v, return_lse=True, config=config, **case.options)
        oracle.check(out, lse, q, k, v, **case.options)


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"window_size": (13, 4)}, {"causal": True}], ids=str)
def test_tiles_smaller_than_the_problem(options: dict[str, Any]) -> None:
    """Tiles that divide nothing, on the CPU, where the default ones are larger than these cases."""
    q, k, v = Case("tiles", "", 61, 77, 6, 2, 24, 40).inputs(torch.float32)
    for config in ({"block_m": 7, "block_n": 5}, {"block_m": 1, "block_n": 80}, {"block_m": 64, "block_n": 3}):
        out, lse = peakattn.attention(q, k, v, config=config, return_lse=True, **options)
        oracle.check(out, lse, q, k, v, **options)


@pytest.mark.parametrize("name", ["causal", "gqa_5", "softcap_window", "several_tiles"])
@pytest.mark.parametrize("dtype", ALL)
def test_two_runs_are_bitwise_equal(target: Target, name: str, dtype: torch.dtype) -> None:
    case = BY_NAME[name]
    q, k, v = case.inputs(dtype, target.device)
    first, second = (target.attention(q, k, v, return_lse=True, **case.options) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("head_dim_v", [64, 32])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_out_has_the_memory_order_of_q(target: Target, layout: str, head_dim_v: int) -> None:
    """PT#176915, PT#138581: a caller who transposes gets back what it can view, without a copy."""
    q, k, v = Case("order", "", 10, 12, 3, 3, 64, head_dim_v, batch=2, layout=layout).inputs(target.dtype, target.device)
    out = target.attention(q, k, v)
    assert (out if layout == "bshd" else out.transpose(1, 2)).is_contiguous()


@pytest.mark.parametrize(("batch", "seqlen_q", "num_heads"), [(1, 1, 1), (2, 1, 3), (1, 5, 1), (3, 1, 1), (1, 1, 4), (2, 5, 3)])
def test_lse_is_contiguous_whichever_sizes_are_one(target: Target, batch: int, seqlen_q: int, num_heads: int) -> None:
    case = Case("lse", "", seqlen_q, 12, num_heads, num_heads, 32, 32, batch=batch)
    q, k, v = case.inputs(target.dtype, target.device)
    _, lse = target.attention(q, k, v, return_lse=True)
    assert lse.shape == (batch, num_heads, seqlen_q)
    assert lse.is_contiguous()


def test_lse_is_the_natural_logarithm(target: Target) -> None:
    """PT#181645: one backend's base 2 is off by ln 2."""
    q, k, v = BY_NAME["full"].inputs(target.dtype, target.device)
    _, lse = target.attention(q, k, v, return_lse=True)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / 8
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_halves_of_the_keys_merge_through_lse(target: Target) -> None:
    """attention-gym#200: what ring attention and split caches do; a half without visible keys has weight 0."""
    q, k, v = BY_NAME["causal"].inputs(target.dtype, target.device)
    whole, whole_lse = target.attention(q, k, v, causal=True, alignment="top_left", return_lse=True)
    left, left_lse = target.attention(q, k[:, :50], v[:, :50], causal=True, alignment="top_left", return_lse=True)
    # Key 50 is position 0 of the second half: row i sees it when i >= 50.
    right = torch.zeros_like(left)
    right_lse = torch.full_like(left_lse, -math.inf)
    right[:, 50:], right_lse[:, :, 50:] = target.attention(
        q[:, 50:], k[:, 50:], v[:, 50:], causal=True, alignment="top_left", return_lse=True
    )
    lse = torch.logaddexp(left_lse, right_lse)
    weights = [(x - lse).exp().transpose(1, 2).unsqueeze(-1) for x in (left_lse, right_lse)]
    torch.testing.assert_close(lse, whole_lse)
    torch.testing.assert_close((weights[0] * left + weights[1] * right).to(whole.dtype), whole, **target.rounding)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(40, 40), (40, 25), (25, 40)])
def test_top_left_is_what_torch_calls_causal(target: Target, seqlen_q: int, seqlen_k: int) -> None:
    q, k, v = Case("sdpa", "", seqlen_q, seqlen_k).inputs(target.dtype, target.device)
    want = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
    out = target.attention(q, k, v, causal=True, alignment="top_left")
    torch.testing.assert_close(out.transpose(1, 2), want, **(target.rounding or {"rtol": 1e-4, "atol": 1e-5}))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"window_size": (-1, -1)}, {}),
        ({"window_size": (None, None)}, {}),
        ({"window_size": (-1, 0)}, {"causal": True}),
        ({"window_size": (8, 5), "causal": True}, {"window_size": (8, 0)}),
        ({"softmax_scale": 64**-0.5}, {}),
    ],
    ids=str,
)
def test_two_spellings_of_one_mask(target: Target, one: dict[str, Any], other: dict[str, Any]) -> None:
    """TransformerEngine#3528: all zeros came out of (-1, -1); norms are compared, not only NaN."""
    q, k, v = BY_NAME["odd_causal"].inputs(target.dtype, target.device)
    first, second = target.attention(q, k, v, **one), target.attention(q, k, v, **other)
    assert first.norm() > 1
    assert torch.equal(first, second)


@pytest.mark.parametrize("shape", [(65537, 4, 1, 8), (1, 2, 65537, 8)], ids=["batch", "heads"])
def test_more_than_65535_batch_entries_or_heads(target: Target, shape: tuple[int, int, int, int]) -> None:
    """PT#142228, PT#146704, xformers#845: the y and z sizes of a launch grid end at 65,535."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator).to(target.device, target.dtype) for _ in range(3))
    out, lse = target.attention(q, k, v, causal=True, return_lse=True)
    assert not out.isnan().any()
    ends = [x[-2:, :, -2:] for x in (q, k, v)]
    want, want_lse = reference.attention(*ends, causal=True)
    torch.testing.assert_close(out[-2:, :, -2:].double(), want, **(target.rounding or {"rtol": 1e-3, "atol": 1e-4}))
    torch.testing.assert_close(lse[-2:, -2:].double(), want_lse.double(), rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_2_to_the_31_elements(target: Target) -> None:
    """FLA#1080, FA#407: offsets need 64 bits. The last batch entry equals the same entry computed alone."""
    if target.device == "cpu":
        pytest.skip("the CPU kernels take pointers, not offsets")
    torch.manual_seed(0)
    q, k, v = (torch.randn(16, 17477, 64, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    out = target.attention(q, k, v, window_size=(100, 0))
    alone = target.attention(q[-1:], k[-1:], v[-1:], window_size=(100, 0))
    assert torch.equal(out[-1:], alone)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that one operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "alignment": "top_left"}, {"causal": True}, {"window_size": (50, 70)}, {"softcap": 2.0}],
    ids=str,
)
def test_cpu_memory_grows_with_the_length_and_not_its_square(direction: str, options: dict[str, Any]) -> None:
    """PT#134756, PT#152528: no mask and no scores of seqlen_q x seqlen_k, on any path."""

    def largest(seqlen: int) -> int:
        q, k, v = (torch.randn(1, seqlen + extra, 1, 8) for extra in (0, 64, 64))
        problem = AttentionProblem.of(q, k, v, return_lse=True, **options)
        softcap = options.get("softcap", 0.0)
        out, lse = torch.empty_like(q), torch.empty(1, 1, seqlen)
        forward, backward = load("cpu.fwd"), load("cpu.bwd")
        # Tiles of a fixed size, small beside the tensors.
        config = forward.Config(block_m=128, block_n=64)
        with LargestTensor() as seen:
            forward.launch(problem, config, q, k, v, out, lse, 0.3, softcap)
        if direction == "bwd":
            problem = problem.backward(needs_dq=True, needs_dk=True, needs_dv=True, aligned=True)
            grads = [torch.empty_like(x) for x in (q, k, v)]
            with LargestTensor() as seen:
                backward.launch(problem, config, q, k, v, out, lse, out, None, *grads, 0.3, softcap)
        return seen.numel

    assert largest(2048) < 2.2 * largest(1024)


def test_a_torch_without_grouped_heads_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions of torch's CPU kernel read past the end of k when heads are grouped; each head then goes alone."""
    from peakattn.backends.cpu import tile_ops

    case = BY_NAME["gqa_3"]
    q, k, v = (x.requires_grad_() for x in case.inputs(torch.float32))
    out = peakattn.attention(q, k, v, **case.options)
    grads = torch.autograd.grad(out, (q, k, v), case.dout(out))
    monkeypatch.setattr(tile_ops, "torch_groups_heads", lambda: False)
    again = peakattn.attention(q, k, v, **case.options)
    torch.testing.assert_close(again, out)
    torch.testing.assert_close(torch.autograd.grad(again, (q, k, v), case.dout(out)), grads)


def test_cpu_refuses_a_gpu() -> None:
    problem = AttentionProblem(1, 8, 8, 1, 1, 8, 8, torch.float32)
    for kernel_id in ("cpu.fwd", "cpu.bwd"):
        assert load(kernel_id).reject(problem, CPU) is None
        assert "NVIDIA H200" in load(kernel_id).reject(problem, Device.named("h200"))
