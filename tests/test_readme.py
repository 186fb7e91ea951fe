"""Every command and snippet of the README, of CONTRIBUTING and of the pages on ladders is run.

A block that needs a GPU, or takes long, has a comment of this form before it, and its commands are run instead::

    <!-- test: a command
    another command -->

Blocks in any other language than those of ``LANGUAGES`` fail, so that nothing is left out unseen.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from peakattn import store

ROOT = Path(__file__).resolve().parent.parent
LADDERS = [p.relative_to(ROOT).as_posix() for p in sorted((ROOT / "docs/ladders").glob("*.md"))]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", *LADDERS)
LANGUAGES = ("python", "sh")

_BLOCK = re.compile(
    r"(?:<!-- test: (?P<instead>.*?) -->\n)?^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    document: str
    line: int
    language: str
    body: str
    instead: str | None

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks(document: str) -> list[Block]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return [
        Block(document, text.count("\n", 0, match.start()) + 1, match["language"], match["body"], match["instead"])
        for match in _BLOCK.finditer(text)
    ]


BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]


def test_every_fence_is_a_block_in_a_known_language() -> None:
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        assert 2 * len(blocks(document)) == len(re.findall("^```", text, re.MULTILINE)), document
        assert text.count("<!-- test:") == sum(block.instead is not None for block in blocks(document)), document
    assert {block.language for block in BLOCKS} <= set(LANGUAGES)
    assert any(block.language == "python" for block in BLOCKS)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "sh"], ids=str)
def test_commands_run(block: Block, tmp_path: Path) -> None:
    commands = block.instead if block.instead is not None else block.body
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": here, "TMP": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, f"{block}\n{commands}\n{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_snippets_run_one_after_another(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_unsaved", {})  # what a snippet tunes is for this test alone
    names: dict[str, Any] = {}
    for block in blocks(document):
        if block.language == "python":
            assert block.instead is None, f"{block}: a snippet runs as it stands"
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block.body, str(block), "exec"), names)


def test_commands_that_are_run_in_another_form_exist() -> None:
    """What a reader is told to type: every `peakattn` command, every `make` verb, every extra."""
    from typer.main import get_command

    from peakattn_lab import cli

    text = "\n".join(block.body for block in BLOCKS if block.language == "sh")
    commands = set(getattr(get_command(cli.app), "commands"))  # noqa: B009
    assert set(re.findall(r"^peakattn (\w+)", text, re.MULTILINE)) <= commands
    verbs = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {verb for line in re.findall(r"^make (.*)$", text, re.MULTILINE) for verb in line.split("#")[0].split()} <= verbs
    extras = set(importlib.metadata.metadata("peakattn").get_all("Provides-Extra") or ())
    assert set(re.findall(r"\.\[(\w+)\]", text)) <= extras


@pytest.mark.parametrize("document", [*DOCUMENTS, "DESIGN.md", "CHANGELOG.md"])
def test_links_lead_somewhere(document: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / document).read_text(encoding="utf-8")):
        assert (ROOT / document).parent.joinpath(target).exists(), f"{document} links to {target}"
