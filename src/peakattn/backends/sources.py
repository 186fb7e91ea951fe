"""Which files a kernel is made of, and a hash of them: whether a measurement still speaks of the kernel that is here."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from peakattn.backends import KERNELS


@functools.cache
def kernel_hash(kernel_id: str) -> str | None:
    """A hash of the files of ``kernel_sources``; None for a kernel that is gone.

    Blank lines and comment lines do not count; in CUDA a line that starts with # is one of the preprocessor, and counts.
    """
    if kernel_id not in KERNELS:
        return None
    digest = hashlib.sha256()
    for path in sorted(kernel_sources(kernel_id)):
        digest.update(path.name.encode())
        comment = "#" if path.suffix == ".py" else "//"
        lines = path.read_text(encoding="utf-8").splitlines()
        digest.update("\n".join(s.rstrip() for s in lines if s.strip() and not s.lstrip().startswith(comment)).encode())
    return digest.hexdigest()[:16]


def kernel_sources(kernel_id: str) -> set[Path]:
    """The kernel's file, every file of its backend that it imports, CUDA sources of the same name, and the order of tiles."""
    package = KERNELS[kernel_id].rpartition(".")[0]
    folder = Path(__file__).resolve().parent / package.rpartition(".")[2]
    # Parsing the files would take longer than everything else that a process does before its first launch.
    imports = re.compile(
        rf"^[ \t]*(?:from {re.escape(package)}(?:\.(\w+))? import (\([^)]*\)|.*)|import {re.escape(package)}\.(\w+))", re.M
    )
    found: set[Path] = set()
    queue = [KERNELS[kernel_id].rpartition(".")[2]]
    while queue:
        path = folder / f"{queue.pop()}.py"
        if path in found or not path.is_file():
            continue
        found.add(path)
        found.update(folder.glob(f"{path.stem}.cu*"))
        text = path.read_text(encoding="utf-8")
        if "from peakattn.backends import tiles" in text:
            found.add(folder.parent / "tiles.py")
        if path.with_suffix(".cu").is_file():
            found.update(folder.glob("*.cuh"))
        for module, names, plain in imports.findall(text):
            queue += [module or plain] if module or plain else re.findall(r"\w+", names)
    return found
