"""One kernel for one problem under one config: compiled for a named architecture with no GPU, and its tables."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from peakattn import backends, dispatch
from peakattn.backends.contract import Artifacts
from peakattn.backends.cubin import TENSOR_CORE_OPCODES
from peakattn.device import Device
from peakattn.problem import AttentionProblem, Direction
from peakattn_lab import problems
from peakattn_lab.inspection.loops import Loop, Table, Work, hot_loops, kinds_of, products_table, work_of
from peakattn_lab.inspection.residency import Occupancy, occupancy, occupancy_rule
from peakattn_lab.records import FunctionFacts
from peakattn_lab.wording import failure


@dataclass(frozen=True)
class Function:
    """One device function, its occupancy, and its hot loops with their work."""

    facts: Artifacts
    occupancy: Occupancy
    loops: tuple[Loop, ...]
    work: tuple[Work, ...]


@dataclass(frozen=True)
class Inspection:
    """A kernel for one problem under one config on one architecture."""

    kernel: str
    problem: AttentionProblem
    config: Any
    device: Device
    functions: tuple[Function, ...]


def make_problem(
    kernel: str,
    *,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    seqlen: int = 4096,
    batch: int = 4,
    heads: int = 16,
    dtype: str = "bfloat16",
    causal: bool = False,
) -> AttentionProblem:
    """The problem of the options, forward or backward as the kernel is."""
    kind = problems.dtype_named(dtype)
    dim_v = head_dim_v or head_dim
    for name, value, most in (("head_dim", head_dim, 256), ("head_dim_v", dim_v, 256), ("seqlen", seqlen, 2**31 - 1)):
        if not 1 <= value <= most:
            raise ValueError(f"{name} is {value}; allowed are 1 to {most}.")
    if min(batch, heads) < 1:
        raise ValueError(f"batch is {batch} and heads is {heads}; allowed are 1 and more.")
    problem = problems.make(
        seqlen, head_dim, batch=batch, heads=heads, causal=causal, dtype=kind, direction=direction_of(kernel)
    )
    return dataclasses.replace(problem, head_dim_v=dim_v)


def inspect(kernel: str, problem: AttentionProblem, arch: int, config: str | None = None) -> Inspection:
    """``config`` is a JSON object of the knobs that differ from the default config; ValueError says what cannot be."""
    device = Device.for_arch(arch)
    backend = _known(kernel).split(".")[0]
    if backend == "cpu":
        raise ValueError(f"{kernel} has no machine code of a GPU to inspect; name a GPU kernel, such as triton.fwd.")
    reason = dispatch.unavailable(backend)
    if reason is not None:
        raise ValueError(f"{kernel} cannot be compiled: {reason}.")
    module = backends.load(kernel)
    reason = module.reject(problem, device)
    if reason is not None:
        raise ValueError(f"{kernel} does not take {problems.label(problem)} on sm_{arch}: {reason}.")
    knobs = configured(module.default_config(problem, device), config)
    try:
        made = backends.toolchain(backend).artifacts(kernel, problem, knobs, arch)
    except Exception as error:  # a compiler fails in its own ways
        raise ValueError(f"{kernel} under {knobs} does not compile ({failure(error)}).") from error
    return Inspection(kernel, problem, knobs, device, tuple(function_of(facts, problem, knobs, device) for facts in made))


def facts_table(found: Inspection) -> Table:
    """One row for each device function."""
    header = ["function", "registers", "frame", "spills", "spills a tile", "smem KiB", "threads", "blocks an SM", "warps an SM"]
    header += ["limited by"]
    rows = [[f.facts.name, *facts_of(f).values()] for f in found.functions]
    return f"{found.kernel} on sm_{found.device.arch}, {problems.label(found.problem)}", header, rows


def loops_table(found: Inspection) -> Table:
    """One row for each hot loop: instructions of each kind, executed tensor-core MFLOP against the algorithm's."""
    loops = [(f.facts.name, loop, work) for f in found.functions for loop, work in zip(f.loops, f.work, strict=True)]
    kinds = kinds_of([loop for _, loop, _ in loops])
    header = ["loop", "function", "instructions a tile", *kinds, "MFLOP a tile", "needed", "ratio"]
    rows = [
        [
            str(n),
            name,
            str(len(loop.instructions)),
            *(str(loop.kinds.get(kind, 0)) for kind in kinds),
            _mega(work.executed),
            _mega(work.needed),
            "-" if work.ratio is None else f"{work.ratio:.2f}",
        ]
        for n, (name, loop, work) in enumerate(loops, 1)
    ]
    return "hot loops, instructions of one warp", header, rows


def tables(found: Inspection) -> list[Table]:
    """Everything about one kernel."""
    loops = [(f.facts.name, loop) for f in found.functions for loop in f.loops]
    return [facts_table(found), *([loops_table(found), products_table(loops)] if loops else [])]


def notes(found: Inspection) -> list[str]:
    """Config, rules and what could not be derived, in sentences."""
    said = [f"config: {json.dumps(dataclasses.asdict(found.config))}", occupancy_rule(found.device)]
    for f in found.functions:
        said += [f"{f.facts.name}: ratio not derivable, {work.reason}." for work in f.work if work.reason]
    if not any(f.loops for f in found.functions):
        said.append("No loop has tensor-core instructions.")
    return list(dict.fromkeys(said))


def all_loops(found: Inspection) -> list[Loop]:
    """The hot loops in the order of the table."""
    return [loop for f in found.functions for loop in f.loops]


def to_dict(found: Inspection) -> dict[str, Any]:
    """JSON values, without the machine code."""
    functions = []
    for f in found.functions:
        facts = {k: v for k, v in dataclasses.asdict(f.facts).items() if k not in ("ptx", "sass", "loops")}
        loops = [
            {"kinds": loop.kinds, "opcodes": dict(loop.counts), **dataclasses.asdict(work), "ratio": work.ratio}
            for loop, work in zip(f.loops, f.work, strict=True)
        ]
        functions.append(facts | {"occupancy": dataclasses.asdict(f.occupancy), "loops": loops})
    return {
        "kernel": found.kernel,
        "arch": found.device.arch,
        "problem": problems.to_dict(found.problem),
        "config": dataclasses.asdict(found.config),
        "functions": functions,
    }


def function_of(facts: Artifacts, problem: AttentionProblem, config: Any, device: Device) -> Function:
    loops = tuple(hot_loops(facts.sass or ""))
    resident = occupancy(facts.registers, facts.num_threads, facts.shared_bytes, device)
    return Function(facts, resident, loops, tuple(work_of(loop, facts, problem, config) for loop in loops))


def recorded(facts: Artifacts, problem: AttentionProblem, config: Any, device: Device) -> FunctionFacts:
    """What records keep of a device function."""
    f = function_of(facts, problem, config, device)
    plain = min(range(len(f.loops)), key=lambda i: len(f.loops[i].instructions), default=None)  # the one without a mask
    products = {name: facts.opcodes[name] for name in TENSOR_CORE_OPCODES if name in facts.opcodes}
    return FunctionFacts(
        name=facts.name,
        registers=facts.registers,
        frame_bytes=facts.frame_bytes,
        shared_bytes=facts.shared_bytes,
        num_threads=facts.num_threads,
        spills=facts.spill_instructions,
        loop_spills=facts.loop_spills,
        tensor_core=sum(products.values()),
        instruction=max(products, key=products.__getitem__, default=None),
        mufu=facts.opcodes.get("MUFU", 0),
        blocks=f.occupancy.blocks,
        limiter=f.occupancy.limiter,
        loop={} if plain is None else f.loops[plain].kinds,
        waste=None if plain is None else f.work[plain].ratio,
    )


def facts_of(f: Function) -> dict[str, str]:
    return {
        "registers": str(f.facts.registers),
        "frame": str(f.facts.frame_bytes),
        "spills": str(f.facts.spill_instructions),
        "spills a tile": str(max((loop.spills for loop in f.loops), default=0)),
        "smem KiB": f"{f.facts.shared_bytes / 1024:.1f}",
        "threads": str(f.facts.num_threads),
        "blocks an SM": str(f.occupancy.blocks),
        "warps an SM": str(f.occupancy.warps),
        "limited by": f.occupancy.limiter,
    }


def configured(default: Any, text: str | None) -> Any:
    """A config with the knobs that a JSON object names changed; ValueError says which there are."""
    if text is None:
        return default
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f'config is {text!r}, which is no JSON ({error}); write it as {{"name": value}}.') from None
    names = [field.name for field in dataclasses.fields(default)]
    if not isinstance(given, dict) or set(given) - set(names):
        raise ValueError(f"config is {text!r}; it is an object of these names: {', '.join(names)}.")
    return dataclasses.replace(default, **given)


def direction_of(kernel: str) -> Direction:
    return "bwd" if _known(kernel).split(".")[1].startswith("bwd") else "fwd"


def _known(kernel: str) -> str:
    if kernel not in backends.KERNELS:
        raise ValueError(f"kernel {kernel!r} is unknown; known are {', '.join(backends.KERNELS)}.")
    return kernel


def _mega(flops: int | None) -> str:
    return "-" if flops is None else f"{flops / 1e6:.3f}"
