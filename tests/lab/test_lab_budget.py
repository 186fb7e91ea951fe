"""Budget equations: Triton's allocator, the equation of the source, and the compiler itself."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from peakattn import backends
from peakattn.device import Device
from peakattn_lab import problems, provenance, records
from peakattn_lab.sweep import budget, budget_check, grid, jobs
from peakattn_lab.sweep.smem import Buffer, allocate

ADA, HOPPER = Device.named("l40s"), Device.named("h200")


def shared(kernel_id, problem, device, **knobs):
    config = backends.load(kernel_id).Config(**knobs)
    return budget.FORMULAS[kernel_id].shared(problem, config, device)


def test_buffers_that_are_never_alive_together_share_their_bytes():
    assert allocate([Buffer(1000, 0, 5), Buffer(600, 5, 9)]) == 1000
    assert allocate([Buffer(1024, 0, 6), Buffer(512, 5, 9)]) == 1536


def test_alignment_leaves_gaps_that_a_sum_does_not_see():
    """Q goes behind the barriers of K and V here, and then up to the next multiple of 1024: what the compiler does, too."""
    loops = [
        Buffer(size, at + i, at + 90 - i, align)
        for at in (100, 200)
        for i, (size, align) in enumerate(((24576, 1024), (24576, 1024), (24, 16), (24, 16)))
    ]
    assert allocate([Buffer(8192, 0, 400, 1024), *loops]) == 58368
    assert allocate([Buffer(8192, 0, 400, 1024), *loops[:4]]) == 57400  # with one loop


def test_the_equation_of_the_source_on_its_gpu():
    """128 * (block_m + 2 * (num_stages - 1) * block_n) for bf16 and head_dim 64, where warps own whole rows."""
    problem = problems.make(4096, 64, batch=4, heads=8)
    for m, n, warps, stages in itertools.product((64, 128, 256), grid.SOURCE_TILES, (1, 2, 4), (2, 3, 4, 5)):
        [found] = shared("triton.fwd", problem, ADA, block_m=m, block_n=n, num_warps=warps, num_stages=stages).values()
        assert found == 128 * (m + 2 * (stages - 1) * n)


def test_p_passes_through_shared_memory_where_warps_lie_along_the_keys():
    """The source's baseline: 512 bytes more than its equation."""
    problem = problems.make(4096, 64, batch=4, heads=8)
    [found] = shared("triton.fwd", problem, ADA, block_m=16, block_n=16, num_warps=4, num_stages=3).values()
    assert found == 128 * (16 + 2 * 2 * 16) + 2 * 16 * 16


def test_the_source_s_grid_is_pruned_as_the_source_found():
    """Of 625 configs 465 ran there; 60 were left out by their accumulators, and 100 did not fit its 99 KiB a block."""
    found = grid.candidates("triton.fwd", grid.source_problems()[3], ADA, "source")
    assert len(found) == 625
    assert sum(c.reason is None for c in found) == 465
    assert sum((c.estimate.accumulators or 0) > budget.MOST_ACCUMULATORS for c in found) == 60
    assert all(c.reason.endswith(".") for c in found if c.reason is not None)


def test_what_does_not_fit_is_said_with_both_numbers():
    problem = problems.make(4096, 128)
    config = backends.load("triton.fwd").Config(128, 128, 8, 5)
    reason = budget.misfit(budget.estimate("triton.fwd", problem, config, HOPPER), HOPPER) or ""
    assert "360448 bytes" in reason
    assert str(HOPPER.smem_per_block) in reason


def test_a_kernel_without_an_entry_speaks_for_itself(monkeypatch):
    monkeypatch.delitem(budget.FORMULAS, "triton.fwd_sm90")
    problem, kernel = problems.make(4096, 128), backends.load("triton.fwd_sm90")
    config = kernel.default_config(problem, HOPPER)
    found = budget.estimate("triton.fwd_sm90", problem, config, HOPPER)
    assert found.shared_bytes == kernel.shared_bytes(problem, config)
    assert found.registers == kernel.registers_needed(problem, config)


# The compiler decides. Few configs, each for another term of the formula.
COMPILED = [
    # wgmma: as many tiles as stages; a plain sum
    ("triton.fwd", "h200", {}, {"block_m": 64, "block_n": 32, "num_stages": 3}),
    # TMA with two loops: alignment leaves a gap
    ("triton.fwd", "h200", {"causal": True}, {"block_m": 64, "block_n": 64, "num_stages": 3, "tma": True}),
    # mma.sync: one tile less than stages, and P
    ("triton.fwd", "a100", {}, {"block_m": 16, "block_n": 32, "num_stages": 3}),
    ("triton.fwd_sm90", "h200", {}, {"block_m": 128, "block_n": 64, "num_consumers": 2, "num_stages": 2}),
]


@pytest.mark.parametrize(("kernel_id", "device", "mask", "knobs"), COMPILED, ids=lambda x: x if isinstance(x, str) else "")
def test_the_compiler_takes_as_much_as_the_formula_says(kernel_id, device, mask, knobs):
    if backends.toolchain("triton").unavailable():
        pytest.skip("Triton is not installed")
    problem, facts = problems.make(2048, 64, batch=4, **mask), Device.named(device)
    made = jobs.compile_one(jobs.CompileJob(kernel_id, problem, knobs, facts))
    assert {f.name: f.shared_bytes for f in made} == shared(kernel_id, problem, facts, **knobs)


def row(shared_bytes, register_estimate=100, registers=90, spills=0):
    kernel = backends.load("triton.fwd")
    facts = records.FunctionFacts(
        name="attention_fwd_kernel",
        registers=registers,
        frame_bytes=0,
        shared_bytes=shared_bytes,
        num_threads=128,
        spills=spills,
        loop_spills=0,
        tensor_core=8,
        mufu=8,
        blocks=2,
        limiter="registers",
    )
    return records.SweepRecord(
        provenance=provenance.here(ADA.name, ADA.arch),
        problem=problems.to_dict(problems.make(4096, 64, batch=4, heads=8)),
        kernel="triton.fwd",
        kernel_hash=None,
        compiler="triton",
        config=dataclasses.asdict(kernel.Config(64, 32, 4, 3)),
        stage="static",
        status="compiled",
        functions=[facts],
        register_estimate=register_estimate,
    )


def test_a_mismatch_is_a_finding():
    found = budget_check.checks([row(24576), row(24576 + 512)])
    assert [(one.predicted, one.excess) for one in found] == [(24576, 0), (24576, 512)]
    _, body = budget_check.table(found)
    assert [line[1] for line in body] == ["equal", "+512"]
    said = budget_check.findings(found, [row(24576), row(24576, register_estimate=300, registers=255, spills=0)])
    assert said[0].startswith("1 of 2 compilations")
    assert "+512 to +512 bytes" in said[1]
    assert "rightly for 1 of 2 rows; 0 spill" in said[-1]
