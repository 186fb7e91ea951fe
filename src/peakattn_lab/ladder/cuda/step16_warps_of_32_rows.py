"""Step 16: warps of 32 rows."""

from __future__ import annotations

from collections.abc import Iterable

from peakattn.backends.cuda.fwd_sm80 import Config, launch, launches, prepare
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab.ladder.cuda.host import reject

__all__ = ["Config", "launch", "launches", "prepare", "reject"]

IDEA = "A warp takes 32 rows: each fragment of K and V that it reads goes into two products."
PREDICTION = (
    "1.1 to 1.2 x: shared memory gives 128 bytes a clock, and four warps of 16 rows, one on each tensor core, ask for "
    "all of it at the rate of mma.sync. At head_dim 128 accumulator and scores fill the registers, so key tiles are "
    "32 again."
)
WHY = (
    "1.03 x with a full mask, 0.97 to 1.03 x with a causal one, where 1.1 to 1.2 x was predicted. Reads of K and V "
    "are halved, but key tiles of 32 bring back the barriers of step 13, and blocks of 128 rows waste more at the "
    "diagonal of 1k."
)
PUBLISHED: dict[str, str] = {}
VISITS = "visible"


def default_config(problem: AttentionProblem, device: Device) -> Config:
    return Config(128, 64 if problem.head_dim <= 64 else 32, num_warps=4, num_stages=2)


def search_space(problem: AttentionProblem, device: Device) -> Iterable[Config]:
    yield default_config(problem, device)
