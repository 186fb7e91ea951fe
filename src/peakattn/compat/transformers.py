"""``attn_implementation="peakattn"`` for Hugging Face Transformers: register(), then load any model with it.

Transformers hands each attention layer a mask that the implementation's own mask function made.  Ours is a
``MaskPieces``: rectangles of (batch entries, queries, keys), each full, causal or windowed, which peakattn computes
exactly, one call a rectangle, without a seqlen_q x seqlen_k tensor.  Padding on either side, sliding windows, chunks,
packed sequences and any cache length are such masks.  One that is not raises; none is ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from peakattn.api import attention

# Elements of the mask that are looked at together.
_STRIP = 1 << 22

# What may be asked of a MaskPieces: attributes such as shape and dtype; and what leaves it as it is.
_MASK_FACTS = ("__get__", "dim", "size", "numel", "__len__")
_MASK_COPIES = ("to", "contiguous", "clone", "detach")

# Arguments of other implementations that change the result.
_REFUSED = {
    "cu_seq_lens_q": "packed batches come through position_ids, or unpacked",
    "cu_seq_lens_k": "packed batches come through position_ids, or unpacked",
    "head_mask": "peakattn weights all heads alike",
    "position_bias": "peakattn adds no bias to the scores",
    "s_aux": "peakattn has no attention sinks",
}


@dataclass(frozen=True)
class Piece:
    """Queries ``[q_start, q_stop)`` see keys within ``[k_start, k_stop)``, under one mask of ``peakattn.attention``."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool = False
    window_size: tuple[int | None, int | None] | None = None
    alignment: str = "bottom_right"


class MaskPieces(torch.Tensor):
    """A mask as pieces, for groups of batch entries with equal ones; a query in no piece sees nothing.

    Transformers passes 4-D boolean tensors through to the layers, so this is one to look at: its shape is
    ``[batch, 1, seqlen_q, seqlen_k]``, it has no elements, and whatever would read or change them raises.
    """

    sizes: tuple[int, int, int]  # batch, seqlen_q, seqlen_k
    groups: tuple[tuple[tuple[int, ...], tuple[Piece, ...]], ...]

    @classmethod
    def of(cls, sizes: tuple[int, int, int], groups: tuple[tuple[tuple[int, ...], tuple[Piece, ...]], ...]) -> MaskPieces:
        batch, seqlen_q, seqlen_k = sizes
        mask = torch.empty(batch, 1, seqlen_q, seqlen_k, dtype=torch.bool, device="meta").as_subclass(cls)
        mask.sizes, mask.groups = sizes, groups
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in _MASK_FACTS:
            return super().__torch_function__(func, types, args, kwargs)
        if name in _MASK_COPIES:
            return args[0]
        raise TypeError(
            f"the model applies {name} to its attention mask, which peakattn keeps as a rule and not as elements; "
            'load the model with attn_implementation="sdpa".'
        )


def register(name: str = "peakattn") -> str:
    """Makes ``attn_implementation=name`` known to Transformers, and returns the name."""
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise ImportError(f'{error}; install it with: pip install "peakattn[transformers]"') from error
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
    return name


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of one layer; tensors come as ``[batch, num_heads, seqlen, head_dim]``, the output with seqlen first."""
    for name, reason in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f'{name} is given: {reason}. Load the model with attn_implementation="eager".')
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions=True needs the probabilities, which peakattn never forms; "
            'load the model with attn_implementation="eager".'
        )
    if dropout != 0.0:
        raise ValueError(
            f"dropout is {dropout}; peakattn has none: set the model's attention dropout to 0, or call model.eval()."
        )
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if isinstance(attention_mask, MaskPieces):
        mask = attention_mask
    elif attention_mask is not None:
        mask = _pieces_of_tensor(attention_mask, q.shape[0])
    else:
        mask = _pieces_without_mask(module, q, k, is_causal, sliding_window)
    made_for, given = mask.sizes, (q.shape[0], q.shape[1], k.shape[1])
    if given != made_for:
        raise ValueError(
            f"the mask was made for (batch, seqlen_q, seqlen_k) {made_for} and the layer has {given}; "
            'load the model with attn_implementation="sdpa".'
        )
    return _compute(mask, q, k, v, scaling, softcap).contiguous(), None


def attention_mask(
    batch_size: int,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    cache_position: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> MaskPieces:
    """The mask of a forward pass, from Transformers' rule for it and the padding ``[batch, seqlen]``.

    Older releases give the queries' positions as ``cache_position``, newer ones as ``q_length`` and ``q_offset``.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if use_vmap:
        raise ValueError(
            "the model adds a mask of its own (or_mask_function or and_mask_function), which peakattn cannot compute; "
            'load it with attn_implementation="sdpa".'
        )
    if cache_position is not None:
        q_length, device = cache_position.shape[0], cache_position.device
        q_offset = cache_position[:1] if q_length else 0
    sizes = (batch_size, q_length, kv_length)
    if 0 in sizes:
        return MaskPieces.of(sizes, ())
    first = torch.zeros(1, 1, dtype=torch.long)
    if mask_function is bidirectional_mask_function:
        last = torch.full((1, 1), kv_length - 1)
    elif mask_function is None or mask_function is causal_mask_function:
        last = (torch.arange(q_length)[None] + int(q_offset) - kv_offset).clamp_max(kv_length - 1)
    else:
        entries = torch.arange(batch_size, device=device)[:, None, None, None]
        heads = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
        queries = (torch.arange(q_length, device=device) + q_offset)[None, None, :, None]
        keys = (torch.arange(kv_length, device=device) + kv_offset)[None, None, None, :]
        first, last = _seen(lambda start, stop: mask_function(entries, heads, queries[:, :, start:stop], keys), sizes)
    if attention_mask is not None:
        # Keys that the padding does not reach are unused slots of a static cache.
        unused = max(0, kv_length + kv_offset - attention_mask.shape[-1])
        real = torch.nn.functional.pad(attention_mask.to(torch.bool), (0, unused))[:, kv_offset : kv_offset + kv_length]
        unpadded = _seen(lambda start, stop: real[:, None, None, :], (batch_size, 1, kv_length))
        first, last = torch.maximum(first, unpadded[0]), torch.minimum(last, unpadded[1])
    return _grouped(first, last, sizes)


def _pieces_of_tensor(mask: torch.Tensor, batch: int) -> MaskPieces:
    """A ready-made 4-D mask: True or 0 where a key is seen, False or the dtype's minimum where it is not."""
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[0] not in (1, batch):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; allowed are [batch, seqlen], and [batch, 1, seqlen_q, seqlen_k] "
            "where all heads share it."
        )
    if mask.dtype != torch.bool:
        hidden = mask <= torch.finfo(mask.dtype).min
        if not (hidden | (mask == 0)).all():
            raise ValueError(
                "attention_mask adds a bias to the scores, which peakattn cannot compute; allowed are 0 and the dtype's "
                'minimum. Load the model with attn_implementation="sdpa".'
            )
        mask = ~hidden
    sizes = (batch, mask.shape[2], mask.shape[3])
    if 0 in sizes:
        return MaskPieces.of(sizes, ())
    return _grouped(*_seen(lambda start, stop: mask[:, :, start:stop], sizes), sizes)


def _pieces_without_mask(
    module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, is_causal: bool | None, sliding_window: int | None
) -> MaskPieces:
    """The mask of a layer that was given none: the module says whether it is causal, aligned as torch's is."""
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and seqlen_q > 1
    window = None
    if sliding_window is not None and sliding_window < seqlen_k:
        window = (sliding_window - 1, 0 if causal or seqlen_q == 1 else sliding_window - 1)
    alignment = "top_left" if causal else "bottom_right"
    piece = Piece(0, seqlen_q, 0, seqlen_k, causal=causal, window_size=window, alignment=alignment)
    return MaskPieces.of((batch, seqlen_q, seqlen_k), ((tuple(range(batch)), (piece,)),))


def _seen(strip: Callable[[int, int], torch.Tensor], sizes: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """First and last visible key of each query, ``[batch or 1, seqlen_q]``; last is -1 where there is none.

    ``strip(start, stop)`` is the boolean mask of some query rows, and is looked at a few million elements at a time.
    """
    batch, seqlen_q, seqlen_k = sizes
    rows = max(1, _STRIP // (batch * seqlen_k))
    found = []
    for start in range(0, seqlen_q, rows):
        stop = min(start + rows, seqlen_q)
        visible = strip(start, stop)
        visible = visible.expand(visible.shape[0], 1, stop - start, seqlen_k)[:, 0]
        keys = torch.arange(seqlen_k, dtype=torch.int32, device=visible.device)
        first, last = torch.where(visible, keys, seqlen_k).amin(-1), torch.where(visible, keys, -1).amax(-1)
        found.append(torch.stack((first, last, visible.sum(-1, dtype=torch.int32))))
    first, last, count = torch.cat(found, -1).cpu().long()
    holes = (count != (last - first + 1).clamp_min(0)).nonzero()
    if len(holes):
        raise _not_pieces(*holes[0].tolist())
    return first, last


def _grouped(first: torch.Tensor, last: torch.Tensor, sizes: tuple[int, int, int]) -> MaskPieces:
    """Batch entries that see the same, together."""
    batch, seqlen_q, _ = sizes
    first, last = torch.broadcast_tensors(first, last)
    ranges = torch.stack((first, last), 1).expand(-1, -1, seqlen_q)
    different, which = torch.unique(ranges, dim=0, return_inverse=True)
    which = which.expand(batch)
    groups = []
    for number, (first, last) in enumerate(different):
        entries = tuple(which.eq(number).nonzero().flatten().tolist())
        try:
            groups.append((entries, _pieces(first, last)))
        except _NotPiecesError as error:
            raise _not_pieces(entries[0], error.row) from None
    return MaskPieces.of(sizes, tuple(groups))


def _pieces(first: torch.Tensor, last: torch.Tensor) -> tuple[Piece, ...]:
    """The pieces of one batch entry whose query i sees keys ``first[i]`` to ``last[i]``, none where last < first."""
    pieces = []
    for start, stop in _runs(last >= first):
        piece = _piece(first, last, start, stop)
        if piece is not None:
            pieces.append(piece)
            continue
        # A row that begins after everything the row before it saw begins a sequence or a chunk of its own.
        fresh = torch.ones(stop - start, dtype=torch.bool)
        fresh[1:] = first[start + 1 : stop] > last[start : stop - 1]
        begins = (fresh.nonzero().flatten() + start).tolist()
        for begin, end in zip(begins, [*begins[1:], stop], strict=True):
            piece = _piece(first, last, begin, end)
            if piece is None:
                raise _NotPiecesError(begin)
            pieces.append(piece)
    return tuple(pieces)


def _piece(first: torch.Tensor, last: torch.Tensor, start: int, stop: int) -> Piece | None:
    """Rows ``[start, stop)``, each of which sees something, as one piece, or None."""
    k_start, k_stop = int(first[start]), int(last[stop - 1]) + 1
    seqlen_q, seqlen_k = stop - start, k_stop - k_start
    first, last = first[start:stop] - k_start, last[start:stop] - k_start
    row = torch.arange(seqlen_q)
    # Row 0 begins at key 0, so both sides are numbers of keys before and after a query that sits at key i.
    left: int | None = None if int(first[-1]) == 0 else seqlen_q - 1 - int(first[-1])
    right: int | None = None if int(last[0]) == seqlen_k - 1 else int(last[0])
    if left is not None and left < 0:
        return None
    if not torch.equal(first, torch.zeros_like(row) if left is None else (row - left).clamp_min(0)):
        return None
    if not torch.equal(last, torch.full_like(row, seqlen_k - 1) if right is None else (row + right).clamp_max(seqlen_k - 1)):
        return None
    if left is None and right is None:
        return Piece(start, stop, k_start, k_stop)
    causal, alignment = right == 0, "top_left"
    if right == seqlen_k - seqlen_q:
        causal, alignment = True, "bottom_right"
        left = None if left is None else left + seqlen_k - seqlen_q
    window = None if left is None and (right is None or causal) else (left, 0 if causal else right)
    return Piece(start, stop, k_start, k_stop, causal, window, alignment)


def _runs(flags: torch.Tensor) -> list[tuple[int, int]]:
    """The ``[start, stop)`` of each run of True."""
    edges = torch.diff(flags.to(torch.int8), prepend=torch.zeros(1, dtype=torch.int8), append=torch.zeros(1, dtype=torch.int8))
    return list(zip((edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist(), strict=True))


class _NotPiecesError(Exception):
    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


def _not_pieces(entry: int, row: int) -> ValueError:
    return ValueError(
        f"the mask of batch entry {entry} is, at query {row}, neither full, causal, windowed, chunked, packed nor padded; "
        'peakattn computes exactly those. Load the model with attn_implementation="sdpa".'
    )


def _compute(
    mask: MaskPieces,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    softcap: float | None,
) -> torch.Tensor:
    outs: list[torch.Tensor] = []
    order: list[int] = []
    for entries, pieces in mask.groups:
        pick = _index(entries, q.shape[0])
        outs.append(_compute_pieces(pieces, q[pick], k[pick], v[pick], softmax_scale, softcap))
        order += entries
    if not outs:
        return _zeros(q, v, q.shape[1])
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    if order == sorted(order):
        return out
    return out[torch.tensor(order, device=out.device).argsort()]


def _compute_pieces(
    pieces: tuple[Piece, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    softcap: float | None,
) -> torch.Tensor:
    rows, done = [], 0
    for piece in pieces:
        if piece.q_start > done:
            rows.append(_zeros(q, v, piece.q_start - done))
        rows.append(
            attention(
                *(q[:, piece.q_start : piece.q_stop], k[:, piece.k_start : piece.k_stop], v[:, piece.k_start : piece.k_stop]),
                causal=piece.causal,
                window_size=piece.window_size,
                softmax_scale=softmax_scale,
                softcap=softcap,
                alignment=piece.alignment,
            )
        )
        done = piece.q_stop
    if done < q.shape[1]:
        rows.append(_zeros(q, v, q.shape[1] - done))
    return rows[0] if len(rows) == 1 else torch.cat(rows, 1)


def _zeros(q: torch.Tensor, v: torch.Tensor, seqlen: int) -> torch.Tensor:
    return q.new_zeros(q.shape[0], seqlen, q.shape[2], v.shape[-1])


def _index(entries: tuple[int, ...], batch: int) -> slice | list[int]:
    """Batch entries as a slice, which copies nothing, where they are neighbours."""
    if len(entries) == batch:
        return slice(None)
    if entries[-1] - entries[0] + 1 == len(entries):
        return slice(entries[0], entries[-1] + 1)
    return list(entries)
