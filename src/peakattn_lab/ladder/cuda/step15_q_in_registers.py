"""Step 15: Q in registers."""

from __future__ import annotations

from collections.abc import Iterable

from peakattn.backends.cuda.fwd_sm80 import Config, launch, launches, prepare
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab.ladder.cuda.host import reject

__all__ = ["Config", "launch", "launches", "prepare", "reject"]

IDEA = "The fragments of Q stay in registers: a tile reads K and V from shared memory, and nothing else."
PREDICTION = (
    "1.05 to 1.1 x: a warp of 16 rows reads 96 blocks of 512 bytes a tile at head_dim 128, eight of which are Q; 32 "
    "registers more leave two blocks on an SM, as before."
)
WHY = "1.05 to 1.08 x, as predicted."
PUBLISHED: dict[str, str] = {}
VISITS = "visible"


def default_config(problem: AttentionProblem, device: Device) -> Config:
    return Config(64, 64, num_warps=4, num_stages=2, q_in_registers=True)


def search_space(problem: AttentionProblem, device: Device) -> Iterable[Config]:
    yield default_config(problem, device)
