// PagedAttention of sequences with many new tokens (prefill): bf16 and f16, D = 64, 96, 128, 256. And the append in front of
// it, and the weights of slots behind it.

#include "llm/paged_append.cuh"
#include "llm/paged_weights.cuh"

namespace pagoda {
namespace paged {

// A warp appends the key or the value of one head of one row. `decoded`: rows of sequences with few new tokens too, which the
// kernel that decodes appends otherwise.
template <class T, int D> __device__ void append(const PagedCall &call, int decoded) {
#if __CUDA_ARCH__ >= 900
    wait_for_previous();
    launch_dependents();
#endif
    int64_t task = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (task >= static_cast<int64_t>(call.total_rows) * call.kv_heads * 2) return;
    int which = static_cast<int>(task % 2), head = static_cast<int>(task / 2 % call.kv_heads);
    int row = static_cast<int>(task / 2 / call.kv_heads);
    FoundSequence found(call, row, [&](int number) { return static_cast<int64_t>(call.row_offsets[number]); });
    const Sequence &sequence = found.sequence;
    if (found.number < 0 || row < sequence.row || row >= sequence.row + sequence.rows) return;
    if (!decoded && is_decode(sequence.rows, call.query_heads / call.kv_heads)) return;
    append_row<T, D>(call, sequence, row, head, which, write_slot(call, sequence, row, head), threadIdx.x & 31);
}

}  // namespace paged

#define PAGODA_PREFILL(NAME, T, D, FORMAT)                                                                             \
    extern "C" __global__ void __launch_bounds__(paged::Prefill<T, D, FORMAT>::THREADS)                               \
        paged_prefill_##NAME(const __grid_constant__ PagedCall call) {                                                 \
        paged::prefill<T, D, FORMAT>(call);                                                                            \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(paged::Prefill<T, D, FORMAT>::THREADS)                               \
        paged_weigh_rows_##NAME(const __grid_constant__ PagedCall call) {                                              \
        paged::weigh_rows<T, D, FORMAT>(call);                                                                         \
    }
#define PAGODA_APPEND(NAME, T, D)                                                                                      \
    extern "C" __global__ void __launch_bounds__(128)                                                                 \
        paged_append_first_##NAME##_##D(const __grid_constant__ PagedCall call, int decoded) {                         \
        paged::append<T, D>(call, decoded);                                                                            \
    }
#define PAGODA_PREFILL_TYPE(NAME, T)                                                                                   \
    PAGODA_APPEND(NAME, T, 64)                                                                                         \
    PAGODA_APPEND(NAME, T, 96)                                                                                         \
    PAGODA_APPEND(NAME, T, 128)                                                                                        \
    PAGODA_APPEND(NAME, T, 256)                                                                                        \
    PAGODA_PREFILL(NAME##_64_native, T, 64, NATIVE)                                                                    \
    PAGODA_PREFILL(NAME##_64_int8, T, 64, INT8)                                                                        \
    PAGODA_PREFILL(NAME##_64_int4, T, 64, INT4)                                                                        \
    PAGODA_PREFILL(NAME##_64_fp8, T, 64, FP8)                                                                          \
    PAGODA_PREFILL(NAME##_96_native, T, 96, NATIVE)                                                                    \
    PAGODA_PREFILL(NAME##_96_int8, T, 96, INT8)                                                                        \
    PAGODA_PREFILL(NAME##_128_native, T, 128, NATIVE)                                                                  \
    PAGODA_PREFILL(NAME##_128_int8, T, 128, INT8)                                                                      \
    PAGODA_PREFILL(NAME##_128_int4, T, 128, INT4)                                                                      \
    PAGODA_PREFILL(NAME##_128_fp8, T, 128, FP8)                                                                        \
    PAGODA_PREFILL(NAME##_256_native, T, 256, NATIVE)                                                                  \
    PAGODA_PREFILL(NAME##_256_int8, T, 256, INT8)

PAGODA_PREFILL_TYPE(f16, __half)
PAGODA_PREFILL_TYPE(bf16, __nv_bfloat16)

}  // namespace pagoda
