"""Machine code on disk: what was written is read, and whatever else is there is a miss."""

from __future__ import annotations

from pathlib import Path

import pytest

from peakattn.backends import codecache

MEMBERS = {"name": b"kernel", "cubin": b"\x7fELF" + bytes(1000)}


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PEAKATTN_CACHE_DIR", str(tmp_path))
    return tmp_path / "cutile"


def test_what_was_written_is_read(home: Path) -> None:
    codecache.write("cutile", "key", MEMBERS)
    assert codecache.read("cutile", "key", ("cubin", "name")) == [MEMBERS["cubin"], MEMBERS["name"]]
    assert [file.name for file in home.iterdir()] == ["key.zip"], "no temporary file is left"


def test_another_key_another_member_and_a_damaged_file_are_misses(home: Path) -> None:
    codecache.write("cutile", "key", MEMBERS)
    assert codecache.read("cutile", "other", ("name",)) is None
    assert codecache.read("cutile", "key", ("ptx",)) is None
    file = home / "key.zip"
    content = bytearray(file.read_bytes())
    content[36] ^= 0xFF  # in the data of the first member
    file.write_bytes(content)
    assert codecache.read("cutile", "key", ("name", "cubin")) is None
    file.write_bytes(content[:40])
    assert codecache.read("cutile", "key", ("name", "cubin")) is None


def test_a_folder_that_cannot_be_made_is_no_error(home: Path) -> None:
    home.write_text("a file where the folder should be")
    codecache.write("cutile", "key", MEMBERS)
    assert codecache.read("cutile", "key", ("name",)) is None


def test_the_hash_of_sources_follows_what_device_code_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "made_up"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "kernel.py").write_text("import nowhere\nfrom made_up.ops import f\n")
    (package / "ops.py").write_text("f = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = codecache.sources("made_up.kernel", "peakattn.backends.cutile.toolchain")
    codecache.sources.cache_clear()
    assert codecache.sources("made_up.kernel", "peakattn.backends.cutile.toolchain") == before
    (package / "ops.py").write_text("f = 2\n")
    codecache.sources.cache_clear()
    assert codecache.sources("made_up.kernel", "peakattn.backends.cutile.toolchain") != before
