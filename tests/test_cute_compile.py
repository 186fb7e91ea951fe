"""What the CuTe DSL makes of the kernels, per architecture, with no GPU: registers, spills, and each kind of instruction."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from peakattn import dispatch
from peakattn.backends import load, toolchain
from peakattn.backends.contract import Artifacts
from peakattn.backends.cute import fwd_sm80, fwd_sm90
from peakattn.backends.cute.fwd_sm80 import Config
from peakattn.device import KNOWN, Device
from peakattn.problem import AttentionProblem

CAUSAL = AttentionProblem(4, 4096, 4096, 16, 16, 128, 128, torch.bfloat16, window_right=0, return_lse=True)


def of_dim(head_dim: int, head_dim_v: int | None = None, problem: AttentionProblem = CAUSAL) -> AttentionProblem:
    return dataclasses.replace(problem, head_dim=head_dim, head_dim_v=head_dim_v or head_dim)


def artifacts(problem: AttentionProblem, config: object, device: Device, kernel: str = "cute.fwd_sm80") -> Artifacts:
    if (reason := dispatch.unavailable("cute")) is not None:
        pytest.skip(reason)
    (made,) = toolchain("cute").artifacts(kernel, problem, config, device.arch)
    return made


@pytest.mark.parametrize(
    ("name", "head_dim"), [("a100", 64), ("a100", 128), ("a100", 256), ("l40s", 128), ("rtx5090", 128), ("h200", 96)]
)
def test_default_configs_of_fwd_sm80_hold_their_tiles_in_registers(name: str, head_dim: int) -> None:
    problem, device = of_dim(head_dim), Device.named(name)
    config = fwd_sm80.default_config(problem, device)
    made = artifacts(problem, config, device)
    assert made.registers <= 255
    assert made.registers * made.num_threads <= 64 * 1024
    assert made.loop_spills == 0
    assert made.num_threads == config.num_threads
    assert made.shared_bytes == 2 * (config.block_m + 2 * config.block_n) * head_dim
    assert len(made.loops) == 2, "one without a mask, one for the diagonal"
    plain, masked = sorted(made.loops, key=lambda loop: sum(loop.values()))
    warps = config.num_threads // 32
    m_tiles, n_tiles, k_steps = config.block_m // (16 * warps), config.block_n // 16, head_dim // 16
    for loop in (plain, masked):
        assert loop["HMMA"] == 2 * m_tiles * n_tiles * k_steps + 2 * m_tiles * k_steps * n_tiles, "Q K^T and P V"
        assert loop["LDSM"] == k_steps * (m_tiles + n_tiles) + n_tiles * k_steps, "four 8 x 8 matrices each"
        assert loop["LDGSTS"] == 2 * config.block_n * head_dim // 8 // config.num_threads, "K and V, 16 bytes each"
        assert loop["BAR"] == 2
    hidden = 4 * m_tiles * 2 * n_tiles  # scores of a thread
    assert masked["FSEL"] >= hidden > plain.get("FSEL", 0), "no mask code in the interior"


def test_columns_that_are_only_padding_cost_no_products() -> None:
    """head_dim 72 has tiles of 96 columns and 5 steps of k, not 6; v of 40 has 48 columns and not 64."""
    problem, device = dataclasses.replace(of_dim(72, 40), window_right=None), Device.named("a100")
    made = artifacts(problem, Config(32, 32, 64), device)
    (loop,) = {tuple(sorted(loop.items())) for loop in made.loops if loop["BAR"] == 2 and loop.get("FSEL", 0) < 16}
    assert dict(loop)["HMMA"] == 4 * 5 + 6 * 2


def test_a_problem_without_a_mask_has_no_repair() -> None:
    full = dataclasses.replace(of_dim(64), window_right=None, return_lse=False)
    votes = [artifacts(p, Config(64, 32, 128), Device.named("l40s")).opcodes.get("VOTE", 0) for p in (full, of_dim(64))]
    assert votes[0] < votes[1]


@pytest.mark.parametrize("name", [n for n, device in KNOWN.items() if device.arch >= 80])
def test_the_default_of_every_head_dim_fits(name: str) -> None:
    device = Device.named(name)
    for head_dim in range(8, 257, 8):
        for head_dim_v in {head_dim, 64, 96, 256}:
            for seqlen_q in (1, 4096):
                problem = dataclasses.replace(of_dim(head_dim, head_dim_v), seqlen_q=seqlen_q)
                config = fwd_sm80.default_config(problem, device)
                assert fwd_sm80.misfit(problem, config, device) is None, (head_dim, head_dim_v, config)


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        (
            {"block_m": 96, "block_n": 64, "num_threads": 256},
            r"block_m is 96; allowed are multiples of 128 .* num_threads\)\.$",
        ),
        ({"block_m": 64, "block_n": 40}, r"block_n is 40; allowed are multiples of 16"),
        ({"block_m": 64, "block_n": 64, "num_threads": 96}, r"num_threads is 96; allowed are 32, 64, 128 and 256\.$"),
    ],
)
def test_a_config_that_no_problem_can_use_says_why(knobs: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Config(**knobs)


def test_a_config_that_this_problem_cannot_use_says_why() -> None:
    device = Device.named("l40s")
    assert "multiples of 32" in (fwd_sm80.misfit(of_dim(96), Config(128, 48, 128), device) or "")
    assert "bytes of shared memory" in (fwd_sm80.misfit(of_dim(256), Config(128, 64, 256), device) or "")
    assert "registers a thread" in (fwd_sm80.misfit(of_dim(256), Config(128, 32, 128), Device.named("a100")) or "")
    x = torch.empty(1, 64, 1, 96, dtype=torch.float16, device="meta")
    with pytest.raises(ValueError, match=r"multiples of 32, .* at a time\.$"):
        fwd_sm80.launches(of_dim(96), Config(128, 48, 128), x, x, x, x, None, 1.0, 0.0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dtype": torch.float32}, "triton.fwd takes float32"),
        ({"head_dim": 100}, "head_dim of q and k is 100; pad it to a multiple of 8"),
        ({"head_dim_v": 3}, "head_dim of v is 3; pad it to a multiple of 8"),
        ({"aligned": False}, "make them contiguous"),
    ],
)
def test_what_fwd_sm80_refuses_it_refuses_in_a_sentence(change: dict[str, object], sentence: str) -> None:
    reason = fwd_sm80.reject(dataclasses.replace(CAUSAL, **change), Device.named("a100"))  # type: ignore[arg-type]
    assert reason is not None
    assert sentence in reason


def test_strides_over_2_to_31_elements_reach_the_kernel_whole() -> None:
    far = torch.empty_strided((2, 64, 1, 64), (2**33, 64, 64, 1), dtype=torch.float16, device="meta")
    problem = dataclasses.replace(of_dim(64), batch=2, seqlen_q=64, seqlen_k=64, num_heads_q=1, num_heads_kv=1)
    (launch,) = load("cute.fwd_sm80").launches(problem, Config(64, 32), far, far, far, far, None, 1.0, 0.0)
    assert launch.args["stride_kb"].value == 2**33


H200 = Device.named("h200")


@pytest.mark.parametrize(
    ("head_dim", "change"),
    [
        (64, {"seqlen_q": 1024, "seqlen_k": 1024}),
        (64, {"window_right": None, "return_lse": False}),
        (128, {}),
        (256, {"window_right": None}),
        (192, {"window_left": 1000, "dtype": torch.float16}),
        (64, {"seqlen_q": 9, "num_heads_kv": 4}),
        (64, {"seqlen_q": 9, "num_heads_kv": 2, "window_right": None}),
        (128, {"seqlen_q": 9, "num_heads_q": 28, "num_heads_kv": 4, "window_left": 2000}),
        (128, {"seqlen_q": 16, "num_heads_kv": 2, "batch": 64, "window_right": None}),
        (256, {"seqlen_q": 16, "num_heads_kv": 4}),
        (256, {"seqlen_q": 16, "num_heads_kv": 4, "window_right": None, "return_lse": False}),
    ],
    ids=[
        "64-causal-1k", "64-full", "128-causal", "256-full", "192-window-fp16",
        "64-causal-4-heads", "64-full-8-heads", "128-window-7-heads", "128-full-8-heads-2-consumers", "256-causal-4-heads",
        "256-full-4-heads",
    ],
)  # fmt: skip
def test_default_configs_of_fwd_sm90_keep_their_products_in_flight(head_dim: int, change: dict[str, object]) -> None:
    problem = dataclasses.replace(of_dim(head_dim), **change)  # type: ignore[arg-type]
    config = fwd_sm90.default_config(problem, H200)
    made = artifacts(problem, config, H200, "cute.fwd_sm90")
    assert made.num_threads == 128 * (config.num_consumers + 1)
    # What setmaxnreg hands to the consumers must have been there at the launch: a block that asks for more waits for ever.
    (producer, consumer) = fwd_sm90._PRODUCER_REGISTERS[config.num_consumers], fwd_sm90._consumer_registers(config)
    assert producer + config.num_consumers * consumer <= made.registers * (config.num_consumers + 1)
    assert made.registers * made.num_threads * config.occupancy <= 64 * 1024
    assert made.loop_spills == 0
    assert made.spill_instructions <= 6
    assert made.opcodes["USETMAXREG"] == 2

    steps = 2 + (problem.window_right is not None) + (problem.window_left is not None)  # the first tile, and each loop
    assert made.opcodes["HGMMA"] == steps * (head_dim // 16 + config.block_n // 16)
    boxes = head_dim // 64
    assert made.opcodes["UTMALDG"] == boxes * (2 + 2 + config.num_consumers), "K and V at two places, Q for each consumer"
    assert made.opcodes["UTMASTG"] == boxes
    assert config.pack_heads == (problem.group > 1)
    assert made.ptx is not None
    assert made.ptx.count("cp.async.bulk.tensor.5d") == (boxes * (config.num_consumers + 1) if config.pack_heads else 0)
    # A compiler that cannot follow products in flight waits for each of them.
    assert made.sass is not None
    assert made.sass.count("WARPGROUP.DEPBAR") <= 2 + 3 * (steps - 1)
    # The exponentials run under the second product only where they stand in front of its wait.
    for part in made.sass.split("WARPGROUP.DEPBAR.LE gsb0, 0x1")[1:]:
        assert part.split("WARPGROUP.DEPBAR.LE gsb0, 0x0")[0].count("MUFU.EX2") >= config.block_n // 2
    interior = min(made.loops, key=lambda loop: loop.get("ISETP", 0))
    assert interior["HGMMA"] == head_dim // 16 + config.block_n // 16
    assert interior.get("ISETP", 0) < 16, "no mask code in the interior"


def test_the_default_of_fwd_sm90_for_every_head_dim_fits() -> None:
    for head_dim in range(8, 257, 8):
        for head_dim_v in {head_dim, 64, 96, 256}:
            for seqlen_q in (1, 1024, 4096):
                problem = dataclasses.replace(of_dim(head_dim, head_dim_v), seqlen_q=seqlen_q, seqlen_k=max(seqlen_q, 64))
                for kv in (16, 4, 1):
                    grouped = dataclasses.replace(problem, num_heads_kv=kv)
                    config = fwd_sm90.default_config(grouped, H200)
                    assert fwd_sm90.misfit(grouped, config, H200) is None, (head_dim, head_dim_v, config)


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"block_m": 96}, r"block_m is 96; allowed are 64, 128 and 192: 64 rows for each"),
        ({"block_n": 72}, r"block_n is 72; allowed are multiples of 16 from 16 to 256\.$"),
        ({"num_stages": 1}, r"num_stages is 1; allowed are 2 to 8"),
        ({"occupancy": 4}, r"occupancy is 4; allowed are 1, 2 and 3"),
        ({"schedule": "random"}, r"schedule is 'random'; allowed are single, static, dynamic\.$"),
        ({"block_m": 64, "pingpong": True}, r"pingpong takes turns between consumers"),
        ({"block_n": 48}, r"num_stages x block_n is 2 x 48 and block_m is 128; output passes through the ring of V"),
    ],
)
def test_a_config_of_fwd_sm90_that_no_problem_can_use_says_why(knobs: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        fwd_sm90.Config(**{"block_m": 128, "block_n": 128, **knobs})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dtype": torch.float32}, "triton.fwd takes float32"),
        ({"aligned": False}, "make them contiguous"),
        ({"head_dim_v": 3}, "pad it to a multiple of 8"),
        ({"seqlen_k": 0}, "there are no keys to load"),
    ],
)
def test_what_fwd_sm90_refuses_it_refuses_in_a_sentence(change: dict[str, object], sentence: str) -> None:
    reason = fwd_sm90.reject(dataclasses.replace(CAUSAL, **change), H200)  # type: ignore[arg-type]
    assert reason is not None
    assert sentence in reason
    assert "Hopper" in (fwd_sm90.reject(CAUSAL, Device.named("a100")) or "")
