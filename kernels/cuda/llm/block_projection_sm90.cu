// `BlockLinear` on Hopper: products with a weight in blocks, of few rows (block_weight_sm90.cuh). For many rows the weight is
// opened into memory, for cuBLASLt.

#include "llm/block_weight_sm90.cuh"

namespace pagoda {
namespace opened {

constexpr int THREADS = 256, BLOCK = 32, EIGHT = 8;

// Opens eight numbers a thread into `y`, [width, inner]: `count` of them in all.
template <class T, int BITS> __device__ void open(const uint8_t *codes, const T *scales, T *y, int64_t count) {
    begin();
    int64_t at = (static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x) * EIGHT;
    if (at >= count) return;
    uint2 words{};
    if constexpr (BITS == 4) words.x = __ldcs(reinterpret_cast<const uint32_t *>(codes + at / 2));
    else words = __ldcs(reinterpret_cast<const uint2 *>(codes + at));
    float scale = wide(scales[at / BLOCK]);
    alignas(16) T numbers[EIGHT];
#pragma unroll
    for (int i = 0; i < EIGHT; i++) {
        uint32_t word = BITS == 8 && i >= 4 ? words.y : words.x;
        int code = word >> i % (32 / BITS) * BITS & ((1 << BITS) - 1);
        narrow((code - (1 << (BITS - 1))) * scale, &numbers[i]);
    }
    *reinterpret_cast<uint4 *>(y + at) = *reinterpret_cast<const uint4 *>(numbers);
}

}  // namespace opened

#define FEW(NAME, T, BITS, COLUMNS, ...)                                                                               \
    extern "C" __global__ void __launch_bounds__(few_rows::THREADS, 1) few_blocks_##BITS##_##NAME##_##COLUMNS(         \
        const __grid_constant__ few_rows::FewRows call, const __grid_constant__ few_rows::FewRowsMaps maps) {          \
        few_rows::multiply<few_rows::Blocks<T, BITS, COLUMNS, __VA_ARGS__>>(call, maps);                               \
    }

// Columns, stages, blocks at a time, and whether the next ones are made meanwhile. With few stages two kernels have a
// multiprocessor, so that one fetches while the other ends.
#define KERNELS(NAME, T)                                                                                               \
    FEW(NAME, T, 4, 8, 4, 2, 2)                                                                                        \
    FEW(NAME, T, 4, 16, 3, 2, 2)                                                                                       \
    FEW(NAME, T, 4, 32, 5, 1, 1)                                                                                       \
    FEW(NAME, T, 4, 64, 3, 1, 1)                                                                                       \
    FEW(NAME, T, 8, 8, 5, 2, 2)                                                                                        \
    FEW(NAME, T, 8, 16, 4, 1, 2)                                                                                       \
    FEW(NAME, T, 8, 32, 4, 1, 2)                                                                                       \
    FEW(NAME, T, 8, 64, 3, 1, 1)                                                                                       \
    extern "C" __global__ void __launch_bounds__(opened::THREADS)                                                      \
        open_4_##NAME(const uint8_t *codes, const T *scales, T *y, int64_t count) {                                    \
        opened::open<T, 4>(codes, scales, y, count);                                                                   \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(opened::THREADS)                                                      \
        open_8_##NAME(const uint8_t *codes, const T *scales, T *y, int64_t count) {                                    \
        opened::open<T, 8>(codes, scales, y, count);                                                                   \
    }

KERNELS(f16, __half)
KERNELS(bf16, __nv_bfloat16)

}  // namespace pagoda
