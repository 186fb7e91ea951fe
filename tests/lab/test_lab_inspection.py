"""Inspection on listings that can be checked by eye, occupancies that are known, and two kernels compiled for real."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import peakattn
from peakattn import dispatch
from peakattn.backends import KERNELS, cubin, load
from peakattn.backends.contract import Artifacts
from peakattn.device import KNOWN, Device
from peakattn_lab import cli, inspection, problems

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


def test_a_loop_for_rare_rows_is_no_part_of_the_tile():
    lines = ["HGMMA.64x64x16.F32.BF16 R24", "HMMA.16816.F32.BF16 R4", "@P0 BRA 0x10", "FFMA R5", "@P1 BRA 0x0"]
    sass = "Function : k\n" + "\n".join(f"        /*{16 * n:04x}*/                   {text} ;" for n, text in enumerate(lines))
    (loop,) = inspection.hot_loops(sass)
    assert [i.head for i in loop.instructions] == ["HGMMA", "FFMA", "BRA"]
    (alone,) = inspection.hot_loops(sass.replace("HGMMA.64x64x16", "FADD"))
    assert [i.head for i in alone.instructions] == ["HMMA", "BRA"]


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
        (made(64), Tile(64, 64), "fewer products than its tile needs"),
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
    with pytest.raises(ValueError, match="there is no file"):
        inspection.binaries.read(tmp_path / "nothing.cubin")
    with pytest.raises(ValueError, match="there is no ptxas nope; here are"):
        inspection.tools.ptxas_of("nope")


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


@pytest.mark.parametrize("kernel", [k for k in KERNELS if not k.startswith("cpu.")])
def test_every_kernel_can_be_inspected_and_wastes_nothing(kernel):
    backend = kernel.split(".")[0]
    if (reason := dispatch.unavailable(backend)) is not None:
        pytest.skip(reason)
    problem = inspection.make_problem(kernel)
    arch = next(arch for arch in (90, 80, 100) if load(kernel).reject(problem, Device.for_arch(arch)) is None)
    found = inspection.inspect(kernel, problem, arch)
    ratios = [w.ratio for f in found.functions for w in f.work]
    assert ratios
    assert set(ratios) <= {1.0, None}
    assert 1.0 in ratios or all(f.facts.ptx is None for f in found.functions)  # without PTX nothing tells what was unrolled
    layouts = inspection.layouts.of(found)
    assert bool(layouts) == (backend == "triton")
    assert inspection.notes(found) + inspection.layouts.notes(layouts, kernel)


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
@pytest.mark.parametrize(
    ("config", "ratio", "warps", "copies"),
    [
        # Four warps side by side on 16 x 16 scores: twice the first product, once the second.
        ('{"block_m": 16, "block_n": 16, "num_warps": 4}', 1.5, (1, 4), [2, 1]),
        # Eight warps of 16 rows stacked on 64 rows: twice both.
        ('{"block_m": 64, "block_n": 32, "num_warps": 8}', 2.0, (8, 1), [2, 2]),
        ('{"block_m": 64, "block_n": 32, "num_warps": 4}', 1.0, (4, 1), [1, 1]),
    ],
)
def test_layouts_explain_the_waste_of_too_many_warps(config, ratio, warps, copies):
    """What a published study of a Triton kernel found on Ada with hardware counters stands in the machine code already."""
    found = inspection.inspect("triton.fwd", inspection.make_problem("triton.fwd", head_dim=64), 89, config)
    (function,) = found.functions
    assert [w.ratio for w in function.work] == [ratio] * len(function.loops)
    (layouts,) = inspection.layouts.of(found)
    for loop in layouts.loops:
        assert [p.copies for p in loop.products] == copies
        assert {p.warps for p in loop.products} == {warps}
    said = " ".join(inspection.layouts.notes([layouts], "triton.fwd"))
    assert ("is computed 2 times" in said) == (ratio > 1)
    assert ("spread over 4 warps" in said) == (warps == (1, 4))
    assert ("from registers through shared memory" in said) == (warps == (1, 4))
    assert f"{json.loads(config)['block_m']}x64 bf16" in {shape for _, shape, _ in layouts.buffers}
    titles = [title for title, _, _ in inspection.layouts.tables([layouts])]
    assert len(titles) == 3


TTGIR = """
#mma = #ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [2, 2], instrShape = [16, 8]}>
    %k = ttg.local_alloc : () -> !ttg.memdesc<2x32x64xf16, #shared, #smem, mutable> loc(#loc)
    %0 = scf.for %i = %a to %b step %c -> (i32)  : i32 {
      %1 = scf.for %j = %a to %b step %c -> (tensor<32x16xf32, #mma>)  : i32 {
        %2 = ttg.convert_layout %x : tensor<32x16xf16, #mma> -> tensor<32x16xf16, #blocked> loc(#loc)
        %3 = tt.dot %p, %q, %r : tensor<32x64xf16, #a> * tensor<64x16xf16, #b> -> tensor<32x16xf32, #mma> loc(#loc)
        %4 = ttng.warp_group_dot_wait %3 {pendings = 0 : i32} : tensor<32x16xf32, #mma> loc(#loc)
      } loc(#loc)
      %5 = ttg.local_load %k : !ttg.memdesc<32x64xf16, #shared, #smem> -> tensor<32x64xf16, #blocked> loc(#loc)
    } loc(#loc)
"""


def test_only_the_innermost_loop_of_ttgir_is_hot():
    found = inspection.layouts.read("kernel", TTGIR)
    (loop,) = found.loops
    (product,) = loop.products
    assert (product.shape, product.warps, product.copies, product.whole_rows) == ((32, 16), (2, 2), 1, False)
    assert loop.operations == {"convert_layout": 1}
    assert found.buffers == (("k", "2x32x64 f16", 2 * 32 * 64 * 2),)
    assert "spread over 2 warps" in inspection.layouts.notes([found], "triton.fwd")[0]
    assert "only Triton's compiler" in inspection.layouts.notes([], "cuda.fwd")[0]


PTX = """
$L__BB0_1:
	.loc	1 7 3
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};
$L__BB0_2:
	@%p1 bra 	$L__BB0_2;
	add.s32 	%r1, %r1, 1;
	@%p2 bra 	$L__BB0_1;
	.file	1 "/somewhere/fwd.py"
"""


def test_the_hot_loop_of_ptx():
    (loop,) = inspection.ptx.hot_loops(PTX)
    assert loop.splitlines()[0] == "$L__BB0_1:"
    assert loop.splitlines()[-1] == "\t@%p2 bra \t$L__BB0_1;"
    assert inspection.ptx.loop_listing([loop], 1) == loop
    with pytest.raises(ValueError, match=r"loop is 3 and the PTX has 1 hot loops; allowed are 1 to 1\."):
        inspection.ptx.loop_listing([loop], 3)


def test_lines_are_counted_in_ptx_where_no_assembler_makes_the_same_code(monkeypatch):
    monkeypatch.setattr(inspection.tools, "find", lambda name: ())
    facts = dataclasses.replace(made(2), ptx=PTX)
    function = inspection.Function(facts, inspection.occupancy(32, 128, 0, HOPPER), (), ())
    (found,) = inspection.lines.of_function(function)
    assert found.unit == "PTX"
    assert found.counts == {("/somewhere/fwd.py", 7): {"mma": 1, "bra": 2, "add": 1}}
    _, _, rows = inspection.lines.table("kernel", 1, found)
    assert rows == [["fwd.py:7", "", "4", "100.0%", "2 bra, 1 mma, 1 add"]]
    with pytest.raises(ValueError, match="has no line information"):
        inspection.lines.of_function(dataclasses.replace(function, facts=made(2)))


def test_lines_of_a_kernel_that_another_checkout_compiled_are_read_in_this_one(monkeypatch):
    monkeypatch.setattr(inspection.tools, "find", lambda name: ())
    moved = PTX.replace("/somewhere/", "/gone/src/peakattn/backends/triton/")
    facts = dataclasses.replace(made(2), ptx=moved)
    (found,) = inspection.lines.of_function(inspection.Function(facts, inspection.occupancy(32, 128, 0, HOPPER), (), ()))
    ((file, line),) = found.counts
    assert Path(file) == Path(peakattn.__file__).parent / "backends/triton/fwd.py"
    (row,) = inspection.lines.table("kernel", 1, found)[2]
    assert row[1]
    assert Path(file).read_text().splitlines()[line - 1].startswith(row[1].rstrip("…"))


@needs_triton
def test_instructions_are_traced_to_source_lines():
    found = inspection.inspect("triton.fwd", inspection.make_problem("triton.fwd"), 80)
    (function,) = found.functions
    for loop, lines in zip(function.loops, inspection.lines.of_function(function), strict=True):
        assert lines.unit == "SASS"
        assert sum(sum(kinds.values()) for kinds in lines.counts.values()) == len(loop.instructions)
        ((file, line),) = [place for place, kinds in lines.counts.items() if kinds["MUFU"] > 30]
        assert "exp2" in Path(file).read_text().splitlines()[line - 1]
    tables, _ = inspection.lines.tables(found)
    assert any("exp2" in row[1] for row in tables[0][2])


@needs_triton
def test_two_assemblers_on_the_same_ptx():
    found = inspection.inspect("triton.fwd", inspection.make_problem("triton.fwd"), 80)
    own = inspection.tools.ptxas_of("ptxas")
    again = inspection.assembled(found, own)
    assert again.functions[0].facts.opcodes == found.functions[0].facts.opcodes
    assert again.functions[0].work == found.functions[0].work
    (_, header, rows), notes = inspection.against_ptxas(found, own)
    assert rows == []
    assert "make the same registers, spills and opcode counts" in notes[0]
    (_, header, _), _ = inspection.against_ptxas(found, inspection.tools.ptxas_of("ptxas-blackwell"))
    assert header[2].startswith("ptxas 12.")
    assert header[3].startswith("ptxas-blackwell 12.9")
    no_ptx = dataclasses.replace(found.functions[0], facts=dataclasses.replace(found.functions[0].facts, ptx=None))
    with pytest.raises(ValueError, match="has no PTX to assemble again"):
        inspection.assembled(dataclasses.replace(found, functions=(no_ptx,)), own)


@pytest.fixture
def cubin_file(tmp_path):
    from peakattn.backends.triton import toolchain

    problem, fwd = inspection.make_problem("triton.fwd"), load("triton.fwd")
    q, k, v, out = (torch.empty(4, 4096, 16, 128, dtype=torch.bfloat16, device="meta") for _ in range(4))
    config = fwd.default_config(problem, Device.for_arch(80))
    (launch,) = fwd.launches(problem, config, q, k, v, out, None, 1.0, 0.0)
    file = tmp_path / "kernel.cubin"
    file.write_bytes(toolchain.compile_launch(launch, 80).asm["cubin"])
    return file


@needs_triton
def test_the_kernels_of_a_cubin_file(cubin_file, monkeypatch):
    (kernel,) = inspection.binaries.read(cubin_file, "attention")
    (function,) = inspection.inspect("triton.fwd", inspection.make_problem("triton.fwd"), 80).functions
    facts = function.facts
    assert (kernel.name, kernel.arch) == (facts.name, 80)
    assert (kernel.facts.registers, kernel.facts.frame_bytes) == (facts.registers, facts.frame_bytes)
    assert kernel.facts.num_threads == facts.num_threads
    assert kernel.opcodes == facts.opcodes
    assert [loop.listing for loop in kernel.loops] == [loop.listing for loop in function.loops]
    for _, header, rows in inspection.binaries.tables([kernel]):
        assert all(len(row) == len(header) for row in rows)
    with pytest.raises(ValueError, match=r"no kernel of .* is named like 'flash'; it has 1, such as\n  attention_fwd_kernel"):
        inspection.binaries.read(cubin_file, "flash")
    monkeypatch.setattr(inspection.binaries, "_MOST_DISASSEMBLED", 0)
    (undone,) = inspection.binaries.read(cubin_file)
    assert undone.opcodes is None
    assert undone.facts == kernel.facts
    assert "narrow --match to 0 or fewer" in inspection.binaries.notes([undone])[1]
    assert len(inspection.binaries.tables([undone])) == 1
    with pytest.raises(ValueError, match="no regular expression"):
        inspection.binaries.read(cubin_file, "(")


def test_names_of_templates_are_made_readable():
    name = "void cutlass::device_kernel<flash::Fwd<2, cute::tuple<cute::C<1>, cute::C<64> >, cutlass::half_t> >(flash::Params)"
    assert inspection.binaries._plain(name) == "device_kernel<Fwd<2, <1, 64>, half_t>>"


@needs_triton
def test_the_kernels_inside_a_library(cubin_file, tmp_path, monkeypatch):
    # Stands in for the part of cuobjdump that takes cubins out of a library; the rest is the real one.
    program = tmp_path / "cuobjdump"
    real = inspection.tools.one("cuobjdump")
    program.write_text(f'#!/bin/sh\n[ "$1" = -xelf ] && exec cp {cubin_file} lib.sm_80.cubin\nexec {real} "$@"\n')
    program.chmod(0o755)
    library = tmp_path / "library.so"
    library.write_bytes(b"\x7fELF\x02" + bytes(100))
    monkeypatch.setattr(inspection.tools, "one", lambda name: program)
    (kernel,) = inspection.binaries.read(library)
    assert kernel.opcodes
    assert kernel.opcodes["HMMA"] > 0
    program.write_text("#!/bin/sh\necho it has no device code >&2; echo release 13.0, V13.0.1\n")
    with pytest.raises(ValueError, match=r"no machine code of a GPU that cuobjdump 13\.0\.1 finds: it has no device code"):
        inspection.binaries.read(library)


def test_the_disassembler_is_of_the_age_of_the_cubin(monkeypatch):
    versions = {Path("old"): "12.8.1", Path("new"): "13.1.0"}
    monkeypatch.setattr(inspection.tools, "find", lambda name: tuple(versions))
    monkeypatch.setattr(inspection.tools, "version", versions.__getitem__)
    assert inspection.tools.disassembler(b"\x7fELF\x02\x01\x01" + bytes([cubin.OLD_ABI])) == Path("old")
    assert inspection.tools.disassembler(b"\x7fELF\x02\x01\x01" + bytes([cubin.NEW_ABI])) == Path("new")
    monkeypatch.setattr(inspection.tools, "find", lambda name: (Path("old"),))
    assert inspection.tools.disassembler(b"\x7fELF\x02\x01\x01" + bytes([cubin.NEW_ABI])) == Path("old")


@needs_triton
def test_inspect_on_the_command_line(cubin_file):
    options = ["inspect", "triton.fwd", "--arch", "sm_80"]
    said = run(*options)
    assert "products of the hot loops in TTGIR" in said
    assert "HMMA.16816" in run(*options, "--loop", "1")
    assert "mma.sync" in run(*options, "--loop", "1", "--ptx")
    assert ".visible .entry attention_fwd_kernel" in run(*options, "--ptx")
    assert "ptxas-blackwell 12.9" in run(*options, "--against-ptxas", "ptxas-blackwell")
    assert "attention_fwd_kernel" in run("inspect", "--binary", str(cubin_file), "--match", "fwd")
    assert json.loads(run(*options, "--json"))["layouts"][0]["function"] == "attention_fwd_kernel"
    assert "one of the two" in run(*options, "--binary", str(cubin_file), code=2)


def run(*arguments, code=0):
    result = CliRunner().invoke(cli.app, list(arguments))
    assert result.exit_code == code, result.output
    return result.output
