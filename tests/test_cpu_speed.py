"""On the CPU, never more than 1.2 times the time of F.scaled_dot_product_attention where that can do the job.

Processor time of one thread, interleaved, the best of several: other work on the machine takes turns, it does not
count. A pair over the bound is measured again, longer, before it is a failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import peakattn
from cases import Case
from peakattn.problem import AttentionProblem

BOUND = 1.2
# Without a fused kernel torch keeps the seqlen_q x seqlen_k probabilities for its backward. Memory here is O(seqlen), so
# the scores are computed again: 7 products where torch has 6, and tiles.
BOUND_WIDE_V_TRAINING = 1.6

# Large enough that the host cost of a call does not decide.
SPEEDS = [
    Case("full", "the plain case", 512, 512, 8, 8, 64),
    Case("encoder", "a sentence encoder's batch of short texts", 128, 128, 12, 12, 32, batch=8),
    Case("causal", "torch's own causal mask", 768, 768, 8, 8, 64, options={"causal": True}),
    Case("gqa", "grouped heads", 512, 512, 8, 2, 128, options={"causal": True}),
    Case("cache", "bottom-right causal, where torch takes a dense mask", 256, 768, 8, 8, 64, options={"causal": True}),
    Case("window", "a band, where torch computes the whole square", 768, 768, 8, 8, 64, options={"window_size": (128, 0)}),
    Case("wide_v", "unequal head dims, where torch has no fused kernel", 512, 512, 4, 4, 64, 128),
    Case("bhsd", "the layout that torch's callers have", 512, 512, 8, 8, 64, layout="bhsd"),
]


@pytest.fixture(autouse=True)
def one_thread(nan_poison: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.undo()  # the NaN poison costs time
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: AttentionProblem) -> torch.Tensor:
    mask = None
    causal = problem.causal and problem.offset == 0
    if not causal and problem.mask_name != "full":
        mask = problem.mask(torch.arange(problem.seqlen_q), torch.arange(problem.seqlen_k))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=problem.group > 1)
    return out.transpose(1, 2)


def ratio(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> float:
    best = [float("inf"), float("inf")]
    for fn in (ours, theirs):
        fn()
    for _ in range(rounds):
        for i, fn in enumerate((ours, theirs)):
            start = time.process_time()
            fn()
            best[i] = min(best[i], time.process_time() - start)
    return best[0] / best[1]


@pytest.mark.parametrize("direction", ["forward", "forward and backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", SPEEDS, ids=str)
def test_time_against_torch(case: Case, dtype: torch.dtype, direction: str) -> None:
    q, k, v = inputs = case.inputs(dtype)
    problem = AttentionProblem.of(q, k, v, **case.options)
    training = direction != "forward"
    for x in inputs:
        x.requires_grad_(training)

    def run(fn: Callable[[], torch.Tensor]) -> Callable[[], Any]:
        if not training:
            return fn
        dout = case.dout(fn())
        return lambda: torch.autograd.grad(fn(), inputs, dout)

    ours = run(lambda: peakattn.attention(q, k, v, **case.options))
    theirs = run(lambda: sdpa(q, k, v, problem))
    bound = BOUND_WIDE_V_TRAINING if training and case.name == "wide_v" else BOUND
    # torch's own bfloat16 backward takes seconds on a CPU without bfloat16 products.
    rounds = 2 if training and dtype == torch.bfloat16 else 5
    measured = ratio(ours, theirs, rounds)
    for _ in range(3):
        if measured <= bound:
            return
        measured = min(measured, ratio(ours, theirs, 3 * rounds))
    assert measured <= bound
