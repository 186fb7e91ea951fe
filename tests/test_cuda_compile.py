"""What NVRTC makes of ``cuda.fwd_sm80``, per architecture, with no GPU; and how its default config is found."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from peakattn import dispatch
from peakattn.backends import toolchain
from peakattn.backends.contract import Artifacts
from peakattn.backends.cuda import fwd_sm80
from peakattn.backends.cuda.fwd_sm80 import Config
from peakattn.device import KNOWN, Device
from peakattn.problem import AttentionProblem

CAUSAL = AttentionProblem(4, 4096, 4096, 16, 16, 128, 128, torch.bfloat16, window_right=0, return_lse=True)
ARCHS = ("a100", "a10", "l40s", "h200", "b200", "rtx5090")
NEEDED = {64: Config(128, 64, 4), 128: Config(128, 64, 8, q_in_registers=True), 256: Config(64, 32, 4)}
# The default tiles for bfloat16 on Hopper.
STALE = {
    64: Config(128, 32, 4, 3, q_in_registers=True, stale_origin=True),
    128: Config(128, 32, 4, 3, stale_origin=True),
    256: Config(64, 64, 4, 1, stale_origin=True),
}


def of_dim(head_dim: int, head_dim_v: int | None = None, problem: AttentionProblem = CAUSAL) -> AttentionProblem:
    return dataclasses.replace(problem, head_dim=head_dim, head_dim_v=head_dim_v or head_dim)


def artifacts(problem: AttentionProblem, config: Config, arch: int) -> Artifacts:
    if (reason := dispatch.unavailable("cuda")) is not None:
        pytest.skip(reason)
    try:
        (made,) = toolchain("cuda").artifacts("cuda.fwd_sm80", problem, config, arch)
    except RuntimeError as error:
        if "cannot read the cubin" not in str(error):
            raise
        pytest.skip(f"the installed disassembler is older than sm_{arch}: {error}")
    return made


@pytest.mark.parametrize("name", ARCHS)
@pytest.mark.parametrize("head_dim", NEEDED)
def test_what_a_tile_costs(name: str, head_dim: int) -> None:
    if head_dim != 128 and name not in ("a100", "h200"):
        pytest.skip("one head_dim for each architecture and all three for two of them")
    config, device = NEEDED[head_dim], Device.named(name)
    made = artifacts(of_dim(head_dim), config, device.arch)
    assert made.registers <= 255
    assert made.registers * made.num_threads <= 64 * 1024
    assert made.loop_spills == 0
    assert made.shared_bytes == 2 * (config.block_m + 2 * config.block_n) * head_dim
    assert len(made.loops) == 2, "one without a mask, one for the diagonal"
    plain, masked = sorted(made.loops, key=lambda loop: sum(loop.values()))
    m_tiles, n_tiles, k_steps = config.block_m // (16 * config.num_warps), config.block_n // 16, head_dim // 16
    for loop in (plain, masked):
        assert loop["HMMA"] == 4 * m_tiles * n_tiles * k_steps, "Q K^T and P V"
        q_reads = 0 if config.q_in_registers else m_tiles * k_steps
        assert loop["LDSM"] == 2 * n_tiles * k_steps + q_reads, "four 8 x 8 matrices each"
        assert loop["LDGSTS"] == 2 * config.block_n * head_dim // 8 // config.num_threads, "K and V, 16 bytes each"
        assert loop["BAR"] == 2
        assert loop["MUFU"] == m_tiles * (8 * n_tiles + 2), "each weight and each row's rescaling, and nothing else"
        assert loop["SHFL"] == 4 * m_tiles, "a maximum over four lanes for two rows"
        assert "LDS" not in loop or loop["LDS"] <= loop["LDGSTS"], "P never leaves its registers"
        assert "STS" not in loop
    hidden = 8 * m_tiles * n_tiles
    assert masked["FSEL"] >= hidden > plain.get("FSEL", 0), "no mask code in the interior"


@pytest.mark.parametrize("head_dim", STALE)
def test_a_stale_origin_has_no_maximum_in_the_interior(head_dim: int) -> None:
    config, device = STALE[head_dim], Device.named("h200")
    assert fwd_sm80.default_config(of_dim(head_dim), device) == config
    made = artifacts(of_dim(head_dim), config, device.arch)
    assert made.registers * made.num_threads <= 64 * 1024
    plain, masked = sorted(made.loops, key=lambda loop: sum(loop.values()))
    m_tiles, n_tiles = config.block_m // (16 * config.num_warps), config.block_n // 16
    assert plain.get("STL", 0) + plain.get("LDL", 0) <= plain["HMMA"] / 16
    assert plain["HMMA"] == masked["HMMA"] == 4 * m_tiles * n_tiles * head_dim // 16
    assert plain["MUFU"] == 8 * m_tiles * n_tiles, "each weight, and no rescaling"
    assert masked["MUFU"] == m_tiles * (8 * n_tiles + 2)
    assert "SHFL" not in plain
    assert "FMNMX" not in plain
    assert plain["BAR"] == masked["BAR"] == (2 if config.num_stages == 1 else 1)
    assert sum(plain.values()) < 0.75 * sum(masked.values())


def test_columns_that_are_only_padding_cost_no_products() -> None:
    """head_dim 72 has 5 steps of k and v of 40 has 6 tiles of 8 columns, not powers of two."""
    problem = dataclasses.replace(of_dim(72, 40), window_right=None)
    made = artifacts(problem, Config(32, 32, 2), 80)
    assert {loop["HMMA"] for loop in made.loops} == {4 * 5 + 6 * 2}


def test_a_problem_without_a_mask_has_no_repair() -> None:
    full = dataclasses.replace(of_dim(64), window_right=None, return_lse=False)
    votes = [artifacts(problem, Config(64, 32, 4), 80).opcodes.get("VOTE", 0) for problem in (full, of_dim(64))]
    assert votes[0] < votes[1]


def test_occupancy_leaves_registers_for_that_many_blocks() -> None:
    made = artifacts(of_dim(64), Config(64, 32, 4, q_in_registers=True, occupancy=3), 90)
    assert 3 * made.registers * made.num_threads <= 64 * 1024


@pytest.mark.parametrize("swizzle", [True, False])
@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(40, 72), (64, 64), (8, 256)])
def test_the_shared_memory_formula_is_that_of_the_device_code(
    head_dim: int, head_dim_v: int, num_stages: int, swizzle: bool
) -> None:
    """Chunks of 16 bytes in rows of whole 32 bytes; padding makes the number odd."""
    config = Config(64, 32, 4, num_stages, swizzle=swizzle)
    pitch, pitch_v = (-(-d // 16) * 32 + (0 if swizzle else 16) for d in (head_dim, head_dim_v))
    loads = 64 * pitch + num_stages * 32 * (pitch + pitch_v)
    assert fwd_sm80.shared_bytes(of_dim(head_dim, head_dim_v), config) == max(loads, 64 * pitch_v)


# The model of blocks against SMs.


def shape(seqlen: int, heads: int, head_dim: int = 128, causal: bool = True) -> AttentionProblem:
    return AttentionProblem(
        1, seqlen, seqlen, heads, heads, head_dim, head_dim, torch.float16, window_right=0 if causal else None
    )


def test_few_blocks_are_made_smaller_and_many_stay_tall() -> None:
    """One head of 512 rows makes 8 blocks of 64 rows on 58 SMs; 32 heads of 4096 make 2048 of them."""
    laptop = dataclasses.replace(Device.named("a10"), num_sms=58)
    one, many = (fwd_sm80.default_config(shape(*size), laptop) for size in ((512, 1), (4096, 32)))
    assert one.block_m < many.block_m
    assert -(-512 // one.block_m) > 8
    rows = [fwd_sm80.default_config(shape(seqlen, 8), laptop).block_m for seqlen in (64, 256, 1024, 4096, 16384)]
    assert rows == sorted(rows), "longer sequences never want smaller blocks"


def test_it_is_no_threshold_of_the_sequence_length() -> None:
    """The same length wants tall blocks where heads, batch or a smaller GPU keep every SM busy, and small ones elsewhere."""
    small, large = (dataclasses.replace(Device.named("a100"), num_sms=n) for n in (8, 108))
    problem = shape(512, 8)
    assert fwd_sm80.default_config(problem, small).block_m > fwd_sm80.default_config(problem, large).block_m
    busy = dataclasses.replace(problem, batch=64)
    assert fwd_sm80.default_config(busy, large).block_m > fwd_sm80.default_config(problem, large).block_m


def test_the_model_counts_tiles_waves_and_residents() -> None:
    device, config = Device.named("a100"), Config(128, 64, 8, q_in_registers=True)
    cycles = lambda **change: fwd_sm80.predicted_cycles(  # noqa: E731
        dataclasses.replace(shape(2048, 27, causal=False), **change), config, device
    )
    blocks = 2048 // 128 * 27
    assert blocks == 4 * device.num_sms
    assert cycles(num_heads_q=28, num_heads_kv=28) == pytest.approx(cycles() * 5 / 4), "a wave that one block begins"
    assert cycles(seqlen_k=4096) == pytest.approx(cycles() * 65 / 33), "key tiles, and one for beginning and end"
    assert cycles(window_right=0) < cycles()
    assert fwd_sm80.resident_blocks(of_dim(64), Config(64, 32, 4), device) > fwd_sm80.resident_blocks(
        of_dim(256), config, device
    )


@pytest.mark.parametrize("name", [n for n, device in KNOWN.items() if device.arch >= 80])
def test_the_default_of_every_head_dim_fits(name: str) -> None:
    device = Device.named(name)
    for head_dim in range(8, 257, 8):
        for head_dim_v in {head_dim, 64, 96, 256}:
            for seqlen_q, seqlen_k in ((1, 4096), (4096, 4096), (70, 0)):
                problem = dataclasses.replace(of_dim(head_dim, head_dim_v), seqlen_q=seqlen_q, seqlen_k=seqlen_k)
                config = fwd_sm80.default_config(problem, device)
                assert fwd_sm80.misfit(problem, config, device) is None, (head_dim, head_dim_v, config)


# Refusals.


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"block_m": 96, "block_n": 64}, r"block_m is 96; allowed are multiples of 64 up to 256, .*\.$"),
        ({"block_m": 64, "block_n": 40}, r"block_n is 40; allowed are multiples of 16"),
        ({"block_m": 64, "block_n": 64, "num_warps": 3}, r"num_warps is 3; allowed are 1, 2, 4 and 8\.$"),
        ({"block_m": 64, "block_n": 64, "num_stages": 0}, r"num_stages is 0; allowed are 1 to 4 "),
        ({"block_m": 64, "block_n": 64, "occupancy": 9}, r"occupancy is 9; allowed are 1 to 8 "),
    ],
)
def test_a_config_that_no_problem_can_use_says_why(knobs: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Config(**knobs)  # type: ignore[arg-type]


def test_a_config_that_this_problem_cannot_use_says_why() -> None:
    assert "bytes of shared memory" in (fwd_sm80.misfit(of_dim(256), Config(128, 64, 8), Device.named("l40s")) or "")
    assert "registers a thread" in (fwd_sm80.misfit(of_dim(256), Config(128, 32, 4), Device.named("a100")) or "")
    assert "registers a thread" in (fwd_sm80.misfit(of_dim(128), Config(128, 32, 4, occupancy=3), Device.named("h200")) or "")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dtype": torch.float32}, "triton.fwd takes float32"),
        ({"head_dim": 100}, "head_dim of q and k is 100; pad it to a multiple of 8"),
        ({"head_dim_v": 3}, "head_dim of v is 3; pad it to a multiple of 8"),
        ({"aligned": False}, "make them contiguous"),
    ],
)
def test_what_fwd_sm80_refuses_it_refuses_in_a_sentence(change: dict[str, Any], sentence: str) -> None:
    reason = fwd_sm80.reject(dataclasses.replace(CAUSAL, **change), Device.named("a100"))
    assert reason is not None
    assert sentence in reason


def test_strides_over_2_to_31_elements_reach_the_kernel_whole() -> None:
    far = torch.empty_strided((2, 64, 1, 64), (2**33, 64, 64, 1), dtype=torch.float16, device="meta")
    problem = dataclasses.replace(of_dim(64), batch=2, seqlen_q=64, seqlen_k=64, num_heads_q=1, num_heads_kv=1)
    (launch,) = fwd_sm80.launches(problem, Config(64, 32), far, far, far, far, None, 1.0, 0.0)
    assert launch.args["stride_kb"].value == 2**33
