"""The CUDA C++ ladder without a GPU: every rung against the oracle, what it compiles to, and that each step is its step."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import oracle
import ptx_interpreter
from peakattn import dispatch
from peakattn.backends.contract import Artifacts, ForwardKernel
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab import cli, ladder, problems
from peakattn_lab.ladder.cuda import host
from peakattn_lab.ladder.subjects import by_default

pytestmark = pytest.mark.skipif(dispatch.unavailable("cuda") is not None, reason=str(dispatch.unavailable("cuda")))

H200 = Device.named("h200")
STEPS = range(1, 18)
OWN = range(1, 12)  # with device code of their own
DEVICE_CODE = (1, 3, 4, 5, 7, 8, 9, 10, 11, 15)  # a rung for each source file, and one that is the library's


def rung_of(step: int) -> ladder.Rung:
    (rung,) = ladder.rungs("cuda", [str(step)])
    return rung


@functools.cache
def code(step: int, arch: int = 90, head_dim: int = 128, causal: bool = True) -> Artifacts:
    rung = rung_of(step)
    problem = problems.make(4096, head_dim, batch=4, heads=2048 // head_dim, causal=causal)
    problem = dataclasses.replace(problem, return_lse=True)
    (made,) = rung.artifacts(problem, by_default(rung, problem, H200).config, arch)
    return made


def most_products(made: Artifacts) -> dict[str, int]:
    """The loop over key tiles; of two the one without a mask."""
    return min((loop for loop in made.loops if loop["HMMA"] > 8), key=lambda loop: sum(loop.values()))


def run(step: int, lengths: tuple[int, int], heads: tuple[int, int], head_dim: int, causal: bool, dtype: torch.dtype) -> int:
    """One call by the PTX interpreter, held to the oracle; the number of bank conflicts."""
    generator = torch.Generator().manual_seed(step)
    q, k, v = (
        torch.randn(1, length, count, head_dim, generator=generator).to(dtype)
        for length, count in ((lengths[0], heads[0]), (lengths[1], heads[1]), (lengths[1], heads[1]))
    )
    problem = AttentionProblem.of(q, k, v, causal=causal, return_lse=True)
    kernel: Any = rung_of(step).kernel
    out = torch.full_like(q, math.nan)
    lse = torch.full((1, heads[0], lengths[0]), math.nan)
    config = kernel.default_config(problem, H200)
    (launch,) = kernel.launches(problem, config, q, k, v, out, lse, 1 / math.sqrt(head_dim), 0.0)
    from peakattn.backends.cuda import toolchain

    compiled = toolchain.compile_launch(launch, 80)
    conflicts = ptx_interpreter.run(compiled, launch, (out, lse))
    oracle.check(out, lse, q, k, v, causal=causal)
    return conflicts


@pytest.mark.parametrize("step", DEVICE_CODE)
def test_a_rung_keeps_the_error_budget(step):
    """Tails of rows and keys, rows that see no key, grouped heads, both types."""
    run(step, (37, 70), (2, 1), 32, False, torch.bfloat16)
    conflicts = run(step, (70, 37), (1, 1), 16, True, torch.float16)
    assert (conflicts == 0) == (step >= 10)


@pytest.mark.parametrize("step", STEPS)
def test_a_rung_keeps_the_kernel_contract(step):
    kernel = rung_of(step).kernel
    problem = problems.make(4096, 128, heads=16)
    assert isinstance(kernel, ForwardKernel)
    assert kernel.reject(problem, H200) is None
    assert isinstance(kernel.default_config(problem, H200), kernel.Config)
    assert "float32" in kernel.reject(dataclasses.replace(problem, dtype=torch.float32), H200)
    if step < STEPS[-1]:
        assert "forward" in kernel.reject(dataclasses.replace(problem, direction="bwd"), H200)
        assert "full and causal" in kernel.reject(dataclasses.replace(problem, window_left=100), H200)
        assert "up to 128" in kernel.reject(dataclasses.replace(problem, head_dim=256, head_dim_v=256), H200)
        for config in kernel.search_space(problem, H200):
            assert isinstance(config, kernel.Config)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("arch", [80, 90])
def test_a_rung_fits_a_block_and_spills_nothing_in_its_loops(step, arch):
    made = code(step, arch)
    assert made.name == "attention_fwd_kernel"
    assert made.loop_spills == 0
    assert made.shared_bytes <= H200.smem_per_block
    assert made.registers * made.num_threads <= 64 * 1024
    # The masked loop and the one without, in 16 rows a warp or 32: products of 16 x 8 x 16.
    assert most_products(made)["HMMA"] % 64 == 0


@pytest.mark.slow
def test_each_step_is_the_step_it_says():
    barriers = {step: most_products(code(step)).get("BAR", 0) for step in OWN}
    assert barriers[3] == 5, "two for the tiles, one for scores, two for what threads tell each other"
    assert barriers[4] == 2
    assert barriers[7] == 1, "two buffers"
    shuffles = {step: most_products(code(step)).get("SHFL", 0) for step in OWN}
    assert shuffles[3] == 0
    assert shuffles[4] == 5 * 16
    assert shuffles[10] == 2 * 2
    copies = {step: code(step).opcodes.get("LDGSTS", 0) for step in OWN}
    assert copies[8] == 0
    assert copies[9] > 0
    assert "LDSM" not in code(10).opcodes
    assert most_products(code(11))["LDSM"] == 8 * (1 + 2) + 2 * 8, "Q and K by 16 columns, V by 16 keys"
    assert sum(most_products(code(5)).values()) < sum(most_products(code(4)).values()), "exp2 in place of exp"
    assert "STG.E.U16" in str(code(7).sass)
    assert "STG.E.U16" not in str(code(8).sass)
    queries = [most_products(code(step))["LDSM"] for step in (14, 15)]
    assert queries[0] - queries[1] == 8, "fragments of Q at head_dim 128"
    rows = [most_products(code(step)) for step in (13, 16)]
    assert rows[1]["HMMA"] == 2 * rows[0]["HMMA"]
    assert rows[1]["LDSM"] == rows[0]["LDSM"] + 8, "only Q's fragments are twice as many"


@pytest.mark.slow
def test_pairs_of_stores_take_no_more_registers():
    """The source gave vectorised stores up, for registers. The two elements of a pair are neighbours in their lane."""
    assert code(8).registers <= code(7).registers


@pytest.mark.slow
def test_tiles_on_their_way_in_registers_cost_a_block_on_an_sm():
    """The source gave the prefetch up, as slower; cp.async needs no registers for it."""
    registers = [code(step).registers for step in (6, 7, 9)]
    assert 64 * 1024 // (128 * registers[0]) == 3
    assert 64 * 1024 // (128 * registers[1]) == 2
    assert 64 * 1024 // (128 * registers[2]) == 3


def test_turns_of_a_read():
    assert host.ways([4 * i for i in range(32)], 4) == 1
    assert host.ways([128 * i for i in range(32)], 4) == 32
    assert host.ways([0] * 32, 4) == 1, "one word goes to all lanes at once"
    assert host.ways([8 * i for i in range(32)], 4) == 2
    assert host.ways([16 * i for i in range(32)], 16) == 4, "512 bytes take four turns at least"
    assert host.ways([256 * i for i in range(8)], 16) == 8
    assert host.ways([272 * i for i in range(8)], 16) == 1


def test_padding_ends_the_bank_conflicts():
    problem = problems.make(4096, 128, heads=16)
    found = {}
    for step in OWN:
        kernel: Any = rung_of(step).kernel
        found[step] = kernel.turns(problem, kernel.default_config(problem, H200))
    assert found[1] == {"K": 8, "V": 4, "weights": 8, "scores": 32}
    assert found[2] == {"K": 8, "V": 4, "weights": 4, "scores": 16}
    assert all(set(found[step].values()) == {1} for step in OWN if step >= 3)
    assert rung_of(1).layouts(problem, rung_of(1).kernel.default_config(problem, H200), 90)[0] == "K read in 8 turns"
    assert rung_of(16).layouts(problem, None, 90) == ["no bank conflict"]


def test_few_blocks_get_smaller():
    kernel: Any = rung_of(6).kernel
    assert kernel.default_config(problems.make(16384, 128, batch=1, heads=16, causal=True), H200).block_m == 64
    assert kernel.default_config(problems.make(512, 128, batch=1, heads=16, causal=True), H200).block_m == 32


def test_a_rung_s_source_and_hash_have_its_device_code(monkeypatch):
    rung = rung_of(9)
    assert "cp_async_wait" in rung.source
    assert '"step9_cp_async.cu"' in rung.source
    assert "copy_rows" in ladder.difference(rung_of(8), rung)
    assert rung_of(1).source_hash != rung_of(2).source_hash
    before = rung.source_hash
    text = rung._device_code
    monkeypatch.setattr(ladder.Rung, "_device_code", property(lambda self: text + "// more to say\n"))
    assert rung.source_hash == before
    monkeypatch.setattr(ladder.Rung, "_device_code", property(lambda self: text + "int more;\n"))
    assert rung.source_hash != before


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"block_m": 100, "block_n": 32, "num_warps": 4}, r"block_m is 100 and num_warps 4; 1, 2, 4 or 8 warps take 16 rows"),
        ({"block_m": 64, "block_n": 40, "num_warps": 4}, r"block_n is 40; allowed are multiples of 16 from 16 to 128\.$"),
        ({"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 0}, r"num_stages is 0; allowed are 1 to 4\.$"),
    ],
)
def test_a_config_that_no_problem_can_use_says_why(knobs, sentence):
    with pytest.raises(ValueError, match=sentence):
        host.Config(**knobs)


@pytest.mark.slow
def test_the_command_compiles_the_ladder_without_a_gpu():
    shape = ("--seqlen", "1024", "--head-dim", "128", "--causal", "--processes", "1")
    done = CliRunner().invoke(cli.app, ["ladder", "cuda", "--static", "--arch", "sm_90", "--rung", "2", "--rung", "11", *shape])
    assert done.exit_code == 0, done.output
    assert "step11" in done.output
    assert "HMMA" in done.output
    assert "does not compile" not in done.output
