// Device code of cuda.fwd_sm90: forward attention for Hopper with TMA, mbarriers and wgmma; see fwd_sm90.py.
//
// A block has one producer thread, which fills rings of K and V tiles in shared memory by TMA, and NUM_CONSUMERS warpgroups,
// which multiply 64 query rows each.  Everything goes in one direction, from the last key tile to the first.  The constants
// in capitals come from the compiler's command line: ELEMENT (Half or BFloat), HEAD_DIM, HEAD_DIM_V, BLOCK_N, NUM_CONSUMERS,
// NUM_STAGES, OCCUPANCY, SCHEDULE (SINGLE, STATIC or DYNAMIC), PRODUCER_REGISTERS, CONSUMER_REGISTERS, and as 0 or 1:
// SEPARATE_OUT, KEEP_ORIGIN, RAGGED (the last key tile is not full), HAS_LEFT, HAS_RIGHT (limits of the window), SOFTCAP,
// STORE_LSE.

#include "attention_ops.cuh"
#include "hopper_ops.cuh"

#define SINGLE 0
#define STATIC 1
#define DYNAMIC 2

constexpr int ROWS = 64;  // of queries a consumer has: the rows of one wgmma
constexpr int BLOCK_M = ROWS * NUM_CONSUMERS;
constexpr int NUM_THREADS = WARPGROUP * (NUM_CONSUMERS + 1);
constexpr int K_STEPS = (HEAD_DIM + 15) / 16;          // of Q K^T
constexpr int N_TILES = BLOCK_N / 8, V_TILES = DIM_V / 8;

using TileQ = Boxes<ROWS, HEAD_DIM>;
using TileK = Boxes<BLOCK_N, HEAD_DIM>;
using TileV = Boxes<BLOCK_N, HEAD_DIM_V>;
using TileO = Boxes<ROWS, HEAD_DIM_V>;
constexpr int K_AT = NUM_CONSUMERS * TileQ::BYTES;
constexpr int V_AT = K_AT + NUM_STAGES * TileK::BYTES;
constexpr int LOADS_END = V_AT + NUM_STAGES * TileV::BYTES;
constexpr int OUT_AT = SEPARATE_OUT ? LOADS_END : V_AT;
constexpr int BARRIERS_AT = LOADS_END + (SEPARATE_OUT ? NUM_CONSUMERS * TileO::BYTES : 0);

// Barriers, by their number; full and empty ones for each slot of a ring.
constexpr int NEXT_TILES = 2;  // numbers of tiles on their way from the producer to the consumers
constexpr int Q_FULL = 0, Q_EMPTY = Q_FULL + NUM_CONSUMERS;
constexpr int K_FULL = Q_EMPTY + NUM_CONSUMERS, K_EMPTY = K_FULL + NUM_STAGES;
constexpr int V_FULL = K_EMPTY + NUM_STAGES, V_EMPTY = V_FULL + NUM_STAGES;
constexpr int NEXT_FULL = V_EMPTY + NUM_STAGES, NEXT_EMPTY = NEXT_FULL + NEXT_TILES;
constexpr int OUT_EMPTY = NEXT_EMPTY + NEXT_TILES;
constexpr int NUM_BARRIERS = OUT_EMPTY + 1;
constexpr int NEXT_AT = BARRIERS_AT + 8 * NUM_BARRIERS;  // the numbers themselves
constexpr int ALL_CONSUMERS = 1, OWN_CONSUMER = 2;       // of bar.sync; one for each consumer from there

// What a thread's part of a row's sum may reach before the row gets a new origin; a weight in float16 stays below 65504.
constexpr float sum_limit(Half) { return 16384.0f; }
constexpr float sum_limit(BFloat) { return 1048576.0f; }
constexpr float SUM_LIMIT = sum_limit(Element{});

extern __shared__ __align__(1024) char smem[];

// Key tiles from which rows [row, row + count) see some key: [first, end).
struct KeyTiles {
    int first, end;

    INLINE KeyTiles(const Mask &mask, int row, int count) {
        end = (max(mask.last(row + count - 1), 0) + BLOCK_N - 1) / BLOCK_N;
        first = min(mask.first(row) / BLOCK_N, end);
    }
};

// What the tiles of a launch have in common.
struct Sizes {
    int seqlen_q, num_heads_q, group, num_heads, num_m_blocks, num_tiles, section;
};

// Which tile of the output has a number: section by section, a section being the heads whose K and V share L2, and in a
// section block by block over its heads, the longest blocks of a causal mask first.
struct Place {
    int m_offset, head_q, batch, head;  // head counts through the whole batch

    INLINE Place(int tile, const Sizes &sizes) {
        const int first_head = tile / (sizes.num_m_blocks * sizes.section) * sizes.section;
        const int heads_here = min(sizes.num_heads - first_head, sizes.section);
        const int rest = tile - first_head * sizes.num_m_blocks;
        const int block = rest / heads_here;
        m_offset = (HAS_RIGHT ? sizes.num_m_blocks - 1 - block : block) * BLOCK_M;
        head = first_head + rest - block * heads_here;
        batch = head / sizes.num_heads_q;
        head_q = head - batch * sizes.num_heads_q;
    }
};

// Where a ring of `SLOTS` slots is, seen from one side.  The side that empties waits for parity 0 first; the side that
// fills begins with parity 1, which a new barrier has behind it.
template <int SLOTS>
struct Turn {
    int slot = 0;
    u32 parity;

    INLINE explicit Turn(u32 first) : parity(first) {}
    INLINE void advance() {
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};

struct Shared {
    u32 base;

    INLINE u32 barrier(int number) const { return base + BARRIERS_AT + 8 * number; }
};

// ---- The producer: one thread, which keeps the rings full.

struct Producer {
    Shared shared;
    const TensorMap &q_map, &k_map, &v_map;
    Turn<NUM_STAGES> k{1}, v{1};
    u32 q_parity = 1, out_parity = 1;

    template <class Tile>
    INLINE void load(u32 to, const TensorMap &map, u32 full, int row, int head, int batch) {
        barrier_arrive_expect(full, Tile::BYTES);
#pragma unroll
        for (int box = 0; box < Tile::COUNT; ++box)
            tma_load(to + box * Tile::BOX_BYTES, map, full, box * BOX, row, head, batch);
    }

    INLINE void load_q(const Place &place) {
#pragma unroll
        for (int c = 0; c < NUM_CONSUMERS; ++c) {
            barrier_wait(shared.barrier(Q_EMPTY + c), q_parity);
            load<TileQ>(shared.base + c * TileQ::BYTES, q_map, shared.barrier(Q_FULL + c), place.m_offset + c * ROWS,
                        place.head_q, place.batch);
        }
        q_parity ^= 1;
    }

    INLINE void load_k(int n_block, int head_kv, int batch) {
        barrier_wait(shared.barrier(K_EMPTY + k.slot), k.parity);
        load<TileK>(shared.base + K_AT + k.slot * TileK::BYTES, k_map, shared.barrier(K_FULL + k.slot), n_block * BLOCK_N,
                    head_kv, batch);
        k.advance();
    }

    INLINE void load_v(int n_block, int head_kv, int batch) {
        // Where output passes through the ring of V: until the tile in front has left it.
        if (SCHEDULE != SINGLE && !SEPARATE_OUT) barrier_wait(shared.barrier(OUT_EMPTY), out_parity);
        barrier_wait(shared.barrier(V_EMPTY + v.slot), v.parity);
        load<TileV>(shared.base + V_AT + v.slot * TileV::BYTES, v_map, shared.barrier(V_FULL + v.slot), n_block * BLOCK_N,
                    head_kv, batch);
        v.advance();
    }

    INLINE void run(const Mask &mask, const Sizes &sizes, u32 *counter) {
        Turn<NEXT_TILES> next{1};
        for (int tile = blockIdx.x; tile < sizes.num_tiles;) {
            const Place place(tile, sizes);
            const KeyTiles tiles(mask, place.m_offset, BLOCK_M);
            const int head_kv = place.head_q / sizes.group, last = tiles.end - 1;
            // K is needed a step earlier than V.
            if (tiles.first < tiles.end) load_k(last, head_kv, place.batch);
            load_q(place);
#pragma unroll 1
            for (int n_block = last; n_block > tiles.first; --n_block) {
                load_k(n_block - 1, head_kv, place.batch);
                load_v(n_block, head_kv, place.batch);
            }
            // As late as the answer still comes in time: who asks early takes a tile from a block that could start it sooner.
            u32 asked = 0;
            if (SCHEDULE == DYNAMIC) asked = atomicAdd(counter, 1u);
            if (tiles.first < tiles.end) load_v(tiles.first, head_kv, place.batch);
            out_parity ^= 1;
            if (SCHEDULE == SINGLE) break;
            if (SCHEDULE == STATIC) tile += gridDim.x;
            if (SCHEDULE == DYNAMIC) {
                // The blocks ask num_tiles times in all, for every tile but their first and once each in vain; who asks last
                // leaves the counter at zero.
                if (asked == sizes.num_tiles - 1) *counter = 0;
                tile = gridDim.x + asked;
                barrier_wait(shared.barrier(NEXT_EMPTY + next.slot), next.parity);
                *reinterpret_cast<int *>(smem + NEXT_AT + 4 * next.slot) = tile;
                barrier_arrive(shared.barrier(NEXT_FULL + next.slot));
                next.advance();
            }
        }
    }
};

// ---- The consumers: a warpgroup each.

struct Consumer {
    Shared shared;
    Scales scales;
    Mask mask;
    int index, lane, warp;  // warp of the four
    Turn<NUM_STAGES> k{0}, v{0};

    // Of row g (half 0) and row g + 8 (half 1) of the warp's 16, g = lane / 4.
    float acc[V_TILES][4];
    float s[N_TILES][4];           // scores, then weights
    u32 p[BLOCK_N / 16][4];        // weights of the tile whose P V comes next
    float m[2], l[2];              // maximum, and this lane's part of the sum
    float kept[2];                 // the shift of a tile that no edge cuts; -inf where the row has none
    float alpha[2];                // what older output shrinks by

    INLINE void release(int barrier) const {
        if (lane == 0) barrier_arrive(shared.barrier(barrier));
    }

    INLINE void begin() {
#pragma unroll
        for (int n = 0; n < V_TILES; ++n) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) m[half] = kept[half] = -INF, l[half] = 0.0f;
    }

    // Both issue a group of products and do not wait for it.

    INLINE void issue_qk() {
        barrier_wait(shared.barrier(K_FULL + k.slot), k.parity);
        const TileQ::Descriptor queries(shared.base + index * TileQ::BYTES);
        const TileK::Descriptor keys(shared.base + K_AT + k.slot * TileK::BYTES);
        hold(s);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < K_STEPS; ++i) wgmma(s, queries.along_row(i), keys.along_row(i), i > 0);
        wgmma_commit();
    }

    INLINE void issue_pv() {
        barrier_wait(shared.barrier(V_FULL + v.slot), v.parity);
        const TileV::Descriptor values(shared.base + V_AT + v.slot * TileV::BYTES);
        hold(acc);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BLOCK_N / 16; ++i) wgmma(acc, p[i], values.down(i));
        wgmma_commit();
    }

    INLINE void end_qk() {
        release(K_EMPTY + k.slot);
        k.advance();
    }

    INLINE void end_pv() {
        wgmma_wait<0>();
        hold(acc);
        release(V_EMPTY + v.slot);
        v.advance();
    }

    // Scores of keys that a row does not see become -inf, whatever they are.  `row` is that of half 0.
    INLINE void hide(int row, int n_block) {
        const int column = n_block * BLOCK_N + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int first = mask.first(row + 8 * half) - column, last = mask.last(row + 8 * half) - column;
#pragma unroll
            for (int n = 0; n < N_TILES; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (8 * n + e >= last || (HAS_LEFT && 8 * n + e < first)) s[n][2 * half + e] = -INF;
        }
    }

    INLINE void cap() {
        if (SOFTCAP)
#pragma unroll
            for (int n = 0; n < N_TILES; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[n][e] = scales.capped(s[n][e]);
    }

    // Scores of a row become weights, exp2(score * scale - shift); returns this lane's part of their sum.
    INLINE float exponentials(int half, float scale, float shift) {
        float sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float &x = s[n][2 * half + e];
                x = exp2_approx(__fmaf_rn(x, scale, -shift));
                sum[e] += x;
            }
        return sum[0] + sum[1];
    }

    // The online softmax: scores become weights, maximum and sum come up to them, and alpha is what older output shrinks by.
    // A row that saw no key yet keeps the maximum -inf.
    INLINE void softmax() {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top[2] = {m[half], s[0][2 * half]};
#pragma unroll
            for (int n = 0; n < N_TILES; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) top[e] = fmaxf(top[e], s[n][2 * half + e]);
            const float old = scales.shift_of_row(m[half]);
            m[half] = row_max(fmaxf(top[0], top[1]));
            const float shift = scales.shift_of_row(m[half]), origin = m[half] == -INF ? 0.0f : shift;
            alpha[half] = exp2_approx(old - origin);
            l[half] = l[half] * alpha[half] + exponentials(half, scales.of_row(m[half]), origin);
            kept[half] = scales.is_far(m[half]) ? -INF : shift;
        }
    }

    INLINE void rescale() {
#pragma unroll
        for (int n = 0; n < V_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[n][e] *= alpha[e / 2];
    }

    INLINE void pack() {
#pragma unroll
        for (int i = 0; i < BLOCK_N / 16; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) p[i][r] = Element::pack(s[2 * i + r / 2][r % 2 * 2], s[2 * i + r / 2][r % 2 * 2 + 1]);
    }

    // This warp's scores once more, by products of a warp, which need no other warp: a lane gets the same ones.
    INLINE void multiply_again() {
        const u32 queries = shared.base + index * TileQ::BYTES, keys = shared.base + K_AT + k.slot * TileK::BYTES;
        const int lane = lane_here();  // so that no address is kept in a register for this rare place
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll 1
        for (int i = 0; i < K_STEPS; ++i) {
            u32 a[4];
            ldmatrix(a, queries + TileQ::offset(16 * warp + lane % 16, 2 * i + lane / 16));
#pragma unroll
            for (int n = 0; n < N_TILES; n += 2) {
                u32 b[4];
                ldmatrix(b, keys + TileK::offset(8 * n + lane % 8 + lane / 16 * 8, 2 * i + lane / 8 % 2));
                Element::mma(s[n], a, b[0], b[1]);
                Element::mma(s[n + 1], a, b[2], b[3]);
            }
        }
    }

    // One tile further: the next scores are multiplied first, then what is known of the output, and the softmax of the
    // former runs under the latter.

    INLINE void step_exact(bool hidden, int row, int n_block) {
        issue_qk();
        issue_pv();
        wgmma_wait<1>();
        hold(s);
        cap();
        if (hidden) hide(row, n_block);
        softmax();
        // K is here, so this does not wait; but its branch keeps the exponentials in front of the wait for the product.
        barrier_wait(shared.barrier(K_FULL + k.slot), k.parity);
        end_qk();
        end_pv();
        pack();
        rescale();
    }

    // In a tile that no edge cuts a row keeps the shift it has, and nobody looks for a maximum or rescales: softmax does not
    // depend on the shift.  The sums tell whether a score outgrew it by so much that weights would lose range, or that there
    // is none (then they are infinite).  Then, which is rare, this warp computes its scores again and takes the true maximum.
    INLINE void step_kept() {
        issue_qk();
        issue_pv();
        wgmma_wait<1>();
        hold(s);
        cap();
        const float sum[2] = {exponentials(0, scales.qk, kept[0]), exponentials(1, scales.qk, kept[1])};
        // Before the product is waited for: across a branch the compiler cannot move the exponentials behind it.
        if (__all_sync(ALL_LANES, sum[0] <= SUM_LIMIT && sum[1] <= SUM_LIMIT)) {  // false for NaN, too
            l[0] += sum[0], l[1] += sum[1];
        } else {
            wgmma_wait<0>();
            hold(acc);
            multiply_again();
            cap();
            softmax();
            rescale();
        }
        end_qk();
        end_pv();
        pack();
    }

    // Tiles that are for other consumers alone.
    INLINE void skip(int count) {
#pragma unroll 1
        for (; count > 0; --count) {
            barrier_wait(shared.barrier(K_FULL + k.slot), k.parity);
            end_qk();
            barrier_wait(shared.barrier(V_FULL + v.slot), v.parity);
            release(V_EMPTY + v.slot);
            v.advance();
        }
    }

    // The tiles from which some of this consumer's rows see a key; the rows begin at `m_offset`.
    INLINE void attend(const KeyTiles &tiles, int m_offset) {
        const int row = m_offset + 16 * warp + lane / 4;
        int n_block = tiles.end - 1;
        issue_qk();
        wgmma_wait<0>();
        hold(s);
        end_qk();
        cap();
        if (RAGGED || HAS_LEFT || HAS_RIGHT) hide(row, n_block);
        softmax();
        pack();
        // Tiles that the right edge cuts, that none cuts, and that the left edge cuts.
        int right_end = n_block, left_end = tiles.first;
        if (HAS_RIGHT) right_end = max(min(max(mask.last(m_offset), 0) / BLOCK_N, n_block), tiles.first);
        if (HAS_LEFT) left_end = min(max((mask.first(m_offset + ROWS - 1) + BLOCK_N - 1) / BLOCK_N, tiles.first), right_end);
        if (HAS_RIGHT)
#pragma unroll 1
            while (n_block > right_end) step_exact(true, row, --n_block);
#pragma unroll 1
        while (n_block > left_end) {
            --n_block;
            if (KEEP_ORIGIN)
                step_kept();
            else
                step_exact(false, row, n_block);
        }
        if (HAS_LEFT)
#pragma unroll 1
            while (n_block > tiles.first) step_exact(true, row, --n_block);
        if (SCHEDULE != SINGLE) release(Q_EMPTY + index);
        issue_pv();
        end_pv();
    }

    // Output and lse of this consumer's rows.
    INLINE void finish(const Place &place, int m_offset, const Sizes &sizes, const TensorMap &out_map, float *lse,
                       const Element *q, const Head &keys, const Head &values, i64 stride_qs) {
        const int local = 16 * warp + lane / 4;
        float total[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = row_sum(l[half]);
            total[half] = sum == 0.0f ? 1.0f : sum;  // no visible key: the accumulator is 0
            alpha[half] = 1.0f / total[half];
            const int row = m_offset + local + 8 * half;
            if (STORE_LSE && lane % 4 == 0 && row < sizes.seqlen_q) {
                const float value = sum == 0.0f ? -INF : (m[half] * scales.qk + log2f(sum)) * LN2;
                lse[static_cast<i64>(place.head) * sizes.seqlen_q + row] = value;
            }
        }
        rescale();
        // Nothing may still be read where the output goes: the output before it, or V by another consumer.
        const u32 out = OUT_AT + index * TileO::BYTES;
        if (SEPARATE_OUT) {
            if (warp == 0) tma_store_wait_read();
            group_sync(OWN_CONSUMER + index, WARPGROUP);
        } else {
            group_sync(ALL_CONSUMERS, WARPGROUP * NUM_CONSUMERS);
        }
        const u32 corner = shared.base + out + TileO::offset(16 * warp + lane % 16, lane / 16);
#pragma unroll
        for (int n = 0; n < V_TILES; n += 2) {
            u32 r[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) r[i] = Element::pack(acc[n + i / 2][i % 2 * 2], acc[n + i / 2][i % 2 * 2 + 1]);
            stmatrix((corner ^ n % 8 * 16) + n / 8 * TileO::BOX_BYTES, r[0], r[1], r[2], r[3]);
        }
        if (HAS_LEFT || HAS_RIGHT) {
            __syncwarp();
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float checksum = 0.0f;
#pragma unroll
                for (int n = 0; n < V_TILES; ++n) checksum += acc[n][2 * half] + acc[n][2 * half + 1];
                const u32 bad = __ballot_sync(ALL_LANES, checksum != checksum);
                if (bad == 0) continue;
#pragma unroll 1
                for (int quad = 0; quad < WARP; quad += 4) {
                    const int row = 16 * warp + quad / 4 + 8 * half;
                    if ((bad >> quad & 15) == 0 || m_offset + row >= sizes.seqlen_q) continue;
                    const float top = __shfl_sync(ALL_LANES, m[half], quad), sum = __shfl_sync(ALL_LANES, total[half], quad);
                    const int last = mask.last(m_offset + row);
                    const float scale = scales.of_row(top), shift = scales.shift_of_row(top);
                    auto weight = [&](float score) { return exp2_approx(__fmaf_rn(scales.capped(score), scale, -shift)); };
                    repair_row<TileO>(smem, out, row, lane, mask.first(m_offset + row), last, weight, sum,
                                      q + (m_offset + row) * stride_qs, keys, values);
                }
            }
        }
        tma_store_fence();
        group_sync(OWN_CONSUMER + index, WARPGROUP);
        if (warp == 0 && lane == 0) {
#pragma unroll
            for (int box = 0; box < TileO::COUNT; ++box)
                tma_store(out_map, shared.base + out + box * TileO::BOX_BYTES, box * BOX, m_offset, place.head_q, place.batch);
            tma_store_commit();
            if (SCHEDULE != SINGLE && !SEPARATE_OUT) {
                tma_store_wait_read();
                barrier_arrive(shared.barrier(OUT_EMPTY));
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS, OCCUPANCY)
    attention_fwd_kernel(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                         const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map, const Element *q,
                         const Element *k, const Element *v, float *lse, u32 *counter, float softmax_scale, float softcap,
                         i64 stride_qb, i64 stride_qs, i64 stride_qh, i64 stride_kb, i64 stride_ks, i64 stride_kh,
                         i64 stride_vb, i64 stride_vs, i64 stride_vh, int seqlen_q, int seqlen_k, int num_heads_q, int group,
                         int num_heads, int num_m_blocks, int num_tiles, int section, int left, int right) {
    const Shared shared = {shared_address(smem)};
    const int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) {
        tma_prefetch(q_map), tma_prefetch(k_map), tma_prefetch(v_map), tma_prefetch(out_map);
#pragma unroll
        for (int i = 0; i < NUM_BARRIERS; ++i) {
            // Each warp of a consumer says that it is done with a slot; all else is done by one thread.
            const bool by_warps = i >= K_EMPTY && i < V_FULL || i >= V_EMPTY && i < NEXT_FULL || i >= NEXT_EMPTY && i < OUT_EMPTY;
            const bool by_own_warps = i >= Q_EMPTY && i < K_FULL;
            barrier_init(shared.barrier(i), by_warps ? 4 * NUM_CONSUMERS : by_own_warps ? 4 : i == OUT_EMPTY ? NUM_CONSUMERS : 1);
        }
        barrier_init_fence();
    }
    __syncthreads();

    const Mask mask = {seqlen_k, left, right};
    const Sizes sizes = {seqlen_q, num_heads_q, group, num_heads, num_m_blocks, num_tiles, section};
    if (warp < 4) {
        give_registers<PRODUCER_REGISTERS>();
        if (warp == 0 && elect()) Producer{shared, q_map, k_map, v_map}.run(mask, sizes, counter);
        return;
    }
    take_registers<CONSUMER_REGISTERS>();
    const Scales scales(softmax_scale, softcap);
    Consumer consumer{shared, scales, mask, warp / 4 - 1, lane, warp % 4};
    u32 q_parity = 0;
    Turn<NEXT_TILES> next{0};
    for (int tile = blockIdx.x; tile < num_tiles;) {
        const Place place(tile, sizes);
        const KeyTiles tiles(mask, place.m_offset, BLOCK_M);
        const int m_offset = place.m_offset + consumer.index * ROWS, head_kv = place.head_q / group;
        consumer.begin();
        barrier_wait(shared.barrier(Q_FULL + consumer.index), q_parity);
        q_parity ^= 1;
        KeyTiles own(mask, m_offset, ROWS);
        if (m_offset >= seqlen_q) own.end = own.first;  // no rows at all
        own.end = uniform(own.end), own.first = uniform(own.first);
        consumer.skip(tiles.end - own.end);
        if (own.first < own.end)
            consumer.attend(own, m_offset);
        else if (SCHEDULE != SINGLE)
            consumer.release(Q_EMPTY + consumer.index);
        if (HAS_LEFT) consumer.skip(own.first - tiles.first);
        consumer.finish(place, m_offset, sizes, out_map, lse, q + (place.batch * stride_qb + place.head_q * stride_qh),
                        Head(k, place.batch, head_kv, stride_kb, stride_ks, stride_kh),
                        Head(v, place.batch, head_kv, stride_vb, stride_vs, stride_vh), stride_qs);
        if (SCHEDULE == SINGLE) break;
        if (SCHEDULE == STATIC) tile += gridDim.x;
        if (SCHEDULE == DYNAMIC) {
            barrier_wait(shared.barrier(NEXT_FULL + next.slot), next.parity);
            tile = __shfl_sync(ALL_LANES, *reinterpret_cast<volatile int *>(smem + NEXT_AT + 4 * next.slot), 0);
            consumer.release(NEXT_EMPTY + next.slot);
            next.advance();
        }
    }
    if (consumer.warp == 0 && lane == 0) tma_store_wait_read();
}
