// The products of the dense operators on Hopper, one kernel for each shape of tile; dense_hopper.cuh.

#include "dense_hopper.cuh"

namespace pagoda {

#define KERNEL(NAME, T, KIND, ...)                                                                                     \
    extern "C" __global__ void __launch_bounds__(dense::Tile<__VA_ARGS__>::THREADS, 1) NAME##_##KIND(                  \
        const __grid_constant__ dense::Product call, const __grid_constant__ dense::Maps maps) {                       \
        dense::multiply<T, dense::Tile<__VA_ARGS__>>(call, maps);                                                      \
    }

#define KERNELS(NAME, ...)                                                                                             \
    KERNEL(NAME, __half, f16, __VA_ARGS__)                                                                             \
    KERNEL(NAME, __nv_bfloat16, bf16, __VA_ARGS__)

KERNELS(tile_128_256, 2, 1, 256, 4, false)
KERNELS(tile_192_128, 3, 1, 128, 4, false)
KERNELS(turns_128_128, 2, 2, 128, 6, true)
KERNELS(tile_128_128, 2, 1, 128, 6, false)
KERNELS(tile_128_160, 2, 1, 160, 5, false)
KERNELS(tile_128_96, 2, 1, 96, 6, false)
KERNELS(tile_128_64, 2, 1, 64, 8, false)
KERNELS(tile_64_64, 1, 1, 64, 8, false)

}  // namespace pagoda
