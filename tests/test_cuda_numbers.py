"""The kernels for sm_80 against the float64 oracle with no GPU: their PTX, run by ``ptx_interpreter``.

Shapes are small and tiles smaller, so that a few hundred rows reach every loop: several key tiles, both edges of a window,
tails of rows, keys and columns, and rings that wrap around.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import oracle
import ptx_interpreter
from cases import BY_NAME, Case, small
from peakattn import dispatch, reference
from peakattn.backends import load, toolchain
from peakattn.problem import AttentionProblem

ARCH = 80
F16, BF16 = torch.float16, torch.bfloat16


def forward(
    kernel_id: str,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    knobs: dict[str, Any],
    options: dict[str, Any],
    warp_order: tuple[int, ...] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """out, lse and the number of bank conflicts of one forward call."""
    backend = kernel_id.split(".")[0]
    if (reason := dispatch.unavailable(backend)) is not None:
        pytest.skip(reason)
    kernel = load(kernel_id)
    q, k, v = tensors
    problem = AttentionProblem.of(q, k, v, return_lse=True, **options)
    out = q.new_full((*q.shape[:3], v.shape[3]), math.nan)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan)
    scale = options.get("softmax_scale") or 1 / math.sqrt(problem.head_dim)
    config = kernel.Config(**knobs)
    (launch,) = kernel.launches(problem, config, q, k, v, out, lse, scale, options.get("softcap") or 0.0)
    compiled = toolchain(backend).compile_launch(launch, ARCH)
    conflicts = ptx_interpreter.run(compiled, launch, (out, lse), warp_order)
    return out, lse, conflicts


# Case, dtype, knobs of cuda.fwd_sm80.
RUNS: list[tuple[Case, torch.dtype, dict[str, Any]]] = [
    (small("full", seqlen_q=40, seqlen_k=50), BF16, {"block_m": 32, "block_n": 16, "num_warps": 2, "num_stages": 3}),
    (small("causal", seqlen_q=70, seqlen_k=70), F16, {"block_m": 64, "block_n": 32, "num_warps": 2, "q_in_registers": True}),
    (
        small("window_left", seqlen_q=90, seqlen_k=90),
        BF16,
        {"block_m": 32, "block_n": 16, "num_warps": 2, "num_stages": 2, "q_in_registers": True, "swizzle": False},
    ),
    (small("window_past_keys", seqlen_q=60), F16, {"block_m": 32, "block_n": 16, "num_warps": 1, "num_stages": 2}),
    (small("longer_q_bottom_right", seqlen_q=70), BF16, {"block_m": 32, "block_n": 32, "num_warps": 2}),
    (
        small("softcap_window", seqlen_q=40, seqlen_k=60, num_heads_q=3, num_heads_kv=1),
        F16,
        {"block_m": 32, "block_n": 48, "num_warps": 2},
    ),
    (
        small("gqa_3", seqlen_q=20, seqlen_k=40, head_dim=16),
        BF16,
        {"block_m": 16, "block_n": 16, "num_warps": 1, "num_stages": 4},
    ),
    (small("dim_8", seqlen_q=30, seqlen_k=50), F16, {"block_m": 16, "block_n": 16, "num_warps": 1, "num_stages": 2}),
    (small("dim_72", seqlen_q=40, seqlen_k=40), BF16, {"block_m": 32, "block_n": 16, "num_warps": 2, "q_in_registers": True}),
    (small("dim_256", seqlen_q=20, seqlen_k=40), F16, {"block_m": 32, "block_n": 16, "num_warps": 2}),
    (small("latent", seqlen_q=20, seqlen_k=20), BF16, {"block_m": 16, "block_n": 16, "num_warps": 1}),
    (small("wide_v", seqlen_q=20, seqlen_k=30), F16, {"block_m": 32, "block_n": 16, "num_warps": 2, "swizzle": False}),
    (
        small("narrow_v", seqlen_q=20, seqlen_k=30, num_heads_q=2, num_heads_kv=1),
        BF16,
        {"block_m": 16, "block_n": 32, "num_warps": 1},
    ),
    (small("bhsd", seqlen_q=30, seqlen_k=30, head_dim=32), BF16, {"block_m": 32, "block_n": 16, "num_warps": 2}),
    (
        small("qkv_slices", num_heads_q=2, num_heads_kv=1, seqlen_q=20, seqlen_k=20, head_dim=32),
        F16,
        {"block_m": 32, "block_n": 16, "num_warps": 2},
    ),
    (
        small("expanded", num_heads_q=2, num_heads_kv=2, seqlen_q=20, seqlen_k=20, head_dim=32),
        BF16,
        {"block_m": 32, "block_n": 16, "num_warps": 2},
    ),
    (small("decode", seqlen_k=70), BF16, {"block_m": 16, "block_n": 32, "num_warps": 1, "num_stages": 2}),
    (BY_NAME["no_keys"], BF16, {"block_m": 16, "block_n": 16, "num_warps": 1, "num_stages": 2}),
    (small("large_logits", seqlen_q=30, seqlen_k=30), F16, {"block_m": 32, "block_n": 16, "num_warps": 2}),
    (small("softcap_huge", seqlen_q=20, seqlen_k=20), F16, {"block_m": 32, "block_n": 16, "num_warps": 2}),
    (BY_NAME["huge_one_key"], BF16, {"block_m": 16, "block_n": 16, "num_warps": 1}),
]
# The same kernel with a stale origin in the interior: several whole tiles, edges on both sides, no whole tile at all.
STALE: list[tuple[Case, torch.dtype, dict[str, Any]]] = [
    (small("full", seqlen_q=40, seqlen_k=90), BF16, {"block_m": 32, "block_n": 16, "num_warps": 2, "num_stages": 3}),
    (small("causal", seqlen_q=70, seqlen_k=70), F16, {"block_m": 32, "block_n": 16, "num_warps": 2, "num_stages": 2}),
    (
        small("window_left", seqlen_q=90, seqlen_k=90),
        BF16,
        {"block_m": 32, "block_n": 16, "num_warps": 2, "num_stages": 2, "q_in_registers": True},
    ),
    (small("longer_q_bottom_right", seqlen_q=70), BF16, {"block_m": 32, "block_n": 16, "num_warps": 2}),
    (small("softcap_window", seqlen_q=40, seqlen_k=60), BF16, {"block_m": 16, "block_n": 16, "num_warps": 1, "num_stages": 2}),
    (small("dim_72", seqlen_q=40, seqlen_k=70), BF16, {"block_m": 32, "block_n": 16, "num_warps": 1, "num_stages": 2}),
    (small("large_logits", seqlen_q=30, seqlen_k=70), F16, {"block_m": 32, "block_n": 16, "num_warps": 2, "num_stages": 2}),
    (BY_NAME["no_keys"], BF16, {"block_m": 16, "block_n": 16, "num_warps": 1, "num_stages": 2}),
]
CUTE = ("full", "window_left", "longer_q_bottom_right")


@pytest.mark.parametrize(("case", "dtype", "knobs"), RUNS, ids=[str(run[0]) for run in RUNS])
def test_cuda_fwd_sm80_keeps_the_error_budget(case: Case, dtype: torch.dtype, knobs: dict[str, Any]) -> None:
    tensors = case.inputs(dtype)
    out, lse, conflicts = forward("cuda.fwd_sm80", tensors, knobs, case.options)
    oracle.check(out, lse, *tensors, **case.options)
    if knobs.get("swizzle", True):
        assert conflicts == 0


@pytest.mark.parametrize(("case", "dtype", "knobs"), STALE, ids=[str(run[0]) for run in STALE])
def test_a_stale_origin_keeps_the_error_budget(case: Case, dtype: torch.dtype, knobs: dict[str, Any]) -> None:
    tensors = case.inputs(dtype)
    out, lse, conflicts = forward("cuda.fwd_sm80", tensors, {**knobs, "stale_origin": True}, case.options)
    oracle.check(out, lse, *tensors, **case.options)
    assert conflicts == 0


GROWTH = [
    ("up to the limit", BF16, 30.0),
    ("beyond it", BF16, 300.0),
    ("beyond float16", F16, 30.0),
    ("infinite", BF16, math.inf),
]


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize(("dtype", "growth"), [g[1:] for g in GROWTH], ids=[g[0] for g in GROWTH])
def test_scores_that_outgrow_a_stale_origin_are_found(dtype: torch.dtype, growth: float, num_stages: int) -> None:
    """Later keys of one head score far above those of the first tile, or are infinite; the exact softmax has the answer."""
    case = Case("growing", "", 40, 90, 1, 1, 32, options={"softmax_scale": 1.0})
    q, k, v = (x / 4 for x in case.inputs(dtype))
    q[:, :, :, 0] = 1.0
    k[:, :, :, 0] = torch.where(torch.arange(90) == 70, growth, 0.0)[None, :, None]
    knobs = {"block_m": 32, "block_n": 16, "num_warps": 2, "num_stages": num_stages}
    out, lse, _ = forward("cuda.fwd_sm80", (q, k, v), {**knobs, "stale_origin": True}, case.options)
    if math.isfinite(growth):
        oracle.check(out, lse, q, k, v, **case.options)
    exact_out, exact_lse, _ = forward("cuda.fwd_sm80", (q, k, v), knobs, case.options)
    assert torch.equal(torch.isnan(out), torch.isnan(exact_out))
    assert torch.equal(torch.isnan(lse), torch.isnan(exact_lse))


def test_values_that_overflow_with_a_stale_origin_do_not_with_the_exact_one() -> None:
    case = Case("vast values", "", 20, 90, 1, 1, 32, options={"softmax_scale": 1.0})
    q, k, v = (x / 4 for x in case.inputs(BF16))
    q[:, :, :, 0] = 1.0
    k[:, :, :, 0] = torch.where(torch.arange(90) == 70, 35.0, 0.0)[None, :, None]
    v *= 1e30
    knobs = {"block_m": 32, "block_n": 16, "num_warps": 2, "num_stages": 2, "stale_origin": True}
    out, lse, _ = forward("cuda.fwd_sm80", (q, k, v), knobs, case.options)
    oracle.check(out, lse, q, k, v, **case.options)


@pytest.mark.parametrize(("case", "dtype"), [run[:2] for run in RUNS if run[0].name in CUTE], ids=str)
def test_cute_fwd_sm80_keeps_the_error_budget(case: Case, dtype: torch.dtype) -> None:
    tensors = case.inputs(dtype)
    knobs = {"block_m": 32, "block_n": 32, "num_threads": 64}
    out, lse, conflicts = forward("cute.fwd_sm80", tensors, knobs, case.options)
    oracle.check(out, lse, *tensors, **case.options)
    assert conflicts == 0


@pytest.mark.parametrize("warp_order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_no_warp_needs_another_to_be_late_or_early(num_stages: int, warp_order: tuple[int, ...]) -> None:
    """One warp at a time runs up to its barrier; copies that it must wait for are NaN until it has."""
    case = small("window_both", seqlen_q=40, seqlen_k=60)
    tensors = case.inputs(F16)
    knobs = {"block_m": 32, "block_n": 16, "num_warps": 2, "num_stages": num_stages, "q_in_registers": num_stages == 2}
    knobs["stale_origin"] = num_stages == 3
    out, lse, _ = forward("cuda.fwd_sm80", tensors, knobs, case.options, warp_order)
    oracle.check(out, lse, *tensors, **case.options)


MASKED = [{"causal": True}, {"causal": True, "alignment": "top_left"}, {"window_size": (5, 3)}]


@pytest.mark.parametrize("options", MASKED, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_masked_key_never_influences_a_row(options: dict[str, Any], value: float) -> None:
    """0 * NaN is NaN: rows that end with one are computed again, and only those that see a poisoned key keep it."""
    tensors = Case("masked", "", 40, 44, 2, 1, 32, 40).inputs(BF16)
    knobs = {"block_m": 32, "block_n": 16, "num_warps": 2}
    oracle.check_masked_keys(lambda qkv, options: forward("cuda.fwd_sm80", qkv, knobs, options)[:2], tensors, options, value)


@pytest.mark.parametrize("scale", [1e9, 1e11])
def test_scores_up_to_1e12_pick_the_largest(scale: float) -> None:
    """Rounded to float32 their differences are 0 or huge, and a rounded product in the exponent would be infinite."""
    case = Case("huge", "", 20, 40, 1, 1, 32, options={"softmax_scale": scale, "causal": True})
    tensors = case.inputs(BF16)
    out, _, _ = forward("cuda.fwd_sm80", tensors, {"block_m": 32, "block_n": 16, "num_warps": 2}, case.options)
    want, _ = reference.attention(*tensors, **case.options)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=0.01)


def test_two_runs_give_the_same_bits() -> None:
    case = small("causal", seqlen_q=40, seqlen_k=40)
    knobs = {"block_m": 32, "block_n": 16, "num_warps": 2}
    first, second = (forward("cuda.fwd_sm80", case.inputs(BF16), knobs, case.options)[0] for _ in range(2))
    assert torch.equal(first, second)
