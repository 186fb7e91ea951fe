"""Step 9: cp.async."""

from __future__ import annotations

from peakattn.problem import AttentionProblem
from peakattn_lab.ladder.cuda import host
from peakattn_lab.ladder.cuda.host import Config, reject

__all__ = ["Config", "default_config", "launch", "launches", "prepare", "reject", "search_space", "turns"]

DEVICE = "step9_cp_async.cu"
IDEA = (
    "cp.async brings the next tiles into shared memory past the registers; rows that are not there are asked for with "
    "a size of 0."
)
PREDICTION = (
    "The source met illegal addresses here and gave it up: a copy of size 0 reads nothing and writes zeros, but its "
    "address should still be one of the tensor. 1.0 to 1.1 x: 32 registers and as many stores to shared memory a tile "
    "go."
)
WHY = (
    "1.11 to 1.13 x with a full mask, 0.95 to 0.96 x with a causal one. Nothing is illegal when the address of an "
    "absent row is one of the tensor. An address and a size for each 16 bytes make the loop 1296 instructions for "
    "1067, which eats what the registers and stores gave; why causal loses more than that was not found."
)
PUBLISHED: dict[str, str] = {"causal": "illegal memory accesses, given up"}
VISITS = "visible"

default_config, search_space = host.only(Config(64, 32, num_warps=4))


def shared_bytes(problem: AttentionProblem, config: Config) -> int:
    """Padded tiles of Q, two of K and of V, and of weights, scores and factors in float32."""
    m, n = config.block_m, config.block_n
    return 2 * ((m + 4 * n) * (problem.head_dim + 8) + m * (n + 8)) + 4 * (m * (n + 1) + m)


def turns(problem: AttentionProblem, config: Config) -> dict[str, int]:
    """The lanes of a warp read a row of scores side by side."""
    return host.turns(2 * problem.head_dim + 16, 2 * config.block_n + 16, 4 * config.block_n + 4)


launches, launch, prepare = host.entry_points(DEVICE, shared_bytes)
