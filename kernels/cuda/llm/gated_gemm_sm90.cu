// The product of gates and ups on Hopper with SwiGLU behind it, for many rows: the loop of the dense operators, in which a thread
// has the sums of a gate and of its up (hstu/hstu_gemm_sm90.cuh).

#include "hstu/hstu_gemm_sm90.cuh"

namespace pagoda {

// Warpgroups, columns, stages, by turns, small, gated. `GATED` of src/cuda/llm/gated_gemm.rs has the same numbers.
#define KERNEL(NAME, T, KIND, ...)                                                                                     \
    extern "C" __global__ void __launch_bounds__(dense::Tile<__VA_ARGS__>::THREADS, 1)                                 \
        NAME##_##KIND(const __grid_constant__ dense::Product call, const __grid_constant__ dense::GemmMaps maps) {     \
        dense::multiply<T, dense::Tile<__VA_ARGS__>>(call, maps);                                                      \
    }

#define KERNELS(NAME, ...)                                                                                             \
    KERNEL(NAME, __half, f16, __VA_ARGS__)                                                                             \
    KERNEL(NAME, __nv_bfloat16, bf16, __VA_ARGS__)

KERNELS(gated_128_256, 2, 256, 4, false, false, true)
KERNELS(gated_192_128, 3, 128, 4, false, false, true)

}  // namespace pagoda
