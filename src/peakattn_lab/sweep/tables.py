"""What a sweep found, in words and tables: what became of each config, and the fastest."""

from __future__ import annotations

from collections.abc import Sequence

from peakattn_lab import problems
from peakattn_lab.records import SweepRecord
from peakattn_lab.sweep import predict
from peakattn_lab.wording import knobs


def summary_table(rows: Sequence[SweepRecord]) -> tuple[list[str], list[list[str]]]:
    """(header, rows): what became of the configs of each problem, and how many are in the predicted winner set."""
    order = ("ok", "compiled", "pruned", "uncompiled", "wrong", "failed", "crashed", "hung")
    groups = predict.by_problem(rows)
    present = [s for s in order if any(r.status == s for members in groups.values() for r in members)]
    body = [
        [
            problems.label(problems.from_dict(members[0].problem)),
            *(str(sum(r.status == s for r in members)) for s in present),
            str(sum(r.spills > 0 for r in members)),
            str(len(predict.winner_set(members))),
        ]
        for members in groups.values()
    ]
    return ["problem", *present, "spilling", "predicted winners"], body


def winners_table(rows: Sequence[SweepRecord], count: int = 3) -> tuple[list[str], list[list[str]]]:
    """(header, rows): the fastest configs of each problem, by time where there is one, else as predicted."""
    header = ["problem", "config", "us", "TFLOP/s", "against best", "registers", "spills", "smem KiB", "blocks an SM"]
    header += ["limited by", "predicted us"]
    body = []
    for members in predict.by_problem(rows).values():
        times = [(row, us) for row in fastest(members) if (us := time_of(row)) is not None]
        for row, us in times[:count]:
            problem = problems.from_dict(row.problem)
            body.append(
                [
                    problems.label(problem),
                    knobs(row.config),
                    f"{us:.1f}" if row.speed_known else "-",
                    f"{problem.flops / us / 1e6:.0f}" if row.speed_known else "-",
                    f"{us / times[0][1] - 1:+.1%}",
                    _each(row, "registers"),
                    _each(row, "spills"),
                    " + ".join(f"{f.shared_bytes / 1024:.1f}" for f in row.functions),
                    _each(row, "blocks"),
                    " + ".join(f.limiter for f in row.functions),
                    "-" if row.predicted_us is None else f"{row.predicted_us:.1f}",
                ]
            )
    return header, body


def fastest(rows: Sequence[SweepRecord]) -> list[SweepRecord]:
    """Rows of one problem by time; where any was timed only timed ones, else by prediction."""
    timed = [r for r in rows if r.speed_known] or [r for r in rows if r.status == "compiled" and r.predicted_us is not None]
    return sorted(timed, key=lambda r: time_of(r) or 0.0)


def time_of(row: SweepRecord) -> float | None:
    """The median, else the prediction of a row that was not timed; microseconds."""
    return row.median_us if row.speed_known else row.predicted_us if row.status == "compiled" else None


def reasons(rows: Sequence[SweepRecord]) -> list[str]:
    """Every way in which configs were lost, with how often and an example; what never ended or crashed comes by name."""
    counts: dict[tuple[str, str], list[SweepRecord]] = {}
    for members in predict.by_problem(rows).values():
        for row in members:
            if row.reason is not None:
                counts.setdefault((row.status, "".join(c for c in row.reason if not c.isdigit())), []).append(row)
    return [
        f"{len(found)} {status}, such as {knobs(found[0].config)}: {found[0].reason}" for (status, _), found in counts.items()
    ]


def _each(row: SweepRecord, name: str) -> str:
    return " + ".join(str(getattr(f, name)) for f in row.functions)
