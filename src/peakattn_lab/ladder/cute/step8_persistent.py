"""Step 8: as many blocks as the GPU holds, each of which goes on from tile to tile.

This is ``attention_fwd_kernel`` of the library's cute.fwd_sm90 with ``schedule="static"``: block i takes the row blocks i,
i + grid, i + 2 grid ...  Output has shared memory of its own, so that it leaves while the producer loads the next Q, K and V.
"""

from __future__ import annotations

import dataclasses

from peakattn.backends.cute.fwd_sm90 import Config, launch, launches, prepare
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab.ladder.cute import host, step7_stale_origin
from peakattn_lab.ladder.cute.host import reject

__all__ = ["Config", "launch", "launches", "prepare", "reject"]

IDEA = "Persistent blocks: output of its own memory leaves under the next tile; who takes which row block is fixed."
PREDICTION = (
    "Full, 16k: 1.02 x, since a row block of 16k keys takes 100 times as long as its start and end; full, 1k: 1.10 x. Causal: "
    "1.05 x at 1k, and 0.95 to 1.00 x at 16k: row blocks of different lengths, dealt out in turn, add up to different sums for "
    "each SM, which blocks that start as others end would have evened out."
)
WHY = (
    "Full, as predicted: 1.20 x at 1k, 1.06 x at 4k, nothing at 16k. Causal worse than predicted, 0.86 to 0.94 x: "
    "dealt out in turn, row blocks of different lengths leave SMs idle that a free block would have taken."
)
PUBLISHED: dict[str, str] = {}
VISITS = "visible"


def default_config(problem: AttentionProblem, device: Device) -> Config:
    before = step7_stale_origin.default_config(problem, device)
    return dataclasses.replace(before, schedule="static", separate_out=True)


search_space = host.only(default_config)
