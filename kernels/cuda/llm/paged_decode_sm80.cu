// PagedAttention of sequences with few new tokens (decode): bf16 and f16, D = 64, 96, 128, 256. And behind it the sum of its parts and
// the weights of slots.

#include "llm/paged_weights.cuh"

namespace pagoda {

#define PAGODA_DECODE(NAME, T, D, FORMAT, ...)                                                                         \
    extern "C" __global__ void __launch_bounds__(paged::THREADS, paged::blocks_of<D, FORMAT, ##__VA_ARGS__>())        \
        paged_decode_##NAME(const __grid_constant__ PagedCall call, int row_tiles, int flags) {                       \
        paged::decode<T, D, FORMAT, ##__VA_ARGS__>(call, row_tiles, flags);                                            \
    }
// `weigh`: the first `combining` blocks add parts up, and those behind them compute the weights of slots.
#define PAGODA_COMBINE(NAME, T, D, WIDE)                                                                               \
    extern "C" __global__ void __launch_bounds__(32 * paged::COMBINING)                                                \
        paged_##NAME(const __grid_constant__ PagedCall call, int row_tiles, int per_sequence) {                        \
        paged::combine<T, D, WIDE>(call, row_tiles, per_sequence);                                                     \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * paged::COMBINING)                                                \
        paged_weigh_##NAME(const __grid_constant__ PagedCall call, int row_tiles, int per_sequence, int combining) {   \
        int block = static_cast<int>(blockIdx.x);                                                                      \
        if (block < combining) paged::combine<T, D, WIDE>(call, row_tiles, per_sequence);                              \
        else paged::weigh_decoded<T>(call, row_tiles, block - combining);                                              \
    }
#define PAGODA_DECODE_SIZE(NAME, T, D)                                                                                 \
    PAGODA_DECODE(NAME##_##D##_native, T, D, NATIVE)                                                                   \
    PAGODA_DECODE(NAME##_##D##_int8, T, D, INT8)                                                                       \
    PAGODA_COMBINE(combine_##NAME##_##D, T, D, false)                                                                  \
    PAGODA_COMBINE(combine_wide_##NAME##_##D, T, D, true)
#define PAGODA_DECODE_TYPE(NAME, T)                                                                                    \
    PAGODA_DECODE_SIZE(NAME, T, 64)                                                                                    \
    PAGODA_DECODE_SIZE(NAME, T, 96)                                                                                    \
    PAGODA_DECODE_SIZE(NAME, T, 128)                                                                                   \
    PAGODA_DECODE_SIZE(NAME, T, 256)                                                                                   \
    PAGODA_DECODE(few_##NAME##_128_native, T, 128, NATIVE, true)                                                       \
    PAGODA_DECODE(NAME##_64_int4, T, 64, INT4)                                                                         \
    PAGODA_DECODE(NAME##_64_fp8, T, 64, FP8)                                                                           \
    PAGODA_DECODE(NAME##_128_int4, T, 128, INT4)                                                                       \
    PAGODA_DECODE(NAME##_128_fp8, T, 128, FP8)

PAGODA_DECODE_TYPE(f16, __half)
PAGODA_DECODE_TYPE(bf16, __nv_bfloat16)

}  // namespace pagoda
