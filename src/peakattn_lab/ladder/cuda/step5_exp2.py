"""Step 5: exp2 with a folded scale."""

from __future__ import annotations

from peakattn.problem import AttentionProblem
from peakattn_lab.ladder.cuda import host
from peakattn_lab.ladder.cuda.host import Config, reject

__all__ = ["Config", "default_config", "launch", "launches", "prepare", "reject", "search_space", "turns"]

DEVICE = "step5_exp2.cu"
IDEA = "exp2 of (score * scale * log2(e) - maximum): one FFMA and one MUFU a weight in place of expf."
PREDICTION = (
    "1.1 x. expf is five instructions and a MUFU; there are 16 rows x 32 weights and 16 factors for each warp and "
    "tile, beside 64 products and some 500 reads of shared memory."
)
WHY = (
    "1.06 x: 236 instructions of 1525 go, as counted, but an instruction beside the products costs about a cycle here "
    "and reads of shared memory more."
)
PUBLISHED: dict[str, str] = {"causal": "20.9 TFLOP/s, 1.13 x"}
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
