"""Step 11: the library's own kernel for Hopper, in Gluon, with explicit wgmma, TMA and barriers.

Gluon is Triton without its scheduler: layouts, asynchronous products, barriers and warp partitions are written out. A
producer warp streams K and V through rings of tiles; consumers run the product of the next scores, and the product of the
last P with V, under the softmax of this tile.
"""

from __future__ import annotations

KERNEL = "triton.fwd_sm90"
IDEA = "Warp specialisation by hand: a TMA producer, consumers whose products run under their own softmax."
PREDICTION = (
    "Another third or more: the tensor cores no longer wait for the exponentials. 0.8 to 0.9 x the best rival, because the "
    "interior loop issues a tenth to a quarter more instructions than its floor and has four barriers a tile."
)
WHY = (
    "Predicted another third or more, measured 1.12, 1.24 and 1.29 x full (1k, 4k, 16k), 1.04, 1.21 and 1.22 x "
    "causal: less, most likely because step 9 has two blocks an SM, which cover each other already. Predicted 0.8 to "
    "0.9 x the best rival (FA3), measured 0.81, 0.91 and 0.93 full, 0.75, 0.87 and 0.92 causal. A warp's loop has 454 "
    "instructions for 128 keys, where step 9 has 336 for 64. At 1k one block an SM has nothing to cover its start and "
    "end, and causal its 128-key tiles compute 1.12 x the need for 1.06."
)
PUBLISHED: dict[str, str] = {}
VISITS = "visible"
