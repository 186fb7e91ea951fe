"""Bad input: each a sentence before any launch, with what was given, what is allowed and what to do next."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

import peakattn
from peakattn import dispatch
from peakattn.backends import load
from peakattn.device import KNOWN, Device
from peakattn.problem import AttentionProblem

Q = torch.zeros(2, 5, 4, 8)
KV = torch.zeros(2, 7, 2, 8)

TENSORS: list[tuple[str, Any, Any, Any, type[Exception], str]] = [
    ("not a tensor", [1.0], KV, KV, TypeError, "q is a list; pass a torch.Tensor of [batch, seqlen, num_heads, head_dim]."),
    ("none", Q, None, KV, TypeError, "k is a NoneType; pass a torch.Tensor of [batch, seqlen, num_heads, head_dim]."),
    (
        "rank 3",
        Q,
        KV,
        KV[0],
        ValueError,
        "v has 3 dimensions, shape (7, 2, 8); it must be [batch, seqlen, num_heads, head_dim].",
    ),
    (
        "two devices",
        Q,
        KV.to("meta"),
        KV,
        ValueError,
        "q is on cpu, k on meta and v on cpu; move them to one device with .to(device).",
    ),
    (
        "dtypes differ",
        Q,
        KV.half(),
        KV,
        TypeError,
        "q is torch.float32, k is torch.float16 and v is torch.float32; give all three one dtype with .to(dtype).",
    ),
    (
        "float64",
        Q.double(),
        KV.double(),
        KV.double(),
        TypeError,
        "q, k and v are torch.float64; allowed are float16, bfloat16 and float32: convert with .to(dtype).",
    ),
    (
        "integers",
        Q.int(),
        KV.int(),
        KV.int(),
        TypeError,
        "q, k and v are torch.int32; allowed are float16, bfloat16 and float32: convert with .to(dtype).",
    ),
    ("batch", Q, KV[:1], KV, ValueError, "batch differs: q has 2, k has 1, v has 2; dimension 0 must be equal."),
    ("seqlen", Q, KV, KV[:, :3], ValueError, "k has seqlen 7 and v has seqlen 3; dimension 1 of k and v must be equal."),
    ("kv heads", Q, KV, KV[:, :, :1], ValueError, "k has 2 heads and v has 1; dimension 2 of k and v must be equal."),
    (
        "head_dim",
        Q,
        KV[..., :4],
        KV,
        ValueError,
        "q has head_dim 8 and k has head_dim 4; dimension 3 of q and k must be equal.",
    ),
    ("no kv head", Q, KV[:, :, :0], KV[:, :, :0], ValueError, "q has 4 heads and k has none; k and v need at least one head."),
    (
        "heads that do not divide",
        Q[:, :, :3],
        KV,
        KV,
        ValueError,
        "num_heads_q 3 is not a multiple of num_heads_kv 2; each kv head serves an equal group of query heads.",
    ),
    (
        "huge head_dim",
        torch.zeros(1, 2, 1, 512),
        torch.zeros(1, 2, 1, 512),
        torch.zeros(1, 2, 1, 8),
        ValueError,
        "head_dim of q and k is 512; allowed are 1 to 256.",
    ),
    ("huge head_dim_v", Q, KV, torch.zeros(2, 7, 2, 257), ValueError, "head_dim of v is 257; allowed are 1 to 256."),
    ("head_dim 0", Q[..., :0], KV[..., :0], KV, ValueError, "head_dim of q and k is 0; allowed are 1 to 256."),
    (
        "sparse",
        Q,
        KV.to_sparse(),
        KV,
        TypeError,
        "k is of layout torch.sparse_coo; pass a dense torch.Tensor of [batch, seqlen, num_heads, head_dim].",
    ),
    (
        "nested",
        torch.nested.nested_tensor([Q[0], Q[0, :2]], layout=torch.jagged),
        KV,
        KV,
        TypeError,
        "q is a nested tensor; pass a dense torch.Tensor of [batch, seqlen, num_heads, head_dim].",
    ),  # PT#110669
]

OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"window_size": (-2, 0)},
        ValueError,
        "window_size left is -2; allowed are 0 and up, or None or -1 for an unlimited side.",
    ),
    (
        {"window_size": (0, -5)},
        ValueError,
        "window_size right is -5; allowed are 0 and up, or None or -1 for an unlimited side.",
    ),
    ({"window_size": (1.5, 0)}, TypeError, "window_size left is 1.5; pass an integer, or None or -1 for an unlimited side."),
    ({"window_size": (True, 0)}, TypeError, "window_size left is True; pass an integer, or None or -1 for an unlimited side."),
    ({"window_size": 4}, TypeError, "window_size is 4; pass (left, right), with None or -1 for an unlimited side."),
    (
        {"window_size": (1, 2, 3)},
        TypeError,
        "window_size is (1, 2, 3); pass (left, right), with None or -1 for an unlimited side.",
    ),
    (
        {"softmax_scale": math.nan},
        ValueError,
        "softmax_scale is nan; allowed is a finite number, or None for 1/sqrt(head_dim).",
    ),
    (
        {"softmax_scale": math.inf},
        ValueError,
        "softmax_scale is inf; allowed is a finite number, or None for 1/sqrt(head_dim).",
    ),
    (
        {"softmax_scale": "0.1"},
        TypeError,
        "softmax_scale is '0.1' of type str; allowed is a finite number, or None for 1/sqrt(head_dim).",
    ),
    ({"softcap": 0.0}, ValueError, "softcap is 0.0; allowed is a positive finite number, or None for no cap."),
    ({"softcap": -3.0}, ValueError, "softcap is -3.0; allowed is a positive finite number, or None for no cap."),
    ({"softcap": math.nan}, ValueError, "softcap is nan; allowed is a positive finite number, or None for no cap."),
    ({"softcap": True}, TypeError, "softcap is True of type bool; allowed is a positive finite number, or None for no cap."),
    ({"alignment": "left"}, ValueError, "alignment is 'left'; allowed are 'bottom_right' and 'top_left'."),
    ({"causal": 1}, TypeError, "causal is 1; pass True or False."),
    ({"causal": None}, TypeError, "causal is None; pass True or False."),
    ({"causal": torch.ones(5, 7, dtype=torch.bool)[:1, :1]}, TypeError, "causal is tensor([[True]]); pass True or False."),
    ({"backend": "tritn"}, ValueError, "backend is 'tritn'; allowed are cpu, triton"),
    ({"backend": "cpu.bwd"}, ValueError, "backend 'cpu.bwd' is a bwd kernel and the problem is fwd."),
    ({"config": {"block_q": 3}}, TypeError, "its knobs are block_m, block_n."),
    ({"config": {"block_m": 0}}, ValueError, "block_m is 0; allowed are integers of 1 and up."),
    ({"config": (64, 64)}, TypeError, "cpu.fwd takes peakattn.backends.cpu.fwd.Config or a dict of its fields."),
]


@pytest.mark.parametrize(("q", "k", "v", "kind", "sentence"), [t[1:] for t in TENSORS], ids=[t[0] for t in TENSORS])
def test_wrong_tensors(q: Any, k: Any, v: Any, kind: type[Exception], sentence: str) -> None:
    for call in (peakattn.attention, peakattn.explain):
        with pytest.raises(kind) as caught:
            call(q, k, v)
        assert str(caught.value) == sentence


@pytest.mark.parametrize(("options", "kind", "sentence"), OPTIONS, ids=[str(o[0])[:60] for o in OPTIONS])
@pytest.mark.parametrize("warm", [False, True], ids=["first", "after a good call"])
def test_wrong_options(options: dict[str, Any], kind: type[Exception], sentence: str, warm: bool) -> None:
    """Also after a call like it has been prepared: a fast path is no way around a check."""
    if warm:
        peakattn.attention(Q, KV, KV)
    with pytest.raises(kind, match=re.escape(sentence)):
        peakattn.attention(Q, KV, KV, **options)


def test_an_unknown_keyword_is_refused_and_not_ignored() -> None:
    """HF attention interface: a mask that nobody reads is a silent wrong answer."""
    for name in ("is_causal", "attn_mask", "dropout_p"):
        with pytest.raises(TypeError, match=name):
            peakattn.attention(Q, KV, KV, **{name: None})  # type: ignore[call-overload]


def test_no_kernel_lists_every_refusal_and_what_would_work() -> None:
    problem = AttentionProblem(1, 8, 8, 1, 1, 64, 64, torch.bfloat16)
    v100 = Device("cuda", "Tesla V100", arch=70, num_sms=80, smem_per_block=96 * 1024, smem_per_sm=96 * 1024)
    with pytest.raises(peakattn.NoKernelError) as caught:
        dispatch.choose(problem, v100)
    text = str(caught.value)
    assert "no kernel takes this problem on Tesla V100" in text
    assert "triton.fwd: " in text
    assert "compute capability 7.0" in text
    assert "move q, k and v to the CPU" in text


def test_a_named_backend_never_falls_back() -> None:
    with pytest.raises(peakattn.NoKernelError, match=r"cpu\.fwd: it computes on the CPU, and the tensors are on NVIDIA H200"):
        dispatch.choose(AttentionProblem(1, 8, 8, 1, 1, 64, 64, torch.bfloat16), KNOWN["h200"], "cpu")
    with pytest.raises(peakattn.NoKernelError, match="triton"):
        peakattn.attention(Q, KV, KV, backend="triton")


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(backend: str) -> Any:
        raise ImportError("No module named 'gone'", name="gone")

    monkeypatch.setattr(dispatch, "toolchain", missing)
    monkeypatch.setitem(dispatch.EXTRAS, "triton", "triton")
    with pytest.raises(
        peakattn.NoKernelError, match=re.escape('gone is not installed; install it with: pip install "peakattn[triton]"')
    ):
        dispatch.choose(AttentionProblem(1, 8, 8, 1, 1, 64, 64, torch.bfloat16), KNOWN["h200"])


def test_an_unknown_device_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"device 'h900' is unknown; known are a100, .*h200.*\."):
        Device.named("h900")


def test_explain_is_one_sentence_a_line_and_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load("cpu.fwd"), "launch", None)
    text = peakattn.explain(Q, KV, KV, causal=True)
    first, second = text.splitlines()
    assert first == "fwd float32 batch 2, seqlen 5 x 7, heads 4/2, head_dim 8, causal on cpu"
    assert second == "chosen: cpu.fwd with default config (block_m=256, block_n=512)"
    assert "nothing to compute" in peakattn.explain(Q, KV[:, :0], KV[:, :0])


@pytest.mark.gpu
def test_tensors_on_cpu_and_cuda_are_named() -> None:
    with pytest.raises(ValueError, match=r"q is on cuda:0, k on cpu and v on cuda:0; move them to one device"):
        peakattn.attention(Q.cuda(), KV, KV.cuda())
