"""peakattn run: one kernel, everything settable, checked before a speed is said."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner, Result

from peakattn import backends, reference
from peakattn.device import CPU
from peakattn_lab import accuracy, cli, problems, runone

SMALL = ("--dtype", "float32", "--head-dim", "32", "--seqlen-q", "40", "--num-heads", "4", "--iterations", "2")
PROBLEM = problems.on_device(problems.make(40, 32, heads=(4, 2), causal=True, dtype=torch.float32), "cpu")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["run", *arguments])


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--causal", "--num-heads-kv", "2", "--seqlen-k", "55", "--batch", "2"),
        ("--window", "7,3", "--softmax-scale", "0.5"),
        ("--softcap", "2.5", "--head-dim-v", "16"),
        ("--block-m", "16", "--config", '{"block_n": 8}'),
    ],
)
@pytest.mark.parametrize("kernel", ["cpu.fwd", "cpu.bwd"])
def test_kernels_of_the_cpu_run_and_are_right(kernel, options):
    done = run(kernel, *SMALL, *options, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert [e["name"] for e in found["errors"]] == (["out", "lse"] if kernel == "cpu.fwd" else ["dq", "dk", "dv"])
    assert all(0 <= e["largest"] < 1e-4 and e["wrong"] is None for e in found["errors"])
    assert len(found["seconds"]) == 2
    assert found["tflops"] > 0
    if "--block-m" in options:
        assert found["config"] == {"block_m": 16, "block_n": 8}


def test_the_text_has_error_and_time():
    done = run("cpu.fwd", *SMALL, "--causal")
    assert done.exit_code == 0
    for words in ("fwd float32 batch 1, seqlen 40 x 40", "against float64", "torch, same dtype", "TFLOP/s"):
        assert words in done.output


def test_without_the_check_there_is_no_error_table():
    done = run("cpu.fwd", *SMALL, "--skip-check")
    assert done.exit_code == 0
    assert "against float64" not in done.output
    assert "median" in done.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("cpu.fwd", "--num-threads", "64"), "cpu.fwd has no knob for num_threads; its knobs are block_m, block_n."),
        (("cpu.fwd", "--config", '{"num_stages": 2}'), "cpu.fwd has no knob num_stages; its knobs are block_m, block_n."),
        (("cpu.fwd", "--config", "fast"), "which is no JSON"),
        (("cpu.fwd", "--config", "[1]"), "write an object of knobs"),
        (("cpu.fwd", "--block-m", "8", "--config", '{"block_m": 16}'), "block_m is 8 as an option and 16 in config"),
        (("cpu.forward",), "kernel 'cpu.forward' is unknown; known are cpu.fwd"),
        (("ladder.triton.step99",), "the triton ladder has the steps"),
        (("cpu.fwd", "--iterations", "0"), "iterations is 0; allowed are 1 and more."),
        (("cpu.fwd", "--softmax-scale", "-1"), "softmax_scale is -1.0; a kernel by itself takes a positive one"),
        (("cpu.fwd", "--num-heads-kv", "3"), "is not a multiple of num_heads_kv 3"),
        (("cpu.fwd", "--dtype", "int"), "allowed are float16, bfloat16 and float32"),
    ],
)
def test_what_cannot_be_is_a_sentence(arguments, sentence):
    done = run(arguments[0], *SMALL, *arguments[1:])
    assert done.exit_code == 2
    assert sentence in done.output


def test_threads_are_warps_where_a_kernel_counts_warps():
    triton = pytest.importorskip("peakattn_lab.ladder.triton.host")
    module = SimpleNamespace(
        reject=lambda problem, device: None, default_config=lambda problem, device: triton.Config(16, 16, 4, 3)
    )
    rung = SimpleNamespace(kernel_id=None)
    kernel = runone.Kernel("ladder.x.step1", module, rung)  # type: ignore[arg-type]
    assert kernel.config(PROBLEM, CPU, {"num_threads": 256, "block_n": 32}) == triton.Config(16, 32, 8, 3)
    with pytest.raises(ValueError, match="it is a multiple of 32"):
        kernel.config(PROBLEM, CPU, {"num_threads": 100})


@pytest.mark.parametrize("spoiled", ["value", "unwritten", "lse"])
def test_a_wrong_kernel_has_no_speed(spoiled):
    module = backends.load("cpu.fwd")

    def launch(problem, config, q, k, v, out, lse, scale, softcap):
        if spoiled != "unwritten":
            module.launch(problem, config, q, k, v, out, lse, scale, softcap)
        if spoiled == "value":
            out[0, -1, -1, -1] += 0.5
        if spoiled == "lse":
            lse[0, -1, -1] += 0.5

    kernel = runone.Kernel("cpu.fwd", SimpleNamespace(launch=launch))  # type: ignore[arg-type]
    problem = dataclasses.replace(PROBLEM, return_lse=True)
    result = runone.run(kernel, problem, module.default_config(problem, CPU), torch.device("cpu"), iterations=1)
    assert result.wrong
    assert runone.to_dict(result)["tflops"] is None
    assert runone.to_dict(result)["seconds"] == []
    assert [title for title, _, _ in runone.tables(result)] == ["against float64"]


def test_errors_are_those_of_the_worst_slice():
    inputs = problems.inputs(PROBLEM, torch.device("cpu"), seed=0)
    options = problems.options(PROBLEM)
    exact = reference.attention(*inputs, **options)[0].to(torch.float32)
    (right,) = accuracy.errors_of(PROBLEM, inputs, {"out": exact}, options)
    assert right.wrong is None
    assert right.largest < 1e-6
    exact[0, 5, 3, 2] += 0.25
    (wrong,) = accuracy.errors_of(PROBLEM, inputs, {"out": exact}, options)
    assert wrong.largest == pytest.approx(0.25, abs=1e-5)
    assert "out of batch 0, kv head 1 errs by" in (wrong.wrong or "")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("kernel", ["triton.fwd", "ladder.triton.step6"])
def test_kernels_and_rungs_run_in_the_interpreter(kernel):
    command = [sys.executable, "-m", "peakattn_lab", "run", kernel, *SMALL, "--block-n", "16", "--num-threads", "64", "--json"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert (found["config"]["block_n"], found["config"]["num_warps"]) == (16, 2)
    assert all(e["wrong"] is None for e in found["errors"])


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [k for k in backends.KERNELS if not k.startswith("cpu.")])
def test_kernels_run_on_the_gpu(kernel):
    done = run(kernel, "--head-dim", "64", "--seqlen-q", "300", "--causal", "--json")
    if done.exit_code == 2:
        pytest.skip(done.output)
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["tflops"] > 0
    assert all(f["registers"] > 0 for f in found["functions"])
