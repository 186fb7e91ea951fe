// Rung 3: rows in shared memory are padded, so that neighbouring rows lie in other banks.
//
// A block owns BLOCK_M query rows of one head, a warp 16 of them in both products.  tile_ops.cuh draws which elements of
// A, B and C a lane holds.  The constants in capitals come from the compiler's command line.

#include "tile_ops.cuh"

using Element = ELEMENT;

constexpr int NUM_THREADS = WARP * NUM_WARPS;
constexpr int N_TILES = BLOCK_N / 8, V_TILES = HEAD_DIM / 8;
constexpr int PITCH = HEAD_DIM + 8, PITCH_P = BLOCK_N + 8;  // elements from one row of a tile to the next: four banks on
constexpr int SHARERS = NUM_THREADS / BLOCK_M;      // threads that share a row of scores
constexpr int SHARE = BLOCK_N / SHARERS;

struct Shared {
    u16 q[BLOCK_M][PITCH], k[BLOCK_N][PITCH], v[BLOCK_N][PITCH], p[BLOCK_M][PITCH_P];
    float s[BLOCK_M][BLOCK_N + 1];
    float maximum[NUM_THREADS], sum[NUM_THREADS];  // of each thread's share
    float factor[BLOCK_M];                         // what the output of a row is multiplied by
};

extern __shared__ __align__(128) char smem[];

// Rows of a tensor into a tile, 16 bytes at a time, and zeros where there are no rows.
template <int ROWS>
INLINE void load_tile(u16 (*tile)[PITCH], const Element *from, i64 stride, int rows) {
    for (int i = VECTOR * threadIdx.x; i < ROWS * HEAD_DIM; i += VECTOR * NUM_THREADS) {
        const int row = i / HEAD_DIM, column = i % HEAD_DIM;
        uint4 x = {0, 0, 0, 0};
        if (row < rows) x = *reinterpret_cast<const uint4 *>(from + row * stride + column);
        *reinterpret_cast<uint4 *>(&tile[row][column]) = x;
    }
}

INLINE u32 pair(const u16 *x) { return *reinterpret_cast<const u32 *>(x); }
INLINE u32 pair(u16 lower, u16 upper) { return lower | static_cast<u32>(upper) << 16; }

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
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

    load_tile<BLOCK_M>(shared.q, q + (batch * stride_qb + head_q * stride_qh + m_offset * stride_qs), stride_qs,
                       seqlen_q - m_offset);
    float acc[V_TILES][4] = {};
    const int my_row = threadIdx.x / SHARERS, my_column = threadIdx.x % SHARERS * SHARE;
    float m = -INF, l = 0.0f;  // maximum and sum of my_row
    const int end = CAUSAL ? min(m_offset + BLOCK_M + offset, seqlen_k) : seqlen_k;
    for (int n_offset = 0; n_offset < end; n_offset += BLOCK_N) {
        __syncthreads();  // nobody reads the last tiles any more
        load_tile<BLOCK_N>(shared.k, gK + n_offset * stride_ks, stride_ks, seqlen_k - n_offset);
        load_tile<BLOCK_N>(shared.v, gV + n_offset * stride_vs, stride_vs, seqlen_k - n_offset);
        __syncthreads();

        float s[N_TILES][4] = {};
#pragma unroll
        for (int d = 0; d < HEAD_DIM; d += 16) {
            const u32 a[4] = {pair(&shared.q[row][d + 2 * t]), pair(&shared.q[row + 8][d + 2 * t]),
                              pair(&shared.q[row][d + 2 * t + 8]), pair(&shared.q[row + 8][d + 2 * t + 8])};
#pragma unroll
            for (int n = 0; n < N_TILES; ++n)
                Element::mma(s[n], a, pair(&shared.k[8 * n + g][d + 2 * t]), pair(&shared.k[8 * n + g][d + 2 * t + 8]));
        }
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) shared.s[row + i / 2 * 8][8 * n + 2 * t + i % 2] = s[n][i];
        __syncthreads();

        const int last = CAUSAL ? min(m_offset + my_row + offset + 1, seqlen_k) : seqlen_k;  // keys below it are visible
        float m_new = m;
#pragma unroll
        for (int i = 0; i < SHARE; ++i)
            if (n_offset + my_column + i < last) m_new = fmaxf(m_new, shared.s[my_row][my_column + i] * softmax_scale);
        shared.maximum[threadIdx.x] = m_new;
        __syncthreads();
        for (int i = 0; i < SHARERS; ++i) m_new = fmaxf(m_new, shared.maximum[my_row * SHARERS + i]);
        const float origin = m_new == -INF ? 0.0f : m_new;  // no key seen yet: -inf - -inf would be NaN
        const float alpha = expf(m - origin);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < SHARE; ++i) {
            const bool visible = n_offset + my_column + i < last;
            const float p = visible ? expf(shared.s[my_row][my_column + i] * softmax_scale - origin) : 0.0f;
            shared.p[my_row][my_column + i] = static_cast<u16>(Element::pack(p, 0.0f));
            sum += p;
        }
        shared.sum[threadIdx.x] = sum;
        shared.factor[my_row] = alpha;
        __syncthreads();
        l *= alpha;
        for (int i = 0; i < SHARERS; ++i) l += shared.sum[my_row * SHARERS + i];
        m = m_new;

#pragma unroll
        for (int n = 0; n < V_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[n][i] *= shared.factor[row + i / 2 * 8];
#pragma unroll
        for (int j = 0; j < BLOCK_N; j += 16) {
            const u32 a[4] = {pair(&shared.p[row][j + 2 * t]), pair(&shared.p[row + 8][j + 2 * t]),
                              pair(&shared.p[row][j + 2 * t + 8]), pair(&shared.p[row + 8][j + 2 * t + 8])};
#pragma unroll
            for (int n = 0; n < V_TILES; ++n) {
                const int column = 8 * n + g;
                Element::mma(acc[n], a, pair(shared.v[j + 2 * t][column], shared.v[j + 2 * t + 1][column]),
                             pair(shared.v[j + 2 * t + 8][column], shared.v[j + 2 * t + 9][column]));
            }
        }
    }

    __syncthreads();  // nobody reads the last factors any more
    shared.factor[my_row] = l == 0.0f ? 0.0f : 1.0f / l;  // a row that sees no key has an accumulator of 0
    if (STORE_LSE && my_column == 0 && m_offset + my_row < seqlen_q)
        lse[static_cast<i64>(head) * seqlen_q + m_offset + my_row] = m + logf(l);
    __syncthreads();
    Element *gO = out + (batch * stride_ob + head_q * stride_oh + m_offset * stride_os);
#pragma unroll
    for (int n = 0; n < V_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = row + i / 2 * 8;
            if (m_offset + r < seqlen_q)
                gO[r * stride_os + 8 * n + 2 * t + i % 2].bits =
                    static_cast<u16>(Element::pack(acc[n][i] * shared.factor[r], 0.0f));
        }
}
