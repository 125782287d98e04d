// PagedAttention of sequences with many new tokens (prefill), by the tensor cores of every chip since sm_80, over pages of every
// format. The new tokens are in their pages already.
//
// A block of four warps has 64 rows of one sequence and kv head, 16 a warp: tokens with the query heads of the group. It walks
// over tiles of keys. While one tile is computed, the next is copied into shared memory (cp.async), and the pages of the one
// behind that are looked up.
#pragma once

#include "common/dependent_launch.cuh"
#include "llm/paged_parts.cuh"
#include "llm/paged_softmax.cuh"

namespace pagoda {
namespace paged {

// Rows of a block: tokens of a sequence with the query heads of a group, from number `first` of these on.
struct BlockRows {
    const PagedCall &call;
    const Sequence &sequence;
    int head, first;

    __device__ int group() const { return call.query_heads / call.kv_heads; }
    __device__ int token(int row) const { return sequence.row + (first + row) / group(); }
    __device__ int query_head(int row) const { return head * group() + (first + row) % group(); }
    __device__ bool has(int row) const { return first + row < sequence.rows * group(); }

    // The numbers of `COUNT` rows' queries into shared memory, `STRIDE` apart, by all `THREADS` threads of a block. First it is looked up
    // once for each row where it is: then no load waits for another.
    template <class T, int D, int COUNT, int STRIDE, int THREADS> __device__ void load_queries(T *to) const {
        static_assert(COUNT <= THREADS, "a thread looks up a row");
        __shared__ int64_t places[COUNT], positions[COUNT];  // negative: there is no such row
        bool rotates = call.cos != nullptr, suits = !rotates || Angles::suit(call);
        if (threadIdx.x < COUNT) {
            int row = threadIdx.x;
            places[row] = has(row) ? static_cast<int64_t>(token(row)) * call.query_heads + query_head(row) : -1;
            positions[row] = has(row) && rotates ? Angles::position(call, token(row)) : 0;
        }
        __syncthreads();
        const T *queries = static_cast<const T *>(call.query);
#pragma unroll 4
        for (int i = threadIdx.x; i < COUNT * D / 8; i += THREADS) {
            int row = i / (D / 8), column = i % (D / 8) * 8;
            uint4 numbers = {};
            if (!suits) {
                if (has(row)) numbers = load_query<T>(call, token(row), query_head(row), column);
            } else if (places[row] >= 0) {
                const T *from = queries + places[row] * D;
                numbers = *reinterpret_cast<const uint4 *>(from + column);
                if (rotates && column < 2 * call.half_width) {
                    uint4 others = Angles::others(call, from, column, numbers);
                    numbers = Angles(call, positions[row], column).template turn<T>(numbers, others);
                }
            }
            *reinterpret_cast<uint4 *>(to + row * STRIDE + column) = numbers;
        }
    }

    __device__ Row load(int row) const {
        if (!has(row)) return {-1, 0.0f};
        return {static_cast<int>(row_position(call, sequence, token(row))),
                call.slopes != nullptr ? call.slopes[query_head(row)] * LOG2_E : 0.0f};
    }
};

// What a block has in shared memory: queries, tiles of keys and, with VALUES, of values, and what is known of their slots.
template <class T, int D, int FORMAT, bool VALUES = true> struct Prefill {
    static constexpr int WARPS = 4, THREADS = 32 * WARPS, BLOCK_ROWS = ROWS * WARPS;
    static constexpr int KEYS = D > 128 || FORMAT != NATIVE ? 32 : 64;  // of a tile
    static constexpr int STAGES = VALUES ? 2 : 1;
    static constexpr int TABLES = VALUES ? 4 : 1;   // of tiles whose pages are known; three would do for two stages
    using L = Layout<D, FORMAT>;
    using Q = Queries<T, D, FORMAT>;

    // What is known of a tile's slots.
    struct Table {
        int64_t blocks[KEYS];  // where the keys are, in bytes; negative: nothing to read
        int positions[KEYS];
        uint32_t ranges[2][FORMAT == NATIVE ? 1 : KEYS];
    };
    struct Known {
        int64_t block;
        int position;
        uint32_t ranges[2];
    };

    static constexpr int TILE = KEYS * (L::KEY_STRIDE + (VALUES ? L::VALUE_STRIDE : 0));
    static constexpr int QUERY_BYTES = BLOCK_ROWS * Q::STRIDE * 2;
    static constexpr int TABLES_AT = QUERY_BYTES + STAGES * TILE;
    static constexpr int BYTES = TABLES_AT + TABLES * static_cast<int>(sizeof(Table));

    const PagedCall &call;
    const Sequence &sequence;
    int number, head;
    int first_slot, end_slot;  // that the block's rows see
    uint8_t *shared;

    __device__ Table &table(int tile) const { return reinterpret_cast<Table *>(shared + TABLES_AT)[tile % TABLES]; }
    __device__ const uint8_t *keys(int tile) const { return shared + QUERY_BYTES + tile % STAGES * TILE; }

    // A thread looks up one slot of a tile.
    __device__ Known look_up(int tile) const {
        int slot = tile * KEYS + static_cast<int>(threadIdx.x);
        bool inside = threadIdx.x < KEYS && slot >= first_slot && slot < end_slot;
        int64_t block = inside ? sequence.block(call, slot, 0, head) : -1;
        int position = slot;
        if (call.token_pos != nullptr) {
            position = inside ? static_cast<int>(slot_position(call, number, head, slot)) : -1;
            // What lies in an unused slot may be NaN.
            if (position < 0) block = -1;
        }
        int64_t to_values = static_cast<int64_t>(call.page_size) * call.kv_heads;
        int64_t value = block < 0 ? -1 : block + to_values;
        return {block, position, {load_range<FORMAT>(call.scales, block), load_range<FORMAT>(call.scales, value)}};
    }

    __device__ void keep(int tile, const Known &known) const {
        if (threadIdx.x >= KEYS) return;
        Table &to = table(tile);
        to.blocks[threadIdx.x] = known.block * L::BYTES;
        to.positions[threadIdx.x] = known.position;
        if constexpr (FORMAT != NATIVE) {
            for (int i = 0; i < 2; i++) to.ranges[i][threadIdx.x] = known.ranges[i];
        }
    }

    __device__ void copy(int tile) const {
        constexpr int CHUNKS = L::BYTES / 16;
        const Table &from_table = table(tile);
        uint32_t to = mma::shared_address(keys(tile));
        int64_t to_values = static_cast<int64_t>(call.page_size) * call.kv_heads * L::BYTES;
#pragma unroll 4
        for (int index = threadIdx.x; index < KEYS * CHUNKS; index += THREADS) {
            int key = index / CHUNKS, chunk = index % CHUNKS;
            int64_t block = from_table.blocks[key];
            const uint8_t *from = static_cast<const uint8_t *>(call.pool) + (block < 0 ? 0 : block) + chunk * 16;
            mma::copy_async(to + L::key_at(key, chunk * 16), from, block >= 0);
            if constexpr (VALUES) {
                mma::copy_async(to + KEYS * L::KEY_STRIDE + L::value_at(key, chunk * 16), from + to_values, block >= 0);
            }
        }
    }
};

template <class T, int D, int FORMAT> __device__ void prefill(const PagedCall &call) {
    using P = Prefill<T, D, FORMAT>;
    extern __shared__ __align__(128) uint8_t shared[];
#if __CUDA_ARCH__ >= 900
    wait_for_previous();
    launch_dependents();
#endif
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32, group = call.query_heads / call.kv_heads;
    int head = static_cast<int>(blockIdx.x % call.kv_heads);
    int64_t index = blockIdx.x / call.kv_heads;
    // A sequence has one block more than its rows can fill: as parts_before.
    auto before = [&](int number) {
        return clamp64(call.row_offsets[number], 0, call.total_rows) * group / P::BLOCK_ROWS + number;
    };
    FoundSequence found(call, index, before);
    if (found.number < 0) return;
    const Sequence &sequence = found.sequence;
    int number = found.number;
    if (sequence.rows == 0 || is_decode(sequence.rows, group)) return;
    int total = sequence.rows * group;
    // The last rows see the most keys: they begin first.
    int64_t from_end = index - found.before;
    int blocks = (total + P::BLOCK_ROWS - 1) / P::BLOCK_ROWS;
    if (from_end >= blocks) return;
    int first_row = (blocks - 1 - static_cast<int>(from_end)) * P::BLOCK_ROWS;

    Parts all(call, sequence);
    int first_slot = 0, end_slot = all.end_slot;
    if (call.token_pos == nullptr) {
        int first = sequence.cached + first_row / group;
        int last = sequence.cached + (min(first_row + P::BLOCK_ROWS, total) - 1) / group;
        end_slot = min(end_slot, last + 1);
        if (call.window > 0) first_slot = static_cast<int>(clamp64(first + 1 - call.window, 0, end_slot));
    }
    P block{call, sequence, number, head, first_slot, end_slot, shared};
    int tile = first_slot / P::KEYS, end = (end_slot + P::KEYS - 1) / P::KEYS;
    block.keep(tile, block.look_up(tile));
    block.keep(tile + 1, block.look_up(tile + 1));
    __syncthreads();
    if (tile < end) block.copy(tile);
    mma::commit_copies();

    BlockRows rows{call, sequence, head, first_row};
    T *queries = reinterpret_cast<T *>(shared);
    rows.template load_queries<T, D, P::BLOCK_ROWS, P::Q::STRIDE, P::THREADS>(queries);
    Row own[2];
    for (int i = 0; i < 2; i++) own[i] = rows.load(warp * ROWS + lane / 4 + 8 * i);
    // The positions of the warp's rows, where there are no slots of heads.
    int warp_row = first_row + warp * ROWS;
    int warp_first = sequence.cached + warp_row / group;
    int warp_last = warp_row < total ? sequence.cached + (min(warp_row + ROWS, total) - 1) / group : -1;
    __syncthreads();

    Queries<T, D, FORMAT> query(queries + warp * ROWS * P::Q::STRIDE);
    Attention<T, D, FORMAT, P::KEYS> attention;
    Scoring scoring(call);
    attention.clear();
    bool by_slots = call.token_pos != nullptr, plain = scoring.plain && !by_slots;
#pragma unroll 1
    for (; tile < end; tile++) {
        mma::wait_copies<0>();
        __syncthreads();
        if (tile + 1 < end) block.copy(tile + 1);
        mma::commit_copies();
        auto known = block.look_up(tile + 2);
        int from = tile * P::KEYS;
        bool seen = by_slots || (from <= warp_last && (scoring.window == INT32_MAX || warp_first - (from + P::KEYS - 1) < scoring.window));
        if (seen) {
            const uint8_t *keys = block.keys(tile), *values = keys + P::KEYS * Layout<D, FORMAT>::KEY_STRIDE;
            const auto &table = block.table(tile);
            auto position = [&](int key) { return table.positions[key]; };
            auto range = [&](int which, int key) { return open_range(table.ranges[which][key]); };
            bool whole = from + P::KEYS <= warp_first + 1 && warp_last - from < scoring.window;
            attention.add(plain && whole, query, keys, values, scoring, own, position, range);
        }
        block.keep(tile + 2, known);
    }
    mma::wait_copies<0>();
    attention.finish();
    for (int i = 0; i < 2; i++) {
        int row = warp * ROWS + lane / 4 + 8 * i;
        if (!rows.has(row)) continue;
        float most = attention.most[i], all_weights = attention.total[i];
        float factor = join_sink<T>(call, rows.query_head(row), most, all_weights);
        int64_t place = static_cast<int64_t>(rows.token(row)) * call.query_heads + rows.query_head(row);
        if (call.row_sums != nullptr && (lane & 3) == 0) reinterpret_cast<float2 *>(call.row_sums)[place] = {most, all_weights};
        T *to = static_cast<T *>(call.output) + place * D;
        attention.each(i, [&](int first, const auto &numbers) {
            uint32_t *pairs = reinterpret_cast<uint32_t *>(to + first);
#pragma unroll
            for (int j = 0; j < static_cast<int>(sizeof(numbers) / 8); j++) {
                pairs[j] = Pack<T>::of(share_of(numbers[j * 2] * factor, all_weights),
                                       share_of(numbers[j * 2 + 1] * factor, all_weights));
            }
        });
    }
}

}  // namespace paged
}  // namespace pagoda
