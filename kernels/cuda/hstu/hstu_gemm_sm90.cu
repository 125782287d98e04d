// The products of the dense operators on Hopper, one kernel for each shape of tile; hstu_gemm_sm90.cuh.

#include "hstu/hstu_gemm_sm90.cuh"

namespace pagoda {

#define KERNEL(NAME, T, KIND, ...)                                                                                     \
    extern "C" __global__ void                                                                                         \
        __launch_bounds__(dense::Tile<__VA_ARGS__>::THREADS, dense::Tile<__VA_ARGS__>::SMALL ? 2 : 1) NAME##_##KIND(   \
            const __grid_constant__ dense::Product call, const __grid_constant__ dense::GemmMaps maps) {               \
        dense::multiply<T, dense::Tile<__VA_ARGS__>>(call, maps);                                                      \
    }

#define KERNELS(NAME, ...)                                                                                             \
    KERNEL(NAME, __half, f16, __VA_ARGS__)                                                                             \
    KERNEL(NAME, __nv_bfloat16, bf16, __VA_ARGS__)

// Warpgroups, columns, stages, by turns, small.
KERNELS(turns_64_256, 2, 256, 4, true, false)
KERNELS(turns_64_160, 2, 160, 6, true, false)
KERNELS(turns_64_128, 2, 128, 7, true, false)
KERNELS(tile_192_128, 3, 128, 4, false, false)
KERNELS(tile_128_96, 2, 96, 7, false, true)
KERNELS(tile_64_96, 1, 96, 8, false, true)
KERNELS(tile_64_64, 1, 64, 8, false, true)

}  // namespace pagoda
