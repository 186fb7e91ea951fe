"""peakattn tune --cost: what tuning costs a program, call by call, each program in a fresh process.

A program calls attention on four lengths without a mask and then on the first with a causal one: five shape classes.
It runs untuned, and inside ``peakattn.autotune(configs=n)``

cold     with an empty compiler cache and an empty store
warm     with the compiler cache that the cold run left, and an empty store
second   with both as the cold run left them: what every later process pays

Run as a module, this file is that program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LENGTHS = {"cuda": (4096, 2048, 1024, 512), "cpu": (512, 256, 128, 64)}
_REPEATS = 3  # of programs that differ by milliseconds; the fastest counts
_GOAL = 0.050  # seconds by which a tuned program's second process may start later than an untuned one's
_TIMEOUT = 600


@dataclass(frozen=True)
class Cost:
    """One program: seconds of each of its calls, and how much of them went into compiling and timing configs."""

    configs: int  # 0: untuned
    state: str  # cold, warm or second
    calls: tuple[float, ...]
    compile_seconds: float
    timing_seconds: float


def total(counts: Sequence[int]) -> int:
    """How many states ``study`` goes through."""
    return 2 + 3 * len(counts)


def study(
    counts: Sequence[int],
    device: str,
    *,
    on_step: Callable[[str], None] = lambda what: None,
    program: Callable[[int, str, Path, str], dict[str, Any]] | None = None,
) -> Iterator[Cost]:
    """The cost of every state, as it is measured. ``program(configs, device, cache, store)`` runs one process."""
    program = program or _program
    for configs in (0, *counts):
        with tempfile.TemporaryDirectory() as folder:
            cache, kept = Path(folder) / "cache", str(Path(folder) / "store")
            for state in ("cold", "warm", "second") if configs else ("cold", "warm"):
                on_step(f"{configs or 'no'} configs, {state}")
                store = "off" if not configs else str(Path(folder) / "another") if state == "warm" else kept
                again = state == "second" or (not configs and state == "warm")
                ran = [program(configs, device, cache, store) for _ in range(_REPEATS if again else 1)]
                best = min(ran, key=lambda found: found["calls"][0])
                yield Cost(configs, state, tuple(best["calls"]), best["compile_seconds"], best["timing_seconds"])


def table(costs: Sequence[Cost]) -> tuple[list[str], list[list[str]]]:
    """(header, rows): a row for each program."""
    header = ["configs", "state", "first call", "next lengths", "causal", "all calls", "compiling", "timing", "compile each"]
    rows = []
    for c in costs:
        seconds = [c.calls[0], sum(c.calls[1:-1]), c.calls[-1], sum(c.calls), c.compile_seconds, c.timing_seconds]
        each = [f"{c.compile_seconds / c.configs / len(c.calls):.3f}"] if c.configs and c.compile_seconds else [""]
        rows.append([str(c.configs or "untuned"), c.state, *(f"{s:.3f}" for s in seconds), *each])
    return header, rows


def notes(costs: Sequence[Cost]) -> list[str]:
    """What the second process of a tuned program pays more than an untuned one, against the goal."""
    untuned = next((c for c in costs if not c.configs and c.state == "warm"), None)
    if untuned is None:
        return []
    said = []
    for c in costs:
        if c.state == "second":
            more = c.calls[0] - untuned.calls[0]
            verdict = "within" if more <= _GOAL else "beyond"
            said.append(
                f"{c.configs} configs: the first call of a second process takes {more * 1e3:+.0f} ms against an untuned one, "
                f"{verdict} the {_GOAL * 1e3:.0f} ms that it may"
            )
    return said


def _program(configs: int, device: str, cache: Path, store: str) -> dict[str, Any]:
    caches = {"TRITON_CACHE_DIR": str(cache / "triton"), "PEAKATTN_CACHE_DIR": str(cache / "peakattn")}
    environment = {**os.environ, **caches, "PEAKATTN_STORE": store}
    command = [sys.executable, "-m", "peakattn_lab.tune.cost", str(configs), device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT)
    if done.returncode:
        raise RuntimeError(f"the program with {configs} configs failed: {(done.stderr.splitlines() or ['no message'])[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(configs: int, device: str) -> dict[str, Any]:
    """The program: seconds of its five calls, and what tuning says it cost."""
    import contextlib

    import torch

    import peakattn

    where = torch.device(device)
    lengths = _LENGTHS[where.type]
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    synchronize = torch.cuda.synchronize if where.type == "cuda" else lambda: None
    inputs = [torch.randn(4, lengths[0], 8, 64, dtype=dtype, device=where) for _ in range(3)]
    synchronize()
    calls = []
    with peakattn.autotune(configs) if configs else contextlib.nullcontext() as report:
        for length, causal in (*((length, False) for length in lengths), (lengths[0], True)):
            q, k, v = (x[:, :length].contiguous() for x in inputs)
            synchronize()
            began = time.perf_counter()
            peakattn.attention(q, k, v, causal=causal)
            synchronize()
            calls.append(time.perf_counter() - began)
    rows = [row for rows, _ in report.tunings for row in rows] if report is not None else []
    return {
        "calls": calls,
        "compile_seconds": sum(row.compile_seconds for row in rows),
        "timing_seconds": sum(row.timing_seconds for row in rows),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(int(sys.argv[1]), sys.argv[2])) + "\n")
