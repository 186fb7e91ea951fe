"""The NVRTC toolchain without a GPU: what is kept of a compile, when it is found again, and what a launch passes."""

from __future__ import annotations

import dataclasses
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from peakattn import dispatch
from peakattn.backends import binding, codecache, driver, load
from peakattn.backends.binding import meta_tensors, slots_of
from peakattn.backends.cuda import toolchain
from peakattn.backends.cuda.toolchain import CudaLaunch, Int64
from peakattn.problem import AttentionProblem

if (reason := dispatch.unavailable("cuda")) is not None:
    pytest.skip(reason, allow_module_level=True)

KERNEL = load("cuda.fwd_sm80")
PROBLEM = AttentionProblem(1, 64, 64, 1, 1, 16, 16, torch.float16)
SOURCE = """
#include "ours.cuh"
extern "C" __global__ void __launch_bounds__(32) scaled(const float *x, float *y, float softmax_scale, i64 stride, int n) {
    if (threadIdx.x < n) y[threadIdx.x * stride] = FACTOR * softmax_scale * x[threadIdx.x];
}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache on disk and in the process."""
    monkeypatch.setenv("PEAKATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(toolchain, "_kept", codecache.Kept("cuda"))
    toolchain._hash_of_sources.cache_clear()
    return tmp_path / "cache" / "cuda"


@pytest.fixture
def launch(tmp_path: Path) -> CudaLaunch:
    """A small source of its own, with a header beside it."""
    (tmp_path / "scaled.cu").write_text(SOURCE)
    (tmp_path / "ours.cuh").write_text('#include "tile_ops.cuh"\n')
    x = torch.empty(8, dtype=torch.float32, device="meta")
    args: dict[str, Any] = {"x": x, "y": x, "softmax_scale": 1.0, "stride": Int64(2**40), "n": 3}
    return CudaLaunch(tmp_path / "scaled.cu", "scaled", (1, 1, 1), 32, 0, args, {"FACTOR": 2})


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of what was really compiled."""
    made: list[str] = []
    compile_it = toolchain._compile

    def noted(launch: CudaLaunch, arch: int, key: str) -> toolchain.Compiled:
        made.append(key)
        return compile_it(launch, arch, key)

    monkeypatch.setattr(toolchain, "_compile", noted)
    return made


def forget() -> None:
    """What a new process knows: nothing."""
    toolchain._kept = codecache.Kept("cuda")
    toolchain._hash_of_sources.cache_clear()


def test_a_second_process_finds_what_the_first_compiled(launch: CudaLaunch, compiles: list[str], folder: Path) -> None:
    first = toolchain.compile_launch(launch, 80)
    assert first.cubin[:4] == b"\x7fELF"
    forget()
    assert toolchain.compile_launch(launch, 80) == first
    assert len(compiles) == 1
    assert [file.name for file in folder.iterdir()] == [f"{first.key}.zip"], "and no temporary file is left"


def test_what_the_code_depends_on_is_in_the_key(launch: CudaLaunch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = {toolchain._key(launch, arch) for arch in (80, 90)}
    keys.add(toolchain._key(dataclasses.replace(launch, constants={"FACTOR": 3}), 80))
    keys.add(toolchain._key(dataclasses.replace(launch, args={**launch.args, "stride": 1}), 80))
    (tmp_path / "ours.cuh").write_text('#include "tile_ops.cuh"\n// another text\n')
    toolchain._hash_of_sources.cache_clear()
    keys.add(toolchain._key(launch, 80))
    monkeypatch.setattr(toolchain, "version", lambda: "nvidia-cuda-nvrtc 99.0")
    keys.add(toolchain._key(launch, 80))
    assert len(keys) == 6


def test_sizes_and_strides_are_not_in_the_key() -> None:
    def key(**change: Any) -> str:
        problem = dataclasses.replace(PROBLEM, **change)
        (made,) = KERNEL.launches(problem, KERNEL.Config(16, 16, 1), *meta_tensors(problem), 1.0, 0.0)
        return toolchain._key(made, 80)

    assert key() == key(batch=3) == key(seqlen_q=77, seqlen_k=99)
    assert len({key(), key(dtype=torch.bfloat16), key(return_lse=True), key(window_right=0), key(softcap=True)}) == 5


def test_a_source_that_does_not_compile_raises_with_the_log(launch: CudaLaunch, folder: Path) -> None:
    wrong = dataclasses.replace(launch, constants={"FACTOR": "nonsense"})
    with pytest.raises(RuntimeError) as raised:
        toolchain.compile_launch(wrong, 80)
    message = str(raised.value)
    assert "cannot compile scaled.cu for sm_80 with FACTOR=nonsense; its whole log is in " in message
    assert 'identifier "nonsense" is undefined' in message
    (log,) = folder.glob("*.log")
    assert str(log) in message
    assert "nonsense" in log.read_text()


def test_what_differs_from_the_launch_is_named(launch: CudaLaunch) -> None:
    with pytest.raises(
        RuntimeError, match=r"64-bit integer, 32-bit integer, and the launch passes .* float32, 32-bit integer, 32-"
    ):
        toolchain.compile_launch(dataclasses.replace(launch, args={**launch.args, "stride": 3}), 80)
    with pytest.raises(RuntimeError, match="compiled for 32 threads, and the launch has 64"):
        toolchain.compile_launch(dataclasses.replace(launch, num_threads=64), 80)
    with pytest.raises(RuntimeError, match="has no function 'other' with launch bounds; it has scaled"):
        toolchain.compile_launch(dataclasses.replace(launch, function="other"), 80)
    with pytest.raises(TypeError, match="is no argument of a launch"):
        toolchain.compile_launch(dataclasses.replace(launch, args={"flag": True}), 80)


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[: len(b) // 2], lambda b: b[:200] + b"\0\1\2\3" + b[204:]])
def test_a_damaged_file_is_a_miss_and_is_replaced(damage: Any, launch: CudaLaunch, compiles: list[str], folder: Path) -> None:
    made = toolchain.compile_launch(launch, 80)
    (file,) = folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    for _ in range(2):
        forget()
        assert toolchain.compile_launch(launch, 80) == made
    assert len(compiles) == 2


def test_a_folder_that_cannot_be_written_is_no_error(
    launch: CudaLaunch, compiles: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PEAKATTN_CACHE_DIR", str(tmp_path / "file"))
    assert toolchain.compile_launch(launch, 80) is toolchain.compile_launch(launch, 80)
    assert len(compiles) == 1, "it is kept in the process all the same"


def test_a_launch_passes_its_arguments_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pointers and run-time numbers by slot, sizes and strides as bytes of their width, null for what is None."""
    loaded: list[tuple[str, int]] = []

    def load_function(cubin: bytes, name: str, shared_bytes: int) -> str:
        loaded.append((name, shared_bytes))
        return "function"

    monkeypatch.setattr(binding, "arch_of", lambda index: 80)
    monkeypatch.setattr(driver, "_functions", {})
    monkeypatch.setattr(driver, "load_function", load_function)
    tensors = meta_tensors(PROBLEM)
    (launch,) = KERNEL.launches(PROBLEM, KERNEL.Config(16, 16, 1), *tensors, 1.0, 0.0)
    for _ in range(2):
        made = toolchain._kernel(launch, 0, *slots_of(tensors))
    assert loaded == [("attention_fwd_kernel", launch.shared_bytes)], "once"
    assert (made.grid, made.num_threads, made.shared_bytes) == ((4, 1, 1), 32, launch.shared_bytes)
    assert made.params[:4] == tuple(driver.Pointer(i) for i in range(4))
    assert made.params[4:7] == (struct.pack("q", 0), driver.Scalar(5), driver.Scalar(6)), "nobody wants lse"
    numbers = list(launch.args.values())[7:]
    assert len(numbers) == 21
    packed = [struct.pack("q", n.value) if isinstance(n, Int64) else struct.pack("i", n) for n in numbers]
    assert list(made.params[7:]) == packed


def test_a_kernel_on_disk_needs_no_compiler(folder: Path) -> None:
    """Compiled by two processes at once, then found by one that cannot import NVRTC's bindings."""
    code = """
import sys
import torch
if {blocked}:
    sys.modules["cuda.bindings"] = None
    sys.modules["cuda.core"] = None
from peakattn.backends.binding import meta_tensors
from peakattn.backends.cuda import fwd_sm80, toolchain
from peakattn.problem import AttentionProblem
problem = AttentionProblem(1, 64, 64, 1, 1, 16, 16, torch.float16)
(launch,) = fwd_sm80.launches(problem, fwd_sm80.Config(16, 16, 1), *meta_tensors(problem), 1.0, 0.0)
compiled = toolchain.compile_launch(launch, 80)
assert compiled.cubin[:4] == b"\\x7fELF"
"""
    env = dict(os.environ)
    both = [subprocess.Popen([sys.executable, "-c", code.format(blocked=False)], env=env) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert len(list(folder.iterdir())) == 1
    subprocess.run([sys.executable, "-c", code.format(blocked=True)], env=env, check=True)
