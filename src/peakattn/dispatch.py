"""Which kernel, and which config: choose() -> Choice, or NoKernelError with every refusal.

The order of configs: given by the caller, then the user's store (this GPU, this shape class), then tuned (this GPU,
nearest length bucket), then the kernel's own default.
The order of kernels: the one that the store names for the shape class, then ``preference``, where kernels with a tuned
entry for the same shape class change places by the speed it tells.
Nothing here times, compiles, prints or falls back silently.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from peakattn import store, tuned
from peakattn.backends import BACKENDS, EXTRAS, KERNELS, load, toolchain
from peakattn.device import Device
from peakattn.problem import AttentionProblem


class NoKernelError(RuntimeError):
    """No kernel takes this problem; the message lists each kernel's reason."""


@dataclass(frozen=True)
class Choice:
    """A kernel and a config for one problem, and how they were found; prints as one sentence."""

    kernel_id: str
    kernel: ModuleType
    config: Any
    config_source: str  # "given", "stored", "tuned" or "default"
    refusals: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        knobs = ", ".join(f"{f.name}={getattr(self.config, f.name)}" for f in dataclasses.fields(self.config))
        return f"{self.kernel_id} with {self.config_source} config ({knobs})"


def preference(problem: AttentionProblem, device: Device) -> tuple[str, ...]:
    """Kernel ids to try in order, as far as no measurement of the problem's shape class says otherwise."""
    if device.type == "cpu":
        return (f"cpu.{problem.direction}",)
    if problem.direction == "bwd":
        return ("triton.bwd", "cutile.bwd")
    if device.arch == 90:
        return ("cute.fwd_sm90", "cuda.fwd_sm90", "triton.fwd_sm90", "triton.fwd", "cute.fwd_sm80")
    return ("triton.fwd", "cute.fwd_sm80")


def choose(
    problem: AttentionProblem, device: Device, backend: str | None = None, config: Any = None, *, stored: bool = True
) -> Choice:
    """The first kernel in order that takes the problem, with its config.

    ``backend`` is a backend ("triton") or a kernel id ("triton.fwd_sm90") and never falls back to another.
    ``config`` is an instance of the kernel's Config, or a dict of its fields.  ``stored=False`` is the choice of a
    machine on which nothing was ever tuned.
    """
    order = candidates(problem, device, backend)
    allowed = order if backend is not None else [k for k in KERNELS if _direction(k) == problem.direction]
    refusals: dict[str, str] = {}
    found = None
    if stored and config is None:
        found, refusals = store.lookup(device, problem, allowed)
    if found is not None:
        order = [found.kernel, *(k for k in order if k != found.kernel)]
    for kernel_id in order:
        reason = unavailable(kernel_id.split(".")[0])
        if reason is None:
            kernel = load(kernel_id)
            reason = kernel.reject(problem, device)
        if reason is not None:
            refusals[kernel_id] = reason
            continue
        if config is not None:
            return Choice(kernel_id, kernel, _given(kernel_id, kernel, config), "given", refusals)
        if found is not None and found.kernel == kernel_id:
            return Choice(kernel_id, kernel, kernel.Config(**found.config), "stored", refusals)
        entry = tuned.lookup(device, problem, kernel_id)
        if entry is not None:
            return Choice(kernel_id, kernel, kernel.Config(**entry.config), "tuned", refusals)
        return Choice(kernel_id, kernel, kernel.default_config(problem, device), "default", refusals)
    lines = "\n".join(f"  {kernel_id}: {reason}" for kernel_id, reason in refusals.items())
    raise NoKernelError(f"no kernel takes this problem on {device.name}: {problem}.\n{lines}\n{_nearest(backend, device)}")


def candidates(problem: AttentionProblem, device: Device, backend: str | None = None) -> list[str]:
    """Kernel ids in the order in which they are tried where nothing is stored."""
    order = list(preference(problem, device))
    if backend is not None:
        order = _named(backend, problem, order)
    nearest = tuned.lookup(device, problem)
    if nearest is None:
        return order
    found = {k: tuned.lookup(device, problem, k) for k in order}
    # Against the best rival of their own runs: absolute speeds of two days cannot be ranked.
    ratios = {
        k: entry.evidence["of_best_rival"]
        for k, entry in found.items()
        if entry and entry.key == nearest.key and "of_best_rival" in entry.evidence
    }
    ranked = iter(sorted(ratios, key=lambda k: -ratios[k]))
    return [next(ranked) if k in ratios else k for k in order]


def unavailable(backend: str) -> str | None:
    """Why a backend cannot work in this process, with the line that installs it, or None."""
    try:
        reason: str | None = toolchain(backend).unavailable()
    except ImportError as error:
        reason = f"{error.name or error} is not installed"
    if reason is not None and EXTRAS.get(backend):
        reason += f'; install it with: pip install "peakattn[{EXTRAS[backend]}]"'
    return reason


def backward_backend(backend: str | None) -> str | None:
    """The backend of a backward whose forward was asked of ``backend``: the same family where it has a backward."""
    if backend is None:
        return None
    family = backend.split(".")[0]
    return family if any(_direction(k) == "bwd" and k.startswith(family + ".") for k in KERNELS) else None


def _direction(kernel_id: str) -> str:
    return kernel_id.split(".")[1].split("_")[0]


def _named(backend: str, problem: AttentionProblem, preferred: list[str]) -> list[str]:
    if backend in KERNELS:
        if _direction(backend) != problem.direction:
            raise ValueError(f"backend {backend!r} is a {_direction(backend)} kernel and the problem is {problem.direction}.")
        return [backend]
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed are {', '.join(BACKENDS)}, or a kernel id: {', '.join(KERNELS)}.")
    ids = [k for k in KERNELS if k.startswith(backend + ".") and _direction(k) == problem.direction]
    return sorted(ids, key=lambda k: preferred.index(k) if k in preferred else len(preferred))


def _given(kernel_id: str, kernel: ModuleType, config: Any) -> Any:
    if isinstance(config, dict):
        try:
            return kernel.Config(**config)
        except TypeError as error:
            knobs = ", ".join(f.name for f in dataclasses.fields(kernel.Config))
            raise TypeError(f"config {config} does not fit {kernel_id} ({error}); its knobs are {knobs}.") from None
    if not isinstance(config, kernel.Config):
        raise TypeError(
            f"config is a {type(config).__module__}.{type(config).__qualname__}; {kernel_id} takes "
            f"{kernel.__name__}.Config or a dict of its fields."
        )
    return config


def _nearest(backend: str | None, device: Device) -> str:
    if backend is not None:
        return "Leave out backend= to let peakattn choose among all kernels."
    if device.type == "cuda" and device.arch < 80:
        return f"{device.name} has compute capability {device.arch / 10}; GPU kernels start at 8.0: move q, k and v to the CPU."
    return "The nearest thing that works is the CPU backend: move q, k and v to the CPU."
