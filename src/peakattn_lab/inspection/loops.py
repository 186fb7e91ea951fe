"""The hot loops of a kernel: instructions of each kind, and tensor-core work against what the algorithm needs.

Everything is read from the machine code.  What cannot be read from it, such as the work of a product whose shape stands
in a descriptor, is said to be not derivable.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peakattn.backends import cubin
from peakattn.backends.contract import Artifacts
from peakattn.problem import AttentionProblem
from peakattn_lab.inspection import ptx

Table = tuple[str, list[str], list[list[str]]]  # title, header, rows

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
ALL_KINDS = (*_KINDS, "other")
_KIND_OF = {opcode: kind for kind, opcodes in _KINDS.items() for opcode in opcodes.split()}

# mma.sync has m, n and k in digits without a separator; m is always 16, n always 8.
_WARP_PRODUCT = re.compile(r"HMMA\.168(\d+)\.")
_WARPGROUP_PRODUCT = re.compile(r"HGMMA\.(\d+)x(\d+)x(\d+)\.")
_SPARSE = ".SP"


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
        found = Counter(kind_of(i.head) for i in self.instructions)
        return {kind: found[kind] for kind in ALL_KINDS if found[kind]}

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


def kind_of(head: str) -> str:
    """The kind of an opcode without suffixes; "other" for one that no table has."""
    return _KIND_OF.get(head, "other")


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


def products_of(function: str, problem: AttentionProblem) -> tuple[str, int] | None:
    """(prefix of its knobs, head dims that its products multiply for each pair), or None for a function without products."""
    d, dv = problem.head_dim, problem.head_dim_v
    if problem.direction == "fwd":
        return "", d + dv
    if "dkdv" in function:  # s; dp and dk; dv
        return "dkdv_", d + (dv + d) * problem.needs_dk + dv * problem.needs_dv
    if "dq" in function:  # s, dp, dq
        return "dq_", d + dv + d
    return None


def needed_flops(function: str, problem: AttentionProblem, config: Any) -> tuple[int, int] | None:
    """(FLOPs that the algorithm needs for one tile, warps that share the tile), or None for a function without products.

    A tile is ``block_m`` query rows by ``block_n`` keys.  Warp-specialised consumers each have a loop and rows of their own.
    """
    knobs = dataclasses.asdict(config)
    products = products_of(function, problem)
    if products is None:
        return None
    prefix, dims = products
    try:
        tile = knobs[f"{prefix}block_m"] * knobs[f"{prefix}block_n"]
        consumers = getattr(config, "num_consumers", None)
        warps = 4 if consumers else knobs.get(f"{prefix}num_warps") or knobs["num_threads"] // 32
    except KeyError:
        return None
    return 2 * tile * dims // (consumers or 1), warps


def work_of(loop: Loop, facts: Artifacts, problem: AttentionProblem, config: Any) -> Work:
    """Tensor-core FLOPs that one pass over a loop executes, against those that its tile needs."""
    products = [i for i in loop.instructions if kind_of(i.head) == "tensor core"]
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
    in_ptx = len(ptx.PRODUCT.findall(facts.ptx or ""))
    if in_sass != in_ptx:
        return Work(None, needed, f"the machine code has {in_sass} products and the PTX {in_ptx}: a pass may be several tiles")
    executed = warps * sum(f for f in flops if f is not None)
    if executed < needed:
        return Work(None, needed, "a pass has fewer products than its tile needs, so it is a part of the tile or another loop")
    return Work(executed, needed)


def products_table(loops: Sequence[tuple[str, Loop]]) -> Table:
    """Tensor-core instructions of hot loops, named by their function: those with the same ones in one row."""
    numbers: dict[tuple[str, str], list[str]] = {}
    for n, (name, loop) in enumerate(loops, 1):
        counts = Counter(i.opcode for i in loop.instructions if kind_of(i.head) == "tensor core")
        numbers.setdefault((name, ", ".join(f"{count} {opcode}" for opcode, count in counts.items())), []).append(str(n))
    rows = [[", ".join(which), name, products] for (name, products), which in numbers.items()]
    return "tensor-core instructions a tile", ["loop", "function", "instructions of one warp"], rows


def loop_listing(loops: Sequence[Loop], number: int) -> str:
    """The machine code of loop ``number``, counted from 1 as in the table."""
    if not 1 <= number <= len(loops):
        raise ValueError(f"loop is {number}; " + (f"allowed are 1 to {len(loops)}." if loops else "there is no hot loop."))
    return loops[number - 1].listing


def kinds_of(loops: Sequence[Loop]) -> list[str]:
    return [kind for kind in ALL_KINDS if any(kind in loop.kinds for loop in loops)]
