"""Machine code on disk, for compilers that keep none themselves: one file a kernel, named by a hash of all it came from."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import os
import tempfile
import zipfile
import zlib
from pathlib import Path


def folder(backend: str) -> Path:
    """Where a backend's kernels are kept: ``PEAKATTN_CACHE_DIR``, else ``peakattn`` in the user's cache folder."""
    given = os.environ.get("PEAKATTN_CACHE_DIR")
    root = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peakattn"
    return root / backend


def read(backend: str, key: str, members: tuple[str, ...]) -> list[bytes] | None:
    """The members of a kept kernel; a file that is missing, cut short or damaged is none."""
    try:
        with zipfile.ZipFile(folder(backend) / f"{key}.zip") as file:  # every member has a checksum
            return [file.read(member) for member in members]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, zlib.error):
        return None


def write(backend: str, key: str, members: dict[str, bytes]) -> None:
    """Keeps a kernel. Other processes see a whole file or none; a folder that cannot be written is no error."""
    with contextlib.suppress(OSError):
        home = folder(backend)
        home.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=home, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as raw, zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as file:
                for name, content in members.items():
                    file.writestr(name, content)
            os.replace(temporary, home / f"{key}.zip")
        except BaseException:
            os.unlink(temporary)
            raise


@functools.cache
def sources(module: str, toolchain: str) -> str:
    """A hash of a module's source, of the modules of its own top-level package that it imports, and of the toolchain's.

    None of them is imported.
    """
    package = module.split(".")[0]
    texts: dict[str, str] = {}
    waiting = [module, toolchain]
    while waiting:
        name = waiting.pop()
        spec = None
        if name not in texts:
            with contextlib.suppress(ModuleNotFoundError):  # a name imported from a module is seldom a module
                spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        texts[name] = text = Path(spec.origin).read_text(encoding="utf-8")
        if name == toolchain:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (package, "peakattn"):
                waiting += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()
