"""Step 14: key tiles of 64."""

from __future__ import annotations

from collections.abc import Iterable

from peakattn.backends.cuda.fwd_sm80 import Config, launch, launches, prepare
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab.ladder.cuda.host import reject

__all__ = ["Config", "launch", "launches", "prepare", "reject"]

IDEA = "Key tiles of 64 in place of 32: half as many barriers, waits and rescalings of the output."
PREDICTION = (
    "1.0 to 1.1 x: what a tile costs once, 64 multiplications of the output among them, is shared by twice the "
    "products, and two blocks on an SM are left of three. Now that scores live in registers, the source's reason for "
    "small tiles is the smaller part."
)
WHY = "1.02 to 1.10 x, as predicted, most at 16k: half the barriers, and 510 instructions for twice the products of 320."
PUBLISHED: dict[str, str] = {}
VISITS = "visible"


def default_config(problem: AttentionProblem, device: Device) -> Config:
    return Config(64, 64, num_warps=4, num_stages=2)


def search_space(problem: AttentionProblem, device: Device) -> Iterable[Config]:
    yield default_config(problem, device)
