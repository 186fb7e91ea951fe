"""Step 12: the library's kernel with padded rows: loops with a mask and without, the longest blocks first."""

from __future__ import annotations

from collections.abc import Iterable

from peakattn.backends.cuda.fwd_sm80 import Config, launch, launches, prepare
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab.ladder.cuda.host import reject

__all__ = ["Config", "launch", "launches", "prepare", "reject"]

IDEA = (
    "The library's cuda.fwd_sm80, padded, two stages: addresses take steps that the compiler knows, key tiles that no "
    "edge cuts run without a mask, and long row blocks start first."
)
PREDICTION = (
    "1.3 to 1.6 x: the loop of step 11 computes an address for each 16 bytes that it copies and compares every score "
    "with an edge; 733 instructions a tile become 350. Causal gains more, since its blocks differ in length and a "
    "launch ends with the long ones."
)
WHY = (
    "1.22 to 1.32 x, the lower end of the prediction: 322 instructions a tile in place of 702, more than half, for a "
    "quarter of the time. From here on the barriers and the reads of K and V weigh as much as instructions."
)
PUBLISHED: dict[str, str] = {}
VISITS = "visible"


def default_config(problem: AttentionProblem, device: Device) -> Config:
    return Config(64, 32, num_warps=4, num_stages=2, swizzle=False, occupancy=3)


def search_space(problem: AttentionProblem, device: Device) -> Iterable[Config]:
    yield default_config(problem, device)
