// What the kernels of this folder are written with: tensor-core products, shared-memory tiles and asynchronous copies,
// each a thin wrapper of one or two PTX instructions (PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions").
// Nothing else is included, so that NVRTC needs no toolkit headers.
//
// One mma.sync.m16n8k16 multiplies A [16, 16] by B [16, 8] and adds to C [16, 8].  The 32 lanes of a warp share the
// three.  With  g = lane / 4  and  t = lane % 4,  a lane holds these elements, two 16-bit ones to a register:
//
//             columns 2t, 2t+1    columns 2t+8, 2t+9
//    A  row g        a[0]               a[2]            B  rows 2t, 2t+1    b[0]        C  row g     c[0] c[1]
//       row g+8      a[1]               a[3]               rows 2t+8, 2t+9  b[1]           row g+8   c[2] c[3]
//                                                          of column g                     at columns 2t, 2t+1
//
// ldmatrix reads four 8 x 8 matrices of 16-bit elements from shared memory; lane i gives the address of row i % 8 of
// matrix i / 8.  Of each matrix a lane receives the two elements at row g, columns 2t and 2t+1, or, with .trans, those at
// rows 2t and 2t+1 of column g: just what A and B above ask for.
//
// C of one product is laid out like A of the next: columns 16 k ... 16 k + 15 of C are the two C tiles 2 k and 2 k + 1, and
//    a[0], a[1], a[2], a[3]  =  (c[0], c[1]), (c[2], c[3]) of tile 2 k,  then the same of tile 2 k + 1.
// So the weights of a softmax go from one product into the next without leaving their registers.

#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;

#define INLINE __forceinline__

constexpr int WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;
constexpr int VECTOR = 8;  // 16-bit elements of a 16-byte access
constexpr float INF = __builtin_bit_cast(float, 0x7f800000);
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

// Element types.  pack() rounds two floats into one register, the first into its lower half.

struct Half {
    u16 bits;

    static INLINE u32 pack(float first, float second) {
        u32 both;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
        return both;
    }
    INLINE float value() const {
        float x;
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
        return x;
    }
    static INLINE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

struct BFloat {
    u16 bits;

    static INLINE u32 pack(float first, float second) {
        u32 both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
        return both;
    }
    INLINE float value() const { return __uint_as_float(static_cast<u32>(bits) << 16); }
    static INLINE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

// Four 8 x 8 matrices; "volatile" and "memory" keep the reads behind the barrier that they wait for.

INLINE void ldmatrix(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

INLINE void ldmatrix_trans(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Asynchronous copies of 16 bytes past L1.  Of a copy with inside == false nothing is read and zeros are written.

template <int OFFSET = 0>  // bytes from `from`
INLINE void cp_async(u32 to, const void *from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1+%3], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0), "n"(OFFSET)
                 : "memory");
}

INLINE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int NEWER>  // until all but the NEWER newest groups of this thread's copies are there
INLINE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(NEWER) : "memory");
}

// Arithmetic.  The hardware's exp2 and reciprocal, with denormals as zero; 2^-inf is 0.

INLINE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

INLINE float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

INLINE float tanh_by_exp2(float x) {  // saturates without NaN for any finite x
    return 1.0f - 2.0f * rcp_approx(1.0f + exp2_approx(x * (2.0f * LOG2E)));
}

INLINE float next_power_of_two(float x) {  // above a positive normal number
    return __uint_as_float((__float_as_uint(x) & 0x7f800000u) + 0x00800000u);
}

template <bool VALUE>  // a constant as the type of an argument
struct Bool {
    static constexpr bool value = VALUE;
};

// The four lanes that share a row of C.

INLINE float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

INLINE float row_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

// Tiles in shared memory: ROWS rows of COLUMNS 16-bit elements, in chunks of 16 bytes.
//
// The 32 banks of shared memory serve 128 bytes at a time, that is eight chunks at different addresses modulo 128.
// ldmatrix reads the same chunk of eight neighbouring rows, so their addresses must differ there.  A row of n chunks moves
// them by n modulo 8, which repeats after 8 / gcd(n, 8) rows.  Two cures:
//
//   swizzle   chunk c of row r lies where chunk c ^ x would, x being the number of repeats before r.  No memory is lost.
//   padding   rows get one more chunk where n is even; an odd n never repeats.
//
//   128 elements, swizzled     row 0 |0|1|2|3|4|5|6|7| 8|9|...      128 elements, padded    row 0 |0|1|2|3|...|15| |
//                              row 1 |1|0|3|2|5|4|7|6| 9|8|...                              row 1   |0|1|2|3|...
//                              row 2 |2|3|0|1|6|7|4|5|10|11|...                             row 2     |0|1|2|3|...

constexpr int common_power(int chunks) { return chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : chunks % 2 == 0 ? 2 : 1; }

template <int ROWS_, int COLUMNS, bool SWIZZLED>
struct Tile {
    static constexpr int ROWS = ROWS_;
    static constexpr int CHUNKS = COLUMNS / VECTOR;
    static constexpr int SPAN = common_power(CHUNKS);  // chunks that change places with each other, gcd(CHUNKS, 8)
    static constexpr int PITCH = 16 * (SWIZZLED || CHUNKS % 2 ? CHUNKS : CHUNKS + 1);
    static constexpr int BYTES = ROWS * PITCH;

    static INLINE u32 swap(int row) { return SWIZZLED ? (row % 8) / (8 / SPAN) : 0; }

    // Where a chunk begins, in bytes from the tile's start.
    static INLINE u32 offset(int row, int chunk) {
        return row * PITCH + (chunk / SPAN * SPAN + ((chunk % SPAN) ^ swap(row))) * 16;
    }

    // One thread's row and chunk, and others at steps from there that are known to the compiler.  The swizzle works on bits
    // of the address, so steps cost an XOR at most; bits that a step of rows sets must be clear in the thread's own row,
    // and so for chunks modulo SPAN.
    struct Place {
        u32 base;

        INLINE Place(u32 tile, int row, int chunk) : base(tile + offset(row, chunk)) {}
        INLINE u32 at(int row, int chunk) const {
            return (base ^ ((SWIZZLED ? chunk % SPAN ^ swap(row) : 0) * 16)) + row * PITCH +
                   (SWIZZLED ? chunk / SPAN * SPAN : chunk) * 16;
        }
        INLINE Place moved(u32 bytes) const {
            Place other = *this;
            other.base += bytes;
            return other;
        }
    };

    // What each lane gives to ldmatrix for [16, 16] of A, and of B from a tile that has B's columns as rows, as K has for
    // Q K^T: r[0], r[1] belong to columns 0 to 7 of B and r[2], r[3] to columns 8 to 15.
    static INLINE Place place_of_a(u32 tile, int lane) { return Place(tile, lane % 16, lane / 16); }
    static INLINE Place place_of_b(u32 tile, int lane) { return Place(tile, lane % 8 + lane / 16 * 8, lane / 8 % 2); }
    // The same of B from a tile that has B's rows as rows, as V has for P V; for ldmatrix_trans.
    static INLINE Place place_of_b_trans(u32 tile, int lane) { return Place(tile, lane % 16, lane / 16); }
};

// Starts the copy of a tile by all threads of the block: `rows` rows of COLUMNS elements, and zeros in the rest of the tile.
// Neighbouring threads copy neighbouring chunks of a row, SPAN of them.
template <class Tile, int THREADS, int COLUMNS>
INLINE void copy_tile(u32 tile, const void *tensor, i64 stride_bytes, int rows) {
    constexpr int AT_ONCE = THREADS / Tile::SPAN;  // rows
    const int first_row = threadIdx.x / Tile::SPAN, first_chunk = threadIdx.x % Tile::SPAN;
    const typename Tile::Place to(tile, first_row, first_chunk);
    const char *from = static_cast<const char *>(tensor) + (first_row * stride_bytes + first_chunk * 16);
    rows -= first_row;
#pragma unroll
    for (int row = 0; row < Tile::ROWS; row += AT_ONCE) {
        if (Tile::ROWS % AT_ONCE == 0 || first_row < Tile::ROWS - row) {
#pragma unroll
            for (int chunk = 0; chunk < Tile::CHUNKS; chunk += Tile::SPAN) {
                const bool real = COLUMNS == Tile::CHUNKS * VECTOR || (chunk + first_chunk) * VECTOR < COLUMNS;
                cp_async(to.at(row, chunk), from + chunk * 16, real && row < rows);
            }
        }
        from += AT_ONCE * stride_bytes;
    }
}

// Tiles of a tensor that follow each other, each copied by all threads of the block: what this thread reads of the next one.
// The pointer takes a step from tile to tile; of a tile `rows` rows are there, and the rest is zeros.
template <class Tile, int THREADS, int COLUMNS>
struct Tiles {
    static constexpr int AT_ONCE = THREADS / Tile::SPAN;  // rows
    const char *next;
    i64 stride_bytes;

    INLINE Tiles(const void *tensor, i64 stride_bytes)
        : next(static_cast<const char *>(tensor) + (first_row() * stride_bytes + first_chunk() * 16)),
          stride_bytes(stride_bytes) {}

    static INLINE int first_row() { return threadIdx.x / Tile::SPAN; }
    static INLINE int first_chunk() { return threadIdx.x % Tile::SPAN; }

    INLINE void copy(u32 tile, int rows) {
        const typename Tile::Place to(tile, first_row(), first_chunk());
        const char *from = next;
        rows -= first_row();
#pragma unroll
        for (int row = 0; row < Tile::ROWS; row += AT_ONCE) {
            if (Tile::ROWS % AT_ONCE == 0 || first_row() < Tile::ROWS - row) copy_chunks(to, row, from, row < rows);
            from += AT_ONCE * stride_bytes;
        }
        skip(1);
    }
    INLINE void skip(int tiles) { next += tiles * Tile::ROWS * stride_bytes; }  // back with a negative number

    // Chunks of a row at offsets that are part of the instruction.
    template <int CHUNK = 0>
    static INLINE void copy_chunks(const typename Tile::Place &to, int row, const char *from, bool inside) {
        if constexpr (CHUNK < Tile::CHUNKS) {
            const bool real = COLUMNS == Tile::CHUNKS * VECTOR || (CHUNK + first_chunk()) * VECTOR < COLUMNS;
            cp_async<16 * CHUNK>(to.at(row, CHUNK), from, real && inside);
            copy_chunks<CHUNK + Tile::SPAN>(to, row, from, inside);
        }
    }
};
