// Rung 10: scores and weights stay in the registers that the first product left them in.
//
// A block owns BLOCK_M query rows of one head, a warp 16 of them.  tile_ops.cuh draws which elements of
// A, B and C a lane holds.  The constants in capitals come from the compiler's command line.

#include "tile_ops.cuh"

using Element = ELEMENT;

constexpr int NUM_THREADS = WARP * NUM_WARPS;
constexpr int N_TILES = BLOCK_N / 8, V_TILES = HEAD_DIM / 8;
constexpr int PITCH = HEAD_DIM + 8;  // elements from one row of a tile to the next: four banks on

struct Shared {
    u16 q[BLOCK_M][PITCH], k[2][BLOCK_N][PITCH], v[2][BLOCK_N][PITCH];
};

extern __shared__ __align__(128) char smem[];

// Starts the copy of a tensor's rows into a tile, 16 bytes at a time.  Where there are no rows cp.async is told to read
// nothing and to write zeros, and its address stays inside the tensor.
template <int ROWS>
INLINE void copy_rows(u16 (*tile)[PITCH], const Element *from, i64 stride, int rows) {
    for (int i = VECTOR * threadIdx.x; i < ROWS * HEAD_DIM; i += VECTOR * NUM_THREADS) {
        const int row = i / HEAD_DIM, column = i % HEAD_DIM;
        const u32 to = static_cast<u32>(__cvta_generic_to_shared(&tile[row][column]));
        cp_async(to, from + (row < rows ? row * stride + column : 0), row < rows);
    }
}

INLINE u32 pair(const u16 *x) { return *reinterpret_cast<const u32 *>(x); }
INLINE u32 pair(u16 lower, u16 upper) { return lower | static_cast<u32>(upper) << 16; }

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 3)  // 168 registers
    attention_fwd_kernel(const Element *q, const Element *k, const Element *v, Element *out, float *lse, float softmax_scale,
                         i64 stride_qb, i64 stride_qs, i64 stride_qh, i64 stride_kb, i64 stride_ks, i64 stride_kh,
                         i64 stride_vb, i64 stride_vs, i64 stride_vh, i64 stride_ob, i64 stride_os, i64 stride_oh,
                         int seqlen_q, int seqlen_k, int num_heads_q, int group, int num_m_blocks, int offset) {
    Shared &shared = *reinterpret_cast<Shared *>(smem);
    const int m_offset = blockIdx.x % num_m_blocks * BLOCK_M, head = blockIdx.x / num_m_blocks;
    const int batch = head / num_heads_q, head_q = head % num_heads_q, head_kv = head_q / group;
    const Element *gK = k + (batch * stride_kb + head_kv * stride_kh);
    const Element *gV = v + (batch * stride_vb + head_kv * stride_vh);
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;  // a lane's row and column in a fragment
    const int row = threadIdx.x / WARP * 16 + g;                // and its first row of the block

    copy_rows<BLOCK_M>(shared.q, q + (batch * stride_qb + head_q * stride_qh + m_offset * stride_qs), stride_qs,
                       seqlen_q - m_offset);
    copy_rows<BLOCK_N>(shared.k[0], gK, stride_ks, seqlen_k);
    copy_rows<BLOCK_N>(shared.v[0], gV, stride_vs, seqlen_k);
    const float scale = softmax_scale * LOG2E;
    float acc[V_TILES][4] = {};
    float m[2] = {-INF, -INF}, l[2] = {};  // of rows g and g + 8 the maximum, and this lane's part of the sum
    const int end = CAUSAL ? min(m_offset + BLOCK_M + offset, seqlen_k) : seqlen_k;
    for (int n_offset = 0; n_offset < end; n_offset += BLOCK_N) {
        const int stage = n_offset / BLOCK_N % 2, next = n_offset + BLOCK_N;
        const auto tile_k = shared.k[stage], tile_v = shared.v[stage];
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();  // the tiles are here, and nobody reads those before them any more
        if (next < end) {
            copy_rows<BLOCK_N>(shared.k[1 - stage], gK + next * stride_ks, stride_ks, seqlen_k - next);
            copy_rows<BLOCK_N>(shared.v[1 - stage], gV + next * stride_vs, stride_vs, seqlen_k - next);
        }

        float s[N_TILES][4] = {};
#pragma unroll
        for (int d = 0; d < HEAD_DIM; d += 16) {
            const u32 a[4] = {pair(&shared.q[row][d + 2 * t]), pair(&shared.q[row + 8][d + 2 * t]),
                              pair(&shared.q[row][d + 2 * t + 8]), pair(&shared.q[row + 8][d + 2 * t + 8])};
#pragma unroll
            for (int n = 0; n < N_TILES; ++n)
                Element::mma(s[n], a, pair(&tile_k[8 * n + g][d + 2 * t]), pair(&tile_k[8 * n + g][d + 2 * t + 8]));
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // rows g and g + 8
            // Keys below last are visible; a lane counts from its own first column.
            const int last = (CAUSAL ? min(m_offset + row + 8 * half + offset + 1, seqlen_k) : seqlen_k) - n_offset - 2 * t;
            float m_new = m[half];
#pragma unroll
            for (int n = 0; n < N_TILES; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float &x = s[n][2 * half + e];
                    x = 8 * n + e < last ? x : -INF;
                    m_new = fmaxf(m_new, x);
                }
            m_new = row_max(m_new);
            const float origin = m_new == -INF ? 0.0f : m_new * scale;  // no key seen yet: -inf - -inf would be NaN
            const float alpha = exp2_approx(__fmaf_rn(m[half], scale, -origin));
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < N_TILES; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float &x = s[n][2 * half + e];
                    x = exp2_approx(__fmaf_rn(x, scale, -origin));
                    sum += x;
                }
#pragma unroll
            for (int n = 0; n < V_TILES; ++n) acc[n][2 * half] *= alpha, acc[n][2 * half + 1] *= alpha;
            l[half] = l[half] * alpha + sum;
            m[half] = m_new;
        }

#pragma unroll
        for (int j = 0; j < BLOCK_N; j += 16) {
            // C of the first product is laid out like A of the second: two tiles of scores are one step of keys.
            const float(&left)[4] = s[j / 8], (&right)[4] = s[j / 8 + 1];
            const u32 a[4] = {Element::pack(left[0], left[1]), Element::pack(left[2], left[3]),
                              Element::pack(right[0], right[1]), Element::pack(right[2], right[3])};
#pragma unroll
            for (int n = 0; n < V_TILES; ++n) {
                const int column = 8 * n + g;
                Element::mma(acc[n], a, pair(tile_v[j + 2 * t][column], tile_v[j + 2 * t + 1][column]),
                             pair(tile_v[j + 2 * t + 8][column], tile_v[j + 2 * t + 9][column]));
            }
        }
    }

    Element *gO = out + (batch * stride_ob + head_q * stride_oh + m_offset * stride_os);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = row + 8 * half;
        const float sum = row_sum(l[half]);
        const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;  // a row that sees no key has an accumulator of 0
        if (m_offset + r >= seqlen_q) continue;
        if (STORE_LSE && t == 0) lse[static_cast<i64>(head) * seqlen_q + m_offset + r] = (m[half] * scale + log2f(sum)) * LN2;
#pragma unroll
        for (int n = 0; n < V_TILES; ++n)
            *reinterpret_cast<u32 *>(gO + r * stride_os + 8 * n + 2 * t) =
                Element::pack(acc[n][2 * half] * factor, acc[n][2 * half + 1] * factor);
    }
}
