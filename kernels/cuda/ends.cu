// The operators around the layers of a model: rows of candidates, and at its end rows of unit length.

#include "ends.cuh"
#include "rows.cuh"

namespace pagoda {
namespace ends {

// Not fmaxf, which takes epsilon for a length that is not a number.
__device__ inline float length_of(float squares, float epsilon) {
    float length = sqrtf(squares);
    return length < epsilon ? epsilon : length;
}

// A row of any size and anywhere, by reading it twice. A warp has it.
template <class T> __device__ void unit_of_any(const Unit &call) {
    int lane = threadIdx.x % 32;
    int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    dense::begin();
    if (row >= call.rows) return;
    const T *x = static_cast<const T *>(call.x) + row * call.size;
    float *y = call.y + row * call.size, squares = 0;
    for (int i = lane; i < call.size; i += 32) squares = fmaf(dense::wide(x[i]), dense::wide(x[i]), squares);
    float length = length_of(dense::sum_of_warp(squares), call.epsilon);
    for (int i = lane; i < call.size; i += 32) y[i] = dense::wide(x[i]) / length;
}

// WARPS warps have a row, VECTORS vectors of it in each lane. Several warps are a block.
template <class T, int WARPS, int VECTORS> __device__ void unit(const Unit &call) {
    using V = dense::Vector<T>;
    constexpr int LANES = 32 * WARPS, COUNT = V::COUNT;
    __shared__ float shared[WARPS];
    int lane = threadIdx.x % LANES;
    uint32_t row = blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
    dense::begin();
    if (row >= call.rows) return;
    int64_t first = static_cast<int64_t>(row) * call.size;
    const V *x = reinterpret_cast<const V *>(static_cast<const T *>(call.x) + first);
    float4 *y = reinterpret_cast<float4 *>(call.y + first);
    auto has = [&](int v) { return (v * LANES + lane) * COUNT < call.size; };
    V mine[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (has(v)) mine[v] = x[v * LANES + lane];
    }
    // Several sums, so that one addition need not wait for the one before it.
    float squares[4] = {};
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        float values[COUNT];
        if (!has(v)) continue;
        mine[v].open(values);
#pragma unroll
        for (int i = 0; i < COUNT; i++) squares[i % 4] = fmaf(values[i], values[i], squares[i % 4]);
    }
    float sum = dense::sum_of_unit<WARPS>(squares[0] + squares[1] + (squares[2] + squares[3]), shared);
    float length = length_of(sum, call.epsilon);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        float values[COUNT];
        if (!has(v)) continue;
        mine[v].open(values);
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            float4 four = {values[i] / length, values[i + 1] / length, values[i + 2] / length, values[i + 3] / length};
            y[((v * LANES + lane) * COUNT + i) / 4] = four;
        }
    }
}

// A warp has a row of one of the tensors. A row that there is not comes out as zeros.
template <class Unit> __device__ void select(const Select &call) {
    constexpr int LANES = 32, AT_ONCE = 4;
    int lane = threadIdx.x % LANES;
    uint32_t warp = blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES, parts = call.part_count;
    uint32_t to_row = warp / parts;
    dense::begin();
    if (to_row >= call.count) return;
    const auto &part = call.parts[warp - to_row * parts];
    int64_t row = call.index[to_row];
    bool inside = row >= 0 && row < call.rows;
    const Unit *from = static_cast<const Unit *>(part.from) + (inside ? row : 0) * part.units;
    Unit *to = static_cast<Unit *>(part.to) + static_cast<int64_t>(to_row) * part.units;
    for (int64_t first = lane; first < part.units; first += AT_ONCE * LANES) {
        Unit some[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            some[i] = inside && first + i * LANES < part.units ? from[first + i * LANES] : Unit{};
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (first + i * LANES < part.units) to[first + i * LANES] = some[i];
        }
    }
}

}  // namespace ends

#define UNIT(NAME, T, WARPS, VECTORS)                                                                                  \
    extern "C" __global__ void __launch_bounds__(128) unit_##NAME##_##WARPS##_##VECTORS(                               \
        const __grid_constant__ ends::Unit call) {                                                                     \
        ends::unit<T, WARPS, VECTORS>(call);                                                                           \
    }

#define KERNELS(NAME, T)                                                                                               \
    UNIT(NAME, T, 1, 1)                                                                                                \
    UNIT(NAME, T, 1, 2)                                                                                                \
    UNIT(NAME, T, 4, 1)                                                                                                \
    UNIT(NAME, T, 4, 2)                                                                                                \
    UNIT(NAME, T, 4, 4)                                                                                                \
    extern "C" __global__ void __launch_bounds__(128) unit_##NAME##_any(const __grid_constant__ ends::Unit call) {     \
        ends::unit_of_any<T>(call);                                                                                    \
    }

extern "C" __global__ void __launch_bounds__(128) select_16(const __grid_constant__ ends::Select call) {
    ends::select<uint4>(call);
}
extern "C" __global__ void __launch_bounds__(128) select_4(const __grid_constant__ ends::Select call) {
    ends::select<uint32_t>(call);
}
extern "C" __global__ void __launch_bounds__(128) select_2(const __grid_constant__ ends::Select call) {
    ends::select<uint16_t>(call);
}

KERNELS(f32, float)
KERNELS(f16, __half)
KERNELS(bf16, __nv_bfloat16)

}  // namespace pagoda
