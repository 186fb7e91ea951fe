"""What toolchains share around a launch, with a stand-in for the launch itself."""

from __future__ import annotations

from typing import Any

import torch

from peakattn.backends import binding

WORKSPACE: binding.Workspace = {"delta": ((2, 3), torch.float32), "count": ((1,), torch.int32)}


def test_each_call_gets_scratch_memory_of_its_own() -> None:
    q, calls = torch.zeros(2), []

    def launches_in(scratch: dict[str, torch.Tensor]) -> list[Any]:
        assert {name: (tuple(x.shape), x.dtype) for name, x in scratch.items()} == WORKSPACE
        return [scratch]

    def bind_all(launches: Any, tensors: Any) -> Any:
        assert tuple(map(id, tensors)) == tuple(map(id, (None, q, *launches[0].values())))
        return lambda *args: calls.append(args)

    call = binding.prepare_with_scratch(launches_in, (None, q), WORKSPACE, bind_all)
    other = torch.ones(2)
    call(None, other, 0.5, 0.0)
    call(None, other, 0.25, 0.0)
    assert [args[:2] + args[4:] for args in calls] == [(None, other, 0.5, 0.0), (None, other, 0.25, 0.0)]
    assert {(tuple(x.shape), x.dtype) for args in calls for x in args[2:4]} == set(WORKSPACE.values())
    assert len({x.data_ptr() for args in calls for x in args[2:4]}) == 4


def test_without_launches_nothing_is_bound() -> None:
    def bind_all(launches: Any, tensors: Any) -> Any:
        raise AssertionError("there is nothing to bind")

    binding.prepare_with_scratch(lambda scratch: [], (torch.zeros(0),), WORKSPACE, bind_all)(torch.zeros(0), 1.0, 0.0)
