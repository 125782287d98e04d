// HstuAttention over a quantised pool. One kernel writes the new history rows of a call into their pages, as codes, and opens
// what the call reads: its rows as they are stored, and the pages of its users as numbers of T. The kernels of native pools
// then take that.

#include "common/dependent_launch.cuh"
#include "common/kv_block.cuh"
#include "hstu/paged_kv_append.cuh"

namespace pagoda {

// The call's pool has the codes.
struct QuantisedPool {
    __half *scales;  // [pages, 2, page_size, H, 2 or 1]
    // What is opened.
    void *key;       // [T, H, D]
    void *value;     // [T, H, D]
    void *pages;     // [page_entries, 2, page_size, H, D]: the pages in the order of the call's page_ids
    int *page_ids;   // [page_entries]
    int row_blocks;  // the first blocks have rows, the others pages
};
PAGODA_MIRRORED(hstu, QuantisedPool)

namespace quantised {

constexpr int THREADS = 256;
constexpr int WIDE = 8;   // numbers that a thread opens at once
constexpr int AHEAD = 4;  // loads that a thread has on their way

// The user whose page list has an entry; -1: none has it. A whole warp calls it.
__device__ inline int owner_of(const Call &call, int entry) {
    int found = -1;
    for (int base = 0; base < call.users; base += 32) {
        int user = base + static_cast<int>(threadIdx.x & 31);
        bool has = false;
        if (user < call.users) {
            int first = clamped(call.page_indptr[user], 0, call.page_entries);
            has = entry >= first && entry < clamped(call.page_indptr[user + 1], first, call.page_entries);
        }
        unsigned those = __ballot_sync(~0u, has);
        if (those != 0) found = base + 31 - __clz(those);
    }
    return found;
}

// A warp has one head of one row: key and value. A lane holds HELD numbers.
template <class T, int FORMAT, int HELD> __device__ void store_row(const Call &call, const QuantisedPool &pool) {
    int lane = threadIdx.x & 31, size = call.head_size;
    int64_t task = static_cast<int64_t>(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    if (task >= static_cast<int64_t>(call.total_rows) * call.heads) return;
    int row = static_cast<int>(task / call.heads), head = static_cast<int>(task % call.heads);
    int64_t slot = append_slot(call, row), at = task * size;
    for (int which = 0; which < 2; which++) {
        const T *from = static_cast<const T *>(which == 0 ? call.key : call.value) + at;
        T *to = static_cast<T *>(which == 0 ? pool.key : pool.value) + at;
        float numbers[HELD] = {};
        for (int i = 0; i < HELD; i++) {
            if (i * 32 + lane < size) numbers[i] = wide(from[i * 32 + lane]);
        }
        if (slot >= 0) {
            int64_t block = (slot + which * call.page_size) * call.heads + head;
            quantise_block(FORMAT, static_cast<uint8_t *>(call.pool), pool.scales, block, size, numbers, lane);
        }
        for (int i = 0; i < HELD; i++) {
            if (i * 32 + lane < size) narrow(numbers[i], to + i * 32 + lane);
        }
    }
}

__device__ inline void put(const float (&numbers)[WIDE], float *to) {
    for (int i = 0; i < WIDE; i += 4) {
        reinterpret_cast<float4 *>(to)[i / 4] = make_float4(numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3]);
    }
}

template <class T> __device__ inline void put(const float (&numbers)[WIDE], T *to) {
    *reinterpret_cast<uint4 *>(to) = make_uint4(Pack<T>::of(numbers[0], numbers[1]), Pack<T>::of(numbers[2], numbers[3]),
                                                Pack<T>::of(numbers[4], numbers[5]), Pack<T>::of(numbers[6], numbers[7]));
}

// Opens `blocks` blocks, which lie side by side, WIDE numbers at a time: heads of a multiple of that, and aligned memory.
template <class T, int FORMAT>
__device__ void open_wide(const uint8_t *codes, const __half *scales, T *to, int blocks, int size) {
    constexpr int BYTES = FORMAT == INT4 ? WIDE / 2 : WIDE;
    int units = blocks * (size / WIDE), of_head = size / WIDE;
    for (int first = threadIdx.x; first < units; first += THREADS * AHEAD) {
        Words<BYTES> words[AHEAD];
        uint32_t ranges[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int unit = min(first + i * THREADS, units - 1);
            words[i] = Words<BYTES>(codes + static_cast<int64_t>(unit) * BYTES);
            ranges[i] = load_range<FORMAT>(scales, unit / of_head);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int unit = first + i * THREADS;
            if (unit >= units) break;
            Range range = open_range(ranges[i]);
            float numbers[WIDE];
#pragma unroll
            for (int j = 0; j < WIDE; j++) numbers[j] = words[i].template number<FORMAT>(j, range);
            put(numbers, to + static_cast<int64_t>(unit) * WIDE);
        }
    }
}

// The same for any heads, number by number.
template <class T, int FORMAT>
__device__ void open_narrow(const uint8_t *codes, const __half *scales, T *to, int blocks, int size) {
    for (int64_t at = threadIdx.x; at < static_cast<int64_t>(blocks) * size; at += THREADS) {
        Range range = open_range(load_range<FORMAT>(scales, at / size));
        float number;
        if constexpr (FORMAT == FP8) number = from_fp8(codes[at]) * range.scale;
        else if constexpr (FORMAT == INT8) number = fmaf(static_cast<float>(codes[at]), range.scale, range.low);
        else number = fmaf(static_cast<float>(codes[at / 2] >> (at % 2 * 4) & 15), range.scale, range.low);
        narrow(number, to + at);
    }
}

// A block has the keys of a page, or its values: those of tokens that were cached before the call.
template <class T, int FORMAT> __device__ void open_page(const Call &call, const QuantisedPool &pool, bool is_wide) {
    int number = static_cast<int>(blockIdx.x) - pool.row_blocks, entry = number / 2, which = number % 2;
    if (entry >= call.page_entries) return;
    int page = call.page_ids[entry];
    bool is_page = page >= 0 && page < call.pool_pages;
    if (which == 0 && threadIdx.x == 0) pool.page_ids[entry] = is_page ? entry : -1;
    int user = owner_of(call, entry);
    if (!is_page || user < 0) return;
    const int *pages;
    int page_count;
    int cached = cached_of(call, user, rows_of(call, user), pages, page_count);
    int64_t before = static_cast<int64_t>(call.page_ids + entry - pages) * call.page_size;
    int blocks = clamped(cached - before, 0, call.page_size) * call.heads, size = call.head_size;
    int64_t rows = static_cast<int64_t>(call.page_size) * call.heads;
    int64_t from = (static_cast<int64_t>(page) * 2 + which) * rows, to = (static_cast<int64_t>(entry) * 2 + which) * rows;
    constexpr int RANGES = FORMAT == FP8 ? 1 : 2;
    const uint8_t *codes = static_cast<const uint8_t *>(call.pool) + from * size / (FORMAT == INT4 ? 2 : 1);
    const __half *scales = pool.scales + from * RANGES;
    T *opened = static_cast<T *>(pool.pages) + to * size;
    if (is_wide) open_wide<T, FORMAT>(codes, scales, opened, blocks, size);
    else open_narrow<T, FORMAT>(codes, scales, opened, blocks, size);
}

template <class T, int FORMAT> __device__ void open(const Call &call, const QuantisedPool &pool, bool is_wide) {
    begin();
    if (static_cast<int>(blockIdx.x) >= pool.row_blocks) open_page<T, FORMAT>(call, pool, is_wide);
    else if (call.head_size <= 64) store_row<T, FORMAT, 2>(call, pool);
    else if (call.head_size <= 128) store_row<T, FORMAT, 4>(call, pool);
    else store_row<T, FORMAT, MOST>(call, pool);
}

}  // namespace quantised

#define KERNEL(NAME, T, FORMAT)                                                                                        \
    extern "C" __global__ void __launch_bounds__(quantised::THREADS)                                                   \
        open_##NAME(const __grid_constant__ Call call, const __grid_constant__ QuantisedPool pool, int is_wide) {      \
        quantised::open<T, FORMAT>(call, pool, is_wide != 0);                                                          \
    }
#define KERNELS(NAME, T) KERNEL(NAME##_int8, T, INT8) KERNEL(NAME##_int4, T, INT4) KERNEL(NAME##_fp8, T, FP8)

KERNELS(f32, float)
KERNELS(f16, __half)
KERNELS(bf16, __nv_bfloat16)

}  // namespace pagoda
