"""Step 7: the next tiles of K and V are read during this tile's work, through registers."""

from __future__ import annotations

from peakattn.problem import AttentionProblem
from peakattn_lab.ladder.cuda import host
from peakattn_lab.ladder.cuda.host import Config, reject

__all__ = ["Config", "default_config", "launch", "launches", "prepare", "reject", "search_space", "turns"]

DEVICE = "step7_prefetch.cu"
IDEA = (
    "Double buffering: the next tiles are read into registers before this tile's work, and stored behind it into a "
    "second buffer."
)
PREDICTION = (
    "The source got 12 TFLOP/s out of 18 by this and gave it up. The loads leave the critical path, but the tiles on "
    "their way take 32 registers a thread beside some 170, so that two blocks fit on an SM where three did: 0.8 to "
    "1.0 x."
)
WHY = (
    "1.08 x, where the source lost a third and 0.8 to 1.0 x was predicted. It does take a block from each SM (254 "
    "registers), but the loads leave the critical path, and the loop is 1067 instructions in place of 1289. Most at "
    "causal 1k, 1.15 x, whose blocks begin most often."
)
PUBLISHED: dict[str, str] = {"causal": "12 TFLOP/s, given up"}
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
