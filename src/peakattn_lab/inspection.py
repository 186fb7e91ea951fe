"""What one GPU kernel compiles to, looked at closely and with no GPU: occupancy, hot loops, tensor-core work, differences.

Everything is read from the machine code.  What cannot be read from it, such as the work of a product whose shape stands
in a descriptor, is said to be not derivable.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peakattn import backends, dispatch
from peakattn.backends import cubin
from peakattn.backends.contract import Artifacts
from peakattn.device import Device
from peakattn.problem import AttentionProblem, Direction
from peakattn_lab import problems

Table = tuple[str, list[str], list[list[str]]]  # title, header, rows

# Threads and blocks that an SM holds at once, by architecture (CUDA programming guide, compute capabilities).
_RESIDENT = {80: (2048, 32), 86: (1536, 16), 89: (1536, 24), 90: (2048, 32), 100: (2048, 32), 120: (1536, 24), 121: (1536, 24)}
_REGISTERS = 64 * 1024  # per SM, in four quarters with warps of their own
_QUARTERS = 4
_REGISTER_UNIT = 256  # a warp's registers are handed out in units of this
_SHARED_UNIT = 128
_SHARED_RESERVED = 1024  # the system's part of each block's shared memory
_ELF_MACHINE_CUDA = 190

# Every opcode has one kind; the kinds in the order of a table.
_KINDS = {
    "tensor core": "HMMA HGMMA QGMMA IMMA IGMMA BGMMA DMMA QMMA OMMA UTCHMMA UTCQMMA UTCIMMA UTCOMMA",
    "MUFU": "MUFU",
    "float": "FADD FADD2 FMUL FMUL2 FFMA FFMA2 FMNMX FMNMX3 FSEL FSET FSETP FCHK FSWZADD HADD2 HMUL2 HFMA2 HMNMX2"
    " HSET2 HSETP2 UFADD UFMUL UFFMA UFMNMX UFSEL UFSET UFSETP",
    "integer, address": "IMAD IADD IADD3 IADD32I IABS IDP IMNMX VIMNMX VIMNMX3 VIADD VIADDMNMX VABSDIFF ISETP ISCADD LEA LOP"
    " LOP3 LOP32I SHF SHL SHR SGXT BMSK BREV FLO POPC PRMT SEL MOV MOV32I UMOV R2UR R2P P2R PLOP3 PSETP CS2R CS2UR S2R S2UR"
    " LDC ULDC LDCU LEPC UIADD3 UIMAD ULEA ULOP ULOP3 UPLOP3 USHF USHL USHR USEL UISETP USGXT UBMSK UBREV UFLO UPOPC UPRMT"
    " UP2UR UR2UP UPSETP UVIADD UVIMNMX UVIADDMNMX R2B B2R",
    "conversion": "F2F F2FP F2I F2IP FRND I2F I2FP I2I I2IP UF2F UF2FP UF2I UF2IP UFRND UI2F UI2FP UI2I UI2IP",
    "shuffle, vote": "SHFL VOTE VOTEU MATCH REDUX CREDUX ELECT MOVM",
    "shared memory": "LDS LDSM STS STSM ATOMS STAS REDAS",
    "tensor memory": "LDTM STTM LDT LDTRAM STT UTCCP UTCSHIFT UTCATOMSWS",
    "global memory": "LD LDG LDGSTS ST STG ATOM ATOMG RED REDG CCTL UTMALDG UTMASTG UTMAREDG UTMAPF UTMACCTL UBLKCP UBLKPF"
    " UBLKRED",
    "local memory": "LDL STL",
    "barrier, wait": "BAR SYNCS ARRIVES DEPBAR LDGDEPBAR WARPGROUP WARPGROUPSET WARPSYNC MEMBAR FENCE ERRBAR NANOSLEEP UTCBAR"
    " UTMACMDFLUSH UCGABAR CGAERRBAR ACQBULK ACQSHMINIT ENDCOLLECTIVE PREEXIT USETMAXREG",
    "control": "BRA BRX JMP JMX CALL RET EXIT BSSY BSYNC BREAK BMOV NOP YIELD KILL BPT RPCMOV",
}
_KIND_OF = {opcode: kind for kind, opcodes in _KINDS.items() for opcode in opcodes.split()}

# mma.sync has m, n and k in digits without a separator; m is always 16, n always 8.
_WARP_PRODUCT = re.compile(r"HMMA\.168(\d+)\.")
_WARPGROUP_PRODUCT = re.compile(r"HGMMA\.(\d+)x(\d+)x(\d+)\.")
_SPARSE = ".SP"
_PTX_PRODUCT = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\.")


@dataclass(frozen=True)
class Occupancy:
    """Blocks that an SM holds at once, their warps, and what allows no more of them."""

    blocks: int
    warps: int
    limiter: str


@dataclass(frozen=True)
class Loop:
    """An innermost loop with tensor-core instructions; each pass over it is one tile."""

    instructions: tuple[cubin.Instruction, ...]

    @property
    def counts(self) -> Counter[str]:
        return Counter(i.head for i in self.instructions)

    @property
    def kinds(self) -> dict[str, int]:
        """Instructions of each kind, those that are there, in the order of a table; unknown opcodes as "other"."""
        found = Counter(_KIND_OF.get(i.head, "other") for i in self.instructions)
        return {kind: found[kind] for kind in (*_KINDS, "other") if found[kind]}

    @property
    def spills(self) -> int:
        return self.kinds.get("local memory", 0)

    @property
    def listing(self) -> str:
        return "\n".join(f"/*{i.address:04x}*/  {i.text} ;" for i in self.instructions)


@dataclass(frozen=True)
class Work:
    """Tensor-core FLOPs of one pass over a loop, and what the algorithm needs for its tile; or why they are unknown."""

    executed: int | None
    needed: int | None
    reason: str | None = None

    @property
    def ratio(self) -> float | None:
        """1.00 when nothing is wasted."""
        return self.executed / self.needed if self.executed is not None and self.needed else None


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
    kind = getattr(torch, dtype, None)
    if kind not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"dtype is {dtype!r}; allowed are float16, bfloat16 and float32.")
    dim_v = head_dim_v or head_dim
    for name, value, most in (("head_dim", head_dim, 256), ("head_dim_v", dim_v, 256), ("seqlen", seqlen, 2**31 - 1)):
        if not 1 <= value <= most:
            raise ValueError(f"{name} is {value}; allowed are 1 to {most}.")
    if min(batch, heads) < 1:
        raise ValueError(f"batch is {batch} and heads is {heads}; allowed are 1 and more.")
    problem = problems.make(seqlen, head_dim, batch=batch, heads=heads, causal=causal, dtype=kind, direction=_direction(kernel))
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
    knobs = _configured(module.default_config(problem, device), config)
    try:
        made = backends.toolchain(backend).artifacts(kernel, problem, knobs, arch)
    except Exception as error:  # a compiler fails in its own ways
        lines = [line for line in str(error).splitlines() if line.strip()] or ["no message"]
        said = next((line for line in lines if re.match(r"ptxas\b.*\b(error|fatal)\b", line)), lines[-1])
        raise ValueError(f"{kernel} under {knobs} does not compile ({type(error).__name__}: {said}).") from error
    return Inspection(kernel, problem, knobs, device, tuple(_function(facts, problem, knobs, device) for facts in made))


def counterpart(found: Inspection, against: str) -> Inspection:
    """The other side of a comparison: the same kernel under another config (a JSON object), or another kernel by its id."""
    if against.lstrip().startswith("{"):
        return inspect(found.kernel, found.problem, found.device.arch, against)
    if _direction(against) != found.problem.direction:
        raise ValueError(f"{against} and {found.kernel} compute different directions; compare two forwards or two backwards.")
    return inspect(against, found.problem, found.device.arch)


def occupancy(registers: int, num_threads: int, shared_bytes: int, device: Device) -> Occupancy:
    """How many blocks of a kernel an SM holds, and every resource that allows no more."""
    threads, most_blocks = _resident(device)
    warps = -(-num_threads // 32)
    warp_registers = _up(max(registers, 1) * 32, _REGISTER_UNIT)
    # Warps go to the four quarters in turn, and each quarter has its own registers.
    resident = _REGISTERS // _QUARTERS // warp_registers * _QUARTERS
    limits = {
        "registers": resident // _up(warps, _QUARTERS),
        "shared memory": device.smem_per_sm // _up(shared_bytes + _SHARED_RESERVED, _SHARED_UNIT),
        "threads": threads // (32 * warps),
        "blocks an SM": most_blocks,
    }
    blocks = min(limits.values())
    return Occupancy(blocks, blocks * warps, ", ".join(name for name, limit in limits.items() if limit == blocks))


def occupancy_rule(device: Device) -> str:
    """By what the occupancy of an architecture is computed, in a sentence."""
    threads, blocks = _resident(device)
    return (
        f"An SM of sm_{device.arch} has {_REGISTERS:,} registers in units of {_REGISTER_UNIT} a warp, {threads:,} threads, "
        f"{blocks} blocks, and {device.smem_per_sm // 1024} KiB of shared memory; a block takes 1 KiB more than it asks for."
    )


def hot_loops(sass: str) -> list[Loop]:
    """The innermost loops with tensor-core instructions of a listing."""
    return [Loop(body) for body in cubin.hot_loops(sass)]


def product_flops(opcode: str) -> int | None:
    """FLOPs of one tensor-core instruction for one of the warps that execute it; None when its shape is not in the opcode."""
    if _SPARSE in opcode:
        return None
    match = _WARP_PRODUCT.match(opcode)
    if match:
        return 2 * 16 * 8 * int(match[1])
    match = _WARPGROUP_PRODUCT.match(opcode)
    if match:
        m, n, k = (int(size) for size in match.groups())
        return 2 * m * n * k // 4  # a warpgroup is four warps
    return None


def needed_flops(function: str, problem: AttentionProblem, config: Any) -> tuple[int, int] | None:
    """(FLOPs that the algorithm needs for one tile, warps that share the tile), or None for a function without products.

    A tile is ``block_m`` query rows by ``block_n`` keys.  Warp-specialised consumers each have a loop and rows of their own.
    """
    d, dv = problem.head_dim, problem.head_dim_v
    knobs = dataclasses.asdict(config)
    if problem.direction == "fwd":
        prefix, dims = "", d + dv
    elif "dkdv" in function:  # s; dp and dk; dv
        prefix, dims = "dkdv_", d + (dv + d) * problem.needs_dk + dv * problem.needs_dv
    elif "dq" in function:  # s, dp, dq
        prefix, dims = "dq_", d + dv + d
    else:
        return None
    try:
        tile = knobs[f"{prefix}block_m"] * knobs[f"{prefix}block_n"]
        consumers = knobs.get("num_consumers")
        warps = 4 if consumers else knobs[f"{prefix}num_warps"]
    except KeyError:
        return None
    return 2 * tile * dims // (consumers or 1), warps


def work_of(loop: Loop, facts: Artifacts, problem: AttentionProblem, config: Any) -> Work:
    """Tensor-core FLOPs that one pass over a loop executes, against those that its tile needs."""
    products = [i for i in loop.instructions if _KIND_OF.get(i.head) == "tensor core"]
    flops = [product_flops(i.opcode) for i in products]
    tile = needed_flops(facts.name, problem, config)
    if tile is None:
        return Work(None, None, "the config does not say which tile a pass computes")
    needed, warps = tile
    if None in flops:
        opcode = products[flops.index(None)].opcode
        return Work(None, needed, f"the shape of {opcode} is not in its opcode")
    if any(i.text.startswith("@") for i in products):
        return Work(None, needed, "some products are predicated")
    if not hasattr(config, "num_consumers") and facts.num_threads != 32 * warps:
        return Work(None, needed, f"{facts.num_threads // 32} warps are launched where the config has {warps}")
    # A loop that ptxas unrolled would compute several tiles a pass, and look like waste.
    in_sass = sum(facts.opcodes.get(opcode, 0) for opcode in _KINDS["tensor core"].split())
    in_ptx = len(_PTX_PRODUCT.findall(facts.ptx or ""))
    if in_sass != in_ptx:
        return Work(None, needed, f"the machine code has {in_sass} products and the PTX {in_ptx}: a pass may be several tiles")
    return Work(warps * sum(f for f in flops if f is not None), needed)


def facts_table(found: Inspection) -> Table:
    """One row for each device function."""
    header = ["function", "registers", "frame", "spills", "spills a tile", "smem KiB", "threads", "blocks an SM", "warps an SM"]
    header += ["limited by"]
    rows = [[f.facts.name, *_facts(f).values()] for f in found.functions]
    return f"{found.kernel} on sm_{found.device.arch}, {problems.label(found.problem)}", header, rows


def loops_table(found: Inspection) -> Table:
    """One row for each hot loop: instructions of each kind, executed tensor-core MFLOP against the algorithm's."""
    loops = [(f.facts.name, loop, work) for f in found.functions for loop, work in zip(f.loops, f.work, strict=True)]
    kinds = _kinds_of([loop for _, loop, _ in loops])
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


def products_table(loops: Sequence[tuple[str, Loop]]) -> Table:
    """Tensor-core instructions of hot loops, named by their function: those with the same ones in one row."""
    numbers: dict[tuple[str, str], list[str]] = {}
    for n, (name, loop) in enumerate(loops, 1):
        counts = Counter(i.opcode for i in loop.instructions if _KIND_OF.get(i.head) == "tensor core")
        numbers.setdefault((name, ", ".join(f"{count} {opcode}" for opcode, count in counts.items())), []).append(str(n))
    rows = [[", ".join(which), name, products] for (name, products), which in numbers.items()]
    return "tensor-core instructions a tile", ["loop", "function", "instructions of one warp"], rows


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


def loop_listing(loops: Sequence[Loop], number: int) -> str:
    """The machine code of loop ``number``, counted from 1 as in the table."""
    if not 1 <= number <= len(loops):
        raise ValueError(f"loop is {number}; " + (f"allowed are 1 to {len(loops)}." if loops else "there is no hot loop."))
    return loops[number - 1].listing


def all_loops(found: Inspection) -> list[Loop]:
    """The hot loops in the order of the table."""
    return [loop for f in found.functions for loop in f.loops]


def difference_table(a: Inspection, b: Inspection) -> Table:
    """What differs between two kernels or configs: knobs, facts, loops, opcode counts, side by side."""
    names = [one.kernel if a.kernel != b.kernel else side for one, side in ((a, "config"), (b, "against"))]
    if a.device != b.device:
        names = [f"{name} sm_{one.device.arch}" for name, one in zip(names, (a, b), strict=True)]
    knobs = [{k: json.dumps(v) for k, v in dataclasses.asdict(one.config).items()} for one in (a, b)]
    rows = _changes("config", *knobs)
    for first, second in itertools.zip_longest(a.functions, b.functions):
        name = (first or second).facts.name
        if first and second and first.facts.name != second.facts.name:
            name = f"{first.facts.name} / {second.facts.name}"
        for side in (_facts, _loop_facts, _opcode_facts):
            rows += _changes(name, *(side(f) if f else {} for f in (first, second)))
    return f"differences on {problems.label(a.problem)}", ["", "what", *names, "difference"], rows


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


@dataclass(frozen=True)
class CubinKernel:
    """A kernel of a cubin that somebody else compiled."""

    name: str
    facts: cubin.Facts
    opcodes: dict[str, int]
    loops: tuple[Loop, ...]


def read_cubin(path: Path, cuobjdump: Path | None = None) -> list[CubinKernel]:
    """The kernels of a cubin file; by default Triton's cuobjdump disassembles it."""
    binary = path.read_bytes()
    if binary[:4] != b"\x7fELF" or int.from_bytes(binary[18:20], "little") != _ELF_MACHINE_CUDA:
        raise ValueError(f"{path} is no cubin; take the cubins out of a library with: cuobjdump -xelf all {path}")
    made = []
    for part in cubin.disassemble(binary, cuobjdump or _triton_cuobjdump()).split("Function :")[1:]:
        name = part.split(maxsplit=1)[0]
        made.append(CubinKernel(name, cubin.facts(binary, name), cubin.count_opcodes(part), tuple(hot_loops(part))))
    return made


def cubin_tables(kernels: Sequence[CubinKernel]) -> list[Table]:
    """Facts and opcode counts of each kernel of a cubin, and its hot loops."""
    header = ["kernel", "registers", "frame", "spills", "instructions", "opcodes"]
    rows = [
        [
            k.name,
            str(k.facts.registers),
            str(k.facts.frame_bytes),
            str(k.opcodes.get("LDL", 0) + k.opcodes.get("STL", 0)),
            str(sum(k.opcodes.values())),
            ", ".join(f"{count} {name}" for name, count in sorted(k.opcodes.items(), key=lambda item: (-item[1], item[0]))),
        ]
        for k in kernels
    ]
    loops = [(k.name, loop) for k in kernels for loop in k.loops]
    kinds = _kinds_of([loop for _, loop in loops])
    loop_rows = [
        [str(n), name, str(len(loop.instructions)), *(str(loop.kinds.get(kind, 0)) for kind in kinds)]
        for n, (name, loop) in enumerate(loops, 1)
    ]
    made = [("kernels", header, rows)]
    if loops:
        made.append(("hot loops, instructions of one warp", ["loop", "kernel", "instructions a tile", *kinds], loop_rows))
        made.append(products_table(loops))
    return made


def _function(facts: Artifacts, problem: AttentionProblem, config: Any, device: Device) -> Function:
    loops = tuple(hot_loops(facts.sass or ""))
    resident = occupancy(facts.registers, facts.num_threads, facts.shared_bytes, device)
    return Function(facts, resident, loops, tuple(work_of(loop, facts, problem, config) for loop in loops))


def _facts(f: Function) -> dict[str, str]:
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


def _loop_facts(f: Function) -> dict[str, str]:
    made = {}
    for n, (loop, work) in enumerate(zip(f.loops, f.work, strict=True), 1):
        made[f"loop {n}: instructions"] = str(len(loop.instructions))
        made |= {f"loop {n}: {kind}": str(loop.kinds.get(kind, 0)) for kind in (*_KINDS, "other")}
        made[f"loop {n}: ratio"] = "not derivable" if work.ratio is None else f"{work.ratio:.2f}"
    return made


def _opcode_facts(f: Function) -> dict[str, str]:
    return {f"opcode {name}": str(count) for name, count in sorted(f.facts.opcodes.items())}


def _changes(where: str, a: dict[str, str], b: dict[str, str]) -> list[list[str]]:
    """Rows of what is not the same; an opcode that one side lacks is there 0 times."""
    rows = []
    for what in dict.fromkeys((*a, *b)):
        missing = "0" if what.startswith("opcode ") else "-"
        before, after = a.get(what, missing), b.get(what, missing)
        if before != after:
            numbers = all(re.fullmatch(r"\d+(\.\d+)?", text) for text in (before, after))
            rows.append([where, what, before, after, f"{float(after) - float(before):+g}" if numbers else ""])
    return rows


def _configured(default: Any, text: str | None) -> Any:
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


def _direction(kernel: str) -> Direction:
    return "bwd" if _known(kernel).split(".")[1].startswith("bwd") else "fwd"


def _known(kernel: str) -> str:
    if kernel not in backends.KERNELS:
        raise ValueError(f"kernel {kernel!r} is unknown; known are {', '.join(backends.KERNELS)}.")
    return kernel


def _resident(device: Device) -> tuple[int, int]:
    try:
        return _RESIDENT[device.arch]
    except KeyError:
        known = ", ".join(f"sm_{arch}" for arch in _RESIDENT)
        raise ValueError(f"the occupancy rules of sm_{device.arch} are unknown; known are those of {known}.") from None


def _kinds_of(loops: Sequence[Loop]) -> list[str]:
    return [kind for kind in (*_KINDS, "other") if any(kind in loop.kinds for loop in loops)]


def _mega(flops: int | None) -> str:
    return "-" if flops is None else f"{flops / 1e6:.3f}"


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _triton_cuobjdump() -> Path:
    reason = dispatch.unavailable("triton")
    if reason is not None:
        raise ValueError(f"the disassembler comes with Triton: {reason}.")
    import triton

    return Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
