"""The CuTe DSL ladder without a GPU: what each rung compiles to, and that each step is the step it says it is."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence

import pytest
import torch
from typer.testing import CliRunner

from peakattn import dispatch
from peakattn.backends.contract import Artifacts, ForwardKernel
from peakattn.backends.cubin import Instruction, hot_loops
from peakattn.device import Device
from peakattn_lab import cli, ladder, problems
from peakattn_lab.ladder import compiling
from peakattn_lab.ladder.subjects import by_default

pytestmark = pytest.mark.skipif(dispatch.unavailable("cute") is not None, reason=str(dispatch.unavailable("cute")))

H200 = Device.named("h200")
STEPS = range(1, 10)
SPECIALIZED = (4, 5, 6)  # with device code of their own


def rung_of(step: int) -> ladder.Rung:
    (rung,) = ladder.rungs("cute", [str(step)])
    return rung


@functools.cache
def code(step: int, head_dim: int = 128, causal: bool = True) -> Artifacts:
    rung = rung_of(step)
    problem = problems.make(4096, head_dim, batch=4, heads=2048 // head_dim, causal=causal)
    problem = dataclasses.replace(problem, return_lse=True)
    (made,) = rung.artifacts(problem, by_default(rung, problem, H200).config, 90)
    return made


def two_loops(made: Artifacts) -> tuple[dict[str, int], dict[str, int]]:
    """Of a causal rung: the loop without a mask, which is shorter in most rungs, and the one with it."""
    plain, masked = sorted(made.loops, key=lambda loop: loop.get("FSEL", 0))
    return plain, masked


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
        assert "head_dim up to 128" in kernel.reject(dataclasses.replace(problem, head_dim=256, head_dim_v=256), H200)
        for config in kernel.search_space(problem, H200):
            assert isinstance(config, kernel.Config)
    if step > 1:
        assert "Hopper" in kernel.reject(problem, Device.named("a100"))


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_a_rung_fits_a_block_and_spills_nothing_in_its_loops(step):
    made = code(step)
    assert made.name.startswith("attention_fwd_kernel")
    assert made.loop_spills == 0
    assert made.shared_bytes <= H200.smem_per_block
    assert made.registers * made.num_threads <= 64 * 1024
    assert made.opcodes.get("SYNCS", 0) > 0 or step == 1, "mbarriers"


@pytest.mark.slow
def test_step1_has_the_instructions_of_ampere():
    made = code(1)
    assert made.opcodes["HMMA"] == 2 * 2 * (128 // 16) * (128 // 8), "two loops, two products, of 16 rows a warp"
    assert made.opcodes["LDGSTS"] > 0
    assert made.opcodes["LDSM"] > 0
    assert not {"HGMMA", "UTMALDG", "USETMAXREG"} & set(made.opcodes)


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3, *SPECIALIZED])
def test_rungs_for_hopper_have_a_loop_with_a_mask_and_one_without(step):
    """Eight wgmma for each product of 64 x 128 x 128, and one wait for a group of them, not one for each."""
    made = code(step)
    assert "HMMA" not in made.opcodes
    plain, masked = two_loops(made)
    for loop in (plain, masked):
        assert loop["HGMMA"] == 16
        assert loop["WARPGROUP"] <= 4, "two arrivals and at most two waits"
        assert loop["MUFU"] == 64 + 2
        assert "UTMASTG" not in loop
    assert masked["FSEL"] - plain.get("FSEL", 0) == 64, "every score of a thread"
    assert len(re.findall(r"WARPGROUP\.DEPBAR", str(made.sass))) <= 6
    assert made.opcodes["UTMASTG"] == 2, "64 columns each"


@pytest.mark.slow
@pytest.mark.parametrize("step", [7, 8, 9])
def test_the_library_s_rungs_wait_for_few_groups(step):
    made = code(step)
    assert len(re.findall(r"WARPGROUP\.DEPBAR", str(made.sass))) <= 7
    assert made.opcodes["HGMMA"] >= 48
    assert made.opcodes["USETMAXREG"] == 2


@pytest.mark.slow
def test_each_step_is_the_step_it_says():
    stores = [two_loops(code(step))[0].get("STSM", 0) for step in (2, 3)]
    assert stores == [8, 0], "P in shared memory, and in registers"
    barriers = [two_loops(code(step))[0].get("BAR", 0) for step in (2, 3, *SPECIALIZED)]
    assert barriers == [3, 2, 0, 2, 0], "waits of the whole block, then only those for turns"
    copies = [two_loops(code(step))[0].get("UTMALDG", 0) for step in (2, 3, *SPECIALIZED)]
    assert copies == [4, 4, 0, 0, 0], "the producer's loop has them"
    registers = [code(step).opcodes.get("USETMAXREG", 0) for step in (2, 3, *SPECIALIZED)]
    assert registers == [0, 0, 2, 2, 2]
    maxima = [two_loops(code(step))[0].get("FMNMX", 0) for step in (1, 2, 3, *SPECIALIZED)]
    assert all(count >= 64 for count in maxima)
    assert code(7).shared_bytes + 2 * 128 * 128 <= code(8).shared_bytes, "output has a place of its own"
    counters = [code(step).opcodes.get("ATOMG", 0) for step in (7, 8, 9)]
    assert counters[:2] == [0, 0]
    assert counters[2] >= 1, "a block asks for its next tile"


def places(body: Sequence[Instruction], opcode: str) -> list[int]:
    return [i for i, one in enumerate(body) if one.opcode.startswith(opcode)]


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "causal"), [(64, False), (64, True), (128, False), (128, True)])
def test_the_softmax_of_step6_runs_under_the_second_product(head_dim, causal):
    """All exponentials stand between the two waits of a loop. The compiler moves them behind both unless it is kept from it."""
    bodies = hot_loops(str(code(6, head_dim, causal).sass))
    assert len(bodies) == 2
    for body in bodies:
        first, second = places(body, "WARPGROUP.DEPBAR")
        assert places(body, "HGMMA")[-1] < first
        exponentials = places(body, "MUFU.EX2")
        assert len(exponentials) == 64 + 2
        assert first < exponentials[0]
        assert exponentials[-1] < second


@pytest.mark.slow
def test_a_turn_of_step5_is_handed_on_before_its_products_are_done():
    bodies = hot_loops(str(code(5).sass))
    assert len(bodies) == 2
    for body in bodies:
        (wait,) = places(body, "WARPGROUP.DEPBAR")
        taken, handed_on = places(body, "BAR")
        assert taken < places(body, "HGMMA")[0]
        assert places(body, "HGMMA")[-1] < handed_on < wait < places(body, "MUFU.EX2")[0]


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3, *SPECIALIZED])
def test_the_left_of_two_weights_goes_into_the_lower_half(step):
    """cvt takes the upper half first; exponentials are computed from left to right."""
    ptx = str(code(step).ptx)
    computed = {name: i for i, name in enumerate(re.findall(r"ex2\.approx\.ftz\.f32 (%r\d+),", ptx))}
    pairs = re.findall(r"cvt\.rn\.bf16x2\.f32 %r\d+, (%r\d+), (%r\d+);", ptx)
    moved = dict(re.findall(r"mov\.[bf]32\s+(%r\d+), (%r\d+);", ptx))
    origins = [(moved.get(upper, upper), moved.get(lower, lower)) for upper, lower in pairs]
    weights = [(computed[upper], computed[lower]) for upper, lower in origins if upper in computed and lower in computed]
    assert len(weights) >= 64, "32 pairs in each of two loops"
    assert all(upper == lower + 1 for upper, lower in weights)


@pytest.mark.slow
def test_the_guide_s_threads_spill():
    about = ladder.experiment("cute", "threads")
    rung, problem = rung_of(1), problems.make(4096, 128, heads=16)
    spills = []
    for step, knobs in about.subjects:
        assert step == 1
        (made,) = rung.artifacts(problem, rung.kernel.Config(**knobs), 90)
        spills.append(made.loop_spills)
    assert spills[0] > 100
    assert spills[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("step", SPECIALIZED)
def test_head_dim_64_has_three_consumers(step):
    made = code(step, head_dim=64)
    assert made.num_threads == 512
    assert made.loop_spills == 0
    assert two_loops(made)[0]["HGMMA"] == 4 + 8, "four steps of 16 columns, eight of 16 keys"


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 6])
def test_executed_products_are_the_needed_ones(step):
    problem = problems.make(4096, 128, batch=4, heads=16)
    rung = rung_of(step)
    job = compiling.Job(rung, by_default(rung, problem, H200).config, problem, H200)
    found = compiling.compile_one(job)
    assert found.error is None
    assert found.ratio == 1.0


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"block_m": 100, "block_n": 128}, r"block_m is 100 and num_consumers 1; 1 to 3 consumers take 64 rows each\.$"),
        ({"block_m": 64, "block_n": 40}, r"block_n is 40; allowed are multiples of 16 from 16 to 256\.$"),
        ({"block_m": 64, "block_n": 64, "num_stages": 0}, r"num_stages is 0 and occupancy 1; allowed are 1 to 8 stages"),
    ],
)
def test_a_config_that_no_problem_can_use_says_why(knobs, sentence):
    with pytest.raises(ValueError, match=sentence):
        rung_of(2).kernel.Config(**knobs)


def test_a_config_that_a_rung_cannot_use_says_why():
    problem = problems.make(256, 64)
    x = torch.empty(1, 256, 1, 64, dtype=torch.bfloat16, device="meta")
    tensors = (x, x.clone(), x.clone(), x.clone(), None, 1.0, 0.0)
    two = rung_of(2).kernel.Config(128, 128, num_consumers=2)
    with pytest.raises(ValueError, match=r"one warpgroup and one tile of K and of V, so give it 1 and 1\.$"):
        rung_of(3).kernel.launches(problem, two, *tensors)
    one = rung_of(5).kernel.Config(64, 128, num_stages=2)
    with pytest.raises(ValueError, match=r"takes turns between consumers, so give it 2 or 3\.$"):
        rung_of(5).kernel.launches(problem, one, *tensors)


@pytest.mark.parametrize("step", [2, 4])
def test_there_is_a_block_for_each_row_block_of_each_head(step):
    q = torch.empty(2, 1000, 8, 64, dtype=torch.bfloat16, device="meta")
    kv = torch.empty(2, 1000, 2, 64, dtype=torch.bfloat16, device="meta")
    kernel = rung_of(step).kernel
    problem = problems.make(1000, 64, batch=2, heads=(8, 2), causal=True)
    config = kernel.default_config(problem, H200)
    (launch,) = kernel.launches(problem, config, q, kv, kv.clone(), q.clone(), None, 1.0, 0.0)
    assert launch.grid == (math.ceil(1000 / config.block_m) * 16, 1, 1)
    assert launch.args["group"] == 4


@pytest.mark.slow
def test_the_command_compiles_the_ladder_without_a_gpu():
    shape = ("--seqlen", "1024", "--head-dim", "128", "--causal", "--processes", "1")
    done = CliRunner().invoke(cli.app, ["ladder", "cute", "--static", "--arch", "sm_90", "--rung", "2", "--rung", "6", *shape])
    assert done.exit_code == 0, done.output
    assert "step6" in done.output
    assert "HGMMA" in done.output
    assert "does not compile" not in done.output
