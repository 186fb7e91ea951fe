"""Inspection on listings that can be checked by eye, occupancies that are known, and two kernels compiled for real."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from peakattn import dispatch
from peakattn.backends import cubin, load
from peakattn.backends.contract import Artifacts
from peakattn.device import KNOWN, Device
from peakattn_lab import inspection, problems

HOPPER = Device.for_arch(90)

LISTING = """
\t\tFunction : attention_fwd_kernel
        /*0000*/                   LDC R1, c[0x0][0x28] ;                   /* 0x00000a00ff017b82 */
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;   /* 0x01e00000041879f0 */
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4].tnspB, R24 ;   /* 0x01e00000041879f0 */
        /*0030*/                   MUFU.EX2 R5, R5 ;                        /* 0x0000000500057308 */
        /*0040*/              @!P0 STL [R1], R2 ;                           /* 0x00000002010079a6 */
        /*0050*/                   F2FP.BF16.F32.PACK_AB R5, R5, R6 ;       /* 0x0000000605057308 */
        /*0060*/                   FFMA R5, R5, R6, R7 ;                    /* 0x0000000605057308 */
        /*0070*/                   UIADD3 UR4, UR4, 0x2, URZ ;              /* 0x0000000605057308 */
        /*0080*/                   LDSM.16.M88.4 R4, [R5] ;                 /* 0x0000000605057308 */
        /*0090*/                   UTMALDG.4D [UR8], [UR4], desc[UR6] ;     /* 0x0000000605057308 */
        /*00a0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;   /* 0x00000003ff0075a7 */
        /*00b0*/                   FROB R5 ;                                /* 0x00000003ff0075a7 */
        /*00c0*/             @UP0 BRA 0x20 ;                                /* 0xfffffffc00f00947 */
        /*00d0*/                   EXIT ;                                   /* 0x000000000000794d */
        /*00e0*/              @!P0 BRA 0x10 ;                               /* 0xfffffffc00f08947 */
"""


def test_a_hot_loop_is_grouped_by_kind_and_printed():
    (loop,) = inspection.hot_loops(LISTING)
    assert loop.kinds == {
        "tensor core": 1, "MUFU": 1, "float": 1, "integer, address": 1, "conversion": 1, "shared memory": 1,
        "global memory": 1, "local memory": 1, "barrier, wait": 1, "control": 1, "other": 1,
    }  # fmt: skip
    assert loop.spills == 1
    assert [dict(loop.counts)] == cubin.tensor_loops(LISTING)
    lines = inspection.loop_listing([loop], 1).splitlines()
    assert len(lines) == 11
    assert lines[0] == "/*0020*/  HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4].tnspB, R24 ;"
    with pytest.raises(ValueError, match=r"loop is 2; allowed are 1 to 1\."):
        inspection.loop_listing([loop], 2)


@pytest.mark.parametrize(
    ("opcode", "flops"),
    [
        ("HGMMA.64x128x16.F32.BF16", 2 * 64 * 128 * 16 // 4),
        ("HGMMA.64x8x8.F32.TF32", 2 * 64 * 8 * 8 // 4),
        ("HMMA.16816.F32.BF16", 2 * 16 * 8 * 16),
        ("HMMA.1688.F32.TF32", 2 * 16 * 8 * 8),
        ("HMMA.SP.16832.F32.BF16", None),
        ("UTCHMMA.2CTA", None),
        ("IMMA.16832.S8.S8", None),
    ],
)
def test_the_shape_of_a_product_stands_in_its_opcode_or_is_not_guessed(opcode, flops):
    assert inspection.product_flops(opcode) == flops


@dataclasses.dataclass(frozen=True)
class Tile:
    block_m: int
    block_n: int
    num_warps: int = 4


@dataclasses.dataclass(frozen=True)
class Consumers:
    block_m: int
    block_n: int
    num_consumers: int


@dataclasses.dataclass(frozen=True)
class BackwardTiles:
    dkdv_block_m: int
    dkdv_block_n: int
    dq_block_m: int
    dq_block_n: int
    dkdv_num_warps: int = 4
    dq_num_warps: int = 4


def made(products: int, *, threads: int = 128, in_ptx: int | None = None, opcode: str = "HMMA.16816.F32.BF16") -> Artifacts:
    lines = [f"        /*{16 * i:04x}*/                   {opcode} R4, R8, R12, R4 ;" for i in range(products)]
    sass = "\n".join(["Function : attention_fwd_kernel", *lines, f"        /*{16 * products:04x}*/  @P0 BRA 0x0 ;\n"])
    ptx = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 x;\n" * (products if in_ptx is None else in_ptx)
    return Artifacts("attention_fwd_kernel", 80, 128, 0, 0, threads, cubin.count_opcodes(sass), ptx=ptx, sass=sass)


def work(facts, problem, config):
    (loop,) = inspection.hot_loops(facts.sass)
    return inspection.work_of(loop, facts, problem, config)


def test_executed_products_against_needed_ones():
    # 64 x 64 x (128 + 128) by four warps is 128 instructions of 16 x 8 x 16 each.
    problem = problems.make(4096, 128)
    assert work(made(128), problem, Tile(64, 64)).ratio == 1.0
    # The same instructions for head_dim 80, which is padded to 128, and by twice the warps, which repeat each other's work.
    assert work(made(128), problems.make(4096, 80), Tile(64, 64)).ratio == 1.6
    assert work(made(128, threads=256), problem, Tile(64, 64, num_warps=8)).ratio == 2.0
    # A consumer warpgroup computes its own 64 of 128 rows, and the launch has a producer too.
    assert work(made(128, threads=384), problem, Consumers(128, 64, 2)).ratio == 1.0


@pytest.mark.parametrize(
    ("facts", "config", "reason"),
    [
        (made(128, in_ptx=64), Tile(64, 64), "a pass may be several tiles"),
        (made(128, threads=384), Tile(64, 64), "12 warps are launched where the config has 4"),
        (made(128, opcode="UTCHMMA"), Tile(64, 64), "the shape of UTCHMMA is not in its opcode"),
        (made(128, opcode="@P1 HMMA.16816.F32.BF16"), Tile(64, 64), "predicated"),
        (made(128), HOPPER, "the config does not say"),
    ],
)
def test_what_cannot_be_derived_is_said(facts, config, reason):
    found = work(facts, problems.make(4096, 128), config)
    assert found.ratio is None
    assert reason in found.reason


def test_products_of_the_backward():
    problem, config = problems.make(4096, 128, direction="bwd"), BackwardTiles(64, 64, 128, 32)
    product = 2 * 64 * 64 * 128
    assert inspection.needed_flops("attention_bwd_dkdv_kernel", problem, config) == (4 * product, 4)
    assert inspection.needed_flops("attention_bwd_dq_kernel", problem, config) == (3 * product, 4)
    assert inspection.needed_flops("attention_bwd_rows_kernel", problem, config) is None
    only_dv = dataclasses.replace(problem, needs_dk=False)
    assert inspection.needed_flops("attention_bwd_dkdv_kernel", only_dv, config) == (2 * product, 4)


@pytest.mark.parametrize(
    ("registers", "threads", "kib", "arch", "expected"),
    [
        (168, 384, 0, 90, (1, 12, "registers")),
        (32, 128, 64, 90, (3, 12, "shared memory")),
        (32, 1024, 0, 90, (2, 64, "registers, threads")),
        (16, 1024, 0, 86, (1, 32, "threads")),
        (8, 32, 0, 90, (32, 32, "blocks an SM")),
        (16, 32, 0, 90, (32, 32, "registers, blocks an SM")),  # one warp takes the registers of four
        (16, 32, 0, 86, (16, 16, "blocks an SM")),
        (33, 128, 0, 80, (12, 48, "registers")),  # as many registers as 40
        (255, 128, 56, 80, (2, 8, "registers, shared memory")),
        (255, 512, 0, 90, (0, 0, "registers")),
    ],
)
def test_known_occupancies(registers, threads, kib, arch, expected):
    found = inspection.occupancy(registers, threads, 1024 * kib, Device.for_arch(arch))
    assert dataclasses.astuple(found) == expected


@pytest.mark.parametrize("name", KNOWN)
def test_every_known_gpu_has_its_rules(name):
    assert "65,536 registers" in inspection.occupancy_rule(KNOWN[name])


def test_what_cannot_be_inspected_is_refused_in_a_sentence(tmp_path):
    problem = inspection.make_problem("triton.fwd")
    with pytest.raises(ValueError, match=r"kernel 'triton\.nope' is unknown; known are "):
        inspection.make_problem("triton.nope")
    with pytest.raises(ValueError, match=r"head_dim is 300; allowed are 1 to 256\."):
        inspection.make_problem("triton.fwd", head_dim=300)
    with pytest.raises(ValueError, match=r"dtype is 'int8'; allowed are"):
        inspection.make_problem("triton.fwd", dtype="int8")
    with pytest.raises(ValueError, match=r"cpu\.\w+ has no machine code of a GPU"):
        inspection.inspect("cpu.fwd", problem, 90)
    library = tmp_path / "library.so"
    library.write_bytes(b"\x7fELF\x02" + bytes(100))
    with pytest.raises(ValueError, match="is no cubin; take the cubins out"):
        inspection.read_cubin(library)


needs_triton = pytest.mark.skipif(dispatch.unavailable("triton") is not None, reason="compiles with Triton")


@needs_triton
@pytest.mark.parametrize(("kernel", "arch", "product"), [("triton.fwd", 90, "HGMMA"), ("triton.fwd", 80, "HMMA")])
def test_a_compiled_forward_wastes_no_product_at_head_dim_128(kernel, arch, product):
    found = inspection.inspect(kernel, inspection.make_problem(kernel), arch)
    (function,) = found.functions
    assert [dict(loop.counts) for loop in function.loops] == function.facts.loops
    assert [w.ratio for w in function.work] == [1.0] * len(function.loops)
    assert function.work
    assert function.occupancy.blocks >= 1
    assert all("other" not in loop.kinds for loop in function.loops)
    for _, header, rows in inspection.tables(found):
        assert rows
        assert all(len(row) == len(header) for row in rows)
    assert product in inspection.loop_listing(inspection.all_loops(found), 1)
    assert inspection.to_dict(found)["functions"][0]["loops"][0]["ratio"] == 1.0


@needs_triton
def test_warps_that_repeat_each_others_products_are_seen():
    # Eight warps share 16 x 32 scores in tiles of 16 x 8, so that half of them compute what others have.
    problem = inspection.make_problem("triton.fwd")
    (function,) = inspection.inspect("triton.fwd", problem, 80, '{"block_m": 16, "block_n": 32, "num_warps": 8}').functions
    assert [w.ratio for w in function.work] == [1.5] * len(function.loops)


@needs_triton
def test_two_configs_side_by_side():
    problem = inspection.make_problem("triton.fwd")
    a = inspection.inspect("triton.fwd", problem, 80)
    b = inspection.counterpart(a, '{"block_n": 32}')
    _, header, rows = inspection.difference_table(a, b)
    assert header == ["", "what", "config", "against", "difference"]
    assert rows[0] == ["config", "block_n", "64", "32", "-32"]
    assert ["attention_fwd_kernel", "loop 1: tensor core", "128", "64", "-64"] in rows
    assert all(row[2] != row[3] for row in rows)
    assert inspection.difference_table(a, a)[2] == []
    with pytest.raises(ValueError, match="it is an object of these names: block_m, block_n"):
        inspection.counterpart(a, '{"blocks": 3}')
    with pytest.raises(ValueError, match="which is no JSON"):
        inspection.inspect("triton.fwd", problem, 80, "{")
    with pytest.raises(ValueError, match="different directions"):
        inspection.counterpart(a, "triton.bwd")


@needs_triton
def test_the_kernels_of_a_cubin_file(tmp_path):
    from peakattn.backends.triton import toolchain

    problem, fwd = inspection.make_problem("triton.fwd"), load("triton.fwd")
    q, k, v, out = (torch.empty(4, 4096, 16, 128, dtype=torch.bfloat16, device="meta") for _ in range(4))
    config = fwd.default_config(problem, Device.for_arch(80))
    (launch,) = fwd.launches(problem, config, q, k, v, out, None, 1.0, 0.0)
    file = tmp_path / "kernel.cubin"
    file.write_bytes(toolchain.compile_launch(launch, 80).asm["cubin"])
    (kernel,) = inspection.read_cubin(file)
    (function,) = inspection.inspect("triton.fwd", problem, 80).functions
    assert (kernel.name, kernel.facts.registers) == (function.facts.name, function.facts.registers)
    assert kernel.opcodes == function.facts.opcodes
    assert [loop.listing for loop in kernel.loops] == [loop.listing for loop in function.loops]
    (_, _, rows), *_ = inspection.cubin_tables([kernel])
    assert rows[0][0] == "attention_fwd_kernel"
