"""The user's store for people: shown as a table, merged from another machine, exported as shipped configs, forgotten."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from peakattn import race, store, tuned
from peakattn.device import Device
from peakattn_lab.wording import knobs


def matching(words: Sequence[str] = (), slug: str | None = None) -> list[tuple[Path, store.Tuning | ValueError]]:
    """Files of the store whose path below it has all the words, of one device or of all."""
    return [
        (path, found)
        for path, found in store.read_all()
        if slug in (None, path.parent.name) and all(word in (path.parent.name, *path.stem.split("-")) for word in words)
    ]


def table(files: Iterable[tuple[Path, store.Tuning | ValueError]]) -> tuple[list[str], list[list[str]]]:
    """(header, rows): the winner of each shape class, what it gains, and whether it still counts."""
    header = ["device", "shape class", "kernel", "config", "over the default", "configs", "measured", "state"]
    rows = []
    for path, found in files:
        device, shape = path.parent.name, path.stem.rpartition("-")[0]
        if isinstance(found, ValueError):
            rows.append([device, shape, "", "", "", "", "", str(found)])
            continue
        best, ignored = found.winner({row.kernel for row in found.measured})
        if best is None or best.speedup is None:
            reason = next(iter(ignored.values()), found.measured[0].reason or "nothing was timed")
            rows.append([device, shape, "", "", "", str(len(found.measured)), found.measured[0].time[:10], reason])
            continue
        timed = [row for row in found.measured if row.speedup is not None]
        tied = race.is_tied([row.speedup for row in timed if row.speedup is not None], timed.index(best))
        state = "the default stands" if best == found.measured[0] else "tied with others" if tied else "separated"
        over = "{:.3f} [{:.3f}, {:.3f}]".format(*best.speedup)
        rows.append([device, shape, best.kernel, knobs(best.config), over, str(len(found.measured)), best.time[:10], state])
    return header, rows


def details(tuning: store.Tuning) -> tuple[list[str], list[list[str]]]:
    """(header, rows): everything that was measured for one shape class, in the order that decides ties."""
    header = ["kernel", "config", "us", "over the default", "rounds", "timed by", "compile s", "timing s", "note"]
    rows = []
    for row in tuning.measured:
        over = "{:.3f} [{:.3f}, {:.3f}]".format(*row.speedup) if row.speedup else ""
        cost = [f"{row.compile_seconds:.2f}", f"{row.timing_seconds:.2f}"]
        us = "" if row.us is None else f"{row.us:.1f}"
        rows.append([row.kernel, knobs(row.config), us, over, str(row.rounds), row.mode, *cost, row.stale() or row.reason])
    return header, rows


def merge(source: Path) -> list[str]:
    """Take in a file of another store, or all of one, and say what became of each.

    Of two measurements of one config the later one counts, when both were held against the same anchor. Otherwise the
    file whose anchor still counts is kept, and of two such files the later one.
    """
    paths = sorted(source.glob("*/*.json")) if source.is_dir() else [source]
    if not any(path.is_file() for path in paths):
        raise ValueError(f"{source} is neither a file nor a folder of a store; peakattn tune --show says where yours is.")
    said = []
    for path in paths:
        theirs = store.parse(path.read_text(encoding="utf-8"), str(path))
        device = Device(type="cpu" if theirs.device == "cpu" else "cuda", name=theirs.device)
        ours = store.read(device, theirs.key)
        merged, how = _merged(ours, theirs)
        if merged is not ours:
            store.save(device.slug, merged)
        said.append(f"{device.slug}/{path.name}: {how}")
    return said


def _merged(ours: store.Tuning | None, theirs: store.Tuning) -> tuple[store.Tuning, str]:
    if ours is None:
        return theirs, f"new, {len(theirs.measured)} configs"
    a, b = ours.measured[0], theirs.measured[0]
    if (a.name, a.kernel_hash, a.compiler) == (b.name, b.kernel_hash, b.compiler):
        rows = {row.name: row for row in ours.measured}
        later = [row for row in theirs.measured if row.name not in rows or row.time > rows[row.name].time]
        if not later:
            return ours, "nothing new in it"
        rows.update((row.name, row) for row in later)
        return store.Tuning(ours.device, ours.key, tuple(rows.values())), f"{len(later)} configs taken"
    if (a.stale() is None) != (b.stale() is None):
        stale = b.stale() or a.stale()
        return (ours, f"not taken: {stale}") if a.stale() is None else (theirs, f"taken for ours, because {stale}")
    if a.time >= b.time:
        return ours, "not taken: it was held against another default, and ours is later"
    return theirs, "taken for ours, which was held against another default earlier"


def export(path: Path, device: Device) -> list[str]:
    """Write the winners of a device into a tuned-config file, next to the entries it has; what was left out, and why.

    An entry of the same kernel and shape class is replaced.
    """
    entries: list[dict[str, Any]] = []
    if path.is_file():
        tuned.parse(path.read_text(encoding="utf-8"), str(path))
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["device"] != device.name:
            raise ValueError(f"{path} is of {data['device']}, and what is to be exported is of {device.name}.")
        entries = data["entries"]
    said, taken = [], 0
    for file, found in matching(slug=device.slug):
        reason = "" if isinstance(found, store.Tuning) else str(found)
        entry = None
        if isinstance(found, store.Tuning):
            entry, reason = _entry(found)
        if entry is None:
            said.append(f"{file.stem}: left out, {reason}")
            continue
        entries = [e for e in entries if (e["kernel"], e["key"]) != (entry["kernel"], entry["key"])] + [entry]
        taken += 1
    if not taken:
        return [*said, f"nothing to export for {device.name}: no winner in the store is surely faster than the default."]
    text = json.dumps({"schema": tuned.SCHEMA, "device": device.name, "entries": entries}, indent=1) + "\n"
    tuned.parse(text, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return [*said, f"{taken} of {len(entries)} entries written to {path}"]


def _entry(found: store.Tuning) -> tuple[dict[str, Any] | None, str]:
    """A shipped entry with its evidence, or why there is none."""
    best, ignored = found.winner({row.kernel for row in found.measured})
    if best is None or best.speedup is None:
        return None, next(iter(ignored.values()), "nothing was timed")
    anchor = found.measured[0]
    if best == anchor:
        return None, "the default stands"
    if not best.record:
        return None, "its winner was timed inside a call and has no record; run peakattn tune on this shape"
    median, low, high = best.speedup
    over = f"{anchor.kernel} ({knobs(anchor.config)})"
    evidence = {
        "date": best.time[:10],
        "tflops": best.tflops,
        "beat": f"{over} by {median:.3f} [{low:.3f}, {high:.3f}], of {len(found.measured)} configs",
        "problem": best.problem,
        "record": best.record,
        "kernel_hash": best.kernel_hash,
        "compiler": best.compiler,
    }
    return {"kernel": best.kernel, "key": found.key, "config": best.config, "evidence": evidence}, ""


def forget(files: Iterable[tuple[Path, store.Tuning | ValueError]], stale_only: bool) -> list[Path]:
    """Remove files of the store, all that are given or those that no longer count."""
    gone = []
    for path, found in files:
        if not stale_only or isinstance(found, ValueError) or found.measured[0].stale() is not None:
            path.unlink(missing_ok=True)
            gone.append(path)
    return gone
