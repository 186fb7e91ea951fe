"""Records of a ladder as tables: speeds and gains, what the code says, and each rung's idea with what came of it."""

from __future__ import annotations

from collections.abc import Sequence

from peakattn.problem import AttentionProblem
from peakattn_lab import problems, timing
from peakattn_lab.ladder import Rung
from peakattn_lab.ladder.rows import Cell, RungRecord

Table = tuple[str, list[str], list[list[str]]]  # title, header, rows


def speeds(cell: Cell) -> Table:
    """TFLOP/s of every rung and rival of one problem, the gain over the rung before, and the share of the best rival."""
    header = ["rung", "config", "TFLOP/s", "us", "gain over the rung before", "of the best rival"]
    best = cell.best_rival
    body = []
    for row in cell.rows.values():
        if not row.speed_known:
            body.append([row.contender, config_text(row), "-", "-", "-", row.reason or ""])
            continue
        over = cell.before(row) if row.rung is not None else None
        body.append(
            [
                row.contender,
                config_text(row),
                f"{row.tflops:.0f}",
                f"{row.median_us:.1f}",
                gain_text(cell.gain(row, over)),
                share_text(cell.gain(row, best)) if row.rung is not None else "",
            ]
        )
    return f"{label(cell)}, TFLOP/s", header, body


def code(cell: Cell) -> Table:
    """Registers, spills, shared memory, occupancy, tensor-core instructions and operations, layouts."""
    header = ["rung", "config", "registers", "spills (a tile)", "smem KiB", "blocks an SM", "limited by", "tensor core"]
    header += ["loop", "executed / needed", "layouts in the loop"]
    body = []
    for row in cell.steps:
        facts = row.facts
        if facts is None:
            body.append([row.contender, config_text(row), *["-"] * 8, row.skipped or ""])
            continue
        body.append(
            [
                row.contender,
                config_text(row),
                str(facts.registers),
                f"{facts.spills} ({facts.loop_spills})",
                f"{facts.shared_bytes / 1024:.1f}",
                str(facts.blocks),
                facts.limiter,
                f"{facts.tensor_core} {facts.instruction or ''}".strip(),
                str(sum(facts.loop.values())),
                operations_text(row),
                ", ".join(row.layouts) or "-",
            ]
        )
    return f"{label(cell)}, read from the code; loop: instructions of the plainest one", header, body


def overview(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """(header, rows): TFLOP/s of every rung and rival, a column for each problem, and the mean gain over the rung before."""
    names = list(dict.fromkeys(name for cell in cells for name, row in cell.rows.items() if row.rung is not None))
    names += [name for name in dict.fromkeys(n for cell in cells for n in cell.rows) if name not in names]
    header = ["rung", *(label(cell) for cell in cells), "mean gain"]
    body = []
    for name in names:
        rows = [cell.rows.get(name) for cell in cells]
        gains = [
            cell.gain(row, cell.before(row)) for cell, row in zip(cells, rows, strict=True) if row and row.rung is not None
        ]
        body.append([name, *(f"{row.tflops:.0f}" if row and row.speed_known else "-" for row in rows), _mean(gains)])
    return header, body


def ideas(rungs: Sequence[Rung]) -> tuple[list[str], list[list[str]]]:
    """(header, rows): what each rung changes, what was expected of it, why it came so, and the source's figures."""
    header = ["rung", "idea", "predicted", "why it came so", "the source's figures"]
    return header, [[r.name, r.idea, r.prediction, r.why or "not measured yet", published(r) or "none"] for r in rungs]


def published(rung: Rung) -> str:
    """The source's figures of a rung, in one line."""
    return "; ".join(f"{what}: {figure}" for what, figure in rung.published.items())


def label(cell: Cell) -> str:
    """``d64 causal 4k``."""
    problem = _problem(cell)
    lengths = problems.length(problem.seqlen_k)
    return f"d{problem.head_dim} {problem.mask_name} {lengths}"


def config_text(row: RungRecord) -> str:
    """``128 x 64, 8 warps, 3 stages``, and the other knobs that are on; how many candidates it beat."""
    knobs = dict(row.config or {})
    tile = f"{knobs.pop('block_m')} x {knobs.pop('block_n')}" if {"block_m", "block_n"} <= set(knobs) else ""
    words = [tile, *(_knob(name, value) for name, value in knobs.items() if value not in (None, False))]
    if row.candidates > 1:
        words.append(f"best of {row.candidates}")
    return ", ".join(word for word in words if word)


def gain_text(gain: timing.Comparison | None) -> str:
    return "-" if gain is None else f"{gain.ratio:.2f} x [{gain.low:.2f}, {gain.high:.2f}] {gain.verdict}"


def share_text(gain: timing.Comparison | None) -> str:
    return "-" if gain is None else f"{gain.ratio:.2f}"


def operations_text(row: RungRecord) -> str:
    """``206.2 / 137.4 G = 1.50``."""
    if row.executed_flops is None or row.waste is None:
        return "not derivable"
    return f"{row.executed_flops / 1e9:.1f} / {row.executed_flops / row.waste / 1e9:.1f} G = {row.waste:.2f}"


def _problem(cell: Cell) -> AttentionProblem:
    return problems.from_dict(next(iter(cell.rows.values())).problem)


def _knob(name: str, value: object) -> str:
    if value is True:
        return name
    return f"{value} {name.removeprefix('num_')}" if name.startswith("num_") else f"{name} {value}"


def _mean(gains: Sequence[timing.Comparison | None]) -> str:
    ratios = [gain.ratio for gain in gains if gain is not None]
    if not ratios:
        return "-"
    product = 1.0
    for ratio in ratios:
        product *= ratio
    return f"{product ** (1 / len(ratios)):.2f} x"
