"""Step 1: FlashAttention-2 with the instructions of Ampere, as in the guide: cp.async, ldmatrix, mma.sync m16n8k16.

This is ``attention_fwd_kernel`` of the library's cute.fwd_sm80 under one config: the guide's tile of 128 queries by 128 keys.
It has 256 threads where the guide has 128: with 128 a thread would need 256 registers for scores and output at head_dim 128,
and spills (``--experiment threads`` shows it).  Beyond the guide it has a loop without a mask, and it starts the longest row
blocks of a causal mask first, as every rung of this ladder does.
"""

from __future__ import annotations

from peakattn.backends.cute import fwd_sm80
from peakattn.backends.cute.fwd_sm80 import Config, launch, launches, prepare
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab.ladder.cute import host

__all__ = ["Config", "launch", "launches", "prepare"]

IDEA = "The guide's FlashAttention-2: tiles by cp.async, operands by ldmatrix one step ahead, mma.sync, P in registers."
PREDICTION = (
    "head_dim 128, 16k, full: about 330 TFLOP/s, a third of the H200's peak. mma.sync reaches at most some 60 % of what wgmma "
    "does there, each warp must load its operands by instructions of its own, and one tile of K and V cannot cover a wait."
)
WHY = (
    "About 275 of 330. With 254 registers in 256 threads an SM holds one block, whose copies, softmax and products "
    "wait for each other; nobody fills the gaps. 893 instructions a tile, most of them to load operands, against 514 "
    "in step 2."
)
PUBLISHED: dict[str, str] = {}
VISITS = "visible"


def reject(problem: AttentionProblem, device: Device) -> str | None:
    return host.beyond_a_rung(problem) or fwd_sm80.reject(problem, device)


def default_config(problem: AttentionProblem, device: Device) -> Config:
    return Config(block_m=128, block_n=128, num_threads=256)


search_space = host.only(default_config)
