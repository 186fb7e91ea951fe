"""``tile_ops.cuh`` element by element, and that ``ptx_interpreter`` sees what it is there to see."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ptx_interpreter
from peakattn import dispatch
from peakattn.backends.cuda import toolchain
from peakattn.backends.cuda.toolchain import CudaLaunch

if (reason := dispatch.unavailable("cuda")) is not None:
    pytest.skip(reason, allow_module_level=True)

# One warp reads A [16, 16] and, as columns and as rows, B [16, 16], and multiplies A by B's left half.
FRAGMENTS = """
#include "tile_ops.cuh"

extern __shared__ __align__(128) char smem[];

extern "C" __global__ void __launch_bounds__(32)
    fragments(const ELEMENT *a, const ELEMENT *b, const ELEMENT *bt, u32 *a_out, u32 *b_out, u32 *b_trans_out, float *c_out) {
    using T = Tile<16, TILE_COLUMNS, SWIZZLE>;
    const u32 tile = static_cast<u32>(__cvta_generic_to_shared(smem));
    const int lane = threadIdx.x;
    copy_tile<T, 32, TILE_COLUMNS>(tile, a, TILE_COLUMNS * 2, 16);
    copy_tile<T, 32, TILE_COLUMNS>(tile + T::BYTES, b, TILE_COLUMNS * 2, 16);
    copy_tile<T, 32, TILE_COLUMNS>(tile + 2 * T::BYTES, bt, TILE_COLUMNS * 2, 16);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    u32 ra[4], rb[4], rt[4];
    float c[4] = {};
    ldmatrix(ra, T::place_of_a(tile, lane).at(0, TILE_COLUMNS / 8 - 2));
    ldmatrix_trans(rt, T::place_of_b_trans(tile + T::BYTES, lane).at(0, TILE_COLUMNS / 8 - 2));
    ldmatrix(rb, T::place_of_b(tile + 2 * T::BYTES, lane).at(0, TILE_COLUMNS / 8 - 2));
    ELEMENT::mma(c, ra, rb[0], rb[1]);
    for (int i = 0; i < 4; ++i) {
        a_out[lane * 4 + i] = ra[i];
        b_out[lane * 4 + i] = rb[i];
        b_trans_out[lane * 4 + i] = rt[i];
        c_out[lane * 4 + i] = c[i];
    }
}
"""


def run(launch: CudaLaunch, device: str = "cpu") -> int:
    """Runs a launch whose arguments are tensors, on a GPU or in the interpreter; the number of bank conflicts."""
    tensors = list(launch.args.values())
    if device == "cuda":
        toolchain.bind([launch], tensors)(*tensors, 1.0, 0.0)
        torch.cuda.synchronize()
        return 0
    written = [x for name, x in launch.args.items() if name.endswith("out")]
    return ptx_interpreter.run(toolchain.compile_launch(launch, 80), launch, written, range(8))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("element", ["Half", "BFloat"])
@pytest.mark.parametrize(("columns", "swizzle"), [(16, 1), (32, 1), (48, 1), (64, 1), (128, 1), (128, 0)])
def test_each_element_is_where_the_drawing_has_it(
    device: str, element: str, columns: int, swizzle: int, tmp_path: Path
) -> None:
    (source := tmp_path / "fragments.cu").write_text(FRAGMENTS)
    dtype = torch.float16 if element == "Half" else torch.bfloat16
    # Every element of the last 16 columns is another number; elsewhere there are none.
    a, b, bt = (torch.full((16, columns), float("nan"), dtype=dtype, device=device) for _ in range(3))
    numbers = torch.arange(256, dtype=torch.float32, device=device).reshape(16, 16)
    a[:, -16:], b[:, -16:], bt[:, -16:] = numbers, numbers / 2, numbers.T / 2
    outs = [torch.zeros(32, 4, dtype=torch.int32, device=device) for _ in range(3)]
    c = torch.full((32, 4), float("nan"), device=device)
    names = ("a", "b", "bt", "a_out", "b_out", "b_trans_out", "c_out")
    shared = 3 * 16 * (columns if swizzle else columns + 8) * 2
    constants: dict[str, int | str] = {"ELEMENT": element, "TILE_COLUMNS": columns, "SWIZZLE": swizzle}
    args = dict(zip(names, (a, b, bt, *outs, c), strict=True))
    conflicts = run(CudaLaunch(source, "fragments", (1, 1, 1), 32, shared, args, constants), device)

    a_regs, b_regs, b_trans_regs = (x.view(dtype).reshape(32, 4, 2).float() for x in outs)
    product = (numbers @ (numbers / 2))[:, :8]
    for lane in range(32):
        g, t = divmod(lane, 4)
        for r in range(4):
            for half in range(2):
                assert a_regs[lane, r, half] == numbers[g + 8 * (r % 2), 2 * t + half + 8 * (r // 2)]
                row, column = 2 * t + half + 8 * (r % 2), g + 8 * (r // 2)
                assert b_regs[lane, r, half] == b_trans_regs[lane, r, half] == numbers[row, column] / 2
            assert c[lane, r] == product[g + 8 * (r // 2), 2 * t + r % 2]
    assert conflicts == 0


PASSING = """
#include "tile_ops.cuh"
extern __shared__ __align__(128) char smem[];

extern "C" __global__ void __launch_bounds__(64) passing(const float *x, float *y_out) {
    const int to = threadIdx.x, from = 63 - to;
    BODY
}
"""
STORED = "reinterpret_cast<float *>(smem)[to] = x[to];"
COPIED = "if (to % 4 == 0) cp_async(static_cast<u32>(__cvta_generic_to_shared(smem)) + 4 * to, x + to, true);cp_async_commit();"
READ = "y_out[to] = reinterpret_cast<float *>(smem)[from];"


@pytest.mark.parametrize(
    ("body", "right"),
    [
        (f"{STORED} __syncthreads(); {READ}", True),
        (f"{STORED} __syncwarp(); {READ}", False),
        (f"{COPIED} cp_async_wait<0>(); __syncthreads(); {READ}", True),
        (f"{COPIED} __syncthreads(); {READ}", False),
        (f"{COPIED} cp_async_wait<1>(); __syncthreads(); {READ}", False),
        (f"{COPIED} cp_async_wait<0>(); __syncwarp(); {READ}", False),
    ],
)
def test_a_missing_barrier_or_wait_leaves_nan(body: str, right: bool, tmp_path: Path) -> None:
    (source := tmp_path / "passing.cu").write_text(PASSING.replace("BODY", body))
    x, y = torch.arange(64.0), torch.zeros(64)
    run(CudaLaunch(source, "passing", (1, 1, 1), 64, 256, {"x": x, "y_out": y}))
    assert torch.equal(y, x.flip(0)) == right
    assert right or torch.isnan(y).any()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y_out[to] = x[to + 1];", "no element of a tensor for it is read"),
        ("y_out[to + 1] = x[to];", "no element of a tensor for it is written"),
        ("const_cast<float *>(x)[to] = 1.0f;", "no element of a tensor for it is written"),
        ("y_out[to] = reinterpret_cast<float *>(smem)[to + 1];", "shared memory are not aligned or not inside"),
        ("if (to < 7) y_out[to] = row_max(x[to]);", "not all lanes of a warp are here"),
        ("if (to < 32) __syncthreads();", "not all threads of the block meet at one barrier"),
        ("y_out[to] = __brev(to);", "the interpreter has no instruction"),
    ],
)
def test_the_interpreter_refuses_what_no_kernel_may_do(body: str, reason: str, tmp_path: Path) -> None:
    (source := tmp_path / "passing.cu").write_text(PASSING.replace("BODY", body))
    with pytest.raises(RuntimeError, match=reason):
        run(CudaLaunch(source, "passing", (1, 1, 1), 64, 256, {"x": torch.zeros(64), "y_out": torch.zeros(64)}))
