"""Step 1: the products on tensor cores by hand, everything between them through shared memory, in 64 x 64 tiles."""

from __future__ import annotations

from peakattn.problem import AttentionProblem
from peakattn_lab.ladder.cuda import host
from peakattn_lab.ladder.cuda.host import Config, reject

__all__ = ["Config", "default_config", "launch", "launches", "prepare", "reject", "search_space", "turns"]

DEVICE = "step1_tensor_cores.cu"
IDEA = "mma.sync by hand, with operands, scores and weights in shared memory, and softmax by two threads a row; 64 x 64 tiles."
PREDICTION = (
    "About a tenth of the H200's rate for mma.sync, 40 TFLOP/s. A row of 128 elements is 256 bytes, so the eight rows "
    "that a fragment reads lie in the same four banks: each read of K takes eight turns. Scores and weights cross "
    "shared memory twice, with five barriers a tile, and 73 KiB a block leave three of them on an SM."
)
WHY = (
    "23 of 40. The prediction left out the worst reader: a thread that walks along its row of scores meets one bank "
    "32 times over, and 2087 instructions a tile stand beside 128 products."
)
PUBLISHED: dict[str, str] = {"causal": "1.75 TFLOP/s, 8 % of PyTorch", "tiles": "64 x 64"}
VISITS = "visible"

default_config, search_space = host.only(Config(64, 64, num_warps=4))


def shared_bytes(problem: AttentionProblem, config: Config) -> int:
    """Tiles of Q, K, V and weights, scores and factors in float32, and two numbers of each thread."""
    m, n = config.block_m, config.block_n
    return 2 * ((m + 2 * n) * problem.head_dim + m * n) + 4 * (m * n + m + 2 * 32 * config.num_warps)


def turns(problem: AttentionProblem, config: Config) -> dict[str, int]:
    """The reads of a tile that bank conflicts hold up."""
    return host.turns(2 * problem.head_dim, 2 * config.block_n, 4 * config.block_n, shared_rows=True)


launches, launch, prepare = host.entry_points(DEVICE, shared_bytes)
