"""The bench on a GPU: graphs, events, host time, observations, and the floor of the host's cost."""

from __future__ import annotations

import pytest
import torch

from peakattn_lab import baselines, bench, hostcost, problems

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_every_mode_times_every_contender_and_names_its_kernels(direction):
    problem = problems.make(1024, 64, batch=2, heads=8, causal=True, direction=direction)
    contenders = [baselines.ours(), *map(baselines.rival, baselines.DEFAULT_RIVALS["cuda"])]
    rows = list(bench.Bench(torch.device("cuda", 0), seconds=1.0).run([problem], contenders))
    assert {row.mode for row in rows} == {"kernel", "eager", "host"}
    for row in rows:
        if row.contender in ("peakattn", "sdpa.flash"):
            assert row.speed_known, row.reason
            assert row.ran
    kernel = {row.contender: row for row in rows if row.mode == "kernel"}
    assert any(name.startswith("attention_") for name in kernel["peakattn"].ran)
    assert any("flash" in name for name in kernel["sdpa.flash"].ran)
    assert 0.1 < kernel["peakattn"].tflops < 2000


def test_host_cost_is_above_its_floor():
    rows, _ = hostcost.measure(torch.device("cuda", 0), [baselines.ours(), baselines.rival("sdpa.flash")], loops=3)
    best = {(row.kind, row.contender): row.best_us for row in rows}
    assert 0.5 < best["inference", hostcost.FLOOR] < best["inference", "sdpa.flash"]
    assert len(rows) == 7
