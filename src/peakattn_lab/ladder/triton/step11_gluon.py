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
WHY = ""
PUBLISHED: dict[str, str] = {}
VISITS = "visible"
