"""What the CPU forward and backward share: how rows and keys are cut up, and products that respect the mask."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from peakattn.problem import AttentionProblem


@dataclass(frozen=True)
class Config:
    """Query rows and keys of one tile; torch's kernel uses ``block_m`` only where it needs an explicit mask."""

    block_m: int = 256
    block_n: int = 512

    def __post_init__(self) -> None:
        for name, size in (("block_m", self.block_m), ("block_n", self.block_n)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} is {size!r}; allowed are integers of 1 and up.")


@dataclass(frozen=True)
class TorchCall:
    """One call of torch's kernel: which rows of which query heads meet which keys, and under which mask."""

    heads: slice
    rows: slice
    keys: slice
    bias: torch.Tensor | None  # [rows, keys], 0 or -inf
    is_causal: bool


def query_blocks(problem: AttentionProblem, block_m: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of the query rows that see a key, each with the keys that some row of the block sees."""
    if problem.empty or problem.seqlen_k == 0:
        return
    # Both ends of a row's key range grow with the row, so the rows that see a key are contiguous.
    left, right = problem.window_left, problem.window_right
    start = 0 if right is None else max(0, -problem.offset - right)
    stop = problem.seqlen_q if left is None else min(problem.seqlen_q, problem.seqlen_k - problem.offset + left)
    for m_offset in range(start, stop, block_m):
        m_stop = min(m_offset + block_m, stop)
        yield slice(m_offset, m_stop), slice(problem.key_range(m_offset)[0], problem.key_range(m_stop - 1)[1])


def key_blocks(keys: slice, block_n: int) -> Iterator[slice]:
    for n_offset in range(keys.start, keys.stop, block_n):
        yield slice(n_offset, min(n_offset + block_n, keys.stop))


def tile_mask(problem: AttentionProblem, rows: slice, keys: slice) -> torch.Tensor | None:
    """Boolean ``[rows, keys]``, or None when every row sees every key."""
    if problem.key_range(rows.stop - 1)[0] <= keys.start and keys.stop <= problem.key_range(rows.start)[1]:
        return None
    return problem.mask(torch.arange(rows.start, rows.stop), torch.arange(keys.start, keys.stop))


def tile_bias(problem: AttentionProblem, rows: slice, keys: slice) -> torch.Tensor | None:
    """The same as numbers to add to the scores: 0 where visible, -inf where not."""
    visible = tile_mask(problem, rows, keys)
    return None if visible is None else torch.zeros(visible.shape).masked_fill_(~visible, -math.inf)


def torch_calls(problem: AttentionProblem, block_m: int) -> Iterator[TorchCall]:
    """The calls of torch's kernel that make up the problem; its own causal mask is aligned top-left."""
    if problem.empty or problem.seqlen_k == 0:
        return
    rows = slice(0, problem.seqlen_q)
    parts: Iterable[tuple[slice, slice, torch.Tensor | None, bool]]
    if problem.mask_name == "full":
        parts = [(rows, slice(0, problem.seqlen_k), None, False)]
    elif problem.causal and problem.offset == 0:
        parts = [(rows, slice(0, min(problem.seqlen_q, problem.seqlen_k)), None, True)]
    else:
        parts = ((rows, keys, tile_bias(problem, rows, keys), False) for rows, keys in query_blocks(problem, block_m))
    step = 1 if torch_groups_heads() else problem.group
    for part in parts:
        for head in range(step):
            yield TorchCall(slice(head, None, step), *part)


@functools.cache
def torch_groups_heads() -> bool:
    """Whether torch's kernel knows grouped heads. Versions that do not read on into memory instead of saying so.

    Two query heads and one kv head, with another head lying behind it in memory; the answer is the value itself.
    """
    x = torch.zeros(1, 2, 1, 16)
    x[:, 1] = 1.0
    out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x[:, :1], x[:, :1])
    return bool((out == 0.0).all())


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """``[batch, num_heads, seqlen, head_dim]`` as torch's kernel can read it.

    That kernel reads rows through BLAS and does not look at the last stride, so rows that are not dense are copied.
    """
    if x.stride(-1) != 1 or x.stride(1) < x.shape[-1]:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.transpose(1, 2)


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """One pass over each tensor; a sum that overflows counts as not finite, which costs time but nothing else."""
    return all(math.isfinite(x.sum(dtype=torch.float32)) for x in tensors)


def grouped(x: torch.Tensor, num_heads_kv: int) -> torch.Tensor:
    """``[batch, rows, num_heads_q, dim]`` to float32 ``[batch, num_heads_kv, group * rows, dim]``."""
    return x.float().unflatten(2, (num_heads_kv, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def ungrouped(x: torch.Tensor, rows: int) -> torch.Tensor:
    """The inverse of ``grouped``, up to dtype."""
    return x.unflatten(2, (-1, rows)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def scores(q_i: torch.Tensor, k_j: torch.Tensor, softcap: float, visible: torch.Tensor | None) -> torch.Tensor:
    """Capped scores of a tile, -inf where masked; ``q_i`` carries the softmax scale."""
    s = q_i @ k_j.transpose(-1, -2)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    return s if visible is None else s.masked_fill_(~visible, -math.inf)


def masked_matmul(weights: torch.Tensor, values: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """``weights @ values`` where a masked weight, which is 0, never meets a value that is not finite."""
    if visible is None:
        return weights @ values
    hazards = (~values.isfinite().all(-1)).flatten(0, -2).any(0)
    if not hazards.any():
        return weights @ values
    product = weights @ values.masked_fill(hazards[:, None], 0.0)
    for j in hazards.nonzero().flatten().tolist():
        term = weights[..., j : j + 1] * values[..., j : j + 1, :]
        product += term.masked_fill(~visible[:, j, None], 0.0)
    return product
