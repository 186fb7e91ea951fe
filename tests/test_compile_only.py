"""What the compilers make of every GPU kernel's default configs, per architecture, with no GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from peakattn import dispatch
from peakattn.backends import KERNELS, load, toolchain
from peakattn.backends.contract import Artifacts
from peakattn.device import Device
from peakattn.problem import AttentionProblem

ARCHS = ("a100", "a10", "h200", "b200", "rtx5090")

# The opcode that does the products, per architecture: mma.sync, wgmma, tcgen05.
TENSOR_CORE = {80: "HMMA", 86: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}


def _tensor_core(kernel_id: str, arch: int) -> str:
    """A kernel with the instructions of Ampere keeps to them everywhere."""
    return "HMMA" if kernel_id.endswith("_sm80") else TENSOR_CORE[arch]


CAUSAL = AttentionProblem(4, 4096, 4096, 16, 16, 128, 128, torch.bfloat16, window_right=0, return_lse=True)
BACKWARD = CAUSAL.backward(needs_dq=True, needs_dk=True, needs_dv=True, aligned=True)

# Loads and stores of local memory in the loop over tiles; kernels and architectures not listed have none. A spill
# outside that loop is paid once a tile of rows, mostly around the cold repair of NaN, and is not counted.
LOOP_SPILLS = {
    ("triton.bwd", 90): 1,
    ("triton.fwd", 120): 2,
    ("cutile.fwd", 86): 7,
    ("cutile.fwd", 120): 2,
    ("cutile.bwd", 90): 1,
}

GPU_KERNELS = [k for k in KERNELS if not k.startswith("cpu.")]


def _problem(kernel_id: str) -> AttentionProblem:
    return BACKWARD if ".bwd" in kernel_id else CAUSAL


def _artifacts(kernel_id: str, problem: AttentionProblem, device: Device) -> list[Artifacts]:
    backend = kernel_id.split(".")[0]
    reason = dispatch.unavailable(backend)
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")
    kernel = load(kernel_id)
    reason = kernel.reject(problem, device)
    if reason is not None:
        pytest.skip(f"{kernel_id} is not for {device.name}: {reason}")
    made: list[Artifacts] = toolchain(backend).artifacts(
        kernel_id, problem, kernel.default_config(problem, device), device.arch
    )
    assert made, f"{kernel_id} has no device function"
    return made


def _archs(kernel_id: str) -> tuple[str, ...]:
    """One GPU of each generation; a kernel with Ampere's instructions is for those that have no others."""
    return ("a100", "a10", "rtx5090") if kernel_id.endswith("_sm80") else ARCHS


@pytest.mark.parametrize(("kernel_id", "name"), [(k, name) for k in GPU_KERNELS for name in _archs(k)])
def test_default_configs_compile_to_tensor_cores_without_spills(kernel_id: str, name: str) -> None:
    device = Device.named(name)
    made = _artifacts(kernel_id, _problem(kernel_id), device)
    assert any(a.opcodes.get(_tensor_core(kernel_id, device.arch), 0) > 0 for a in made), [a.opcodes for a in made]
    for a in made:
        assert a.shared_bytes <= device.smem_per_block, f"{a.name}: {a.shared_bytes} bytes of shared memory"
        assert a.registers * a.num_threads <= 64 * 1024, f"{a.name}: {a.registers} registers x {a.num_threads} threads"
        assert a.loop_spills <= LOOP_SPILLS.get((kernel_id, device.arch), 0), f"{a.name}: {a.loop_spills} spills a tile"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kernel_id", [k for k in GPU_KERNELS if ".fwd" in k and not k.endswith("_sm80")])
def test_hopper_forward_uses_tma_and_wgmma_and_spills_nothing_in_its_loops(kernel_id: str, head_dim: int, causal: bool) -> None:
    problem = dataclasses.replace(
        CAUSAL, num_heads_q=2048 // head_dim, num_heads_kv=2048 // head_dim, head_dim=head_dim, head_dim_v=head_dim,
        window_right=0 if causal else None, return_lse=False,
    )  # fmt: skip
    (a,) = _artifacts(kernel_id, problem, Device.named("h200"))
    assert a.opcodes.get("HGMMA", 0) > 0
    assert a.opcodes.get("UTMALDG", 0) >= 3, "Q, K and V come through TMA"
    assert a.opcodes.get("MUFU", 0) > 0
    assert a.loops
    # Triton: three consumers share the registers, and two values of each thread do not fit. cuTile: 256 keys, and one does not.
    few = {("triton.fwd_sm90", 64, False): 8, ("cutile.fwd", 64, False): 1}
    assert a.loop_spills <= few.get((kernel_id, head_dim, causal), 0)
    if kernel_id == "triton.fwd_sm90":
        assert a.opcodes.get("USETMAXREG", 0) > 0, "the producer hands its registers to the consumers"


def test_unaligned_tensors_compile_without_tma() -> None:
    problem = dataclasses.replace(CAUSAL, aligned=False)
    (a,) = _artifacts("triton.fwd", problem, Device.named("h200"))
    assert a.opcodes.get("UTMALDG", 0) == 0
    assert a.opcodes.get("HGMMA", 0) > 0
