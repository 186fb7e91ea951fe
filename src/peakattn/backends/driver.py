"""Loading and launching machine code through the CUDA driver API, by ctypes.

Every backend that ends in a cubin launches here: no DSL launcher, no C compiler at run time, and a host cost of
little more than cuLaunchKernelEx itself.  Only standard driver entry points are used.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
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
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_TMA_DTYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CUtensorMapDataType
_TMA_BYTES = 128
_MAX_CACHED_MAPS = 64


@functools.cache
def _cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args: Any) -> None:
    status = getattr(_cuda(), name)(*args)
    if status:
        text = ctypes.c_char_p()
        _cuda().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{name} failed with error {status}: {(text.value or b'unknown error').decode()}.")


def load_function(cubin: bytes, name: str, shared_bytes: int) -> ctypes.c_void_p:
    """A kernel of ``cubin`` on the current device, allowed ``shared_bytes`` of dynamic shared memory."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    # Loading may allocate; relaxed capture mode lets the first call under CUDA graph capture load its kernel.
    mode = ctypes.c_int(_RELAXED)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        _call("cuModuleLoadData", ctypes.byref(module), cubin)
        _call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        if shared_bytes > 48 * 1024:
            _call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared_bytes)
    finally:
        _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    return function


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
class Pointer:
    """A pointer parameter: the address of argument ``slot``."""

    slot: int


@dataclass(frozen=True)
class Scalar:
    """A float32 parameter: the number in argument ``slot``."""

    slot: int


Param = Pointer | Scalar | TensorMap | bytes  # bytes: a constant, packed


@dataclass(frozen=True)
class Kernel:
    """A loaded function with its launch shape and parameters in ABI order."""

    function: ctypes.c_void_p
    grid: tuple[int, int, int]
    num_threads: int
    shared_bytes: int
    params: tuple[Param, ...]


class _Slot:
    """Parameter buffer and launch struct of one in-flight host call."""

    def __init__(self, kernel: Kernel) -> None:
        offsets, size = [], 0
        for param in kernel.params:
            length = _TMA_BYTES if isinstance(param, TensorMap) else 8 if isinstance(param, Pointer) else 4
            length = len(param) if isinstance(param, bytes) else length
            size += -size % (64 if isinstance(param, TensorMap) else 8)
            offsets.append(size)
            size += length
        self.buffer = (ctypes.c_ubyte * (size + 64))()
        base = ctypes.addressof(self.buffer) + (-ctypes.addressof(self.buffer) % 64)
        self.params = (ctypes.c_void_p * max(len(offsets), 1))(*(base + o for o in offsets))
        self.pointers: list[tuple[int, Any]] = []
        self.scalars: list[tuple[int, Any]] = []
        self.maps: list[list[Any]] = []
        for param, offset in zip(kernel.params, offsets, strict=True):
            if isinstance(param, Pointer):
                self.pointers.append((param.slot, ctypes.c_uint64.from_address(base + offset)))
            elif isinstance(param, Scalar):
                self.scalars.append((param.slot, ctypes.c_float.from_address(base + offset)))
            elif isinstance(param, TensorMap):
                self.maps.append([param.slot, base + offset, None, param])
            else:
                ctypes.memmove(base + offset, param, len(param))
        grid, block = _Dim3(*kernel.grid), _Dim3(kernel.num_threads, 1, 1)
        self.config = _LaunchConfig(grid, block, kernel.shared_bytes, None, None, 0)
        self.config_ref = ctypes.byref(self.config)


def launcher(kernel: Kernel, device: int) -> Callable[[Sequence[Any]], None]:
    """A function that launches ``kernel`` on the current stream of ``device``, which must be the current device.

    It takes one sequence of arguments: addresses (int) for pointers and tensor maps, numbers for scalars.
    """
    cu_launch = _cuda().cuLaunchKernelEx
    function = kernel.function
    current_stream = _raw_stream()
    maps: dict[tuple[TensorMap, int], bytes] = {}
    free = [_Slot(kernel)]

    def launch(args: Sequence[Any]) -> None:
        # list.pop and list.append are atomic, so threads never share a slot.
        try:
            slot = free.pop()
        except IndexError:
            slot = _Slot(kernel)
        for index, target in slot.pointers:
            target.value = args[index]
        for index, target in slot.scalars:
            target.value = args[index]
        for entry in slot.maps:
            address = args[entry[0]]
            if address != entry[2]:
                key = (entry[3], address)
                encoded = maps.get(key)
                if encoded is None:
                    encoded = maps[key] = entry[3].encode(address)
                    while len(maps) > _MAX_CACHED_MAPS:
                        maps.pop(next(iter(maps)), None)
                ctypes.memmove(entry[1], encoded, _TMA_BYTES)
                entry[2] = address
        slot.config.stream = current_stream(device)
        status = cu_launch(slot.config_ref, function, slot.params, None)
        free.append(slot)
        if status:
            _call("cuLaunchKernelEx", slot.config_ref, function, slot.params, None)

    return launch


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
