// Copies tokens of one user and layer out of their pages into contiguous memory, and back, as bytes: a history on its
// way to the host and from it. Packed memory has the keys of `held` tokens, then their values; `count` of them from
// `skip` on are copied.

#include <cstdint>

#include "common/mirrored.cuh"

namespace pagoda {

struct Move {
    void *pool;
    void *packed;
    const int *pages;
    int64_t pool_pages;
    int64_t held;
    int64_t skip;
    int64_t first;  // the first token's place in the pages
    int64_t count;
    int32_t page_entries;
    int32_t page_size;
    int32_t row_bytes;
};
PAGODA_MIRRORED(common, Move)

// A warp a row.
template <class Unit, bool PACK> __device__ void move_tokens(const Move &move) {
    int64_t units = move.row_bytes / static_cast<int64_t>(sizeof(Unit));
    int64_t warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / 32);
    for (int64_t row = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32; row < 2 * move.count; row += warps) {
        int64_t half = row >= move.count, token = row - half * move.count, place = move.first + token;
        int64_t entry = place / move.page_size;
        if (entry >= move.page_entries) continue;
        int64_t page = move.pages[entry];
        if (page < 0 || page >= move.pool_pages) continue;
        Unit *in_pool = static_cast<Unit *>(move.pool) + ((page * 2 + half) * move.page_size + place % move.page_size) * units;
        Unit *packed = static_cast<Unit *>(move.packed) + (half * move.held + move.skip + token) * units;
        const Unit *from = PACK ? in_pool : packed;
        Unit *to = PACK ? packed : in_pool;
        for (int64_t unit = threadIdx.x % 32; unit < units; unit += 32) to[unit] = from[unit];
    }
}

#define KERNELS(WIDTH, UNIT)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256) pack_##WIDTH(const __grid_constant__ Move move) {                \
        move_tokens<UNIT, true>(move);                                                                                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) unpack_##WIDTH(const __grid_constant__ Move move) {              \
        move_tokens<UNIT, false>(move);                                                                                \
    }

KERNELS(16, uint4)
KERNELS(4, uint32_t)
KERNELS(2, uint16_t)

}  // namespace pagoda
