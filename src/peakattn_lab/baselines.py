"""Contenders: peakattn and its rivals, behind one shape. Each says what is missing, what it cannot do, and what really ran.

A contender takes and gives ``[batch, seqlen, num_heads, head_dim]``.  Its backward is ``torch.autograd.grad`` over a
graph that was built beforehand, so that every contender's gradients come the way a training step gets them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from peakattn import dispatch
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab import problems, timing
from peakattn_lab.wording import failure

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Contender:
    """Anything that computes attention.

    ``unavailable(device)`` and ``reject(problem)`` give a sentence or None.  ``function(problem)`` gives the bare
    function of q, k and v, with nothing of ours between the clock and it: it must be called inside ``held()``, on
    tensors that ``arrange`` has brought into its layout, and ``out_of`` finds the output in what it returns.
    """

    name: str
    title: str
    unavailable: Callable[[Device], str | None]
    reject: Callable[[AttentionProblem], str | None]
    function: Callable[[AttentionProblem], Callable[..., Any]]
    held: timing.Held = contextlib.nullcontext
    transposed: bool = False  # [batch, num_heads, seqlen, head_dim]
    package: str = "torch"
    backend: str | None = None  # of peakattn itself: what was asked for

    @property
    def ours(self) -> bool:
        """True for peakattn, with or without a named backend."""
        return is_ours(self.name)

    def version(self) -> str | None:
        """The version of the package whose kernel this is."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def arrange(self, x: torch.Tensor) -> torch.Tensor:
        """A view of ``[batch, seqlen, num_heads, head_dim]`` in the contender's layout, or back."""
        return x.transpose(1, 2) if self.transposed else x

    @staticmethod
    def out_of(result: Any) -> torch.Tensor:
        """The output, of a function that may also return an lse."""
        return result[0] if isinstance(result, tuple) else result


OURS = "peakattn"


def is_ours(name: str) -> bool:
    """True for the name of peakattn as a contender, with or without a named backend."""
    return name.split(":")[0] == OURS


def ours(backend: str | None = None) -> Contender:
    """peakattn with its own choice of kernel, or with ``backend``, which may be a kernel id of either direction."""

    def function(problem: AttentionProblem) -> Callable[..., Any]:
        import peakattn

        asked = backend
        if backend is not None and problem.direction == "bwd":
            asked = backend.split(".")[0]
        chosen = {} if asked is None else {"backend": asked}
        return functools.partial(peakattn.attention, **chosen, **problems.options(problem))

    def reject(problem: AttentionProblem) -> str | None:
        try:
            _choose(problem, backend)
        except (dispatch.NoKernelError, ValueError) as error:
            return str(error)
        return None

    name = OURS if backend is None else f"{OURS}:{backend}"
    return Contender(name, name, lambda device: None, reject, function, package="peakattn", backend=backend)


def _choose(problem: AttentionProblem, backend: str | None) -> dispatch.Choice:
    return dispatch.choose(problem, Device.of(torch.device(problem.device_type)), backend=backend)


def choice_of(contender: Contender, problem: AttentionProblem) -> dispatch.Choice | None:
    """The kernel and config with which peakattn computes the problem; None for a rival."""
    return _choose(problem, contender.backend) if contender.ours else None


def _sdpa(name: str, title: str, backend: str | None, devices: tuple[str, ...]) -> Contender:
    """torch's scaled_dot_product_attention held to one backend, so that it raises rather than run another."""

    def unavailable(device: Device) -> str | None:
        return None if device.type in devices else f"{title} runs on {' and '.join(devices)}, not on {device.type}."

    def reject(problem: AttentionProblem) -> str | None:
        if problem.mask_name == "window":
            return "torch SDPA has no window without a mask tensor of seqlen_q x seqlen_k."
        if problem.softcap:
            return "torch SDPA has no softcap."
        if problem.causal and problem.offset:
            return "torch SDPA's is_causal is aligned top-left."
        scores = 4 * problem.batch * problem.num_heads_q * problem.seqlen_q * problem.seqlen_k
        if backend == "MATH" and scores > _MATH_BYTES:
            return f"torch SDPA math would hold score matrices of {scores / 2**30:.1f} GiB each."
        return None

    def function(problem: AttentionProblem) -> Callable[..., Any]:
        keywords: dict[str, Any] = {"is_causal": True} if problem.causal else {}
        if problem.group > 1:
            keywords["enable_gqa"] = True
        return functools.partial(torch.nn.functional.scaled_dot_product_attention, **keywords)

    def held() -> contextlib.AbstractContextManager[Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return contextlib.nullcontext() if backend is None else sdpa_kernel(getattr(SDPBackend, backend))

    return Contender(name, title, unavailable, reject, function, held, transposed=True)


_MATH_BYTES = 2 << 30


@functools.cache
def _import_failure(module: str) -> str | None:
    """Why a module cannot be imported, or None; tried once, because a failing import is slow each time."""
    try:
        importlib.import_module(module)
    except Exception as error:  # such packages fail in their own ways: a missing library, another ABI, an assertion
        return failure(error)
    return None


def _flash_attn(
    name: str,
    title: str,
    *,
    module: str,
    package: str,
    min_arch: int,
    max_arch: int,
    forward_only: bool,
    unlimited: int | None,
) -> Contender:
    """A flash-attn package: ``flash_attn_func`` of ``module``. ``unlimited`` is what it calls an open window side."""

    def unavailable(device: Device) -> str | None:
        if not min_arch <= device.arch <= max_arch:
            return f"{title} needs sm_{min_arch}{'' if max_arch == min_arch else ' or newer'}; this is {device.name}."
        failure = _import_failure(module)
        return None if failure is None else f"{title} cannot be imported ({failure}); pip install {package}"

    def reject(problem: AttentionProblem) -> str | None:
        if problem.dtype not in (torch.float16, torch.bfloat16):
            return f"{title} takes float16 and bfloat16."
        if forward_only and problem.direction == "bwd":
            return f"{title} is a forward-only package."
        if problem.alignment == "top_left" and problem.seqlen_q != problem.seqlen_k and problem.mask_name != "full":
            return f"{title} aligns masks bottom-right."
        return None

    def function(problem: AttentionProblem) -> Callable[..., Any]:
        keywords: dict[str, Any] = {"causal": problem.causal}
        if problem.mask_name == "window":
            sides = (problem.window_left, problem.window_right)
            keywords["window_size"] = tuple(unlimited if side is None else side for side in sides)
        if problem.softcap:
            keywords["softcap"] = problems.SOFTCAP
        return functools.partial(importlib.import_module(module).flash_attn_func, **keywords)

    return Contender(name, title, unavailable, reject, function, package=package)


RIVALS: dict[str, Contender] = {
    c.name: c
    for c in (
        _sdpa("sdpa", "torch SDPA, its own choice", None, ("cpu", "cuda")),
        _sdpa("sdpa.flash", "torch SDPA flash", "FLASH_ATTENTION", ("cpu", "cuda")),
        _sdpa("sdpa.cudnn", "torch SDPA cuDNN", "CUDNN_ATTENTION", ("cuda",)),
        _sdpa("sdpa.efficient", "torch SDPA efficient", "EFFICIENT_ATTENTION", ("cuda",)),
        _sdpa("sdpa.math", "torch SDPA math", "MATH", ("cpu", "cuda")),
        _flash_attn(
            "fa3",
            "FlashAttention-3",
            module="fa3_fwd_interface",
            package="fa3-fwd",
            min_arch=90,
            max_arch=90,
            forward_only=True,
            unlimited=-1,
        ),
        _flash_attn(
            "fa4",
            "FlashAttention-4",
            module="flash_attn.cute",
            package="flash-attn-4",
            min_arch=90,
            max_arch=999,
            forward_only=False,
            unlimited=None,
        ),
    )
}

# What a bench compares with when nobody says: the ones that could win.
DEFAULT_RIVALS: dict[str, tuple[str, ...]] = {
    "cuda": ("sdpa.flash", "sdpa.cudnn", "fa3", "fa4"),
    "cpu": ("sdpa", "sdpa.math"),
}


def rival(name: str) -> Contender:
    """The rival of that name, or ValueError with the names there are."""
    try:
        return RIVALS[name]
    except KeyError:
        raise ValueError(f"rival {name!r} is unknown; known are {', '.join(RIVALS)}.") from None


@dataclass(frozen=True)
class Bound:
    """A contender on given tensors: ``call`` inside ``held`` is what gets timed, ``read`` finds the tensors in its result."""

    call: timing.Call
    read: Callable[[Any], Tensors]
    held: timing.Held

    def __call__(self) -> Tensors:
        """(out,), or (dq, dk, dv) of a backward, as ``[batch, seqlen, num_heads, head_dim]``."""
        with self.held():
            return self.read(self.call())


def bind(contender: Contender, problem: AttentionProblem, tensors: Tensors) -> Bound:
    """A contender on q, k, v, and dout for a backward.

    For a backward the forward runs here, once, on the current stream: autograd later launches on that same stream.
    """
    function = contender.function(problem)
    arranged = tuple(contender.arrange(x).detach() for x in tensors)
    if problem.direction == "fwd":
        call = functools.partial(function, *arranged)
        return Bound(call, lambda result: (contender.arrange(contender.out_of(result)),), contender.held)
    leaves = tuple(x.requires_grad_() for x in arranged[:3])
    with torch.enable_grad(), contender.held():
        out = contender.out_of(function(*leaves))
    call = functools.partial(torch.autograd.grad, out, leaves, arranged[3], retain_graph=True)
    return Bound(call, lambda result: tuple(map(contender.arrange, result)), contender.held)


def what_ran(call: Callable[[], Any]) -> list[str]:
    """The attention operators that PyTorch dispatched during a call, or all operators when none is named attention."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: dict[str, None] = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen[str(func).removeprefix("aten.")] = None
            return func(*args, **(kwargs or {}))

    with Watch():
        call()
    attention = [name for name in seen if "attention" in name]
    return attention or [name for name in seen if not any(plumbing in name for plumbing in _PLUMBING)]


_PLUMBING = ("transpose", "view", "empty", "detach", "alias", "permute", "expand", "slice", "unsqueeze", "t.default")


def config_fields(config: Any) -> dict[str, Any] | None:
    """A kernel's config as JSON values."""
    return dataclasses.asdict(config) if dataclasses.is_dataclass(config) and not isinstance(config, type) else None
