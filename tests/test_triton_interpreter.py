"""The Triton kernels in Triton's interpreter, on CPU tensors, against the float64 oracle.

TRITON_INTERPRET must be set before the kernels are imported, and would turn every other test's kernels into
interpreted ones; so this file runs itself again in a process of its own.  bfloat16 is left out: the interpreter
cannot multiply it.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET") != "1":

    def test_in_the_interpreter() -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
        done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]

else:
    from peakattn import reference
    from peakattn.backends.triton import bwd, fwd
    from peakattn.device import CPU
    from peakattn.problem import AttentionProblem

    FWD = {
        "pointers": fwd.Config(32, 16),
        "overlap": fwd.Config(32, 32, overlap=True),
        "overlap, descriptors": fwd.Config(16, 32, tma=True, q_registers=True, overlap=True),
    }
    BWD = {
        "pointers": bwd.Config(16, 32, 32, 16),
        "descriptors": bwd.Config(32, 32, 16, 32, tma=True),
    }

    # sizes: batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim, head_dim_v
    CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
        "whole blocks, no masks in the code": ((1, 64, 64, 2, 2, 64, 64), {}),
        "tails of both sequences": ((2, 41, 53, 1, 1, 16, 16), {}),
        "group of three": ((1, 33, 37, 6, 2, 16, 16), {"causal": True}),
        "head_dim below a tensor core's": ((1, 20, 20, 1, 1, 1, 1), {"causal": True}),
        "padded head_dim, head_dim_v larger": ((1, 33, 40, 2, 1, 40, 72), {"causal": True}),
        "head_dim_v smaller": ((1, 33, 40, 2, 1, 72, 16), {}),
        "head_dim 256": ((1, 17, 33, 1, 1, 256, 256), {"causal": True}),
        "causal, more keys": ((1, 33, 70, 1, 1, 16, 16), {"causal": True}),
        "causal, more rows: rows without keys": ((1, 70, 33, 1, 1, 16, 16), {"causal": True}),
        "causal, top left": ((1, 70, 33, 1, 1, 16, 16), {"causal": True, "alignment": "top_left"}),
        "window": ((1, 50, 60, 1, 1, 16, 16), {"window_size": (21, 3)}),
        "window, top left: rows without keys": ((1, 70, 40, 1, 1, 16, 16), {"window_size": (9, 5), "alignment": "top_left"}),
        "window, left only": ((1, 50, 60, 1, 1, 16, 16), {"window_size": (20, None)}),
        "window, causal": ((1, 50, 50, 1, 1, 16, 16), {"window_size": (20, None), "causal": True}),
        "window wider than an int32": ((1, 20, 20, 1, 1, 16, 16), {"window_size": (2**40, 2**40)}),
        "one query": ((2, 1, 70, 2, 1, 16, 16), {"causal": True}),
        "one key": ((1, 20, 1, 1, 1, 16, 16), {}),
        "one of each": ((1, 1, 1, 1, 1, 16, 16), {"causal": True}),
        "no keys": ((1, 17, 0, 2, 1, 16, 16), {"causal": True}),
        "no rows": ((1, 0, 17, 2, 1, 16, 16), {}),
        "softcap": ((1, 40, 50, 2, 1, 16, 16), {"causal": True, "softcap": 2.0}),
        "softmax_scale": ((1, 40, 50, 2, 1, 16, 16), {"softmax_scale": 0.7}),
    }

    def inputs(sizes: tuple[int, ...], dtype: torch.dtype = torch.float16, magnitude: float = 1.0) -> list[torch.Tensor]:
        batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim, head_dim_v = sizes
        generator = torch.Generator().manual_seed(0)

        def tensor(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) + 0.2

        q = tensor(batch, seqlen_q, num_heads_q, head_dim) * magnitude
        k = tensor(batch, seqlen_k, num_heads_kv, head_dim) * magnitude
        v, dout = tensor(batch, seqlen_k, num_heads_kv, head_dim_v), tensor(batch, seqlen_q, num_heads_q, head_dim_v)
        return [x.to(dtype) for x in (q, k, v, dout)]

    def scalars(q: torch.Tensor, options: dict[str, Any]) -> tuple[float, float]:
        return options.get("softmax_scale") or q.shape[-1] ** -0.5, options.get("softcap") or 0.0

    def run_fwd(config: fwd.Config, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> list[torch.Tensor]:
        problem = AttentionProblem.of(q, k, v, return_lse=True, **options)
        assert fwd.reject(problem, CPU) is None
        out = torch.full((*q.shape[:-1], v.shape[-1]), math.nan, dtype=q.dtype)
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan)
        fwd.launch(problem, config, q, k, v, out, lse, *scalars(q, options))
        return [out, lse]

    def check_fwd(config: fwd.Config, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> None:
        out, lse = run_fwd(config, q, k, v, **options)
        exact = reference.attention(q, k, v, **options)
        low = reference.attention(q, k, v, dtype=q.dtype, **options)
        reference.check(out, exact[0], low[0], "out")
        reference.check(lse, exact[1], low[1], "lse", dtype=torch.float32)

    def run_bwd(
        config: bwd.Config,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None = None,
        needs: tuple[bool, bool, bool] = (True, True, True),
        **options: Any,
    ) -> list[torch.Tensor | None]:
        problem = AttentionProblem.of(q, k, v, **options).backward(
            needs_dq=needs[0], needs_dk=needs[1], needs_dv=needs[2], aligned=True
        )
        assert bwd.reject(problem, CPU) is None
        out, lse = reference.attention(q, k, v, **options)
        wanted = zip((q, k, v), needs, strict=True)
        dq, dk, dv = (torch.full(x.shape, math.nan, dtype=x.dtype) if need else None for x, need in wanted)
        bwd.launch(problem, config, q, k, v, out.to(q.dtype), lse.float(), dout, dlse, dq, dk, dv, *scalars(q, options))
        return [dq, dk, dv]

    def check_bwd(
        config: bwd.Config,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None = None,
        needs: tuple[bool, bool, bool] = (True, True, True),
        **options: Any,
    ) -> None:
        grads = run_bwd(config, q, k, v, dout, dlse, needs, **options)
        exact = reference.attention_backward(q, k, v, dout, dlse, **options)
        low = reference.attention_backward(q, k, v, dout, dlse, dtype=q.dtype, **options)
        for name, grad, want, rough in zip(("dq", "dk", "dv"), grads, exact, low, strict=True):
            if grad is not None:
                reference.check(grad, want, rough, name)

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("variant", FWD)
    def test_forward(variant: str, case: str) -> None:
        sizes, options = CASES[case]
        q, k, v, _ = inputs(sizes)
        check_fwd(FWD[variant], q, k, v, **options)

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("variant", BWD)
    def test_backward(variant: str, case: str) -> None:
        sizes, options = CASES[case]
        q, k, v, dout = inputs(sizes)
        check_bwd(BWD[variant], q, k, v, dout, **options)

    @pytest.mark.parametrize("options", [{"causal": True}, {"softcap": 30.0}, {"window_size": (20, 3)}], ids=str)
    def test_float32_keeps_float32_accuracy(options: dict[str, Any]) -> None:
        q, k, v, dout = inputs((1, 33, 40, 1, 1, 24, 24), torch.float32)
        check_fwd(FWD["pointers"], q, k, v, **options)
        check_fwd(FWD["overlap"], q, k, v, **options)
        check_bwd(BWD["pointers"], q, k, v, dout, **options)

    @pytest.mark.parametrize("alone", ["dq", "dk", "dv"])
    def test_one_gradient_alone(alone: str) -> None:
        q, k, v, dout = inputs((1, 33, 40, 2, 1, 16, 32))
        needs = (alone == "dq", alone == "dk", alone == "dv")
        check_bwd(BWD["pointers"], q, k, v, dout, needs=needs, causal=True)

    def test_gradient_through_lse() -> None:
        q, k, v, dout = inputs((2, 20, 25, 2, 1, 16, 16))
        dlse = torch.linspace(-1, 2, 2 * 2 * 20).reshape(2, 20, 2).transpose(1, 2)
        check_bwd(BWD["pointers"], q, k, v, dout, dlse, causal=True)
        check_bwd(BWD["descriptors"], q, k, v, torch.zeros_like(dout), dlse)

    def strided(x: torch.Tensor, how: str) -> torch.Tensor:
        """The values of x with other strides."""
        if how == "heads first":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if how == "last stride 2":
            wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), math.nan, dtype=x.dtype)
            wide[..., ::2] = x
            return wide[..., ::2]
        if how == "a column of a wider tensor":
            wide = torch.full((*x.shape[:-1], 3 * x.shape[-1]), math.nan, dtype=x.dtype)
            wide[..., x.shape[-1] : 2 * x.shape[-1]] = x
            return wide[..., x.shape[-1] : 2 * x.shape[-1]]
        return x[:1, :, :1].expand_as(x)  # stride 0

    @pytest.mark.parametrize("how", ["heads first", "last stride 2", "a column of a wider tensor", "expanded"])
    def test_strides(how: str) -> None:
        q, k, v, dout = (strided(x, how) for x in inputs((2, 17, 20, 2, 2, 16, 16)))
        check_fwd(FWD["pointers"], q, k, v, causal=True)
        check_bwd(BWD["pointers"], q, k, v, dout, causal=True)
        # With descriptors asked for, tensors that TMA cannot address are read by pointers.
        check_fwd(FWD["overlap, descriptors"], q, k, v, causal=True)

    def test_dout_of_a_sum_has_stride_zero() -> None:
        q, k, v, dout = inputs((1, 33, 40, 2, 1, 16, 16))
        check_bwd(BWD["pointers"], q, k, v, torch.ones((), dtype=dout.dtype).expand_as(dout))

    @pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
    @pytest.mark.parametrize("softcap", [None, 3.0])
    def test_masked_keys_may_hold_anything(softcap: float | None, poison: float) -> None:
        q, k, v, dout = inputs((1, 24, 24, 1, 1, 16, 16))
        q, dout = q[:, :19], dout[:, :19]
        for x in (k, v):
            x[:, 20:] = poison  # no row sees these, though they stand in a block that rows see
        options: dict[str, Any] = {"causal": True, "alignment": "top_left", "softcap": softcap}
        for variant in ("pointers", "overlap, descriptors"):
            check_fwd(FWD[variant], q, k, v, **options)
        for config in BWD.values():
            check_bwd(config, q, k, v, dout, **options)

    def test_a_poisoned_key_reaches_only_the_rows_that_see_it() -> None:
        q, k, v, _ = inputs((1, 24, 24, 1, 1, 16, 16))
        clean = run_fwd(FWD["pointers"], q, k, v, causal=True)[0]
        v[:, 21] = math.nan
        out = run_fwd(FWD["pointers"], q, k, v, causal=True)[0]
        assert torch.isnan(out[:, 21:]).all()
        torch.testing.assert_close(out[:, :21], clean[:, :21], rtol=2e-3, atol=2e-3)

    @pytest.mark.parametrize("magnitude", [30.0, 5e4])
    @pytest.mark.parametrize("softcap", [None, 20.0])
    def test_large_scores(magnitude: float, softcap: float | None) -> None:
        dtype = torch.float32 if magnitude > 1e3 else torch.float16
        q, k, v, _ = inputs((1, 33, 40, 1, 1, 16, 16), dtype, magnitude)
        for variant in ("pointers", "overlap"):
            out, lse = run_fwd(FWD[variant], q, k, v, causal=True, softcap=softcap)
            assert torch.isfinite(out).all()
            assert torch.isfinite(lse).all()
        check_fwd(FWD["pointers"], q, k, v, causal=True, softcap=softcap)

    def test_softmax_of_one_key_is_one_however_large_its_score() -> None:
        # exp2 of a rounded difference would overflow here (PT#121558).
        q = torch.full((1, 3, 1, 64), 133120.0)
        for score in (1.0, -1.0):
            out, _ = run_fwd(FWD["pointers"], q, score * q[:, :1], q[:, :1])
            assert torch.equal(out, q)

    def test_tf32_only_where_torch_allows_it() -> None:
        q, k, v, _ = inputs((1, 16, 16, 1, 1, 16, 16), torch.float32)
        problem = AttentionProblem.of(q, k, v)
        before = torch.get_float32_matmul_precision()
        try:
            for setting, want in (("highest", "ieee"), ("high", "tf32")):
                torch.set_float32_matmul_precision(setting)
                (launch,) = fwd.launches(problem, FWD["pointers"], q, k, v, q, None, 1.0, 0.0)
                assert launch.constexprs["PRECISION"] == want
        finally:
            torch.set_float32_matmul_precision(before)

    def test_the_interpreter_refuses_bfloat16() -> None:
        q = torch.zeros(1, 16, 1, 16, dtype=torch.bfloat16)
        for kernel in (fwd, bwd):
            reason = kernel.reject(AttentionProblem.of(q, q, q), CPU)
            assert reason is not None
            assert "bfloat16" in reason
