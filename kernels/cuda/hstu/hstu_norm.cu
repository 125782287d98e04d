// HstuNorm and HstuGate: layer norms, with one or several warps for each unit (what is normalised together).

#include "common/dependent_launch.cuh"
#include "common/reduce.cuh"
#include "hstu/dense.cuh"

namespace pagoda {
namespace dense {

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

// A unit of any size and alignment, read several times. One warp for each.
template <class T> __device__ void norm_of_any(const Norm &call) {
    int lane = threadIdx.x % 32;
    int64_t unit = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    begin();
    if (unit >= call.units) return;
    int64_t row = unit / call.groups, from = call.taken.source(row);
    int group = static_cast<int>(unit - row * call.groups);
    Places<T> to = Places<T>::of(call, row, group);
    if (from < 0) {
        for (int i = lane; i < call.size; i += 32) {
            if (to.u != nullptr) to.u[i] = to.x[i] = T(0.0f);
            to.y[i] = T(0.0f);
        }
        return;
    }
    int64_t first = (from * call.groups + group) * call.size;
    const T *x = static_cast<const T *>(call.x) + first;
    const T *u = call.u == nullptr ? nullptr : static_cast<const T *>(call.u) + first;
    const T *weight = static_cast<const T *>(call.weight), *bias = static_cast<const T *>(call.bias);
    float count = static_cast<float>(call.size), sum = 0, squares = 0;
    for (int i = lane; i < call.size; i += 32) sum += wide(x[i]);
    float mean = sum_of_warp(sum) / count;
    for (int i = lane; i < call.size; i += 32) squares = fmaf(wide(x[i]) - mean, wide(x[i]) - mean, squares);
    float scale = rsqrtf(sum_of_warp(squares) / count + call.epsilon);
    for (int i = lane; i < call.size; i += 32) {
        int learned = call.by_group ? group : i;
        float value = fmaf((wide(x[i]) - mean) * scale, wide(weight[learned]), wide(bias[learned]));
        if (u != nullptr) value *= wide(u[i]);
        if (to.u != nullptr) to.u[i] = u[i], to.x[i] = x[i];
        narrow(value, to.y + i);
    }
}

// Four independent sums hide the latency of the additions.
template <class V> __device__ void add_to(float (&sums)[4], const V &vector) {
    float values[V::COUNT];
    vector.open(values);
#pragma unroll
    for (int i = 0; i < V::COUNT; i++) sums[i % 4] += values[i];
}

template <class V> __device__ void add_squares_to(float (&sums)[4], const V &vector, float mean) {
    float values[V::COUNT];
    vector.open(values);
#pragma unroll
    for (int i = 0; i < V::COUNT; i++) sums[i % 4] = fmaf(values[i] - mean, values[i] - mean, sums[i % 4]);
}

__device__ inline float total(const float (&sums)[4]) { return sums[0] + sums[1] + (sums[2] + sums[3]); }

// WARPS warps have a unit, with VECTORS vectors of it in the registers of each lane, so that it is read once. Several
// warps are a block.
template <class T, int WARPS, int VECTORS> __device__ void norm(const Norm &call) {
    using V = Vector<T>;
    constexpr int LANES = 32 * WARPS;
    // With one or two vectors a lane, weight and bias are loaded while the kernel in front still runs, if that one does
    // not write them. With more there are no registers for that.
    constexpr bool EARLY = VECTORS <= 2;
    __shared__ float shared[2][1][WARPS];
    int lane = threadIdx.x % LANES;
    uint32_t unit = blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
    uint32_t row = call.groups == 1 ? unit : unit / static_cast<uint32_t>(call.groups);
    int group = static_cast<int>(unit - row * call.groups);
    bool gated = call.u != nullptr;
    if (unit >= call.units) return begin();
    Places<T> to = Places<T>::of(call, row, group);
    auto has = [&](int v) { return (v * LANES + lane) * V::COUNT < call.size; };
    V mine[VECTORS], gates[VECTORS], weights[VECTORS], biases[VECTORS];
    float all_weight = 0, all_bias = 0;
    auto learned = [&](int v) {
        if (call.by_group) {
            all_weight = wide(static_cast<const T *>(call.weight)[group]);
            all_bias = wide(static_cast<const T *>(call.bias)[group]);
        } else {
            weights[v] = static_cast<const V *>(call.weight)[v * LANES + lane];
            biases[v] = static_cast<const V *>(call.bias)[v * LANES + lane];
        }
    };
    bool early = EARLY && call.constant;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (early && has(v)) learned(v);
    }
    begin();
    // A row that does not exist counts as zeros; u is 0 too, so the output is.
    int64_t from = call.taken.source(row), first = (from * call.groups + group) * call.size;
    const V *x = reinterpret_cast<const V *>(static_cast<const T *>(call.x) + first);
    const V *u = reinterpret_cast<const V *>(static_cast<const T *>(call.u) + first);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (has(v)) mine[v] = from < 0 ? V{} : x[v * LANES + lane];
        if (has(v) && gated) gates[v] = from < 0 ? V{} : u[v * LANES + lane];
    }
    float count = static_cast<float>(call.size), sums[4] = {}, squares[4] = {};
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (has(v)) add_to(sums, mine[v]);
    }
    float mean = sum_of_unit<WARPS>(total(sums), shared[0]) / count;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (has(v)) add_squares_to(squares, mine[v], mean);
    }
    float variance = sum_of_unit<WARPS>(total(squares), shared[1]) / count;
    float scale = rsqrtf(variance + call.epsilon);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        float y[V::COUNT], weight[V::COUNT], bias[V::COUNT], gate[V::COUNT];
        if (!has(v)) continue;
        if (!early) learned(v);
        mine[v].open(y);
        if (!call.by_group) weights[v].open(weight), biases[v].open(bias);
        if (gated) gates[v].open(gate);
#pragma unroll
        for (int i = 0; i < V::COUNT; i++) {
            float by = call.by_group ? all_weight : weight[i], add = call.by_group ? all_bias : bias[i];
            y[i] = fmaf((y[i] - mean) * scale, by, add);
            if (gated) y[i] *= gate[i];
        }
        int at = v * LANES + lane;
        if (to.u != nullptr) reinterpret_cast<V *>(to.u)[at] = gates[v], reinterpret_cast<V *>(to.x)[at] = mine[v];
        reinterpret_cast<V *>(to.y)[at] = V::of(y);
    }
}

// The same bits as `norm` with four warps and one vector, for UNITS whole rows at once: more loads are in flight on a
// multiprocessor. Without concat.
template <class T, int UNITS, bool GATED> __device__ void norm_many(const Norm &call) {
    using V = Vector<T>;
    constexpr int WARPS = 4;
    __shared__ float shared[2][UNITS][WARPS];
    uint32_t first = blockIdx.x * UNITS, size = call.size;
    bool inside = threadIdx.x * V::COUNT < size;
    const T *x = static_cast<const T *>(call.x), *u = static_cast<const T *>(call.u);
    auto has = [&](int k) { return inside && first + k < call.units; };
    auto at = [&](int64_t row) { return row * size + threadIdx.x * V::COUNT; };
    V mine[UNITS], gates[UNITS], weights, biases;
    begin();
#pragma unroll
    for (int k = 0; k < UNITS; k++) {
        if (!has(k)) continue;
        // As above.
        int64_t from = GATED ? call.taken.source(first + k) : first + k;
        mine[k] = from < 0 ? V{} : *reinterpret_cast<const V *>(x + at(from));
        if (GATED) gates[k] = from < 0 ? V{} : *reinterpret_cast<const V *>(u + at(from));
    }
    if (inside) weights = static_cast<const V *>(call.weight)[threadIdx.x], biases = static_cast<const V *>(call.bias)[threadIdx.x];
    float count = static_cast<float>(size), means[UNITS], scales[UNITS];
#pragma unroll
    for (int k = 0; k < UNITS; k++) {
        float sums[4] = {};
        if (has(k)) add_to(sums, mine[k]);
        means[k] = total(sums);
    }
    sum_of_units<WARPS>(means, shared[0]);
#pragma unroll
    for (int k = 0; k < UNITS; k++) {
        float squares[4] = {};
        means[k] = means[k] / count;
        if (has(k)) add_squares_to(squares, mine[k], means[k]);
        scales[k] = total(squares);
    }
    sum_of_units<WARPS>(scales, shared[1]);
#pragma unroll
    for (int k = 0; k < UNITS; k++) {
        if (!has(k)) continue;
        float y[V::COUNT], weight[V::COUNT], bias[V::COUNT], gate[V::COUNT], scale = rsqrtf(scales[k] / count + call.epsilon);
        mine[k].open(y), weights.open(weight), biases.open(bias);
        if (GATED) gates[k].open(gate);
#pragma unroll
        for (int i = 0; i < V::COUNT; i++) {
            y[i] = fmaf((y[i] - means[k]) * scale, weight[i], bias[i]);
            if (GATED) y[i] *= gate[i];
        }
        *reinterpret_cast<V *>(static_cast<T *>(call.y) + at(first + k)) = V::of(y);
    }
}

}  // namespace dense

#define NORM(NAME, T, WARPS, VECTORS, THREADS, BLOCKS)                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) norm_##NAME##_##WARPS##_##VECTORS(                   \
        const __grid_constant__ dense::Norm call) {                                                                    \
        dense::norm<T, WARPS, VECTORS>(call);                                                                          \
    }

// Twelve blocks fit onto a multiprocessor: 3,168 rows onto the 132 of an H200.
#define NORM_MANY(NAME, T, WHAT, GATED)                                                                                \
    extern "C" __global__ void __launch_bounds__(128, 12) WHAT##_##NAME##_many(                                        \
        const __grid_constant__ dense::Norm call) {                                                                    \
        dense::norm_many<T, 2, GATED>(call);                                                                           \
    }

// Warps, vectors, threads, minimum blocks of a multiprocessor.
#define KERNELS(NAME, T)                                                                                               \
    NORM(NAME, T, 1, 1, 128, 8)                                                                                        \
    NORM(NAME, T, 1, 2, 128, 6)                                                                                        \
    NORM(NAME, T, 4, 1, 128, 8)                                                                                        \
    NORM(NAME, T, 4, 2, 128, 4)                                                                                        \
    NORM(NAME, T, 4, 4, 128, 2)                                                                                        \
    NORM_MANY(NAME, T, norm, false)                                                                                    \
    NORM_MANY(NAME, T, gate, true)                                                                                     \
    extern "C" __global__ void __launch_bounds__(128) norm_##NAME##_any(const __grid_constant__ dense::Norm call) {    \
        dense::norm_of_any<T>(call);                                                                                   \
    }

KERNELS(f32, float)
KERNELS(f16, __half)
KERNELS(bf16, __nv_bfloat16)

}  // namespace pagoda
