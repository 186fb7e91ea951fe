"""Ladders: what rungs say, that they are right, what their code costs, and what is made of their records."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from peakattn import backends, reference
from peakattn.backends.contract import ForwardKernel
from peakattn.device import CPU, Device
from peakattn.problem import AttentionProblem
from peakattn_lab import baselines, cli, docs, ladder, problems, provenance, records
from peakattn_lab.bench import Bench
from peakattn_lab.ladder import checking, compiling, figure, rows, running, subjects, tables
from peakattn_lab.ladder.rows import RungRecord

H200 = Device.named("h200")
PROBLEM = problems.make(4096, 64, batch=4, heads=32)
CAUSAL = problems.make(4096, 64, batch=4, heads=32, causal=True)
RUNGS = [rung for language in ladder.LANGUAGES for rung in ladder.rungs(language)]

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def ids(rung: ladder.Rung) -> str:
    return rung.id


@pytest.mark.parametrize("rung", RUNGS, ids=ids)
def test_a_rung_says_what_it_is_and_stays_short(rung):
    assert rung.id.startswith(f"ladder.{rung.language}.step")
    assert ladder._file(rung.module).read_text().startswith(f'"""Step {rung.step}: ')
    assert rung.idea.endswith(".")
    assert rung.prediction.endswith(".")
    assert rung.why == "" or rung.why.endswith(".")
    assert all(isinstance(text, str) for pair in rung.published.items() for text in pair)
    if rung.kernel_id is None:
        limit = 300 if rung.language in ("cute", "cuda") else 150
        assert len(rung.source.splitlines()) <= limit
        of_library = any(f"from {module} import" in rung.source for module in backends.KERNELS.values())
        assert of_library or "attention_fwd_kernel" in rung.source


@pytest.mark.parametrize("language", ladder.LANGUAGES)
def test_the_last_rung_is_the_library_s_kernel_and_steps_are_numbered(language):
    found = ladder.rungs(language)
    assert [rung.step for rung in found] == list(range(1, len(found) + 1))
    assert [rung.kernel_id is not None for rung in found] == [False] * (len(found) - 1) + [True]
    assert str(found[-1].kernel_id).startswith(f"{language}.fwd")


@needs_triton
@pytest.mark.parametrize("rung", ladder.rungs("triton"), ids=ids)
def test_a_rung_keeps_the_kernel_contract(rung):
    assert isinstance(rung.kernel, ForwardKernel)
    config = rung.kernel.default_config(PROBLEM, H200)
    assert isinstance(config, rung.kernel.Config)
    for other in rung.kernel.search_space(PROBLEM, H200):
        assert isinstance(other, rung.kernel.Config)
    assert "forward" in (rung.kernel.reject(dataclasses.replace(PROBLEM, direction="bwd"), H200) or "forward")
    assert rung.kernel.reject(PROBLEM, H200) is None


def test_steps_are_found_by_number_and_unknown_ones_are_a_sentence():
    assert [rung.step for rung in ladder.rungs("triton", ["3", "step1", "ladder.triton.step2"])] == [1, 2, 3]
    with pytest.raises(ValueError, match="the triton ladder has the steps 1, 2"):
        ladder.rungs("triton", ["99"])
    with pytest.raises(ValueError, match="there are ladders in triton"):
        ladder.rungs("fortran")
    with pytest.raises(ValueError, match="the triton ladder has warps, order, cast"):
        ladder.experiment("triton", "luck")


def test_what_a_rung_says_does_not_change_its_hash(tmp_path, monkeypatch):
    (rung,) = ladder.rungs("triton", ["5"])
    said, code = (tmp_path / name for name in ("said.py", "code.py"))
    said.write_text(rung.source + '\nWHY = "Because."\n')
    code.write_text(rung.source.replace("1.4426950408889634", "1.5"))
    hashes = []
    for path in (said, code):
        monkeypatch.setattr(ladder, "_file", lambda module, path=path: path)
        hashes.append(rung.source_hash)
    monkeypatch.undo()
    assert hashes[0] == rung.source_hash
    assert hashes[1] != rung.source_hash


def test_the_source_of_the_library_s_kernel_has_its_device_code():
    idioms = {"triton": "warpgroup_mma(", "cute": "cute.gemm(", "cuda": "mma(", "cutile": "ct.mma("}
    for language, idiom in idioms.items():
        assert idiom in ladder.rungs(language)[-1].source


def test_a_difference_shows_the_idea():
    before, after = ladder.rungs("triton", ["8", "9"])
    text = ladder.difference(before, after)
    assert "+        m_block = num_m_blocks - 1 - m_block" in text
    assert "tl.dot" not in text


# Right.

INTERPRETED = """
import sys, torch
from peakattn.device import CPU
from peakattn_lab import ladder
from peakattn_lab.ladder import checking
dtype = getattr(torch, sys.argv[1])
checked = set()
found = checking.check_problems(dtype, CPU, [32])
for rung, problem, result in checking.check_all(ladder.rungs("triton"), found, torch.device("cpu")):
    if isinstance(result, str):
        continue
    checked.add(rung.step)
    assert result.passed, (rung.id, str(problem), result.message)
print(sorted(checked))
"""


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "steps"), [("float16", range(1, 11)), ("float32", range(1, 8))], ids=["float16", "float32"])
def test_rungs_are_right_in_the_interpreter(dtype, steps):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, dtype], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == str(list(steps)).split()


@dataclasses.dataclass(frozen=True)
class _Knobs:
    block_m: int = 16
    block_n: int = 16


class _Fake:
    """A rung whose kernel is the oracle, or the oracle spoiled; one of its configs is slow, one raises."""

    language, kernel_id, tuned, visits_all = "cpu", None, True, True
    name, source_hash = "fake", "0" * 16
    Config = _Knobs

    def __init__(self, spoil: str = "", step: int = 1):
        self.spoil, self.kernel, self.id = spoil, self, f"ladder.fake.step{step}"

    def reject(self, problem, device):
        return None

    def default_config(self, problem, device):
        return _Knobs()

    def search_space(self, problem, device):
        return [_Knobs(block_m) for block_m in (16, 32, 64)]

    def launch(self, problem, config, q, k, v, out, lse, scale, softcap):
        if self.spoil == "raise" or config.block_m == 64:
            raise RuntimeError("no such instruction\nsecond line")
        if config.block_m == 16:
            time.sleep(0.005)
        right = reference.attention(q, k, v, softmax_scale=scale, **problems.options(problem))
        out.copy_(right[0])
        if lse is not None:
            lse.copy_(right[1])
        if self.spoil == "out":
            out[-1, -1, -1, -1] += 0.1
        if self.spoil == "lse":
            lse[0, 0, 0] += 0.1


@pytest.mark.parametrize(
    ("spoil", "message"),
    [("", "within"), ("out", "out of batch"), ("lse", "lse of batch 0"), ("raise", "RuntimeError: no such")],
)
def test_a_check_sees_one_wrong_value_and_a_failure(spoil, message):
    problem = checking.check_problems(torch.float32, CPU, [32])[0]
    ((_, _, result),) = checking.check_all([_fake(spoil)], [problem], torch.device("cpu"))
    assert not isinstance(result, str)
    assert result.passed is (spoil == "")
    assert message in result.message


# Timed, with a fake rung on the CPU.

TINY = problems.on_device(problems.make(32, 16, heads=2, dtype=torch.float32), "cpu")


def test_tuning_takes_the_fastest_config_that_runs():
    found = running.tune(_fake(), TINY, torch.device("cpu"), seconds=0.02)
    assert found.config == _Knobs(32)
    assert (found.config_source, found.candidates) == ("measured", 2)
    assert found.tuning_seconds > 0
    nothing_runs = running.tune(_fake("out"), TINY, torch.device("cpu"), seconds=0.02)
    assert nothing_runs.config == _Knobs()
    assert nothing_runs.config_source == "default"


def test_all_are_timed_in_one_run_and_a_wrong_rung_has_no_speed():
    bench = Bench(torch.device("cpu"), 0.1)
    slow, fast, wrong = (
        subjects.Subject(_fake(spoil, step), _Knobs(block_m), f"ladder.fake.step{step}")
        for step, spoil, block_m in ((1, "", 16), (2, "", 32), (3, "out", 32))
    )
    made = list(running.run([slow, fast, wrong], TINY, [baselines.rival("sdpa.math")], bench, {}))
    (cell,) = rows.cells(made)
    first, second, third = cell.steps
    gain = cell.gain(second, cell.before(second))
    assert gain is not None
    assert gain.ratio > 1.5
    assert first.config == {"block_m": 16, "block_n": 16}
    assert first.facts is None
    assert not third.speed_known
    assert (third.reason or "").startswith("wrong: out")
    assert [row.contender for row in cell.rivals] == ["sdpa.math"]


def _fake(spoil: str = "", step: int = 1) -> Any:
    return _Fake(spoil, step)


# What the code costs.


def test_visited_pairs_are_whole_tiles():
    square = problems.make(256, 64)
    assert compiling.visited_pairs(square, 64, 32, visits_all=False) == 256 * 256
    causal = problems.make(256, 64, causal=True)
    assert compiling.visited_pairs(causal, 64, 32, visits_all=True) == 256 * 256
    # Row blocks of 64 see 2, 4, 6 and 8 key tiles of 32.
    assert compiling.visited_pairs(causal, 64, 32, visits_all=False) == 20 * 64 * 32
    ahead = problems.make((64, 128), 64, causal=True)  # every row sees at least 65 keys
    assert compiling.visited_pairs(ahead, 64, 32, visits_all=False) == 64 * 128


@needs_triton
def test_the_source_s_operation_counts_come_out_of_the_code():
    """206 G of 137.4 G for 16 x 16 tiles and 4 warps at its shape: 4 x 8 heads, 4,096 tokens, head_dim 64."""
    theirs = problems.make(4096, 64, batch=4, heads=8)
    (rung,) = ladder.rungs("triton", ["1"])
    one = subjects.by_default(rung, theirs, H200)
    code = compiling.compile_one(compiling.Job.of(one, theirs, H200))
    assert code.error is None
    assert code.facts is not None
    assert code.facts.waste == 1.5
    executed = compiling.executed_flops(rung, theirs, one.config, code.facts.waste)
    assert executed == pytest.approx(206.2e9, rel=1e-3)
    assert "warpsPerCTA [1, 4] for 16 x 16" in code.layouts
    assert code.facts.instruction == "HMMA"


@needs_triton
def test_too_many_warps_compute_scores_twice_on_hopper():
    few, many, *_ = subjects.of_experiment("triton", "warps")
    assert (few.config.num_warps, many.config.num_warps) == (4, 8)
    found = [compiling.compile_one(compiling.Job.of(one, PROBLEM, H200)).facts for one in (few, many)]
    assert [facts.waste for facts in found if facts is not None] == [1.0, 1.5]


@needs_triton
def test_exp2_takes_a_third_of_the_loop_and_tma_the_copies():
    found = [
        compiling.compile_one(compiling.Job(rung, rung.kernel.Config(128, 64, 8, 3), CAUSAL, H200)).facts
        for rung in ladder.rungs("triton", ["4", "5", "8"])
    ]
    plain, exp2, tma = (facts for facts in found if facts is not None)
    assert sum(exp2.loop.values()) < 0.7 * sum(plain.loop.values())
    assert exp2.shared_bytes > tma.shared_bytes
    assert [plain.spills, exp2.spills, tma.spills] == [0, 0, 0]


@needs_triton
def test_warp_specialize_takes_four_warps_and_leaves_eight_alone():
    (rung,) = ladder.rungs("triton", ["10"])
    threads = []
    for config in (rung.kernel.Config(64, 64, 4, 2), rung.kernel.Config(128, 64, 8, 3)):
        code = compiling.compile_one(compiling.Job(rung, config, PROBLEM, H200))
        assert code.facts is not None, code.error
        threads.append(code.facts.num_threads)
    assert threads == [384, 256]


@needs_triton
def test_what_does_not_compile_is_an_error_of_its_own():
    (rung,) = ladder.rungs("triton", ["2"])
    job = compiling.Job(rung, None, PROBLEM, H200)
    assert (compiling.compile_one(job).error or "").startswith("does not compile: ")
    assert compiling.compile_all([job, job], processes=1)[job].facts is None


# Records.


def row(rung: int | None, us: float, problem: AttentionProblem = PROBLEM, **values: Any) -> RungRecord:
    found = ladder.rungs("triton", [str(rung)])[0] if rung else None
    defaults: dict[str, Any] = {
        "mode": "kernel",
        "samples_us": [us * (1 + 0.001 * (i % 3 - 1)) for i in range(20)],
        "gate": records.Gate(passed=True, message="fine"),
        "config": {"block_m": 16, "block_n": 16, "num_warps": 4, "p_cast": None} if found else None,
        "source_hash": found.source_hash if found else None,
    }
    return RungRecord(
        provenance=provenance.here("NVIDIA H200", 90),
        problem=problems.to_dict(problem),
        contender=found.id if found else "fa3",
        rung=found.id if found else None,
        **(defaults | values),
    )


RED: dict[str, Any] = {"gate": records.Gate(passed=False, message="out errs")}


def test_gains_are_over_the_last_rung_with_a_speed_and_never_from_a_red_one():
    found = [row(None, 500.0), row(1, 4000.0), row(3, 800.0, candidates=5), row(2, 1000.0, **RED)]
    (cell,) = rows.cells(found)
    assert [one.rung and int(one.rung[-1]) for one in cell.rows.values()] == [1, 2, 3, None]
    title, _, body = tables.speeds(cell)
    assert title == "d64 full 4k, TFLOP/s"
    speeds = {line[0]: line for line in body}
    assert speeds["ladder.triton.step2"][2:] == ["-", "-", "-", "wrong: out errs"]
    assert speeds["ladder.triton.step3"][4].startswith("5.00 x [")
    assert speeds["ladder.triton.step3"][4].endswith("FASTER")
    assert float(speeds["ladder.triton.step3"][5]) == pytest.approx(500 / 800, abs=0.01)
    assert speeds["ladder.triton.step3"][1] == "16 x 16, 4 warps, best of 5"
    assert speeds["fa3"][5] == ""


def test_runs_are_not_mixed():
    old = row(1, 4000.0)
    old.provenance.run = "older"
    (cell,) = rows.cells([old, row(2, 1000.0)])
    assert list(cell.rows) == ["ladder.triton.step2"]
    assert cell.gain(cell.steps[0], old) is None


def test_the_overview_has_a_column_for_each_problem_and_the_mean_gain():
    found = [row(1, 4000.0), row(2, 1000.0), row(1, 4000.0, CAUSAL), row(2, 4000.0 / 9, CAUSAL), row(None, 300.0)]
    header, body = tables.overview(rows.cells(found))
    assert header == ["rung", "d64 full 4k", "d64 causal 4k", "mean gain"]
    assert [line[0] for line in body] == ["ladder.triton.step1", "ladder.triton.step2", "fa3"]
    assert body[1][3] == "6.00 x"
    assert body[2][2:] == ["-", "-"]


def test_operations_are_shown_against_the_algorithm_s():
    needed = PROBLEM.flops
    assert tables.operations_text(row(1, 1.0, executed_flops=1.5 * needed)) == "824.6 / 549.8 G = 1.50"
    assert tables.operations_text(row(1, 1.0)) == "not derivable"


def test_a_changed_rung_is_named():
    from peakattn_lab.ladder import document

    assert document.changed([row(1, 1.0), row(2, 1.0, source_hash="0" * 16)]) == ["ladder.triton.step2"]


def test_documents_hold_tables_a_picture_and_the_rungs(tmp_path):
    path = tmp_path / "benchmarks" / "results" / "h200" / "ladder_triton.jsonl"
    for one in (row(1, 4000.0), row(2, 1000.0), row(None, 500.0)):
        records.append(path, one)
    page = tmp_path / "docs" / "ladders" / "triton.md"
    page.parent.mkdir(parents=True)
    marks = ("ladder h200/ladder_triton", "ladderplot h200/ladder_triton", "rungs triton", "ladder b200/ladder_triton")
    page.write_text("".join(f"<!-- peakattn:{mark} -->\n<!-- peakattn:end -->\n" for mark in marks))
    assert len(docs.update(tmp_path)) == 2
    text = page.read_text()
    assert "| ladder.triton.step2 | 550 | 4.00 x |" in text
    assert "(../../docs/images/h200-ladder_triton.png)" in text
    assert "- The source's figures, on its GPU: full: 21.8 TFLOP/s" in text
    assert "Not measured yet: there is no benchmarks/results/b200/ladder_triton.jsonl." in text
    assert docs.update(tmp_path, check=True) == []


def test_the_figure_takes_red_rungs_and_no_rivals(tmp_path):
    figure.draw(rows.cells([row(1, 4000.0), row(2, 1000.0, **RED), row(3, 900.0)]), tmp_path / "a.png", "title", "stamp")
    assert b"stamp" in (tmp_path / "a.png").read_bytes()


# The command.


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["ladder", *arguments])


def test_the_command_lists_and_compares():
    listed = run("triton", "--list")
    assert listed.exit_code == 0
    assert "RTX 4070 SUPER" in listed.output
    assert run("triton", "--diff", "5").output.count("exp2") >= 4
    assert "is the first rung" in run("triton", "--diff", "1").output
    arguments, _, _ = run("--help").output.partition("Options")
    assert [language for language in ladder.LANGUAGES if language not in arguments] == []


def test_the_command_refuses_in_sentences():
    assert "write positive numbers" in run("triton", "--static", "--seqlen", "big").output
    assert "allowed are float16" in run("triton", "--dtype", "int8").output
    assert "leave one of them out" in " ".join(run("triton", "--counters", "--experiment", "cast").output.split())
    if not torch.cuda.is_available():
        assert "no CUDA device to time on" in run("triton").output


@needs_triton
def test_the_command_compiles_without_a_gpu():
    shape = ("--seqlen", "1024", "--head-dim", "64")
    done = run("triton", "--static", "--arch", "sm_90", "--rung", "1", *shape, "--processes", "1")
    assert done.exit_code == 0, done.output
    assert "206.2 / 137.4 G = 1.50" in done.output
    assert "206.2 / 68.8 G = 3.00" in done.output


@pytest.mark.gpu
@pytest.mark.parametrize("rung", RUNGS, ids=ids)
def test_rungs_are_right_on_the_gpu(rung, request):
    if rung.id == "ladder.triton.step10":
        reason = "Triton 3.6 compiles warp_specialize wrongly for Hopper: the same source is right in its interpreter"
        request.node.add_marker(pytest.mark.xfail(reason=reason))
    where = torch.device("cuda")
    device = Device.of(where)
    for dtype in (torch.float16, torch.bfloat16):
        for _, problem, result in checking.check_all([rung], checking.check_problems(dtype, device, [64, 128]), where):
            if isinstance(result, str):
                pytest.skip(result)
            assert result.passed, f"{problem}: {result.message}"
