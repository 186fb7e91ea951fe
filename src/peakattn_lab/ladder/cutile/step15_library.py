"""Step 13: the library's own kernel, with the config that was measured fastest on this GPU.

It takes windows, softcap, any head size and scores of any magnitude, schedules sections of heads whose K and V stay in L2,
and hides masked values whatever they are.
"""

from __future__ import annotations

KERNEL = "cutile.fwd"
IDEA = "The library: heads in sections that stay in L2, knobs tuned for each head size and mask, everything a call may ask for."
PREDICTION = (
    "Full: as step 12, within 2 %, for the exactness of very large scores costs two instructions a row. Causal: "
    "1.05 x at 16k from the sections."
)
WHY = (
    "Over step 10: 1.02 to 1.04 x full and 1.01 to 1.04 x causal, from a row's sum in 64 parts, masked tiles of half "
    "the width and a grid without divisions; over step 12, which stays slower than step 10, 1.14 x. In this run 0.82 "
    "to 0.89 of FlashAttention-3."
)
PUBLISHED: dict[str, str] = {}
VISITS = "visible"
