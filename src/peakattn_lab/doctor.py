"""What is installed, which backends work and why not, GPU, driver, caches; and whether the main job can run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pydantic

from peakattn_lab.wording import failure

Status = Literal["ok", "missing", "failed"]

# What the laboratory is built on, and the extra that brings it.
_LAB = ("typer", "rich", "pydantic", "matplotlib", "jinja2", "platformdirs", "nvidia-ml-py")


class Finding(pydantic.BaseModel):
    """One thing that was looked at. ``fix`` is the line that mends it; only ``needed`` findings decide the exit code."""

    group: str
    name: str
    status: Status
    detail: str
    fix: str | None = None
    needed: bool = False


def examine() -> list[Finding]:
    """Everything, in the order in which it is shown."""
    return [*_basics(), *_gpus(), *_backends(), *_packages(), *_rivals(), *_caches(), *_main_job()]


def healthy(findings: list[Finding]) -> bool:
    """True when the main job can run."""
    return all(finding.status == "ok" for finding in findings if finding.needed)


def _basics() -> list[Finding]:
    import torch

    import peakattn

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return [
        Finding(group="system", name="python", status="ok", detail=f"{platform.python_version()} on {platform.platform()}"),
        Finding(group="system", name="torch", status="ok", detail=f"{torch.__version__}, built {built}", needed=True),
        Finding(group="system", name="peakattn", status="ok", detail=peakattn.__version__, needed=True),
    ]


def _gpus() -> list[Finding]:
    import torch

    from peakattn.device import Device
    from peakattn_lab import observe

    driver = observe.driver_version()
    found = [
        Finding(
            group="GPU",
            name="driver",
            status="ok" if driver else "missing",
            detail=driver or "no NVIDIA driver answers",
            fix=None if driver else "install NVIDIA's driver; without one everything runs on the CPU",
        )
    ]
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        fix = "install a CUDA build of torch, see pytorch.org" if driver and not torch.version.cuda else None
        return [*found, Finding(group="GPU", name="device", status="missing", detail=why, fix=fix)]
    for index in range(torch.cuda.device_count()):
        device = Device.of(torch.device("cuda", index))
        old = device.arch < 80
        detail = (
            f"{device.name}, sm_{device.arch}, {device.num_sms} SMs, {device.smem_per_block // 1024} KiB shared memory a block"
        )
        found.append(
            Finding(
                group="GPU",
                name=f"cuda:{index}",
                status="failed" if old else "ok",
                detail=detail,
                fix="GPU kernels start at compute capability 8.0; tensors on the CPU work" if old else None,
            )
        )
    return found


def _backends() -> list[Finding]:
    from peakattn import backends, dispatch

    found = []
    for backend in backends.BACKENDS:
        reason = dispatch.unavailable(backend)
        if reason is None:
            detail, fix = backends.toolchain(backend).version(), None
        else:
            detail, _, fix = reason.partition("; ")
        kernels = ", ".join(k for k in backends.KERNELS if k.startswith(backend + "."))
        status: Status = "ok" if reason is None else "missing"
        needed = backend == "cpu"
        found.append(
            Finding(
                group="backends", name=backend, status=status, detail=f"{detail} ({kernels})", fix=fix or None, needed=needed
            )
        )
    return found


def _packages() -> list[Finding]:
    found = []
    for package in _LAB:
        try:
            version = importlib.metadata.version(package)
            found.append(Finding(group="laboratory", name=package, status="ok", detail=version))
        except importlib.metadata.PackageNotFoundError:
            fix = 'pip install "peakattn[lab]"'
            found.append(Finding(group="laboratory", name=package, status="missing", detail="not installed", fix=fix))
    return found


def _rivals() -> list[Finding]:
    import torch

    from peakattn.device import Device
    from peakattn_lab import baselines

    device = Device.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    found = []
    for rival in baselines.RIVALS.values():
        reason = rival.unavailable(device)
        fix = f"pip install {rival.package}" if reason and "pip install" in reason else None
        status: Status = "ok" if reason is None else "missing"
        detail = reason or f"{rival.title}, {rival.package} {rival.version()}"
        found.append(Finding(group="rivals", name=rival.name, status=status, detail=detail, fix=fix))
    return found


def _caches() -> list[Finding]:
    from peakattn import backends, dispatch, store
    from peakattn.backends import codecache

    where = store.folder()
    if where is None:
        found = [Finding(group="caches", name="tuned configs", status="ok", detail="off, by PEAKATTN_STORE")]
    else:
        found = [_cache("tuned configs", where, "set PEAKATTN_STORE to a folder that you can write")]
    for backend in backends.BACKENDS:
        if backend != "cpu" and dispatch.unavailable(backend) is None:
            own = backend == "triton"  # Triton keeps what it compiled itself
            variable = "TRITON_CACHE_DIR" if own else "PEAKATTN_CACHE_DIR"
            folder = backends.toolchain(backend).cache_folder() if own else codecache.folder(backend)
            found.append(_cache(backend, folder, f"set {variable} to a folder that you can write"))
    return found


def _cache(name: str, folder: Path, fix: str) -> Finding:
    """Whether a file can be made in a folder, or in the nearest of its parents that exists."""
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        return Finding(group="caches", name=name, status="failed", detail=f"{folder}: {error.strerror}", fix=fix)
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) if folder.exists() else 0
    return Finding(group="caches", name=name, status="ok", detail=f"{_shown(folder)}, {size / 2**20:.0f} MiB")


def _shown(folder: Path) -> str:
    home = os.path.expanduser("~")
    return str(folder).replace(home, "~", 1) if str(folder).startswith(home) else str(folder)


def _main_job() -> list[Finding]:
    import torch

    jobs: list[tuple[str, Callable[[], str]]] = [("cpu", lambda: _attend("cpu", torch.float32))]
    if torch.cuda.is_available():
        jobs.append(("cuda", lambda: _attend("cuda", torch.bfloat16)))
    found = []
    for name, job in jobs:
        try:
            found.append(Finding(group="main job", name=name, status="ok", detail=job(), needed=True))
        except Exception as error:  # whatever goes wrong is what the user came to learn
            detail = failure(error)
            fix = f"peakattn explain --device {'cpu' if name == 'cpu' else 'current'} shows which kernels refuse, and why"
            found.append(Finding(group="main job", name=name, status="failed", detail=detail, fix=fix, needed=True))
    return found


def _attend(device_type: str, dtype: Any) -> str:
    """Attention and its gradients on a small causal problem, held to the oracle."""
    import torch

    from peakattn_lab import baselines, gate, problems

    kernels = []
    for direction in ("fwd", "bwd"):
        problem = problems.on_device(
            problems.make(96, 64, heads=(4, 2), causal=True, dtype=dtype, direction=direction),
            device_type,
        )
        tensors = problems.inputs(problem, torch.device(device_type), seed=0)
        result = gate.Gate(problem, tensors).check(baselines.bind(baselines.ours(), problem, tensors)())
        if not result.passed:
            raise RuntimeError(result.message)
        choice = baselines.choice_of(baselines.ours(), problem)
        kernels.append(choice.kernel_id if choice else "")
    return f"attention and its gradients agree with the float64 oracle ({', '.join(kernels)})"
