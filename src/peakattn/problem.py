"""AttentionProblem: one attention call, validated once, as a frozen value.

It owns the mask rule, the FLOP and byte counts and the shape class.  Everything that chooses,
tunes, checks or times a kernel is handed one of these and re-checks nothing.

    s[i, j]  = softmax_scale * <q[i], k[j]>              softcap * tanh(s / softcap) when softcap is given
    offset   = seqlen_k - seqlen_q  ("bottom_right")     or 0 ("top_left")
    visible  = i + offset - left <= j <= i + offset + right        causal: right = min(right, 0)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

Alignment = Literal["bottom_right", "top_left"]
Direction = Literal["fwd", "bwd"]

MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ALIGNMENTS = ("bottom_right", "top_left")

# A 16-byte multiple: what TMA asks of base addresses and of every stride but the last.
_VECTOR_BYTES = 16


@dataclass(frozen=True)
class AttentionProblem:
    """Sizes, dtype and mask of one attention call; tensors are ``[batch, seqlen, num_heads, head_dim]``.

    ``window_left`` and ``window_right`` are None where that side is unlimited; causal attention is
    ``window_right == 0``.  The values of softmax_scale and softcap are run-time numbers and no part of
    the problem; ``softcap`` says only whether there is one.  ``aligned`` is True when every tensor has
    unit last stride and 16-byte aligned base address and other strides.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    window_left: int | None = None
    window_right: int | None = None
    alignment: Alignment = "bottom_right"
    softcap: bool = False
    return_lse: bool = False
    direction: Direction = "fwd"
    needs_dq: bool = True
    needs_dk: bool = True
    needs_dv: bool = True
    aligned: bool = True
    device_type: str = "cuda"

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool = False,
        window_size: tuple[int | None, int | None] | None = None,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        alignment: str = "bottom_right",
        return_lse: bool = False,
    ) -> AttentionProblem:
        """The problem of a call, or TypeError / ValueError in a sentence that says what to change."""
        check_tensors(q, k, v)
        left, right = check_options(causal, window_size, softmax_scale, softcap, alignment)
        return cls(
            batch=q.shape[0],
            seqlen_q=q.shape[1],
            seqlen_k=k.shape[1],
            num_heads_q=q.shape[2],
            num_heads_kv=k.shape[2],
            head_dim=q.shape[3],
            head_dim_v=v.shape[3],
            dtype=q.dtype,
            window_left=left,
            window_right=right,
            alignment="top_left" if alignment == "top_left" else "bottom_right",
            softcap=softcap is not None,
            return_lse=bool(return_lse),
            aligned=all(is_aligned(x) for x in (q, k, v)),
            device_type=q.device.type,
        )

    # The mask rule.

    @property
    def offset(self) -> int:
        """Query row i sits at key position i + offset."""
        return self.seqlen_k - self.seqlen_q if self.alignment == "bottom_right" else 0

    @property
    def causal(self) -> bool:
        return self.window_left is None and self.window_right == 0

    @property
    def mask_name(self) -> str:
        """``full``, ``causal`` or ``window``: the shape class of the mask."""
        if self.window_left is None and self.window_right is None:
            return "full"
        return "causal" if self.causal else "window"

    def key_range(self, row: int) -> tuple[int, int]:
        """Visible keys of query ``row`` as a half-open range; empty ranges are (0, 0)."""
        position = row + self.offset
        first = 0 if self.window_left is None else max(0, position - self.window_left)
        last = self.seqlen_k if self.window_right is None else min(self.seqlen_k, position + self.window_right + 1)
        return (first, last) if first < last else (0, 0)

    def mask(self, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Boolean ``[len(rows), len(keys)]``, True where key j is visible from query i; for references and tests."""
        position = rows[:, None] + self.offset
        visible = torch.ones(len(rows), len(keys), dtype=torch.bool, device=rows.device)
        if self.window_left is not None:
            visible &= keys[None, :] >= position - self.window_left
        if self.window_right is not None:
            visible &= keys[None, :] <= position + self.window_right
        return visible

    # Work.

    @property
    def visible_pairs(self) -> int:
        """Number of (query, key) pairs that the mask leaves, for one head of one batch entry."""
        if self.window_left is not None and self.window_right is not None and self.window_left + self.window_right < 0:
            return 0

        def before(edge: int) -> int:
            """Pairs whose key is below row + edge, summed over the rows: in closed form, for plans are made of it too."""

            def up_to(end: int) -> int:  # sum of x clamped to 0..seqlen_k, over all x < end
                rising = min(max(end, 0), self.seqlen_k + 1)
                return rising * (rising - 1) // 2 + max(end - self.seqlen_k - 1, 0) * self.seqlen_k

            return up_to(edge + self.seqlen_q) - up_to(edge)

        seen = self.seqlen_q * self.seqlen_k
        if self.window_right is not None:
            seen = before(self.offset + self.window_right + 1)
        return seen if self.window_left is None else seen - before(self.offset - self.window_left)

    @property
    def visible_keys(self) -> int:
        """Number of keys that at least one query sees."""
        first = 0 if self.window_left is None else max(0, self.offset - self.window_left)
        last = self.seqlen_k
        if self.window_right is not None:
            last = min(last, self.offset + self.seqlen_q + self.window_right)
        return max(last - first, 0)

    @property
    def flops(self) -> float:
        """Useful floating-point operations: two products forward; backward counts five, or fewer when gradients are skipped."""
        heads = self.batch * self.num_heads_q * self.visible_pairs
        qk, pv = 2.0 * heads * self.head_dim, 2.0 * heads * self.head_dim_v
        if self.direction == "fwd":
            return qk + pv
        flops = qk  # S recomputed
        if self.needs_dq or self.needs_dk:
            flops += pv  # dP = dout V^T
        return flops + qk * (self.needs_dq + self.needs_dk) + pv * self.needs_dv

    @property
    def bytes(self) -> int:
        """Bytes that must move at least once: inputs read, as far as they are visible, and outputs written."""
        rows = self.batch * self.seqlen_q * self.num_heads_q
        keys = self.batch * self.seqlen_k * self.num_heads_kv
        q, out, lse = rows * self.head_dim, rows * self.head_dim_v, 4 * rows
        read = self.batch * self.visible_keys * self.num_heads_kv * (self.head_dim + self.head_dim_v)
        size = self.dtype.itemsize
        if self.direction == "fwd":
            return size * (q + read + out) + lse * self.return_lse
        grads = q * self.needs_dq + keys * (self.head_dim * self.needs_dk + self.head_dim_v * self.needs_dv)
        return size * (q + read + 2 * out + grads) + lse

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.num_heads_q // max(self.num_heads_kv, 1)

    @property
    def empty(self) -> bool:
        """True when there is nothing to compute: no output element."""
        return 0 in (self.batch, self.seqlen_q, self.num_heads_q)

    # Keys.

    def key(self) -> dict[str, Any]:
        """The shape class under which a tuned config is stored: sequence lengths as buckets, no run-time numbers."""
        return {
            "direction": self.direction,
            "dtype": str(self.dtype).removeprefix("torch."),
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            "mask": self.mask_name,
            "softcap": self.softcap,
            "group": self.group,
            "seqlen_q": bucket(self.seqlen_q),
            "seqlen_k": bucket(self.seqlen_k),
            "aligned": self.aligned,
        }

    def backward(self, *, needs_dq: bool, needs_dk: bool, needs_dv: bool, aligned: bool) -> AttentionProblem:
        """The problem of this call's backward pass, for the gradients asked for."""
        return replace(
            self, direction="bwd", return_lse=True, needs_dq=needs_dq, needs_dk=needs_dk, needs_dv=needs_dv, aligned=aligned
        )

    def __str__(self) -> str:
        heads = f"{self.num_heads_q}" if self.group == 1 else f"{self.num_heads_q}/{self.num_heads_kv}"
        dim = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        mask = self.mask_name
        if mask == "window":
            mask = f"window({self.window_left}, {self.window_right})"
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.direction} {dtype} batch {self.batch}, seqlen {self.seqlen_q} x {self.seqlen_k}, "
            f"heads {heads}, head_dim {dim}, {mask}" + (", softcap" if self.softcap else "")
        )


def bucket(seqlen: int) -> int:
    """The power of two at or above ``seqlen``: sequence lengths share a tuned config within one bucket."""
    return 1 << max(seqlen - 1, 0).bit_length()


def is_aligned(x: torch.Tensor) -> bool:
    """True when TMA can address x: unit last stride, base address and other strides multiples of 16 bytes."""
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        return False
    size = x.element_size()
    if any(s * size % _VECTOR_BYTES or (s == 0 and n > 1) for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1):
        return False
    return x.device.type == "meta" or x.data_ptr() % _VECTOR_BYTES == 0


def stand_in(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One element that looks like a whole tensor: keeps no memory alive, and ``empty_like`` of it is contiguous.

    That costs half of ``empty`` with a shape.
    """
    return torch.empty((1,) * len(shape), dtype=dtype, device=device).expand(shape)


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """TypeError or ValueError, in a sentence, unless q, k and v make an attention problem."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; pass a torch.Tensor of [batch, seqlen, num_heads, head_dim].")
        if x.is_nested or x.layout != torch.strided:
            kind = "a nested tensor" if x.is_nested else f"of layout {x.layout}"
            raise TypeError(f"{name} is {kind}; pass a dense torch.Tensor of [batch, seqlen, num_heads, head_dim].")
        if x.dim() != 4:
            raise ValueError(
                f"{name} has {x.dim()} dimensions, shape {tuple(x.shape)}; it must be [batch, seqlen, num_heads, head_dim]."
            )
    if not (q.device == k.device == v.device):
        raise ValueError(f"q is on {q.device}, k on {k.device} and v on {v.device}; move them to one device with .to(device).")
    if q.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"q is on {q.device}; peakattn computes on cpu and cuda devices: move q, k and v to one of them.")
    if not (q.dtype == k.dtype == v.dtype):
        raise TypeError(f"q is {q.dtype}, k is {k.dtype} and v is {v.dtype}; give all three one dtype with .to(dtype).")
    if q.dtype not in DTYPES:
        raise TypeError(f"q, k and v are {q.dtype}; allowed are float16, bfloat16 and float32: convert with .to(dtype).")
    batch, _, num_heads_q, head_dim = q.shape
    batch_k, seqlen_k, num_heads_kv, head_dim_k = k.shape
    batch_v, seqlen_v, num_heads_v, head_dim_v = v.shape
    if not (batch == batch_k == batch_v):
        raise ValueError(f"batch differs: q has {batch}, k has {batch_k}, v has {batch_v}; dimension 0 must be equal.")
    if seqlen_k != seqlen_v:
        raise ValueError(f"k has seqlen {seqlen_k} and v has seqlen {seqlen_v}; dimension 1 of k and v must be equal.")
    if num_heads_kv != num_heads_v:
        raise ValueError(f"k has {num_heads_kv} heads and v has {num_heads_v}; dimension 2 of k and v must be equal.")
    if head_dim != head_dim_k:
        raise ValueError(f"q has head_dim {head_dim} and k has head_dim {head_dim_k}; dimension 3 of q and k must be equal.")
    if num_heads_kv == 0 and num_heads_q > 0:
        raise ValueError(f"q has {num_heads_q} heads and k has none; k and v need at least one head.")
    if num_heads_kv > 0 and num_heads_q % num_heads_kv:
        raise ValueError(
            f"num_heads_q {num_heads_q} is not a multiple of num_heads_kv {num_heads_kv}; "
            "each kv head serves an equal group of query heads."
        )
    for name, size in (("head_dim of q and k", head_dim), ("head_dim of v", head_dim_v)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"{name} is {size}; allowed are 1 to {MAX_HEAD_DIM}.")


def check_options(
    causal: object, window_size: object, softmax_scale: object, softcap: object, alignment: object
) -> tuple[int | None, int | None]:
    """The window (left, right) of a call's options, or TypeError / ValueError in a sentence."""
    if not isinstance(causal, bool):
        raise TypeError(f"causal is {causal!r}; pass True or False.")
    if alignment not in ALIGNMENTS:
        raise ValueError(f"alignment is {alignment!r}; allowed are 'bottom_right' and 'top_left'.")
    if softmax_scale is not None:
        _check_number("softmax_scale", softmax_scale, "a finite number, or None for 1/sqrt(head_dim)")
    if softcap is not None:
        _check_number("softcap", softcap, "a positive finite number, or None for no cap")
        if softcap <= 0:  # type: ignore[operator]
            raise ValueError(f"softcap is {softcap}; allowed is a positive finite number, or None for no cap.")
    return _window(window_size, causal)


def _check_number(name: str, value: object, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}; allowed is {allowed}.")
    if not -math.inf < value < math.inf:  # comparisons trace under torch.compile, math.isfinite does not
        raise ValueError(f"{name} is {value}; allowed is {allowed}.")


def _window(window_size: object, causal: bool) -> tuple[int | None, int | None]:
    if window_size is None:
        return None, 0 if causal else None
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size is {window_size!r}; pass (left, right), with None or -1 for an unlimited side.")
    sides: list[int | None] = []
    for name, side in zip(("left", "right"), window_size, strict=True):
        if side is None or side == -1:
            sides.append(None)
        elif isinstance(side, bool) or not isinstance(side, int):
            raise TypeError(f"window_size {name} is {side!r}; pass an integer, or None or -1 for an unlimited side.")
        elif side < 0:
            raise ValueError(f"window_size {name} is {side}; allowed are 0 and up, or None or -1 for an unlimited side.")
        else:
            sides.append(side)
    left, right = sides
    if causal:
        right = 0  # min(right, 0)
    return left, right
