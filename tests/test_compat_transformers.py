"""compat.transformers against Transformers' own attention, on tiny random models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from peakattn.compat import transformers as compat  # noqa: E402

BATCH, SEQLEN, VOCABULARY = 4, 13, 97
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": VOCABULARY}
DECODERS = {
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 5}),
}
# Lengths that repeat and that do not stand together, so that groups are gathered and put back.
LENGTHS = (13, 9, 5, 9)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    compat.register()


def pair(kind: type, config: Any, stock: str = "sdpa") -> tuple[Any, Any]:
    """Two models with the same random weights: under the stock attention, and under ours."""
    torch.manual_seed(0)
    theirs = kind._from_config(copy.deepcopy(config), attn_implementation=stock).eval()  # type: ignore[attr-defined]
    ours = kind._from_config(copy.deepcopy(config), attn_implementation="peakattn").eval()  # type: ignore[attr-defined]
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def decoder(name: str) -> tuple[Any, Any]:
    family, extra = DECODERS[name]
    return pair(getattr(transformers, f"{family}ForCausalLM"), getattr(transformers, f"{family}Config")(**SIZES, **extra))


def encoder() -> tuple[Any, Any]:
    return pair(transformers.BertModel, transformers.BertConfig(**SIZES))


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, SEQLEN), generator=torch.Generator().manual_seed(1))


def padding(side: str) -> torch.Tensor:
    real = torch.arange(SEQLEN)[None] < torch.tensor(LENGTHS)[:, None]
    return (real.flip(1) if side == "left" else real if side == "right" else torch.ones_like(real)).long()


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, real: torch.Tensor) -> None:
    torch.testing.assert_close(ours[real.bool()], theirs[real.bool()], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_encoder_honours_padding(side: str) -> None:
    theirs, ours = encoder()
    real = padding(side)
    out, expected = (model(tokens(), attention_mask=real).last_hidden_state for model in (ours, theirs))
    assert_same(out, expected, real)


def test_padding_changes_what_an_encoder_gives() -> None:
    """The test above would pass for any function that ignored a mask without effect."""
    ours = encoder()[1]
    padded, whole = (ours(tokens(), attention_mask=padding(side)).last_hidden_state for side in ("right", "none"))
    assert not torch.allclose(padded[1, : LENGTHS[1]], whole[1, : LENGTHS[1]], atol=1e-3)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoder_honours_padding(name: str, side: str) -> None:
    theirs, ours = decoder(name)
    real = padding(side)
    out, expected = (model(tokens(), attention_mask=real).logits for model in (ours, theirs))
    assert_same(out, expected, real)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_generation_with_a_cache(name: str, side: str, cache: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    if cache == "static":
        options["cache_implementation"] = "static"
    theirs, ours = decoder(name)
    out, expected = (model.generate(tokens(), attention_mask=padding(side), **options) for model in (ours, theirs))
    assert torch.equal(out, expected)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", DECODERS)
def test_a_chunk_of_queries_after_a_cache(name: str) -> None:
    """seqlen_q < seqlen_k, more than one query: the diagonal ends in the bottom-right corner."""
    logits = []
    for model in decoder(name):
        first = model(tokens()[:, :8], use_cache=True)
        logits.append(model(tokens()[:, 8:], past_key_values=first.past_key_values).logits)
    assert_same(logits[1], logits[0], torch.ones(BATCH, SEQLEN - 8))


@pytest.mark.parametrize("name", DECODERS)
def test_packed_sequences_do_not_see_each_other(name: str) -> None:
    position_ids = torch.cat((torch.arange(5), torch.arange(8)))[None].expand(BATCH, -1)
    theirs, ours = decoder(name)
    out, expected = (model(tokens(), position_ids=position_ids, use_cache=False).logits for model in (ours, theirs))
    assert_same(out, expected, padding("none"))


def test_gradients_through_groups() -> None:
    theirs, ours = encoder()
    real = padding("right")
    for model in (theirs, ours):
        (model(tokens(), attention_mask=real).last_hidden_state * real[..., None]).square().sum().backward()
    for x, y in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (x.grad is None) == (y.grad is None)
        if x.grad is not None:
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-3)


def test_softcap_of_gemma2_is_honoured() -> None:
    config = transformers.Gemma2Config(
        **SIZES, num_key_value_heads=2, head_dim=16, sliding_window=5, attn_logit_softcapping=0.5, query_pre_attn_scalar=1
    )
    theirs, ours = pair(transformers.Gemma2ForCausalLM, config, stock="eager")
    assert_same(ours(tokens()).logits, theirs(tokens()).logits, padding("none"))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_ready_made_4d_mask(dtype: torch.dtype) -> None:
    theirs, ours = decoder("llama")
    visible = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril()[None, None] & padding("right").bool()[:, None, None]
    mask = visible if dtype == torch.bool else torch.where(visible, 0.0, torch.finfo(dtype).min)
    out, expected = (model(tokens(), attention_mask=mask).logits for model in (ours, theirs))
    assert_same(out, expected, padding("right"))


def layer() -> tuple[torch.nn.Module, torch.Tensor]:
    return torch.nn.Module(), torch.randn(1, 2, 5, 8)


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        pytest.param(torch.eye(5, dtype=torch.bool).logical_not()[None, None], "at query 1, neither full, causal", id="holes"),
        pytest.param(torch.full((1, 1, 5, 5), 0.5), "adds a bias", id="bias"),
        pytest.param(torch.ones(1, 2, 5, 5, dtype=torch.bool), "where all heads share it", id="one for each head"),
        pytest.param(
            torch.ones(5, 5, dtype=torch.bool).tril().logical_or(torch.arange(5) < 3)[None, None], "at query 0", id="prefix"
        ),
    ],
)
def test_a_mask_that_is_not_made_of_pieces_raises(mask: torch.Tensor, sentence: str) -> None:
    module, x = layer()
    with pytest.raises(ValueError, match=sentence):
        compat.attention_forward(module, x, x, x, mask)


@pytest.mark.parametrize("option", ["s_aux", "position_bias", "cu_seq_lens_q", "output_attentions", "dropout"])
def test_arguments_that_change_the_result_are_refused_by_name(option: str) -> None:
    module, x = layer()
    values: dict[str, Any] = {"output_attentions": True, "dropout": 0.1}
    with pytest.raises(ValueError, match=option):
        compat.attention_forward(module, x, x, x, None, **{option: values.get(option, torch.ones(2))})


def test_a_mask_of_other_sizes_raises() -> None:
    module, x = layer()
    with pytest.raises(ValueError, match=r"made for \(batch, seqlen_q, seqlen_k\) \(1, 5, 6\) and the layer has \(1, 5, 5\)"):
        compat.attention_forward(module, x, x, x, compat.attention_mask(1, 5, 6))


def test_a_models_own_overlay_raises() -> None:
    with pytest.raises(ValueError, match="and_mask_function"):
        compat.attention_mask(1, 5, 5, use_vmap=True)


def test_a_mask_cannot_be_read_as_a_tensor() -> None:
    mask = compat.attention_mask(2, 5, 5)
    assert mask.shape == (2, 1, 5, 5)
    assert mask.to("cpu").contiguous() is mask
    with pytest.raises(TypeError, match="keeps as a rule"):
        mask[:, :, :, :3]


@pytest.mark.parametrize("strip", [1, 7, 1 << 22])
def test_pieces_equal_the_mask_they_came_from(strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of piece, from rules that Transformers has, drawn back as elements; the strip's size does not matter."""
    from transformers import masking_utils

    monkeypatch.setattr(compat, "_STRIP", strip)
    rules = {
        "causal": masking_utils.causal_mask_function,
        "both": masking_utils.bidirectional_mask_function,
        "window": masking_utils.sliding_window_causal_mask_function(4),
        "window of one": masking_utils.sliding_window_causal_mask_function(1),
        "chunks": masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long)),
        "around": masking_utils.and_masks(lambda b, h, q, k: (q - k).abs() <= 2),
    }
    for name, rule in rules.items():
        for q_length, offset in ((9, 0), (1, 8), (4, 5)):
            for real in (
                None,
                torch.arange(9)[None] >= torch.tensor([[0], [3]]),
                torch.arange(9)[None] < torch.tensor([[6], [9]]),
            ):
                mask = compat.attention_mask(
                    2, q_length, 9, q_offset=offset, mask_function=rule, attention_mask=real, device="cpu"
                )
                where = torch.arange(2)[:, None, None, None], 0, (torch.arange(q_length) + offset)[:, None], torch.arange(9)
                expected = torch.as_tensor(rule(*where)).expand(2, 1, q_length, 9)[:, 0]
                if real is not None:
                    expected = expected & real[:, None]
                assert torch.equal(drawn(mask), expected), (name, q_length, offset, real)


def drawn(mask: compat.MaskPieces) -> torch.Tensor:
    """The elements of a mask, by the rule of AttentionProblem."""
    from peakattn.problem import AttentionProblem

    elements = torch.zeros(mask.sizes, dtype=torch.bool)
    for entries, pieces in mask.groups:
        for piece in pieces:
            rows, keys = piece.q_stop - piece.q_start, piece.k_stop - piece.k_start
            q, k = torch.empty(1, rows, 1, 8, device="meta"), torch.empty(1, keys, 1, 8, device="meta")
            problem = AttentionProblem.of(
                q, k, k, causal=piece.causal, window_size=piece.window_size, alignment=piece.alignment
            )
            part = problem.mask(torch.arange(rows), torch.arange(keys))
            elements[list(entries), piece.q_start : piece.q_stop, piece.k_start : piece.k_stop] |= part
    return elements
