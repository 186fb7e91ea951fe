"""Where, when and with what something was measured."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import platform
import subprocess
import uuid
from pathlib import Path
from typing import Any

import pydantic

from peakattn.device import KNOWN, Device

RUN_ID = uuid.uuid4().hex[:12]


class Provenance(pydantic.BaseModel):
    """Where and with what a row was measured. ``dirty`` says that sources differed from the commit."""

    time: str  # UTC, ISO 8601
    run: str  # rows of one run were interleaved with each other
    commit: str | None
    dirty: bool | None
    device: str
    arch: int
    driver: str | None
    platform: str
    python: str
    versions: dict[str, str]  # packages, and the CUDA and cuDNN that torch was built with

    @property
    def facts(self) -> Device:
        """What is known of the device; of one that is unknown, what is known of another of its architecture."""
        return known_device(self.device) or Device.for_arch(self.arch)


def known_device(name: str | None) -> Device | None:
    """The GPU of that full name, or None when ``device.py`` does not know it."""
    return next((device for device in KNOWN.values() if device.name == name), None)


def here(device: str, arch: int, commit: str | None = None) -> Provenance:
    """Where this process measures, now. ``commit`` is that of a tree which was copied without its repository, and wins."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    where = Provenance(time=now, device=device, arch=arch, **_constant_provenance())
    return where if commit is None else where.model_copy(update={"commit": commit, "dirty": None})


@functools.cache
def _constant_provenance() -> dict[str, Any]:
    from peakattn_lab import observe

    commit, dirty = git_state()
    return {
        "run": RUN_ID,
        "commit": commit,
        "dirty": dirty,
        "driver": observe.driver_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Versions of what decides speed: packages that are installed, CUDA and cuDNN."""
    import torch

    found = {}
    for package in ("peakattn", "torch", "triton", "cuda-tile", "nvidia-cutlass-dsl", "fa3-fwd", "flash-attn-4"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def checkout() -> Path | None:
    """The root of the checkout that this package runs from, or None when it was installed from a wheel."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").is_file() and (root / "tests").is_dir() else None


def git_state() -> tuple[str | None, bool | None]:
    """(commit, dirty) of the checkout; (None, None) outside one or without git.

    A copy of the files inside another repository is none: that repository's commit says nothing about them.
    """
    root = checkout()
    if root is None:
        return None, None
    try:
        if Path(_git(root, "rev-parse", "--show-toplevel")).resolve() != root:
            return None, None
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--", "src", "pyproject.toml")
    except (OSError, subprocess.SubprocessError):
        return None, None
    return commit, bool(changed)


def _git(root: Path, *arguments: str) -> str:
    result = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=20)
    return result.stdout.strip()
