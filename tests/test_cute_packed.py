"""Packed query heads in ``cute.fwd_sm90``: when, which rows a tile has, and, on a GPU, that nothing else changes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import oracle
import peakattn
from cases import CAUSAL, TOP_LEFT, Case
from peakattn.backends import load
from peakattn.backends.binding import meta_tensors
from peakattn.backends.cute import fwd_sm90
from peakattn.backends.cute.fwd_sm90 import Config
from peakattn.device import Device
from peakattn.problem import AttentionProblem

KERNEL = load("cute.fwd_sm90")
H200 = Device.named("h200")
DECODE = AttentionProblem(4, 4, 4096, 32, 8, 128, 128, torch.bfloat16, window_right=0)
ONE, TWO = Config(64, 64, pack_heads=True), Config(128, 64, pack_heads=True)


def of(**change: Any) -> AttentionProblem:
    return dataclasses.replace(DECODE, **change)


# When heads are packed.


@pytest.mark.parametrize(
    ("change", "packed", "block_m"),
    [
        ({}, True, 64),
        ({"seqlen_q": 1, "num_heads_kv": 4}, True, 64),
        ({"seqlen_q": 48}, True, 64),  # 96 tiles of 64, fewer than SMs
        ({"seqlen_q": 48, "batch": 8}, False, 64),  # as many rows of tiles either way
        ({"seqlen_q": 64}, False, 64),  # four full tiles either way
        ({"seqlen_q": 64, "batch": 8}, False, 64),
        ({"seqlen_q": 16, "num_heads_kv": 4, "batch": 32}, True, 128),  # 256 of 64
        ({"seqlen_q": 128}, False, 128),
        ({"seqlen_q": 4096}, False, 128),
        ({"seqlen_q": 1, "num_heads_kv": 32}, False, 64),  # no groups
        ({"seqlen_q": 1, "num_heads_q": 80, "num_heads_kv": 1}, False, 64),  # a group that no consumer holds
    ],
    ids=str,
)
def test_the_default_packs_where_that_leaves_fewer_rows_of_tiles(change: dict[str, Any], packed: bool, block_m: int) -> None:
    config = fwd_sm90.default_config(of(**change), H200)
    assert (config.pack_heads, config.block_m) == (packed, block_m)


@pytest.mark.parametrize(("heads", "group"), [((32, 32), 1), ((65, 1), 65)])
def test_a_group_that_cannot_be_packed_is_refused_in_a_sentence(heads: tuple[int, int], group: int) -> None:
    problem = of(num_heads_q=heads[0], num_heads_kv=heads[1])
    assert f"here a kv head has {group}; give pack_heads=False" in (fwd_sm90.misfit(problem, ONE, H200) or "")
    assert not any(config.pack_heads for config in fwd_sm90.search_space(problem, H200))
    with pytest.raises(ValueError, match=r"give pack_heads=False\.$"):
        KERNEL.launches(problem, ONE, *meta_tensors(problem), 1.0, 0.0)


def test_the_search_space_has_each_config_with_and_without() -> None:
    space = list(fwd_sm90.search_space(DECODE, H200))
    packed = {dataclasses.replace(config, pack_heads=False) for config in space if config.pack_heads}
    assert packed == {config for config in space if not config.pack_heads}
    assert len(space) == 2 * len(packed)


# Which rows a tile has.


@pytest.mark.parametrize(("group", "config"), [(4, ONE), (7, ONE), (3, TWO), (64, TWO), (40, TWO)])
def test_tiles_cover_each_position_once(group: int, config: Config) -> None:
    problem = of(seqlen_q=150, num_heads_q=2 * group, num_heads_kv=2)
    (launch,) = KERNEL.launches(problem, config, *meta_tensors(problem), 1.0, 0.0)
    positions = config.num_consumers * (64 // group)
    assert launch.args["num_m_blocks"] == math.ceil(150 / positions)
    assert launch.args["num_tiles"] == launch.grid[0] == 4 * 2 * math.ceil(150 / positions)
    # A tile's head is a kv head.
    assert (launch.args["num_heads"], launch.args["group"], launch.args["total_heads"]) == (2, 1, 8)
    assert launch.constexprs["heads_per_tile"] == group


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "qkv"])
@pytest.mark.parametrize("group", [2, 3, 8])
def test_the_descriptor_brings_position_by_position_all_heads_of_a_group(group: int, layout: str) -> None:
    case = Case("packed", "", 50, 60, 2 * group, 2, 64, batch=2, layout=layout)
    q, k, v = case.inputs(torch.bfloat16)
    problem = AttentionProblem.of(q, k, v)
    (launch,) = KERNEL.launches(problem, ONE, q, k, v, q.clone(), None, 1.0, 0.0)
    for name in ("q_map", "out_map"):
        value = launch.args[name]
        tensor_map = value.tensor_map(3)
        assert tensor_map.slot == 3
        assert tensor_map.block_shape == (1, 1, 64 // group, group, 64)
        assert tensor_map.shape == (2, 2, 50, group, 64)
        x = value.tensor
        seen = torch.as_strided(x, tensor_map.shape, tensor_map.strides, x.storage_offset())
        for head in range(2 * group):
            assert torch.equal(seen[:, head // group, :, head % group], x[:, :, head])


# On a GPU.


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: Config, **options: Any) -> Any:
    try:
        return peakattn.attention(q, k, v, backend="cute.fwd_sm90", config=config, **options)
    except peakattn.NoKernelError as refusal:
        pytest.skip(str(refusal))


CASES = [
    Case("group_2", "", 37, 97, 4, 2, 64, batch=2),
    Case("group_4", "", 37, 97, 8, 2, 128, batch=2, options=CAUSAL),
    Case("group_8", "", 37, 97, 16, 2, 128, batch=2, options=TOP_LEFT),
    Case("group_3", "64 = 21 x 3 + 1", 150, 277, 6, 2, 64, batch=2, options=CAUSAL),
    Case("group_7", "64 = 9 x 7 + 1", 61, 200, 14, 2, 128, options={"softcap": 3.0, "causal": True}),
    Case("group_40", "24 idle rows", 5, 100, 40, 1, 64, options=CAUSAL),
    Case("group_64", "one position a consumer", 5, 100, 64, 1, 64, options=CAUSAL),
    Case("decode", "one query, every head of it in one tile", 1, 1000, 32, 4, 128, batch=3, options=CAUSAL),
    Case("many_tiles", "more tiles than blocks: each block takes several", 200, 200, 32, 8, 64, batch=8, options=CAUSAL),
    Case("window", "both edges inside a tile", 130, 300, 8, 2, 96, options={"window_size": (33, 5)}),
    Case("window_left", "left edge alone", 130, 130, 8, 2, 64, options={"window_size": (40, None)}),
    Case("window_top_left", "rows past the keys", 120, 30, 8, 1, 64, options={"window_size": (8, 2), **TOP_LEFT}),
    Case("softcap", "", 33, 150, 8, 4, 256, options={"softcap": 3.0, "causal": True}),
    Case("no_visible_keys", "whole tiles of rows that see no key", 150, 40, 8, 2, 64, options=CAUSAL),
    Case("wide_v", "head_dim_v apart", 33, 150, 8, 2, 40, 128, options=CAUSAL),
    Case("bhsd", "heads outside", 37, 97, 8, 2, 128, batch=2, layout="bhsd", options=CAUSAL),
    Case("qkv", "slices of one tensor", 50, 50, 8, 2, 64, batch=2, layout="qkv", options=CAUSAL),
    Case("large_logits", "rows that move their origin", 60, 600, 8, 2, 64, scale=35.0, options=CAUSAL),
]


# Each case under two configs, of one consumer and of two, and each schedule under half of the cases.
DYNAMIC = Config(64, 64, schedule="dynamic", pack_heads=True)
STATIC = Config(128, 48, num_stages=3, schedule="static", pack_heads=True)
SEPARATE = Config(128, 64, schedule="dynamic", separate_out=True, pack_heads=True)
RUNS = [
    (case, config, torch.bfloat16) for i, case in enumerate(CASES) for config in ((DYNAMIC, STATIC), (ONE, SEPARATE))[i % 2]
]
RUNS += [(case, DYNAMIC, torch.float16) for case in CASES if case.name in ("group_4", "window", "large_logits")]


def misfits(case: Case, config: Config) -> bool:
    q, k, v = case.inputs(torch.bfloat16)
    return fwd_sm90.misfit(AttentionProblem.of(q, k, v), config, H200) is not None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_case_fits_its_configs(case: Case) -> None:
    assert not any(misfits(case, config) for other, config, _ in RUNS if other is case)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "config", "dtype"), RUNS, ids=lambda x: x.schedule if isinstance(x, Config) else str(x))
def test_packed_heads_mean_the_same(case: Case, config: Config, dtype: torch.dtype) -> None:
    q, k, v = case.inputs(dtype, "cuda")
    out, lse = attention(q, k, v, config, return_lse=True, **case.options)
    oracle.check(out, lse, q, k, v, **case.options)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [4, 3])
@pytest.mark.parametrize("options", [CAUSAL, {"window_size": (5, 3)}], ids=str)
def test_packed_rows_are_repaired_by_themselves(group: int, options: dict[str, Any]) -> None:
    """NaN and inf in masked V, behind a row's edge and in front of it, reach no row that does not see them."""
    q, k, v = Case("repair", "", 40, 40, 2 * group, 2, 64).inputs(torch.bfloat16, "cuda")
    clean, clean_lse = attention(q, k, v, ONE, return_lse=True, **options)
    v[:, 20], v[:, 39] = math.nan, math.inf
    out, lse = attention(q, k, v, ONE, return_lse=True, **options)
    ranges = [AttentionProblem.of(q, k, v, **options).key_range(i) for i in range(40)]
    blind = [i for i, (first, last) in enumerate(ranges) if not any(first <= j < last for j in (20, 39))]
    assert 15 <= len(blind) < 40
    torch.testing.assert_close(out[:, blind], clean[:, blind], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse, clean_lse, rtol=1e-4, atol=1e-4)
    assert out[:, 20].isnan().all()


@pytest.mark.gpu
def test_many_repeats_of_packed_tiles_are_bitwise_equal() -> None:
    """More tiles than the GPU holds blocks; with lse or without it, the output is the same."""
    q, k, v = Case("repeats", "", 33, 500, 32, 4, 128, batch=40).inputs(torch.bfloat16, "cuda")
    config = Config(64, 128, schedule="dynamic", pack_heads=True)
    first, _ = attention(q, k, v, config, causal=True, return_lse=True)
    assert not first.isnan().any()
    for _ in range(50):
        assert torch.equal(attention(q, k, v, config, causal=True), first)
