"""Step 4: row reductions by shuffles."""

from __future__ import annotations

from peakattn.problem import AttentionProblem
from peakattn_lab.ladder.cuda import host
from peakattn_lab.ladder.cuda.host import Config, reject

__all__ = ["Config", "default_config", "launch", "launches", "prepare", "reject", "search_space", "turns"]

DEVICE = "step4_shuffles.cu"
IDEA = "A warp reduces its own rows, 32 lanes to a row, with shuffles; two barriers a tile are left of six."
PREDICTION = (
    "1.1 to 1.3 x: three barriers a tile go, but a maximum of 32 lanes is five shuffles for each of 16 rows, 80 a "
    "tile and warp, and all lanes compute each row's alpha."
)
WHY = (
    "Slower, 0.65 x, where 1.1 to 1.3 x was predicted. Barriers were not what the block waited for, since four blocks "
    "on an SM fill them; 80 shuffles a tile are new work for every lane (1525 instructions for 1293), and 168 "
    "registers leave three blocks of four."
)
PUBLISHED: dict[str, str] = {"causal": "18.4 TFLOP/s with step 3"}
VISITS = "visible"

default_config, search_space = host.only(Config(64, 32, num_warps=4))


def shared_bytes(problem: AttentionProblem, config: Config) -> int:
    """Padded tiles of Q, K, V and weights, scores and factors in float32."""
    m, n = config.block_m, config.block_n
    return 2 * ((m + 2 * n) * (problem.head_dim + 8) + m * (n + 8)) + 4 * (m * (n + 1) + m)


def turns(problem: AttentionProblem, config: Config) -> dict[str, int]:
    """The lanes of a warp read a row of scores side by side."""
    return host.turns(2 * problem.head_dim + 16, 2 * config.block_n + 16, 4 * config.block_n + 4)


launches, launch, prepare = host.entry_points(DEVICE, shared_bytes)
