// `Linear` with few rows on Hopper: see projection_sm90.cuh.

#include "llm/projection_sm90.cuh"

namespace pagoda {

#define KERNEL(NAME, T, COLUMNS, STAGES)                                                                               \
    extern "C" __global__ void __launch_bounds__(few_rows::THREADS, 1) few_rows_##NAME##_##COLUMNS(                    \
        const __grid_constant__ few_rows::FewRows call, const __grid_constant__ few_rows::FewRowsMaps maps) {          \
        few_rows::multiply<few_rows::Numbers<T, COLUMNS, STAGES>>(call, maps);                                               \
    }

#define KERNELS(NAME, T)                                                                                               \
    KERNEL(NAME, T, 8, 12)                                                                                             \
    KERNEL(NAME, T, 16, 12)                                                                                            \
    KERNEL(NAME, T, 32, 10)                                                                                            \
    KERNEL(NAME, T, 64, 8)

KERNELS(f16, __half)
KERNELS(bf16, __nv_bfloat16)

}  // namespace pagoda
