"""Every kernel has the shape of backends/contract.py, and every kernel file is in KERNELS."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import peakattn
from peakattn import dispatch
from peakattn.backends import BACKENDS, EXTRAS, KERNELS, load, toolchain
from peakattn.backends.contract import BackwardKernel, ForwardKernel, Toolchain
from peakattn.device import CPU, KNOWN, Device
from peakattn.problem import AttentionProblem

FORWARD = AttentionProblem(2, 512, 512, 8, 8, 128, 128, torch.bfloat16, window_right=0, return_lse=True)
BACKWARD = FORWARD.backward(needs_dq=True, needs_dk=True, needs_dv=True, aligned=True)
DEVICES: list[Device] = [CPU, *KNOWN.values()]


def protocol(kernel_id: str) -> type:
    return BackwardKernel if kernel_id.split(".")[1].startswith("bwd") else ForwardKernel


def problem(kernel_id: str) -> AttentionProblem:
    return BACKWARD if protocol(kernel_id) is BackwardKernel else FORWARD


@pytest.fixture(params=list(KERNELS))
def kernel_id(request: pytest.FixtureRequest) -> str:
    if (reason := dispatch.unavailable(request.param.split(".")[0])) is not None and "not installed" in reason:
        pytest.skip(reason)
    return request.param


@pytest.fixture
def kernel(kernel_id: str) -> ModuleType:
    return load(kernel_id)


def test_the_five_names_have_the_parameters_of_the_contract(kernel_id: str, kernel: ModuleType) -> None:
    shape = protocol(kernel_id)
    assert isinstance(kernel, shape)
    for name in ("reject", "default_config", "search_space", "launch"):
        wanted = [p for p in inspect.signature(getattr(shape, name)).parameters if p != "self"]
        assert list(inspect.signature(getattr(kernel, name)).parameters) == wanted, name


def default_config(kernel_id: str) -> Any:
    kernel = load(kernel_id)
    return next(kernel.default_config(problem(kernel_id), d) for d in DEVICES if kernel.reject(problem(kernel_id), d) is None)


def test_a_config_is_a_frozen_value(kernel_id: str, kernel: ModuleType) -> None:
    config = default_config(kernel_id)
    assert hash(config) == hash(kernel.Config(**dataclasses.asdict(config)))
    for knob in dataclasses.fields(config):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, knob.name, 1)


def test_an_illegal_config_is_refused_in_a_sentence(kernel_id: str) -> None:
    config = default_config(kernel_id)
    sizes = [f.name for f in dataclasses.fields(config) if f.name.endswith(("block_m", "block_n", "num_warps"))]
    assert len(sizes) >= 2
    for name in sizes:
        with pytest.raises(ValueError, match=rf"{name}.*\.$"):
            dataclasses.replace(config, **{name: 0})


def test_a_refusal_is_a_sentence_and_some_device_is_taken(kernel_id: str, kernel: ModuleType) -> None:
    reasons = [kernel.reject(problem(kernel_id), device) for device in DEVICES]
    assert None in reasons
    for reason in reasons:
        assert reason is None or len(reason.split()) > 3


def test_the_default_and_the_search_space_are_legal(kernel_id: str, kernel: ModuleType) -> None:
    for device in DEVICES:
        if kernel.reject(problem(kernel_id), device) is None:
            assert isinstance(kernel.default_config(problem(kernel_id), device), kernel.Config)
            space = list(kernel.search_space(problem(kernel_id), device))
            assert space
            assert all(isinstance(config, kernel.Config) for config in space)
            assert len(set(space)) == len(space)


def test_a_kernel_says_what_it_is(kernel: ModuleType) -> None:
    assert kernel.__doc__


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_toolchain_has_three_names(backend: str) -> None:
    module = toolchain(backend)
    for name in ("unavailable", "version", "artifacts"):
        wanted = inspect.signature(getattr(Toolchain, name)).parameters
        assert len(inspect.signature(getattr(module, name)).parameters) == len(wanted) - 1, name
    reason = module.unavailable()
    assert reason is None or len(reason.split()) > 2
    if reason is None:
        assert module.version()
    assert backend in EXTRAS


def test_the_cpu_backend_is_always_there() -> None:
    cpu = toolchain("cpu")
    assert cpu.unavailable() is None
    assert torch.__version__ in cpu.version()
    assert cpu.artifacts("cpu.fwd", FORWARD, load("cpu.fwd").Config(), 0) == []


def test_an_id_names_its_module_and_every_kernel_file_has_an_id() -> None:
    for name, module in KERNELS.items():
        assert module == f"peakattn.backends.{name}"
    root = Path(peakattn.__file__).parent / "backends"
    files = [f for pattern in ("*/fwd*.py", "*/bwd*.py", "*/decode*.py") for f in root.glob(pattern)]
    assert {f"{f.parent.name}.{f.stem}" for f in files} == set(KERNELS)
