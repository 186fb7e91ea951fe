"""The hot loops of PTX: what the compiler asked of the assembler, before registers and schedules."""

from __future__ import annotations

import re

PRODUCT = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\.")
# Where a kernel has these, loops with products of single warps are for rare rows.
_WARPGROUP_PRODUCT = re.compile(r"\b(?:wgmma\.mma_async|tcgen05\.mma)\.")
_LABEL = re.compile(r"^\s*([$\w]+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+([$\w]+)\s*;")


def hot_loops(ptx: str) -> list[str]:
    """The innermost loops with products, each from its label to the branch that goes back to it."""
    lines = ptx.splitlines()
    labels: dict[str, int] = {}
    spans = []
    for number, line in enumerate(lines):
        if label := _LABEL.match(line):
            labels[label[1]] = number
        if (branch := _BRANCH.search(line)) and branch[1] in labels:
            spans.append((labels[branch[1]], number))
    wanted = _WARPGROUP_PRODUCT if _WARPGROUP_PRODUCT.search(ptx) else PRODUCT
    hot = [(a, b) for a, b in dict.fromkeys(spans) if any(wanted.search(line) for line in lines[a : b + 1])]
    inner = [s for s in hot if not any(other != s and s[0] <= other[0] and other[1] <= s[1] for other in hot)]
    return ["\n".join(lines[a : b + 1]) for a, b in sorted(inner)]


def loop_listing(loops: list[str], number: int) -> str:
    """The PTX of loop ``number``, counted from 1 in the order of the PTX, which may not be that of the machine code."""
    if not 1 <= number <= len(loops):
        allowed = f"allowed are 1 to {len(loops)}." if loops else "there is no hot loop."
        raise ValueError(f"loop is {number} and the PTX has {len(loops)} hot loops; {allowed}")
    return loops[number - 1]
