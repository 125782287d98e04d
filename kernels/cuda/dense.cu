// The dense operators of an HSTU block: the norms, one warp for what is normed together, and the products in the plainest way
// that is not slow, for f32 and for chips and shapes that dense_hopper.cu does not take.

#include "async.cuh"
#include "dense.cuh"

namespace pagoda {
namespace dense {

// Chips before sm_90 begin a kernel when the one before it has ended, and the launcher asks for nothing else there.
__device__ inline void begin() {
#if __CUDA_ARCH__ >= 900
    let_follow();
    wait_for_previous();
#endif
}

__device__ inline float sum_of_warp(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

// Sixteen bytes of elements.
template <class T> struct alignas(16) Vector {
    static constexpr int COUNT = 16 / sizeof(T);
    T at[COUNT];
};

// Where a unit goes in the output.
template <class T> struct Places {
    T *u, *x, *y;

    __device__ static Places of(const Norm &call, int64_t row, int group) {
        T *y = static_cast<T *>(call.y);
        int64_t inside = static_cast<int64_t>(group) * call.size, width = static_cast<int64_t>(call.groups) * call.size;
        if (!call.concat) return {nullptr, nullptr, y + row * width + inside};
        y += row * 3 * width + inside;
        return {y, y + width, y + 2 * width};
    }
};

// A warp has a unit, VECTORS vectors of it in each lane, so that memory is gone through once. VECTORS = 0: of any size and
// anywhere, by reading it again and again.
template <class T, int VECTORS> __device__ void norm(const Norm &call) {
    using V = Vector<T>;
    int lane = threadIdx.x % 32;
    int64_t unit = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    begin();
    if (unit >= call.units) return;
    int64_t row = unit / call.groups;
    int group = static_cast<int>(unit % call.groups);
    const T *x = static_cast<const T *>(call.x) + unit * call.size;
    const T *u = call.u == nullptr ? nullptr : static_cast<const T *>(call.u) + unit * call.size;
    const T *weight = static_cast<const T *>(call.weight), *bias = static_cast<const T *>(call.bias);
    Places<T> to = Places<T>::of(call, row, group);
    float count = static_cast<float>(call.size);

    if constexpr (VECTORS == 0) {
        float sum = 0, squares = 0;
        for (int i = lane; i < call.size; i += 32) sum += wide(x[i]);
        float mean = sum_of_warp(sum) / count;
        for (int i = lane; i < call.size; i += 32) {
            float off = wide(x[i]) - mean;
            squares = fmaf(off, off, squares);
        }
        float scale = rsqrtf(sum_of_warp(squares) / count + call.epsilon);
        for (int i = lane; i < call.size; i += 32) {
            int learned = call.by_group ? group : i;
            float value = fmaf((wide(x[i]) - mean) * scale, wide(weight[learned]), wide(bias[learned]));
            if (u != nullptr) value *= wide(u[i]);
            if (to.u != nullptr) to.u[i] = u[i], to.x[i] = x[i];
            narrow(value, to.y + i);
        }
        return;
    } else {
        V mine[VECTORS], gate[VECTORS];
        float sum = 0, squares = 0;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            int at = v * 32 + lane;
            if (at * V::COUNT >= call.size) continue;
            mine[v] = reinterpret_cast<const V *>(x)[at];
            if (u != nullptr) gate[v] = reinterpret_cast<const V *>(u)[at];
        }
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            if ((v * 32 + lane) * V::COUNT >= call.size) continue;
#pragma unroll
            for (int i = 0; i < V::COUNT; i++) sum += wide(mine[v].at[i]);
        }
        float mean = sum_of_warp(sum) / count;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            if ((v * 32 + lane) * V::COUNT >= call.size) continue;
#pragma unroll
            for (int i = 0; i < V::COUNT; i++) {
                float off = wide(mine[v].at[i]) - mean;
                squares = fmaf(off, off, squares);
            }
        }
        float scale = rsqrtf(sum_of_warp(squares) / count + call.epsilon);
        float all_weight = 0, all_bias = 0;
        if (call.by_group) all_weight = wide(weight[group]), all_bias = wide(bias[group]);
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            int at = v * 32 + lane;
            if (at * V::COUNT >= call.size) continue;
            V weights, biases, y;
            if (!call.by_group) {
                weights = reinterpret_cast<const V *>(weight)[at];
                biases = reinterpret_cast<const V *>(bias)[at];
            }
#pragma unroll
            for (int i = 0; i < V::COUNT; i++) {
                float w = call.by_group ? all_weight : wide(weights.at[i]);
                float b = call.by_group ? all_bias : wide(biases.at[i]);
                float value = fmaf((wide(mine[v].at[i]) - mean) * scale, w, b);
                if (u != nullptr) value *= wide(gate[v].at[i]);
                narrow(value, &y.at[i]);
            }
            if (to.u != nullptr) {
                reinterpret_cast<V *>(to.u)[at] = gate[v];
                reinterpret_cast<V *>(to.x)[at] = mine[v];
            }
            reinterpret_cast<V *>(to.y)[at] = y;
        }
    }
}

constexpr int TILE = 64, DEEP = 16, EACH = 4;  // rows and columns of a block, depth of a step, rows and columns of a thread

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
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            int at = first_column + column + j;
            if (at >= call.columns) break;
            float value = sums[i][j];
            if (call.bias != nullptr) value += wide(static_cast<const T *>(call.bias)[at]);
            if (at < call.silu) value = value / (1.0f + expf(-value));
            if (call.residual != nullptr) {
                value += wide(static_cast<const T *>(call.residual)[at_row * call.columns + at]);
            }
            T *output = static_cast<T *>(call.outputs[at / call.part]);
            narrow(value, output + at_row * call.part + at % call.part);
        }
    }
}

}  // namespace dense

#define NORM(NAME, T, VECTORS)                                                                                         \
    extern "C" __global__ void __launch_bounds__(128) norm_##NAME##_##VECTORS(const __grid_constant__ dense::Norm call) { \
        dense::norm<T, VECTORS>(call);                                                                                 \
    }

#define KERNELS(NAME, T)                                                                                               \
    NORM(NAME, T, 0)                                                                                                   \
    NORM(NAME, T, 1)                                                                                                   \
    NORM(NAME, T, 2)                                                                                                   \
    NORM(NAME, T, 4)                                                                                                   \
    NORM(NAME, T, 8)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) product_##NAME(const __grid_constant__ dense::Product call) {    \
        dense::multiply<T>(call);                                                                                      \
    }

KERNELS(f32, float)
KERNELS(f16, __half)
KERNELS(bf16, __nv_bfloat16)

}  // namespace pagoda
