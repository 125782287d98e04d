// The weights of slots (key_weights), behind the attention that has left the largest score and the sum of weights of each row.
#pragma once

#include "llm/paged_decode.cuh"
#include "llm/paged_prefill.cuh"

namespace pagoda {
namespace paged {

// The weights of slots of decoded sequences, from their scores. A block has WEIGHED slots of one kv head of one sequence; `block` is its
// number. It has the threads of `combine`, beside which it runs.
constexpr int WEIGHING = 32 * COMBINING, PER_THREAD = 4, WEIGHED = WEIGHING * PER_THREAD;

template <class T> __device__ void weigh_decoded(const PagedCall &call, int row_tiles, int block) {
    constexpr int MOST_ROWS = 64;  // whose sums are in shared memory at a time
    constexpr int AT_ONCE = 4;     // whose scores are loaded at once
    __shared__ float2 sums[MOST_ROWS];
    int blocks = (call.weights_len + WEIGHED - 1) / WEIGHED;
    int first = block % blocks * WEIGHED + threadIdx.x;
    int head = block / blocks % call.kv_heads, number = block / blocks / call.kv_heads;
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
#if __CUDA_ARCH__ >= 900
    // As in `combine`.
    launch_dependents();
#endif
    Sequence sequence = load_sequence(call, number);
    int group = call.query_heads / call.kv_heads, rows = sequence.rows * group;
    Parts parts(call, sequence);
    int64_t before = parts_before(call, number);
#if __CUDA_ARCH__ >= 900
    wait_for_previous();
#endif
    if (!is_decode(sequence.rows, group)) return;
    PartialSums partial{call, row_tiles};
    KeptScores scores{call, row_tiles};
    float weights[PER_THREAD] = {};
    for (int base = 0; base < rows; base += MOST_ROWS) {
        int count = min(rows - base, MOST_ROWS);
        float own[AT_ONCE][PER_THREAD];
        auto load = [&](int from) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const float *of_row = scores.of(number, head, base + from + i);
#pragma unroll
                for (int j = 0; j < PER_THREAD; j++) {
                    int slot = first + j * WEIGHING;
                    own[i][j] = from + i < count && slot < parts.end_slot ? of_row[slot] : -INFINITY;
                }
            }
        };
        // They are on their way while the sums are added up.
        load(0);
        __syncthreads();
        for (int row = warp; row < count; row += WEIGHING / 32) {
            auto of_part = [&](int part) {
                return part < parts.end ? *partial.weight(partial.place(before + part, head, base + row))
                                        : float2{-INFINITY, 0.0f};
            };
            float2 nearest = of_part(parts.first + lane);
            float most = nearest.x, total = 0;
            for (int part = parts.first + lane + 32; part < parts.end; part += 32) most = fmaxf(most, of_part(part).x);
            most = warp_max(most);
            auto add = [&](float2 own) { total += own.x == -INFINITY ? 0.0f : own.y * power_of_two(own.x - most); };
            add(nearest);
            for (int part = parts.first + lane + 32; part < parts.end; part += 32) add(of_part(part));
            total = warp_sum(total);
            join_sink<T>(call, head * group + (base + row) % group, most, total);
            if (lane == 0) sums[row] = {most, total};
        }
        __syncthreads();
        for (int from = 0; from < count; from += AT_ONCE) {
            if (from > 0) load(from);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                if (from + i >= count) break;
                float2 of_row = sums[from + i];
#pragma unroll
                for (int j = 0; j < PER_THREAD; j++) {
                    // A weight of 0, also where the row has nothing but such scores.
                    if (own[i][j] != -INFINITY) weights[j] += power_of_two(own[i][j] - of_row.x) / of_row.y;
                }
            }
        }
    }
    float *to = call.key_weights + (static_cast<int64_t>(number) * call.kv_heads + head) * call.weights_len;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        int slot = first + i * WEIGHING;
        if (slot < call.weights_len) to[slot] = weights[i] / static_cast<float>(group);
    }
}

// The weights of slots of sequences with many new tokens: scores are computed once more. A block takes a tile of slots of one kv head
// at a time, keeps their keys in shared memory and goes over the rows, 16 a warp; a thread adds up what its rows give its slots.
template <class T, int D, int FORMAT> struct WeighRows {
    using P = Prefill<T, D, FORMAT, false>;
    static constexpr int KEYS = P::KEYS;
    const PagedCall &call;
    const Sequence &sequence;
    int number, head, tile;
    uint8_t *shared;

    __device__ void run() const {
        int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
        int room = static_cast<int>(clamp64(static_cast<int64_t>(sequence.page_count) * call.page_size, 0, INT32_MAX));
        P block{call, sequence, number, head, 0, min(slot_count(call, sequence), room), shared};
        __syncthreads();
        block.keep(tile, block.look_up(tile));
        __syncthreads();
        block.copy(tile);
        mma::commit_copies();
        mma::wait_copies<0>();

        const auto &table = block.table(tile);
        auto range = [&](int which, int key) { return open_range(table.ranges[which][key]); };
        Scoring scoring(call);
        float weights[KEYS / 8][2] = {};
        int total = sequence.rows * (call.query_heads / call.kv_heads);
#pragma unroll 1
        for (int first = 0; first < total; first += P::BLOCK_ROWS) {
            BlockRows rows{call, sequence, head, first};
            T *queries = reinterpret_cast<T *>(shared);
            __syncthreads();
            rows.template load_queries<T, D, P::BLOCK_ROWS, P::Q::STRIDE, P::THREADS>(queries);
            Row own[2];
            float2 sums[2];  // the largest score, and one over the sum of weights
            for (int i = 0; i < 2; i++) {
                int row = warp * ROWS + lane / 4 + 8 * i;
                own[i] = rows.load(row);
                sums[i] = {0.0f, 0.0f};
                if (!rows.has(row)) continue;
                int64_t place = static_cast<int64_t>(rows.token(row)) * call.query_heads + rows.query_head(row);
                sums[i] = reinterpret_cast<const float2 *>(call.row_sums)[place];
                sums[i].y = 1.0f / sums[i].y;
            }
            __syncthreads();
            Queries<T, D, FORMAT, false> query(queries + warp * ROWS * P::Q::STRIDE);
            float scores[KEYS / 8][4] = {};
            Attention<T, D, FORMAT, KEYS>::multiply_keys(scores, query, block.keys(tile), range);
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float score = scoring.of(scores[n][i], own[i / 2], table.positions[n * 8 + (lane & 3) * 2 + i % 2]);
                    // A weight of 0, also where the row has nothing but such scores.
                    if (score != -INFINITY) weights[n][i % 2] += power_of_two(score - sums[i / 2].x) * sums[i / 2].y;
                }
            }
        }
        write(weights);
    }

    // Adds up what the threads of a slot have, in a fixed order.
    __device__ void write(float (&weights)[KEYS / 8][2]) const {
        __shared__ float of_warps[P::WARPS][KEYS];
        int lane = threadIdx.x & 31;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                for (int other = 4; other < 32; other *= 2) weights[n][i] += __shfl_xor_sync(~0u, weights[n][i], other);
                if (lane < 4) of_warps[threadIdx.x / 32][n * 8 + lane * 2 + i] = weights[n][i];
            }
        }
        __syncthreads();
        int slot = tile * KEYS + static_cast<int>(threadIdx.x);
        if (threadIdx.x >= KEYS || slot >= call.weights_len) return;
        float sum = 0;
        for (int warp = 0; warp < P::WARPS; warp++) sum += of_warps[warp][threadIdx.x];
        int64_t to = (static_cast<int64_t>(number) * call.kv_heads + head) * call.weights_len + slot;
        call.key_weights[to] = sum / static_cast<float>(call.query_heads / call.kv_heads);
    }
};

// Blocks take tiles by turns, of all sequences that are not decoded: mostly there is none, so that few blocks look for them.
template <class T, int D, int FORMAT> __device__ void weigh_rows(const PagedCall &call) {
    using W = WeighRows<T, D, FORMAT>;
    extern __shared__ __align__(128) uint8_t shared[];
#if __CUDA_ARCH__ >= 900
    wait_for_previous();
    launch_dependents();
#endif
    int lane = threadIdx.x & 31, group = call.query_heads / call.kv_heads;
    int tiles = (call.weights_len + W::KEYS - 1) / W::KEYS * call.kv_heads;
    int64_t own = blockIdx.x, before = 0;  // the block's next tile, and the tiles of the sequences in front
    for (int base = 0; base < call.sequences; base += 32) {
        bool weighed = false;
        if (base + lane < call.sequences) {
            Sequence sequence = load_sequence(call, base + lane);
            weighed = sequence.rows > 0 && !is_decode(sequence.rows, group);
        }
        for (unsigned those = __ballot_sync(~0u, weighed); those != 0; those &= those - 1) {
            int number = base + __ffs(those) - 1;
            Sequence sequence = load_sequence(call, number);
            for (; own < before + tiles; own += gridDim.x) {
                int tile = static_cast<int>(own - before);
                W{call, sequence, number, tile % call.kv_heads, tile / call.kv_heads, shared}.run();
            }
            before += tiles;
        }
    }
}

}  // namespace paged
}  // namespace pagoda
