"""Step 17: the library's kernel, with the tile that its model of blocks against SMs chooses."""

from __future__ import annotations

KERNEL = "cuda.fwd_sm80"
IDEA = "The library's kernel as a call gets it: its tile chosen for the problem by a model of blocks against SMs."
PREDICTION = (
    "About FlashAttention-2, the best public kernel with these instructions: 0.95 to 1.1 x. Both wait for the same "
    "things, and wgmma and TMA, which the rivals for Hopper use, are out of reach of mma.sync."
)
WHY = (
    "1.23 to 1.27 x of step 16 with a full mask and 1.09 to 1.16 x with a causal one, and 1.09 to 1.27 x "
    "FlashAttention-2: more than predicted, because the prediction did not know of the stale origin. Without maximum, "
    "shuffles and rescaling in whole tiles 342 instructions are left of 560, with one barrier a tile."
)
PUBLISHED: dict[str, str] = {"causal": "22.6 TFLOP/s, 1.0 x PyTorch's cuDNN from 4k on"}
VISITS = "visible"
