"""What the cuTile toolchain says of its packages, and what a launch passes to machine code."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from peakattn.backends import binding, codecache, driver
from peakattn.backends.binding import slots_of
from peakattn.backends.cutile import fwd, toolchain
from peakattn.backends.cutile.toolchain import Array
from peakattn.problem import AttentionProblem

CONFIG = fwd.Config(64, 64)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Versions by package, as if these and no others were installed, and no CUDA toolkit."""
    packages: dict[str, str] = {}
    monkeypatch.setattr(toolchain, "_versions", lambda names: {n: packages[n] for n in names if n in packages})
    monkeypatch.setattr(toolchain, "_toolkit_has_tileiras", lambda: False)
    monkeypatch.setenv("PATH", "")
    toolchain.unavailable.cache_clear()
    yield packages
    toolchain.unavailable.cache_clear()


def test_nothing_installed(installed: dict[str, str]) -> None:
    assert toolchain.unavailable() == "the package cuda-tile is not installed"


def test_one_version_of_the_compiler_is_well(installed: dict[str, str]) -> None:
    installed |= {
        "cuda-tile": "1.7.0",
        "nvidia-cuda-tileiras": "13.4.92",
        "nvidia-cuda-nvcc": "13.4.92",
        "nvidia-nvvm": "13.4.88",
    }
    assert toolchain.unavailable() is None


def test_a_compiler_of_mixed_versions_is_refused_with_the_fix(installed: dict[str, str]) -> None:
    """cuda.tile only warns, and then finds no compiler at all."""
    installed |= {
        "cuda-tile": "1.7.0",
        "nvidia-cuda-tileiras": "13.4.92",
        "nvidia-cuda-nvcc": "13.5.37",
        "nvidia-nvvm": "13.5.37",
    }
    reason = toolchain.unavailable()
    assert reason is not None
    assert "nvidia-cuda-tileiras 13.4.92, nvidia-cuda-nvcc 13.5.37" in reason
    assert reason.endswith("pip install nvidia-cuda-nvcc==13.4.92 nvidia-nvvm==13.4.92")


def test_a_missing_compiler_is_named(installed: dict[str, str]) -> None:
    installed |= {"cuda-tile": "1.7.0"}
    assert "without its compiler tileiras" in (toolchain.unavailable() or "")


def test_an_old_package_is_to_be_upgraded(installed: dict[str, str]) -> None:
    installed |= {"cuda-tile": "1.5.2"}
    assert "1.6 or newer is needed; upgrade it" in (toolchain.unavailable() or "")


def test_an_array_is_its_address_sizes_and_strides() -> None:
    x = torch.empty(2, 70, 3, 64, dtype=torch.float16, device="meta")
    packed = toolchain._packed(Array(x))
    assert [len(p) for p in packed] == [8] + 8 * [4]
    assert struct.unpack("8i", b"".join(packed[1:])) == (2, 3, 70, 64, 70 * 192, 64, 192, 1)
    assert toolchain._packed(None) == []
    assert toolchain._packed(7) == [struct.pack("i", 7)]
    assert toolchain._packed(0.5) == [struct.pack("f", 0.5)]


def test_an_array_over_2_to_31_elements_has_64_bit_strides() -> None:
    far = torch.empty_strided((2, 64, 1, 64), (2**33, 64, 64, 1), dtype=torch.float16, device="meta")
    packed = toolchain._packed(Array(far))
    assert [len(p) for p in packed] == 9 * [8]
    assert struct.unpack("q", packed[5]) == (2**33,)
    near = torch.empty_strided((2, 64, 1, 64), (2**30, 64, 64, 1), dtype=torch.float16, device="meta")
    assert not Array(near).wide


def test_the_stride_of_one_element_is_made_legal() -> None:
    x = torch.empty_strided((1, 8, 1, 1), (3, 24, 5, 7), dtype=torch.float16, device="meta")
    assert Array(x).strides == (8, 8, 24, 1)


def test_a_bound_launch_changes_addresses_and_numbers_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.empty(1, n, 1, 64, dtype=torch.float16, device="meta") for n in (70, 80, 80))
    lse = torch.empty(1, 1, 70, device="meta")
    problem = AttentionProblem(1, 70, 80, 1, 1, 64, 64, torch.float16, window_right=0, return_lse=True)
    monkeypatch.setattr(binding, "arch_of", lambda index: 90)
    monkeypatch.setattr(toolchain, "compile_launch", lambda *_: toolchain.Compiled("key", "name", b""))
    monkeypatch.setattr(driver, "_functions", {("key", 0, 0): "function"})
    out = torch.empty_like(q)
    (launch,) = fwd.launches(problem, CONFIG, q, k, v, out, lse, 1.0, 0.0)
    made = toolchain._kernel(launch, 0, *slots_of((q, k, v, out, lse)))
    assert (made.grid, made.num_threads, made.shared_bytes) == ((1, 2, 1), 1, 0)
    changing = [p for p in made.params if not isinstance(p, bytes)]
    assert changing == [*(driver.Pointer(i) for i in range(5)), driver.Scalar(5), driver.Scalar(6)]
    numbers = [struct.unpack("i", p)[0] for p in made.params[-2:] if isinstance(p, bytes)]
    assert numbers == [0, 10], "left, right"


def test_a_launch_that_passes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if (reason := toolchain.unavailable()) is not None:
        pytest.skip(reason)
    monkeypatch.setenv("PEAKATTN_CACHE_DIR", str(tmp_path))
    x = torch.empty(1, 64, 1, 64, dtype=torch.float16, device="meta")
    problem = AttentionProblem(1, 64, 64, 1, 1, 64, 64, torch.float16)
    (launch,) = fwd.launches(problem, CONFIG, x, x, x, x, None, 1.0, 0.0)
    code = toolchain.compile_launch(launch, 90)
    wrong = dataclasses.replace(launch, args=launch.args | {"left": 1.0, "extra": 3})
    with pytest.raises(RuntimeError, match=r"attention_fwd_kernel compiled to parameters of .* in their order\."):
        toolchain._check_parameters(wrong, code.name, code.cubin)
    monkeypatch.setattr(toolchain, "_kept", codecache.Kept("cutile"))
    monkeypatch.setattr(toolchain, "_compile", lambda *_: pytest.fail("it is on disk"))
    assert toolchain.compile_launch(launch, 90) == code


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"block_m": 48}, r"block_m is 48; allowed are the powers of two from 16 to 256\.$"),
        ({"occupancy": 0}, r"occupancy is 0; allowed are 1 to 32, blocks on an SM\.$"),
        ({"v_latency": 11}, r"v_latency is 11; allowed are 0 to 10, where 0 is the compiler's own choice\.$"),
        ({"num_worker_warps": 2}, r"num_worker_warps is 2; allowed are 4, 8, or 0"),
    ],
)
def test_a_config_that_no_problem_can_use_says_why(knobs: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(CONFIG, **knobs)
