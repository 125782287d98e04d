// The append of PagedAttention: where a row goes, and how its block is written, quantised or not.
#pragma once

#include <cuda_fp8.h>

#include "llm/paged_attention.cuh"

namespace pagoda {

constexpr int MOST = 16;  // elements of a head that a lane holds: D up to 512
constexpr float SMALLEST = 1.0f / 16777216.0f;
constexpr float FP8_MAX = 448.0f;

__device__ inline float warp_max(float value) {
    for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
    return value;
}

__device__ inline float warp_sum(float value) {
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

// Writes one head of one token into its block. A warp; numbers[i] is element i * 32 + lane.
template <class T>
__device__ void write_block(const PagedCall &call, int64_t block, const float *numbers, int lane) {
    int size = call.head_size;
    if (call.format == NATIVE) {
        for (int i = 0; i < MOST; i++) {
            if (i * 32 + lane < size) narrow(numbers[i], static_cast<T *>(call.pool) + block * size + i * 32 + lane);
        }
        return;
    }
    float least = INFINITY, largest = -INFINITY, magnitude = 0;
    for (int i = 0; i < MOST; i++) {
        if (i * 32 + lane < size) {
            least = fminf(least, numbers[i]);
            largest = fmaxf(largest, numbers[i]);
            magnitude = fmaxf(magnitude, fabsf(numbers[i]));
        }
    }
    uint8_t *codes = static_cast<uint8_t *>(call.pool);
    if (call.format == FP8) {
        __half stored = __float2half_rn(fmaxf(__fdiv_rn(warp_max(magnitude), FP8_MAX), SMALLEST));
        if (lane == 0) call.scales[block] = stored;
        float scale = __half2float(stored);
        for (int i = 0; i < MOST; i++) {
            if (i * 32 + lane < size) {
                // Comparisons leave NaN as it is; fminf and fmaxf do not.
                float number = __fdiv_rn(numbers[i], scale);
                number = number > FP8_MAX ? FP8_MAX : number < -FP8_MAX ? -FP8_MAX : number;
                codes[block * size + i * 32 + lane] = __nv_cvt_float_to_fp8(number, __NV_SATFINITE, __NV_E4M3);
            }
        }
        return;
    }
    float most = call.format == INT8 ? 255.0f : 15.0f;
    __half low_stored = __float2half_rn(-warp_max(-least));
    float low = __half2float(low_stored);
    __half stored = __float2half_rn(fmaxf(__fdiv_rn(__fsub_rn(warp_max(largest), low), most), SMALLEST));
    float scale = __half2float(stored);
    if (lane == 0) {
        call.scales[block * 2] = stored;
        call.scales[block * 2 + 1] = low_stored;
    }
    for (int i = 0; i < MOST; i++) {
        float code = fminf(fmaxf(rintf(__fdiv_rn(__fsub_rn(numbers[i], low), scale)), 0.0f), most);
        unsigned bits = static_cast<unsigned>(code);
        // Neighbours of int4 are in neighbouring lanes.
        unsigned neighbour = __shfl_down_sync(~0u, bits, 1);
        if (i * 32 + lane >= size) continue;
        if (call.format == INT8) codes[block * size + i * 32 + lane] = static_cast<uint8_t>(bits);
        else if (lane % 2 == 0) codes[(block * size + i * 32 + lane) / 2] = static_cast<uint8_t>(bits | neighbour << 4);
    }
}

// The slot that a row of a head is written to; negative: none.
__device__ inline int write_slot(const PagedCall &call, const Sequence &sequence, int row, int head) {
    if (call.write_slots == nullptr) return sequence.cached + row - sequence.row;
    int slot = call.write_slots[static_cast<int64_t>(row) * call.kv_heads + head];
    return slot < call.slot_len ? slot : -1;
}

// A warp appends the key or the value of one head of one row. `slot`: where it goes.
template <class T>
__device__ void append_row(const PagedCall &call, const Sequence &sequence, int row, int head, int which, int slot, int lane) {
    int64_t block = sequence.block(call, slot, which, head);
    if (block < 0) return;
    const T *from = static_cast<const T *>(which == 0 ? call.key : call.value) +
                    (static_cast<int64_t>(row) * call.kv_heads + head) * call.head_size;
    float numbers[MOST] = {};
    for (int i = 0; i < MOST; i++) {
        int index = i * 32 + lane;
        if (index < call.head_size) numbers[i] = which == 0 ? rotated(call, from, row, index) : wide(from[index]);
    }
    write_block<T>(call, block, numbers, lane);
}

}  // namespace pagoda
