"""Tuned configs: what was measured to be fastest, per GPU and shape class, with its evidence.

One JSON file per GPU, ``tuned/<device slug>.json``::

    {"schema": 1, "device": "NVIDIA H200", "entries": [
        {"kernel": "triton.fwd", "key": {"direction": "fwd", "head_dim": 128, ...}, "config": {...}, "evidence": {...}}]}

``key`` holds fields of ``AttentionProblem.key()``; a field left out matches anything.  Sequence lengths are buckets
and match the nearest one within a factor of four.  ``evidence`` says what it beat,
where, when and with which compiler; an entry without it is not shipped.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from peakattn.device import Device
from peakattn.problem import AttentionProblem

SCHEMA = 1
_LENGTHS = ("seqlen_q", "seqlen_k")
_MAX_OCTAVES = 2


@dataclass(frozen=True)
class Entry:
    """One tuned winner."""

    kernel: str
    key: dict[str, Any]
    config: dict[str, Any]
    evidence: dict[str, Any] = field(default_factory=dict)

    def distance(self, key: dict[str, Any]) -> float | None:
        """How far a problem's key is from this entry: None when it does not match, else octaves of length."""
        if any(key[name] != value for name, value in self.key.items() if name not in _LENGTHS):
            return None
        octaves = [abs(math.log2(max(key[n], 1) / max(self.key[n], 1))) for n in _LENGTHS if n in self.key]
        return None if any(o > _MAX_OCTAVES for o in octaves) else sum(octaves)


@functools.cache
def entries(slug: str) -> tuple[Entry, ...]:
    """The shipped entries of a GPU; none when it has no file."""
    file = resources.files("peakattn").joinpath("tuned").joinpath(f"{slug}.json")
    if not file.is_file():
        return ()
    return parse(file.read_text(encoding="utf-8"), f"tuned/{slug}.json")


def parse(text: str, name: str) -> tuple[Entry, ...]:
    """Entries of a tuned file's text, or ValueError in a sentence that names the file and the entry."""
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise ValueError(f"{name} has schema {data['schema']}; this version reads schema {SCHEMA}.")
        found = tuple(Entry(e["kernel"], e["key"], e["config"], e["evidence"]) for e in data["entries"])
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{name} is not a tuned-config file: {error!r}.") from error
    for number, entry in enumerate(found):
        if not entry.evidence:
            raise ValueError(f"{name}, entry {number} ({entry.kernel}) has no evidence; say what it beat, where and when.")
    return found


@functools.lru_cache(maxsize=4096)
def lookup(device: Device, problem: AttentionProblem, kernel: str | None = None) -> Entry | None:
    """The entry nearest to the problem on this GPU, of ``kernel`` or of any; fewer wildcards win among equals."""
    key = problem.key()
    best: tuple[float, int, Entry] | None = None
    for entry in entries(device.slug):
        if kernel is not None and entry.kernel != kernel:
            continue
        distance = entry.distance(key)
        if distance is None:
            continue
        rank = (distance, -len(entry.key), entry)
        if best is None or rank[:2] < best[:2]:
            best = rank
    return None if best is None else best[2]
