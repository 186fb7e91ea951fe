"""Step 3: padded rows."""

from __future__ import annotations

from peakattn.problem import AttentionProblem
from peakattn_lab.ladder.cuda import host
from peakattn_lab.ladder.cuda.host import Config, reject

__all__ = ["Config", "default_config", "launch", "launches", "prepare", "reject", "search_space", "turns"]

DEVICE = "step3_padding.cu"
IDEA = "Rows of tiles get 16 bytes more, rows of scores 4: the rows that are read together lie in other banks."
PREDICTION = (
    "The largest step here, 2 to 3 x: a read of K takes one turn in place of eight, one of V or of weights one in "
    "place of four, and a thread's walk along its row of scores one in place of sixteen."
)
WHY = (
    "3.37 x, more than predicted and the largest step of all: the walk along the scores takes one turn in place of "
    "16, which the prediction had, and no read of shared memory waits for another any more."
)
PUBLISHED: dict[str, str] = {"causal": "18.4 TFLOP/s with step 4"}
VISITS = "visible"

default_config, search_space = host.only(Config(64, 32, num_warps=4))


def shared_bytes(problem: AttentionProblem, config: Config) -> int:
    """The same with padded rows."""
    m, n = config.block_m, config.block_n
    tiles = 2 * ((m + 2 * n) * (problem.head_dim + 8) + m * (n + 8))
    return tiles + 4 * (m * (n + 1) + m + 2 * 32 * config.num_warps)


def turns(problem: AttentionProblem, config: Config) -> dict[str, int]:
    """Neighbouring rows lie in other banks."""
    return host.turns(2 * problem.head_dim + 16, 2 * config.block_n + 16, 4 * config.block_n + 4, shared_rows=True)


launches, launch, prepare = host.entry_points(DEVICE, shared_bytes)
