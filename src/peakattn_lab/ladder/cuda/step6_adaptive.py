"""Step 6: smaller row blocks where there are few."""

from __future__ import annotations

from collections.abc import Iterable

from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab.ladder.cuda import host
from peakattn_lab.ladder.cuda.host import Config, reject
from peakattn_lab.ladder.cuda.step5_exp2 import shared_bytes, turns

__all__ = ["Config", "default_config", "launch", "launches", "prepare", "reject", "search_space", "turns"]

DEVICE = "step5_exp2.cu"
IDEA = "Row blocks of 32 with two warps in place of 64 with four where the larger ones would leave SMs without work."
PREDICTION = (
    "Nothing at 16,384 tokens a call: the source has one sequence and 32 heads, so a short sequence leaves its 58 SMs "
    "idle, and here batches keep 132 of them busy, with 4,096 blocks at every length. One head of 1k on its own: 1.5 "
    "x and more."
)
WHY = (
    "1.00 x, as predicted: at 16,384 tokens a call there are blocks enough at every length, and the rule never picks "
    "the small ones."
)
PUBLISHED: dict[str, str] = {"causal": "22.6 TFLOP/s", "threshold": "32 x 32 below 768 queries, else 64 x 32"}
VISITS = "visible"

_SMALL, _LARGE = Config(32, 32, num_warps=2), Config(64, 32, num_warps=4)


def default_config(problem: AttentionProblem, device: Device) -> Config:
    """By the number of blocks and not, as in the source, by the length of one sequence."""
    blocks = -(-problem.seqlen_q // _LARGE.block_m) * problem.batch * problem.num_heads_q
    return _LARGE if blocks >= 2 * device.num_sms else _SMALL


def search_space(problem: AttentionProblem, device: Device) -> Iterable[Config]:
    yield _SMALL
    yield _LARGE


launches, launch, prepare = host.entry_points(DEVICE, shared_bytes)
