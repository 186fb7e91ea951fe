"""The CuTe toolchain without a GPU: what is kept of a compile, when it is found again, and what a launch passes."""

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
from peakattn.backends.cute import toolchain
from peakattn.backends.cute.toolchain import Compiled, CuteLaunch, Int64, Tma
from peakattn.problem import AttentionProblem

if (reason := dispatch.unavailable("cute")) is not None:
    pytest.skip(reason, allow_module_level=True)

PROBLEM = AttentionProblem(1, 64, 64, 1, 1, 16, 16, torch.float16)
PTX = """.visible .entry attention_fwd_kernel_0(
	.param .u64 .ptr .global .align 16 attention_fwd_kernel_0_param_0,
	.param .align 64 .b8 attention_fwd_kernel_0_param_1[128],
	.param .u64 attention_fwd_kernel_0_param_2,
	.param .u32 attention_fwd_kernel_0_param_3,
	.param .f32 attention_fwd_kernel_0_param_4
)
.reqntid 32, 1, 1
{
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache on disk and in the process."""
    monkeypatch.setenv("PEAKATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(toolchain, "_kept", codecache.Kept("cute"))
    return tmp_path / "cute"


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys that were compiled, by a compiler that takes no time."""
    made: list[str] = []

    def compile_at_once(launch: CuteLaunch, arch: int, key: str) -> Compiled:
        made.append(key)
        return Compiled(key, "attention_fwd_kernel_0", b"\x7fELF machine code", PTX)

    monkeypatch.setattr(toolchain, "_compile", compile_at_once)
    return made


def launch_of(problem: AttentionProblem = PROBLEM, **config: int) -> CuteLaunch:
    kernel = load("cute.fwd_sm80")
    knobs = {"block_m": 16, "block_n": 16, "num_threads": 32} | config
    (launch,) = kernel.launches(problem, kernel.Config(**knobs), *meta_tensors(problem), 1.0, 0.0)
    return launch


def forget() -> None:
    """What a new process knows: nothing."""
    toolchain._kept = codecache.Kept("cute")


def test_a_second_process_finds_what_the_first_compiled(compiles: list[str], folder: Path) -> None:
    first = toolchain.compile_launch(launch_of(), 80)
    forget()
    assert toolchain.compile_launch(launch_of(), 80) == first
    assert len(compiles) == 1
    assert [file.name for file in folder.iterdir()] == [f"{first.key}.zip"], "and no temporary file is left"


def test_what_the_code_depends_on_is_in_the_key_and_sizes_are_not(compiles: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain.compile_launch(launch_of(), 80)
    for problem in (dataclasses.replace(PROBLEM, seqlen_q=77, seqlen_k=99), dataclasses.replace(PROBLEM, batch=3)):
        toolchain.compile_launch(launch_of(problem), 80)
    assert len(compiles) == 1
    toolchain.compile_launch(launch_of(), 90)
    toolchain.compile_launch(launch_of(block_m=32), 80)
    for change in ({"dtype": torch.bfloat16}, {"return_lse": True}, {"window_right": 0}, {"softcap": True}):
        toolchain.compile_launch(launch_of(dataclasses.replace(PROBLEM, **change)), 80)
    assert len(set(compiles)) == 7
    monkeypatch.setattr(toolchain, "version", lambda: "nvidia-cutlass-dsl 99.0")
    toolchain.compile_launch(launch_of(), 80)
    monkeypatch.setattr(codecache, "sources", lambda module, toolchain: "other text")
    toolchain.compile_launch(launch_of(), 80)
    assert len(set(compiles)) == 9


def test_the_sources_of_a_kernel_are_its_module_its_device_code_and_no_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    text = Path.read_text

    def noted(self: Path, **options: Any) -> str:
        read.append(self.name)
        return text(self, **options)

    monkeypatch.setattr(Path, "read_text", noted)
    codecache.sources.__wrapped__("peakattn.backends.cute.fwd_sm80", toolchain.__name__)
    assert {"fwd_sm80.py", "device_fwd_sm80.py", "toolchain.py"} <= set(read)
    assert not [name for name in read if "sm90" in name or name == "fwd.py"]
    codecache.sources.__wrapped__("peakattn.backends.cute.fwd_sm90", toolchain.__name__)
    assert {"device_fwd_sm90.py", "device_hopper_ops.py", "device_output_sm90.py", "device_softmax_sm90.py"} <= set(read)


@pytest.mark.parametrize(
    "damage", [lambda b: b"", lambda b: b[: len(b) // 2], lambda b: b[:200] + b"\0\1\2\3" + b[204:], lambda b: b"no zip"]
)
def test_a_damaged_file_is_a_miss_and_is_replaced(damage: Any, compiles: list[str], folder: Path) -> None:
    toolchain.compile_launch(launch_of(), 80)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    forget()
    assert toolchain.compile_launch(launch_of(), 80).cubin == b"\x7fELF machine code"
    assert len(compiles) == 2
    forget()
    toolchain.compile_launch(launch_of(), 80)
    assert len(compiles) == 2, "the new file is whole"


def test_a_folder_that_cannot_be_written_is_no_error(
    compiles: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PEAKATTN_CACHE_DIR", str(tmp_path / "file"))
    assert toolchain.compile_launch(launch_of(), 80).name == "attention_fwd_kernel_0"
    assert toolchain.compile_launch(launch_of(), 80).name == "attention_fwd_kernel_0"
    assert len(compiles) == 1, "it is kept in the process all the same"


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert codecache.folder("cute") == tmp_path / "cute"
    monkeypatch.delenv("PEAKATTN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert codecache.folder("cute") == Path("/somewhere/peakattn/cute")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert codecache.folder("cute") == Path.home() / ".cache/peakattn/cute"


def test_parameters_that_differ_from_the_launch_are_named() -> None:
    x = torch.empty(1, 8, 1, 16, dtype=torch.float16, device="meta")
    args: dict[str, Any] = {"x": x, "map": Tma(x, (1, 1, 8, 16), 1), "none": None, "stride": Int64(2**40), "n": 3, "scale": 1.0}
    launch = CuteLaunch(test_parameters_that_differ_from_the_launch_are_named, (1, 1, 1), 32, 0, args)
    assert toolchain._checked_name(launch, PTX) == "attention_fwd_kernel_0"
    with pytest.raises(
        RuntimeError, match="compiled to the parameters pointer, tensor map, int64, int32, float32, and the launch"
    ):
        toolchain._checked_name(dataclasses.replace(launch, args={**args, "stride": 3}), PTX)
    with pytest.raises(RuntimeError, match="compiled for 32 threads, and the launch has 64"):
        toolchain._checked_name(dataclasses.replace(launch, num_threads=64), PTX)
    with pytest.raises(TypeError, match="is no argument of a launch"):
        toolchain._checked_name(dataclasses.replace(launch, args={"flag": True}), PTX)


def test_a_launch_passes_its_arguments_in_order(compiles: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pointers and run-time numbers by slot, sizes and strides as bytes of their width, nothing for what is None."""
    loaded: list[tuple[str, int]] = []

    def load_function(cubin: bytes, name: str, shared_bytes: int) -> str:
        loaded.append((name, shared_bytes))
        return "function"

    monkeypatch.setattr(binding, "arch_of", lambda index: 80)
    monkeypatch.setattr(driver, "_functions", {})
    monkeypatch.setattr(driver, "load_function", load_function)
    tensors = meta_tensors(PROBLEM)
    kernel = load("cute.fwd_sm80")
    (launch,) = kernel.launches(PROBLEM, kernel.Config(16, 16, 32), *tensors, 1.0, 0.0)
    made = toolchain._kernel(launch, 0, *slots_of(tensors))
    assert loaded == [("attention_fwd_kernel_0", launch.shared_bytes)]
    assert (made.grid, made.num_threads, made.shared_bytes) == ((4, 1, 1), 32, launch.shared_bytes)
    assert made.params[:6] == (*(driver.Pointer(i) for i in range(4)), driver.Scalar(5), driver.Scalar(6))
    numbers = [value for name, value in launch.args.items() if name.startswith(("stride", "seqlen", "num", "group", "section"))]
    packed = [struct.pack("q", n.value) if isinstance(n, Int64) else struct.pack("i", n) for n in numbers]
    assert list(made.params[6 : 6 + len(packed)]) == packed
    toolchain._kernel(launch, 0, *slots_of(tensors))
    assert len(loaded) == 1, "a function is loaded once"


def test_a_tensor_map_has_the_dimensions_of_the_descriptor() -> None:
    x = torch.empty(1, 100, 4, 64, dtype=torch.bfloat16, device="meta")
    got = Tma(x, (1, 1, 32, 64), 3).tensor_map(7)
    strides = (8, 64, 256, 1)  # batch, heads, rows, columns; a single batch entry gets any legal stride
    assert got == driver.TensorMap(7, torch.bfloat16, (1, 4, 100, 64), strides, (1, 1, 32, 64), 3)


@pytest.mark.slow
def test_a_kernel_on_disk_needs_no_compiler_and_under_a_second(folder: Path) -> None:
    """Compiled for real here, then found by processes that may or cannot import cutlass; two at once do no harm."""
    code = """
import sys, time
import torch
if {blocked}:
    sys.modules["cutlass"] = None
from peakattn.backends import driver, load
from peakattn.backends.binding import meta_tensors, slots_of
from peakattn.backends.cute import toolchain
from peakattn.problem import AttentionProblem
start = time.process_time()
problem = AttentionProblem(1, 64, 64, 1, 1, 16, 16, torch.float16)
kernel = load("cute.fwd_sm80")
(launch,) = kernel.launches(problem, kernel.Config(16, 16, 32), *meta_tensors(problem), 1.0, 0.0)
compiled = toolchain.compile_launch(launch, 80)
assert compiled.cubin[:4] == b"\\x7fELF"
print(time.process_time() - start, sys.modules.get("cutlass") is not None)
"""
    both = [subprocess.Popen([sys.executable, "-c", code.format(blocked=False)], env=dict(os.environ)) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert len(list(folder.iterdir())) == 1
    for blocked in (True, False):
        done = subprocess.run([sys.executable, "-c", code.format(blocked=blocked)], capture_output=True, text=True, check=True)
        seconds, imported = done.stdout.split()
        assert float(seconds) < 1.0
        assert imported == "False", "cutlass was imported to find what is on disk"
