"""Step 11: ldmatrix."""

from __future__ import annotations

from peakattn.problem import AttentionProblem
from peakattn_lab.ladder.cuda import host
from peakattn_lab.ladder.cuda.host import Config, reject

__all__ = ["Config", "default_config", "launch", "launches", "prepare", "reject", "search_space", "turns"]

DEVICE = "step11_ldmatrix.cu"
IDEA = "ldmatrix brings fragments of four 8 x 8 matrices at a time, those of V transposed on the way."
PREDICTION = (
    "1.5 to 2 x: for 16 columns of K it is one instruction in place of four, for 16 of V one in place of eight reads "
    "of 2 bytes and four packings."
)
WHY = (
    "1.30 x, less than predicted: 240 of 942 instructions go, and the rest, the softmax and the addresses of copies, "
    "is not hidden under the products. mma.sync issues every 6.9 cycles at best, and each other instruction adds "
    "about one."
)
PUBLISHED: dict[str, str] = {}
VISITS = "visible"

default_config, search_space = host.only(Config(64, 32, num_warps=4))


def shared_bytes(problem: AttentionProblem, config: Config) -> int:
    """Padded tiles of Q, two of K and of V."""
    return 2 * (config.block_m + 4 * config.block_n) * (problem.head_dim + 8)


def turns(problem: AttentionProblem, config: Config) -> dict[str, int]:
    """A padded row moves eight rows into eight groups of banks."""
    return host.ldmatrix_turns(2 * problem.head_dim + 16)


launches, launch, prepare = host.entry_points(DEVICE, shared_bytes)
