"""Loading and launching machine code through the CUDA driver API, by ctypes.

Every backend that ends in a cubin launches here: no DSL launcher, no C compiler at run time, and a host cost of
little more than cuLaunchKernelEx itself.  Only standard driver entry points are used.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


class _Dim3(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]


class _LaunchConfig(ctypes.Structure):  # CUlaunchConfig
    _fields_ = [
        ("grid", _Dim3),
        ("block", _Dim3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_TMA_DTYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CUtensorMapDataType
_TMA_BYTES = 128
_MAX_CACHED_MAPS = 256  # sets of addresses, as of the layers of a model
_STREAM = _LaunchConfig.stream.offset
_CHANGING = ctypes.sizeof(_LaunchConfig)  # where the parameters that change begin, in the memory of a launch

_functions: dict[tuple[str, int, int], Any] = {}


@functools.cache
def _cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args: Any) -> None:
    status = getattr(_cuda(), name)(*args)
    if status:
        raise _error(name, status)


def _error(name: str, status: int) -> RuntimeError:
    text = ctypes.c_char_p()
    _cuda().cuGetErrorString(status, ctypes.byref(text))
    return RuntimeError(f"{name} failed with error {status}: {(text.value or b'unknown error').decode()}.")


def load_function(cubin: bytes, name: str, shared_bytes: int) -> ctypes.c_void_p:
    """A kernel of ``cubin`` on the current device, allowed ``shared_bytes`` of dynamic shared memory."""
    _make_context_current(torch.cuda.current_device())
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with _relaxed_capture():
        _call("cuModuleLoadData", ctypes.byref(module), cubin)
        _call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        if shared_bytes > 48 * 1024:
            _call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared_bytes)
    return function


def loaded(key: str, cubin: bytes, name: str, shared_bytes: int, device: int) -> Any:
    """``load_function`` once for each kernel, shared memory and device; ``key`` stands for the machine code."""
    place = (key, shared_bytes, device)
    function = _functions.get(place)
    if function is None:
        function = _functions[place] = load_function(cubin, name, shared_bytes)
    return function


@contextlib.contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Lets this thread allocate and load while it captures a CUDA graph, as the first call of a kernel may."""
    mode = ctypes.c_int(_RELAXED)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def _make_context_current(device: int) -> None:
    """Gives this thread the device's primary context, as the first call of the CUDA runtime would.

    A thread whose tensors all came from the allocator's cache, such as autograd's, has made no such call yet.
    """
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(handle), device)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    _call("cuCtxSetCurrent", context)


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor as a kernel parameter; the base address comes from the tensor in argument ``slot``."""

    slot: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements
    block_shape: tuple[int, ...]
    swizzle: int  # CUtensorMapSwizzle: 0 none, 1 32 bytes, 2 64 bytes, 3 128 bytes

    def encode(self, address: int) -> bytes:
        """The 128 bytes of a CUtensorMap; out-of-bounds elements read as zero."""
        rank = len(self.shape)
        buffer = (ctypes.c_ubyte * (_TMA_BYTES + 64))()
        start = -ctypes.addressof(buffer) % 64
        size = self.dtype.itemsize
        _call(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(ctypes.addressof(buffer) + start),
            _TMA_DTYPES[self.dtype],
            rank,
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*reversed(self.shape)),
            (ctypes.c_uint64 * (rank - 1))(*(s * size for s in reversed(self.strides[:-1]))),
            (ctypes.c_uint32 * rank)(*reversed(self.block_shape)),
            (ctypes.c_uint32 * rank)(*([1] * rank)),
            0,  # no interleave
            self.swizzle,
            2,  # L2 promotion 128 bytes
            0,  # zeros out of bounds
        )
        return bytes(buffer[start : start + _TMA_BYTES])


@dataclass(frozen=True)
class Tma:
    """A tensor read or written through a TMA descriptor, in dimensions ``order`` of the tensor, the last one contiguous."""

    tensor: torch.Tensor
    block_shape: tuple[int, ...]
    swizzle: int  # as in TensorMap
    order: tuple[int, ...] = (0, 2, 1, 3)

    def tensor_map(self, slot: int) -> TensorMap:
        x = self.tensor.permute(self.order)
        unit = 16 // x.element_size()
        # A dimension of one element gets a legal stride, whatever the tensor says.
        strides = [s if size > 1 else unit for s, size in zip(x.stride()[:-1], x.shape[:-1], strict=True)]
        return TensorMap(slot, x.dtype, tuple(x.shape), (*strides, 1), self.block_shape, self.swizzle)


@dataclass(frozen=True)
class Pointer:
    """A pointer parameter: the address of argument ``slot``."""

    slot: int


@dataclass(frozen=True)
class Scalar:
    """A float32 parameter: the number in argument ``slot``."""

    slot: int


@dataclass(frozen=True)
class Counter:
    """A pointer parameter: a 32-bit integer that is zero when the kernel starts, and that the kernel leaves at zero.

    Launches that may run at the same time never share one: each stream has its own, and so has each captured launch.
    """

    slot: int = -1  # the driver appends its address to the arguments


Param = Pointer | Scalar | TensorMap | Counter | bytes  # bytes: a constant, packed


_Changing = Pointer | Scalar | Counter


@dataclass(frozen=True)
class Kernel:
    """A loaded function with its launch shape and parameters in ABI order."""

    function: ctypes.c_void_p
    grid: tuple[int, int, int]
    num_threads: int
    shared_bytes: int
    params: tuple[Param, ...]


class _Slot:
    """Launch struct and parameter buffer of one in-flight host call, in one piece of memory.

    kernelParams points at each parameter, so their order in the buffer is ours: the stream of the launch struct, the
    addresses and numbers that change with every call, and the tensor maps follow each other, and one ``pack_into``
    writes them all; the constants come last.
    """

    __slots__ = ("config", "memory", "params")

    def __init__(self, kernel: Kernel, packed: struct.Struct, maps_at: int) -> None:
        constants = [p for p in kernel.params if isinstance(p, bytes)]
        constants_at = _STREAM + packed.size
        # A memoryview is written faster than a ctypes array, and keeps the array alive.
        storage = (ctypes.c_ubyte * (constants_at + 8 * len(constants) + 64))()
        start = -ctypes.addressof(storage) % 64
        base = ctypes.addressof(storage) + start
        self.memory = memoryview(storage)[start:]
        grid, block = _Dim3(*kernel.grid), _Dim3(kernel.num_threads, 1, 1)
        config = _LaunchConfig.from_buffer(storage, start)
        config.grid, config.block, config.shared_bytes = grid, block, kernel.shared_bytes
        self.config = ctypes.byref(config)
        for i, constant in enumerate(constants):
            ctypes.memmove(base + constants_at + 8 * i, constant, len(constant))
        places = (
            itertools.count(base + _CHANGING, 8),
            itertools.count(base + maps_at, _TMA_BYTES),
            itertools.count(base + constants_at, 8),
        )
        order = [2 if isinstance(p, bytes) else 1 if isinstance(p, TensorMap) else 0 for p in kernel.params]
        self.params = (ctypes.c_void_p * max(len(order), 1))(*(next(places[kind]) for kind in order))


def launcher(kernel: Kernel, device: int) -> Callable[[Sequence[Any]], None]:
    """A function that launches ``kernel`` on the current stream of ``device``, which must be the current device.

    It takes one sequence of arguments: addresses (int) for pointers and tensor maps, numbers for scalars.
    """
    cu_launch = _cuda().cuLaunchKernelEx
    function = kernel.function
    current_stream = _raw_stream()
    changing = [p for p in kernel.params if isinstance(p, _Changing)]
    pick_changing = _picker([p.slot for p in changing])
    counters = _counters(device) if any(isinstance(p, Counter) for p in changing) else None
    tensor_maps = [p for p in kernel.params if isinstance(p, TensorMap)]
    pick_mapped = _picker([p.slot for p in tensor_maps])

    maps_at = _CHANGING + 8 * len(changing)
    maps_at += -maps_at % 64
    numbers = "".join("f4x" if isinstance(p, Scalar) else "Q" for p in changing)
    gap = maps_at - _CHANGING - 8 * len(changing)
    packed = struct.Struct(f"<Q{_CHANGING - _STREAM - 8}x{numbers}{gap}x{_TMA_BYTES * len(tensor_maps)}s")
    pack = packed.pack_into
    free = [_Slot(kernel, packed, maps_at)]

    encoded: dict[tuple[int, ...], bytes] = {}

    @functools.lru_cache(_MAX_CACHED_MAPS)
    def map_of(index: int, address: int) -> bytes:
        return tensor_maps[index].encode(address)

    def encode(addresses: tuple[int, ...]) -> bytes:
        maps = encoded[addresses] = b"".join(map(map_of, range(len(addresses)), addresses))
        while len(encoded) > _MAX_CACHED_MAPS:
            encoded.pop(next(iter(encoded)), None)
        return maps

    def launch(args: Sequence[Any]) -> None:
        # list.pop and list.append are atomic, so threads never share a slot.
        try:
            slot = free.pop()
        except IndexError:
            slot = _Slot(kernel, packed, maps_at)
        stream = current_stream(device)
        if counters is not None:
            args = (*args, counters.of(stream))
        mapped = pick_mapped(args)
        maps = encoded.get(mapped)
        if maps is None:
            maps = encode(mapped)
        pack(slot.memory, _STREAM, stream, *pick_changing(args), maps)
        status = cu_launch(slot.config, function, slot.params, None)
        if status == _INVALID_CONTEXT:
            _make_context_current(device)
            status = cu_launch(slot.config, function, slot.params, None)
        free.append(slot)
        if status:
            raise _error("cuLaunchKernelEx", status)

    return launch


class _Counters:
    """Zeroed integers in the memory of one device, handed out once each."""

    _COUNT = 1024

    def __init__(self, device: int) -> None:
        self._device = device
        self._of_stream: dict[int, int] = {}
        self._free: list[int] = []

    def of(self, stream: int) -> int:
        """The address of the counter for a launch on ``stream`` of the current device."""
        if torch.cuda.is_current_stream_capturing():
            return self._next()  # for good: the graph may be launched while eager work uses its stream's
        address = self._of_stream.get(stream)
        if address is None:
            address = self._of_stream[stream] = self._next()
        return address

    def _next(self) -> int:
        while True:
            with contextlib.suppress(IndexError):
                return self._free.pop()
            self._free += self._allocate()

    def _allocate(self) -> list[int]:
        memory, stream = ctypes.c_uint64(), ctypes.c_void_p()
        _make_context_current(self._device)
        with _relaxed_capture():
            _call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(4 * self._COUNT))
            _call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
            _call("cuMemsetD32Async", memory, 0, ctypes.c_size_t(self._COUNT), stream)
            _call("cuStreamSynchronize", stream)
            _call("cuStreamDestroy_v2", stream)
        return [memory.value + 4 * i for i in range(self._COUNT)]


@functools.cache
def _counters(device: int) -> _Counters:
    return _Counters(device)


def _picker(slots: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """The arguments in these slots, as a tuple."""
    if len(slots) > 1:
        return operator.itemgetter(*slots)
    return lambda args: tuple(args[i] for i in slots)


def _raw_stream() -> Callable[[int], int]:
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is not None:
        return raw
    return lambda index: torch.cuda.current_stream(index).cuda_stream


def chain(launchers: Sequence[Callable[[Sequence[Any]], None]]) -> Callable[[Sequence[Any]], None]:
    """Launches one after the other on the same arguments."""
    if len(launchers) == 1:
        return launchers[0]

    def launch_all(args: Sequence[Any]) -> None:
        for launch in launchers:
            launch(args)

    return launch_all
