// PagedAttention of sequences with many new tokens (prefill) on Hopper (sm_90a): bf16 and f16 pages, D = 64 and 128, without
// softcap, slopes and slots of heads. And the rotation of queries in front of it.

#include "llm/paged_attention_sm90.cuh"

namespace pagoda {

// A thread rotates eight numbers of a query head.
template <class T> __device__ void rotate_queries(const PagedCall &call, T *to) {
    wait_for_previous();
    launch_dependents();
    int chunks = call.head_size / 8;
    int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (index >= static_cast<int64_t>(call.total_rows) * call.query_heads * chunks) return;
    int64_t head = index / chunks;
    int column = static_cast<int>(index % chunks) * 8;
    reinterpret_cast<uint4 *>(to)[index] =
        load_query<T>(call, static_cast<int>(head / call.query_heads), static_cast<int>(head % call.query_heads), column);
}

#define PAGODA_PREFILL(NAME, T, D)                                                                                     \
    extern "C" __global__ void __launch_bounds__(sm90::Traits<sm90::SoftmaxVariant, D, sm90::Mode::Whole>::THREADS, 1) \
        paged_prefill_##NAME##_##D(const __grid_constant__ Call call, const __grid_constant__ sm90::AttentionMaps maps, \
                                   const __grid_constant__ PagedCall paged, int granule, int per) {                    \
        sm90::prefill<T, sm90::Traits<sm90::SoftmaxVariant, D, sm90::Mode::Whole>>(call, maps, paged, granule, per);   \
    }
#define PAGODA_PREFILL_TYPE(NAME, T)                                                                                   \
    extern "C" __global__ void __launch_bounds__(256)                                                                 \
        paged_rotate_##NAME(const __grid_constant__ PagedCall call, T *to) {                                           \
        rotate_queries<T>(call, to);                                                                                   \
    }                                                                                                                  \
    PAGODA_PREFILL(NAME, T, 64)                                                                                        \
    PAGODA_PREFILL(NAME, T, 128)

PAGODA_PREFILL_TYPE(f16, __half)
PAGODA_PREFILL_TYPE(bf16, __nv_bfloat16)

}  // namespace pagoda
