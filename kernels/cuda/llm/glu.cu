// Glu: activation(gate) * up of every row. Computed in f32, rounded once: the bits of a number depend on its gate and its up
// alone, whichever of the kernels computes it. A residual may be added before that.

#include "common/convert.cuh"

namespace pagoda {
namespace glu {

// x / (1 + e^-x). Where e^-x is infinite the result is 0.
struct Silu {
    __device__ static float of(float x) { return x / (1.0f + expf(-x)); }
};

// x * Phi(x).
struct Gelu {
    __device__ static float of(float x) { return x * normcdff(x); }
};

// x / 2 * (1 + tanh(u)) as x / (1 + e^(-2u)), which does not cancel.
struct GeluTanh {
    __device__ static float of(float x) {
        constexpr float LINEAR = 1.5957691216057308f;  // 2 * sqrt(2 / pi)
        return x / (1.0f + expf(-LINEAR * x * fmaf(0.044715f * x, x, 1.0f)));
    }
};

// One call: x is [rows, 2 * width], y [rows, width]. A block computes `blockDim.x * VECTOR` columns of one row, so a row has
// `blocks` blocks. VECTOR elements are 16 bytes, or one element for rows of any size and alignment.
template <class T, class Activation, int VECTOR>
__device__ void run(const T *x, const T *residual, T *y, int width, int blocks) {
    int64_t row = blockIdx.x / blocks;
    int64_t column = (static_cast<int64_t>(blockIdx.x % blocks) * blockDim.x + threadIdx.x) * VECTOR;
    if (column >= width) return;
    const T *from = x + row * 2 * width + column;
    struct alignas(VECTOR * sizeof(T)) Vector {
        T elements[VECTOR];
    };
    Vector gate = *reinterpret_cast<const Vector *>(from), up = *reinterpret_cast<const Vector *>(from + width);
    Vector add = {};
    if (residual != nullptr) add = *reinterpret_cast<const Vector *>(residual + row * width + column);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        float value = Activation::of(wide(gate.elements[i])) * wide(up.elements[i]);
        // Not an addition of 0, which would turn -0 into 0.
        narrow(residual != nullptr ? value + wide(add.elements[i]) : value, &gate.elements[i]);
    }
    *reinterpret_cast<Vector *>(y + row * width + column) = gate;
}

}  // namespace glu

#define GLU(NAME, T, ACTIVATION_NAME, ACTIVATION)                                                                      \
    extern "C" __global__ void __launch_bounds__(256) glu_##ACTIVATION_NAME##_##NAME(                                  \
        const T *x, const T *residual, T *y, int width, int blocks) {                                                  \
        glu::run<T, glu::ACTIVATION, 16 / sizeof(T)>(x, residual, y, width, blocks);                                   \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) glu_##ACTIVATION_NAME##_##NAME##_any(                            \
        const T *x, const T *residual, T *y, int width, int blocks) {                                                  \
        glu::run<T, glu::ACTIVATION, 1>(x, residual, y, width, blocks);                                                \
    }

#define KERNELS(NAME, T)                                                                                               \
    GLU(NAME, T, silu, Silu)                                                                                           \
    GLU(NAME, T, gelu, Gelu)                                                                                           \
    GLU(NAME, T, gelu_tanh, GeluTanh)

KERNELS(f32, float)
KERNELS(f16, __half)
KERNELS(bf16, __nv_bfloat16)

}  // namespace pagoda
