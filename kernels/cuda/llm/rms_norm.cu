// The RMS norm of every row, times a weight: computed in f32, rounded once. A block has a row, so its bits depend on it alone.
// And rows for the products of block_weight_sm90.cuh, normed or as they are.

#include "common/convert.cuh"
#include "common/dependent_launch.cuh"

namespace pagoda {
namespace rms_norm {

constexpr int THREADS = 256;

template <class T, int VECTOR> struct alignas(VECTOR * sizeof(T)) Vector {
    T elements[VECTOR];
};

// One over the root of the mean square of this block's row. VECTOR elements are 16 bytes, or one element for rows of any
// size and alignment.
template <class T, int VECTOR> __device__ float factor_of(const T *row, int size, float epsilon) {
    using Vector = Vector<T, VECTOR>;
    float sum = 0.0f;
    for (int at = threadIdx.x * VECTOR; at < size; at += THREADS * VECTOR) {
        Vector some = *reinterpret_cast<const Vector *>(row + at);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) sum += wide(some.elements[i]) * wide(some.elements[i]);
    }
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
    __shared__ float warps[THREADS / 32];
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; warp++) sum += warps[warp];
    return 1.0f / sqrtf(sum / size + epsilon);
}

template <class T, int VECTOR> __device__ void run(const T *x, const T *weight, T *y, int size, float epsilon) {
    using Vector = Vector<T, VECTOR>;
    begin();
    const T *row = x + static_cast<int64_t>(blockIdx.x) * size;
    float factor = factor_of<T, VECTOR>(row, size, epsilon);
    for (int at = threadIdx.x * VECTOR; at < size; at += THREADS * VECTOR) {
        Vector some = *reinterpret_cast<const Vector *>(row + at);
        Vector by = *reinterpret_cast<const Vector *>(weight + at);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            narrow(wide(some.elements[i]) * factor * wide(by.elements[i]), &some.elements[i]);
        }
        *reinterpret_cast<Vector *>(y + static_cast<int64_t>(blockIdx.x) * size + at) = some;
    }
}

// Columns by eights, each of which a lane of wgmma has: of 32 columns, instruction `i / 2` takes pair `i` of each eight,
// which is its columns `i` and `i + 4`. Behind each step of 256 columns, with zeros in the last one, are the sums of its
// eight blocks of 32 times −136, what a code of 4 bits in bf16 has too much, and what rounding took from these, in front of
// 48 numbers that nothing reads. (f16 does not read the sums either.)
template <class T> __device__ void run_in_blocks(const T *x, const T *weight, T *y, int size, float epsilon) {
    constexpr int EIGHT = 8, STEP = 256, PITCH = STEP + 64;
    using Vector = Vector<T, EIGHT>;
    begin();
    const T *row = x + static_cast<int64_t>(blockIdx.x) * size;
    float factor = weight != nullptr ? factor_of<T, EIGHT>(row, size, epsilon) : 1.0f;
    int steps = (size + STEP - 1) / STEP;
    for (int at = threadIdx.x * EIGHT; at < steps * STEP; at += THREADS * EIGHT) {
        Vector some = {};
        if (at < size) some = *reinterpret_cast<const Vector *>(row + at);
        if (at < size && weight != nullptr) {
            Vector by = *reinterpret_cast<const Vector *>(weight + at);
#pragma unroll
            for (int i = 0; i < EIGHT; i++) {
                narrow(wide(some.elements[i]) * factor * wide(by.elements[i]), &some.elements[i]);
            }
        }
        T *to = y + (static_cast<int64_t>(blockIdx.x) * steps + at / STEP) * PITCH;
        T *pairs = to + at % STEP / 32 * 32 + at % 32 / 4;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            *reinterpret_cast<rms_norm::Vector<T, 2> *>(pairs + i * 8) = {some.elements[i], some.elements[i + 4]};
            sum += wide(some.elements[i]) + wide(some.elements[i + 4]);
        }
        // A warp has a whole step.
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (at % 32 == 0) {
            sum *= -136.0f;
            T rounded;
            narrow(sum, &rounded);
            to[STEP + at % STEP / 32] = rounded;
            narrow(sum - wide(rounded), &to[STEP + EIGHT + at % STEP / 32]);
        }
    }
}

}  // namespace rms_norm

#define KERNELS(NAME, T)                                                                                               \
    extern "C" __global__ void __launch_bounds__(rms_norm::THREADS) rms_norm_##NAME(                                   \
        const T *x, const T *weight, T *y, int size, float epsilon) {                                                  \
        rms_norm::run<T, 16 / sizeof(T)>(x, weight, y, size, epsilon);                                                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(rms_norm::THREADS) rms_norm_##NAME##_any(                             \
        const T *x, const T *weight, T *y, int size, float epsilon) {                                                  \
        rms_norm::run<T, 1>(x, weight, y, size, epsilon);                                                              \
    }

#define IN_BLOCKS(NAME, T)                                                                                             \
    extern "C" __global__ void __launch_bounds__(rms_norm::THREADS) rms_norm_##NAME##_in_blocks(                       \
        const T *x, const T *weight, T *y, int size, float epsilon) {                                                  \
        rms_norm::run_in_blocks(x, weight, y, size, epsilon);                                                          \
    }

KERNELS(f32, float)
KERNELS(f16, __half)
KERNELS(bf16, __nv_bfloat16)
IN_BLOCKS(f16, __half)
IN_BLOCKS(bf16, __nv_bfloat16)

}  // namespace pagoda
