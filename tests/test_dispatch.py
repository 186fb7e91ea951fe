"""Choosing a kernel and a config, for GPUs that need not be here: the order, the refusals, the tuned files."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from peakattn import Device, NoKernelError, dispatch, tuned
from peakattn.api import describe
from peakattn.backends import KERNELS, load, toolchain
from peakattn.problem import AttentionProblem

H200 = Device.named("h200")
CAUSAL = AttentionProblem(4, 4096, 4096, 16, 16, 128, 128, torch.bfloat16, window_right=0)
needs_triton = pytest.mark.skipif(dispatch.unavailable("triton") is not None, reason=str(dispatch.unavailable("triton")))
needs_cute = pytest.mark.skipif(dispatch.unavailable("cute") is not None, reason=str(dispatch.unavailable("cute")))


def _entry(kernel: str = "triton.fwd", ratio: float = 1.0, **key: object) -> tuned.Entry:
    return tuned.Entry(kernel, key, {"block_m": 64, "block_n": 64}, {"date": "today", "of_best_rival": ratio})


@needs_triton
@needs_cute
@pytest.mark.parametrize(
    ("device", "kernel"),
    [("h200", "cute.fwd_sm90"), ("a100", "triton.fwd"), ("rtx5090", "triton.fwd"), ("b200", "triton.fwd")],
)
def test_each_architecture_gets_its_kernel(device: str, kernel: str) -> None:
    choice = dispatch.choose(CAUSAL, Device.named(device))
    assert choice.kernel_id == kernel
    assert str(choice).startswith(f"{kernel} with {choice.config_source} config (block_m=")


@needs_triton
def test_without_the_cute_extra_the_next_kernel_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain("cute"), "unavailable", lambda: "the package nvidia-cutlass-dsl is not installed")
    monkeypatch.setattr(toolchain("cuda"), "unavailable", lambda: None)
    assert dispatch.choose(CAUSAL, H200).kernel_id == "cuda.fwd_sm90"
    monkeypatch.setattr(toolchain("cuda"), "unavailable", lambda: "the package cuda-bindings is not installed")
    choice = dispatch.choose(CAUSAL, H200)
    assert choice.kernel_id == "triton.fwd_sm90"
    assert choice.refusals["cute.fwd_sm90"].endswith('install it with: pip install "peakattn[cute]"')


@needs_triton
def test_a_refusal_is_kept_beside_the_choice() -> None:
    choice = dispatch.choose(dataclasses.replace(CAUSAL, dtype=torch.float32), H200)
    assert choice.kernel_id == "triton.fwd"
    assert "float32" in choice.refusals["triton.fwd_sm90"]
    assert "refused: triton.fwd_sm90" in describe(dataclasses.replace(CAUSAL, dtype=torch.float32), H200)


@needs_triton
def test_a_named_kernel_never_falls_back() -> None:
    with pytest.raises(NoKernelError, match=r"triton\.fwd_sm90: .*float32.*\nLeave out backend="):
        dispatch.choose(dataclasses.replace(CAUSAL, dtype=torch.float32), H200, backend="triton.fwd_sm90")


def test_a_name_that_is_no_backend_lists_what_is() -> None:
    with pytest.raises(ValueError, match=r"backend is 'cudnn'; allowed are cpu, triton, .*triton\.fwd_sm90"):
        dispatch.choose(CAUSAL, H200, backend="cudnn")
    with pytest.raises(ValueError, match="is a bwd kernel and the problem is fwd"):
        dispatch.choose(CAUSAL, H200, backend="triton.bwd")


@needs_triton
def test_an_old_gpu_is_told_what_to_do() -> None:
    old = Device("cuda", "Tesla T4", 75, 40, 64 << 10, 64 << 10)
    with pytest.raises(
        NoKernelError, match=r"Tesla T4 has compute capability 7\.5; GPU kernels start at 8\.0: move q, k and v to the CPU"
    ):
        dispatch.choose(CAUSAL, old)


@needs_triton
def test_a_given_config_comes_before_a_tuned_one() -> None:
    config = {"block_m": 128, "block_n": 64}
    choice = dispatch.choose(CAUSAL, H200, "triton", config)
    assert (choice.kernel_id, choice.config_source, choice.config.block_n) == ("triton.fwd_sm90", "given", 64)
    with pytest.raises(TypeError, match=r"does not fit triton\.fwd_sm90 .*its knobs are block_m, block_n"):
        dispatch.choose(CAUSAL, H200, "triton", {"tile": 3})
    with pytest.raises(TypeError, match=r"config is a builtins\.int; triton\.fwd_sm90 takes"):
        dispatch.choose(CAUSAL, H200, "triton", 3)


@needs_triton
def test_tuned_entries_order_the_kernels_that_they_compare_and_give_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    def order(*entries: tuned.Entry) -> list[str]:
        monkeypatch.setattr(tuned, "entries", lambda slug: entries)
        tuned.lookup.cache_clear()
        return dispatch.candidates(CAUSAL, H200)

    lengths: dict[str, Any] = {"seqlen_q": 4096, "seqlen_k": 4096}
    plain = _entry(head_dim=128, **lengths)
    preferred = ["cute.fwd_sm90", "cuda.fwd_sm90", "triton.fwd_sm90", "triton.fwd", "cute.fwd_sm80"]
    assert order(plain) == preferred, "nothing says that it is faster than those before it"
    assert order(plain, _entry("triton.fwd_sm90", 0.9, head_dim=128, seqlen_q=2048, seqlen_k=2048)) == preferred
    assert order(plain, _entry("cute.fwd_sm90", 0.9, head_dim=128, **lengths))[0] == "triton.fwd"
    assert order(plain, _entry("triton.fwd_sm90", 0.9, head_dim=128, **lengths))[2] == "triton.fwd"
    choice = dispatch.choose(CAUSAL, H200, backend="triton")
    assert (choice.kernel_id, choice.config_source, choice.config.block_m) == ("triton.fwd", "tuned", 64)
    order(plain)
    assert dispatch.choose(CAUSAL, H200, backend="triton.fwd_sm90").config_source == "default"
    tuned.lookup.cache_clear()


def test_the_nearest_length_wins_within_a_factor_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = _entry(seqlen_q=2048, seqlen_k=2048), _entry(seqlen_q=16384, seqlen_k=16384)
    monkeypatch.setattr(tuned, "entries", lambda slug: (far, near))
    for seqlen, want in ((4096, near), (3000, near), (9000, far), (100, None), (1 << 20, None)):
        tuned.lookup.cache_clear()
        assert tuned.lookup(H200, dataclasses.replace(CAUSAL, seqlen_q=seqlen, seqlen_k=seqlen)) is want
    tuned.lookup.cache_clear()
    assert tuned.lookup(H200, dataclasses.replace(CAUSAL, seqlen_q=1)) is None, "one query token is no prefill"
    tuned.lookup.cache_clear()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "f.json is not a tuned-config file"),
        ('{"schema": 2, "entries": []}', "f.json has schema 2; this version reads schema 1."),
        (json.dumps({"schema": 1, "entries": [{"kernel": "k", "key": {}, "config": {}, "evidence": {}}]}), "has no evidence"),
        (json.dumps({"schema": 1, "entries": [{"kernel": "k"}]}), "not a tuned-config file: KeyError"),
    ],
)
def test_a_damaged_tuned_file_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tuned.parse(text, "f.json")


@needs_triton
def test_every_shipped_entry_is_a_legal_config_of_a_kernel_that_takes_its_class() -> None:
    found = tuned.entries(H200.slug)
    assert found
    for entry in found:
        assert entry.kernel in KERNELS
        kernel = load(entry.kernel)
        key = entry.key
        problem = AttentionProblem(
            *(4, key["seqlen_q"], key["seqlen_k"], 8, 8, key["head_dim"], key["head_dim_v"], getattr(torch, key["dtype"])),
            window_right=0 if key["mask"] == "causal" else None,
            direction=key["direction"],
        )
        assert kernel.reject(problem, H200) is None
        assert kernel.Config(**entry.config)
        assert dispatch.choose(problem, H200, entry.kernel).config_source == "tuned"
        assert {"date", "record", "tflops", "of_best_rival", "compiler", "kernel_hash"} <= set(entry.evidence)
