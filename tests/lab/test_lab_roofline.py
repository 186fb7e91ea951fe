"""Rooflines: the roofs by hand, points above them, recomputing backwards, measured ceilings, predictions, the picture."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from matplotlib import image

from lab.records_of import PROBLEM, record
from peakattn.device import CPU, KNOWN, Device
from peakattn_lab import problems, provenance, records, timing
from peakattn_lab.roofline import ceilings
from peakattn_lab.roofline import picture as roofplot
from peakattn_lab.roofline import roofs as roofline

H200 = Device.named("h200")
BACKWARD = problems.make(4096, 128, batch=4, heads=16, direction="bwd")


def us_at(tflops, problem=PROBLEM):
    return problem.flops / tflops / 1e6


def test_roofs_by_hand():
    (point,) = roofline.of_problems([PROBLEM], H200).points
    # K, Q, V and out once each; 4 x 4096 x 128 FLOPs for each row of q.
    assert point.intensity == pytest.approx(4096 / 2)
    assert point.roofs["tensor"] == 989
    assert point.roofs["memory"] == pytest.approx(4096 / 2 * 4.8)
    assert point.roofs["exp"] == pytest.approx(132 * 16 * 1980e6 * 4 * 128 / 1e12)
    assert point.bound == "tensor"


@pytest.mark.parametrize(
    ("problem", "bound"),
    [
        (problems.make(16, 64, heads=4), "memory"),
        (problems.make(16384, 32, heads=4), "exp"),
        (problems.make((1, 8192), 128, batch=64, heads=(8, 8)), "memory"),
        (problems.make(8192, 128, heads=(32, 1), causal=True), "tensor"),
    ],
)
def test_what_binds(problem, bound):
    assert roofline.of_problems([problem], H200).points[0].bound == bound


def test_the_mask_and_grouped_heads_are_in_the_counts():
    full, causal, grouped = roofline.of_problems(
        [problems.make(4096, 128, heads=h, causal=c) for h, c in ((8, False), (8, True), ((8, 1), True))], H200
    ).points
    assert causal.intensity == pytest.approx(full.intensity / 2, rel=1e-3)
    assert grouped.intensity == pytest.approx(causal.intensity * 4 / (2 + 2 / 8))
    assert full.roofs["exp"] == pytest.approx(causal.roofs["exp"])


def test_float32_is_what_full_accuracy_costs():
    problem = problems.make(4096, 64, dtype=torch.float32)
    found = roofline.of_problems([problem], H200)
    assert found.points[0].roofs["tensor"] == pytest.approx(494.7 / 3)
    assert any("tensor, tf32: 494.7 TFLOP/s" in note for note in found.notes())
    # Ours multiplies without tensor cores; how a rival does is not known, so that one product is its roof.
    rows = [record("peakattn", us_at(40, problem), problem, kernel="triton.fwd"), record("sdpa", us_at(200, problem), problem)]
    ours, rival = roofline.of_records(rows).points
    assert (ours.bound, ours.roofs["fma"], "tensor" in ours.roofs) == ("fma", 66.9, False)
    assert rival.roofs["tensor"] == 494.7
    unknown = roofline.of_problems([problem], Device.named("b200"))
    assert "tensor" not in unknown.points[0].roofs
    assert "no roof is known for exp of float32, tensor of float32 on NVIDIA B200" in unknown.notes()[-1]


def test_a_device_without_a_known_clock_has_no_exp_roof():
    (point,) = roofline.of_problems([PROBLEM], Device.named("b200")).points
    assert set(point.roofs) == {"tensor", "memory"}
    assert set(ceilings.FACTS) <= {device.name for device in KNOWN.values()}


def test_wgmma_reads_shared_memory_once_for_64_rows():
    (point,) = roofline.of_problems([PROBLEM], H200).points
    # A row of 128 keys is 256 bytes, for 64 queries times 2 x 128 FLOPs.
    assert point.roofs["shared"] == pytest.approx(132 * 128 * 1980e6 * 64 / 1e12)
    assert "shared" not in roofline.of_problems([PROBLEM], Device.named("a100")).points[0].roofs


def on(name, row):
    """The row as if that device had made it."""
    return row.model_copy(update={"provenance": row.provenance.model_copy(update={"device": KNOWN[name].name})})


def test_the_l2_roof_follows_the_tile_in_the_record():
    wide, narrow = (
        roofline.of_records([on("a100", record("peakattn", us_at(200), config={"block_m": rows, "block_n": 64}))])
        .points[0]
        .roofs["l2"]
        for rows in (128, 64)
    )
    # Each of 32 blocks of 128 queries reads them once, and K and V of 256 bytes a key.
    moved = 4 * 16 * (4096 * 256 + 32 * 4096 * 512)
    assert wide == pytest.approx(5120 * 1410e6 * PROBLEM.flops / moved / 1e12)
    assert wide == pytest.approx(2 * narrow, rel=0.02)
    causal = problems.make(4096, 128, batch=4, heads=16, causal=True)
    row = on("a100", record("peakattn", us_at(200, causal), causal, config={"block_m": 128, "block_n": 64}))
    assert roofline.of_records([row]).points[0].roofs["l2"] == pytest.approx(wide, rel=0.05)
    assert "l2" not in roofline.of_records([on("a100", record("fa2", us_at(200)))]).points[0].roofs
    # One query of a long cache has no second tile: K and V are read once, however large the tile.
    decode = problems.make((1, 8192), 128, batch=64)
    found = roofline.of_records(
        [on("a100", record("peakattn", us_at(0.1, decode), decode, config={"block_m": 64, "block_n": 64}))]
    )
    assert found.points[0].roofs["l2"] == pytest.approx(5120 * 1410e6 * decode.flops / decode.bytes / 1e12, rel=1e-3)


def test_a_backward_reads_both_operands_again_in_each_device_function():
    config = {"dkdv_block_m": 64, "dkdv_block_n": 64, "dq_block_m": 128, "dq_block_n": 64}
    row = record("peakattn", us_at(100, BACKWARD), BACKWARD, kernel="triton.bwd", config=config)
    (point,) = roofline.of_records([on("a100", row)]).points
    pairs = 4 * 16 * 4096 * 4096
    moved = pairs * (1 / 64 + 1 / 128) * 2 * 256
    assert point.roofs["l2"] == pytest.approx(5120 * 1410e6 * BACKWARD.flops / moved / 1e12, rel=0.05)


def test_the_exp_roof_has_the_highest_observed_clock():
    slow, unknown = (
        roofline.of_records([record("peakattn", us_at(500), observed=seen)]).points[0].roofs["exp"]
        for seen in ({"sm_mhz": [1000, 1400, 1500]}, {})
    )
    assert slow == pytest.approx(unknown * 1500 / 1980)


def test_a_backward_that_recomputes_has_lower_roofs():
    rows = [
        record("peakattn", us_at(400, BACKWARD), BACKWARD, kernel="triton.bwd"),
        record("fa3", us_at(500, BACKWARD), BACKWARD),
    ]
    ours, rival = roofline.of_records(rows).points
    assert rival.roofs["tensor"] == 989
    assert ours.roofs["tensor"] == pytest.approx(989 * 5 / 7)
    assert ours.roofs["exp"] == pytest.approx(rival.roofs["exp"] / 2)
    assert ours.roofs["memory"] == rival.roofs["memory"]
    alone = dataclasses.replace(BACKWARD, needs_dk=False, needs_dv=False)
    (point,) = roofline.of_records([record("peakattn", us_at(400, alone), alone, kernel="triton.bwd")]).points
    assert point.roofs["tensor"] == 989


def test_a_point_above_a_roof_is_an_error_that_names_the_row():
    fine = roofline.of_records([record("peakattn", us_at(700)), record("fa3", us_at(980))])
    assert fine.exit_code() == 0
    assert fine.errors == []
    rows = [record("peakattn", us_at(700)), record("fa3", us_at(1200))]
    above = roofline.of_records(rows)
    assert above.exit_code() == 1
    (error,) = above.errors
    assert error.startswith(f"fa3 on {problems.label(PROBLEM)} (kernel, run {rows[1].provenance.run}): 1200.")
    assert "above its tensor roof of 989.0" in error
    assert above.notes()[0] == error
    assert "ABOVE" in above.table()[1][1]
    # Two passes: 800 TFLOP/s of useful work would be 1120 executed.
    assert roofline.of_records([record("peakattn", us_at(800, BACKWARD), BACKWARD, kernel="triton.bwd")]).exit_code() == 1


@pytest.mark.parametrize("roof", roofline.ROOFS)
def test_a_point_above_any_one_roof_is_an_error(roof):
    f32 = problems.make(4096, 64, heads=4, dtype=torch.float32)
    row, problem = {
        "fma": (record("peakattn", 1.0, f32, kernel="triton.fwd"), f32),
        "l2": (on("a100", record("peakattn", 1.0, config={"block_m": 64, "block_n": 64})), PROBLEM),
    }.get(roof, (record("peakattn", 1.0, input_sets=2), PROBLEM))
    limit = roofline.of_records([row]).points[0].roofs[roof]
    for rate, above in ((0.98 * limit, False), (1.02 * limit, True)):
        again = row.model_copy(update={"samples_us": [us_at(rate, problem)] * 9})
        found = roofline.of_records([again])
        assert any(f"above its {roof} roof" in error for error in found.errors) is above
        assert found.exit_code() == int(bool(found.errors))


def test_inputs_that_stay_in_the_l2_cache_have_no_memory_roof():
    small = problems.make(64, 64, heads=2)
    rows = [record("peakattn", us_at(10, small), small, input_sets=n) for n in (2, 64000)]
    cached, streamed = (roofline.of_records([row]) for row in rows)
    assert "memory" not in cached.points[0].roofs
    assert "memory" in streamed.points[0].roofs
    assert cached.exit_code() == 0


def test_red_gates_and_skipped_rows_have_no_point():
    red = record("fa3", us_at(1e6), gate=records.Gate(passed=False, message="out errs"))
    skipped = record("fa4", 1.0, samples_us=[], gate=None, skipped="needs sm_100")
    found = roofline.of_records([record("peakattn", us_at(500)), red, skipped])
    assert [point.record.contender for point in found.points if point.record] == ["peakattn"]
    assert found.exit_code() == 0
    assert [note.partition(": ")[2] for note in found.left_out] == ["wrong: out errs", "needs sm_100"]


def ceiling_record(device="h200", **rates):
    where = provenance.here(KNOWN[device].name, KNOWN[device].arch)
    return ceilings.CeilingRecord(provenance=where, ceilings={name: list(found) for name, found in rates.items()})


def test_measured_ceilings_stand_beside_the_datasheet():
    found = roofline.of_records([record("peakattn", us_at(900))])
    notes = "\n".join(found.notes())
    assert "989 TFLOP/s of the datasheet, dense; measured 740 to 800" in notes
    assert "4.80 TB/s of the datasheet; measured 4.24" in notes
    assert "points above the measured ceilings: 1" in notes
    assert found.exit_code() == 0  # power decides a measured rate, so a point above it is no error
    header, (line,) = found.table()
    assert line[header.index("of it")] == f"{900 / 770:.0%}"


def test_a_record_of_ceilings_takes_the_place_of_what_was_known():
    rows = [ceiling_record(bfloat16=[700, 710, 720], l2=[5.0, 5.0]), ceiling_record("a100", bfloat16=[250.0])]
    row = record("peakattn", us_at(500), config={"block_m": 128, "block_n": 64})
    (point,) = roofline.of_records([row], measured=rows).points
    assert point.ceilings["tensor"] == 710
    assert "memory" not in point.ceilings  # of the same record or not at all
    assert point.ceilings["l2"] == pytest.approx(5.0 * 128, rel=0.02)
    assert point.attainable == point.ceilings["l2"]
    found = roofline.of_records([row], measured=rows)
    header, (line,) = found.table()
    assert line[header.index("l2")] == f"({point.ceilings['l2']:.0f})"
    assert any(note.startswith("l2: no documented figure; measured 5 TB/s") for note in found.notes())
    assert roofline.of_problems([PROBLEM], Device.named("a100"), rows).points[0].ceilings == {"tensor": 250.0}


def test_ceilings_are_read_back_and_shown_beside_the_documents(tmp_path):
    path = tmp_path / "ceilings.jsonl"
    records.append(path, ceiling_record(bfloat16=[790, 800, 810], l2=[5.5]))
    header, rows = ceilings.table(ceilings.of_device(H200, ceilings.read(path)), H200)
    shown = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert (shown["bfloat16"]["documented"], shown["bfloat16"]["measured"]) == ("989", "800 [790, 810]")
    assert (shown["l2"]["documented"], shown["l2"]["of it"]) == ("", "")
    assert shown["exp"]["documented"] == f"{132 * 16 * 1980e6 / 1e12:.4g}"
    with pytest.raises(ValueError, match="line 1 is measured ceilings, written by peakattn roofline --measure; what is needed"):
        records.read(path)
    assert ceilings.read(tmp_path / "none.jsonl") == []


def test_measuring_needs_a_gpu_and_makes_rates_of_seconds():
    with pytest.raises(ValueError, match="measured on a CUDA device"):
        ceilings.measure(torch.device("cpu"))
    assert ceilings.rates(ceilings.Workload(lambda: None, 1.1), [0.001, 0.002]) == [1100, 550]


def test_each_ceiling_is_measured_with_its_own_program(monkeypatch):
    """The whole of ``measure`` with programs of a CPU: small products and copies, timed by the wall clock."""
    cpu = torch.device("cpu")
    programs = {
        "bfloat16": lambda: ceilings._matmul(cpu, torch.bfloat16, n=64),
        "tf32": lambda: ceilings._matmul(cpu, torch.float32, "high", n=64),
    }
    monkeypatch.setattr(ceilings, "_programs", lambda device, facts: programs)
    monkeypatch.setattr(ceilings, "_event_sampler", lambda call: timing.wall_sampler([call]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(ceilings.Device, "of", lambda device: H200)
    seen: list[str] = []
    precision = torch.get_float32_matmul_precision()
    row = ceilings.measure(torch.device("cuda", 0), 0.01, on_ceiling=seen.append)
    assert seen == list(row.ceilings) == list(programs)
    assert all(rate > 0 for found in row.ceilings.values() for rate in found)
    assert torch.get_float32_matmul_precision() == precision
    assert row.provenance.device == H200.name


@pytest.mark.parametrize(("name", "instruction"), [("exp2_kernel", "ex2.approx.ftz.f32"), ("read_kernel", "ld.global.cg.v4")])
def test_the_programs_of_ceilings_compile_to_what_they_measure(name, instruction):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from peakattn_lab.roofline import ceiling_kernels

    signature = {
        "exp2_kernel": {"out": "*fp32", "rounds": "i32", "BLOCK": "constexpr"},
        "read_kernel": {"source": "*fp32", "sums": "*fp32", "blocks": "i32", "rounds": "i32", "BLOCK": "constexpr"},
    }[name]
    source = ASTSource(getattr(ceiling_kernels, name), signature, {"BLOCK": 1024}, {(0,): [["tt.divisibility", 16]]})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    # Sixteen rounds of eight values a thread; two vectors a thread.
    assert ptx.count(instruction) == (128 if name == "exp2_kernel" else 2)


def test_records_of_one_device_in_a_device_mode():
    row = record("peakattn", us_at(500))
    other = row.model_copy(update={"provenance": row.provenance.model_copy(update={"device": KNOWN["b200"].name})})
    with pytest.raises(ValueError, match="NVIDIA H200, NVIDIA B200; name one"):
        roofline.of_records([row, other])
    assert roofline.of_records([row, other], Device.named("b200")).device.name == KNOWN["b200"].name
    with pytest.raises(ValueError, match="no record of NVIDIA A10 in mode kernel; the records are of NVIDIA H200"):
        roofline.of_records([row], Device.named("a10"))
    with pytest.raises(ValueError, match="mode 'host' does not time the device; allowed are kernel, eager"):
        roofline.of_records([row], mode="host")
    with pytest.raises(ValueError, match="of no device"):
        roofline.of_records([])
    unknown = row.model_copy(update={"provenance": row.provenance.model_copy(update={"device": CPU.name})})
    with pytest.raises(ValueError, match="no roofs are known of cpu"):
        roofline.of_records([unknown])


@pytest.mark.parametrize("name", problems.SETS)
def test_tables_of_every_set(name):
    header, rows = roofline.of_problems(problems.named(name).problems, H200).table()
    assert len(rows) == len(problems.named(name).problems)
    assert all(len(row) == len(header) for row in rows)
    assert "contender" not in header


def test_tables_of_records_and_problems_without_work():
    rows = [record("peakattn", us_at(500)), record("peakattn", 1.0, problems.make((4, 0), 64))]
    header, lines = roofline.of_records(rows).table()
    (line,) = lines  # a problem without a visible pair has no rate
    assert line[header.index("contender")] == "peakattn"
    assert line[header.index("of roof")] == "51%"
    assert float(line[header.index("us at least")]) == pytest.approx(us_at(989), rel=1e-3)


@pytest.mark.parametrize("kind", ["records", "problems", "no clock"])
def test_the_picture_is_a_png_with_something_in_it(kind, tmp_path):
    path = tmp_path / "new" / "roofline.png"
    if kind == "records":
        rows = [record("peakattn", us_at(400, p), p, kernel="triton.bwd") for p in (PROBLEM, BACKWARD)]
        found = roofline.of_records([*rows, record("fa3", us_at(1500))])
    else:
        found = roofline.of_problems(
            (*problems.named("demo").problems, PROBLEM), Device.named("h200" if kind == "problems" else "spark")
        )
    roofplot.draw(found, path, stamp="of a test")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert b"of a test" in path.read_bytes()
    pixels = image.imread(path)
    colours = {tuple(pixel) for pixel in pixels[::3, ::3, :3].reshape(-1, 3).tolist()}
    assert len(colours) > 5
    assert pixels[2, 2, :3].min() > 0.9  # light


def test_nothing_to_draw_is_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="no point to draw"):
        roofplot.draw(roofline.of_problems([], H200), tmp_path / "x.png")
