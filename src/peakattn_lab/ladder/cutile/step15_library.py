"""Step 15: the library's own kernel, with the config that was measured fastest on this GPU.

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
    "Over step 14: 0.99 to 1.00 x full, where it does the same, and 1.05 to 1.16 x causal: narrower tiles where the mask "
    "cuts, a row's sum in parts, and no spills with 256 keys at 16k. At full 2k (0.955) and causal 8k this run took the "
    "config of the length below, 64 x 128; the run before had 657 TFLOP/s at causal 8k with 256 keys, as it is now. 0.81 "
    "to 0.97 of FlashAttention-3."
)
PUBLISHED: dict[str, str] = {}
VISITS = "visible"
