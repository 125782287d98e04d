// PagedAttention of sequences with many new tokens (prefill) on Hopper (sm_90a): bf16 and f16 pages, D = 64 and 128, without
// softcap, slopes and slots of heads. And what goes in front of it.

#include "llm/paged_attention_sm90.cuh"

namespace pagoda {

constexpr int PLACING = 256;

// The rows of sequences with many new tokens, a block each: its queries are rotated into `queries`, where the call rotates them, and
// its keys and values go into their pages. `decoded`: keys and values of sequences with few new tokens too, which the kernel that
// decodes appends otherwise. A thread has the same eight columns of several heads. What matters is how many blocks a multiprocessor
// has: with loads of all heads in front of the look-up, and three blocks instead of four, it is slower.
template <class T, int D> __device__ void place(const PagedCall &call, T *queries, int decoded) {
    wait_for_previous();
    launch_dependents();
    constexpr int CHUNKS = D / 8, SIDE = PLACING / CHUNKS;
    int row = blockIdx.x, column = threadIdx.x % CHUNKS * 8;
    paged::FoundSequence found(call, row, [&](int number) { return static_cast<int64_t>(call.row_offsets[number]); });
    const Sequence &sequence = found.sequence;
    if (found.number < 0 || row < sequence.row || row >= sequence.row + sequence.rows) return;
    if (!decoded && paged::is_decode(sequence.rows, call.query_heads / call.kv_heads)) return;
    const bool rotates = call.cos != nullptr && column < 2 * call.half_width, whole = rotates && Angles::suit(call);
    Angles angles = whole ? Angles(call, Angles::position(call, row), column) : Angles{};
    int slot = sequence.cached + row - sequence.row;
    int64_t key = sequence.block(call, slot, 0, 0), value = sequence.block(call, slot, 1, 0);
    // Queries, keys, values.
    int first = call.cos != nullptr ? 0 : call.query_heads, heads = call.query_heads + 2 * call.kv_heads;
#pragma unroll 4
    for (int head = first + threadIdx.x / CHUNKS; head < heads; head += SIDE) {
        const bool is_query = head < call.query_heads, is_value = head >= call.query_heads + call.kv_heads;
        const void *rows = is_query ? call.query : is_value ? call.value : call.key;
        int own = is_query ? head : is_value ? head - call.query_heads - call.kv_heads : head - call.query_heads;
        int64_t number = static_cast<int64_t>(row) * (is_query ? call.query_heads : call.kv_heads) + own;
        const T *from = static_cast<const T *>(rows) + number * D;
        uint4 numbers = *reinterpret_cast<const uint4 *>(from + column);
        if (rotates && !is_value) {
            numbers = whole ? angles.turn<T>(numbers, Angles::others(call, from, column, numbers))
                            : rotated_numbers(call, from, row, column);
        }
        int64_t block = is_value ? value : key;
        T *to = is_query ? queries + number * D : static_cast<T *>(call.pool) + (block + own) * D;
        if (is_query || block >= 0) *reinterpret_cast<uint4 *>(to + column) = numbers;
    }
}

#define PAGODA_PREFILL(NAME, T, D)                                                                                     \
    extern "C" __global__ void __launch_bounds__(sm90::Traits<sm90::SoftmaxVariant, D, sm90::Mode::Whole>::THREADS, 1) \
        paged_prefill_##NAME##_##D(const __grid_constant__ Call call, const __grid_constant__ sm90::AttentionMaps maps, \
                                   const __grid_constant__ PagedCall paged, int granule, int per) {                    \
        sm90::prefill<T, sm90::Traits<sm90::SoftmaxVariant, D, sm90::Mode::Whole>>(call, maps, paged, granule, per);   \
    }
#define PAGODA_PLACE(NAME, T, D)                                                                                       \
    extern "C" __global__ void __launch_bounds__(PLACING)                                                             \
        paged_place_##NAME##_##D(const __grid_constant__ PagedCall call, T *queries, int decoded) {                    \
        place<T, D>(call, queries, decoded);                                                                           \
    }
#define PAGODA_PREFILL_TYPE(NAME, T)                                                                                   \
    PAGODA_PLACE(NAME, T, 64)                                                                                          \
    PAGODA_PLACE(NAME, T, 128)                                                                                         \
    PAGODA_PREFILL(NAME, T, 64)                                                                                        \
    PAGODA_PREFILL(NAME, T, 128)

PAGODA_PREFILL_TYPE(f16, __half)
PAGODA_PREFILL_TYPE(bf16, __nv_bfloat16)

}  // namespace pagoda
