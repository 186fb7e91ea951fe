"""How long a config should take, from its machine code alone: a stated model, simple enough to be wrong in a way one can see.

On one SM, of which every block has the same share, a tile of ``block_m`` queries and ``block_n`` keys costs

    tensor   executed FLOPs / the tensor cores' rate (of HMMA on Hopper and later: a part of it, wgmma has the rest)
    issue    instructions of the hot loop x warps / 4 a clock
    exp      MUFU instructions x 32 x warps / 16 a clock
    local    loads and stores of spilled registers, each a trip to L1
    L2       K and V of the tile / what an SM gets from L2 in a clock

A block uses the tensor cores and the other units in turn: barriers keep its warps in step, so only another block, or another
consumer of a warp-specialised one, computes softmax under its products.  With n of those on an SM, core = max(issue, exp) +
local, and alone = tensor + core + a barrier,

    cycles a tile = max((alone + wait + (n - 1) max(tensor, core)) / n, L2)

where wait is what is left of a load's latency behind the tiles that num_stages - 1 loads are ahead of; nothing where a
producer warp loads.  That is all in turn for one block, and the longest for many.  Times the tiles that the mask leaves, in
whole waves of blocks when all blocks take equally long, else no less than the longest block takes by itself; plus a start-up
for each wave.  The constants were fitted on the 5,000 rows of the source's grid on an H200.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from peakattn import backends
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab import problems
from peakattn_lab.records import FunctionFacts, SweepRecord
from peakattn_lab.roofline import ceilings

SLACK = 0.20  # predicted times this close to the lowest are in the predicted winner set
HIT = 0.02  # a measured time this close to the lowest is a winner

_MHZ = 1700.0  # of GPUs whose clock is not in ceilings.FACTS
_HMMA_SHARE = 0.62  # of the rate that wgmma and tcgen05 have
_LOCAL_CYCLES = 4.0
_L2_BYTES_PER_CLOCK = 48.0  # of one SM
_START_CYCLES = 3000.0
_LOAD_CYCLES = 400.0  # from asking for a tile to having it
_BARRIER_CYCLES = 100.0


def predicted_us(
    kernel: str, problem: AttentionProblem, config: dict[str, Any], functions: Sequence[FunctionFacts], device: Device
) -> float | None:
    """Microseconds of one call, or None where the machine code or the config does not say enough."""
    consumers = consumers_of(kernel, config)
    members = [one for one in functions if one.tensor_core or len(functions) == 1]
    times = [_function_us(problem, config, consumers, one, device) for one in members]
    return round(sum(t for t in times if t is not None), 3) if times and None not in times else None


def consumers_of(kernel: str, config: dict[str, Any]) -> int | None:
    """Consumer warpgroups of a warp-specialised kernel, by a knob or by what follows from its knobs; None for any other."""
    if "num_consumers" in config:
        return int(config["num_consumers"])
    try:
        return getattr(backends.load(kernel).Config(**config), "num_consumers", None)
    except (ImportError, KeyError, TypeError, ValueError):  # of a kernel that is gone, or a config of an older version
        return None


def _function_us(
    problem: AttentionProblem, config: dict[str, Any], consumers: int | None, one: FunctionFacts, device: Device
) -> float | None:
    resident_keys = "dkdv" in one.name  # its blocks own keys and queries pass by
    prefix = "dkdv_" if resident_keys else "dq_" if problem.direction == "bwd" else ""
    block_m, block_n = config.get(f"{prefix}block_m"), config.get(f"{prefix}block_n")
    if not (isinstance(block_m, int) and isinstance(block_n, int) and one.loop.get("tensor core") and one.blocks):
        return None
    mhz = ceilings.FACTS[device.name].max_sm_mhz if device.name in ceilings.FACTS else _MHZ
    rate = device.peak_tflops * 1e6 / device.num_sms / mhz  # FLOPs a clock and SM
    warps = 4 * consumers if consumers else one.num_threads / 32
    if one.instruction == "HMMA" and device.arch >= 90:
        rate *= _HMMA_SHARE
    d, dv = problem.head_dim, problem.head_dim_v
    products = 2 * (d + dv) if resident_keys else d + dv + (d if problem.direction == "bwd" else 0)
    tensor = 2 * block_m * block_n * products * (one.waste or 1.0) / rate
    issue = sum(one.loop.values()) * warps / 4
    exp = one.loop.get("MUFU", 0) * 32 * warps / ceilings.EX2_PER_CLOCK_PER_SM
    local = one.loop.get("local memory", 0) * warps * _LOCAL_CYCLES
    passing = block_m if resident_keys else block_n
    l2 = passing * (d + dv) * problem.dtype.itemsize / _L2_BYTES_PER_CLOCK
    streams = one.blocks * (consumers or 1)
    core = max(issue, exp) + local
    alone = tensor + core + _BARRIER_CYCLES
    ahead = config.get(f"{prefix}num_stages", 2) - 1
    wait = 0.0 if consumers else max(_LOAD_CYCLES - ahead * alone, 0.0)
    cycles = max((alone + wait + (streams - 1) * max(tensor, core)) / streams, l2)
    pairs = visible_tiles(problem, block_m, block_n)
    if resident_keys:
        blocks = math.ceil(problem.seqlen_k / block_n) * problem.num_heads_kv * problem.batch
    else:
        blocks = math.ceil(problem.seqlen_q / block_m) * problem.num_heads_q * problem.batch
    tiles = pairs * problem.num_heads_q * problem.batch
    places = device.num_sms * one.blocks
    waves = blocks / places
    longest = 0.0
    if problem.mask_name == "full" or waves < 1:
        waves = math.ceil(waves)
    else:
        longest = math.ceil(problem.seqlen_q / block_m if resident_keys else problem.seqlen_k / block_n) * (alone + wait)
    together = waves * places * (tiles / blocks) / device.num_sms * cycles
    return (max(together, longest) + math.ceil(waves) * _START_CYCLES) / mhz


@functools.lru_cache(maxsize=4096)
def visible_tiles(problem: AttentionProblem, block_m: int, block_n: int) -> int:
    """Tiles of one head in which some key is visible."""
    count = 0
    for row in range(0, problem.seqlen_q, block_m):
        first, _ = problem.key_range(row)
        _, last = problem.key_range(min(row + block_m, problem.seqlen_q) - 1)
        count += max(0, math.ceil(last / block_n) - first // block_n)
    return count


# Prediction against measurement.


@dataclass(frozen=True)
class Hit:
    """One problem of a measured sweep: did the predicted winner set hold a config that is as fast as the fastest?"""

    problem: AttentionProblem
    measured: int  # configs with a speed and a prediction
    predicted: int  # in the predicted winner set
    winners: int  # configs within HIT of the fastest
    hit: bool
    lost: float  # how much slower than the fastest the best of the set is; 0.03 is 3 %
    by_chance: float  # the probability that a random set of that size has a winner
    correlation: float  # of the ranks by prediction and by measurement


def winner_set(rows: Sequence[SweepRecord]) -> list[SweepRecord]:
    """Rows of one problem whose predicted time is within SLACK of the lowest, the lowest first."""
    known = sorted((r for r in rows if r.predicted_us is not None), key=lambda r: r.predicted_us or 0.0)
    return [r for r in known if (r.predicted_us or 0.0) <= (1 + SLACK) * (known[0].predicted_us or 0.0)]


def hits(rows: Iterable[SweepRecord]) -> list[Hit]:
    """One for each problem; predictions are made anew, by the model as it is now, from the recorded facts."""
    found = []
    for members in by_problem(rows).values():
        timed = [again(r) for r in members if r.speed_known and r.functions]
        timed = [r for r in timed if r.predicted_us is not None]
        if len(timed) < 2:
            continue
        fastest = min(r.median_us for r in timed)
        chosen = winner_set(timed)
        winners = [r for r in timed if r.median_us <= (1 + HIT) * fastest]
        best = min(r.median_us for r in chosen)
        misses = math.comb(len(timed) - len(winners), len(chosen)) / math.comb(len(timed), len(chosen))
        found.append(
            Hit(
                problems.from_dict(timed[0].problem),
                len(timed),
                len(chosen),
                len(winners),
                best <= (1 + HIT) * fastest,
                best / fastest - 1,
                1 - misses,
                _rank_correlation([r.predicted_us or 0.0 for r in timed], [r.median_us for r in timed]),
            )
        )
    return found


def again(row: SweepRecord) -> SweepRecord:
    """The row with the prediction of today's model."""
    value = predicted_us(row.kernel, problems.from_dict(row.problem), row.config, row.functions, row.provenance.facts)
    return row.model_copy(update={"predicted_us": value})


def by_problem(rows: Iterable[SweepRecord]) -> dict[str, list[SweepRecord]]:
    """Rows of each problem, in order; of a config that stands there twice the last row, but a final time over others."""
    groups: dict[str, dict[str, SweepRecord]] = {}
    for row in rows:
        problem, _, config, *_ = row.key
        before = groups.setdefault(problem, {}).get(config)
        if before is None or before.kernel_hash != row.kernel_hash or not (before.stage == "final" and row.stage != "final"):
            groups[problem][config] = row
    return {problem: list(members.values()) for problem, members in groups.items()}


def hit_table(found: Sequence[Hit]) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of text, with a last row over all problems."""
    header = ["problem", "configs", "predicted set", "winners", "hit", "lost", "hit by chance", "rank correlation"]
    rows = [
        [
            problems.label(h.problem),
            str(h.measured),
            str(h.predicted),
            str(h.winners),
            "yes" if h.hit else "no",
            f"{h.lost:.1%}",
            f"{h.by_chance:.0%}",
            f"{h.correlation:.2f}",
        ]
        for h in found
    ]
    if found:
        share, chance = sum(h.hit for h in found) / len(found), sum(h.by_chance for h in found) / len(found)
        lost, correlation = max(h.lost for h in found), sum(h.correlation for h in found) / len(found)
        rows.append(["hit rate", "", "", "", f"{share:.0%}", f"{lost:.1%} at most", f"{chance:.0%}", f"{correlation:.2f}"])
    return header, rows


def _rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's; 0 where one side is constant."""
    ranks = [_ranks(a), _ranks(b)]
    mean = (len(a) + 1) / 2
    top = sum((x - mean) * (y - mean) for x, y in zip(*ranks, strict=True))
    spread = [sum((x - mean) ** 2 for x in side) for side in ranks]
    return top / math.sqrt(spread[0] * spread[1]) if all(spread) else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    first: dict[float, int] = {}
    for place, value in enumerate(order, 1):
        first.setdefault(value, place)
    return [first[v] + (order.count(v) - 1) / 2 for v in values]
