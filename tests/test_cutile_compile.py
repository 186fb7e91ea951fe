"""What cuTile makes of the kernels, per architecture, with no GPU: registers, spills, tensor cores and TMA."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from peakattn import dispatch
from peakattn.backends import load, toolchain
from peakattn.backends.contract import Artifacts
from peakattn.device import Device
from peakattn.problem import AttentionProblem

CAUSAL = AttentionProblem(4, 4096, 4096, 16, 16, 128, 128, torch.bfloat16, window_right=0, return_lse=True)
PRODUCTS = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}


def artifacts(kernel_id: str, problem: AttentionProblem, arch: int, config: Any = None) -> list[Artifacts]:
    if (reason := dispatch.unavailable("cutile")) is not None:
        pytest.skip(reason)
    config = config or load(kernel_id).default_config(problem, Device.for_arch(arch))
    made: list[Artifacts] = toolchain("cutile").artifacts(kernel_id, problem, config, arch)
    return made


def of_dim(head_dim: int, problem: AttentionProblem = CAUSAL) -> AttentionProblem:
    return dataclasses.replace(problem, head_dim=head_dim, head_dim_v=head_dim)


@pytest.mark.parametrize("arch", PRODUCTS)
@pytest.mark.parametrize("kernel_id", ["cutile.fwd", "cutile.bwd"])
def test_every_architecture_gets_tensor_cores_and_where_it_has_it_tma(kernel_id: str, arch: int) -> None:
    problem = CAUSAL
    if kernel_id == "cutile.bwd":
        problem = CAUSAL.backward(needs_dq=True, needs_dk=True, needs_dv=True, aligned=True)
    for a in artifacts(kernel_id, problem, arch):
        if "rows" not in a.name:
            assert a.opcodes.get(PRODUCTS[arch], 0) > 0, a.name
            assert a.opcodes.get("UTMALDG", 0) >= 3 * (arch >= 90), a.name
            assert a.opcodes.get("LDGSTS", 0) > 0 or arch >= 90, a.name
        assert a.loop_spills <= (2 if arch == 120 else int(arch == 90 and "dkdv" in a.name)), a.name
        assert a.registers <= 255
        assert a.registers * a.num_threads <= 64 * 1024
        assert a.shared_bytes <= Device.for_arch(arch).smem_per_block


@pytest.mark.parametrize("seqlen", [1024, 16384])
@pytest.mark.parametrize("window_right", [None, 0])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_hopper_forward_has_no_spills_and_each_loop_has_its_products(
    head_dim: int, window_right: int | None, seqlen: int
) -> None:
    problem = dataclasses.replace(of_dim(head_dim), seqlen_q=seqlen, seqlen_k=seqlen, window_right=window_right)
    config = load("cutile.fwd").default_config(problem, Device.for_arch(90))
    (made,) = artifacts("cutile.fwd", problem, 90)
    assert made.opcodes.get("USETMAXREG", 0) > 0, "the producer hands its registers to the consumers"
    # Q K^T takes steps of 16 columns, 256 keys at a time, as P V steps of 16 keys.
    widths = (config.block_n, config.block_masked or config.block_n)
    products = [head_dim // 16 + width // 16 for width in widths[: 1 if window_right is None else 2]]
    # Row tiles have a warpgroup each, and a warpgroup its own loops; beside them one that copies.
    assert [loop["HGMMA"] for loop in made.loops] == products * config.row_tiles
    assert made.num_threads == 128 * (1 + config.row_tiles)
    assert made.loop_spills <= int(head_dim == 64 and config.block_n == 256)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_row_tiles_keep_their_warpgroups_when_the_keys_end_within_a_block(head_dim: int) -> None:
    problem = dataclasses.replace(of_dim(head_dim), seqlen_q=8000, seqlen_k=8011, window_right=None)
    config = load("cutile.fwd").default_config(problem, Device.for_arch(90))
    (made,) = artifacts("cutile.fwd", problem, 90)
    assert config.row_tiles == 2
    assert made.num_threads == 384
    assert made.loop_spills <= int(head_dim == 64)


def test_a_late_start_is_a_chain_that_the_compiler_leaves_as_it_is() -> None:
    full = dataclasses.replace(CAUSAL, window_right=None, return_lse=False)
    config = load("cutile.fwd").Config(64, 256, 1, row_sums=8, row_tiles=2)
    (plain,) = artifacts("cutile.fwd", full, 90, config)
    (late,) = artifacts("cutile.fwd", full, 90, dataclasses.replace(config, stagger=65))
    exponentials = late.opcodes["MUFU"] - plain.opcodes["MUFU"]
    assert exponentials in (65, 2 * 65), "one or two rows a thread, of one of the tiles"
    assert max(sum(loop.values()) for loop in late.loops) < max(sum(loop.values()) for loop in plain.loops) + 20


def test_two_blocks_share_the_registers_of_an_sm() -> None:
    (made,) = artifacts("cutile.fwd", CAUSAL, 90, load("cutile.fwd").Config(64, 128, occupancy=2))
    assert made.registers * made.num_threads <= 32 * 1024
    assert 2 * made.shared_bytes <= Device.for_arch(90).smem_per_sm


def test_tensors_that_tma_cannot_address_are_read_without_it() -> None:
    (made,) = artifacts("cutile.fwd", dataclasses.replace(CAUSAL, aligned=False), 90)
    assert made.opcodes.get("UTMALDG", 0) == 0
    assert made.opcodes.get("HGMMA", 0) > 0


def test_a_problem_without_a_mask_has_one_loop_and_no_repair() -> None:
    causal = dataclasses.replace(CAUSAL, seqlen_q=1024, seqlen_k=1024)
    (made,) = artifacts("cutile.fwd", dataclasses.replace(causal, window_right=None, return_lse=False), 90)
    assert len(made.loops) == 1
    (masked,) = artifacts("cutile.fwd", causal, 90)
    assert made.opcodes["UTMALDG"] < masked.opcodes["UTMALDG"] / 1.5


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_hopper_backward_keeps_its_sums_in_registers(head_dim: int) -> None:
    problem = of_dim(head_dim).backward(needs_dq=True, needs_dk=True, needs_dv=True, aligned=True)
    made = artifacts("cutile.bwd", problem, 90)
    rows, dkdv, dq = made
    assert rows.spill_instructions == dq.spill_instructions == 0
    for a in (dkdv, dq):
        assert len(a.loops) == 2, "one without a mask, one for the diagonal"
        assert all(loop["HGMMA"] > 0 for loop in a.loops)
    # Two blocks an SM with a few spills are faster than one without: see the notebook.
    assert dkdv.loop_spills <= {64: 15, 128: 1, 256: 0}[head_dim]
