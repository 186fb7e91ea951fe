"""The cuTile kernels' own source, on CPU tensors, against the float64 oracle."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import pytest
import torch

import cutile_emulator as emulator
from cases import BY_NAME, CASES, Case
from peakattn import reference
from peakattn.backends.cutile import bwd, common, fwd
from peakattn.device import Device
from peakattn.problem import AttentionProblem

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

H200 = Device.named("h200")


def on_a_gpu(problem: AttentionProblem) -> AttentionProblem:
    return dataclasses.replace(problem, device_type="cuda")


def scalars(q: torch.Tensor, options: dict[str, Any]) -> tuple[torch.Tensor, float, float]:
    """q, softmax_scale and softcap as the API hands them to a kernel, which takes a positive scale only."""
    scale = options.get("softmax_scale")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    sign = (scale > 0) - (scale < 0)
    return q if sign == 1 else q * sign, abs(scale) or 1.0, options.get("softcap") or 0.0


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: fwd.Config | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    problem = on_a_gpu(AttentionProblem.of(q, k, v, return_lse=True, **options))
    assert fwd.reject(problem, H200) is None
    out = torch.full((*q.shape[:-1], v.shape[-1]), math.nan, dtype=q.dtype)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan)
    q, scale, softcap = scalars(q, options)
    config = config or fwd.default_config(problem, H200)
    emulator.run(fwd.launches(problem, config, q, k, v, out, lse, scale, softcap))
    return out, lse


def check_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: fwd.Config | None = None, **options: Any) -> None:
    out, lse = forward(q, k, v, config, **options)
    exact = reference.attention(q, k, v, **options)
    low = reference.attention(q, k, v, dtype=q.dtype, **options)
    reference.check(out, exact[0], low[0], "out")
    reference.check(lse, exact[1], low[1], "lse", dtype=torch.float32)


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    config: bwd.Config | None = None,
    needs: tuple[bool, bool, bool] = (True, True, True),
    **options: Any,
) -> list[torch.Tensor | None]:
    problem = on_a_gpu(AttentionProblem.of(q, k, v, **options)).backward(
        needs_dq=needs[0], needs_dk=needs[1], needs_dv=needs[2], aligned=True
    )
    assert bwd.reject(problem, H200) is None
    out, lse = forward(q, k, v, **options)
    grads = [torch.full(x.shape, math.nan, dtype=x.dtype) if need else None for x, need in zip((q, k, v), needs, strict=True)]
    folded, scale, softcap = scalars(q, options)
    config = config or bwd.default_config(problem, H200)
    scratch = {name: torch.full(shape, math.nan) for name, (shape, _) in bwd.workspace(problem, config).items()}
    inputs = (folded, k, v, out, lse, dout, dlse)
    dq, dk, dv = grads
    emulator.run(bwd.launches(problem, config, *inputs, dq, dk, dv, scale, softcap, scratch))
    if grads[0] is not None and folded is not q:
        grads[0] *= -1 if options["softmax_scale"] < 0 else 0
    return grads


def check_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    config: bwd.Config | None = None,
    needs: tuple[bool, bool, bool] = (True, True, True),
    **options: Any,
) -> None:
    grads = backward(q, k, v, dout, dlse, config, needs, **options)
    exact = reference.attention_backward(q, k, v, dout, dlse, **options)
    low = reference.attention_backward(q, k, v, dout, dlse, dtype=q.dtype, **options)
    for name, grad, want, rough in zip(("dq", "dk", "dv"), grads, exact, low, strict=True):
        if grad is not None:
            reference.check(grad, want, rough, name)


FWD = {
    "tall": fwd.Config(64, 16),
    "wide": fwd.Config(16, 64, block_masked=16, row_sums=16),
    "halves": fwd.Config(32, 64, block_masked=32, row_sums=1),
    "square": fwd.Config(32, 32, k_latency=0, v_latency=0),
    "two tiles": fwd.Config(16, 32, block_masked=16, row_sums=8, row_tiles=2, stagger=3),
    "wide tiles": fwd.Config(16, 256, block_masked=32, row_sums=32, row_tiles=3, stagger=1),
}
BWD = {"small and large": bwd.Config(16, 32, 32, 16), "large and small": bwd.Config(64, 16, 16, 64, dkdv_split=True)}

# The backward has only lse, which at 1e11 says nothing of the scores' difference to it; such rows count as empty.
DIFFERENTIABLE = [case for case in CASES if case.name != "huge_one_key"]
SHAPES = [BY_NAME[name] for name in ("several_tiles", "longer_q_bottom_right", "window_both", "softcap_window", "wide_v")]


def gradients_of(case: Case, dtype: torch.dtype) -> Tensors:
    """Inputs, dout and dlse."""
    q, k, v = case.inputs(dtype)
    dout = case.dout(q.new_empty(*q.shape[:-1], v.shape[-1]))
    return q, k, v, dout, case.dlse(torch.empty(q.shape[0], q.shape[2], q.shape[1]))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case: Case) -> None:
    check_forward(*case.inputs(torch.bfloat16), FWD["square"], **case.options)


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=str)
def test_backward(case: Case) -> None:
    check_backward(*gradients_of(case, torch.bfloat16), BWD["small and large"], **case.options)


@pytest.mark.parametrize("case", SHAPES, ids=str)
@pytest.mark.parametrize("config", FWD)
def test_the_forward_is_right_under_other_tiles(case: Case, config: str) -> None:
    check_forward(*case.inputs(torch.float16), FWD[config], **case.options)


@pytest.mark.parametrize("case", SHAPES, ids=str)
@pytest.mark.parametrize("config", BWD)
def test_the_backward_is_right_under_other_tiles(case: Case, config: str) -> None:
    check_backward(*gradients_of(case, torch.float16), BWD[config], **case.options)


@pytest.mark.parametrize("name", ["several_tiles", "softcap", "window_left", "dim_33", "large_logits"])
def test_float32_keeps_float32_accuracy(name: str) -> None:
    case = BY_NAME[name]
    check_forward(*case.inputs(torch.float32), **case.options)
    check_backward(*gradients_of(case, torch.float32), **case.options)


@pytest.mark.parametrize("alone", ["dq", "dk", "dv"])
def test_one_gradient_alone(alone: str) -> None:
    case = BY_NAME["gqa_3"]
    needs = (alone == "dq", alone == "dk", alone == "dv")
    check_backward(*gradients_of(case, torch.float16), BWD["small and large"], needs, **case.options)


def test_the_gradient_through_lse_alone_and_a_dout_without_memory_of_its_own() -> None:
    case = BY_NAME["causal"]
    q, k, v, dout, dlse = gradients_of(case, torch.float16)
    check_backward(q, k, v, torch.zeros_like(dout), dlse, **case.options)
    check_backward(q, k, v, torch.ones((), dtype=q.dtype).expand_as(dout), None, **case.options)
    check_backward(q, k, v, dout.transpose(1, 3).contiguous().transpose(1, 3), None, **case.options)


@pytest.mark.parametrize("config", ["square", "two tiles", "wide tiles"])
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_masked_keys_may_hold_anything(softcap: float | None, poison: float, config: str) -> None:
    q, k, v, dout, dlse = gradients_of(BY_NAME["tiny"], torch.float16)
    k, v = torch.cat([k, k], 1), torch.cat([v, v], 1)
    for x in (k, v):
        x[:, 5:] = poison  # no row sees these, though they stand in a block that rows see
    options: dict[str, Any] = {"causal": True, "alignment": "top_left", "softcap": softcap}
    check_forward(q, k, v, FWD[config], **options)
    check_backward(q, k, v, dout, dlse, BWD["small and large"], **options)


@pytest.mark.parametrize("config", ["square", "two tiles"])
def test_a_poisoned_key_reaches_only_the_rows_that_see_it(config: str) -> None:
    q, k, v = BY_NAME["causal"].inputs(torch.float16)
    clean, _ = forward(q, k, v, FWD[config], causal=True)
    v[:, 53] = math.nan
    out, _ = forward(q, k, v, FWD[config], causal=True)
    first = 53 - (k.shape[1] - q.shape[1])
    assert torch.isnan(out[:, first:]).all()
    torch.testing.assert_close(out[:, :first], clean[:, :first], rtol=2e-3, atol=2e-3)


def test_softmax_of_one_key_is_one_however_large_its_score() -> None:
    """exp2 of a rounded difference would overflow here (PT#121558)."""
    q = torch.full((1, 3, 1, 64), 133120.0)
    for score in (1.0, -1.0):
        out, _ = forward(q, score * q[:, :1], q[:, :1])
        assert torch.equal(out, q)


def test_tiles_too_many_for_the_second_axis_of_a_grid_lie_along_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "_MOST_BLOCKS", 1)
    case = BY_NAME["gqa_3"]
    q, k, v = case.inputs(torch.float16)
    check_forward(q, k, v, FWD["square"], **case.options)
    (launch,) = fwd.launches(on_a_gpu(AttentionProblem.of(q, k, v)), FWD["square"], q, k, v, q, None, 1.0, 0.0)
    assert launch.grid[1:] == (q.shape[0] * q.shape[2], 1)
    assert launch.constexprs["BLOCK_AXIS"] == 0


def test_a_section_of_a_grid_has_a_number_of_heads_that_divides_all() -> None:
    assert common.grid(10, 64, 4) == ((4, 10, 16), 1)
    assert common.grid(10, 30, 4) == ((5, 10, 6), 1)
    assert common.grid(10, 7, 4) == ((7, 10, 1), 1)
    assert common.grid(70_000, 64, 4) == ((70_000, 4, 16), 0)
    assert common.grid(10, 2**20, 4) == ((32, 10, 2**15), 1)
    assert common.grid(10, 0, 4) == ((1, 10, 0), 1)


def test_blocks_of_two_row_tiles_share_sections_of_8_megabytes() -> None:
    def first_axis(seqlen: int, **changes: Any) -> int:
        problem = on_a_gpu(AttentionProblem(1, seqlen, seqlen, 16, 16, 128, 128, torch.bfloat16, **changes))
        q = torch.empty(1, seqlen, 16, 128, dtype=torch.bfloat16, device="meta")
        config = fwd.default_config(problem, H200)
        (launch,) = fwd.launches(problem, config, q, q.clone(), q.clone(), q.clone(), None, 1.0, 0.0)
        assert launch.constexprs["TILES"] == config.row_tiles
        assert launch.grid[1] == -(-seqlen // (config.row_tiles * config.block_m))
        return launch.grid[0]

    assert [first_axis(n) for n in (1024, 4096, 8192, 16384, 65536)] == [4, 4, 2, 1, 1]
    assert first_axis(16384, window_right=0) == 4


def test_tf32_only_where_torch_allows_it() -> None:
    q, k, v = BY_NAME["full"].inputs(torch.float32)
    exact, _ = forward(q, k, v)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        rough, _ = forward(q, k, v)
    finally:
        torch.set_float32_matmul_precision(before)
    error = (rough - exact).abs().max()
    assert 1e-5 < error < 1e-2, "ten bits of mantissa"


def test_two_runs_are_equal_bit_by_bit() -> None:
    case = BY_NAME["gqa_3"]
    args = gradients_of(case, torch.float16)
    for one, two in zip(*(backward(*args, **case.options) for _ in range(2)), strict=True):
        assert one is not None
        assert two is not None
        assert torch.equal(one, two)


# The emulator itself.


def test_an_operation_that_the_emulator_does_not_know_is_a_sentence() -> None:
    with pytest.raises(NotImplementedError, match=r"no cuda\.tile\.cumsum; add it to OPERATIONS"):
        emulator.CUDA_TILE.cumsum  # noqa: B018


def test_device_code_leaves_no_trace_of_the_emulator() -> None:
    test_softmax_of_one_key_is_one_however_large_its_score()
    assert sys.modules.get("cuda.tile") is not emulator.CUDA_TILE
    assert not [name for name, module in sys.modules.items() if vars(module).get("ct") is emulator.CUDA_TILE]


def test_memory_outside_an_array_is_no_number_or_an_error() -> None:
    array = emulator.Array(torch.ones(6))
    undefined = emulator.load(array, (1,), (4,)).value
    assert undefined[:2].eq(1).all()
    assert undefined[2:].isnan().all()
    with pytest.raises(IndexError, match="is unchecked and leaves its array"):
        emulator.load(array, (1,), (4,), check_bounds=False)
    with pytest.raises(IndexError, match="lies outside"):
        emulator.load(array, (2,), (4,))


def test_what_the_compiler_would_refuse_is_refused() -> None:
    half, single = emulator.zeros((4, 4), torch.float16), emulator.zeros((4, 4), torch.float32)
    with pytest.raises(TypeError, match="convert one with astype"):
        half + single
    with pytest.raises(TypeError, match="the first two must agree"):
        emulator.mma(half, single, single)
    with pytest.raises(ValueError, match="must be a power of two"):
        emulator.zeros((3,), torch.float32)
    with pytest.raises(ValueError, match="latency is 11"):
        emulator.load(emulator.Array(torch.ones(8)), (0,), (4,), latency=11)
