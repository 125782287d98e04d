// HstuEmbed: rows out of embedding tables that are tensors of the model, added up.

#include "common/dependent_launch.cuh"
#include "common/mirrored.cuh"
#include "common/reduce.cuh"

namespace pagoda {
namespace embed {

// A row of a table for each row of the output.
struct Lookup {
    const float *table;    // [rows, width]
    const int64_t *index;
    int64_t rows;
};
PAGODA_MIRRORED(hstu, Lookup)

// One call.
struct Embed {
    Lookup tables[8];
    Lookup learned[2];
    void *y;               // [rows, width]
    int64_t rows;
    int width;
    int table_count;
    int learned_count;
    float scale;
};
PAGODA_MIRRORED(hstu, Embed)

// The last row is that of "no key" (below 0); keys beyond the table get the row before it.
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

// A thread has COUNT elements of a row. Sums are in the order of the tables, and rounded at every step as separate
// operators would: no fused multiply-add.
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
        // All of them are loaded before the first is needed.
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
    if constexpr (COUNT == Vector<T>::COUNT) {
        *reinterpret_cast<Vector<T> *>(y) = Vector<T>::of(sums);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i++) narrow(sums[i], y + i);
    }
}

}  // namespace embed

#define KERNELS(NAME, T)                                                                                               \
    extern "C" __global__ void __launch_bounds__(128) embed_##NAME##_16(const __grid_constant__ embed::Embed call) {   \
        embed::embed<T, Vector<T>::COUNT>(call);                                                                       \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(128) embed_##NAME##_any(const __grid_constant__ embed::Embed call) {  \
        embed::embed<T, 1>(call);                                                                                      \
    }

KERNELS(f32, float)
KERNELS(f16, __half)
KERNELS(bf16, __nv_bfloat16)

}  // namespace pagoda
