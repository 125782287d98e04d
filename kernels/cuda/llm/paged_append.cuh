// The append of PagedAttention: where a row goes, and how its block is written, quantised or not.
#pragma once

#include "llm/paged_attention.cuh"

namespace pagoda {

// Writes one head of one token into its block. A warp; numbers[i] is element i * 32 + lane.
template <class T, int HELD>
__device__ void write_block(const PagedCall &call, int format, int64_t block, int size, float (&numbers)[HELD], int lane) {
    if (format == NATIVE) {
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            if (i * 32 + lane < size) narrow(numbers[i], static_cast<T *>(call.pool) + block * size + i * 32 + lane);
        }
        return;
    }
    quantise_block(format, static_cast<uint8_t *>(call.pool), call.scales, block, size, numbers, lane);
}

// The slot that a row of a head is written to; negative: none.
__device__ inline int write_slot(const PagedCall &call, const Sequence &sequence, int row, int head) {
    if (call.write_slots == nullptr) return sequence.cached + row - sequence.row;
    int slot = call.write_slots[static_cast<int64_t>(row) * call.kv_heads + head];
    return slot < call.slot_len ? slot : -1;
}

// A warp appends the key or the value of one head of one row. `slot`: where it goes. D and FORMAT: the head size and the format,
// where they are known, so that all numbers are loaded at once; otherwise 0 and -1.
template <class T, int D = 0, int FORMAT = -1>
__device__ void append_row(const PagedCall &call, const Sequence &sequence, int row, int head, int which, int slot, int lane) {
    constexpr int HELD = D > 0 ? D / 32 : MOST;
    int size = D > 0 ? D : call.head_size;
    const T *from = static_cast<const T *>(which == 0 ? call.key : call.value) +
                    (static_cast<int64_t>(row) * call.kv_heads + head) * size;
    float numbers[HELD] = {};
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        int index = i * 32 + lane;
        if (index < size) numbers[i] = which == 0 ? rotated(call, from, row, index) : wide(from[index]);
    }
    int64_t block = sequence.block(call, slot, which, head);
    if (block >= 0) write_block<T>(call, FORMAT < 0 ? call.format : FORMAT, block, size, numbers, lane);
}

}  // namespace pagoda
