// HstuUnit: rows divided by their Euclidean length (L2 normalisation).

#include "common/dependent_launch.cuh"
#include "common/mirrored.cuh"
#include "common/reduce.cuh"

namespace pagoda {
namespace unit {

// One call.
struct Unit {
    const void *x;  // [rows, size]
    float *y;       // as x
    int64_t rows;
    int size;
    float epsilon;
};
PAGODA_MIRRORED(hstu, Unit)

// Not fmaxf, which would return epsilon for NaN.
__device__ inline float length_of(float squares, float epsilon) {
    float length = sqrtf(squares);
    return length < epsilon ? epsilon : length;
}

// A row of any size and alignment, read twice. One warp for each.
template <class T> __device__ void unit_of_any(const Unit &call) {
    int lane = threadIdx.x % 32;
    int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    begin();
    if (row >= call.rows) return;
    const T *x = static_cast<const T *>(call.x) + row * call.size;
    float *y = call.y + row * call.size, squares = 0;
    for (int i = lane; i < call.size; i += 32) squares = fmaf(wide(x[i]), wide(x[i]), squares);
    float length = length_of(sum_of_warp(squares), call.epsilon);
    for (int i = lane; i < call.size; i += 32) y[i] = wide(x[i]) / length;
}

// Four elements, 16 bytes of f32: a warp's accesses are coalesced.
template <class T> __device__ inline float4 four_of(const T *from) {
    if constexpr (sizeof(T) == sizeof(float)) {
        return *reinterpret_cast<const float4 *>(from);
    } else {
        uint2 words = *reinterpret_cast<const uint2 *>(from);
        float2 low = unpack<T>(words.x), high = unpack<T>(words.y);
        return {low.x, low.y, high.x, high.y};
    }
}

// WARPS warps have a row, VECTORS times 16 bytes of it in each lane. Several warps are a block.
template <class T, int WARPS, int VECTORS> __device__ void unit(const Unit &call) {
    constexpr int LANES = 32 * WARPS, FOURS = VECTORS * Vector<T>::COUNT / 4;
    __shared__ float shared[1][WARPS];
    int lane = threadIdx.x % LANES;
    uint32_t row = blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
    begin();
    if (row >= call.rows) return;
    const T *x = static_cast<const T *>(call.x) + static_cast<int64_t>(row) * call.size;
    float *y = call.y + static_cast<int64_t>(row) * call.size;
    auto at = [&](int f) { return (f * LANES + lane) * 4; };
    float4 mine[FOURS];
#pragma unroll
    for (int f = 0; f < FOURS; f++) mine[f] = at(f) < call.size ? four_of(x + at(f)) : float4{0, 0, 0, 0};
    // Four independent sums hide the latency of the additions.
    float4 squares{};
#pragma unroll
    for (int f = 0; f < FOURS; f++) {
        squares.x = fmaf(mine[f].x, mine[f].x, squares.x), squares.y = fmaf(mine[f].y, mine[f].y, squares.y);
        squares.z = fmaf(mine[f].z, mine[f].z, squares.z), squares.w = fmaf(mine[f].w, mine[f].w, squares.w);
    }
    float sum = sum_of_unit<WARPS>(squares.x + squares.y + (squares.z + squares.w), shared);
    float length = length_of(sum, call.epsilon);
#pragma unroll
    for (int f = 0; f < FOURS; f++) {
        if (at(f) >= call.size) continue;
        float4 four = {mine[f].x / length, mine[f].y / length, mine[f].z / length, mine[f].w / length};
        *reinterpret_cast<float4 *>(y + at(f)) = four;
    }
}

}  // namespace unit

#define UNIT(NAME, T, WARPS, VECTORS)                                                                                  \
    extern "C" __global__ void __launch_bounds__(128) unit_##NAME##_##WARPS##_##VECTORS(                               \
        const __grid_constant__ unit::Unit call) {                                                                     \
        unit::unit<T, WARPS, VECTORS>(call);                                                                           \
    }

#define KERNELS(NAME, T)                                                                                               \
    UNIT(NAME, T, 1, 1)                                                                                                \
    UNIT(NAME, T, 1, 2)                                                                                                \
    UNIT(NAME, T, 4, 1)                                                                                                \
    UNIT(NAME, T, 4, 2)                                                                                                \
    UNIT(NAME, T, 4, 4)                                                                                                \
    extern "C" __global__ void __launch_bounds__(128) unit_##NAME##_any(const __grid_constant__ unit::Unit call) {     \
        unit::unit_of_any<T>(call);                                                                                    \
    }

KERNELS(f32, float)
KERNELS(f16, __half)
KERNELS(bf16, __nv_bfloat16)

}  // namespace pagoda
