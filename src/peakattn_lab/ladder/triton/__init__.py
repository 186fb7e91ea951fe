"""The Triton ladder: the rounds of the source first, then what it leaves out."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from peakattn.problem import AttentionProblem
from peakattn_lab.ladder import Experiment

RUNGS: dict[str, str] = {
    "ladder.triton.step1": "peakattn_lab.ladder.triton.step1_baseline",
    "ladder.triton.step2": "peakattn_lab.ladder.triton.step2_tiles_and_warps",
    "ladder.triton.step3": "peakattn_lab.ladder.triton.step3_autotune",
    "ladder.triton.step4": "peakattn_lab.ladder.triton.step4_skip_masked_tiles",
    "ladder.triton.step5": "peakattn_lab.ladder.triton.step5_exp2",
    "ladder.triton.step6": "peakattn_lab.ladder.triton.step6_p_cast",
    "ladder.triton.step7": "peakattn_lab.ladder.triton.step7_retune",
    "ladder.triton.step8": "peakattn_lab.ladder.triton.step8_tma",
    "ladder.triton.step9": "peakattn_lab.ladder.triton.step9_longest_first",
    "ladder.triton.step10": "peakattn_lab.ladder.triton.step10_warp_specialize",
    "ladder.triton.step11": "peakattn_lab.ladder.triton.step11_gluon",
}

SOURCE = (
    "the article on optimising a Triton FlashAttention-2 kernel step by step with profilers, on its RTX 4070 SUPER: "
    "bfloat16, head_dim 64, 4 x 8 heads, 4,096 tokens"
)

_64x32 = {"block_m": 64, "block_n": 32, "num_stages": 3}
_16x16 = {"block_m": 16, "block_n": 16, "num_stages": 3}
_128x64 = {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 3}

EXPERIMENTS: dict[str, Experiment] = {
    "warps": Experiment(
        "A warp that has no rows of its own does another's work again, or shares rows through shared memory: on the source's "
        "GPU 64 x 32 tiles take 4.26 ms with 8 warps for 2.18 ms with 4, and 274.9 G operations for 137.4 G.",
        causal=False,
        subjects=(
            (2, {**_64x32, "num_warps": 4}),
            (2, {**_64x32, "num_warps": 8}),
            (2, {**_64x32, "num_warps": 16}),
            (2, {**_16x16, "num_warps": 1}),
            (2, {**_16x16, "num_warps": 4}),
        ),
    ),
    "order": Experiment(
        "Reversed block order shortens the tail of a causal launch: on the source's GPU 1.072 ms for 1.079 ms, within noise.",
        causal=True,
        subjects=((8, _128x64), (9, _128x64)),
    ),
    "cast": Experiment(
        "The cast of P is cheap where it is, and leaving it out is dear: on the source's GPU 44.6 for 63.7 TFLOP/s, causal.",
        causal=True,
        subjects=tuple(
            (6, {"block_m": 128, "block_n": 32, "num_warps": 8, "num_stages": 2, "p_cast": order})
            for order in ("sum_then_cast", "cast_then_sum", "no_cast")
        ),
    ),
}


def layouts(kernel: ModuleType, problem: AttentionProblem, config: Any, arch: int) -> list[str]:
    """How warps share the products of the plainest loop, and what moves in it."""
    from peakattn.backends.triton import toolchain
    from peakattn_lab.inspection import layouts as ttgir

    said = []
    for launch in toolchain.launches_of(kernel, problem, config):
        compiled = toolchain.compile_launch(launch, arch)
        found = ttgir.read(compiled.metadata.name, compiled.asm["ttgir"])
        plain = min(found.loops, key=lambda loop: sum(loop.operations.values()), default=None)
        for product in plain.products if plain else ():
            rows, columns = product.warps
            said.append(f"warpsPerCTA [{rows}, {columns}] for {product.shape[0]} x {product.shape[1]}")
        moves = ("local_alloc", "local_store", "local_load", "convert_layout")
        said += [f"{plain.operations[name]} {name}" for name in moves if plain and plain.operations.get(name)]
    return list(dict.fromkeys(said))
