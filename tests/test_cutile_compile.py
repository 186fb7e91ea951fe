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


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_hopper_forward_is_warp_specialised_and_each_loop_has_its_products(head_dim: int) -> None:
    config = load("cutile.fwd").default_config(of_dim(head_dim), Device.for_arch(90))
    (made,) = artifacts("cutile.fwd", of_dim(head_dim), 90)
    assert made.opcodes.get("USETMAXREG", 0) > 0, "the producer hands its registers to the consumers"
    assert len(made.loops) == 2, "one without a mask, one for the diagonal"
    # Q K^T takes steps of 16 columns; P V takes steps of 16 keys, and 256 columns of the output at a time.
    widths = (config.block_n, config.block_masked or config.block_n)
    assert [loop["HGMMA"] for loop in made.loops] == [head_dim // 16 + width // 16 for width in widths]
    assert made.loop_spills == 0


def test_two_blocks_share_the_registers_of_an_sm() -> None:
    (made,) = artifacts("cutile.fwd", CAUSAL, 90, load("cutile.fwd").Config(64, 128, occupancy=2))
    assert made.registers * made.num_threads <= 32 * 1024
    assert 2 * made.shared_bytes <= Device.for_arch(90).smem_per_sm


def test_tensors_that_tma_cannot_address_are_read_without_it() -> None:
    (made,) = artifacts("cutile.fwd", dataclasses.replace(CAUSAL, aligned=False), 90)
    assert made.opcodes.get("UTMALDG", 0) == 0
    assert made.opcodes.get("HGMMA", 0) > 0


def test_a_problem_without_a_mask_has_one_loop_and_no_repair() -> None:
    full = dataclasses.replace(CAUSAL, window_right=None, return_lse=False)
    (made,) = artifacts("cutile.fwd", full, 90)
    assert len(made.loops) == 1
    (masked,) = artifacts("cutile.fwd", CAUSAL, 90)
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
