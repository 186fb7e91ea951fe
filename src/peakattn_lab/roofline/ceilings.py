"""What a GPU can do at most: figures of documents, and ceilings that were measured on the GPU itself.

A figure of a document is a roof: no kernel passes it.  A measured ceiling is what a simple program reached, so it says
what can be had in practice, and a good kernel may pass it by a little: power and clocks drift.

    bfloat16, float16, tf32, float32   TFLOP/s of torch's product of two 8192 x 8192 matrices
    memory                             TB/s of a copy much larger than the L2 cache, reads and writes
    l2                                 TB/s of reads that the L2 cache answers, past the L1 caches
    exp                                Tex2/s: 10^12 ex2 instructions a second
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic
import torch

from peakattn.device import KNOWN, Device
from peakattn_lab import observe, provenance, records, timing

UNITS = dict.fromkeys(("bfloat16", "float16", "tf32", "float32"), "TFLOP/s") | {
    "memory": "TB/s",
    "l2": "TB/s",
    "exp": "Tex2/s",
}

# "Results per clock and SM" of the CUDA C++ Programming Guide, for every GPU in FACTS; 16.0 was measured on an H200.
EX2_PER_CLOCK_PER_SM = 16
# 32 banks of 4 bytes: "Shared Memory" of the same guide.
SHARED_BYTES_PER_CLOCK_PER_SM = 128


@dataclass(frozen=True)
class Facts:
    """What Device does not say of a GPU, None where no figure with a source is known."""

    max_sm_mhz: float
    tf32_tflops: float  # dense
    fma_tflops: float  # float32 outside the tensor cores
    l2_bytes_per_clock: float | None = None  # NVIDIA has published none since the A100


# A100: "NVIDIA A100 Tensor Core GPU Architecture" (white paper), the tables of peak rates and of the L2 cache.
# H100, H200: NVIDIA's datasheets, without sparsity; the clock is the highest that the H100's driver reports, and the
# highest that was observed on an H200.
FACTS: dict[str, Facts] = {
    KNOWN["a100"].name: Facts(1410, 156, 19.5, 5120),
    KNOWN["h100"].name: Facts(1980, 494.7, 66.9),
    KNOWN["h200"].name: Facts(1980, 494.7, 66.9),
}


class CeilingRecord(pydantic.BaseModel):
    """One run of ``measure``: rates of each ceiling in its unit, raw, in order."""

    schema_version: int = records.SCHEMA
    provenance: provenance.Provenance
    ceilings: dict[str, list[float]]
    observed: dict[str, dict[str, Any]] = {}


@dataclass(frozen=True)
class Ceiling:
    """A measured rate: the median and an interval that holds it, in its unit, and where the figure is from."""

    rate: float
    low: float
    high: float
    source: str


def of_device(device: Device, rows: Iterable[CeilingRecord] = ()) -> dict[str, Ceiling]:
    """The measured ceilings of a device: those of the last record of it, where there is none those that are known here."""
    mine = [row for row in rows if row.provenance.device == device.name]
    if not mine:
        return dict(_MEASURED.get(device.name, {}))
    row = mine[-1]
    source = row.provenance.time[:10] + (f", driver {row.provenance.driver}" if row.provenance.driver else "")
    return {
        name: Ceiling(statistics.median(rates), *timing.interval(rates), source)
        for name, rates in row.ceilings.items()
        if rates
    }


_RUN = "2026-11-29, driver 580.159"
_MEASURED: dict[str, dict[str, Ceiling]] = {
    KNOWN["h200"].name: {"bfloat16": Ceiling(770, 740, 800, _RUN), "memory": Ceiling(4.24, 4.24, 4.24, _RUN)}
}


def read(path: Path) -> list[CeilingRecord]:
    """The records of a file that ``peakattn roofline --measure`` wrote; none where there is no file."""
    return records.read_as(CeilingRecord, path)


@dataclass(frozen=True)
class Workload:
    """One ceiling's program, and how much of its unit one call is: 10^12 FLOPs, bytes or ex2."""

    call: Callable[[], Any]
    amount: float


def measure(
    device: torch.device,
    seconds: float = 2.0,
    *,
    commit: str | None = None,
    on_ceiling: Callable[[str], None] = lambda name: None,
) -> CeilingRecord:
    """Measure every ceiling of the GPU at hand, ``seconds`` for each, one after the other so that each has settled clocks."""
    if device.type != "cuda":
        raise ValueError(f"device is {device}; ceilings are measured on a CUDA device.")
    facts = Device.of(device)
    found: dict[str, list[float]] = {}
    observed: dict[str, dict[str, Any]] = {}
    observer = observe.of_cuda(torch.cuda.current_device() if device.index is None else device.index)
    for name, make in _programs(device, facts).items():
        on_ceiling(name)
        work = make()
        sampler = _event_sampler(work.call)
        samples = timing.interleave({name: sampler}, seconds, finish=torch.cuda.synchronize, on_round=observer.read)
        found[name] = rates(work, samples[name])
        observed[name] = observer.summary()
    return CeilingRecord(provenance=provenance.here(facts.name, facts.arch, commit), ceilings=found, observed=observed)


def rates(work: Workload, seconds: Iterable[float]) -> list[float]:
    """Rates of a workload in its unit, of the seconds that its calls took."""
    return [float(f"{work.amount / s:.6g}") for s in seconds]


def table(found: dict[str, Ceiling], device: Device) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of text: measured ceilings beside the documents' figures."""
    roofs = documented(device)
    body = []
    for name in UNITS:
        roof, ceiling = roofs.get(name), found.get(name)
        if roof is None and ceiling is None:
            continue
        body.append(
            [
                name,
                UNITS[name],
                f"{roof:.4g}" if roof else "",
                f"{ceiling.rate:.4g} [{ceiling.low:.4g}, {ceiling.high:.4g}]" if ceiling else "",
                f"{ceiling.rate / roof:.0%}" if ceiling and roof else "",
                ceiling.source if ceiling else "",
            ]
        )
    return ["ceiling", "unit", "documented", "measured", "of it", "when"], body


def documented(device: Device, mhz: float = 0.0) -> dict[str, float]:
    """The documents' figures by ceiling, in its unit; ``mhz`` is the SM clock where the highest is not wanted."""
    facts = FACTS.get(device.name)
    found = {"bfloat16": device.peak_tflops, "float16": device.peak_tflops, "memory": device.peak_gbps / 1e3}
    if facts is not None:
        mhz = mhz or facts.max_sm_mhz
        found |= {"tf32": facts.tf32_tflops, "float32": facts.fma_tflops}
        found["l2"] = (facts.l2_bytes_per_clock or 0.0) * mhz / 1e6
    found["exp"] = device.num_sms * EX2_PER_CLOCK_PER_SM * mhz / 1e6
    return {name: rate for name, rate in found.items() if rate}


# The programs.

_MATMUL = 8192
_READ_BLOCK = 4096  # elements of 4 bytes
_EXP_BLOCK = 1024


def _programs(device: torch.device, facts: Device) -> dict[str, Callable[[], Workload]]:
    return {
        "bfloat16": functools.partial(_matmul, device, torch.bfloat16),
        "float16": functools.partial(_matmul, device, torch.float16),
        "tf32": functools.partial(_matmul, device, torch.float32, "high"),
        "float32": functools.partial(_matmul, device, torch.float32, "highest"),
        "memory": functools.partial(_copy, device, facts),
        "l2": functools.partial(_l2_reads, device, facts),
        "exp": functools.partial(_exps, device, facts),
    }


def _matmul(device: torch.device, dtype: torch.dtype, precision: str = "highest", n: int = _MATMUL) -> Workload:
    generator = torch.Generator(device=device).manual_seed(0)
    a, b = (torch.randn(n, n, device=device, dtype=dtype, generator=generator) for _ in range(2))
    out = torch.empty(n, n, device=device, dtype=dtype)

    def call() -> None:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            torch.mm(a, b, out=out)
        finally:
            torch.set_float32_matmul_precision(before)

    return Workload(call, 2.0 * n**3 / 1e12)


def _copy(device: torch.device, facts: Device) -> Workload:
    source = torch.ones(max(16 * facts.l2_bytes, 1 << 28), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return Workload(functools.partial(target.copy_, source), 2.0 * source.numel() / 1e12)


def _l2_reads(device: torch.device, facts: Device) -> Workload:
    """A quarter of the cache, read by four blocks on each SM, all there at once, each from a place of its own on."""
    from peakattn_lab.roofline import ceiling_kernels

    blocks = max(facts.l2_bytes // 4 // (4 * _READ_BLOCK), 1)
    programs = 4 * facts.num_sms
    source = torch.ones(blocks * _READ_BLOCK, device=device)
    sums = torch.empty(programs, device=device)
    launch = ceiling_kernels.read_kernel[(programs,)]
    call = functools.partial(launch, source, sums, blocks, blocks, BLOCK=_READ_BLOCK, num_warps=8)
    return Workload(call, 4.0 * programs * blocks * _READ_BLOCK / 1e12)


def _exps(device: torch.device, facts: Device, rounds: int = 4096) -> Workload:
    from peakattn_lab.roofline import ceiling_kernels

    programs = 16 * facts.num_sms
    sums = torch.empty(programs * _EXP_BLOCK, device=device)
    launch = ceiling_kernels.exp2_kernel[(programs,)]
    call = functools.partial(launch, sums, rounds, BLOCK=_EXP_BLOCK, num_warps=4)
    return Workload(call, float(programs * rounds * _EXP_BLOCK) / 1e12)


def _event_sampler(call: Callable[[], Any], span: float = 20e-3) -> timing.Sampler:
    """Device time between two events around as many calls as take ``span`` seconds: launch gaps do not count."""
    call()  # compiles, allocates
    once = _elapsed(call, 1)()
    repeats = max(1, min(200, round(span / max(once, 1e-6))))
    return functools.partial(_elapsed, call, repeats)


def _elapsed(call: Callable[[], Any], repeats: int) -> Callable[[], float]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()

    def seconds() -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / repeats

    return seconds
