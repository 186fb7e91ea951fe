"""Rooflines: the roofs by hand, points above them, backwards that recompute, the L2 cache, predictions, the picture."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from matplotlib import image

from lab.records_of import PROBLEM, record
from peakattn.device import CPU, KNOWN, Device
from peakattn_lab import problems, records, roofline

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


def test_float32_has_the_tf32_roof_where_a_figure_is_known():
    problem = problems.make(4096, 64, dtype=torch.float32)
    found = roofline.of_problems([problem], H200)
    assert found.points[0].roofs["tensor"] == 494.7
    assert any("TF32" in note for note in found.notes())
    unknown = roofline.of_problems([problem], Device.named("b200"))
    assert "tensor" not in unknown.points[0].roofs
    assert "no roof is known for exp of float32, tensor of float32 on NVIDIA B200" in unknown.notes()[-1]


def test_a_device_without_a_known_clock_has_no_exp_roof():
    (point,) = roofline.of_problems([PROBLEM], Device.named("b200")).points
    assert set(point.roofs) == {"tensor", "memory"}
    assert set(roofline.FACTS) <= {device.name for device in KNOWN.values()}


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


def test_measured_ceilings_stand_beside_the_datasheet():
    notes = "\n".join(roofline.of_records([record("peakattn", us_at(900))]).notes())
    assert "989 TFLOP/s of the datasheet, dense bf16 and f16; measured 740 to 800" in notes
    assert "4.80 TB/s of the datasheet; measured 4.24" in notes
    assert "points above the measured matmul: 1" in notes


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
    roofline.draw(found, path, stamp="of a test")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert b"of a test" in path.read_bytes()
    pixels = image.imread(path)
    colours = {tuple(pixel) for pixel in pixels[::3, ::3, :3].reshape(-1, 3).tolist()}
    assert len(colours) > 5
    assert pixels[2, 2, :3].min() > 0.9  # light


def test_nothing_to_draw_is_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="no point to draw"):
        roofline.draw(roofline.of_problems([], H200), tmp_path / "x.png")
