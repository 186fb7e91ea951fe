"""Records: the schema, files that a killed process left, resuming, kernel hashes."""

from __future__ import annotations

import gzip
import json
import subprocess

import pydantic
import pytest

from lab.records_of import PROBLEM, record
from peakattn import backends
from peakattn.backends import sources
from peakattn_lab import problems, provenance, records


def test_a_record_survives_the_file(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    row = record("peakattn", 800.0, kernel="cpu.fwd", kernel_hash="x", config={"block_m": 128}, observed={"sm_mhz": [1, 2, 3]})
    records.append(path, row)
    records.append(path, record("fa3", 900.0))
    assert records.read(path)[0] == row
    assert [r.contender for r in records.read(path)] == ["peakattn", "fa3"]
    assert problems.from_dict(records.read(path)[0].problem) == PROBLEM


def test_provenance_is_complete():
    where = provenance.here("NVIDIA H200", 90, commit="abc")
    assert where.versions["torch"]
    assert where.python
    assert (where.commit, where.dirty) == ("abc", None), "who gives a commit knows better than the folder above"
    assert where.time.endswith("+00:00")


def test_a_copy_inside_another_repository_has_no_commit_of_its_own(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    inner = tmp_path / "copy"
    inner.mkdir()
    monkeypatch.setattr(provenance, "checkout", lambda: inner)
    assert provenance.git_state() == (None, None)


def test_a_truncated_last_line_is_left_out_and_then_cut_off(tmp_path):
    path = tmp_path / "rows.jsonl"
    for name in ("peakattn", "fa3"):
        records.append(path, record(name, 800.0))
    path.write_bytes(path.read_bytes()[:-40])
    assert [r.contender for r in records.read(path)] == ["peakattn"]
    records.append(path, record("fa4", 800.0))
    assert [r.contender for r in records.read(path)] == ["peakattn", "fa4"]


def test_a_packed_file_reads_as_it_did_before(tmp_path):
    path = tmp_path / "rows.jsonl"
    records.append(path, record("fa3", 800.0))
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert records.read(packed) == records.read(path)
    assert records.kind_of_file(packed) == records.kind_of_file(path) is not None


def test_damage_elsewhere_names_the_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n")
    records.append(path, record("fa3", 800.0))
    with pytest.raises(ValueError, match="line 1 is not a record: provenance Field required"):
        records.read(path)


def test_another_schema_and_unknown_fields_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    records.append(path, record("fa3", 800.0, schema_version=99))
    with pytest.raises(ValueError, match="has schema 99"):
        records.read(path)
    with pytest.raises(pydantic.ValidationError):
        record("fa3", 800.0, colour="red")


def test_speed_is_known_only_with_samples_and_a_green_gate():
    assert record("a", 1.0).speed_known
    assert not record("a", 1.0, gate=None).speed_known
    red = record("a", 1.0, gate=records.Gate(passed=False, message="dq errs"))
    assert not red.speed_known
    assert red.reason == "wrong: dq errs"
    assert record("a", 1.0, samples_us=[], gate=None, skipped="needs sm_90").reason == "needs sm_90"


def test_tflops_are_useful_ones():
    assert record("a", 1000.0).tflops == pytest.approx(PROBLEM.flops / 1e-3 / 1e12)


def test_resume_measures_again_what_a_changed_kernel_did():
    fresh = record("peakattn", 1.0, kernel="cpu.fwd", kernel_hash=records.kernel_hash("cpu.fwd"))
    old = record("peakattn:cpu", 1.0, kernel="cpu.fwd", kernel_hash="0" * 16)
    rival = record("fa3", 1.0)
    done = records.done([fresh, old, rival], "NVIDIA H200")
    assert done == {fresh.key, rival.key}
    assert records.done([fresh], "NVIDIA B200") == set()
    assert records.stale([fresh, old, rival]) == ["cpu.fwd"]


def test_the_hash_covers_the_kernel_and_what_it_imports_from_its_backend():
    for kernel_id in backends.KERNELS:
        found = sources.kernel_sources(kernel_id)
        own = {p for p in found if p.name != "tiles.py"}  # the order of tiles is shared
        if own:
            assert {p.parent.name for p in own} == {kernel_id.split(".")[0]}
    names = {p.name for p in sources.kernel_sources("triton.fwd")}
    assert {"fwd.py", "device_fwd.py", "toolchain.py"} <= names
    assert not {"contract.py", "tiles.py"} & names
    cute = {"device_fwd_sm90.py", "device_hopper_ops.py", "device_output_sm90.py", "device_softmax_sm90.py", "tiles.py"}
    assert cute <= {p.name for p in sources.kernel_sources("cute.fwd_sm90")}
    assert {"fwd_sm80.cu", "attention_ops.cuh"} <= {p.name for p in sources.kernel_sources("cuda.fwd_sm80")}
    assert records.kernel_hash("gone.fwd") is None


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("fwd.py", ("a = 1\nb = 2\n", "a = 1\n\n# why\nb = 2  \n", "a = 1\nb = 3\n")),
        ("fwd.cu", ("#pragma unroll 2\nf();\n", "\n// why\n#pragma unroll 2\nf();  \n", "#pragma unroll 4\nf();\n")),
    ],
)
def test_comments_and_blank_lines_do_not_change_the_hash(name, texts, tmp_path, monkeypatch):
    source = tmp_path / name
    monkeypatch.setattr(sources, "kernel_sources", lambda kernel_id: {source})
    hashes = []
    for text in texts:
        source.write_text(text)
        records.kernel_hash.cache_clear()
        hashes.append(records.kernel_hash("cpu.fwd"))
    records.kernel_hash.cache_clear()
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("name", problems.SETS)
def test_problem_sets_are_distinct_and_survive_json(name):
    found = problems.named(name).problems
    assert len(set(found)) == len(found)
    assert len({problems.label(p) for p in found}) == len(found)
    for problem in found:
        assert problems.from_dict(json.loads(json.dumps(problems.to_dict(problem)))) == problem


def test_the_cells_have_16k_tokens_and_a_width_of_2048():
    for name in ("prefill", "backward"):
        found = problems.named(name).problems
        assert len(found) == 18
        assert {p.batch * p.seqlen_q for p in found} == {16384}
        assert {p.num_heads_q * p.head_dim for p in found} == {2048}
    with pytest.raises(ValueError, match="known are prefill"):
        problems.named("decode")
