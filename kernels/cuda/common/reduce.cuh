// Vectors of elements, and sums over warps. A unit is what is added up together: a row, or one head of it.
#pragma once

#include "common/convert.cuh"

namespace pagoda {

__device__ inline float sum_of_warp(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

// Sixteen bytes of elements, to be converted to f32 when they are needed: as f32 they take twice the registers.
template <class T> struct Vector {
    static constexpr int COUNT = 8;
    uint4 words;

    __device__ void open(float (&to)[COUNT]) const {
        uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 two = unpack<T>(pairs[i]);
            to[2 * i] = two.x, to[2 * i + 1] = two.y;
        }
    }
    __device__ static Vector of(const float (&from)[COUNT]) {
        return {{Pack<T>::of(from[0], from[1]), Pack<T>::of(from[2], from[3]), Pack<T>::of(from[4], from[5]),
                 Pack<T>::of(from[6], from[7])}};
    }
};

template <> struct Vector<float> {
    static constexpr int COUNT = 4;
    float4 words;

    __device__ void open(float (&to)[COUNT]) const {
        to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
    }
    __device__ static Vector of(const float (&from)[COUNT]) { return {{from[0], from[1], from[2], from[3]}}; }
};

// Sums of UNITS units over the WARPS warps that have them; several warps are a block. `shared` is for these sums alone.
template <int WARPS, int UNITS> __device__ void sum_of_units(float (&values)[UNITS], float (&shared)[UNITS][WARPS]) {
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++) values[unit] = sum_of_warp(values[unit]);
    if constexpr (WARPS > 1) {
#pragma unroll
        for (int unit = 0; unit < UNITS; unit++) {
            if (threadIdx.x % 32 == 0) shared[unit][threadIdx.x / 32] = values[unit];
        }
        __syncthreads();
#pragma unroll
        for (int unit = 0; unit < UNITS; unit++) {
            values[unit] = shared[unit][0];
#pragma unroll
            for (int warp = 1; warp < WARPS; warp++) values[unit] += shared[unit][warp];
        }
    }
}

template <int WARPS> __device__ float sum_of_unit(float value, float (&shared)[1][WARPS]) {
    float values[1] = {value};
    sum_of_units<WARPS>(values, shared);
    return values[0];
}

}  // namespace pagoda
