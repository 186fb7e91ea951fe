"""Which of several calls is fastest: all of them timed side by side, round by round, against the first.

A time says little by itself, because clocks drift with power and temperature.  So each round times the first call, the
*anchor*, and every call that can still win, in random order, and what counts is how many times faster than the anchor a
call was in the same round.  A call that is surely slower than another leaves the race.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# Starts one sample; what it returns gives the seconds of one call once the round has finished.
Sampler = Callable[[], Callable[[], float]]

MIN_ROUNDS = 8  # the fewest whose range is an interval of CONFIDENCE
CONFIDENCE = 0.99  # more than the usual 95 %, because a race looks again and again
_TIED = 0.005  # a speedup that is known to half a per cent either way is known well enough


@dataclass
class Lane:
    """One call's samples: seconds, and in the same order how many times faster than the anchor it was."""

    seconds: list[float] = field(default_factory=list)
    speedups: list[float] = field(default_factory=list)

    @property
    def speedup(self) -> tuple[float, float, float]:
        """Median speedup over the anchor, and the interval that holds it."""
        low, high = interval(self.speedups, CONFIDENCE)
        return statistics.median(self.speedups), low, high


def run(
    samplers: Sequence[Sampler],
    seconds: float,
    *,
    finish: Callable[[], None] = lambda: None,
    on_round: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Lane]:
    """The lanes of all samplers; the first is the anchor and stays to the end.

    Over when one call is separated from all others, when those that are left are tied, or after ``seconds``, but not
    before ``MIN_ROUNDS``.  ``finish`` waits for the device at the end of a round.
    """
    lanes = [Lane() for _ in samplers]
    racing = list(range(1, len(samplers)))
    shuffle = random.Random(0).shuffle

    def round_(members: list[int]) -> dict[int, float]:
        order = [0, *members]
        shuffle(order)
        started = {i: samplers[i]() for i in order}
        finish()
        return {i: resolve() for i, resolve in started.items()}

    began = clock()
    round_(racing)  # warms up
    for count in itertools.count(1):
        times = round_(racing)
        on_round()
        for i, value in times.items():
            lanes[i].seconds.append(value)
            lanes[i].speedups.append(times[0] / value)
        if count < MIN_ROUNDS:
            continue
        if count % 4 == 0 or count == MIN_ROUNDS:
            fastest = max(lanes[i].speedup[1] for i in (0, *racing))
            racing = [i for i in racing if lanes[i].speedup[2] >= fastest]
            if all(high - low <= 2 * _TIED * median for median, low, high in (lanes[i].speedup for i in racing)):
                break
            if len(racing) == 1 and lanes[racing[0]].speedup[1] > 1:
                break
        if clock() - began >= seconds:
            break
    return lanes


def interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """An interval that holds the median with at least that confidence, from order statistics: no distribution is assumed.

    With too few samples for the confidence it is their range.
    """
    ordered, n = sorted(samples), len(samples)
    tail, rank, probability = 0.0, 0, 0.5**n
    while rank < n // 2:
        tail += probability
        if 2 * tail > 1 - confidence:
            break
        probability *= (n - rank) / (rank + 1)
        rank += 1
    rank = max(rank, 1)
    return ordered[rank - 1], ordered[n - rank]


def winner(speedups: Sequence[tuple[float, float, float]]) -> int:
    """The index of the call to use, of (median, low, high) speedups over one anchor; the first is the default.

    The first, unless others are surely faster than it.  Of those it is the fastest; of those that cannot be told from
    the fastest, the earliest, so that the same measurements always give the same answer.
    """
    better = [i for i, (_, low, _) in enumerate(speedups) if i and low > speedups[0][2]]
    if not better:
        return 0
    fastest = max(better, key=lambda i: speedups[i][0])
    return next(i for i in better if speedups[i][2] >= speedups[fastest][1])


def is_tied(speedups: Sequence[tuple[float, float, float]], index: int) -> bool:
    """True when another call cannot be told from that one."""
    _, low, high = speedups[index]
    return any(i != index and h >= low and lo <= high for i, (_, lo, h) in enumerate(speedups))
