// What forward kernels have in common besides the instructions of tile_ops.cuh: the scale of a row's scores, the keys that
// a row sees, a head in global memory, and the row that is computed again.  The constants in capitals come from the
// compiler's command line, as in the kernels: ELEMENT, HEAD_DIM, HEAD_DIM_V, HAS_LEFT, HAS_RIGHT, SOFTCAP.

#pragma once

#include "tile_ops.cuh"

using Element = ELEMENT;

constexpr int DIM_V = (HEAD_DIM_V + 15) / 16 * 16;  // columns of P V: whole steps of the products

// Base-2 scores beyond this are rounded by more than half, so that exp2(score - max) could miss 1 by any factor.
constexpr float EXACT = 16777216.0f;

// The scale that turns a score into a base-2 exponent.  exp2(s * scale - max * scale) is one FMA whose second product was
// rounded; that cancels in the quotient unless it is so large that exp2 of it overflows.  Rows with such scores use the
// power of two above the scale, with which the product is exact: their scores differ by more than rounding or not at all.
struct Scales {
    float qk, power, cap, softcap;

    // Capped scores have the user's scale inside them already.
    INLINE Scales(float softmax_scale, float softcap)
        : qk(SOFTCAP ? LOG2E : softmax_scale * LOG2E),
          power(next_power_of_two(qk)),
          cap(SOFTCAP ? softmax_scale / softcap : 0.0f),
          softcap(softcap) {}
    INLINE bool is_far(float m) const { return fabsf(m) * qk >= EXACT; }
    INLINE float of_row(float m) const { return is_far(m) ? power : qk; }
    INLINE float shift_of_row(float m) const { return __fmul_rn(m, of_row(m)); }  // rounded: no FMA may take it in
    INLINE float capped(float s) const { return SOFTCAP ? softcap * tanh_by_exp2(s * cap) : s; }
};

// The keys that a query row sees: those of [first(row), last(row)).  Query i sees i - left up to i + right.
struct Mask {
    int seqlen_k, left, right;

    INLINE int first(int row) const { return HAS_LEFT ? max(row - left, 0) : 0; }
    INLINE int last(int row) const { return HAS_RIGHT ? min(row + right + 1, seqlen_k) : seqlen_k; }
};

// One head of a tensor in global memory.
struct Head {
    const Element *data;
    i64 stride;

    INLINE Head(const Element *tensor, int batch, int head, i64 stride_b, i64 stride_s, i64 stride_h)
        : data(tensor + (batch * stride_b + head * stride_h)), stride(stride_s) {}
    INLINE const Element *row(int i) const { return data + i * stride; }
};

// A warp computes a row again from its visible keys [first, last) alone, 32 keys at a time for the weights and lanes along
// the columns for the output, which goes into row `row` of the tile at memory + tile.  A masked weight is 0, and 0 * NaN is
// NaN: V may hold anything where it is masked, and brings us here.  `weight` makes a score a weight, whose sum is `total`.
template <class TileO, class Weight>
INLINE void repair_row(char *memory, u32 tile, int row, const int &lane, int first, int last, const Weight &weight, float total,
                       const Element *q, const Head &keys, const Head &values) {
    float columns[(DIM_V + WARP - 1) / WARP] = {};
    for (int begin = first; begin < last; begin += WARP) {
        const Element *key = keys.row(min(begin + lane, last - 1));
        float s = 0.0f;
#pragma unroll 1
        for (int d = 0; d < HEAD_DIM; ++d) s += q[d].value() * key[d].value();
        const float p = weight(s);
#pragma unroll 1
        for (int i = 0; i < min(last - begin, WARP); ++i) {
            const float w = __shfl_sync(ALL_LANES, p, i);
            const Element *value = values.row(begin + i);
#pragma unroll
            for (int c = 0; c < DIM_V; c += WARP)
                if (c + lane < HEAD_DIM_V) columns[c / WARP] += w * value[c + lane].value();
        }
    }
#pragma unroll
    for (int c = 0; c < DIM_V; c += WARP)
        if (c + lane < HEAD_DIM_V) {
            const u32 at = tile + TileO::offset(row, (c + lane) / VECTOR) + (c + lane) % VECTOR * 2;
            *reinterpret_cast<u16 *>(memory + at) = static_cast<u16>(Element::pack(columns[c / WARP] / total, 0.0f));
        }
}
