// What kernels for Hopper are written with besides tile_ops.cuh: barriers in shared memory, TMA, and products of a
// warpgroup, each a thin wrapper of one PTX instruction (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" and
// "Data Movement and Conversion Instructions: Tensor Copy").
//
// A tile in shared memory is ROWS rows in boxes of 64 columns, 128 bytes to a row, one box after the other, each at a
// multiple of 1024 bytes.  TMA writes it and wgmma reads it with the 128-byte swizzle: chunk c of 16 bytes lies in row r
// of its box at chunk c ^ (r % 8), so that a column of chunks meets every bank.
//
// wgmma multiplies A [64, 16] by B [16, N] for the 128 threads of a warpgroup, N a multiple of 8 (here of 16).  Warp w of
// the four has rows 16 w ... 16 w + 15, and in them a lane has what it has of C of mma.sync (see tile_ops.cuh): d[n] is the
// C tile at columns 8 n ... 8 n + 7.  A from registers is laid out like A of mma.sync.  A and B in shared memory are named
// by 64-bit descriptors:
//
//    bits  0-13   address / 16
//    bits 16-29   / 16, columns beside rows (B = V): from one box to the next; unused where rows are along k (Q, K)
//    bits 32-45   / 16, from 8 rows of a box to the next 8: 64
//    bits 62-63   1, the 128-byte swizzle

#pragma once

#include "tile_ops.cuh"

using u64 = unsigned long long;

constexpr int WARPGROUP = 128;
constexpr int BOX = 64;           // 16-bit columns of a box
constexpr int BOX_ROW_BYTES = 128;

// The 128 bytes that describe a tensor to TMA, as a __grid_constant__ parameter.
struct __align__(64) TensorMap {
    char bytes[128];
};

INLINE u32 shared_address(const void *pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// A value that is the same in all lanes, so that the compiler knows it and keeps what follows from it in uniform registers.
template <class T>
INLINE T uniform(T x) {
    return __shfl_sync(ALL_LANES, x, 0);
}

// The lane, read at this place and nowhere before.
INLINE int lane_here() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// True for one lane of a whole warp, and the compiler knows that it is one: TMA by such a lane needs no loop over lanes.
INLINE bool elect() {
    u32 elected;
    asm volatile(
        "{\n"
        ".reg .pred elected;\n"
        "elect.sync _|elected, %1;\n"
        "selp.b32 %0, 1, 0, elected;\n"
        "}"
        : "=r"(elected)
        : "r"(ALL_LANES));
    return elected != 0;
}

// Barriers.  A phase ends when as many threads have arrived as init() said, and as many bytes as they announced are there.
// wait() returns when the phase of parity `parity` has ended; of a new barrier that of parity 1 counts as ended.

INLINE void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

INLINE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

INLINE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

INLINE void barrier_arrive_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

INLINE bool barrier_try_wait(u32 barrier, u32 parity) {
    u32 ended;
    asm volatile(
        "{\n"
        ".reg .pred ended;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
        "selp.b32 %0, 1, 0, ended;\n"
        "}"
        : "=r"(ended)
        : "r"(barrier), "r"(parity)
        : "memory");
    return ended != 0;
}

INLINE void barrier_wait(u32 barrier, u32 parity) {
    while (!barrier_try_wait(barrier, parity)) {
    }
}

INLINE void group_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// TMA, in coordinates of a [batch, head, row, column] tensor.  A load brings a box, with zeros past the tensor's edges, and
// then counts its bytes on a barrier.  A store writes what lies inside the tensor; before it, a fence makes writes of
// threads visible to TMA.

INLINE void tma_prefetch(const TensorMap &map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<u64>(&map)) : "memory");
}

INLINE void tma_load(u32 to, const TensorMap &map, u32 barrier, int column, int row, int head, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
        "l"(reinterpret_cast<u64>(&map)), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
        : "memory");
}

INLINE void tma_store(const TensorMap &map, u32 from, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
                     reinterpret_cast<u64>(&map)),
                 "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}

INLINE void tma_store_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
INLINE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
INLINE void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }  // shared memory is free

// Registers that warpgroups give and take; multiples of 8 from 24 to 256.

template <int REGISTERS>
INLINE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
INLINE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Tiles.

template <int ROWS, int COLUMNS>
struct Boxes {
    static constexpr int COUNT = (COLUMNS + BOX - 1) / BOX;
    static constexpr int BOX_BYTES = ROWS * BOX_ROW_BYTES;
    static constexpr int BYTES = COUNT * BOX_BYTES;

    // Where a chunk begins, in bytes from the tile's start.
    static INLINE u32 offset(int row, int chunk) {
        return chunk / 8 * BOX_BYTES + row * BOX_ROW_BYTES + (chunk % 8 ^ row % 8) * 16;
    }

    // The descriptors of the sixteen columns from 16 k, for a tile whose rows are along M or N, and of the sixteen rows from
    // 16 k, for one whose rows are along K.  Additions are of 64 bits on purpose: those of the lower word alone, put together
    // with a constant, make ptxas give up uniform registers where loops have run-time bounds.
    struct Descriptor {
        u64 whole;

        INLINE explicit Descriptor(u32 tile)
            : whole(u64(1u << 30 | 8 * BOX_ROW_BYTES / 16) << 32 | u32(BOX_BYTES / 16) << 16 | (tile & 0x3ffff) >> 4) {}
        INLINE u64 along_row(int k) const { return whole + (k / 4 * BOX_BYTES + k % 4 * 32) / 16; }
        INLINE u64 down(int k) const { return whole + k * 16 * BOX_ROW_BYTES / 16; }
    };
};

// Products of a warpgroup.  They run on their own: fence before the first, when registers were written, commit what was
// issued as a group, and wait until all but the NEWER newest groups have ended; until then nobody touches their registers.

INLINE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int NEWER>
INLINE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(NEWER) : "memory");
}

// Ties values to this place among volatile instructions: no use of them moves in front of it.
template <int TILES>
INLINE void hold(float (&d)[TILES][4]) {
#pragma unroll
    for (int n = 0; n < TILES; ++n)
        asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
}

#define PTX_Half "f16"
#define PTX_BFloat "bf16"
#define PTX_OF_(element) PTX_##element
#define PTX_OF(element) PTX_OF_(element)

// Registers of an accumulator, eight at a time: as operands of an asm statement, and their numbers in its text.
#define VALUES(n)                                                                                                     \
    "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3]), "+f"(d[n + 1][0]), "+f"(d[n + 1][1]), "+f"(d[n + 1][2]), \
        "+f"(d[n + 1][3])
#define VALUES_16 VALUES(0)
#define VALUES_32 VALUES_16, VALUES(2)
#define VALUES_48 VALUES_32, VALUES(4)
#define VALUES_64 VALUES_48, VALUES(6)
#define VALUES_80 VALUES_64, VALUES(8)
#define VALUES_96 VALUES_80, VALUES(10)
#define VALUES_112 VALUES_96, VALUES(12)
#define VALUES_128 VALUES_112, VALUES(14)
#define VALUES_144 VALUES_128, VALUES(16)
#define VALUES_160 VALUES_144, VALUES(18)
#define VALUES_176 VALUES_160, VALUES(20)
#define VALUES_192 VALUES_176, VALUES(22)
#define VALUES_208 VALUES_192, VALUES(24)
#define VALUES_224 VALUES_208, VALUES(26)
#define VALUES_240 VALUES_224, VALUES(28)
#define VALUES_256 VALUES_240, VALUES(30)
#define NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_32 NAMES_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_48 NAMES_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_64 NAMES_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_80 NAMES_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_96 NAMES_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_112 NAMES_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_128 NAMES_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_144 NAMES_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define NAMES_160 NAMES_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_176 NAMES_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define NAMES_192 NAMES_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_208 NAMES_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define NAMES_224 NAMES_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES_240 NAMES_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define NAMES_256 NAMES_240 ", %120, %121, %122, %123, %124, %125, %126, %127"

// Of N columns of D: D = A B or D += A B with both factors in shared memory, rows along k; and D += A B with A in registers
// and the rows of B along N.  The numbers are those of the operands after the N / 2 registers of D.
#define WGMMA(N, N0, N1, N2, N3, N4)                                                                                     \
    INLINE void wgmma(float(&d)[N / 8][4], u64 a, u64 b, bool accumulate) {                                              \
        asm volatile(                                                                                                   \
            "{\n"                                                                                                       \
            ".reg .pred accumulate;\n"                                                                                  \
            "setp.ne.b32 accumulate, %" #N2 ", 0;\n"                                                                    \
            "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX_OF(ELEMENT) "." PTX_OF(ELEMENT) " {" NAMES_##N        \
            "}, %" #N0 ", %" #N1 ", accumulate, 1, 1, 0, 0;\n"                                                          \
            "}"                                                                                                         \
            : VALUES_##N                                                                                                \
            : "l"(a), "l"(b), "r"(int(accumulate))                                                                      \
            : "memory");                                                                                                \
    }                                                                                                                   \
    INLINE void wgmma(float(&d)[N / 8][4], const u32(&a)[4], u64 b) {                                                    \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX_OF(ELEMENT) "." PTX_OF(ELEMENT) " {" NAMES_##N \
                     "}, {%" #N0 ", %" #N1 ", %" #N2 ", %" #N3 "}, %" #N4 ", 1, 1, 1, 1;"                                 \
                     : VALUES_##N                                                                                       \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                                               \
                     : "memory");                                                                                       \
    }
WGMMA(16, 8, 9, 10, 11, 12)
WGMMA(32, 16, 17, 18, 19, 20)
WGMMA(48, 24, 25, 26, 27, 28)
WGMMA(64, 32, 33, 34, 35, 36)
WGMMA(80, 40, 41, 42, 43, 44)
WGMMA(96, 48, 49, 50, 51, 52)
WGMMA(112, 56, 57, 58, 59, 60)
WGMMA(128, 64, 65, 66, 67, 68)
WGMMA(144, 72, 73, 74, 75, 76)
WGMMA(160, 80, 81, 82, 83, 84)
WGMMA(176, 88, 89, 90, 91, 92)
WGMMA(192, 96, 97, 98, 99, 100)
WGMMA(208, 104, 105, 106, 107, 108)
WGMMA(224, 112, 113, 114, 115, 116)
WGMMA(240, 120, 121, 122, 123, 124)
WGMMA(256, 128, 129, 130, 131, 132)

// Four 8 x 8 matrices into shared memory: what ldmatrix reads.
INLINE void stmatrix(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1), "r"(r2),
                 "r"(r3)
                 : "memory");
}
