// The RMS norm of every row, times a weight: computed in f32, rounded once. A block has a row, so its bits depend on it alone.

#include "common/convert.cuh"
#include "common/dependent_launch.cuh"

namespace pagoda {
namespace rms_norm {

constexpr int THREADS = 256;

// VECTOR elements are 16 bytes, or one element for rows of any size and alignment.
template <class T, int VECTOR> __device__ void run(const T *x, const T *weight, T *y, int size, float epsilon) {
    struct alignas(VECTOR * sizeof(T)) Vector {
        T elements[VECTOR];
    };
    begin();
    const T *row = x + static_cast<int64_t>(blockIdx.x) * size;
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
    float factor = 1.0f / sqrtf(sum / size + epsilon);
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

KERNELS(f32, float)
KERNELS(f16, __half)
KERNELS(bf16, __nv_bfloat16)

}  // namespace pagoda
