"""Device code of two ceilings that no call of torch measures: reads from the L2 cache, and ex2."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_kernel(source, sums, blocks, rounds, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program adds up ``rounds`` blocks of ``source``, from a place of its own on; ``.cg`` goes past the L1 cache."""
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    # A stride of its own parts the programs, so that they do not read one block at one time.
    start = (program * 37) % blocks
    acc = tl.zeros([BLOCK], tl.float32)
    for i in range(rounds):
        block = (start + i) % blocks
        acc += tl.load(source + block * BLOCK + lanes, cache_modifier=".cg")
    tl.store(sums + program, tl.sum(acc, 0))


@triton.jit
def exp2_kernel(out, rounds, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """``rounds`` times x = 2^-x on values in registers, which stay between 0 and 1; ``rounds`` is a multiple of 16.

    The sign costs an addition, which hides behind the eight clocks that ex2 takes for a warp.
    """
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    x = lanes.to(tl.float32) / BLOCK
    for _ in range(0, rounds, 16):
        for _ in tl.static_range(16):
            x = tl.exp2(-x)
    tl.store(out + program * BLOCK + lanes, x)
