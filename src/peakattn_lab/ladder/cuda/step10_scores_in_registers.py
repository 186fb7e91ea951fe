"""Step 10: scores and weights in registers."""

from __future__ import annotations

from peakattn.problem import AttentionProblem
from peakattn_lab.ladder.cuda import host
from peakattn_lab.ladder.cuda.host import Config, reject

__all__ = ["Config", "default_config", "launch", "launches", "prepare", "reject", "search_space", "turns"]

DEVICE = "step10_scores_in_registers.cu"
IDEA = (
    "Scores stay in the registers of the product that made them, and weights go from there into the next: a row is "
    "shared by four lanes."
)
PREDICTION = (
    "2 x: two of three passages through shared memory go, with them 80 shuffles a tile for 8, and 16 KiB a block. "
    "What is left reads K and V."
)
WHY = (
    "2.31 x, as predicted. This is the step that FlashAttention-2 is named for, and the first after the padding that "
    "changes what the kernel waits for: two of three passages through shared memory are gone."
)
PUBLISHED: dict[str, str] = {}
VISITS = "visible"

default_config, search_space = host.only(Config(64, 32, num_warps=4))


def shared_bytes(problem: AttentionProblem, config: Config) -> int:
    """Padded tiles of Q, two of K and of V."""
    return 2 * (config.block_m + 4 * config.block_n) * (problem.head_dim + 8)


def turns(problem: AttentionProblem, config: Config) -> dict[str, int]:
    """Scores and weights are in registers."""
    return host.turns(2 * problem.head_dim + 16)


launches, launch, prepare = host.entry_points(DEVICE, shared_bytes)
