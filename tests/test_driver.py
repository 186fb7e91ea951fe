"""The driver launcher against a stand-in for libcuda: parameters in ABI order, one slot a caller, errors in sentences."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest
import torch

from peakattn.backends import driver


class FakeCuda:
    """Records what each launch would have handed to the GPU."""

    def __init__(self, sizes: list[int], status: int = 0) -> None:
        self.sizes, self.status = sizes, status
        self.launches: list[tuple[tuple[int, int, int], int, int, list[bytes]]] = []
        self.encoded: list[int] = []

    def cuLaunchKernelEx(self, config: Any, function: Any, params: Any, extra: None) -> int:
        c = config._obj
        values = [ctypes.string_at(params[i], size) for i, size in enumerate(self.sizes)]
        self.launches.append(((c.grid.x, c.grid.y, c.grid.z), c.block.x, c.stream or 0, values))
        return self.status

    def cuTensorMapEncodeTiled(self, target: ctypes.c_void_p, *rest: Any) -> int:
        assert target.value is not None
        assert target.value % 64 == 0
        address = rest[2].value
        self.encoded.append(address)
        ctypes.memmove(target, struct.pack("q", address) + bytes(120), 128)
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"invalid argument"
        return 0


def _launcher(monkeypatch: pytest.MonkeyPatch, params: tuple[driver.Param, ...], sizes: list[int], status: int = 0) -> Any:
    fake = FakeCuda(sizes, status)
    monkeypatch.setattr(driver, "_cuda", lambda: fake)
    monkeypatch.setattr(driver, "_raw_stream", lambda: lambda device: 7000 + device)
    kernel = driver.Kernel(ctypes.c_void_p(1), (3, 2, 1), 128, 1024, params)
    return fake, driver.launcher(kernel, 1)


def test_parameters_arrive_in_order_on_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    params = (driver.Pointer(1), struct.pack("i", -5), driver.Scalar(2), driver.Pointer(0), struct.pack("q", 1 << 40))
    fake, launch = _launcher(monkeypatch, params, [8, 4, 4, 8, 8])
    launch([0x1000, 0x2000, 0.25])
    launch([0x3000, 0x2000, 0.5])
    grid, threads, stream, values = fake.launches[0]
    assert (grid, threads, stream) == ((3, 2, 1), 128, 7001)
    assert values == [
        struct.pack("Q", 0x2000),
        struct.pack("i", -5),
        struct.pack("f", 0.25),
        struct.pack("Q", 0x1000),
        struct.pack("q", 1 << 40),
    ]
    assert fake.launches[1][3][2:4] == [struct.pack("f", 0.5), struct.pack("Q", 0x3000)]


def test_tensor_maps_are_encoded_once_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor_map = driver.TensorMap(0, torch.bfloat16, (2, 64, 4, 64), (16384, 256, 64, 1), (1, 64, 1, 64), 3)
    fake, launch = _launcher(monkeypatch, (driver.Pointer(0), tensor_map), [8, 128])
    for address in (0x4000, 0x4000, 0x8000, 0x4000):
        launch([address])
    assert fake.encoded == [0x4000, 0x8000]
    assert [struct.unpack_from("q", v[3][1])[0] for v in fake.launches] == [0x4000, 0x4000, 0x8000, 0x4000]


def test_of_a_new_set_of_addresses_only_the_new_ones_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = [driver.TensorMap(i, torch.bfloat16, (1, 64, 1, 64), (4096, 64, 64, 1), (1, 64, 1, 64), 3) for i in range(2)]
    fake, launch = _launcher(monkeypatch, tuple(maps), [128, 128])
    for addresses in ((0x4000, 0x5000), (0x4000, 0x6000), (0x7000, 0x5000), (0x7000, 0x6000), (0x4000, 0x5000)):
        launch(addresses)
    assert fake.encoded == [0x4000, 0x5000, 0x6000, 0x7000]
    found = [tuple(struct.unpack_from("q", v)[0] for v in values) for *_, values in fake.launches]
    assert found[3:] == [(0x7000, 0x6000), (0x4000, 0x5000)]


def test_many_addresses_do_not_grow_the_cache_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor_map = driver.TensorMap(0, torch.float16, (1, 64, 1, 64), (4096, 64, 64, 1), (1, 64, 1, 64), 3)
    fake, launch = _launcher(monkeypatch, (tensor_map,), [128])
    for i in range(3 * driver._MAX_CACHED_MAPS):
        launch([4096 * (i + 1)])
    assert len(fake.encoded) == 3 * driver._MAX_CACHED_MAPS
    launch([4096])
    assert len(fake.encoded) == 3 * driver._MAX_CACHED_MAPS + 1, "the first address was forgotten, and is encoded again"


def test_a_reentrant_launch_gets_a_slot_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, _ = _launcher(monkeypatch, (driver.Pointer(0),), [8])
    inner = fake.cuLaunchKernelEx

    class Reentrant:
        depth = 0

        def cuLaunchKernelEx(self, *args: Any) -> int:
            if self.depth == 0:
                self.depth = 1
                nested([0xB000])
            return inner(*args)

    again = Reentrant()
    monkeypatch.setattr(driver, "_cuda", lambda: again)
    nested = driver.launcher(driver.Kernel(ctypes.c_void_p(1), (1, 1, 1), 32, 0, (driver.Pointer(0),)), 0)
    nested([0xA000])
    assert [struct.unpack("Q", v[3][0])[0] for v in fake.launches] == [0xB000, 0xA000]


def test_a_failed_launch_says_what_the_driver_said(monkeypatch: pytest.MonkeyPatch) -> None:
    _, launch = _launcher(monkeypatch, (driver.Pointer(0),), [8], status=1)
    with pytest.raises(RuntimeError, match=r"cuLaunchKernelEx failed with error 1: invalid argument\."):
        launch([0x1000])


def test_a_thread_without_a_context_gets_the_devices_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """autograd's thread makes no CUDA runtime call when all of its memory comes from the allocator's cache."""
    fake, launch = _launcher(monkeypatch, (driver.Pointer(0),), [8], status=201)
    made: list[str] = []

    def make_current(*args: Any) -> int:
        made.append("current")
        fake.status = 0
        return 0

    monkeypatch.setattr(fake, "cuDeviceGet", lambda *args: 0, raising=False)
    monkeypatch.setattr(fake, "cuDevicePrimaryCtxRetain", lambda *args: 0, raising=False)
    monkeypatch.setattr(fake, "cuCtxSetCurrent", make_current, raising=False)
    launch([0x1000])
    launch([0x1000])
    assert made == ["current"]
    assert len(fake.launches) == 3


def test_launches_that_may_overlap_never_share_a_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda([8, 8])
    stream, capturing, slabs = [7000], [False], [0x10000]

    def allocate(address: Any, size: Any) -> int:
        address._obj.value = slabs[0]
        slabs[0] += size.value
        return 0

    for name in ("cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode"):
        monkeypatch.setattr(fake, name, lambda *args: 0, raising=False)
    for name in ("cuStreamCreate", "cuMemsetD32Async", "cuStreamSynchronize", "cuStreamDestroy_v2"):
        monkeypatch.setattr(fake, name, lambda *args: 0, raising=False)
    monkeypatch.setattr(fake, "cuMemAlloc_v2", allocate, raising=False)
    monkeypatch.setattr(driver, "_cuda", lambda: fake)
    monkeypatch.setattr(driver, "_raw_stream", lambda: lambda device: stream[0])
    monkeypatch.setattr(driver._Counters, "_COUNT", 2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    counters = driver._Counters(0)
    monkeypatch.setattr(driver, "_counters", lambda device: counters)
    kernel = driver.Kernel(ctypes.c_void_p(1), (1, 1, 1), 32, 0, (driver.Counter(), driver.Pointer(0)))
    launches = [driver.launcher(kernel, 0), driver.launcher(kernel, 0)]

    def counter(launch: Any) -> int:
        launch([0x1000])
        values = fake.launches[-1][3]
        assert values[1] == struct.pack("Q", 0x1000)
        return struct.unpack("Q", values[0])[0]

    first = [counter(launches[0]), counter(launches[1])]
    assert first[0] == first[1]  # one stream runs one after the other
    stream[0] = 7001
    other = counter(launches[0])
    capturing[0] = True
    captured = [counter(launches[0]) for _ in range(3)]
    capturing[0] = False
    assert counter(launches[0]) == other
    assert len({first[0], other, *captured}) == 5


def test_chain_launches_in_order() -> None:
    seen: list[tuple[str, int]] = []
    launches = [lambda args, n=name: seen.append((n, args[0])) for name in "ab"]
    driver.chain(launches)([5])
    assert seen == [("a", 5), ("b", 5)]
