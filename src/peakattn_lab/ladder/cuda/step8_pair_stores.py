"""Step 8: output in pairs of elements."""

from __future__ import annotations

from peakattn.problem import AttentionProblem
from peakattn_lab.ladder.cuda import host
from peakattn_lab.ladder.cuda.host import Config, reject

__all__ = ["Config", "default_config", "launch", "launches", "prepare", "reject", "search_space", "turns"]

DEVICE = "step8_pair_stores.cu"
IDEA = "The output leaves in 4-byte stores of two elements."
PREDICTION = (
    "The source got 14 to 15 TFLOP/s by this and gave it up. The two elements of a pair are neighbours in their "
    "lane's registers, so packing takes one conversion where there were two and no register; half the stores, once a "
    "block. Nothing at 16k, 1.01 x at 1k."
)
WHY = "1.00 to 1.03 x, as predicted: the source's loss does not come again, and there was little to gain."
PUBLISHED: dict[str, str] = {"causal": "14 to 15 TFLOP/s, given up"}
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
