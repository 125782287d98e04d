// One call of PagedAttention: softmax attention over pages, with the append of new tokens. How every kernel reads the index
// tensors: clamped, so that no value in them makes a kernel read or write outside its tensors.
#pragma once

#include <cstdint>

#include "common/kv_block.cuh"
#include "common/mirrored.cuh"

namespace pagoda {

struct PagedCall {
    const void *query;       // [T, Hq, D]
    const void *key;         // [T, Hkv, D]
    const void *value;       // [T, Hkv, D]
    void *output;            // [T, Hq, D]
    void *pool;              // [pages, 2, page_size, Hkv, D], or codes
    __half *scales;          // [pages, 2, page_size, Hkv, 2 or 1]; null: native
    float *key_weights;      // [B, Hkv, weights_len]; null: not asked for
    float *row_sums;         // [T, Hq, 2]: the largest score and the sum of weights; null without key_weights
    float *partials;         // of split-KV (paged_parts.cuh); null where no kernel splits
    const int *row_offsets;
    const int *cached_len;
    const int *page_indptr;
    const int *page_ids;
    const int *positions;    // null: rows stand behind their cached tokens
    const float *cos;        // [position_rows, half_width]; null: no rotation
    const float *sin;
    const void *sinks;       // [Hq]; null: none
    const float *slopes;     // [Hq]; null: none
    const int *write_slots;  // [T, Hkv]; null: slots are positions
    const int *token_pos;    // [B, Hkv, slot_len]
    int64_t partial_count;   // parts that `partials` has memory for
    int64_t pool_pages;
    int64_t window;          // 0: unlimited
    int sequences;
    int total_rows;
    int query_heads;
    int kv_heads;
    int head_size;
    int page_size;
    int page_entries;
    int position_rows;
    int half_width;
    int interleaved;
    int format;
    int slot_len;
    int weights_len;
    float scale;
    float softcap;           // 0: none
};
PAGODA_MIRRORED(llm, PagedCall)

__device__ inline int64_t clamp64(int64_t value, int64_t low, int64_t high) {
    return value < low ? low : value > high ? high : value;
}

// One sequence of a call.
struct Sequence {
    int row;            // its first row
    int rows;
    int cached;
    const int *pages;
    int page_count;

    // Where a slot's block of a head begins in the pool, counted in blocks: which is 0 for keys, 1 for values. Negative: there
    // is no such page.
    __device__ int64_t block(const PagedCall &call, int slot, int which, int head) const {
        if (slot < 0 || slot / call.page_size >= page_count) return -1;
        int64_t page = pages[slot / call.page_size];
        if (page < 0 || page >= call.pool_pages) return -1;
        return ((page * 2 + which) * call.page_size + slot % call.page_size) * call.kv_heads + head;
    }
};

__device__ inline Sequence load_sequence(const PagedCall &call, int number) {
    Sequence sequence;
    sequence.row = static_cast<int>(clamp64(call.row_offsets[number], 0, call.total_rows));
    sequence.rows = static_cast<int>(clamp64(call.row_offsets[number + 1], sequence.row, call.total_rows)) - sequence.row;
    int first = static_cast<int>(clamp64(call.page_indptr[number], 0, call.page_entries));
    sequence.page_count = static_cast<int>(clamp64(call.page_indptr[number + 1], first, call.page_entries)) - first;
    sequence.pages = call.page_ids + first;
    // So that the number of a slot is an int, too.
    int64_t room = clamp64(static_cast<int64_t>(sequence.page_count) * call.page_size, 0, INT32_MAX - call.total_rows);
    sequence.cached = static_cast<int>(clamp64(call.cached_len[number], 0, room));
    return sequence;
}

// The sequence that a row belongs to: the last whose rows begin at or before it. -1: none.
__device__ inline int sequence_of(const PagedCall &call, int row) {
    int low = 0, high = call.sequences;
    while (low < high) {
        int middle = (low + high) / 2;
        if (call.row_offsets[middle + 1] > row) high = middle;
        else low = middle + 1;
    }
    return low < call.sequences && call.row_offsets[low] <= row ? low : -1;
}

__device__ inline int slot_count(const PagedCall &call, const Sequence &sequence) {
    return call.token_pos != nullptr ? call.slot_len : sequence.cached + sequence.rows;
}

// The position of the token in a slot; negative: there is none.
__device__ inline int64_t slot_position(const PagedCall &call, int number, int head, int slot) {
    if (call.token_pos == nullptr) return slot;
    return call.token_pos[(static_cast<int64_t>(number) * call.kv_heads + head) * call.slot_len + slot];
}

__device__ inline int64_t row_position(const PagedCall &call, const Sequence &sequence, int row) {
    if (call.token_pos != nullptr && call.positions != nullptr) return call.positions[row];
    return static_cast<int64_t>(sequence.cached) + row - sequence.row;
}

__device__ inline bool sees(const PagedCall &call, int64_t position, int64_t slot) {
    return slot >= 0 && slot <= position && (call.window == 0 || position - slot < call.window);
}

// Number `index` of a head of a row, rotated by the row's position.
template <class T>
__device__ inline float rotated(const PagedCall &call, const T *head, int row, int index) {
    float own = wide(head[index]);
    if (call.cos == nullptr || index >= 2 * call.half_width) return own;
    int pair = call.interleaved ? index / 2 : index % call.half_width;
    bool second = call.interleaved ? index % 2 : index >= call.half_width;
    int other_index = call.interleaved ? index ^ 1 : second ? index - call.half_width : index + call.half_width;
    int64_t position = clamp64(call.positions[row], 0, call.position_rows - 1);
    float cosine = call.cos[position * call.half_width + pair], sine = call.sin[position * call.half_width + pair];
    float other = wide(head[other_index]);
    // Without fused multiply-add: the bits of the CPU's rotation, which are stored.
    return second ? __fadd_rn(__fmul_rn(own, cosine), __fmul_rn(other, sine))
                  : __fsub_rn(__fmul_rn(own, cosine), __fmul_rn(other, sine));
}

// Eight numbers of a head of a row from `column` on, rotated, in T: whatever the rotation. Apart, so that what calls it stays
// small: the instruction cache is.
template <class T> __device__ __noinline__ uint4 rotated_numbers(const PagedCall &call, const T *head, int row, int column) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        pairs[i] = Pack<T>::of(rotated(call, head, row, column + 2 * i), rotated(call, head, row, column + 2 * i + 1));
    }
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

// What eight numbers of a row from `column` on are turned by: `own * cosine - other * sine`, where `other` is the other number of
// the pair.
struct Angles {
    float cosine[8], sine[8];

    Angles() = default;

    // Whether they can be loaded by 16 bytes.
    __device__ static bool suit(const PagedCall &call) {
        return call.half_width % 8 == 0 &&
               (reinterpret_cast<uintptr_t>(call.cos) | reinterpret_cast<uintptr_t>(call.sin)) % 16 == 0;
    }

    // The row of the tables for a row of the call.
    __device__ static int64_t position(const PagedCall &call, int row) {
        return clamp64(call.positions[row], 0, call.position_rows - 1);
    }

    __device__ Angles(const PagedCall &call, int64_t position, int column) {
        bool second = !call.interleaved && column >= call.half_width;
        int pair = call.interleaved ? column / 2 : second ? column - call.half_width : column;
        const float4 *cos = reinterpret_cast<const float4 *>(call.cos + position * call.half_width + pair);
        const float4 *sin = reinterpret_cast<const float4 *>(call.sin + position * call.half_width + pair);
        float4 c = cos[0], s = sin[0];
        if (call.interleaved) {
            float cosines[4] = {c.x, c.y, c.z, c.w}, sines[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
            for (int i = 0; i < 8; i++) cosine[i] = cosines[i / 2], sine[i] = i % 2 == 0 ? sines[i / 2] : -sines[i / 2];
        } else {
            float4 d = cos[1], t = sin[1];
            float cosines[8] = {c.x, c.y, c.z, c.w, d.x, d.y, d.z, d.w}, sines[8] = {s.x, s.y, s.z, s.w, t.x, t.y, t.z, t.w};
#pragma unroll
            for (int i = 0; i < 8; i++) cosine[i] = cosines[i], sine[i] = second ? -sines[i] : sines[i];
        }
    }

    // The other numbers of the pairs whose `own` are those of a head from `column` on.
    template <class T> __device__ static uint4 others(const PagedCall &call, const T *head, int column, uint4 own) {
        if (call.interleaved) {
            auto swapped = [](uint32_t pair) { return __byte_perm(pair, pair, 0x1032); };
            return {swapped(own.x), swapped(own.y), swapped(own.z), swapped(own.w)};
        }
        int half = call.half_width;
        return *reinterpret_cast<const uint4 *>(head + (column >= half ? column - half : column + half));
    }

    template <class T> __device__ uint4 turn(uint4 own, uint4 other) const {
        return {turned<T>(own.x, other.x, 0), turned<T>(own.y, other.y, 1), turned<T>(own.z, other.z, 2),
                turned<T>(own.w, other.w, 3)};
    }

    // Without fused multiply-add, as `rotated`.
    template <class T> __device__ uint32_t turned(uint32_t own, uint32_t other, int pair) const {
        float2 a = unpack<T>(own), b = unpack<T>(other);
        return Pack<T>::of(__fsub_rn(__fmul_rn(a.x, cosine[2 * pair]), __fmul_rn(b.x, sine[2 * pair])),
                           __fsub_rn(__fmul_rn(a.y, cosine[2 * pair + 1]), __fmul_rn(b.y, sine[2 * pair + 1])));
    }
};

// Eight numbers of a head of a row from `column` on, rotated where the call rotates them, in T. D is a multiple of 8.
template <class T> __device__ inline uint4 load_chunk(const PagedCall &call, const T *head, int row, int column) {
    bool rotates = call.cos != nullptr && column < 2 * call.half_width;
    if (rotates && !Angles::suit(call)) return rotated_numbers(call, head, row, column);
    uint4 own = *reinterpret_cast<const uint4 *>(head + column);
    return rotates ? Angles(call, Angles::position(call, row), column).turn<T>(own, Angles::others(call, head, column, own)) : own;
}

// The same of a query head.
template <class T>
__device__ inline uint4 load_query(const PagedCall &call, int row, int head, int column) {
    const T *from = static_cast<const T *>(call.query) + (static_cast<int64_t>(row) * call.query_heads + head) * call.head_size;
    return load_chunk(call, from, row, column);
}

}  // namespace pagoda
