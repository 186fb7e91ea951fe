"""Races are hunted: many repeats must be bitwise equal, alone, on two streams at once, and in a graph beside eager calls.

compute-sanitizer runs the same file on its small sizes: ``compute-sanitizer --tool racecheck python -m pytest -m gpu
tests/test_races.py -k small``.
"""

from __future__ import annotations

import pytest
import torch

from conftest import TARGETS, Target

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("kernel", [t for t in TARGETS if t.device == "cuda"], ids=str)]

REPEATS = 50
SHAPES = {
    # More tiles than the GPU holds blocks, so that a block takes several; a last tile that is not whole.
    "many": (5, 777, 777, 8, 64),
    # Rows that see no key stand before rows that see some.
    "empty rows": (2, 1000, 500, 6, 128),
    "small": (1, 200, 200, 2, 128),
    "wide": (2, 300, 300, 3, 256),
}


def tensors(shape: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, seqlen_q, seqlen_k, heads, head_dim = SHAPES[shape]
    torch.manual_seed(1)
    q = torch.randn(batch, seqlen_q, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, seqlen_k, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return q, k, v


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b)  # False where there is a NaN


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_many_repeats_are_bitwise_equal(kernel: Target, shape: str, causal: bool) -> None:
    q, k, v = tensors(shape)
    first, lse = kernel.attention(q, k, v, causal=causal, return_lse=True)
    for _ in range(REPEATS):
        again, again_lse = kernel.attention(q, k, v, causal=causal, return_lse=True)
        assert same(first, again)
        assert same(lse, again_lse)


def test_two_streams_do_not_disturb_each_other(kernel: Target) -> None:
    q, k, v = tensors("many")
    wanted = {causal: kernel.attention(q, k, v, causal=causal) for causal in (False, True)}
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    found = []
    for _ in range(20):
        for causal, stream in zip((False, True), streams, strict=True):
            with torch.cuda.stream(stream):
                found.append((causal, kernel.attention(q, k, v, causal=causal)))
    torch.cuda.synchronize()
    assert all(same(out, wanted[causal]) for causal, out in found)


def test_a_graph_replayed_beside_eager_calls_is_right(kernel: Target) -> None:
    q, k, v = tensors("many")
    wanted = kernel.attention(q, k, v, causal=True)
    capture = torch.cuda.Stream()
    with torch.cuda.stream(capture):
        kernel.attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=capture):
        outs = [kernel.attention(q, k, v, causal=True) for _ in range(3)]
    beside = []
    for _ in range(20):
        graph.replay()
        with torch.cuda.stream(capture):
            beside.append(kernel.attention(q, k, v, causal=True))
    torch.cuda.synchronize()
    assert all(same(out, wanted) for out in [*outs, *beside])
