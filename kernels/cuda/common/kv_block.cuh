// Blocks of a quantised pool, each the numbers of one head of one token: src/common/kv_format.rs says what they mean.
#pragma once

#include <cuda_fp8.h>

#include "common/convert.cuh"

namespace pagoda {

enum KvFormat : int { NATIVE = 0, INT8 = 1, INT4 = 2, FP8 = 3 };

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

__device__ inline float from_fp8(uint8_t code) { return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3))); }

// Writes block number `block` of `size` numbers; a warp calls it, and numbers[i] is element i * 32 + lane. The numbers become
// what the block holds of them.
template <int HELD>
__device__ inline void quantise_block(int format, uint8_t *codes, __half *scales, int64_t block, int size,
                                      float (&numbers)[HELD], int lane) {
    float least = INFINITY, largest = -INFINITY, magnitude = 0;
    for (int i = 0; i < HELD; i++) {
        if (i * 32 + lane < size) {
            least = fminf(least, numbers[i]);
            largest = fmaxf(largest, numbers[i]);
            magnitude = fmaxf(magnitude, fabsf(numbers[i]));
        }
    }
    if (format == FP8) {
        __half stored = __float2half_rn(fmaxf(__fdiv_rn(warp_max(magnitude), FP8_MAX), SMALLEST));
        if (lane == 0) scales[block] = stored;
        float scale = __half2float(stored);
        for (int i = 0; i < HELD; i++) {
            if (i * 32 + lane < size) {
                // Comparisons leave NaN as it is; fminf and fmaxf do not.
                float number = __fdiv_rn(numbers[i], scale);
                number = number > FP8_MAX ? FP8_MAX : number < -FP8_MAX ? -FP8_MAX : number;
                uint8_t code = __nv_cvt_float_to_fp8(number, __NV_SATFINITE, __NV_E4M3);
                codes[block * size + i * 32 + lane] = code;
                numbers[i] = __fmul_rn(from_fp8(code), scale);
            }
        }
        return;
    }
    float most = format == INT8 ? 255.0f : 15.0f;
    __half low_stored = __float2half_rn(-warp_max(-least));
    float low = __half2float(low_stored);
    __half stored = __float2half_rn(fmaxf(__fdiv_rn(__fsub_rn(warp_max(largest), low), most), SMALLEST));
    float scale = __half2float(stored);
    if (lane == 0) {
        scales[block * 2] = stored;
        scales[block * 2 + 1] = low_stored;
    }
    for (int i = 0; i < HELD; i++) {
        float code = fminf(fmaxf(rintf(__fdiv_rn(__fsub_rn(numbers[i], low), scale)), 0.0f), most);
        unsigned bits = static_cast<unsigned>(code);
        numbers[i] = fmaf(code, scale, low);
        // Neighbours of int4 are in neighbouring lanes.
        unsigned neighbour = __shfl_down_sync(~0u, bits, 1);
        if (i * 32 + lane >= size) continue;
        if (format == INT8) codes[block * size + i * 32 + lane] = static_cast<uint8_t>(bits);
        else if (lane % 2 == 0) codes[(block * size + i * 32 + lane) / 2] = static_cast<uint8_t>(bits | neighbour << 4);
    }
}

// What codes are multiplied by, and where they begin.
struct Range {
    float scale, low;
};

__device__ inline Range open_range(uint32_t stored) {
    float2 both = unpack<__half>(stored);
    return {both.x, both.y};
}

// The range of a block, as a register. Native pools have none.
template <int FORMAT> __device__ inline uint32_t load_range(const __half *scales, int64_t block) {
    if (FORMAT == NATIVE || block < 0) return 0;
    if (FORMAT == FP8) return __half_as_ushort(scales[block]);
    return reinterpret_cast<const uint32_t *>(scales)[block];
}

// Words of a pool.
template <int BYTES> struct Words {
    uint32_t words[BYTES / 4];

    Words() = default;

    __device__ explicit Words(const uint8_t *from) {
        if constexpr (BYTES == 16) {
            uint4 all = *reinterpret_cast<const uint4 *>(from);
            words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
        } else if constexpr (BYTES == 8) {
            uint2 all = *reinterpret_cast<const uint2 *>(from);
            words[0] = all.x, words[1] = all.y;
        } else {
            words[0] = *reinterpret_cast<const uint32_t *>(from);
        }
    }

    // Number `index` of quantised words; `index` is known at compile time.
    template <int FORMAT> __device__ float number(int index, Range range) const {
        if constexpr (FORMAT == FP8) {
            return from_fp8(static_cast<uint8_t>(words[index / 4] >> index % 4 * 8)) * range.scale;
        } else {
            // The code as the lowest bits of 2^23, which is then subtracted: conversions are slower.
            uint32_t bits = FORMAT == INT8 ? __byte_perm(words[index / 4], 0x4b000000u, 0x7650 | index % 4)
                                           : (words[index / 8] >> index % 8 * 4 & 15u) | 0x4b000000u;
            return fmaf(__uint_as_float(bits) - 8388608.0f, range.scale, range.low);
        }
    }

    // Numbers `index` and `index + 1` as a register.
    template <class T, int FORMAT> __device__ uint32_t pair(int index, Range range) const {
        if constexpr (FORMAT == NATIVE) return words[index / 2];
        else return Pack<T>::of(number<FORMAT>(index, range), number<FORMAT>(index + 1, range));
    }
};

}  // namespace pagoda
