"""cute.fwd_sm90 against the float64 oracle with no GPU: its PTX, run by ``ptx_cute``."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import oracle
import ptx_cute
from cases import CAUSAL, TOP_LEFT, Case
from peakattn import dispatch, reference
from peakattn.backends import load, toolchain
from peakattn.backends.cute.fwd_sm90 import Config
from peakattn.problem import AttentionProblem

F16, BF16 = torch.float16, torch.bfloat16
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def forward(tensors: Tensors, config: Config, options: dict[str, Any], blocks: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of one call; by ``blocks`` blocks, where a block shall take several tiles."""
    if (reason := dispatch.unavailable("cute")) is not None:
        pytest.skip(reason)
    q, k, v = tensors
    problem = AttentionProblem.of(q, k, v, return_lse=True, **options)
    out = torch.empty_like(q) if v.shape[3] == q.shape[3] else q.new_empty(*q.shape[:3], v.shape[3])
    out.fill_(math.nan)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan)
    numbers = (1 / math.sqrt(problem.head_dim), options.get("softcap") or 0.0)
    (launch,) = load("cute.fwd_sm90").launches(problem, config, q, k, v, out, lse, *numbers)
    ptx_cute.run(launch, toolchain("cute").compile_launch(launch, 90), blocks)
    return out, lse


ONE, TWO = Config(64, 64), Config(128, 64, schedule="dynamic", separate_out=True)
PACKED = Config(64, 64, schedule="dynamic", pack_heads=True)
PACKED_TWO = Config(128, 48, num_stages=3, schedule="static", pack_heads=True)

# Case, dtype, config, and the number of blocks.
RUNS: list[tuple[Case, torch.dtype, Config, int | None]] = [
    (Case("two_consumers", "a block takes two tiles", 150, 150, 1, 1, options=CAUSAL), BF16, TWO, 1),
    (Case("moved_origin", "scores outgrow the first tile's", 20, 400, 1, 1, scale=35.0), F16, ONE, None),
    (Case("group_4", "two consumers, of which the second has rows past the end", 20, 97, 8, 2, 128, options=TOP_LEFT), F16,
     Config(128, 64, schedule="dynamic", separate_out=True, pack_heads=True), 1),
    (Case("group_7", "a row in 64 is idle", 20, 130, 7, 1, options={"softcap": 3.0, "causal": True}), BF16, PACKED, 2),
    (Case("group_40", "24 rows in 64 are idle", 3, 100, 40, 1, options=CAUSAL), BF16, PACKED_TWO, 1),
    (Case("packed_window", "edges inside a tile; heads outside", 35, 66, 8, 2, batch=2, layout="bhsd",
          options={"window_size": (20, 3)}), BF16, PACKED_TWO, 1),
    (Case("packed_blind", "rows, and whole tiles of them, that see no key", 60, 20, 8, 1, options=CAUSAL), F16, PACKED, 2),
]  # fmt: skip


@pytest.mark.parametrize(("case", "dtype", "config", "blocks"), RUNS, ids=lambda x: x.name if isinstance(x, Case) else "")
def test_the_ptx_computes_attention(case: Case, dtype: torch.dtype, config: Config, blocks: int | None) -> None:
    tensors = case.inputs(dtype)
    out, lse = forward(tensors, config, case.options, blocks)
    oracle.check(out, lse, *tensors, **case.options)


def test_rows_are_repaired_from_visible_keys_alone() -> None:
    """NaN and inf in V where a row does not see it, though its tile does."""
    options: dict[str, Any] = {"window_size": (5, 3)}
    q, k, v = Case("repair", "", 20, 24, 3, 1).inputs(BF16)
    clean, clean_lse = reference.attention(q, k, v, **options)
    v[:, 12], v[:, 23] = math.nan, math.inf
    out, lse = forward((q, k, v), PACKED, options, None)
    ranges = [AttentionProblem.of(q, k, v, **options).key_range(i) for i in range(20)]
    blind = [i for i, (first, last) in enumerate(ranges) if not any(first <= j < last for j in (12, 23))]
    assert 4 <= len(blind) < 16
    torch.testing.assert_close(out[:, blind].double(), clean[:, blind], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), clean_lse, rtol=1e-4, atol=1e-4)
    seeing = [i for i, (first, last) in enumerate(ranges) if first <= 12 < last]
    assert out[:, seeing].isnan().all()
