"""Machine code on disk, for compilers that keep none themselves: one file a kernel, named by a hash of all it came from."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Compiled:
    """Machine code of one device function; ``ptx`` is empty where the compiler shows none."""

    key: str
    name: str
    cubin: bytes
    ptx: str = ""


class Kept:
    """A backend's compiled kernels by key: from this process, else from disk, else from its compiler, one at a time."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._here: dict[str, Compiled] = {}
        self._compiling = threading.Lock()  # compilers keep their state in globals

    def get(self, key: str, compile_it: Callable[[], Compiled]) -> Compiled:
        with self._compiling:
            found = self._here.get(key) or self._from_disk(key)
            if found is None:
                found = compile_it()
                members = {"name": found.name.encode(), "cubin": found.cubin, "ptx": found.ptx.encode()}
                write(self._backend, key, members)
            self._here[key] = found
        return found

    def _from_disk(self, key: str) -> Compiled | None:
        members = read(self._backend, key, ("name", "cubin", "ptx"))
        return None if members is None else Compiled(key, members[0].decode(), members[1], members[2].decode())


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
    """A hash of a module's source, of what it imports from its own package or the toolchain's, and of the toolchain's source.

    Nothing is imported.
    """
    packages = tuple(f"{name.rpartition('.')[0]}." for name in (module, toolchain))
    texts: dict[str, str] = {}
    waiting = [module, toolchain]
    while waiting:
        name = waiting.pop()
        spec = _spec(name)
        if spec is None or spec.origin is None or name in texts:
            continue
        texts[name] = text = Path(spec.origin).read_text(encoding="utf-8")
        if name == toolchain:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module and f"{node.module}.".startswith(packages):
                waiting.append(node.module)
                source = _spec(node.module)
                # To ask for a name inside a module that is no package would import that module, and the compiler with it.
                if source is not None and source.submodule_search_locations is not None:
                    waiting += [f"{node.module}.{alias.name}" for alias in node.names]
    return hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(name)
    return None
