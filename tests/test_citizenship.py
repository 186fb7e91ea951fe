"""peakattn.attention as a citizen of PyTorch: custom ops, torch.compile, checkpointing, autocast, torch.func, devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import peakattn
from cases import LAYOUTS, Case
from peakattn import plan, reference
from peakattn.backends.cpu.fwd import Config

SMALL = Case("citizen", "", 12, 20, 4, 2, 16, batch=2)
OPS = torch.ops.peakattn


def small(layout: str = "bshd", dtype: torch.dtype = torch.float32, grad: bool = False) -> list[torch.Tensor]:
    tensors = LAYOUTS[layout](*SMALL.inputs(dtype))
    return [x.requires_grad_() for x in tensors] if grad else list(tensors)


# Custom ops.

FAKE_TESTS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "qkv", "expanded", "odd_rows"])
@pytest.mark.parametrize("head_dim_v", [16, 24])
def test_opcheck_forward(layout: str, head_dim_v: int) -> None:
    """ComfyUI#15044, vllm#29014: strides of the fake are those of the eager result, in every layout."""
    case = Case("opcheck", "", 12, 20, 4, 2, 16, head_dim_v, batch=2, layout=layout)
    inputs = [x.requires_grad_() for x in case.inputs(torch.float32)]
    torch.library.opcheck(OPS.attention_fwd, (*inputs, None, 0), {"return_lse": True}, test_utils=FAKE_TESTS)
    detached = [x.detach() for x in inputs]
    torch.library.opcheck(OPS.attention_fwd, (*detached, 3, None, "top_left", 0.3, 5.0, False), test_utils=FAKE_TESTS)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "qkv"])
@pytest.mark.parametrize("needs", [[True, True, True], [False, True, False]], ids=str)
def test_opcheck_backward(layout: str, needs: list[bool]) -> None:
    q, k, v = small(layout)
    out, lse = OPS.attention_fwd(q, k, v, None, 0)
    for dlse in (None, torch.randn_like(lse)):
        args = (torch.randn_like(out), dlse, q, k, v, out, lse, None, 0, "bottom_right", None, None, needs)
        torch.library.opcheck(OPS.attention_bwd, args, test_utils=FAKE_TESTS)


def test_a_batch_over_65535_has_the_same_strides_when_compiled() -> None:
    """PT#180445: chunking in the eager path must not change them."""
    q = torch.empty(65537, 2, 1, 8, device="meta").transpose(1, 2)
    assert peakattn.attention(q, q, q).stride() == q.stride()


# torch.compile.

COMPILE = [
    {},
    {"causal": True},
    {"window_size": (4, 2), "softcap": 5.0},
    {"causal": True, "alignment": "top_left", "softmax_scale": 0.7},
    {"softmax_scale": -0.3},
    {"config": Config(block_m=8, block_n=8), "softcap": 2.0},
]


def step(fn: Callable[..., Any], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    out, lse = fn(*inputs)
    loss = (out.float() ** 2).sum() + lse.sin().sum()
    return [out, lse, *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("options", COMPILE, ids=str)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_compiled_equals_eager(options: dict[str, Any], layout: str) -> None:
    """FA#2678, SageAttention#325: one graph, dynamic shapes, the same numbers."""
    torch.compiler.reset()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return peakattn.attention(q, k, v, return_lse=True, **options)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    wanted = step(call, small(layout, grad=True))
    for got, want in zip(step(compiled, small(layout, grad=True)), wanted, strict=True):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()


def test_compiled_numbers_stay_arguments() -> None:
    """softmax_scale and softcap are run-time numbers under torch.compile too."""
    torch.compiler.reset()
    compiled = torch.compile(peakattn.attention, fullgraph=True, dynamic=True, backend="aot_eager")
    q, k, v = small()
    for scale, softcap in ((0.3, 5.0), (0.4, 2.0), (-0.2, 1.5)):
        got = compiled(q, k, v, softmax_scale=scale, softcap=softcap)
        torch.testing.assert_close(got, peakattn.attention(q, k, v, softmax_scale=scale, softcap=softcap))


def test_a_new_length_does_not_recompile() -> None:
    """FA#1386: a cache grows by one key a step."""
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(peakattn.attention, fullgraph=True, dynamic=True, backend=counter)
    for seqlen in (7, 8, 9, 33, 64):
        q, k = torch.randn(2, 5, 4, 16), torch.randn(2, seqlen, 2, 16)
        torch.testing.assert_close(compiled(q, k, k, causal=True), peakattn.attention(q, k, k, causal=True))
    assert counter.frame_count == 1


@pytest.mark.slow
def test_compiled_with_inductor() -> None:
    """The default backend, inside code that it fuses around the call, forward and backward."""
    torch.compiler.reset()

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return peakattn.attention(q * 2, k.sin(), v, causal=True).relu().transpose(1, 2).contiguous()

    inputs = small(grad=True)
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    got = [compiled(*inputs)]
    want = [block(*inputs)]
    got += torch.autograd.grad(got[0].square().sum(), inputs)
    want += torch.autograd.grad(want[0].square().sum(), inputs)
    torch.testing.assert_close(got, want)


def test_an_error_under_compile_is_the_same_sentence() -> None:
    torch.compiler.reset()
    q, k, v = small()
    compiled = torch.compile(peakattn.attention, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="window_size left is -7; allowed are 0 and up"):
        compiled(q, k, v, window_size=(-7, 0))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_sees_the_op_also_when_a_plan_is_ready(mode: Literal["real", "fake", "symbolic"]) -> None:
    tensors = small()
    for _ in range(2):
        peakattn.attention(*tensors)
    graph = make_fx(lambda q, k, v: peakattn.attention(q, k, v), tracing_mode=mode)(*tensors).graph
    assert torch.ops.peakattn.attention_fwd.default in [node.target for node in graph.nodes]


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_a_module(strict: bool) -> None:
    class Block(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return peakattn.attention(q, k, v, causal=True)

    tensors = small()
    want = Block()(*tensors)
    exported = torch.export.export(Block(), tuple(tensors), strict=strict)
    assert torch.ops.peakattn.attention_fwd.default in [node.target for node in exported.graph.nodes]
    assert torch.equal(exported.module()(*tensors), want)


def test_export_of_meta_tensors() -> None:
    """Shapes and strides without a computation."""
    q, k, v = (x.to("meta") for x in small("bhsd"))
    out, lse = peakattn.attention(q, k, v, return_lse=True)
    real = peakattn.attention(*small("bhsd"), return_lse=True)
    assert (out.shape, out.stride(), lse.shape) == (real[0].shape, real[0].stride(), real[1].shape)


# Checkpointing, autocast, grad modes.


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    inputs = small(grad=True)
    plain = torch.autograd.grad(peakattn.attention(*inputs, causal=True).square().sum(), inputs)
    inputs = small(grad=True)
    out = checkpoint(lambda q, k, v: peakattn.attention(q, k, v, causal=True), *inputs, use_reentrant=reentrant)
    out.square().sum().backward()
    for x, want in zip(inputs, plain, strict=True):
        assert x.grad is not None
        assert torch.equal(x.grad, want)


def test_autocast_takes_the_inputs_to_its_dtype() -> None:
    q, k, v = small(grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = peakattn.attention(q, k, v, causal=True)
        mixed = peakattn.attention(q, k.bfloat16(), v, causal=True)
    assert out.dtype == mixed.dtype == torch.bfloat16
    want = peakattn.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), causal=True)
    assert torch.equal(out, want)
    assert torch.equal(mixed, want)
    out.float().sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=str)
def test_backward_inside_autocast_is_the_backward_outside(options: dict[str, Any]) -> None:
    """Products in the backward are the kernel's own affair."""
    inputs = small(grad=True)
    out = peakattn.attention(*inputs, **options)
    want = torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(out, inputs, torch.ones_like(out))
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def test_inference_mode() -> None:
    q, k, v = small()
    want = peakattn.attention(q, k, v)
    with torch.inference_mode():
        out = peakattn.attention(q, k, v)
        again = peakattn.attention(*small())
    assert out.is_inference()
    assert torch.equal(out, want)
    assert torch.equal(again, want)
    # What was prepared under inference_mode serves training too.
    inputs = small(grad=True)
    peakattn.attention(*inputs).sum().backward()
    assert inputs[0].grad is not None


def test_aligned_tensors_never_get_the_plan_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = small()
    shifted = torch.empty(q.numel() + 1)[1:].view(q.shape).copy_(q)
    used = []
    known = plan.ForwardPlan.__call__

    def call(self: plan.ForwardPlan, *args: Any) -> Any:
        used.append(self.problem.aligned)
        return known(self, *args)

    monkeypatch.setattr(plan.ForwardPlan, "__call__", call)
    for first in (q, shifted, q, shifted, q):
        peakattn.attention(first, k, v)
    assert used == [True, False, True, False, True]


def test_no_grad_and_grad_take_turns_on_the_same_tensors() -> None:
    q, k, v = small(grad=True)
    for _ in range(3):
        with torch.no_grad():
            assert peakattn.attention(q, k, v).grad_fn is None
        assert type(peakattn.attention(q, k, v).grad_fn).__name__ == "AttentionBackward"


def test_a_parameter_and_a_subclass_are_tensors() -> None:
    q, k, v = small()

    class Named(torch.Tensor):
        pass

    want = peakattn.attention(q, k, v)
    assert torch.equal(peakattn.attention(torch.nn.Parameter(q), k, v), want)
    assert torch.equal(peakattn.attention(q.as_subclass(Named), k, v), want)


def test_the_caller_may_change_an_option_between_calls() -> None:
    """A prepared call is found by everything that it depends on."""
    q, k, v = small()
    for options in ({}, {"causal": True}, {"softcap": 1.0}, {"softcap": 2.0}, {"softmax_scale": 0.1}, {"softmax_scale": 0.9}):
        for x in (q, q.half()):
            out = peakattn.attention(x, k.to(x.dtype), v.to(x.dtype), **options)
            want, _ = reference.attention(x, k.to(x.dtype), v.to(x.dtype), **options)
            torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=1e-2)


def test_double_backward_says_that_there_is_none() -> None:
    """PT#116350, PT#181177."""
    inputs = small(grad=True)
    out = peakattn.attention(*inputs)
    (dq,) = torch.autograd.grad(out.square().sum(), inputs[:1], create_graph=True)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"once_differentiable|double backward"):
        dq.sum().backward()


# torch.func.


def test_func_grad() -> None:
    """FA#2071, PT#128971."""
    inputs = small()
    got = torch.func.grad(lambda *x: peakattn.attention(*x, causal=True).square().sum(), argnums=(0, 1, 2))(*inputs)
    leaves = small(grad=True)
    want = torch.autograd.grad(peakattn.attention(*leaves, causal=True).square().sum(), leaves)
    torch.testing.assert_close(got, want)


def test_func_vmap() -> None:
    q, k, v = (torch.randn(3, *x.shape) for x in small())
    want = torch.stack([peakattn.attention(*x, causal=True) for x in zip(q, k, v, strict=True)])
    torch.testing.assert_close(torch.func.vmap(lambda *x: peakattn.attention(*x, causal=True))(q, k, v), want)
    want = torch.stack([peakattn.attention(x, k[0], v[0]) for x in q])
    torch.testing.assert_close(torch.func.vmap(peakattn.attention, in_dims=(0, None, None))(q, k[0], v[0]), want)


def test_func_vmap_of_grad() -> None:
    """Gradients of each sample, as differential privacy wants them."""
    q, k, v = (torch.randn(3, *x.shape) for x in small())

    def loss(*x: torch.Tensor) -> torch.Tensor:
        return peakattn.attention(*x).square().sum()

    got = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    each = [torch.func.grad(loss, argnums=(0, 1, 2))(*x) for x in zip(q, k, v, strict=True)]
    torch.testing.assert_close(got, tuple(torch.stack(x) for x in zip(*each, strict=True)))


# Devices.


@pytest.fixture
def on_gpu() -> list[torch.Tensor]:
    return [x.cuda() for x in Case("gpu", "", 256, 256, 4, 2, 64, batch=2).inputs(torch.bfloat16)]


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True])
def test_cuda_graph(on_gpu: list[torch.Tensor], training: bool) -> None:
    """TR#10596, tritonparse#197: no synchronisation, no tuning and no host read under capture."""
    inputs = [x.requires_grad_(training) for x in on_gpu]

    def work() -> list[torch.Tensor]:
        out = peakattn.attention(*inputs, causal=True)
        return [out, *(torch.autograd.grad(out.float().sum(), inputs) if training else ())]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    with torch.no_grad():
        for x in inputs:
            x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(captured, work(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
def test_a_first_call_of_a_new_length_under_capture() -> None:
    """The kernel is compiled, the length is new: preparing it must not synchronise."""
    q = torch.randn(1, 256, 4, 64, device="cuda", dtype=torch.bfloat16)
    peakattn.attention(q, q, q, causal=True)
    q = torch.randn(1, 512, 4, 64, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = peakattn.attention(q, q, q, causal=True)
    graph.replay()
    assert torch.equal(out, peakattn.attention(q, q, q, causal=True))


@pytest.mark.gpu
def test_side_stream(on_gpu: list[torch.Tensor]) -> None:
    """cudnn-frontend#483: inputs written on the caller's stream, long before and without a synchronisation."""
    q, k, v = on_gpu
    want = peakattn.attention(q, k, v)
    stream = torch.cuda.Stream()
    late = torch.empty_like(q)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(q)
        out = peakattn.attention(late, k, v)
    stream.synchronize()
    assert torch.equal(out, want)


@pytest.mark.gpu
def test_another_current_device(on_gpu: list[torch.Tensor]) -> None:
    """TR#2441, FA#1782: the tensors' device counts, in the forward and in the thread of the backward."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    want = peakattn.attention(*on_gpu, causal=True)
    inputs = [x.to("cuda:1").requires_grad_() for x in on_gpu]
    with torch.cuda.device(0):
        out = peakattn.attention(*inputs, causal=True)
        out.float().sum().backward()
    assert out.device == torch.device("cuda:1")
    assert torch.equal(out.to("cuda:0"), want)
    assert inputs[0].grad is not None
    with pytest.raises(ValueError, match=r"q is on cuda:0, k on cuda:1"):
        peakattn.attention(on_gpu[0], inputs[1], inputs[2])


@pytest.mark.gpu
def test_autocast_on_cuda(on_gpu: list[torch.Tensor]) -> None:
    q, k, v = on_gpu
    with torch.autocast("cuda", torch.bfloat16):
        out = peakattn.attention(q.float(), k, v.float())
    assert torch.equal(out, peakattn.attention(q, k, v))


@pytest.mark.gpu
def test_compiled_on_cuda(on_gpu: list[torch.Tensor]) -> None:
    torch.compiler.reset()
    inputs = [x.requires_grad_() for x in on_gpu]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return peakattn.attention(q, k, v, causal=True, return_lse=True)

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for got, want in zip(step(compiled, inputs), step(call, inputs), strict=True):
        torch.testing.assert_close(got, want)
