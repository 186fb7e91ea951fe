// Device code of cuda.fwd_sm80: FlashAttention-2 with cp.async, ldmatrix and mma.sync m16n8k16; see fwd_sm80.py.
//
// A block owns BLOCK_M query rows of one head and a warp BLOCK_M / NUM_WARPS of them, all columns: rows never cross warps.
// K and V tiles lie in rings of NUM_STAGES in shared memory.  The constants in capitals come from the compiler's command
// line: ELEMENT (Half or BFloat), HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_N, NUM_WARPS, NUM_STAGES, OCCUPANCY,
// and as 0 or 1: Q_IN_REGISTERS, STALE_ORIGIN, SWIZZLE, HAS_LEFT, HAS_RIGHT (limits of the window), SOFTCAP, STORE_LSE.

#include "attention_ops.cuh"
#include "tile_ops.cuh"

constexpr int NUM_THREADS = WARP * NUM_WARPS;
constexpr int DIM = (HEAD_DIM + 15) / 16 * 16;  // columns of tiles: whole steps of the products
constexpr int WARP_M = BLOCK_M / NUM_WARPS;
constexpr int M_TILES = WARP_M / 16;
constexpr int N_TILES = BLOCK_N / 8;
constexpr int V_TILES = DIM_V / 8;

using TileQ = Tile<BLOCK_M, DIM, SWIZZLE>;
using TileK = Tile<BLOCK_N, DIM, SWIZZLE>;
using TileV = Tile<BLOCK_N, DIM_V, SWIZZLE>;
using TileO = Tile<BLOCK_M, DIM_V, SWIZZLE>;
constexpr int K_AT = TileQ::BYTES;
constexpr int V_AT = K_AT + NUM_STAGES * TileK::BYTES;

// What a row's sum may be with a stale origin: far from overflow, whatever V is multiplied by within reason.
constexpr float LARGEST_SUM = 1.8446744073709552e19f;  // 2^64

extern __shared__ __align__(128) char smem[];

// The mask with rows counted from the first of the block, which is query m_offset.
struct BlockMask : Mask {
    int m_offset;

    INLINE int first(int row) const { return Mask::first(m_offset + row); }
    INLINE int last(int row) const { return Mask::last(m_offset + row); }
};

// Key blocks of a row block, min <= full_min <= full_max <= max; from full_min to full_max every row sees every key.
struct KeyBlocks {
    int min_, full_min, full_max, max_;

    INLINE KeyBlocks(const BlockMask &mask, int num_rows) {
        int start = 0, full_start = 0, end = mask.seqlen_k, full_end = mask.seqlen_k;
        if (HAS_RIGHT) {
            end = max(mask.last(num_rows - 1), 0);
            full_end = max(mask.last(0), 0);
        }
        if (HAS_LEFT) {
            start = mask.first(0);
            full_start = mask.first(num_rows - 1);
        }
        min_ = start / BLOCK_N;
        max_ = max((end + BLOCK_N - 1) / BLOCK_N, min_);
        full_min = min((full_start + BLOCK_N - 1) / BLOCK_N, max_);
        full_max = max(min(full_end / BLOCK_N, max_), full_min);
    }
};

// What a lane keeps of its rows: in each 16-row tile row g (half 0) and row g + 8 (half 1), g = lane / 4.
struct Rows {
    float acc[M_TILES][V_TILES][4];
    float m[M_TILES][2], shift[M_TILES][2], l[M_TILES][2];  // maximum, maximum * scale, this lane's part of the sum
    u32 q[Q_IN_REGISTERS ? M_TILES : 1][Q_IN_REGISTERS ? DIM / 16 : 1][4];

    INLINE void clear() {
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) m[i][half] = shift[i][half] = -INF, l[i][half] = 0.0f;
#pragma unroll
            for (int n = 0; n < V_TILES; ++n) acc[i][n][0] = acc[i][n][1] = acc[i][n][2] = acc[i][n][3] = 0.0f;
        }
    }
};

using Scores = float[M_TILES][N_TILES][4];

INLINE void read_q(Rows &rows, const TileQ::Place &queries) {
#pragma unroll
    for (int k = 0; k < (Q_IN_REGISTERS ? DIM / 16 : 0); ++k)
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) ldmatrix(rows.q[i][k], queries.at(16 * i, 2 * k));
}

INLINE void multiply_qk(Scores &s, Rows &rows, const TileQ::Place &queries, const TileK::Place &keys) {
#pragma unroll
    for (int k = 0; k < DIM / 16; ++k) {
        u32 a[M_TILES][4];
        if (!Q_IN_REGISTERS)
#pragma unroll
            for (int i = 0; i < M_TILES; ++i) ldmatrix(a[i], queries.at(16 * i, 2 * k));
#pragma unroll
        for (int n = 0; n < N_TILES; n += 2) {
            u32 b[4];
            ldmatrix(b, keys.at(8 * n, 2 * k));
#pragma unroll
            for (int i = 0; i < M_TILES; ++i) {
                const u32(&query)[4] = Q_IN_REGISTERS ? rows.q[Q_IN_REGISTERS ? i : 0][Q_IN_REGISTERS ? k : 0] : a[i];
                Element::mma(s[i][n], query, b[0], b[1]);
                Element::mma(s[i][n + 1], query, b[2], b[3]);
            }
        }
    }
}

INLINE void multiply_pv(Rows &rows, const Scores &p, const TileV::Place &values) {
#pragma unroll
    for (int k = 0; k < BLOCK_N / 16; ++k) {
        u32 a[M_TILES][4];
#pragma unroll
        for (int i = 0; i < M_TILES; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                a[i][half] = Element::pack(p[i][2 * k][2 * half], p[i][2 * k][2 * half + 1]);
                a[i][half + 2] = Element::pack(p[i][2 * k + 1][2 * half], p[i][2 * k + 1][2 * half + 1]);
            }
#pragma unroll
        for (int n = 0; n < V_TILES; n += 2) {
            u32 b[4];
            ldmatrix_trans(b, values.at(16 * k, n));
#pragma unroll
            for (int i = 0; i < M_TILES; ++i) {
                Element::mma(rows.acc[i][n], a[i], b[0], b[1]);
                Element::mma(rows.acc[i][n + 1], a[i], b[2], b[3]);
            }
        }
    }
}

// Turns a row's scores into weights; returns this lane's part of their sum.
INLINE float weights(float (&s)[N_TILES][4], int half, float scale, float origin) {
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < N_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float &x = s[n][2 * half + e];
            x = exp2_approx(__fmaf_rn(x, scale, -origin));
            sum += x;
        }
    return sum;
}

// Turns scores into weights, and brings maximum, sum and accumulator up to them.
template <bool MASKED>
INLINE void softmax(Scores &s, Rows &rows, const Scales &scales, const BlockMask &mask, int first_row, int n_offset) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + 16 * i + 8 * half;
            const int first = mask.first(row) - n_offset - column, last = mask.last(row) - n_offset - column;
            float m = rows.m[i][half];
#pragma unroll
            for (int n = 0; n < N_TILES; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float &x = s[i][n][2 * half + e];
                    x = scales.capped(x);
                    if (MASKED) x = 8 * n + e >= last || (HAS_LEFT && 8 * n + e < first) ? -INF : x;
                    m = fmaxf(m, x);
                }
            m = row_max(m);
            const float scale = scales.of_row(m), shift = scales.shift_of_row(m);
            const float origin = MASKED && m == -INF ? 0.0f : shift;
            const float alpha = exp2_approx(rows.shift[i][half] - origin);
            rows.l[i][half] = rows.l[i][half] * alpha + weights(s[i], half, scale, origin);
#pragma unroll
            for (int n = 0; n < V_TILES; ++n) {
                rows.acc[i][n][2 * half] *= alpha;
                rows.acc[i][n][2 * half + 1] *= alpha;
            }
            rows.m[i][half] = m;
            rows.shift[i][half] = shift;
        }
}

// The same with the origin that a row has.  A quotient does not depend on what is subtracted from both of its exponents, so
// there is no maximum to look for and nothing to bring up to it.  Scores that outgrow the origin show in the sum.
INLINE void softmax_from_stale_origin(Scores &s, Rows &rows, const Scales &scales) {
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (SOFTCAP)
#pragma unroll
                for (int n = 0; n < N_TILES; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) s[i][n][2 * half + e] = scales.capped(s[i][n][2 * half + e]);
            rows.l[i][half] += weights(s[i], half, scales.qk, rows.shift[i][half]);
        }
}

// Whether weights or what they were multiplied with may have overflowed, or a row needs another scale.
INLINE bool outgrown(const Rows &rows, const Scales &scales) {
    bool found = false;
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
        float checksum = 0.0f;
#pragma unroll
        for (int n = 0; n < V_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) checksum += fabsf(rows.acc[i][n][e]);
        found |= !(checksum < INF && rows.l[i][0] < LARGEST_SUM && rows.l[i][1] < LARGEST_SUM);
        found |= scales.of_row(rows.m[i][0]) != scales.qk || scales.of_row(rows.m[i][1]) != scales.qk;
    }
    return found;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, OCCUPANCY)
    attention_fwd_kernel(const Element *q, const Element *k, const Element *v, Element *out, float *lse, float softmax_scale,
                         float softcap, i64 stride_qb, i64 stride_qs, i64 stride_qh, i64 stride_kb, i64 stride_ks,
                         i64 stride_kh, i64 stride_vb, i64 stride_vs, i64 stride_vh, i64 stride_ob, i64 stride_os,
                         i64 stride_oh, int seqlen_q, int seqlen_k, int num_heads_q, int group, int num_heads,
                         int num_m_blocks, int section, int left, int right) {
    // A section of heads at a time, and in it block by block over its heads, the longest blocks of a causal mask first.
    const int first_head = blockIdx.x / (num_m_blocks * section) * section;
    const int heads_here = min(num_heads - first_head, section);
    const int rest = blockIdx.x - first_head * num_m_blocks;
    const int head = first_head + rest % heads_here;
    const int m_block = HAS_RIGHT ? num_m_blocks - 1 - rest / heads_here : rest / heads_here;
    const int m_offset = m_block * BLOCK_M, num_rows = min(seqlen_q - m_offset, BLOCK_M);
    const int batch = head / num_heads_q, head_q = head % num_heads_q, head_kv = head_q / group;
    const Head gQ(q, batch, head_q, stride_qb, stride_qs, stride_qh);
    const Head gK(k, batch, head_kv, stride_kb, stride_ks, stride_kh);
    const Head gV(v, batch, head_kv, stride_vb, stride_vs, stride_vh);

    const int lane = threadIdx.x % WARP, warp_row = threadIdx.x / WARP * WARP_M, lane_row = warp_row + lane / 4;
    const u32 sQ = static_cast<u32>(__cvta_generic_to_shared(smem)), sK = sQ + K_AT, sV = sQ + V_AT;
    const TileQ::Place queries = TileQ::place_of_a(sQ + warp_row * TileQ::PITCH, lane);
    const TileK::Place keys = TileK::place_of_b(sK, lane);
    const TileV::Place values = TileV::place_of_b_trans(sV, lane);

    const Scales scales(softmax_scale, softcap);
    const BlockMask mask = {{seqlen_k, left, right}, m_offset};
    const KeyBlocks blocks(mask, num_rows);
    Rows rows;

    copy_tile<TileQ, NUM_THREADS, HEAD_DIM>(sQ, gQ.row(m_offset), 2 * gQ.stride, num_rows);

    // With one stage V is fetched while the block multiplies Q by K, and the next K while it does the rest.  With more, a
    // tile of each arrives as one group, NUM_STAGES - 1 tiles ahead, and the block meets once a tile.
    constexpr int AHEAD = NUM_STAGES > 1 ? NUM_STAGES - 2 : 0;  // newer groups that may be on their way at a wait
    const int first_key = blocks.min_ * BLOCK_N, num_keys = min(seqlen_k, blocks.max_ * BLOCK_N) - first_key;
    Tiles<TileK, NUM_THREADS, HEAD_DIM> tiles_k(gK.row(first_key), 2 * gK.stride);
    Tiles<TileV, NUM_THREADS, HEAD_DIM_V> tiles_v(gV.row(first_key), 2 * gV.stride);
    constexpr int K_AHEAD = NUM_STAGES > 1 ? NUM_STAGES - 1 : 1, V_AHEAD = NUM_STAGES - 1;
    int stage, to_come;  // keys that no copy of V was started for; tiles past the last one are zeros
    auto begin = [&] {
        rows.clear();
        stage = 0;
        to_come = num_keys;
#pragma unroll
        for (int i = 0; i < K_AHEAD; ++i) {
            tiles_k.copy(sK + i * TileK::BYTES, to_come);
            if (i < V_AHEAD) {
                tiles_v.copy(sV + i * TileV::BYTES, to_come);
                to_come -= BLOCK_N;
            }
            cp_async_commit();
        }
    };
    auto step = [&](int n_block, auto stale, auto masked) {
        cp_async_wait<AHEAD>();
        __syncthreads();  // K is here, and no warp reads the last tiles any more
        if (NUM_STAGES > 1) {
            const int last_stage = stage == 0 ? NUM_STAGES - 1 : stage - 1;
            tiles_k.copy(sK + last_stage * TileK::BYTES, to_come);
            tiles_v.copy(sV + last_stage * TileV::BYTES, to_come);
        } else {
            tiles_v.copy(sV, to_come);
        }
        to_come -= BLOCK_N;
        cp_async_commit();
        Scores s = {};
        multiply_qk(s, rows, queries, keys.moved(stage * TileK::BYTES));
        if (NUM_STAGES == 1) {
            cp_async_wait<0>();
            __syncthreads();  // V is here, and no warp reads K any more
            tiles_k.copy(sK, to_come);
            cp_async_commit();
        }
        if constexpr (decltype(stale)::value)
            softmax_from_stale_origin(s, rows, scales);
        else
            softmax<decltype(masked)::value>(s, rows, scales, mask, lane_row, n_block * BLOCK_N);
        multiply_pv(rows, s, values.moved(stage * TileV::BYTES));
        if (NUM_STAGES > 1) stage = stage == NUM_STAGES - 1 ? 0 : stage + 1;
    };

    begin();
    if (Q_IN_REGISTERS) {
        cp_async_wait<AHEAD>();
        __syncthreads();
        read_q(rows, queries);
    }
    // Tiles that an edge cuts, then those that every row sees whole, then the other edge.  A stale origin comes from the
    // first whole tile.  Where one was outgrown, the block goes over all tiles again as if an edge cut them.
    int edge = STALE_ORIGIN ? min(blocks.full_min + 1, blocks.full_max) : blocks.full_min;
#pragma unroll 1
    for (;;) {
        int n_block = blocks.min_;
#pragma unroll 1
        for (int end = edge;; end = blocks.max_) {
#pragma unroll 1
            for (; n_block < end; ++n_block) step(n_block, Bool<false>{}, Bool<true>{});
            if (end == blocks.max_) break;
#pragma unroll 1
            for (; n_block < blocks.full_max; ++n_block) step(n_block, Bool<STALE_ORIGIN>{}, Bool<false>{});
        }
        cp_async_wait<0>();
        if (!STALE_ORIGIN || edge == blocks.max_ || !__syncthreads_or(outgrown(rows, scales))) break;
        edge = blocks.max_;
        tiles_k.skip(blocks.min_ - blocks.max_ - K_AHEAD);
        tiles_v.skip(blocks.min_ - blocks.max_ - V_AHEAD);
        begin();
    }

    __syncthreads();  // the output takes the place of the tiles
    float total[M_TILES][2];
#pragma unroll
    for (int i = 0; i < M_TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = lane_row + 16 * i + 8 * half;
            const float sum = row_sum(rows.l[i][half]);
            total[i][half] = sum == 0.0f ? 1.0f : sum;  // no visible key: the accumulator is 0
            const float inverse = 1.0f / total[i][half];
#pragma unroll
            for (int n = 0; n < V_TILES; ++n) {
                float *x = &rows.acc[i][n][2 * half];
                x[0] *= inverse, x[1] *= inverse;
                *reinterpret_cast<u32 *>(smem + TileO::offset(row, n) + lane % 4 * 4) = Element::pack(x[0], x[1]);
            }
            if (STORE_LSE && lane % 4 == 0 && row < num_rows)
                lse[static_cast<i64>(head) * seqlen_q + m_offset + row] = (rows.m[i][half] * scales.qk + log2f(sum)) * LN2;
        }
    __syncwarp();
    if (HAS_LEFT || HAS_RIGHT) {
#pragma unroll
        for (int i = 0; i < M_TILES; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float checksum = 0.0f;
#pragma unroll
                for (int n = 0; n < V_TILES; ++n) checksum += rows.acc[i][n][2 * half] + rows.acc[i][n][2 * half + 1];
                const u32 bad = __ballot_sync(ALL_LANES, checksum != checksum);
#pragma unroll 1
                for (int quad = 0; quad < WARP; quad += 4) {
                    const int row = warp_row + quad / 4 + 16 * i + 8 * half;
                    if ((bad >> quad & 15) == 0 || row >= num_rows) continue;
                    const float m = __shfl_sync(ALL_LANES, rows.m[i][half], quad);
                    const float sum = __shfl_sync(ALL_LANES, total[i][half], quad);
                    const int last = mask.last(row);
                    const float scale = scales.of_row(m);
                    auto weight = [&](float s) {
                        return exp2_approx(__fmaf_rn(scales.capped(s), scale, -scales.shift_of_row(m)));
                    };
                    repair_row<TileO>(smem, 0, row, lane, mask.first(row), last, weight, sum, gQ.row(m_offset + row), gK, gV);
                }
            }
        __syncwarp();
    }

    // Each warp stores its own rows, SPAN lanes side by side.
    constexpr int AT_ONCE = WARP / TileO::SPAN;
    const int chunk = lane % TileO::SPAN;
    Element *gO = out + (batch * stride_ob + head_q * stride_oh + (m_offset + warp_row + lane / TileO::SPAN) * stride_os);
#pragma unroll 4
    for (int row = warp_row + lane / TileO::SPAN; row < min(warp_row + WARP_M, num_rows); row += AT_ONCE) {
#pragma unroll
        for (int c = chunk; c < TileO::CHUNKS; c += TileO::SPAN)
            if (c * VECTOR < HEAD_DIM_V)
                *reinterpret_cast<uint4 *>(gO + c * VECTOR) = *reinterpret_cast<uint4 *>(smem + TileO::offset(row, c));
        gO += AT_ONCE * stride_os;
    }
}
