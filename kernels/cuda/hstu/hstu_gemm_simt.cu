// The matrix products of HstuProject, HstuOutput and HstuLinear without tensor cores (SIMT), for f32 and for chips and
// shapes that hstu_gemm_sm90.cu does not take.

#include "common/dependent_launch.cuh"
#include "common/reduce.cuh"
#include "hstu/dense.cuh"

namespace pagoda {
namespace dense {

// Rows and columns of a block, depth of a step, rows and columns of a thread.
constexpr int TILE = 64, DEEP = 16, EACH = 4;

// A block has TILE × TILE of the output. A thread adds up its products in the order of the depth.
template <class T> __device__ void multiply(const Product &call) {
    __shared__ float left[DEEP][TILE + 4], right[DEEP][TILE + 4];
    begin();
    int across = (call.columns + TILE - 1) / TILE;
    int first_row = blockIdx.x / across * TILE, first_column = blockIdx.x % across * TILE;
    int row = threadIdx.x / (TILE / EACH) * EACH, column = threadIdx.x % (TILE / EACH) * EACH;
    float sums[EACH][EACH] = {};
    const T *x = static_cast<const T *>(call.x), *weight = static_cast<const T *>(call.weight);
    for (int start = 0; start < call.depth; start += DEEP) {
        for (int i = threadIdx.x; i < TILE * DEEP; i += blockDim.x) {
            int line = i / DEEP, k = i % DEEP;
            bool deep = start + k < call.depth;
            int64_t from_row = first_row + line, from_column = first_column + line;
            bool has_row = deep && from_row < call.rows, has_column = deep && from_column < call.columns;
            left[k][line] = has_row ? wide(x[from_row * call.depth + start + k]) : 0.0f;
            right[k][line] = has_column ? wide(weight[from_column * call.depth + start + k]) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEEP; k++) {
            float4 a = *reinterpret_cast<const float4 *>(&left[k][row]);
            float4 b = *reinterpret_cast<const float4 *>(&right[k][column]);
            float as[EACH] = {a.x, a.y, a.z, a.w}, bs[EACH] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < EACH; i++) {
#pragma unroll
                for (int j = 0; j < EACH; j++) sums[i][j] = fmaf(as[i], bs[j], sums[i][j]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int64_t at_row = first_row + row + i;
        if (at_row >= call.rows) break;
        int64_t from = call.residual == nullptr ? -1 : call.taken.source(at_row);
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            int at = first_column + column + j;
            if (at >= call.columns) break;
            float value = sums[i][j];
            if (call.bias != nullptr) value += wide(static_cast<const T *>(call.bias)[at]);
            value = activated(value, at < call.silu ? SILU : call.activation);
            if (from >= 0) value += wide(static_cast<const T *>(call.residual)[from * call.columns + at]);
            T *output = static_cast<T *>(call.outputs[at / call.part]);
            narrow(value, output + at_row * call.part + at % call.part);
        }
    }
}

// For f32 and few columns: a warp has EACH rows, and a lane loads four numbers of each at once. A block writes its
// results together, because the output may be in host memory, where each write has a high latency.
template <int WARPS, int EACH, int MOST> __device__ void multiply_few(const Product &call) {
    __shared__ float values[WARPS * EACH * MOST];
    int lane = threadIdx.x % 32, own = threadIdx.x / 32 * EACH;
    int64_t first = static_cast<int64_t>(blockIdx.x) * (WARPS * EACH);
    const float *x = static_cast<const float *>(call.x) + (first + own) * call.depth;
    const float *weight = static_cast<const float *>(call.weight);
    float sums[EACH][MOST] = {};
    begin();
    for (int k = lane * 4; k < call.depth; k += 32 * 4) {
        float4 a[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            bool there = first + own + i < call.rows;
            a[i] = there ? *reinterpret_cast<const float4 *>(x + static_cast<int64_t>(i) * call.depth + k) : float4{};
        }
#pragma unroll
        for (int column = 0; column < MOST; column++) {
            if (column >= call.columns) break;
            float4 b = *reinterpret_cast<const float4 *>(weight + static_cast<int64_t>(column) * call.depth + k);
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                float &sum = sums[i][column];
                sum = fmaf(a[i].x, b.x, fmaf(a[i].y, b.y, fmaf(a[i].z, b.z, fmaf(a[i].w, b.w, sum))));
            }
        }
    }
#pragma unroll
    for (int column = 0; column < MOST; column++) {
        if (column >= call.columns) break;
        float bias = call.bias == nullptr ? 0.0f : static_cast<const float *>(call.bias)[column];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            float value = sum_of_warp(sums[i][column]);
            if (lane == 0) values[(own + i) * call.columns + column] = activated(value + bias, call.activation);
        }
    }
    __syncthreads();
    int64_t left = call.rows - first;
    int count = static_cast<int>(left < WARPS * EACH ? left : WARPS * EACH) * call.columns;
    float *y = static_cast<float *>(call.outputs[0]) + first * call.columns;
    for (int i = threadIdx.x; i < count; i += blockDim.x) y[i] = values[i];
}

}  // namespace dense

#define KERNEL(NAME, T)                                                                                                \
    extern "C" __global__ void __launch_bounds__(256) product_##NAME(const __grid_constant__ dense::Product call) {    \
        dense::multiply<T>(call);                                                                                      \
    }

KERNEL(f32, float)
KERNEL(f16, __half)
KERNEL(bf16, __nv_bfloat16)

// src/cuda/hstu/linear.rs has the same numbers.
extern "C" __global__ void __launch_bounds__(256) product_few(const __grid_constant__ dense::Product call) {
    dense::multiply_few<8, 4, 8>(call);
}

}  // namespace pagoda
