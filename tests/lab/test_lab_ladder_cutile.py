"""The cuTile ladder without a GPU: each rung's own source against the oracle, and what each compiles to."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from peakattn import dispatch
from peakattn.backends.contract import Artifacts, ForwardKernel
from peakattn.backends.cubin import hot_loops
from peakattn.backends.cutile import toolchain
from peakattn.device import CPU, Device
from peakattn_lab import cli, ladder, problems
from peakattn_lab.gate import Gate
from peakattn_lab.ladder.checking import check_problems
from peakattn_lab.ladder.subjects import by_default

sys.path.insert(0, str(Path(__file__).parents[1]))
import cutile_emulator as emulator

pytestmark = pytest.mark.skipif(dispatch.unavailable("cutile") is not None, reason=str(dispatch.unavailable("cutile")))

H200 = Device.named("h200")
OWN = range(1, 15)  # rungs with device code of their own
LARGE = (6, 7, 8, 9)


def rung_of(step: int) -> ladder.Rung:
    (rung,) = ladder.rungs("cutile", [str(step)])
    return rung


@functools.cache
def code(step: int, head_dim: int = 64, causal: bool = False) -> Artifacts:
    rung = rung_of(step)
    problem = problems.make(4096, head_dim, batch=4, heads=2048 // head_dim, causal=causal)
    (made,) = rung.artifacts(problem, by_default(rung, problem, H200).config, 90)
    return made


def plain_loop(made: Artifacts) -> dict[str, int]:
    return min(made.loops, key=lambda loop: sum(loop.values()))


@pytest.mark.parametrize("step", OWN)
def test_a_rung_keeps_the_kernel_contract(step):
    kernel = rung_of(step).kernel
    problem = problems.make(4096, 128, heads=16)
    assert isinstance(kernel, ForwardKernel)
    assert kernel.reject(problem, H200) is None
    assert kernel.default_config(problem, H200) in list(kernel.search_space(problem, H200))
    assert "forward" in kernel.reject(dataclasses.replace(problem, direction="bwd"), H200)
    assert "full and causal" in kernel.reject(dataclasses.replace(problem, window_left=100), H200)
    assert "float32" in kernel.reject(dataclasses.replace(problem, dtype=torch.float32), H200)
    assert "head_dim" in kernel.reject(dataclasses.replace(problem, head_dim_v=64), H200)


@pytest.mark.parametrize("tile", [(32, 16), (64, 64)])
@pytest.mark.parametrize("step", OWN)
def test_a_rung_is_right_in_the_emulator(step, tile):
    """Lengths that no tile divides, rows that see no key, grouped heads, one query; tiles smaller and larger than they are."""
    kernel = rung_of(step).kernel
    for small in check_problems(torch.bfloat16, CPU, [32]):
        tensors = q, k, v = problems.inputs(small, torch.device("cpu"), seed=0)
        problem = dataclasses.replace(small, device_type="cuda")
        out = torch.full((*q.shape[:-1], problem.head_dim_v), math.nan, dtype=q.dtype)
        lse = torch.full((problem.batch, problem.num_heads_q, problem.seqlen_q), math.nan)
        emulator.run(kernel.launches(problem, kernel.Config(*tile), q, k, v, out, lse, 32**-0.5, 0.0))
        result = Gate(small, tensors, slices=small.batch * small.num_heads_kv).check((out, lse))
        assert result.passed, f"{problem}: {result.message}"


@pytest.mark.parametrize("step", [step for step in OWN if step not in LARGE])
def test_a_rung_has_wgmma_and_tma_and_spills_nothing(step):
    made = code(step)
    assert made.name == "attention_fwd_kernel"
    assert made.loop_spills == 0
    assert made.opcodes["HGMMA"] > 0
    assert made.opcodes["UTMALDG"] >= 3
    assert made.registers * made.num_threads <= 64 * 1024


def test_each_step_is_the_step_it_says():
    scores = 64 * 64 // 128  # of a thread
    assert plain_loop(code(1))["FFMA"] >= 3 * scores, "exp reduces its argument"
    assert plain_loop(code(2))["FFMA"] <= scores + 4, "one multiply-add a score"
    assert plain_loop(code(2)) == plain_loop(code(3)), "wgmma reads K in either order"
    assert code(4).shared_bytes != code(3).shared_bytes, "other stages"
    assert [code(step).registers * code(step).num_threads <= 32 * 1024 for step in (4, 5)] == [False, True]


def test_large_tiles_spill_and_fast_math_saves_instructions_of_every_score():
    """With the tile of 256 x 128, of which a thread of one warpgroup has 256 scores."""
    trap, rescue = code(6), code(7)
    assert trap.loop_spills > 100
    assert plain_loop(trap)["MUFU"] == plain_loop(rescue)["MUFU"]
    assert plain_loop(trap)["FSETP"] - plain_loop(rescue).get("FSETP", 0) >= 256, "is it a denormal number?"
    assert plain_loop(rescue).get("FSETP", 0) < 32


def test_the_loop_without_a_mask_selects_nothing():
    knobs = rung_of(8).kernel.Config(64, 64, occupancy=2)
    problem = problems.make(4096, 64, batch=4, heads=32, causal=True)
    selected = []
    for step in (7, 8):
        (made,) = rung_of(step).artifacts(problem, knobs, 90)
        selected.append([loop.get("FSEL", 0) >= 32 for loop in sorted(made.loops, key=lambda loop: sum(loop.values()))])
    assert selected == [[True], [False, True]]


def test_a_product_of_step12_runs_under_the_softmax():
    """Exponentials stand between the products of a loop and the wait for them; in step 11 none do."""
    under = []
    for step in (11, 12):
        made = code(step, 128)
        assert made.num_threads == 3 * 128
        (body,) = hot_loops(str(made.sass))
        running, count = False, 0
        for one in body:
            if one.head == "HGMMA" or one.opcode.startswith("WARPGROUP.DEPBAR"):
                running = one.head == "HGMMA"
            count += running and one.opcode == "MUFU.EX2"
        under.append(count)
    assert under[0] == 0
    assert under[1] >= 64


def test_a_grid_that_one_dimension_does_not_hold_is_a_sentence():
    kernel, problem = rung_of(1).kernel, problems.make(64, 64, batch=2**20, heads=32)
    x = torch.empty(2**20, 64, 32, 64, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ValueError, match="33554432 blocks are more than"):
        kernel.launches(problem, kernel.Config(64, 64), x, x.clone(), x.clone(), x.clone(), None, 1.0, 0.0)


def test_a_config_that_no_problem_can_use_says_why():
    config = rung_of(1).kernel.Config
    with pytest.raises(ValueError, match="block_m is 100; allowed are the powers of two"):
        config(100, 64)
    with pytest.raises(ValueError, match="num_worker_warps is 5; allowed are 4, 8, or 0"):
        config(64, 64, num_worker_warps=5)


def test_the_command_compiles_the_ladder_without_a_gpu():
    shape = ("--seqlen", "1024", "--head-dim", "64", "--causal", "--processes", "1")
    rungs = ("--rung", "2", "--rung", "12")
    done = CliRunner().invoke(cli.app, ["ladder", "cutile", "--static", "--arch", "sm_90", *rungs, *shape])
    assert done.exit_code == 0, done.output
    assert "step12" in done.output
    assert "HGMMA" in done.output
    assert "does not compile" not in done.output


@pytest.mark.parametrize("step", [1, 8, 13, 15])
def test_what_a_check_launches_was_compiled_before_it(step, monkeypatch):
    """Checks launch one rung after the other; the compilers have run in parallel by then, on tensors without data."""

    def asked(launch: toolchain.TileLaunch, arch: int) -> None:
        raise AskedError(toolchain._key(launch, arch))

    monkeypatch.setattr(toolchain, "compile_launch", asked)
    rung = rung_of(step)
    for problem in check_problems(torch.bfloat16, H200, [64]):
        config = by_default(rung, problem, H200).config
        with pytest.raises(AskedError) as compiled:
            rung.artifacts(problem, config, 90)
        q, k, v = problems.inputs(dataclasses.replace(problem, device_type="cpu"), torch.device("cpu"), seed=0)
        out, lse = torch.empty_like(q), torch.empty(problem.batch, problem.num_heads_q, problem.seqlen_q)
        (launch,) = rung.kernel.launches(problem, config, q, k, v, out, lse, 0.125, 0.0)
        assert str(compiled.value) == toolchain._key(launch, 90)


class AskedError(Exception):
    """What the compiler was asked for."""
