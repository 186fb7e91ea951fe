"""The kernel contract: a kernel is a module with five names.

``Config``           frozen dataclass of knobs; ``__post_init__`` says in a sentence what no problem can use
``reject``           None when the kernel takes the problem on the device, else the reason as a sentence
``default_config``   the config to use when nothing was given or tuned
``search_space``     every legal config, by the same shared-memory and register estimate that ``reject`` uses
``launch``           grid, strides, launch; no policy

A kernel may also have ``prepare``: everything that ``launch`` would compute again on each call, done once for
tensors of given shapes, strides, dtypes and alignment; it returns a function with the tensors as arguments.
Conventions shared by all kernels:

- tensors are ``[batch, seqlen, num_heads, head_dim]`` with any strides; ``out`` has q's dtype; ``lse`` is the natural
  log, float32, contiguous ``[batch, num_heads_q, seqlen_q]``, and None in a forward when nobody wants it
- ``softmax_scale`` is positive here: the API has folded any other sign into q; ``softcap`` is 0.0 when there is none
- a row with no visible key gives out 0, lse -inf, gradients 0
- ``out`` and ``lse`` mean the same everywhere, so any forward pairs with any backward
- a launch runs on the tensors' device and that device's current stream; the caller has made the device current
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from peakattn.device import Device
from peakattn.problem import AttentionProblem


@runtime_checkable
class ForwardKernel(Protocol):
    """A module that computes out, and lse when given a tensor for it."""

    @property
    def Config(self) -> type: ...
    def reject(self, problem: AttentionProblem, device: Device) -> str | None: ...
    def default_config(self, problem: AttentionProblem, device: Device) -> Any: ...
    def search_space(self, problem: AttentionProblem, device: Device) -> Iterable[Any]: ...
    def launch(
        self,
        problem: AttentionProblem,
        config: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        softmax_scale: float,
        softcap: float,
    ) -> None: ...


@runtime_checkable
class BackwardKernel(Protocol):
    """A module that computes those of dq, dk, dv that are not None; dlse is the gradient through lse, or None."""

    @property
    def Config(self) -> type: ...
    def reject(self, problem: AttentionProblem, device: Device) -> str | None: ...
    def default_config(self, problem: AttentionProblem, device: Device) -> Any: ...
    def search_space(self, problem: AttentionProblem, device: Device) -> Iterable[Any]: ...
    def launch(
        self,
        problem: AttentionProblem,
        config: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        dq: torch.Tensor | None,
        dk: torch.Tensor | None,
        dv: torch.Tensor | None,
        softmax_scale: float,
        softcap: float,
    ) -> None: ...


@dataclass(frozen=True)
class Artifacts:
    """What a compiler made of one kernel under one config, read from the machine code with no GPU.

    A kernel that launches several device functions gives one Artifacts for each.
    """

    name: str  # the device function
    arch: int
    registers: int  # per thread, as launched; warp-specialised kernels move them with setmaxnreg
    frame_bytes: int  # local memory frame of one thread
    shared_bytes: int  # dynamic and static shared memory of one block
    num_threads: int
    opcodes: dict[str, int] = field(default_factory=dict)  # SASS counts: HGMMA, HMMA, UTMALDG, LDGSTS, STL, LDL, MUFU, ...
    loops: list[dict[str, int]] = field(default_factory=list)  # the same for each innermost loop with products
    ptx: str | None = None
    sass: str | None = None

    @property
    def spill_instructions(self) -> int:
        """Loads and stores of local memory in the machine code."""
        return self.opcodes.get("STL", 0) + self.opcodes.get("LDL", 0)

    @property
    def loop_spills(self) -> int:
        """The same in the loop over tiles that has most of them: what a spill costs again and again."""
        return max((loop.get("STL", 0) + loop.get("LDL", 0) for loop in self.loops), default=0)


class Toolchain(Protocol):
    """``backends/<b>/toolchain.py``: is the compiler there, which version, and what it makes of a kernel."""

    def unavailable(self) -> str | None: ...
    def version(self) -> str: ...
    def artifacts(self, kernel: str, problem: AttentionProblem, config: Any, arch: int) -> list[Artifacts]: ...
