// PagedAttention of sequences with few new tokens (decode), by the tensor cores of every chip since sm_80, over pages of
// every format.
//
// A block has one kv head of a part of a sequence (split-KV, paged_parts.cuh). Each of its four warps walks over a quarter of the slots in
// tiles of 16, with a ring of tiles in shared memory of its own: warps do not wait for one another before the end. The block
// whose slots the new tokens go to appends them first. `combine` adds the parts up.
#pragma once

#include "common/dependent_launch.cuh"
#include "llm/paged_append.cuh"
#include "llm/paged_parts.cuh"
#include "llm/paged_softmax.cuh"

namespace pagoda {
namespace paged {

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int KEYS = 16;                    // of a tile
template <int FORMAT> constexpr int SHARE = span_of(FORMAT) / WARPS;  // slots of a warp
template <int FORMAT> constexpr int TILES = SHARE<FORMAT> / KEYS;

// Whether blocks are made small, so that four of them have a multiprocessor: what they read is half of what native pages have, and the
// rest of their time is latency. Queries are not kept in registers then.
template <int D, int FORMAT> constexpr bool CROWDED = D == 128 && FORMAT == INT8;

// Blocks that a multiprocessor has at once, at least. FEW: of a launch with a block for each multiprocessor at most, whose warps fetch
// all their tiles at once; Hopper alone has the shared memory.
template <int D, int FORMAT, bool FEW = false> constexpr int blocks_of() {
    if (FEW) return 1;
    return D <= 64 || CROWDED<D, FORMAT> ? 4 : D <= 128 ? 3 : 1;
}

// What a warp looked up of its slots.
template <int FORMAT> struct __align__(16) Slots {
    const uint8_t *keys[SHARE<FORMAT>];  // null: nothing to read
    int positions[SHARE<FORMAT>];
    uint32_t ranges[2][FORMAT == NATIVE ? 1 : SHARE<FORMAT>];
};

// Shared memory of a block: the queries, then of each warp what it looked up, then the rings of tiles, where the warps' sums meet
// in the end.
template <int D, int FORMAT, bool FEW> struct Memory {
    using L = Layout<D, FORMAT>;
    static constexpr int TILE = KEYS * (L::KEY_STRIDE + L::VALUE_STRIDE);
    // As few as let several blocks have a multiprocessor, or one.
    static constexpr int STAGES = !FEW && (TILE > 6 * 1024 || CROWDED<D, FORMAT>) ? 2 : 4;
    static constexpr int RING = STAGES * TILE;
    static constexpr int SUM_STRIDE = D + 4;
    static constexpr int MERGE = WARPS * ROWS * SUM_STRIDE * 4;
    static constexpr int QUERIES = ROWS * (D + 8) * 2;
    static constexpr int RINGS_AT = QUERIES + WARPS * static_cast<int>(sizeof(Slots<FORMAT>));
    static constexpr int BYTES = RINGS_AT + (WARPS * RING > MERGE ? WARPS * RING : MERGE);
};

template <class T, int D, int FORMAT, bool FEW> struct Decode {
    using L = Layout<D, FORMAT>;
    using M = Memory<D, FORMAT, FEW>;

    const PagedCall &call;
    const Sequence &sequence;
    int number, head, first_slot, end_slot;
    int begin;                 // of the warp's slots
    Slots<FORMAT> &slots;      // of the warp, as the ring
    uint8_t *ring;
    bool complete;             // there is something to read in each of the warp's slots
    float of_scales;           // the largest scale of its values, where they are quantised

    __device__ void look_up() {
        int lane = threadIdx.x & 31;
        complete = true;
        of_scales = 0;
        int64_t to_values = static_cast<int64_t>(call.page_size) * call.kv_heads;
        // All pages, then all ranges: each a single wait for memory.
        constexpr int EACH = SHARE<FORMAT> / 32;
        int64_t blocks[EACH];
        int positions[EACH];
        uint32_t ranges[2][FORMAT == NATIVE ? 1 : EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int slot = begin + i * 32 + lane;
            bool inside = slot >= first_slot && slot < end_slot;
            blocks[i] = inside ? sequence.block(call, slot, 0, head) : -1;
            positions[i] = slot;
            if (call.token_pos != nullptr) {
                positions[i] = inside ? static_cast<int>(slot_position(call, number, head, slot)) : -1;
                // What lies in an unused slot may be NaN.
                if (positions[i] < 0) blocks[i] = -1;
            }
        }
        if constexpr (FORMAT != NATIVE) {
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                ranges[0][i] = load_range<FORMAT>(call.scales, blocks[i]);
                ranges[1][i] = load_range<FORMAT>(call.scales, blocks[i] < 0 ? -1 : blocks[i] + to_values);
            }
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int to = i * 32 + lane;
            slots.keys[to] = blocks[i] < 0 ? nullptr : static_cast<const uint8_t *>(call.pool) + blocks[i] * L::BYTES;
            complete = complete && blocks[i] >= 0;
            slots.positions[to] = positions[i];
            if constexpr (FORMAT != NATIVE) {
                slots.ranges[0][to] = ranges[0][i];
                slots.ranges[1][to] = ranges[1][i];
                of_scales = fmaxf(of_scales, open_range(ranges[1][i]).scale);
            }
        }
        complete = __all_sync(~0u, complete);
        if constexpr (FORMAT != NATIVE) of_scales = warp_max(of_scales);
        __syncwarp();
    }

    __device__ bool seen(int tile) const {
        int at = begin + tile * KEYS;
        return at < end_slot && at + KEYS > first_slot;
    }

    // The first tiles from number `first` on, of those that end at or before slot `end`. Returns how many are on their way.
    __device__ int start(int first, int end) const {
#pragma unroll 1
        for (; first < M::STAGES && begin + (first + 1) * KEYS <= end; first++) {
            if (seen(first)) copy(first);
            mma::commit_copies();
        }
        return first;
    }

    // The first of the warp's slots that the call writes, or a later one than it has.
    __device__ int first_new() const {
        if (call.write_slots == nullptr) return sequence.cached;
        unsigned first = INT_MAX;
        for (int row = threadIdx.x & 31; row < sequence.rows; row += 32) {
            int slot = write_slot(call, sequence, sequence.row + row, head);
            if (slot >= begin) first = min(first, static_cast<unsigned>(slot));
        }
        return static_cast<int>(__reduce_min_sync(~0u, first));
    }

    __device__ const uint8_t *keys(int tile) const { return ring + tile % M::STAGES * M::TILE; }

    __device__ void copy(int tile) const {
        if (complete) copy<true>(tile);
        else copy<false>(tile);
    }

    template <bool COMPLETE> __device__ void copy(int tile) const {
        constexpr int CHUNKS = L::BYTES / 16;
        int lane = threadIdx.x & 31;
        uint32_t to = mma::shared_address(keys(tile)), to_values = to + KEYS * L::KEY_STRIDE;
        int64_t behind = static_cast<int64_t>(call.page_size) * call.kv_heads * L::BYTES;
#pragma unroll
        for (int pass = 0; pass < (KEYS * CHUNKS + 31) / 32; pass++) {
            int index = pass * 32 + lane, key = index / CHUNKS, chunk = index % CHUNKS;
            if (KEYS * CHUNKS % 32 != 0 && key >= KEYS) continue;
            const uint8_t *from = slots.keys[tile * KEYS + key];
            if constexpr (COMPLETE) {
                mma::copy_async(to + L::key_at(key, chunk * 16), from + chunk * 16);
                mma::copy_async(to_values + L::value_at(key, chunk * 16), from + chunk * 16 + behind);
            } else {
                bool valid = from != nullptr;
                if (!valid) from = static_cast<const uint8_t *>(call.pool);
                mma::copy_async(to + L::key_at(key, chunk * 16), from + chunk * 16, valid);
                mma::copy_async(to_values + L::value_at(key, chunk * 16), from + chunk * 16 + behind, valid);
            }
        }
    }
};

// Queries in shared memory become f16, each by a power of two, so that no number is too large; and what a thread has to know of its two
// rows. A block: 8 threads a row.
template <class T, int D> __device__ void fold_queries(T *queries, FoldedQuery (&own)[2]) {
    constexpr int STRIDE = D + 8, NUMBERS = D / 8;
    __shared__ FoldedQuery folded[ROWS];
    int lane = threadIdx.x & 31, row = threadIdx.x / 8;
    T *from = queries + row * STRIDE + threadIdx.x % 8 * NUMBERS;
    float numbers[NUMBERS], sum = 0, scale = 1.0f;
#pragma unroll
    for (int i = 0; i < NUMBERS; i++) numbers[i] = wide(from[i]);
    if constexpr (!std::is_same<T, __half>::value) {
        float largest = 0;
#pragma unroll
        for (int i = 0; i < NUMBERS; i++) largest = fmaxf(largest, fabsf(numbers[i]));
        for (int step = 4; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
        // To between 1 and 2; infinity stays.
        scale = __int_as_float(min(max(__float_as_int(largest) & 0x7f800000, 1 << 23), 252 << 23));
        float inverse = 1.0f / scale;
#pragma unroll
        for (int i = 0; i < NUMBERS; i++) {
            __half number = __float2half_rn(numbers[i] * inverse);
            reinterpret_cast<__half *>(from)[i] = number;
            numbers[i] = __half2float(number);
        }
    }
#pragma unroll
    for (int i = 0; i < NUMBERS; i++) sum += numbers[i];
    for (int step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x % 8 == 0) folded[row] = {sum, scale};
    __syncthreads();
    for (int i = 0; i < 2; i++) own[i] = folded[lane / 4 + 8 * i];
}

// Appends the new tokens of a head whose slots are in a part.
template <class T, int D, int FORMAT>
__device__ void append_part(const PagedCall &call, const Sequence &sequence, int head, int part) {
    constexpr int SPAN = span_of(FORMAT);
    for (int task = threadIdx.x / 32; task < sequence.rows * 2; task += WARPS) {
        int row = sequence.row + task / 2, slot = write_slot(call, sequence, row, head);
        if (slot < part * SPAN || slot >= (part + 1) * SPAN) continue;
        append_row<T, D, FORMAT>(call, sequence, row, head, task % 2, slot, threadIdx.x & 31);
    }
}

// What a launch of `decode` is told, in bits: whether the blocks append; whether nothing in front of it on the stream writes the index
// tensors and the slots of cached tokens, so that a block fetches them while the kernel in front still runs.
// src/cuda/llm/paged_attention_sm80.rs has them too.
constexpr int APPENDS = 1, SETTLED = 2;

// A block: one part of a sequence, one kv head, one tile of its rows.
template <class T, int D, int FORMAT, bool FEW = false>
__device__ void decode(const PagedCall &call, int row_tiles, int flags) {
    using M = Memory<D, FORMAT, FEW>;
    constexpr int SPAN = span_of(FORMAT);
    extern __shared__ __align__(128) uint8_t shared[];
    const bool appends = flags & APPENDS, settled = flags & SETTLED;
#if __CUDA_ARCH__ >= 900
    if (!settled) wait_for_previous();
#endif
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    int head = static_cast<int>(blockIdx.x % call.kv_heads), rest = static_cast<int>(blockIdx.x / call.kv_heads);
    int first_row = rest % row_tiles * ROWS;
    int64_t index = rest / row_tiles;
    FoundSequence found(call, index, [&](int number) { return parts_before(call, number); });
    int number = found.number;
    Sequence sequence = number < 0 ? Sequence{} : found.sequence;
    int group = call.query_heads / call.kv_heads;
    Parts parts(call, sequence);
    // The last part first: it may have to append.
    int64_t ahead = number < 0 ? 0 : index - found.before;
    bool idle = number < 0 || sequence.rows == 0 || !is_decode(sequence.rows, group) || ahead >= parts.end - parts.first ||
                first_row >= sequence.rows * group;
    int part = parts.end - 1 - static_cast<int>(ahead);
    int rows = min(sequence.rows * group - first_row, ROWS);

    Decode<T, D, FORMAT, FEW> block{call,
                                    sequence,
                                    number,
                                    head,
                                    parts.first_slot,
                                    parts.end_slot,
                                    part * SPAN + warp * SHARE<FORMAT>,
                                    reinterpret_cast<Slots<FORMAT> *>(shared + M::QUERIES)[warp],
                                    shared + M::RINGS_AT + warp * M::RING};
    // Ranges of codes are written by the call itself, where new tokens go.
    const bool early = settled && (FORMAT == NATIVE || (call.write_slots == nullptr && (part + 1) * SPAN <= sequence.cached));
    int started = 0;
    if (early && !idle) {
        block.look_up();
        started = block.start(0, block.first_new());
    }
#if __CUDA_ARCH__ >= 900
    // In this order, and where a block has nothing to do too: the kernel behind may rely on all that is in front of this one.
    if (settled) wait_for_previous();
    launch_dependents();
#endif
    if (idle) return;
    // Packed rows: all heads of the group of one token, then the next token.
    auto token = [&](int row) { return sequence.row + (first_row + row) / group; };
    auto query_head = [&](int row) { return head * group + (first_row + row) % group; };
    const bool appending = appends && (call.write_slots != nullptr || (part + 1) * SPAN > sequence.cached);
    // Sixteen bytes for each thread: of the queries, and where the part gets new tokens, of their keys and values as they are stored
    // in native pages.
    constexpr int CHUNKS = D / 8, STRIDE = Queries<T, D, FORMAT>::STRIDE;
    T *queries = reinterpret_cast<T *>(shared);
    int query_chunks = rows * CHUNKS;
    int chunks = query_chunks + (FORMAT == NATIVE && appending ? sequence.rows * 2 * CHUNKS : 0);
#pragma unroll 1
    for (int chunk = threadIdx.x; chunk < chunks; chunk += THREADS) {
        // A row of the queries, or behind them a key or a value of a new token.
        int task = chunk / CHUNKS, column = chunk % CHUNKS * 8, appended = task - rows;
        const bool is_query = appended < 0, is_value = !is_query && appended % 2 == 1;
        int row = is_query ? token(task) : sequence.row + appended / 2;
        const void *of = is_query ? call.query : is_value ? call.value : call.key;
        int64_t heads = is_query ? call.query_heads : call.kv_heads, own = is_query ? query_head(task) : head;
        const T *from = static_cast<const T *>(of) + (row * heads + own) * D;
        uint4 numbers = is_value ? *reinterpret_cast<const uint4 *>(from + column) : load_chunk(call, from, row, column);
        if (is_query) {
            *reinterpret_cast<uint4 *>(queries + task * STRIDE + column) = numbers;
            continue;
        }
        int slot = write_slot(call, sequence, row, head);
        if (slot < part * SPAN || slot >= (part + 1) * SPAN) continue;
        int64_t to = sequence.block(call, slot, is_value, head);
        if (to >= 0) *reinterpret_cast<uint4 *>(static_cast<T *>(call.pool) + to * D + column) = numbers;
    }
    for (int chunk = query_chunks + threadIdx.x; chunk < ROWS * CHUNKS; chunk += THREADS) {
        *reinterpret_cast<uint4 *>(queries + chunk / CHUNKS * STRIDE + chunk % CHUNKS * 8) = uint4{};
    }
    if (appending) {
        if constexpr (FORMAT != NATIVE) append_part<T, D, FORMAT>(call, sequence, head, part);
        __syncthreads();
    }
    if (!early) block.look_up();
    block.start(started, INT_MAX);
    Row own[2];
    for (int i = 0; i < 2; i++) {
        int row = lane / 4 + 8 * i;
        bool valid = row < rows;
        own[i].position = valid ? static_cast<int>(row_position(call, sequence, token(row))) : -1;
        own[i].slope = valid && call.slopes != nullptr ? call.slopes[query_head(row)] * LOG2_E : 0.0f;
    }
    __syncthreads();

    constexpr bool FOLDED = FORMAT == INT8;
    using A = Attention<T, D, FORMAT, KEYS, FOLDED>;
    A attention;
    if constexpr (FOLDED) {
        fold_queries<T, D>(queries, attention.folded);
        // No scale is smaller than 2^-24, but slots may be empty.
        attention.of_scales = block.of_scales > 0 ? block.of_scales : 1.0f;
    }
    constexpr bool KEPT = D <= 128 && !CROWDED<D, FORMAT>;
    Queries<typename A::M, D, FORMAT, KEPT> query(reinterpret_cast<typename A::M *>(queries));
    Scoring scoring(call);
    attention.clear();
    bool plain = scoring.plain && call.token_pos == nullptr;
    // Of the thread's first row and first key of a tile. The second row is eight rows further.
    float *kept = nullptr;
    int pitch = 0;
    if (call.key_weights != nullptr) {
        KeptScores scores{call, row_tiles};
        pitch = scores.pitch();
        kept = scores.of(number, head, first_row + lane / 4) + block.begin + (lane & 3) * 2;
    }
#pragma unroll 1
    for (int tile = 0; tile < TILES<FORMAT>; tile++) {
        mma::wait_copies<M::STAGES - 1>();
        __syncwarp();
        if (block.seen(tile)) {
            const uint8_t *keys = block.keys(tile), *values = keys + KEYS * Layout<D, FORMAT>::KEY_STRIDE;
            auto position = [&](int key) { return block.slots.positions[tile * KEYS + key]; };
            auto range = [&](int which, int key) { return open_range(block.slots.ranges[which][tile * KEYS + key]); };
            // Rows stand at sequence.cached and behind it; what the others get does not matter.
            int from = block.begin + tile * KEYS;
            bool all = from + KEYS <= sequence.cached + 1 && sequence.cached + sequence.rows - 1 - from < scoring.window;
            auto keep = [&](int n, const float (&scores)[4]) {
                if (kept == nullptr) return;
                float *to = kept + tile * KEYS + n * 8;
                if (lane / 4 < rows) *reinterpret_cast<float2 *>(to) = {scores[0], scores[1]};
                if (lane / 4 + 8 < rows) *reinterpret_cast<float2 *>(to + 8 * pitch) = {scores[2], scores[3]};
            };
            attention.add(plain && all, query, keys, values, scoring, own, position, range, keep);
        }
        __syncwarp();
        if (tile + M::STAGES < TILES<FORMAT> && block.seen(tile + M::STAGES)) block.copy(tile + M::STAGES);
        mma::commit_copies();
    }
    mma::wait_copies<0>();
    attention.finish();

    // The warps' sums, relative to the largest score of all.
    __shared__ float most_of[WARPS][ROWS], total_of[WARPS][ROWS];
    if ((lane & 3) == 0) {
        for (int i = 0; i < 2; i++) {
            most_of[warp][lane / 4 + 8 * i] = attention.most[i];
            total_of[warp][lane / 4 + 8 * i] = attention.total[i];
        }
    }
    __syncthreads();
    float *merge = reinterpret_cast<float *>(shared + M::RINGS_AT);
    auto largest = [&](int row) {
        float most = most_of[0][row];
        for (int i = 1; i < WARPS; i++) most = fmaxf(most, most_of[i][row]);
        return most;
    };
    auto factor_of = [&](float most, float all) { return most == -INFINITY ? 0.0f : power_of_two(most - all); };
    for (int i = 0; i < 2; i++) {
        int row = lane / 4 + 8 * i;
        if (row >= rows) continue;
        float factor = factor_of(attention.most[i], largest(row));
        float *to = merge + (warp * ROWS + row) * M::SUM_STRIDE;
        attention.each(i, [&](int first, const auto &numbers) {
#pragma unroll
            for (int j = 0; j < static_cast<int>(sizeof(numbers) / 8); j++) {
                *reinterpret_cast<float2 *>(to + first + j * 2) = {numbers[j * 2] * factor, numbers[j * 2 + 1] * factor};
            }
        });
    }
    __syncthreads();
    PartialSums partial{call, row_tiles};
    bool alone = parts.end - parts.first == 1;
    for (int i = threadIdx.x; i < rows * D / 4; i += THREADS) {
        int row = i / (D / 4), column = i % (D / 4) * 4;
        float most = largest(row), total = 0;
        float4 sum = {};
#pragma unroll
        for (int j = 0; j < WARPS; j++) {
            total += total_of[j][row] * factor_of(most_of[j][row], most);
            float4 own = *reinterpret_cast<const float4 *>(merge + (j * ROWS + row) * M::SUM_STRIDE + column);
            sum.x += own.x, sum.y += own.y, sum.z += own.z, sum.w += own.w;
        }
        int64_t place = partial.place(found.before + part, head, first_row + row);
        if (column == 0 && (!alone || call.key_weights != nullptr)) *partial.weight(place) = {most, total};
        if (alone) {
            float factor = join_sink<T>(call, query_head(row), most, total);
            int64_t to = (static_cast<int64_t>(token(row)) * call.query_heads + query_head(row)) * D + column;
            auto share = [&](float sum) { return share_of(sum * factor, total); };
            *reinterpret_cast<uint2 *>(static_cast<T *>(call.output) + to) = {Pack<T>::of(share(sum.x), share(sum.y)),
                                                                              Pack<T>::of(share(sum.z), share(sum.w))};
        } else {
            *reinterpret_cast<float4 *>(partial.sums(place) + column) = sum;
        }
    }
}

// One row of one query head, whose parts are to be added up.
struct Combined {
    int64_t before;  // its sequence's first part
    int first, end;  // its parts; none where `first` is `end`
    int place;       // among the rows of a part
    int head;        // of the keys
    int row, query_head;

    // Number `index` of the call's rows and heads; or, with `per_sequence`, of as many rows of each sequence: calls with long
    // prompts have many rows that are not decoded. A whole warp calls it. It reads index tensors alone.
    __device__ static Combined find(const PagedCall &call, int64_t index, int per_sequence) {
        Combined own{};
        own.query_head = static_cast<int>(index % call.query_heads);
        int64_t at = index / call.query_heads;
        int number = -1;
        Sequence sequence{};
        if (per_sequence > 0) {
            if (at >= static_cast<int64_t>(call.sequences) * per_sequence) return own;
            number = static_cast<int>(at / per_sequence);
            sequence = load_sequence(call, number);
            own.row = sequence.row + static_cast<int>(at % per_sequence);
        } else {
            if (at >= call.total_rows) return own;
            own.row = static_cast<int>(at);
            // As where each sequence has a row.
            number = own.row < call.sequences ? own.row : -1;
            if (number >= 0) sequence = load_sequence(call, number);
            if (number < 0 || sequence.row != own.row || sequence.rows == 0) {
                FoundSequence found(call, at, [&](int number) { return static_cast<int64_t>(call.row_offsets[number]); });
                number = found.number;
                sequence = found.sequence;
            }
        }
        int group = call.query_heads / call.kv_heads;
        if (number < 0 || own.row < sequence.row || own.row >= sequence.row + sequence.rows) return own;
        Parts parts(call, sequence);
        if (!is_decode(sequence.rows, group) || parts.end - parts.first == 1) return own;
        own.before = parts_before(call, number);
        own.first = parts.first;
        own.end = parts.end;
        own.place = (own.row - sequence.row) * group + own.query_head % group;
        own.head = own.query_head / group;
        return own;
    }
};

// The parts of a group are added up one after the other, and then the groups: the same bits, whether one warp has all groups or
// several share them.
constexpr int GROUP = 16, LOADED = 8;  // parts of a group, and those that are loaded at once
constexpr int COMBINING = 8;           // warps of a block

// The sums of a row as a warp has them: lane and 32 lanes further four numbers each.
template <int D> struct RowSums {
    static constexpr int VECTORS = (D / 4 + 31) / 32;
    float4 at[VECTORS] = {};

    __device__ static bool has(int vector) { return D / 4 % 32 == 0 || vector * 32 + (threadIdx.x & 31) < D / 4; }
    __device__ static int column(int vector) { return (vector * 32 + (threadIdx.x & 31)) * 4; }

    __device__ void add(const RowSums &other, float factor) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            at[i] = {fmaf(other.at[i].x, factor, at[i].x), fmaf(other.at[i].y, factor, at[i].y),
                     fmaf(other.at[i].z, factor, at[i].z), fmaf(other.at[i].w, factor, at[i].w)};
        }
    }

    __device__ void load(const float *from) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if (has(i)) at[i] = *reinterpret_cast<const float4 *>(from + column(i));
        }
    }
};

// Adds up the parts of a row.
template <int D> struct Combining {
    using Sums = RowSums<D>;
    const PartialSums &partial;
    const Combined &own;
    float most = 0, total = 0;  // of all parts, when they are weighed
    bool weighed = false;

    __device__ int64_t place(int part) const { return partial.place(own.before + part, own.head, own.place); }
    __device__ float2 weight(int part) const { return *partial.weight(place(part)); }
    __device__ float factor_of(float score) const { return score == -INFINITY ? 0.0f : power_of_two(score - most); }

    __device__ void weigh() {
        if (weighed) return;
        int lane = threadIdx.x & 31;
        most = -INFINITY;
        for (int part = own.first + lane; part < own.end; part += 32) most = fmaxf(most, weight(part).x);
        most = warp_max(most);
        for (int part = own.first + lane; part < own.end; part += 32) total += weight(part).y * factor_of(weight(part).x);
        total = warp_sum(total);
        weighed = true;
    }

    // The sums of a group, by a warp.
    __device__ Sums group(int number) {
        int lane = threadIdx.x & 31, from = own.first + number * GROUP, end = min(from + GROUP, own.end);
        float score = from + lane < end ? weight(from + lane).x : -INFINITY;
        Sums sums;
#pragma unroll 1
        for (int begin = from; begin < end; begin += LOADED) {
            Sums parts[LOADED];
#pragma unroll
            for (int i = 0; i < LOADED; i++) {
                if (begin + i < end) parts[i].load(partial.sums(place(begin + i)));
            }
            // While they are on their way.
            weigh();
            float factor = factor_of(score);
#pragma unroll
            for (int i = 0; i < LOADED; i++) {
                float of_part = __shfl_sync(~0u, factor, begin + i - from);
                if (begin + i < end) sums.add(parts[i], of_part);
            }
        }
        return sums;
    }
};

// WIDE: a block has one row of one query head, and its warps share the groups: for few rows with many parts. Otherwise a warp
// has one.
template <class T, int D, bool WIDE> __device__ void combine(const PagedCall &call, int row_tiles, int per_sequence) {
    using Sums = RowSums<D>;
#if __CUDA_ARCH__ >= 900
    // `decode` has waited for all that is in front of it before this kernel could start: the kernel behind may fetch its weights
    // while parts are added up.
    launch_dependents();
#endif
    __shared__ float4 merge[WIDE ? COMBINING : 1][Sums::VECTORS][32];
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    int64_t index = WIDE ? blockIdx.x : static_cast<int64_t>(blockIdx.x) * COMBINING + warp;
    // The index tensors were there before the kernel in front began (`decode`).
    Combined own = Combined::find(call, index, per_sequence);
#if __CUDA_ARCH__ >= 900
    wait_for_previous();
#endif
    int groups = (own.end - own.first + GROUP - 1) / GROUP;
    bool shared = WIDE && groups > 1;
    if (groups == 0 || (WIDE && !shared && warp > 0)) return;
    PartialSums partial{call, row_tiles};
    Combining<D> combining{partial, own};
    Sums sums;
#pragma unroll 1
    for (int from = 0; from < groups; from += shared ? COMBINING : 1) {
        Sums group;
        if (from + (shared ? warp : 0) < groups) group = combining.group(from + (shared ? warp : 0));
        if (!shared) {
            sums.add(group, 1.0f);
            continue;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < Sums::VECTORS; i++) merge[warp][i][lane] = group.at[i];
        __syncthreads();
        for (int i = 0; i < min(COMBINING, groups - from); i++) {
#pragma unroll
            for (int j = 0; j < Sums::VECTORS; j++) group.at[j] = merge[i][j][lane];
            sums.add(group, 1.0f);
        }
    }
    if (shared && warp > 0) return;
    float most = combining.most, total = combining.total, factor = join_sink<T>(call, own.query_head, most, total);
    T *to = static_cast<T *>(call.output) + (static_cast<int64_t>(own.row) * call.query_heads + own.query_head) * D;
#pragma unroll
    for (int i = 0; i < Sums::VECTORS; i++) {
        if (!Sums::has(i)) continue;
        auto share = [&](float sum) { return share_of(sum * factor, total); };
        *reinterpret_cast<uint2 *>(to + Sums::column(i)) = {Pack<T>::of(share(sums.at[i].x), share(sums.at[i].y)),
                                                            Pack<T>::of(share(sums.at[i].z), share(sums.at[i].w))};
    }
}

}  // namespace paged
}  // namespace pagoda
