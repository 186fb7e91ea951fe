"""Profiling with recorded counters and programs that stand in for Nsight: no GPU is needed, and none is asked."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from peakattn import dispatch
from peakattn.device import Device
from peakattn_lab import cli, inspection, ladder, problems, records
from peakattn_lab.cli import laddering
from peakattn_lab.profiling import checklist, counters, diagnosis, profilers, tables, target, timeline
from peakattn_lab.profiling.target import Found, Job, Launch
from peakattn_lab.roofline import traffic

# Two launches in the form of Nsight Compute's raw page: torch's random numbers, and a forward on an H200.
CSV = Path(__file__).parent / "data" / "ncu_raw_page.csv"
PROBLEM = inspection.make_problem("triton.fwd")
JOB = Job(problem=problems.to_dict(PROBLEM), kernel="triton.fwd", config={"block_m": 128, "block_n": 64})
FOUND = Found(device="NVIDIA H200", arch=90, gate_passed=True, gate_message="out is right", config=JOB.config, warm_us=1070.0)

needs_triton = pytest.mark.skipif(dispatch.unavailable("triton") is not None, reason="compiles with Triton")


def moved(*arguments):
    found = traffic.l2_to_sm(*arguments)
    assert found is not None
    return found


def launch():
    return counters.read_csv(CSV.read_text())[1]


def changed(kernel, metrics):
    """The launch with other metrics."""
    return dataclasses.replace(kernel, metrics=kernel.metrics | metrics)


def profile(kernel=None, **fields):
    return profilers.Profile(JOB, (kernel or launch(),), "ncu 2025.3.1", **({"found": FOUND} | fields))


def run(*arguments, code=0):
    result = CliRunner().invoke(cli.app, ["profile", *arguments])
    assert result.exit_code == code, result.output
    return result.output


# Reading counters.


def test_the_raw_page_is_read_in_base_units():
    noise, kernel = counters.read_csv(CSV.read_text())
    assert noise.name == "distribution_elementwise_grid_stride_kernel"
    assert (kernel.name, kernel.grid, kernel.block, kernel.arch) == ("attention_fwd_kernel", (2048, 1, 1), (256, 1, 1), 90)
    assert kernel.duration_us == pytest.approx(1090.112)
    assert kernel.get(counters.DRAM_READ) == 202_375_168
    assert kernel.get("sm__ops_path_tensor_src_fp16_dst_fp32.sum") is None  # n/a
    assert list(kernel.stalls) == ["barrier", "wait", "mio throttle", "long scoreboard"]
    assert list(kernel.breakdown(True)) == ["sm: pipe tensor cycles active", "sm: inst executed pipe xu", "sm: inst issued"]
    assert next(iter(kernel.breakdown(False).items())) == ("lts: t sectors", 42.6)
    assert kernel.limits == {"registers": 1, "shared mem": 1, "warps": 8, "blocks": 32}


@pytest.mark.parametrize(
    ("unit", "scale"),
    [
        *[("", 1), ("%", 1), ("us", 1e3), ("nsecond", 1), ("msecond", 1e6), ("Mbyte", 1e6), ("byte", 1), ("Kbyte/block", 1e3)],
        *[("Ghz", 1e9), ("hz", 1), ("cycle/nsecond", 1e9), ("Gbyte/s", 1e9), ("register/thread", 1)],
    ],
)
def test_units(unit, scale):
    assert counters.scale_of(unit) == scale


LONG = """==PROF== noise
"ID","Kernel Name","Block Size","Grid Size","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","k","(64, 1, 1)","(8, 1, 1)","8.9","Command line profiler metrics","gpu__time_duration.sum","us","1,205.50"
"0","k","(64, 1, 1)","(8, 1, 1)","8.9","Command line profiler metrics","dram__bytes_read.sum","Mbyte","2.5"
"1","k","(64, 1, 1)","(8, 1, 1)","8.9","Command line profiler metrics","gpu__time_duration.sum","us","n/a"
"""


def test_a_row_for_each_metric_is_read_too():
    first, second = counters.read_csv(LONG)
    assert first.metrics == {"gpu__time_duration.sum": 1_205_500, "dram__bytes_read.sum": 2.5e6}
    assert (first.arch, first.grid, second.metrics) == (89, (8, 1, 1), {})


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", LONG.replace("__", " ")])
def test_other_text_is_refused_with_the_command_that_makes_the_right_one(text):
    with pytest.raises(ValueError, match="--csv --page raw"):
        counters.read_csv(text)


def test_tensor_operations_are_counted_or_come_from_the_cycles_of_the_pipe():
    kernel = launch()
    assert kernel.tensor_operations("bfloat16", 132) == (PROBLEM.flops, "counted")
    # As a counter of another kind of product reads.
    blind = changed(kernel, {counters.TENSOR_OPERATIONS["bfloat16"][0]: 0.0})
    found = blind.tensor_operations("bfloat16", 132)
    assert found is not None
    executed, how = found
    assert executed == pytest.approx(PROBLEM.flops, rel=0.05)
    assert "pipe cycles" in how
    assert dataclasses.replace(blind, arch=121).tensor_operations("bfloat16", 132) is None
    assert kernel.tensor_operations("float32", 132) is None


# Predicted bytes.


def test_the_bytes_of_a_published_study_are_predicted():
    """32 heads of 4,096 tokens and head_dim 64 on 16-row tiles: 8,192 programs of 1 MB were 8.6 GB; on 64 rows 2.16 GB."""
    problem = problems.make(4096, 64, batch=4, heads=8)
    bytes_, words = moved("flash_fwd_kernel", problem, {"block_m": 16, "block_n": 16})
    assert bytes_ == 8192 * (2 * 4096 * 64 * 2 + 16 * 64 * 2)
    assert bytes_ == pytest.approx(8.6e9, rel=0.01)
    assert words == "8,192 blocks of 16 query rows x 1.05 MB each"
    assert moved("flash_fwd_kernel", problem, {"block_m": 64, "block_n": 32})[0] == pytest.approx(2.16e9, rel=0.01)
    assert traffic.l2_to_sm("flash_fwd_kernel", problem, {"tile": 64}) is None


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (70, 10)}, {"causal": True, "seqlen": (100, 260)}])
def test_only_visible_tiles_are_predicted(options):
    problem = problems.make(options.pop("seqlen", 200), 32, heads=(4, 2), direction="bwd", **options)
    config = {"dkdv_block_m": 16, "dkdv_block_n": 32, "dq_block_m": 64, "dq_block_n": 16}
    seen = problem.mask(torch.arange(problem.seqlen_q), torch.arange(problem.seqlen_k))

    def span(lines):  # from the first to the last line of a block in which anything is visible
        where = lines.nonzero().flatten()
        return (int(where[0]), int(where[-1]) + 1) if len(where) else (0, 0)

    dq = dkdv = 0
    for start in range(0, problem.seqlen_q, 64):
        rows = seen[start : start + 64]
        first, last = span(rows.any(0))
        keys = min(-(-last // 16) * 16, problem.seqlen_k) - first // 16 * 16
        dq += len(rows) * (2 * 32 * 2 + 8) + keys * 2 * 32 * 2
    for start in range(0, problem.seqlen_k, 32):
        keys = seen[:, start : start + 32]
        first, last = span(keys.any(1))
        dkdv += keys.shape[1] * 2 * 32 * 2 + 2 * (last - first) * (2 * 32 * 2 + 8)
    assert moved("attention_bwd_dq_kernel", problem, config)[0] == 4 * dq
    assert moved("attention_bwd_dkdv_kernel", problem, config)[0] == 2 * dkdv
    assert moved("attention_bwd_rows_kernel", problem, config)[0] == 4 * problem.seqlen_q * (2 * 2 * 32 + 4)
    assert traffic.l2_to_sm("somebody_elses_kernel", problem, config) is None


# Tables and answers.


def cells(table):
    return {row[0]: row[1] for row in table[2]}


def test_the_tables_hold_measurements_against_what_they_should_be():
    made = {title: cells((title, header, rows)) for title, header, rows in tables.tables([profile()])}
    assert made["speed of light"]["tensor pipe active, %"] == "54.3"
    work = made["work and bytes against what they should be"]
    assert (work["tensor operations, G"], work["executed / needed"]) == ("549.8", "1.000")
    assert (work["L2 to SM, GB"], work["predicted, GB"]) == ("4.363", "4.362")
    assert work["once each, GB"] == "0.268"
    assert made["roofline"]["useful TFLOP/s"] == f"{PROBLEM.flops / 1090.112e6:.1f}"
    assert made["roofline"]["useful share, %"] == "51.0"
    assert made["launch and occupancy"]["registers"] == "187"


def test_rivals_stand_beside_ours_without_predictions_of_their_tiles():
    theirs = profilers.Profile(Job(problem=JOB.problem, rival="fa3"), (launch(),), "ncu", FOUND)
    _, header, rows = tables.work(tables.columns_of([profile(), theirs]))
    assert header == ["", "peakattn:triton.fwd: attention_fwd_kernel", "fa3: attention_fwd_kernel"]
    assert ["predicted, GB", "4.362", "-"] in rows
    assert ["executed / needed", "1.000", "1.000"] in rows


def test_functions_of_a_backward_are_held_to_their_own_products():
    problem = inspection.make_problem("triton.bwd", head_dim=64)
    job = Job(problem=problems.to_dict(problem), kernel="triton.bwd", config={})
    names = ("attention_bwd_rows_kernel", "attention_bwd_dkdv_kernel", "attention_bwd_dq_kernel")
    times = (20e3, 900e3, 700e3)
    kernels = [
        changed(dataclasses.replace(launch(), name=n), {counters.DURATION: t}) for n, t in zip(names, times, strict=True)
    ]
    columns = tables.columns_of([profilers.Profile(job, tuple(kernels), "ncu", FOUND)])
    product = problem.flops / 5
    assert [c.needed for c in columns] == [None, 4 * product, 3 * product]
    main = tables.main_column(columns[0].profile)
    assert main is not None
    assert main.kernel.name == "attention_bwd_dkdv_kernel"


@needs_triton
def test_the_checklist_answers_with_this_kernel():
    answers = cells(checklist.table(profile(), [], None, None))
    assert "warm calls without it 1070.0 us" in answers["Is the time from a fair benchmark?"]
    assert answers["What is 100 %?"].startswith("989 TFLOP/s of bfloat16 products on NVIDIA H200")
    assert answers["Speed of light: which unit is on top?"].startswith("compute: sm: pipe tensor cycles active at 52.8 %")
    assert answers["Are more operations executed than needed?"].startswith("as many as needed (549.8 G of 549.8 G")
    assert answers["Are the bytes as predicted?"].count("as predicted") == 2
    assert answers["What do warps wait for?"].startswith("barrier 2.8 (for other warps of their block)")
    assert answers["What limits occupancy?"].startswith("registers, shared mem: 1 blocks an SM")
    assert answers["Compiler: do warps own whole rows?"] == "yes; executed / needed products a tile: 1.00"
    assert "the launch had 187 registers" in answers["Compiler: registers, spills, shared memory?"]
    assert answers["Timeline: is the GPU always busy?"] == "not recorded here"


@needs_triton
def test_the_checklist_sees_waste_and_wrong_predictions():
    kernel = changed(launch(), {counters.L2_TO_SM: 8.7e9, counters.TENSOR_OPERATIONS["bfloat16"][0]: 2 * PROBLEM.flops})
    theirs = profilers.Profile(
        Job(problem=JOB.problem, rival="fa3"), (changed(launch(), {counters.DURATION: 766e3}),), "ncu", FOUND
    )
    lane = timeline.Timeline(1, (Launch(name="a", start=0, duration=10), Launch(name="b", start=30, duration=10)), "a test")
    answers = cells(checklist.table(profile(kernel, timeline=lane), [theirs], profile().record(), Path("x.ncu-rep")))
    assert answers["Are more operations executed than needed?"].startswith("2.00 x what is needed (")
    assert "1.99 x the prediction, so an assumption is wrong" in answers["Are the bytes as predicted?"]
    assert answers["How long does a reference take?"] == "fa3 766.0 us against 1090.1"
    assert "busy 50% of 1 calls" in answers["Timeline: is the GPU always busy?"]
    assert answers["Timeline: what does one call launch?"] == "2 kernels; a takes 50% of their time"
    assert "time +0.0%, instructions +0.0%, L2 bytes +99.4%" in answers["Did the last change do what was expected?"]
    assert "x.ncu-rep" in answers["What does ncu suggest?"]


def test_a_geforce_is_saturated_at_half_of_the_row():
    found = FOUND.model_copy(update={"device": "NVIDIA GeForce RTX 5090"})
    column = tables.columns_of([profile(dataclasses.replace(launch(), arch=120), found=found)])[0]
    assert "about 50 % is saturated" in checklist._reachable(column)


# Timelines.


def test_overlapping_kernels_do_not_count_twice():
    launches = [
        Launch(name="a", start=0, duration=10),
        Launch(name="b", start=5, duration=10),
        Launch(name="a", start=20, duration=5),
    ]
    found = timeline.Timeline(2, tuple(launches), "a test")
    assert found.busy == pytest.approx(20 / 25)
    assert found.kernels == {"a": [10, 5], "b": [10]}
    assert found.table()[2][0] == ["a", "1", "5.0", "10.0", "60%"]
    assert "not only the kernels" in found.answer()


NSYS = """Processing [x.sqlite] with [cuda_gpu_trace.py]...
Start (ns),Duration (ns),CorrId,GrdX,GrdY,Name
1000,2000,1,8,1,attention_fwd_kernel
3000,500,2,,,[CUDA memset]
4000,2000,3,8,1,attention_fwd_kernel
"""


def test_a_trace_of_nsight_systems_is_read_without_its_copies():
    found = timeline.of_nsys(NSYS, 2)
    assert found.kernels == {"attention_fwd_kernel": [2.0, 2.0]}
    assert found.busy == pytest.approx(0.8)
    with pytest.raises(ValueError, match="no cuda_gpu_trace"):
        timeline.of_nsys("error", 2)


# The child process.


@pytest.mark.parametrize(
    ("fields", "config"),
    [({"kernel": "cpu.fwd"}, dict), ({"rival": "sdpa"}, type(None)), ({"kernel": "cpu.bwd"}, dict)],
)
def test_the_child_checks_and_warms_before_one_marked_call(fields, config, monkeypatch):
    marks = []
    monkeypatch.setattr(target, "marked", lambda call, calls, name: marks.append((call(), calls, name)))
    problem = problems.make(64, 16, heads=2, dtype=torch.float32)
    if fields.get("kernel") == "cpu.bwd":
        problem = problem.backward(needs_dq=True, needs_dk=True, needs_dv=True, aligned=True)
    job = Job(problem=problems.to_dict(problem), device="cpu", warm_seconds=0, **fields)
    found = target.run(job)
    assert [(calls, name) for _, calls, name in marks] == [(1, job.name)]
    assert found.gate_passed
    assert found.warm_us is not None
    assert found.warm_us > 0
    assert isinstance(found.config, config)
    assert found.device == "cpu"


def test_the_child_tells_what_a_rival_cannot_do(monkeypatch):
    job = Job(problem=JOB.problem, rival="fa3", device="cpu")
    with pytest.raises(ValueError, match="needs sm_90"):
        target.run(job)


# Nsight Compute, and what stands in for it here: a program that answers like it.

FAKE = """#!{python}
import json, pathlib, sys
args = sys.argv[1:]
if "--version" in args:
    print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0 (build 1) (public-release)")
elif "--import" in args:
    print(pathlib.Path({csv!r}).read_text())
else:
    pathlib.Path({log!r}).write_text(json.dumps(args))
    if {unknown!r} and {unknown!r} in " ".join(args):
        print("==ERROR== Failed to find metric " + {unknown!r})
        sys.exit(1)
    if {error!r}:
        print({error!r})
        sys.exit(1)
    pathlib.Path(args[-1]).write_text({found!r})
    pathlib.Path(args[args.index("-o") + 1] + ".ncu-rep").write_text("binary")
"""


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Makes a stand-in for ncu; its command lines go to ``log.json``."""
    monkeypatch.setattr(counters, "read_report", lambda path: None)

    def make(error="", unknown="", found=FOUND):
        program = tmp_path / "ncu"
        fields = {"csv": str(CSV), "log": str(tmp_path / "log.json"), "found": found.model_dump_json()}
        program.write_text(FAKE.format(python=sys.executable, error=error, unknown=unknown, **fields))
        program.chmod(0o755)
        monkeypatch.setattr(diagnosis, "find", lambda name: program if name == "ncu" else None)
        return program

    return make


def test_one_launch_under_nsight_compute(ncu, tmp_path):
    made = profilers.with_counters(JOB, ncu(), tmp_path)
    assert [k.name for k in made.kernels][-1] == "attention_fwd_kernel"
    assert (made.profiler, made.found) == ("ncu 2025.3.1", FOUND)
    command = json.loads((tmp_path / "log.json").read_text())
    assert command[command.index("--profile-from-start") + 1] == "off"
    assert command[command.index("--clock-control") + 1] == "none"
    assert counters.L2_TO_SM in command[command.index("--metrics") + 1].split(",")
    assert command[command.index("-m") + 1] == "peakattn_lab.profiling.target"
    assert Job.model_validate_json(Path(command[-2]).read_text()) == JOB


def test_a_metric_that_this_ncu_does_not_know_is_left_out(ncu, tmp_path):
    made = profilers.with_counters(JOB, ncu(unknown=counters.L2_HITS), tmp_path)
    assert len(made.kernels) == 2
    command = json.loads((tmp_path / "log.json").read_text())
    assert counters.L2_HITS not in command[command.index("--metrics") + 1]


@pytest.mark.parametrize(
    ("said", "outcome", "sentence"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", diagnosis.Outcome.NO_PERMISSION, "Run as root"),
        ("==ERROR== Profiling is not supported on device 0", diagnosis.Outcome.UNSUPPORTED, "does not support the GPU"),
        ("==ERROR== Profiling failed because a driver resource was unavailable.", diagnosis.Outcome.FAILED, "DCGM"),
        ("==WARNING== No kernels were profiled.", diagnosis.Outcome.FAILED, "saw no launch"),
        (
            "Traceback\nValueError: FlashAttention-3 is a forward-only package.",
            diagnosis.Outcome.FAILED,
            "forward-only package",
        ),
        ("", diagnosis.Outcome.FAILED, "it printed nothing"),
    ],
)
def test_what_ncu_says_becomes_a_diagnosis(said, outcome, sentence, ncu, tmp_path):
    with pytest.raises(diagnosis.ProfileError, match=sentence) as caught:
        profilers.with_counters(JOB, ncu(error=said or " "), tmp_path)
    assert caught.value.outcome == outcome


def test_no_figure_of_a_wrong_output(ncu, tmp_path):
    wrong = FOUND.model_copy(update={"gate_passed": False, "gate_message": "out errs by 1.0"})
    with pytest.raises(diagnosis.ProfileError, match=r"no figure is shown: out errs by 1\.0") as caught:
        profilers.with_counters(JOB, ncu(found=wrong), tmp_path)
    assert caught.value.outcome == diagnosis.Outcome.WRONG


def test_what_is_missing_is_told_apart(ncu, tmp_path, monkeypatch):
    assert diagnosis.ready(90) if ncu() else None
    with pytest.raises(diagnosis.ProfileError, match="There is no GPU"):
        diagnosis.ready(None)
    monkeypatch.setattr(diagnosis, "version", lambda program: (2023, 1, 0))
    with pytest.raises(diagnosis.ProfileError, match=r"ncu 2023\.1\.0 does not know sm_100; install 2025\.1 or newer\.") as old:
        diagnosis.ready(100)
    assert old.value.outcome == diagnosis.Outcome.UNSUPPORTED
    monkeypatch.setattr(diagnosis, "find", lambda name: None)
    with pytest.raises(diagnosis.ProfileError, match=r"\(ncu\) is not here") as missing:
        diagnosis.ready(90)
    assert missing.value.outcome == diagnosis.Outcome.NO_TOOL
    report = tmp_path / "x.ncu-rep"
    report.write_text("binary")
    with pytest.raises(diagnosis.ProfileError, match="pip install ncu-report"):
        profilers.read(report)


# Records.


def test_rungs_stand_in_rows_and_are_recorded_by_their_source(tmp_path):
    made = []
    for step in (1, 2):
        rung = ladder.rung(f"ladder.triton.step{step}")
        job = JOB.model_copy(update={"kernel": None, "rung": rung.id})
        made.append(profilers.Profile(job, (launch(),), "ncu 2025.3.1", FOUND))
        row = made[-1].record("0" * 40)
        assert (row.contender, row.kernel, row.kernel_hash) == (rung.id, None, rung.source_hash)
    _, header, rows = tables.side_by_side(tables.columns_of(made))
    assert [row[0] for row in rows] == ["ladder.triton.step1", "ladder.triton.step2"]
    assert {"compute (SM), %", "memory, %", "tensor pipe active, %"} <= set(header)
    assert all(len(row) == len(header) for row in rows)


IN_THE_INTERPRETER = """
import sys
from peakattn_lab.profiling import target
target.marked = lambda call, calls, name: call()
target.main(*sys.argv[1:])
"""


@needs_triton
def test_the_child_checks_a_rung_and_tells_its_config(tmp_path):
    problem = problems.make(64, 16, batch=1, heads=1, dtype=torch.float32)
    job = Job(problem=problems.to_dict(problem), rung="ladder.triton.step2", device="cpu", warm_seconds=0)
    (tmp_path / "job.json").write_text(job.model_dump_json())
    files = [str(tmp_path / name) for name in ("job.json", "found.json")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_INTERPRETER, *files], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = Found.model_validate_json((tmp_path / "found.json").read_text())
    assert found.gate_passed
    assert {"block_m", "block_n"} <= set(found.config or {})


def test_a_record_is_read_back_and_found_again(tmp_path):
    path = tmp_path / "profile.jsonl"
    assert profilers.last_record(path, profile()) is None
    row = profile().record()
    records.append(path, row)
    assert profilers.last_record(path, profile()) == row
    assert row.kernel_hash == records.kernel_hash("triton.fwd")
    (kernel,) = row.counters()
    assert (kernel.name, kernel.stalls, kernel.limits) == (launch().name, launch().stalls, launch().limits)
    other = dataclasses.replace(profile(), job=Job(problem=problems.to_dict(problems.make(64, 64)), kernel="triton.fwd"))
    assert profilers.last_record(path, other) is None
    with pytest.raises(ValueError, match="no provenance"):
        profile(found=None).record()


# The command.


@needs_triton
def test_the_command_reads_a_report_without_a_gpu():
    said = run("triton.fwd", "--report", str(CSV), "--match", "attention")
    assert "as many as needed (549.8 G of 549.8 G, counted)" in said
    assert "distribution" not in said
    assert "does not say whether the output was right" in said
    assert "has no kernel that is named like 'nope'" in run("triton.fwd", "--report", str(CSV), "--match", "nope", code=2)
    assert "there is no file" in run("triton.fwd", "--report", "nothing.ncu-rep", code=2)
    assert "runs on the CPU" in run("cpu.fwd", code=2)


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_the_machine_code_is_counted():
    said = run("triton.fwd", "--head-dim", "64", code=diagnosis.Outcome.NO_GPU)
    assert "There is no GPU in this process" in said
    assert "hot loops, instructions of one warp" in said


@needs_triton
def test_without_permission_there_are_times_and_static_counts(monkeypatch):
    def refuse(arch):
        raise diagnosis.ProfileError(diagnosis.Outcome.NO_PERMISSION, "administrators only")

    lane = timeline.Timeline(1, (Launch(name="attention_fwd_kernel", start=0, duration=1000),), "a test")
    monkeypatch.setattr(diagnosis, "ready", refuse)
    monkeypatch.setattr(profilers, "timeline_of", lambda job, folder: (lane, FOUND))
    said = run("triton.fwd", "--arch", "sm_90", code=diagnosis.Outcome.NO_PERMISSION)
    assert "No counters: administrators only" in said
    assert f"{PROBLEM.flops / 1e9:.1f} useful TFLOP/s" in said
    assert "products of the hot loops in TTGIR" in said


@needs_triton
def test_the_command_from_launch_to_record(ncu, tmp_path, monkeypatch):
    program, out = ncu(), tmp_path / "profile.jsonl"
    monkeypatch.setattr(diagnosis, "ready", lambda arch: program)
    options = ("triton.fwd", "--no-timeline", "--rival", "fa3", "--out", str(out), "--keep", str(tmp_path / "kept"))
    said = run(*options)
    assert "fa3: attention_fwd_kernel" in said
    assert "checked: out is right" in said
    assert "there is no earlier profile" in said
    assert [row.contender for row in records.read_as(profilers.ProfileRecord, out)] == ["peakattn:triton.fwd", "fa3"]
    assert (tmp_path / "kept" / "fa3.ncu-rep").is_file()
    assert "time +0.0%" in run(*options)
    assert "rival 'fa9' is unknown" in run("triton.fwd", "--rival", "fa9", code=2)


def test_the_rungs_of_a_ladder_from_launch_to_record(ncu, tmp_path, capsys):
    out = tmp_path / "counters.jsonl"
    rungs = ladder.rungs("triton", ["1", "2"])
    laddering._profile(ncu(), rungs, [PROBLEM], Device.named("h200"), out, None)
    assert [row.contender for row in records.read_as(profilers.ProfileRecord, out)] == [rung.id for rung in rungs]
    said = capsys.readouterr().out
    assert said.count("ladder.triton.step") == 2 * len(rungs), "a row for each launch of the report"
    assert "memory, %" in said
