"""The cuTile ladder: the steps of both guides in their order, then what Hopper needs beyond them."""

from __future__ import annotations

from peakattn_lab.ladder import Experiment

RUNGS: dict[str, str] = {
    "ladder.cutile.step1": "peakattn_lab.ladder.cutile.step1_basic",
    "ladder.cutile.step2": "peakattn_lab.ladder.cutile.step2_exp2",
    "ladder.cutile.step3": "peakattn_lab.ladder.cutile.step3_load_order",
    "ladder.cutile.step4": "peakattn_lab.ladder.cutile.step4_latency",
    "ladder.cutile.step5": "peakattn_lab.ladder.cutile.step5_occupancy",
    "ladder.cutile.step6": "peakattn_lab.ladder.cutile.step6_large_tiles",
    "ladder.cutile.step7": "peakattn_lab.ladder.cutile.step7_fast_math",
    "ladder.cutile.step8": "peakattn_lab.ladder.cutile.step8_loop_split",
    "ladder.cutile.step9": "peakattn_lab.ladder.cutile.step9_reversed",
    "ladder.cutile.step10": "peakattn_lab.ladder.cutile.step10_autotune",
    "ladder.cutile.step11": "peakattn_lab.ladder.cutile.step11_worker_warps",
    "ladder.cutile.step12": "peakattn_lab.ladder.cutile.step12_overlap",
    "ladder.cutile.step13": "peakattn_lab.ladder.cutile.step13_row_tiles",
    "ladder.cutile.step14": "peakattn_lab.ladder.cutile.step14_late_start",
    "ladder.cutile.step15": "peakattn_lab.ladder.cutile.step15_library",
}

SOURCE = (
    "two guides: the article on tuning Flash Attention in CUDA Tile, on its B200 (float16, head_dim 128, causal, 4 x 32 "
    "heads), and the guide to FMHA in cuTile, on its DGX Spark and B300"
)

EXPERIMENTS: dict[str, Experiment] = {
    "trap": Experiment(
        "Large tiles without and with fast math, on small tiles and on large: the article's small tiles lose 18 to 43 % when "
        "they grow, and fast math gives 34 to 72 % back.",
        causal=True,
        subjects=tuple(
            (step, {"block_m": block_m, "block_n": block_n, "occupancy": occupancy})
            for block_m, block_n, occupancy in ((64, 64, 2), (128, 128, 1), (256, 128, 1))
            for step in (6, 7)
        ),
    ),
    "clusters": Experiment(
        "num_ctas shares a tile among SMs that read each other's shared memory: twice the rows with the registers of one.",
        causal=False,
        subjects=(
            (11, {"block_m": 128, "block_n": 128, "num_ctas": 1, "num_worker_warps": 8}),
            (11, {"block_m": 128, "block_n": 128, "num_ctas": 2, "num_worker_warps": 8}),
            (11, {"block_m": 256, "block_n": 128, "num_ctas": 2, "num_worker_warps": 8}),
        ),
    ),
}
