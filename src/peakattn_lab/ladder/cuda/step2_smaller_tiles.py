"""Step 2: the same code in tiles of 64 x 32."""

from __future__ import annotations

from peakattn.problem import AttentionProblem
from peakattn_lab.ladder.cuda import host
from peakattn_lab.ladder.cuda.host import Config, reject

__all__ = ["Config", "default_config", "launch", "launches", "prepare", "reject", "search_space", "turns"]

DEVICE = "step1_tensor_cores.cu"
IDEA = "Key tiles of 32 in place of 64: fewer registers and less shared memory a block, more blocks on an SM."
PREDICTION = (
    "The source's largest step, tenfold, will not come again: neither tile spills here, and bank conflicts, which "
    "both have, set the pace. From three blocks an SM to four; 1.0 to 1.2 x."
)
WHY = (
    "1.25 x. Rows of scores are half as long, so that walk takes 16 turns in place of 32. The source's tenfold was "
    "spilling, which neither tile does here."
)
PUBLISHED: dict[str, str] = {"causal": "17.5 TFLOP/s, 10 x", "tiles": "64 x 32"}
VISITS = "visible"

default_config, search_space = host.only(Config(64, 32, num_warps=4))


def shared_bytes(problem: AttentionProblem, config: Config) -> int:
    """Tiles of Q, K, V and weights, scores and factors in float32, and two numbers of each thread."""
    m, n = config.block_m, config.block_n
    return 2 * ((m + 2 * n) * problem.head_dim + m * n) + 4 * (m * n + m + 2 * 32 * config.num_warps)


def turns(problem: AttentionProblem, config: Config) -> dict[str, int]:
    """The reads of a tile that bank conflicts hold up."""
    return host.turns(2 * problem.head_dim, 2 * config.block_n, 4 * config.block_n, shared_rows=True)


launches, launch, prepare = host.entry_points(DEVICE, shared_bytes)
