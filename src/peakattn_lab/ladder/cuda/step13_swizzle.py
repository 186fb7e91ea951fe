"""Step 13: swizzled rows."""

from __future__ import annotations

from collections.abc import Iterable

from peakattn.backends.cuda.fwd_sm80 import Config, launch, launches, prepare
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab.ladder.cuda.host import reject

__all__ = ["Config", "launch", "launches", "prepare", "reject"]

IDEA = "Rows are swizzled in place of padded: chunks of 16 bytes change places, and no shared memory is lost."
PREDICTION = (
    "1.00 x: both meet no bank twice. 51 KiB a block become 48, the same three blocks an SM; addresses cost an XOR a step."
)
WHY = (
    "1.02 to 1.04 x, where nothing was predicted. Instructions, blocks and bank conflicts are the same; what padded "
    "rows cost beyond 3 KiB was not found. The notebook has the same at other tiles, up to 1.2 x."
)
PUBLISHED: dict[str, str] = {}
VISITS = "visible"


def default_config(problem: AttentionProblem, device: Device) -> Config:
    return Config(64, 32, num_warps=4, num_stages=2, occupancy=3)


def search_space(problem: AttentionProblem, device: Device) -> Iterable[Config]:
    yield default_config(problem, device)
