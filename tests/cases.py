"""CASES: a small matrix of attention problems, each with the reason it is there.

For every backend: the CPU, Triton's interpreter, and each kernel on a GPU.  A new feature or a new bug is a new case.
References such as FA#2300 or PT#121558 name public reports (FlashAttention, PyTorch, ...) of which a case is the
smallest trigger.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch

ALL = (torch.float32, torch.bfloat16, torch.float16)
BF16 = (torch.bfloat16,)


@dataclass(frozen=True)
class Case:
    """Sizes, options and layout of one problem; ``inputs`` makes its tensors."""

    name: str
    reason: str
    seqlen_q: int = 64
    seqlen_k: int = 64
    num_heads_q: int = 2
    num_heads_kv: int = 2
    head_dim: int = 64
    head_dim_v: int = 0  # 0: as head_dim
    batch: int = 1
    options: dict[str, Any] = field(default_factory=dict)  # keywords of peakattn.attention
    dtypes: tuple[torch.dtype, ...] = ALL
    scale: float = 1.0  # of the random part of q and k
    mean: float = 0.3  # an error that is a constant shift must show
    constant: float | None = None  # every element of q, k and v
    layout: str = "bshd"

    def inputs(self, dtype: torch.dtype, device: str | torch.device = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v, the same on every device and in every run, in this case's layout."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        dim_v = self.head_dim_v or self.head_dim
        shapes = (
            (self.batch, self.seqlen_q, self.num_heads_q, self.head_dim),
            (self.batch, self.seqlen_k, self.num_heads_kv, self.head_dim),
            (self.batch, self.seqlen_k, self.num_heads_kv, dim_v),
        )
        tensors = []
        for shape, scale in zip(shapes, (self.scale, self.scale, 1.0), strict=True):
            x = torch.randn(shape, generator=generator) * scale + self.mean
            tensors.append(x if self.constant is None else torch.full(shape, self.constant))
        q, k, v = LAYOUTS[self.layout](*(x.to(device, dtype) for x in tensors))
        return q, k, v

    def dout(self, like: torch.Tensor) -> torch.Tensor:
        """A gradient for ``out`` with a mean that is not zero."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()) + 1)
        return (torch.randn(like.shape, generator=generator) + 0.2).to(like.device, like.dtype)

    def dlse(self, like: torch.Tensor) -> torch.Tensor:
        """A gradient for ``lse``."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()) + 2)
        return (torch.randn(like.shape, generator=generator) + 0.2).to(like.device, like.dtype)

    def __str__(self) -> str:
        return self.name


def _bhsd(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Views of contiguous [batch, num_heads, seqlen, head_dim] tensors."""
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]


def _qkv(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Slices of one [batch, seqlen, features] tensor, as a fused projection makes them."""
    seqlen = max(x.shape[1] for x in tensors)
    features = [x.shape[2] * x.shape[3] for x in tensors]
    packed = tensors[0].new_full((tensors[0].shape[0], seqlen, sum(features)), float("nan"))
    views = []
    for x, part in zip(tensors, packed.split(features, dim=-1), strict=True):
        views.append(part[:, : x.shape[1]].unflatten(-1, x.shape[2:]))
        views[-1].copy_(x)
    return views


def _expanded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """k with one head and v with one batch entry, seen as many by stride 0."""
    return [q, k[:, :, :1].expand_as(k), v[:1].expand_as(v)]


def _stride2(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Every second element of a tensor twice as wide; what lies between is not a number."""
    views = []
    for x in tensors:
        wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"))
        wide[..., ::2] = x
        views.append(wide[..., ::2])
    return views


def _odd_offset(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Views that start one, three and five elements into their storage."""
    views = []
    for offset, x in zip((1, 3, 5), tensors, strict=True):
        storage = x.new_full((x.numel() + offset,), float("nan"))
        storage[offset:] = x.flatten()
        views.append(storage[offset:].view(x.shape))
    return views


def _odd_rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Rows with one stray element between them, so that no row after the first is aligned."""
    views = []
    for x in tensors:
        wide = x.new_full((*x.shape[:-1], x.shape[-1] + 1), float("nan"))
        wide[..., :-1] = x
        views.append(wide[..., :-1])
    return views


LAYOUTS: dict[str, Any] = {
    "bshd": lambda *tensors: [x.contiguous() for x in tensors],
    "bhsd": _bhsd,
    "qkv": _qkv,
    "expanded": _expanded,
    "stride2": _stride2,
    "odd_offset": _odd_offset,
    "odd_rows": _odd_rows,
}

CAUSAL = {"causal": True}
TOP_LEFT = {"causal": True, "alignment": "top_left"}

CASES: tuple[Case, ...] = (
    # Masks and their ends.
    Case("full", "the plain case, two batch entries", batch=2),
    Case("causal", "the other plain case", seqlen_q=128, seqlen_k=128, options=CAUSAL),
    Case("odd_lengths", "lengths that divide no block: the tail is masked (jax#23819, jax#27224)", 61, 97),
    Case("odd_causal", "tail and diagonal in one tile", 97, 97, options=CAUSAL),
    Case("several_tiles", "more than one tile each way under every default config", 300, 277, 1, 1, options=CAUSAL),
    Case("longer_k_bottom_right", "queries at the end of the keys, as with a cache", 33, 100, options=CAUSAL),
    Case("longer_k_top_left", "keys past the last query are seen by nobody: dk and dv are 0 there", 33, 100, options=TOP_LEFT),
    Case(
        "longer_q_bottom_right",
        "rows with no visible key, whole tiles of them: out 0, lse -inf (FA#1778, FI#4452)",
        150,
        40,
        options=CAUSAL,
    ),
    Case("longer_q_top_left", "the alignment that torch's is_causal has", 100, 33, options=TOP_LEFT),
    Case("five_by_two", "FA#1778's own sizes", 5, 2, options=CAUSAL),
    Case("window_0_0", "each row sees one key, so out is v itself", 65, 65, options={"window_size": (0, 0)}),
    Case("window_both", "a band narrower than a tile", 130, 130, options={"window_size": (9, 5)}),
    Case(
        "window_left",
        "sliding window of a causal model, interior tiles skipped on both sides",
        200,
        200,
        options={"causal": True, "window_size": (40, 0)},
    ),
    Case("window_left_only", "left limit without a right one", 90, 70, options={"window_size": (7, None)}),
    Case("window_right_only", "right limit without a left one, past the diagonal", 70, 90, options={"window_size": (None, 6)}),
    Case(
        "window_past_keys",
        "top-left window that leaves the last rows without keys",
        120,
        30,
        options={"window_size": (8, 2), "alignment": "top_left"},
    ),
    Case("window_wider_than_keys", "a window that masks nothing", 20, 20, options={"window_size": (1000, 1000)}),
    Case("window_minus_one", "negative means unlimited (TransformerEngine#3528)", 40, 40, options={"window_size": (-1, 0)}),
    # Lengths 0 and 1.
    Case("one_by_one", "seqlen 1 forward and backward (FLA#88)", 1, 1, options=CAUSAL),
    Case("decode", "one query against a cache", 1, 130, options=CAUSAL),
    Case("one_key", "softmax of one key is 1", 50, 1),
    Case("tiny", "shorter than any block (FLA#88)", 3, 7, options=CAUSAL),
    Case("no_queries", "seqlen_q 0 (FA#2562): nothing out, dk and dv 0", 0, 16),
    Case("no_keys", "seqlen_k 0 (FA#1155): out 0, lse -inf", 16, 0),
    Case("no_batch", "batch 0", batch=0),
    # Heads.
    Case("gqa_3", "group of 3, unlike the number of kv heads (native-sparse-attention#27)", 60, 60, 6, 2, options=CAUSAL),
    Case("gqa_5", "a group that is no power of two (FA#2300)", 33, 65, 10, 2),
    Case("mqa", "all query heads on one kv head", 40, 70, 7, 1, options=CAUSAL),
    # Head dims: tails of every block size.
    Case("dim_1", "the smallest", 40, 40, head_dim=1),
    Case("dim_8", "smaller than a tensor-core tile", 70, 70, head_dim=8, options=CAUSAL),
    Case("dim_40", "multiple of 8 and not of 16", 70, 70, head_dim=40),
    Case("dim_72", "multiple of 8 past a power of two (FI#4299)", 70, 70, head_dim=72, options=CAUSAL),
    Case("dim_96", "between powers of two (FI#4299)", 70, 70, head_dim=96),
    Case("dim_128", "the common one (Triton#621)", 130, 130, head_dim=128, options=CAUSAL),
    Case("dim_192", "multi-head latent attention's q and k", 50, 50, 1, 1, 192, options=CAUSAL),
    Case("dim_256", "the largest", 70, 70, 1, 1, 256, options=CAUSAL),
    Case("dim_33", "odd: no vector load fits", 45, 45, head_dim=33),
    Case("narrow_v", "head_dim_v smaller (native-sparse-attention#27)", 50, 50, 4, 2, 96, 40, options=CAUSAL),
    Case("wide_v", "head_dim_v larger", 50, 50, 4, 2, 24, 80),
    Case("latent", "the 192 / 128 of multi-head latent attention", 40, 40, 1, 1, 192, 128, options=CAUSAL),
    # Numbers.
    Case("softcap", "scores across the bend of tanh", 80, 80, options={"causal": True, "softcap": 3.0}),
    Case(
        "softcap_huge",
        "scores of +-1e4 saturate the cap without NaN (vllm#56578)",
        40,
        40,
        options={"softcap": 50.0},
        scale=35.0,
    ),
    Case(
        "softcap_window",
        "softcap, window, groups and two lengths at once",
        70,
        90,
        6,
        2,
        40,
        options={"softcap": 10.0, "window_size": (20, 3)},
    ),
    Case("large_logits", "scores of 1e4: exp only ever sees differences", 60, 60, scale=35.0, options=CAUSAL),
    Case("small_scale", "a scale far from 1/sqrt(head_dim)", 60, 60, options={"softmax_scale": 1e-3}),
    Case("large_scale", "a scale above 1", 60, 60, options={"softmax_scale": 2.5}, scale=0.25, mean=0.1),
    Case("negative_scale", "the smallest product wins", 60, 60, options={"softmax_scale": -0.2, "causal": True}),
    Case("zero_scale", "every visible key weighs the same", 60, 60, options={"softmax_scale": 0.0, "causal": True}),
    Case("shifted_mean", "inputs far from zero mean", 70, 70, mean=4.0),
    Case("huge_one_key", "q = k = v = 133120 and one key gives v (PT#121558)", 1, 1, 1, 1, 64, constant=133120.0, dtypes=BF16),
    # Strides and alignment.
    Case("bhsd", "transposed view of [batch, heads, seqlen, dim] (PT#138340)", 70, 70, batch=2, layout="bhsd", options=CAUSAL),
    Case("qkv_slices", "q, k and v out of one tensor (FA#2541)", 50, 50, 4, 2, batch=2, layout="qkv"),
    Case(
        "qkv_slices_256",
        "the same at head_dim 256, where FA#2541 broke",
        40,
        40,
        1,
        1,
        256,
        batch=2,
        layout="qkv",
        options=CAUSAL,
    ),
    Case("expanded", "stride 0 in heads and batch", 50, 50, 4, 2, batch=2, layout="expanded"),
    Case("stride2", "last stride 2", 50, 50, layout="stride2", options=CAUSAL),
    Case("odd_offset", "storage offsets that break alignment (PT#170813)", 50, 50, layout="odd_offset"),
    Case("odd_rows", "row strides that break alignment (PT#170813)", 50, 50, layout="odd_rows", options=CAUSAL),
)

BY_NAME: dict[str, Case] = {case.name: case for case in CASES}


def small(name: str, **sizes: Any) -> Case:
    """A case of the same options and layout with fewer rows, and with one head where there are no groups."""
    case = BY_NAME[name]
    if case.num_heads_q == case.num_heads_kv:
        sizes = {"num_heads_q": 1, "num_heads_kv": 1, **sizes}
    return replace(case, **sizes)
