"""What NVRTC makes of ``cuda.fwd_sm90``, with no GPU: registers, spills, products in flight; and what it refuses."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from peakattn import dispatch
from peakattn.backends import toolchain
from peakattn.backends.binding import meta_tensors
from peakattn.backends.contract import Artifacts
from peakattn.backends.cuda import fwd_sm90
from peakattn.backends.cuda.fwd_sm90 import Config
from peakattn.device import Device
from peakattn.problem import AttentionProblem

H200 = Device.named("h200")
CAUSAL = AttentionProblem(4, 4096, 4096, 16, 16, 128, 128, torch.bfloat16, window_right=0, return_lse=True)


def of_dim(head_dim: int, head_dim_v: int | None = None, problem: AttentionProblem = CAUSAL) -> AttentionProblem:
    return dataclasses.replace(problem, head_dim=head_dim, head_dim_v=head_dim_v or head_dim)


def artifacts(problem: AttentionProblem, config: Config) -> Artifacts:
    if (reason := dispatch.unavailable("cuda")) is not None:
        pytest.skip(reason)
    (made,) = toolchain("cuda").artifacts("cuda.fwd_sm90", problem, config, H200.arch)
    return made


@pytest.mark.parametrize(
    ("head_dim", "change", "keep_origin"),
    [
        (64, {"seqlen_q": 1024, "seqlen_k": 1024}, True),
        (64, {"window_right": None, "return_lse": False}, True),
        (128, {}, True),
        (128, {}, False),
        (256, {"window_right": None}, True),
        (192, {"window_left": 1000, "dtype": torch.float16}, False),
    ],
    ids=["64-causal-1k", "64-full", "128-causal", "128-causal-exact", "256-full", "192-window-fp16-exact"],
)
def test_default_configs_keep_their_products_in_flight(head_dim: int, change: dict[str, object], keep_origin: bool) -> None:
    problem = dataclasses.replace(of_dim(head_dim), **change)  # type: ignore[arg-type]
    config = dataclasses.replace(fwd_sm90.default_config(problem, H200), keep_origin=keep_origin)
    made = artifacts(problem, config)
    assert made.num_threads == config.num_threads
    assert made.shared_bytes == fwd_sm90.shared_bytes(problem, config)
    assert made.registers * made.num_threads * config.occupancy <= 64 * 1024
    assert made.frame_bytes == 0
    assert made.loop_spills == made.spill_instructions == 0
    # What setmaxnreg hands to the consumers must have been there at the launch: a block that asks for more waits for ever.
    assert made.ptx is not None
    (producer,) = map(int, re.findall(r"setmaxnreg\.dec\.\S+ (\d+);", made.ptx))
    (consumer,) = map(int, re.findall(r"setmaxnreg\.inc\.\S+ (\d+);", made.ptx))
    assert consumer == fwd_sm90.consumer_registers(config)
    assert producer + config.num_consumers * consumer <= made.registers * (config.num_consumers + 1)
    assert made.opcodes["USETMAXREG"] == 2

    steps = 2 + (problem.window_right is not None) + (problem.window_left is not None)  # the first tile, and each loop
    assert made.opcodes["HGMMA"] == steps * (head_dim // 16 + config.block_n // 16)
    boxes = head_dim // 64
    assert made.opcodes["UTMALDG"] == boxes * (2 + 2 + config.num_consumers), "K and V at two places, Q for each consumer"
    assert made.opcodes["UTMASTG"] == boxes
    # A compiler that cannot follow products in flight waits for each of them.
    assert made.sass is not None
    assert made.sass.count("WARPGROUP.DEPBAR") == 2 + 2 * (steps - 1) + keep_origin
    # The exponentials run under the second product only where they stand in front of its wait.
    for part in made.sass.split("WARPGROUP.DEPBAR.LE gsb0, 0x1")[1:]:
        assert part.split("WARPGROUP.DEPBAR.LE gsb0, 0x0")[0].count("MUFU.EX2") >= config.block_n // 2
    assert len(made.loops) == steps - 1
    interior = min(made.loops, key=lambda loop: loop.get("ISETP", 0))
    assert interior["HGMMA"] == head_dim // 16 + config.block_n // 16
    assert interior.get("ISETP", 0) < 16, "no mask code in the interior"
    assert max(loop.get("R2UR", 0) for loop in made.loops) <= 1, "descriptors and slots stay in uniform registers"
    assert ("HMMA" in made.opcodes) == keep_origin, "the way of a warp that computes its scores again"


def test_columns_that_are_only_padding_cost_no_products() -> None:
    """head_dim 72 has 5 steps of k, and v of 40 has a second product of 48 columns."""
    problem = dataclasses.replace(of_dim(72, 40), window_right=None)
    made = artifacts(problem, Config(64, 32))
    assert made.opcodes["HGMMA"] == 2 * (5 + 2)
    assert made.ptx is not None
    assert {int(n) for n in re.findall(r"\.m64n(\d+)k16", made.ptx)} == {32, 48}


def test_a_problem_without_a_mask_has_no_repair() -> None:
    full = dataclasses.replace(of_dim(64), window_right=None)
    loops = [artifacts(problem, Config(64, 32)).opcodes.get("LDG", 0) for problem in (full, of_dim(64))]
    assert loops[0] == 0 < loops[1], "nothing but TMA reads q, k and v"


@pytest.mark.parametrize(("head_dim", "head_dim_v", "separate_out"), [(40, 72, True), (72, 40, False)])
def test_the_shared_memory_formula_is_that_of_the_device_code(head_dim: int, head_dim_v: int, separate_out: bool) -> None:
    """Rows are whole boxes of 128 bytes; the last thing in shared memory is the second number of a tile."""
    problem, config = of_dim(head_dim, head_dim_v), Config(64, 32, 3, separate_out=separate_out)
    made = artifacts(problem, config)
    assert made.ptx is not None
    (last,) = re.findall(r"NEXT_AT = (\d+);", made.ptx)
    assert int(last) + 8 == made.shared_bytes
    row, row_v = 128 * -(-head_dim // 64), 128 * -(-head_dim_v // 64)
    assert made.shared_bytes // 1024 * 1024 == 64 * (row + row_v * separate_out) + 3 * 32 * (row + row_v)


def test_the_default_for_every_head_dim_fits() -> None:
    for head_dim in range(8, 257, 8):
        for head_dim_v in {head_dim, 64, 96, 256}:
            for seqlen_q in (1, 1024, 4096):
                problem = dataclasses.replace(of_dim(head_dim, head_dim_v), seqlen_q=seqlen_q, seqlen_k=max(seqlen_q, 64))
                config = fwd_sm90.default_config(problem, H200)
                assert fwd_sm90.misfit(problem, config, H200) is None, (head_dim, head_dim_v, config)


def test_tensor_maps_are_parameters_by_value_and_of_the_tensors_own_shape() -> None:
    problem = dataclasses.replace(of_dim(64), num_heads_kv=4)
    q, k, v, out, lse = meta_tensors(problem)
    assert q is not None and k is not None and v is not None and out is not None  # noqa: PT018
    (launch,) = fwd_sm90.launches(problem, Config(128, 64), q, k, v, out, lse, 1.0, 0.0)
    made = launch.args["k_map"].tensor_map(1)
    assert made.shape == (4, 4, 4096, 64)
    assert made.strides == (4096 * 4 * 64, 64, 4 * 64, 1)
    assert made.block_shape == (1, 1, 64, 64)
    if dispatch.unavailable("cuda") is None:
        ptx = toolchain("cuda").compile_launch(launch, 90).ptx
        assert len(re.findall(r"\.param \.align 64 \.b8 \w+\[128\]", ptx)) == 4
        wrong = dataclasses.replace(launch, args={**launch.args, "k_map": k})
        with pytest.raises(RuntimeError, match=r"takes tensor map, tensor map, .* and the launch passes tensor map, address"):
            toolchain("cuda").compile_launch(wrong, 90)


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"block_m": 96}, r"block_m is 96; allowed are 64, 128 and 192: 64 rows for each"),
        ({"block_n": 72}, r"block_n is 72; allowed are multiples of 16 from 16 to 256\.$"),
        ({"num_stages": 1}, r"num_stages is 1; allowed are 2 to 8"),
        ({"occupancy": 4}, r"occupancy is 4; allowed are 1, 2 and 3"),
        ({"schedule": "random"}, r"schedule is 'random'; allowed are single, static, dynamic\.$"),
        ({"block_n": 48, "separate_out": False}, r"num_stages x block_n is 2 x 48 and block_m is 128; output passes"),
    ],
)
def test_a_config_that_no_problem_can_use_says_why(knobs: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Config(**{"block_m": 128, "block_n": 128, **knobs})  # type: ignore[arg-type]


def test_a_config_that_this_problem_cannot_use_says_why() -> None:
    assert "bytes of shared memory" in (fwd_sm90.misfit(of_dim(256), Config(128, 128), H200) or "")
    assert "registers in a consumer thread" in (fwd_sm90.misfit(of_dim(128), Config(192, 128), H200) or "")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dtype": torch.float32}, "triton.fwd takes float32"),
        ({"aligned": False}, "make them contiguous"),
        ({"head_dim_v": 3}, "pad it to a multiple of 8"),
        ({"seqlen_k": 0}, "there are no keys to load"),
    ],
)
def test_what_it_refuses_it_refuses_in_a_sentence(change: dict[str, object], sentence: str) -> None:
    reason = fwd_sm90.reject(dataclasses.replace(CAUSAL, **change), H200)  # type: ignore[arg-type]
    assert reason is not None
    assert sentence in reason
    assert "Hopper" in (fwd_sm90.reject(CAUSAL, Device.named("a100")) or "")
