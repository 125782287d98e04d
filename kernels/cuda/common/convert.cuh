// Conversions between f32 and the element types, and SiLU.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace pagoda {

__device__ inline float wide(float value) { return value; }
__device__ inline float wide(__half value) { return __half2float(value); }
__device__ inline float wide(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline void narrow(float value, float *to) { *to = value; }
__device__ inline void narrow(float value, __half *to) { *to = __float2half_rn(value); }
__device__ inline void narrow(float value, __nv_bfloat16 *to) { *to = __float2bfloat16_rn(value); }

template <class T> __device__ float2 unpack(uint32_t pair);
template <> __device__ inline float2 unpack<__half>(uint32_t pair) {
    return __half22float2(*reinterpret_cast<__half2 *>(&pair));
}
// Written out: with the library's function each half gets a register of its own before it is needed.
template <> __device__ inline float2 unpack<__nv_bfloat16>(uint32_t pair) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

// x·sigmoid(x) from half of x: x·(0.5 + 0.5·tanh(x/2)), with the hardware's tanh.
__device__ inline float silu_of_half(float half) {
    float tanh;
    asm("tanh.approx.f32 %0, %1;" : "=f"(tanh) : "f"(half));
    return fmaf(half, tanh, half);
}

template <class T> struct Pack;

template <> struct Pack<__nv_bfloat16> {
    __device__ static uint32_t of(float low, float high) {
        __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<uint32_t *>(&pair);
    }
};

template <> struct Pack<__half> {
    __device__ static uint32_t of(float low, float high) {
        __half2 pair = __floats2half2_rn(low, high);
        return *reinterpret_cast<uint32_t *>(&pair);
    }
};

}  // namespace pagoda
