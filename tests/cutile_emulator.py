"""The operations of cuda.tile that the kernels use, on CPU tensors: the very source of a tile function runs without a GPU.

``run`` executes launches block by block.  Each operation is one function or method, checks what the compiler would check,
and is as harmful as the machine where a kernel breaks a promise: what a load does not define is NaN, and a tile outside its
array raises.  What is not here raises a sentence; add it as one more operation.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import math
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from peakattn.backends.cutile.toolchain import Array as ArrayArgument
from peakattn.backends.cutile.toolchain import TileLaunch

_SMALLEST_NORMAL = 2.0**-126
_TF32_DROPPED = 13  # bits of a float32 mantissa


class PaddingMode(enum.Enum):
    UNDETERMINED = math.nan
    ZERO = 0.0
    NEG_INF = -math.inf


class RoundingMode(enum.Enum):
    APPROX = "approx"


class _TensorFloat:
    """The dtype tfloat32: float32 values with ten bits of mantissa, which only a product takes."""


tfloat32 = _TensorFloat()
float16, bfloat16, float32, int32, bool_ = torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.bool

_block = [0, 0, 0]
_grid = [1, 1, 1]


class Tile:
    """A value of fixed shape; every size is a power of two."""

    def __init__(self, value: torch.Tensor, dtype: Any = None) -> None:
        odd = [n for n in value.shape if n < 1 or n & (n - 1)]
        if odd:
            raise ValueError(f"a tile has shape {tuple(value.shape)}; each size must be a power of two.")
        self.value = value
        self.dtype = value.dtype if dtype is None else dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    def reshape(self, shape: Sequence[int]) -> Tile:
        return Tile(self.value.reshape(tuple(shape)), self.dtype)

    def transpose(self) -> Tile:
        return Tile(self.value.transpose(-1, -2), self.dtype)

    def permute(self, axes: Sequence[int]) -> Tile:
        return Tile(self.value.permute(tuple(axes)), self.dtype)

    def astype(self, dtype: Any) -> Tile:
        if dtype is tfloat32:
            bits = self.value.to(torch.float32).view(torch.int32)
            half = 1 << (_TF32_DROPPED - 1)
            return Tile(((bits + half) >> _TF32_DROPPED << _TF32_DROPPED).view(torch.float32), tfloat32)
        return Tile(self.value.to(dtype))

    def __getitem__(self, index: tuple[Any, ...]) -> Tile:
        if any(i is not None and i != slice(None) for i in index):
            raise ValueError(f"a tile is indexed with {index}; only None and : are possible.")
        return Tile(self.value[index])

    def __index__(self) -> int:
        return int(self.value)

    def __bool__(self) -> bool:
        if self.shape:
            raise ValueError(f"a tile of shape {self.shape} is used as a condition; reduce it to one element.")
        return bool(self.value)

    def __hash__(self) -> int:
        raise TypeError("a tile has no hash.")

    def __add__(self, other: Any) -> Tile:
        return _sum(torch.add, self, other)

    def __radd__(self, other: Any) -> Tile:
        return _sum(torch.add, other, self)

    def __sub__(self, other: Any) -> Tile:
        return _sum(torch.sub, self, other)

    def __rsub__(self, other: Any) -> Tile:
        return _sum(torch.sub, other, self)

    def __mul__(self, other: Any) -> Tile:
        return Product(self, other)

    def __rmul__(self, other: Any) -> Tile:
        return Product(other, self)

    def __truediv__(self, other: Any) -> Tile:
        return _binary(torch.true_divide, self, other)

    def __and__(self, other: Any) -> Tile:
        return _binary(torch.bitwise_and, self, other)

    def __rand__(self, other: Any) -> Tile:
        return _binary(torch.bitwise_and, other, self)

    def __neg__(self) -> Tile:
        return Tile(-self.value)

    def __lt__(self, other: Any) -> Tile:
        return _binary(torch.lt, self, other)

    def __le__(self, other: Any) -> Tile:
        return _binary(torch.le, self, other)

    def __gt__(self, other: Any) -> Tile:
        return _binary(torch.gt, self, other)

    def __ge__(self, other: Any) -> Tile:
        return _binary(torch.ge, self, other)

    def __eq__(self, other: Any) -> Tile:  # type: ignore[override]
        return _binary(torch.eq, self, other)


class Product(Tile):
    """A product that nobody rounded yet: the compiler makes one instruction of it and the sum it goes into.

    One that something else took first is in a register, and rounded.
    """

    def __init__(self, x: Any, y: Any) -> None:
        self._factors = _operands(x, y)
        self._fresh = True
        super().__init__(torch.mul(*self._factors))

    @property
    def value(self) -> torch.Tensor:
        self._fresh = False
        return self._rounded

    @value.setter
    def value(self, rounded: torch.Tensor) -> None:
        self._rounded = rounded

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._rounded.shape)

    def exact(self) -> torch.Tensor:
        if not self._fresh:
            return self._rounded
        self._fresh = False
        return torch.mul(*(f.double() if isinstance(f, torch.Tensor) else f for f in self._factors))


class Array:
    """A tensor in global memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype


def _operands(x: Any, y: Any) -> tuple[Any, Any]:
    """Both as torch takes them; a Python number has the dtype of the tile it meets."""
    if isinstance(x, Tile) and isinstance(y, Tile):
        if x.dtype != y.dtype:
            raise TypeError(f"tiles of {x.dtype} and {y.dtype} meet; convert one with astype.")
        return x.value, y.value
    tile, number = (x, y) if isinstance(x, Tile) else (y, x)
    if isinstance(number, float) and not tile.value.is_floating_point():
        raise TypeError(f"the number {number} meets a tile of {tile.dtype}; convert the tile with astype.")
    return (tile.value, number) if tile is x else (number, tile.value)


def _tensors(x: Any, y: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for those functions of torch that take no number."""
    a, b = _operands(x, y)
    like = a if isinstance(a, torch.Tensor) else b
    return torch.as_tensor(a, dtype=like.dtype), torch.as_tensor(b, dtype=like.dtype)


def _binary(function: Any, x: Any, y: Any) -> Tile:
    if tfloat32 in (getattr(x, "dtype", None), getattr(y, "dtype", None)):
        raise TypeError("a tile of tfloat32 is an operand of mma and of nothing else.")
    return Tile(function(*_operands(x, y)))


def _sum(function: Any, x: Any, y: Any) -> Tile:
    """A sum or difference; an instruction takes one product that is not rounded, here the left one of two."""
    if isinstance(x, Product):
        exact = x.exact()
        return Tile(function(exact, _operands(x, y)[1]).to(torch.float32))
    if isinstance(y, Product):
        exact = y.exact()
        return Tile(function(_operands(x, y)[0], exact).to(torch.float32))
    return _binary(function, x, y)


def _is_number(*values: Any) -> bool:
    return not any(isinstance(v, Tile) for v in values)


def kernel(function: Any) -> Any:
    return function


def static_iter(values: Any) -> Any:
    return values


def static_eval(value: Any) -> Any:
    return value


def bid(axis: int) -> int:
    return _block[axis]


def num_blocks(axis: int) -> int:
    return _grid[axis]


def cdiv(x: int, y: int) -> int:
    return -(-x // y)


def full(shape: Sequence[int], value: float, dtype: Any) -> Tile:
    return Tile(torch.full(tuple(shape), value, dtype=dtype))


def zeros(shape: Sequence[int], dtype: Any) -> Tile:
    return full(shape, 0, dtype)


def arange(size: int, dtype: Any) -> Tile:
    return Tile(torch.arange(size, dtype=dtype))


def _window(array: Array, index: Sequence[Any], shape: Sequence[int], order: Sequence[int] | None) -> tuple[Any, Any, Any]:
    """The part of an array under a tile, where it lies in the tile, and whether it is all of it."""
    view = array.tensor if order is None else array.tensor.permute(tuple(order))
    if not len(index) == len(shape) == view.ndim:
        raise ValueError(f"index {tuple(index)} and shape {tuple(shape)} must have {view.ndim} entries, like the array.")
    starts = [int(i) * n for i, n in zip(index, shape, strict=True)]
    outside = [s < 0 or s >= size for s, size in zip(starts, view.shape, strict=True)]
    if any(outside):
        raise IndexError(f"the tile at {tuple(map(int, index))} of shape {tuple(shape)} lies outside {tuple(view.shape)}.")
    stops = [min(s + n, size) for s, n, size in zip(starts, shape, view.shape, strict=True)]
    part = view[tuple(slice(a, b) for a, b in zip(starts, stops, strict=True))]
    return part, tuple(slice(0, n) for n in part.shape), tuple(part.shape) == tuple(shape)


def load(
    array: Array,
    index: Sequence[Any],
    shape: Sequence[int],
    order: Sequence[int] | None = None,
    padding_mode: PaddingMode = PaddingMode.UNDETERMINED,
    check_bounds: bool = True,
    latency: int | None = None,
    allow_tma: bool | None = None,
) -> Tile:
    _check_latency(latency)
    part, place, whole = _window(array, index, shape, order)
    if not whole and not check_bounds:
        raise IndexError(f"the tile at {tuple(map(int, index))} of shape {tuple(shape)} is unchecked and leaves its array.")
    if not check_bounds and padding_mode is not PaddingMode.UNDETERMINED:
        raise ValueError("a load that does not check bounds is given padding, on which the compiler fails.")
    value = torch.full(tuple(shape), padding_mode.value, dtype=array.dtype)
    value[place] = part
    return Tile(value)


def store(array: Array, index: Sequence[Any], tile: Tile, latency: int | None = None) -> None:
    _check_latency(latency)
    if tile.dtype != array.dtype:
        raise TypeError(f"a tile of {tile.dtype} is stored to an array of {array.dtype}; convert it with astype.")
    part, place, _ = _window(array, index, tile.shape, None)
    part.copy_(tile.value[place])


def _check_latency(latency: int | None) -> None:
    if latency is not None and not 1 <= latency <= 10:
        raise ValueError(f"latency is {latency}; allowed are 1 to 10, or None.")


def mma(x: Tile, y: Tile, acc: Tile) -> Tile:
    """Products are exact in float32 or as near as its rounding; sums are in float32."""
    if x.dtype != y.dtype or acc.dtype != float32:
        raise TypeError(f"mma of {x.dtype} and {y.dtype} to {acc.dtype}; the first two must agree, the last be float32.")
    if len(x.shape) != 2 or (x.shape[0], y.shape[1]) != acc.shape or x.shape[1] != y.shape[0]:
        raise ValueError(f"mma of shapes {x.shape}, {y.shape} and {acc.shape} do not fit.")
    return Tile(x.value.float() @ y.value.float() + acc.value)


def where(condition: Tile, x: Any, y: Any) -> Tile:
    if _is_number(x, y):
        x = Tile(torch.tensor(x, dtype=float32 if isinstance(x, float) else int32))
    return Tile(torch.where(condition.value, *_operands(x, y)))


def maximum(x: Any, y: Any) -> Any:
    """As the machine has it, a NaN loses against a number."""
    return max(x, y) if _is_number(x, y) else Tile(torch.fmax(*_tensors(x, y)))


def minimum(x: Any, y: Any) -> Any:
    return min(x, y) if _is_number(x, y) else Tile(torch.fmin(*_tensors(x, y)))


def reduce_max(x: Tile, axis: int | None = None, keepdims: bool = False) -> Tile:
    """A NaN loses against a number here too."""
    value = x.value
    if value.is_floating_point():
        value = value.masked_fill(value.isnan() & ~_all_nan(value, axis), -math.inf)
    return Tile(value.amax() if axis is None else value.amax(axis, keepdim=keepdims))


def _all_nan(value: torch.Tensor, axis: int | None) -> torch.Tensor:
    return value.isnan().all() if axis is None else value.isnan().all(axis, keepdim=True)


def reduce_sum(x: Tile, axis: int, keepdims: bool = False) -> Tile:
    return Tile(x.value.sum(axis, keepdim=keepdims, dtype=x.value.dtype))


def exp(x: Tile) -> Tile:
    return Tile(torch.exp(x.value))


def log(x: Tile) -> Tile:
    return Tile(torch.log(x.value))


def exp2(x: Tile, flush_to_zero: bool = False) -> Tile:
    return _flushed(torch.exp2(x.value), flush_to_zero)


def log2(x: Tile) -> Tile:
    return Tile(torch.log2(x.value))


def truediv(x: Any, y: Any, rounding_mode: RoundingMode | None = None, flush_to_zero: bool = False) -> Tile:
    return _flushed(torch.true_divide(*_operands(x, y)), flush_to_zero)


def _flushed(value: torch.Tensor, flush_to_zero: bool) -> Tile:
    return Tile(torch.where(value.abs() < _SMALLEST_NORMAL, torch.zeros_like(value), value) if flush_to_zero else value)


def absolute(x: Tile) -> Tile:
    return Tile(x.value.abs())


def isnan(x: Tile) -> Tile:
    return Tile(x.value.isnan())


def bitcast(x: Tile, dtype: Any) -> Tile:
    return Tile(x.value.view(dtype))


OPERATIONS: dict[str, Any] = {
    "PaddingMode": PaddingMode,
    "RoundingMode": RoundingMode,
    "abs": absolute,
    "arange": arange,
    "bfloat16": bfloat16,
    "bid": bid,
    "bitcast": bitcast,
    "bool_": bool_,
    "cdiv": cdiv,
    "exp": exp,
    "exp2": exp2,
    "float16": float16,
    "float32": float32,
    "full": full,
    "int32": int32,
    "isnan": isnan,
    "kernel": kernel,
    "load": load,
    "log": log,
    "log2": log2,
    "max": reduce_max,
    "maximum": maximum,
    "minimum": minimum,
    "mma": mma,
    "num_blocks": num_blocks,
    "permute": Tile.permute,
    "static_eval": static_eval,
    "static_iter": static_iter,
    "store": store,
    "sum": reduce_sum,
    "tfloat32": tfloat32,
    "transpose": Tile.transpose,
    "truediv": truediv,
    "where": where,
    "zeros": zeros,
}


class _CudaTile(types.ModuleType):
    """What device code imports as cuda.tile."""

    def __getattr__(self, name: str) -> Any:
        if name in OPERATIONS:
            return OPERATIONS[name]
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"the emulator has no cuda.tile.{name}; add it to OPERATIONS in cutile_emulator.py.")


CUDA_TILE = _CudaTile("cuda.tile")


@contextlib.contextmanager
def _emulated() -> Iterator[None]:
    """Device code that is imported here sees the emulator; modules that saw the compiler are put back afterwards."""
    package = types.ModuleType("cuda")
    package.tile = CUDA_TILE  # type: ignore[attr-defined]
    compiled = [name for name, m in sys.modules.items() if vars(m).get("ct") is sys.modules.get("cuda.tile", m)]
    saved = {name: sys.modules.pop(name, None) for name in (*compiled, "cuda", "cuda.tile")}
    sys.modules |= {"cuda": package, "cuda.tile": CUDA_TILE}
    try:
        yield
    finally:
        emulated = [name for name, m in sys.modules.items() if vars(m).get("ct") is CUDA_TILE]
        for name in (*emulated, "cuda", "cuda.tile"):
            del sys.modules[name]
        sys.modules |= {name: module for name, module in saved.items() if module is not None}


@functools.cache
def _function(device_code: Any) -> Any:
    with _emulated():
        return device_code()


def run(launches: Sequence[TileLaunch]) -> None:
    """Every block of every launch, one after the other, and in one thread, which is the fastest for tiles."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for launch in launches:
            _run(launch)
    finally:
        torch.set_num_threads(threads)


def _run(launch: TileLaunch) -> None:
    function = _function(launch.device_code)
    args = [_argument(value) for value in launch.args.values()]
    _grid[:] = launch.grid
    for z, y, x in itertools.product(*(range(n) for n in reversed(launch.grid))):
        _block[:] = x, y, z
        function(*args, *launch.constexprs.values())


def _argument(value: Any) -> Any:
    if isinstance(value, ArrayArgument):
        return Array(value.tensor.permute(value.order)[..., : value.shape[-1]])
    return Tile(torch.tensor(value, dtype=torch.float32)) if isinstance(value, float) else value
