// Split-KV: the slots of a sequence are cut into parts of `span_of` slots, each of which a block computes; the sums of the parts are
// added up afterwards, in their order. Where a part begins depends on the slot alone, so a row has the same bits whatever else
// is in the batch, and with how many others of its sequence it comes.
#pragma once

#include "llm/paged_attention.cuh"

namespace pagoda {
namespace paged {

// Slots of a part. Codes of 8 bits have longer ones: what a block does before its first tile takes as long for half the bytes.
__host__ __device__ constexpr int span_of(int format) { return format == INT8 ? 512 : 256; }
constexpr int DECODE_ROWS = 16;  // rows of a tile: tokens with the query heads of a group

// Whether a sequence is computed in parts: few tokens against many. It depends on the sequence's own numbers.
__device__ inline bool is_decode(int tokens, int group) { return tokens == 1 || tokens * group <= DECODE_ROWS; }

// Where the parts of a sequence begin among all. A sequence has one more than its pages can fill, so that they are disjoint
// however the pages are cut, and none has to count the others' tokens.
__device__ inline int64_t parts_before(const PagedCall &call, int number) {
    int64_t slots = clamp64(call.page_indptr[number], 0, call.page_entries) * call.page_size;
    // Divisions by constants.
    return (call.format == INT8 ? slots / span_of(INT8) : slots / span_of(NATIVE)) + number;
}

// The last of the call's sequences whose number `before(sequence)` is at most `index`, loaded; numbers do not fall. `number` is
// -1 where there is none. A whole warp calls it: each lane loads a sequence, so that it waits for memory once; where there are
// many, each lane looks at one of so many first.
struct FoundSequence {
    int number;
    int64_t before;
    Sequence sequence;

    template <class Before> __device__ FoundSequence(const PagedCall &call, int64_t index, Before begins) : number(-1) {
        constexpr int MANY = 64;
        int lane = threadIdx.x & 31, first = 0, each = call.sequences;
        if (call.sequences > MANY) {
            each = (call.sequences + 31) / 32;
            int sample = lane * each;
            unsigned those = __ballot_sync(~0u, sample < call.sequences && begins(sample) <= index);
            if (those == 0) return;
            first = (31 - __clz(those)) * each;
        }
        for (int base = first; base < min(first + each, call.sequences); base += 32) {
            int own_number = base + lane;
            int64_t own_before = INT64_MAX;
            Sequence own{};
            if (own_number < call.sequences) {
                own_before = begins(own_number);
                own = load_sequence(call, own_number);
            }
            unsigned those = __ballot_sync(~0u, own_before <= index);
            if (those == 0) break;
            int last = 31 - __clz(those);
            number = base + last;
            before = __shfl_sync(~0u, own_before, last);
            sequence.row = __shfl_sync(~0u, own.row, last);
            sequence.rows = __shfl_sync(~0u, own.rows, last);
            sequence.cached = __shfl_sync(~0u, own.cached, last);
            sequence.page_count = __shfl_sync(~0u, own.page_count, last);
            sequence.pages = call.page_ids + __shfl_sync(~0u, static_cast<int>(own.pages - call.page_ids), last);
            if (those != ~0u) break;
        }
    }
};

// The slots that a sequence's rows see, and the parts that they lie in.
struct Parts {
    int first_slot, end_slot;
    int first, end;

    __device__ Parts(const PagedCall &call, const Sequence &sequence) {
        int64_t room = static_cast<int64_t>(sequence.page_count) * call.page_size;
        end_slot = static_cast<int>(clamp64(slot_count(call, sequence), 0, room));
        first_slot = 0;
        if (call.token_pos == nullptr && call.window > 0) {
            first_slot = static_cast<int>(clamp64(sequence.cached + 1 - call.window, 0, end_slot));
        }
        auto part_of = [&](int slot) { return call.format == INT8 ? slot / span_of(INT8) : slot / span_of(NATIVE); };
        end = end_slot == 0 ? 1 : part_of(end_slot - 1) + 1;
        first = min(part_of(first_slot), end - 1);
    }
};

// The sums of parts in device memory: for each part, kv head and row the D sums, relative to the largest score; then for each the
// largest score and the sum of weights.
struct PartialSums {
    const PagedCall &call;
    int row_tiles;

    __device__ int64_t rows() const { return call.partial_count * call.kv_heads * row_tiles * DECODE_ROWS; }
    // `part` is counted over all sequences.
    __device__ int64_t place(int64_t part, int head, int row) const {
        int64_t kept = clamp64(part, 0, call.partial_count - 1);
        return (kept * call.kv_heads + head) * row_tiles * DECODE_ROWS + row;
    }
    __device__ float *sums(int64_t place) const { return call.partials + place * call.head_size; }
    __device__ float2 *weight(int64_t place) const {
        return reinterpret_cast<float2 *>(call.partials + rows() * call.head_size) + place;
    }
};

// The scores of decoded rows, as powers of two, behind the sums of parts: [sequences, kv heads, rows(), pitch()]. They are there
// where weights of slots are asked for.
struct KeptScores {
    const PagedCall &call;
    int row_tiles;

    // Tokens of a sequence with the query heads of a group that decode takes at most.
    __device__ int rows() const {
        int group = call.query_heads / call.kv_heads;
        return min(call.total_rows, max(DECODE_ROWS / group, 1)) * group;
    }
    __device__ int pitch() const { return (call.slot_len + 15) / 16 * 16; }
    __device__ float *of(int number, int head, int row) const {
        PartialSums partial{call, row_tiles};
        float *first = call.partials + partial.rows() * (call.head_size + 2);
        return first + ((static_cast<int64_t>(number) * call.kv_heads + head) * rows() + row) * pitch();
    }
};

}  // namespace paged
}  // namespace pagoda
