"""The CUDA C++ ladder: phases and failures of an optimisation journey with mma.sync, and on to the kernel for sm_80."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from peakattn.problem import AttentionProblem
from peakattn_lab.ladder import Experiment

RUNGS: dict[str, str] = {
    "ladder.cuda.step1": "peakattn_lab.ladder.cuda.step1_tensor_cores",
    "ladder.cuda.step2": "peakattn_lab.ladder.cuda.step2_smaller_tiles",
    "ladder.cuda.step3": "peakattn_lab.ladder.cuda.step3_padding",
    "ladder.cuda.step4": "peakattn_lab.ladder.cuda.step4_shuffles",
    "ladder.cuda.step5": "peakattn_lab.ladder.cuda.step5_exp2",
    "ladder.cuda.step6": "peakattn_lab.ladder.cuda.step6_adaptive",
    "ladder.cuda.step7": "peakattn_lab.ladder.cuda.step7_prefetch",
    "ladder.cuda.step8": "peakattn_lab.ladder.cuda.step8_pair_stores",
    "ladder.cuda.step9": "peakattn_lab.ladder.cuda.step9_cp_async",
    "ladder.cuda.step10": "peakattn_lab.ladder.cuda.step10_scores_in_registers",
    "ladder.cuda.step11": "peakattn_lab.ladder.cuda.step11_ldmatrix",
    "ladder.cuda.step12": "peakattn_lab.ladder.cuda.step12_mask_free_interior",
    "ladder.cuda.step13": "peakattn_lab.ladder.cuda.step13_swizzle",
    "ladder.cuda.step14": "peakattn_lab.ladder.cuda.step14_larger_tiles",
    "ladder.cuda.step15": "peakattn_lab.ladder.cuda.step15_q_in_registers",
    "ladder.cuda.step16": "peakattn_lab.ladder.cuda.step16_warps_of_32_rows",
    "ladder.cuda.step17": "peakattn_lab.ladder.cuda.step17_library",
}

SOURCE = (
    "a CUDA optimisation journey on an RTX 3080 Ti Laptop GPU (58 SMs; batch 1, 32 heads, head_dim 128, causal, float16), with "
    "22.6 TFLOP/s in the end"
)

EXPERIMENTS: dict[str, Experiment] = {
    "tiles": Experiment(
        "The source's tenfold step from 64 x 64 to 64 x 32 tiles: neither spills here, so what is left of it is occupancy.",
        causal=True,
        subjects=tuple(
            (11, {"block_m": 64, "block_n": block_n, "num_warps": 4, "num_stages": 1}) for block_n in (16, 32, 64, 96)
        ),
    ),
    "stages": Experiment(
        "How many tiles of K and of V on their way? One of each is enough where other blocks on the SM fill the waits.",
        causal=False,
        subjects=tuple(
            (15, {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": stages, "q_in_registers": True})
            for stages in (1, 2, 3)
        ),
    ),
}


def layouts(kernel: ModuleType, problem: AttentionProblem, config: Any, arch: int) -> list[str]:
    """Reads of shared memory that meet a bank more than once, from the layout; ``ldmatrix`` of swizzled rows meets none."""
    turns: dict[str, int] = kernel.turns(problem, config) if hasattr(kernel, "turns") else {}
    return [f"{what} read in {count} turns" for what, count in turns.items() if count > 1] or ["no bank conflict"]
