// The operators around the layers of a model: rows out of embedding tables, rows of unit length.

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
    begin();
    if (row >= call.rows) return;
    const T *x = static_cast<const T *>(call.x) + row * call.size;
    float *y = call.y + row * call.size, squares = 0;
    for (int i = lane; i < call.size; i += 32) squares = fmaf(dense::wide(x[i]), dense::wide(x[i]), squares);
    float length = length_of(dense::sum_of_warp(squares), call.epsilon);
    for (int i = lane; i < call.size; i += 32) y[i] = dense::wide(x[i]) / length;
}

// Four elements, which are 16 bytes of f32: so a warp reads and writes without gaps.
template <class T> __device__ inline float4 four_of(const T *from) {
    if constexpr (sizeof(T) == sizeof(float)) {
        return *reinterpret_cast<const float4 *>(from);
    } else {
        uint2 words = *reinterpret_cast<const uint2 *>(from);
        float2 low = dense::unpack<T>(words.x), high = dense::unpack<T>(words.y);
        return {low.x, low.y, high.x, high.y};
    }
}

// WARPS warps have a row, VECTORS times 16 bytes of it in each lane. Several warps are a block.
template <class T, int WARPS, int VECTORS> __device__ void unit(const Unit &call) {
    constexpr int LANES = 32 * WARPS, FOURS = VECTORS * dense::Vector<T>::COUNT / 4;
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
    // Several sums, so that one addition need not wait for the one before it.
    float4 squares{};
#pragma unroll
    for (int f = 0; f < FOURS; f++) {
        squares.x = fmaf(mine[f].x, mine[f].x, squares.x), squares.y = fmaf(mine[f].y, mine[f].y, squares.y);
        squares.z = fmaf(mine[f].z, mine[f].z, squares.z), squares.w = fmaf(mine[f].w, mine[f].w, squares.w);
    }
    float sum = dense::sum_of_unit<WARPS>(squares.x + squares.y + (squares.z + squares.w), shared);
    float length = length_of(sum, call.epsilon);
#pragma unroll
    for (int f = 0; f < FOURS; f++) {
        if (at(f) >= call.size) continue;
        float4 four = {mine[f].x / length, mine[f].y / length, mine[f].z / length, mine[f].w / length};
        *reinterpret_cast<float4 *>(y + at(f)) = four;
    }
}

// Below 0 there is no key, which is the last row; keys beyond the table have the one before it.
__device__ inline const float *of_key(const Lookup &lookup, int64_t row, int width) {
    int64_t key = lookup.index[row], last = lookup.rows - 1;
    return lookup.table + (key < 0 ? last : key < last ? key : last - 1) * width;
}

__device__ inline const float *of_bucket(const Lookup &lookup, int64_t row, int width) {
    int64_t bucket = lookup.index[row], last = lookup.rows - 1;
    return lookup.table + (bucket < 0 ? 0 : bucket < last ? bucket : last) * width;
}

template <int COUNT> __device__ inline void read(const float *from, float (&to)[COUNT]) {
    if constexpr (COUNT % 4 == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            float4 four = *reinterpret_cast<const float4 *>(from + i);
            to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i++) to[i] = from[i];
    }
}

// A thread has COUNT elements of a row. Sums are in the order of the tables, and rounded at every step as one operator
// after the other would: nothing is contracted into a multiplication.
template <class T, int COUNT> __device__ void embed(const Embed &call) {
    constexpr int AT_ONCE = 4;
    uint32_t each = call.width / COUNT, number = blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t row = number / each, column = (number - row * each) * COUNT;
    begin();
    if (row >= call.rows) return;
    float sums[COUNT], learned[2][COUNT];
#pragma unroll
    for (int l = 0; l < 2; l++) {
        if (l < call.learned_count) read<COUNT>(of_bucket(call.learned[l], row, call.width) + column, learned[l]);
    }
    for (int first = 0; first < call.table_count; first += AT_ONCE) {
        float some[AT_ONCE][COUNT];
        // All of them are asked for before the first is needed.
#pragma unroll
        for (int t = 0; t < AT_ONCE; t++) {
            if (first + t < call.table_count) {
                read<COUNT>(of_key(call.tables[first + t], row, call.width) + column, some[t]);
            }
        }
#pragma unroll
        for (int t = 0; t < AT_ONCE; t++) {
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                if (first + t == 0) sums[i] = some[t][i];
                else if (first + t < call.table_count) sums[i] = __fadd_rn(sums[i], some[t][i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) sums[i] = __fmul_rn(sums[i], call.scale);
#pragma unroll
    for (int l = 0; l < 2; l++) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if (l < call.learned_count) sums[i] = __fadd_rn(sums[i], learned[l][i]);
        }
    }
    T *y = static_cast<T *>(call.y) + static_cast<int64_t>(row) * call.width + column;
    if constexpr (COUNT == dense::Vector<T>::COUNT) {
        *reinterpret_cast<dense::Vector<T> *>(y) = dense::Vector<T>::of(sums);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i++) dense::narrow(sums[i], y + i);
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
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(128) embed_##NAME##_16(const __grid_constant__ ends::Embed call) {    \
        ends::embed<T, dense::Vector<T>::COUNT>(call);                                                                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(128) embed_##NAME##_any(const __grid_constant__ ends::Embed call) {   \
        ends::embed<T, 1>(call);                                                                                       \
    }

KERNELS(f32, float)
KERNELS(f16, __half)
KERNELS(bf16, __nv_bfloat16)

}  // namespace pagoda
