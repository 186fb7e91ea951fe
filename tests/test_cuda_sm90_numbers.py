"""cuda.fwd_sm90 against the float64 oracle with no GPU: its PTX, run by ``ptx_hopper``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import oracle
import ptx_hopper
from cases import BY_NAME, Case, small
from peakattn import dispatch, reference
from peakattn.backends import toolchain
from peakattn.backends.cuda import fwd_sm90
from peakattn.problem import AttentionProblem

F16, BF16 = torch.float16, torch.bfloat16
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def forward(
    tensors: Tensors,
    knobs: dict[str, Any],
    options: dict[str, Any],
    grid: int | None = None,
    warp_order: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of one forward call; with ``grid`` blocks, where a block may take several tiles."""
    if (reason := dispatch.unavailable("cuda")) is not None:
        pytest.skip(reason)
    q, k, v = tensors
    problem = AttentionProblem.of(q, k, v, return_lse=True, **options)
    out = torch.empty_like(q[..., :1].expand(*q.shape[:3], v.shape[3]), memory_format=torch.contiguous_format).fill_(math.nan)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan)
    scale = options.get("softmax_scale") or 1 / math.sqrt(problem.head_dim)
    config = fwd_sm90.Config(**knobs)
    (launch,) = fwd_sm90.launches(problem, config, q, k, v, out, lse, scale, options.get("softcap") or 0.0)
    compiled = toolchain("cuda").compile_launch(launch, 90)
    conflicts = ptx_hopper.run(compiled, launch, [lse], grid, warp_order)
    assert conflicts == 0
    return out, lse


# Case, dtype, knobs, and the number of blocks where one shall take several tiles.
RUNS: list[tuple[Case, torch.dtype, dict[str, Any], int | None]] = [
    (small("full", seqlen_q=70, seqlen_k=200), BF16, {"block_m": 128, "block_n": 64}, None),
    (small("causal", seqlen_q=200, seqlen_k=200), F16, {"block_m": 64, "block_n": 32, "num_stages": 3}, 3),
    (small("window_left", batch=1), BF16, {"block_m": 128, "block_n": 16, "schedule": "static"}, 1),
    (
        small("window_past_keys"),
        F16,
        {"block_m": 64, "block_n": 16, "schedule": "single", "separate_out": False, "num_stages": 4},
        None,
    ),
    (small("longer_q_bottom_right"), BF16, {"block_m": 64, "block_n": 32, "separate_out": False}, 2),
    (small("softcap_window", num_heads_q=3, num_heads_kv=1), F16, {"block_m": 64, "block_n": 48}, None),
    (small("gqa_3", num_heads_q=6, num_heads_kv=2, head_dim=16), BF16, {"block_m": 64, "block_n": 64}, 2),
    (small("dim_256"), F16, {"block_m": 128, "block_n": 64, "separate_out": False}, None),
    (small("latent"), BF16, {"block_m": 64, "block_n": 32}, None),
    (small("wide_v", num_heads_q=1, num_heads_kv=1), F16, {"block_m": 64, "block_n": 80}, None),
    (small("bhsd", seqlen_q=20, seqlen_k=20, head_dim=32), BF16, {"block_m": 64, "block_n": 32}, 1),
    (small("expanded", num_heads_q=2, num_heads_kv=2, seqlen_q=20, seqlen_k=20), BF16, {"block_m": 64, "block_n": 32}, 1),
    (small("decode"), BF16, {"block_m": 64, "block_n": 64}, None),
    (small("large_logits"), F16, {"block_m": 64, "block_n": 32}, None),
    (BY_NAME["huge_one_key"], BF16, {"block_m": 64, "block_n": 64}, None),
]


@pytest.mark.parametrize(("case", "dtype", "knobs", "grid"), RUNS, ids=[str(run[0]) for run in RUNS])
def test_cuda_fwd_sm90_keeps_the_error_budget(case: Case, dtype: torch.dtype, knobs: dict[str, Any], grid: int | None) -> None:
    tensors = case.inputs(dtype)
    out, lse = forward(tensors, knobs, case.options, grid)
    oracle.check(out, lse, *tensors, **case.options)


@pytest.mark.parametrize("keep_origin", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_scores_that_outgrow_their_row_move_its_origin(options: dict[str, Any], keep_origin: bool) -> None:
    """Keys grow towards the first one, where a consumer arrives last: by factors of 2 to 60 from tile to tile."""
    q, k, v = (x.abs() for x in Case("growing", "", 70, 200, 1, 1, 32).inputs(F16))
    k = (k * torch.linspace(12.0, 0.1, 200).reshape(1, 200, 1, 1)).to(F16)
    knobs = {"block_m": 64, "block_n": 32, "keep_origin": keep_origin}
    out, lse = forward((q, k, v), knobs, options)
    oracle.check(out, lse, q, k, v, **options)


@pytest.mark.parametrize("separate_out", [False, True])
@pytest.mark.parametrize(
    "warp_order", [(0, 4, 5, 6, 7, 8, 9, 10, 11, 1, 2, 3), (11, 7, 10, 6, 9, 5, 8, 4, 3, 2, 1, 0)], ids=["up", "down"]
)
def test_no_warp_needs_another_to_be_late_or_early(separate_out: bool, warp_order: tuple[int, ...]) -> None:
    """One warp at a time runs until it must wait; a block takes five tiles of a window, two of them at an end."""
    case = small("window_both", seqlen_q=300, seqlen_k=300, head_dim=32)
    tensors = case.inputs(F16)
    knobs = {"block_m": 128, "block_n": 64, "separate_out": separate_out}
    out, lse = forward(tensors, knobs, {"window_size": (70, 40)}, 1, warp_order)
    oracle.check(out, lse, *tensors, window_size=(70, 40))


MASKED = [{"causal": True}, {"causal": True, "alignment": "top_left"}, {"window_size": (5, 3)}]


@pytest.mark.parametrize(("options", "value"), [*((options, math.nan) for options in MASKED), (MASKED[0], math.inf)], ids=str)
def test_a_masked_key_never_influences_a_row(options: dict[str, Any], value: float) -> None:
    """0 * NaN is NaN: rows that end with one are computed again, and only those that see a poisoned key keep it."""
    tensors = Case("masked", "", 40, 44, 2, 1, 32, 40).inputs(BF16)
    knobs = {"block_m": 64, "block_n": 16}
    oracle.check_masked_keys(lambda qkv, options: forward(qkv, knobs, options), tensors, options, value)


@pytest.mark.parametrize("scale", [1e9, 1e11])
def test_scores_up_to_1e12_pick_the_largest(scale: float) -> None:
    """Rounded to float32 their differences are 0 or huge, and a rounded product in the exponent would be infinite."""
    case = Case("huge", "", 20, 100, 1, 1, 32, options={"softmax_scale": scale, "causal": True})
    tensors = case.inputs(BF16)
    out, _ = forward(tensors, {"block_m": 64, "block_n": 32}, case.options)
    want, _ = reference.attention(*tensors, **case.options)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=0.01)
