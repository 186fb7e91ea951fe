"""The questions that a profile has to answer, in the order in which they are worth asking, with this kernel's answers.

The order is that of a published study that took a Triton kernel from a third of its rival's speed to level with it: first
whether the kernel is the problem at all, then which unit is busy, with what, and only then what to change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from peakattn_lab import inspection, problems, records
from peakattn_lab.inspection.loops import Table
from peakattn_lab.profiling import counters, tables
from peakattn_lab.profiling.profilers import Profile, ProfileRecord
from peakattn_lab.profiling.tables import Column
from peakattn_lab.roofline import ceilings

_CLOSE = 0.05  # a prediction within this of its measurement has held
_WAITS = {
    "math pipe throttle": "for the tensor cores, where a kernel of products wants to be",
    "gmma": "for warpgroup products, where a kernel of products wants to be",
    "wait": "a fixed number of cycles after their own instruction: dense code, few stalls of other kinds",
    "long scoreboard": "for global memory or L2: deeper prefetch",
    "short scoreboard": "for shared memory",
    "mio throttle": "for the queue of shared-memory instructions",
    "barrier": "for other warps of their block",
    "dispatch stall": "for the dispatcher",
    "not selected": "for a turn: others were ready, so there are warps enough",
    "no instructions": "for the instruction cache",
    "sleeping": "in a polite wait for a barrier in memory",
}


def table(ours: Profile, rivals: Sequence[Profile], before: ProfileRecord | None, report: Path | None) -> Table:
    """(question, answer) rows for our kernel. ``before`` is its last record on the same problem."""
    column = tables.main_column(ours)
    if column is None:
        return "checklist", ["question", "answer"], []
    static = _static(column)
    answers: dict[str, Callable[[], str]] = {
        "Is the time from a fair benchmark?": lambda: _benchmark(column),
        "What is 100 %?": lambda: _whole(column),
        "Timeline: is the GPU always busy?": lambda: ours.timeline.answer() if ours.timeline else "not recorded here",
        "Timeline: what does one call launch?": lambda: _launches(ours),
        "How long does a reference take?": lambda: _references(column, rivals),
        "Speed of light: which unit is on top?": lambda: _top(column),
        "Can the tensor row reach 100 %?": lambda: _reachable(column),
        "Are more operations executed than needed?": lambda: _operations(column),
        "Are the bytes as predicted?": lambda: _bytes(column),
        "What do warps wait for?": lambda: _stalls(column),
        "Which source line costs most?": lambda: static[0],
        "What limits occupancy?": lambda: _occupancy(column),
        "What does ncu suggest?": lambda: _suggestions(report),
        "Compiler: registers, spills, shared memory?": lambda: static[1],
        "Compiler: do warps own whole rows?": lambda: static[2],
        "Did the last change do what was expected?": lambda: _change(column, before),
    }
    return "checklist", ["question", "answer"], [[question, answer()] for question, answer in answers.items()]


def _benchmark(c: Column) -> str:
    us, warm = c.kernel.duration_us, c.profile.found.warm_us if c.profile.found else None
    if us is None:
        return "no duration was collected; time with peakattn bench"
    beside = f", warm calls without it {warm:.1f} us" if warm else ""
    return f"no: one launch under a profiler with cold caches, {us:.1f} us{beside}; time with peakattn bench"


def _whole(c: Column) -> str:
    roof, rate = tables.peak(c), tables.useful_rate(c)
    if roof is None:
        return f"no peak of {c.dtype} is known for {c.device.name}"
    measured = ceilings.of_device(c.device).get(c.dtype)
    beside = f"; a large matmul reaches {measured.low:.0f} to {measured.high:.0f}" if measured else ""
    here = f"; this launch {rate:.0f}, or {rate / roof:.0%}" if rate else ""
    return f"{roof:.0f} TFLOP/s of {c.dtype} products on {c.device.name}{beside}{here}"


def _launches(ours: Profile) -> str:
    if ours.timeline is not None:
        kernels = ours.timeline.kernels
        first = next(iter(kernels))
        part = sum(kernels[first]) / sum(map(sum, kernels.values()))
        return f"{len(ours.timeline.launches) / ours.timeline.calls:g} kernels; {first} takes {part:.0%} of their time"
    total = sum(k.duration_us or 0.0 for k in ours.kernels)
    most = max(ours.kernels, key=lambda k: k.duration_us or 0.0)
    share = f", {(most.duration_us or 0.0) / total:.0%} of their time" if total else ""
    return f"{len(ours.kernels)} in the report; the longest is {most.name}{share}"


def _references(c: Column, rivals: Sequence[Profile]) -> str:
    ours = sum(k.duration_us or 0.0 for k in c.profile.kernels)
    told = []
    for rival in rivals:
        us = sum(k.duration_us or 0.0 for k in rival.kernels)
        told.append(f"{rival.job.name} {us:.1f} us against {ours:.1f}")
    return "; ".join(told) or "none was profiled; add --rival NAME"


def _top(c: Column) -> str:
    told = []
    for name, compute in (("compute", True), ("memory", False)):
        units = c.kernel.breakdown(compute)
        if units:
            unit, share = next(iter(units.items()))
            told.append(f"{name}: {unit} at {share:.1f} %")
    return "; ".join(told) or "no breakdown was collected"


def _reachable(c: Column) -> str:
    share = c.kernel.get(*counters.TENSOR_PIPE)
    here = "" if share is None else f"; it is at {share:.1f} %"
    if "GeForce" in c.device.name:
        return f"no: products with float32 sums run at half rate on GeForce, so that about 50 % is saturated{here}"
    return f"yes on {c.device.name}{here}"


def _operations(c: Column) -> str:
    if c.executed is None or c.ratio is None:
        return "not known: no counter of tensor operations; peakattn inspect counts those of a tile"
    excess = c.ratio - 1
    mask = ", which cut tiles at the mask's edge explain in part" if c.problem.mask_name != "full" and excess > 0 else ""
    verdict = "as many as needed" if abs(excess) < _CLOSE else f"{c.ratio:.2f} x what is needed{mask}"
    return f"{verdict} ({c.executed[0] / 1e9:.1f} G of {(c.needed or 0.0) / 1e9:.1f} G, {c.executed[1]})"


def _bytes(c: Column) -> str:
    told = []
    measured = c.kernel.get(counters.L2_TO_SM)
    if measured is not None and c.predicted is not None:
        told.append(f"L2 to SM {_held(measured, c.predicted[0])}: {c.predicted[1]}")
    read = c.kernel.get(counters.DRAM_READ)
    if read is not None and c.problem.direction == "fwd":
        written = c.problem.dtype.itemsize * c.problem.batch * c.problem.seqlen_q * c.problem.num_heads_q * c.problem.head_dim_v
        inputs = (
            c.problem.bytes - written - 4 * c.problem.batch * c.problem.seqlen_q * c.problem.num_heads_q * c.problem.return_lse
        )
        told.append(f"DRAM reads {_held(read, float(inputs))}: every input once")
    return "; ".join(told) or "nothing was collected or predicted"


def _held(measured: float, predicted: float) -> str:
    ratio = measured / predicted if predicted else float("inf")
    verdict = "as predicted" if abs(ratio - 1) < _CLOSE else f"{ratio:.2f} x the prediction, so an assumption is wrong"
    return f"{measured / 1e9:.3f} GB, {verdict}"


def _stalls(c: Column) -> str:
    told = [
        f"{reason} {cycles:.1f}" + (f" ({_WAITS[reason]})" if reason in _WAITS else "")
        for reason, cycles in list(c.kernel.stalls.items())[:3]
    ]
    return "; ".join(told) or "no stalls were collected"


def _occupancy(c: Column) -> str:
    limits, active = c.kernel.limits, c.kernel.get(counters.OCCUPANCY)
    if not limits:
        return "not collected"
    least = min(limits.values())
    names = ", ".join(name for name, value in limits.items() if value == least)
    share = "" if active is None else f", {active:.0f} % of the warps"
    return f"{names}: {least:.0f} blocks an SM{share}; a means to hide latency, not a goal"


def _suggestions(report: Path | None) -> str:
    where = f"open {report} in ncu-ui" if report else "open the report in ncu-ui"
    return f"{where}; its estimated speedups are hypotheses, test each against the answers above"


def _static(c: Column) -> tuple[str, str, str]:
    """Answers that the machine code gives: the hottest line, what a block takes, and who computes what."""
    kernel = c.profile.job.kernel
    if kernel is None:
        return ("only our own kernels are compiled here",) * 3
    config = json.dumps(c.profile.config) if c.profile.config else None
    try:
        found = inspection.inspect(kernel, problems.on_device(c.problem, "cuda"), c.kernel.arch or c.device.arch, config)
        function = next((f for f in found.functions if f.facts.name == c.kernel.name), found.functions[0])
    except ValueError as error:
        return (f"not known: {error}",) * 3
    try:
        line = inspection.lines.hottest(inspection.lines.of_function(function)[0])
    except (ValueError, IndexError, RuntimeError) as error:
        line = f"not known: {error}"
    facts = function.facts
    made = (
        f"{facts.registers} registers, {facts.spill_instructions} spill instructions, {facts.loop_spills} of them a tile, "
        f"{facts.shared_bytes / 1024:.1f} KiB of shared memory"
    )
    ran = c.kernel.get("launch__registers_per_thread")
    if ran is not None and ran != facts.registers:
        made += f"; the launch had {ran:.0f} registers, so it was another config or compiler"
    layouts = inspection.layouts.of(found)
    notes = [note for note in inspection.layouts.notes(layouts, kernel) if layouts and note.startswith(facts.name)]
    ratios = {f"{work.ratio:.2f}" for work in function.work if work.ratio is not None}
    waste = f"executed / needed products a tile: {', '.join(sorted(ratios))}" if ratios else "products a tile not derivable"
    rows = "; ".join(notes) or ("yes" if layouts else "no layouts to read in this backend")
    return line, made, f"{rows}; {waste}"


def _change(c: Column, before: ProfileRecord | None) -> str:
    earlier = next((k for k in before.counters() if k.name == c.kernel.name), None) if before else None
    if before is None or earlier is None:
        return "there is no earlier profile of this kernel and problem to hold it against"
    told = []
    for name, metric in (("time", counters.DURATION), ("instructions", counters.INSTRUCTIONS), ("L2 bytes", counters.L2_TO_SM)):
        now, then = c.kernel.get(metric), earlier.get(metric)
        if now is not None and then:
            told.append(f"{name} {now / then - 1:+.1%}")
    same = " (same sources and config)" if _unchanged(c, before) else ""
    return f"against {before.provenance.time}{same}: {', '.join(told) or 'nothing in common'}; instructions are not time"


def _unchanged(c: Column, before: ProfileRecord) -> bool:
    kernel = c.profile.job.kernel
    return kernel is not None and before.kernel_hash == records.kernel_hash(kernel) and before.config == c.profile.config
