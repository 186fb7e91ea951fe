"""The CuTe DSL ladder: from FlashAttention-2 with the instructions of Ampere to the library's kernel for Hopper."""

from __future__ import annotations

from peakattn_lab.ladder import Experiment

RUNGS: dict[str, str] = {
    "ladder.cute.step1": "peakattn_lab.ladder.cute.step1_fa2_ampere",
    "ladder.cute.step2": "peakattn_lab.ladder.cute.step2_tma_wgmma",
    "ladder.cute.step3": "peakattn_lab.ladder.cute.step3_p_in_registers",
    "ladder.cute.step4": "peakattn_lab.ladder.cute.step4_warp_specialization",
    "ladder.cute.step5": "peakattn_lab.ladder.cute.step5_pingpong",
    "ladder.cute.step6": "peakattn_lab.ladder.cute.step6_overlap",
    "ladder.cute.step7": "peakattn_lab.ladder.cute.step7_stale_origin",
    "ladder.cute.step8": "peakattn_lab.ladder.cute.step8_persistent",
    "ladder.cute.step9": "peakattn_lab.ladder.cute.step9_dynamic_tiles",
}

SOURCE = "the guide to FlashAttention-2 in CuTe DSL for Ampere, which publishes no figures"

_GUIDE = {"block_m": 128, "block_n": 128}
_TILE = {"block_m": 128, "block_n": 128}

EXPERIMENTS: dict[str, Experiment] = {
    "threads": Experiment(
        "The guide's tile of 128 x 128 with its 128 threads needs 256 registers a thread for scores and output at head_dim "
        "128, and a thread has 255: they spill to local memory in the loop. 256 threads hold the same tile.",
        causal=False,
        subjects=((1, {**_GUIDE, "num_threads": 128}), (1, {**_GUIDE, "num_threads": 256})),
    ),
    "turns": Experiment(
        "Turns between consumers, which are worth much while a consumer waits for its own products, are worth nothing once its "
        "softmax runs under them: from -2 to +2 %.",
        causal=False,
        subjects=((7, {**_TILE, "pingpong": False}), (7, {**_TILE, "pingpong": True})),
    ),
}
