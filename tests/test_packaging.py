"""The wheel: everything is in it, it installs beside a torch that is there, and it works from there."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from peakattn import tuned

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the backend that is installed here, from a copy, so that nothing is downloaded and no build/ is left."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for path in (ROOT / "src").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and not path.parent.name.endswith(".egg-info"):
            target = source / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source))
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A fresh environment with the wheel, and with this environment's other packages behind it."""
    folder = tmp_path_factory.mktemp("venv")
    _run(sys.executable, "-m", "venv", str(folder))
    (python,) = (p for p in (folder / "bin" / "python", folder / "Scripts" / "python.exe") if p.exists())
    _run(str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    (site,) = _run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").split("\n")
    # Appended behind the fresh environment's own packages; the path file of an editable install is not read from there.
    Path(site, "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(python)


def _run(*command: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it would hide what is installed
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(command[0]).parent, env=env)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}\n{result.stderr}"
    return result.stdout.strip()


def test_every_source_file_is_in_the_wheel(wheel: Path) -> None:
    kept = set(zipfile.ZipFile(wheel).namelist())
    sources = (p for p in (ROOT / "src").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    wanted = {p.relative_to(ROOT / "src").as_posix() for p in sources if ".egg-info" not in p.as_posix()}
    assert wanted - kept == set()
    assert {"peakattn/py.typed", "peakattn_lab/data/passages.txt"} <= kept
    assert any(name.endswith("licenses/LICENSE") for name in kept)
    assert not any(name.startswith("tests") for name in kept)


def test_torch_is_the_only_requirement_without_extras(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith("METADATA"))
    lines = archive.read(name).decode().splitlines()
    assert [line for line in lines if line.startswith("Requires-Dist") and "extra ==" not in line] == [
        "Requires-Dist: torch>=2.9"
    ]
    extras = {line.removeprefix("Provides-Extra: ") for line in lines if line.startswith("Provides-Extra")}
    assert {"triton", "lab", "transformers", "demo", "test", "dev"} <= extras


def test_the_installed_package_computes_and_has_its_data(python: str) -> None:
    slugs = sorted(p.stem for p in (ROOT / "src" / "peakattn" / "tuned").glob("*.json"))
    printed = _run(
        python,
        "-c",
        "import importlib.metadata as m, sys, torch, peakattn, peakattn.tuned\n"
        "q = torch.ones(1, 3, 2, 8)\n"
        "print(peakattn.__file__)\n"
        "print(peakattn.__version__ == m.version('peakattn'))\n"
        "print(torch.equal(peakattn.attention(q, q, q, causal=True), q))\n"
        "print([len(peakattn.tuned.entries(slug)) for slug in sys.argv[1:]])\n",
        *slugs,
    ).split("\n")
    assert str(Path(python).parent.parent) in printed[0]
    assert printed[1:] == ["True", "True", str([len(tuned.entries(slug)) for slug in slugs])]


def test_the_command_starts(python: str) -> None:
    command = next(p for p in Path(python).parent.glob("peakattn*") if p.is_file())
    assert "doctor" in _run(str(command), "--help")
    assert "chosen: cpu.fwd" in _run(str(command), "explain", "--device", "cpu", "--seqlen", "128")


def test_the_command_without_the_laboratory_says_what_to_install(python: str) -> None:
    code = "import sys; sys.modules['typer'] = None; from peakattn_lab.cli import main; main()"
    result = subprocess.run([python, "-c", code], capture_output=True, text=True)
    assert result.returncode != 0
    assert 'pip install "peakattn[lab]"' in result.stderr
    assert "Traceback" not in result.stderr
