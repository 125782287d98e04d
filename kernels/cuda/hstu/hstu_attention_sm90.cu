// HstuAttention on Hopper (sm_90a): bf16 and f16, D = 32, 64, 128, 256. A warp-specialised kernel with FP32
// accumulators.
//
// The unit of work is an item: a block of 64, 128 or 192 query rows of one user and head, against the keys that they
// see. The kernel is persistent: there are as many thread blocks as multiprocessors, and each goes through its share of
// the items. One producer warp finds the items and fetches: the TMA (Tensor Memory Accelerator, Hopper's copy engine)
// brings queries, and tiles of keys and values page by page, into rings in shared memory, ahead of their use. One to
// three consumer warpgroups of 64 rows each compute by wgmma, the tensor cores' instructions for a warpgroup: while one
// turns scores into weights, another has the tensor cores. Under a causal mask the first rows of a user see few keys
// and the last see all. So an item from either end makes a piece, and pieces cost about the same.
//
// Split-KV: where a user has few rows against many keys (`is_split`), the keys of an item are cut into segments, and
// the sums of the segments are added up in a fixed order. Two kernels do that: `Mode::Cluster` adds through the shared
// memory of a cluster of blocks; `Mode::Parts`, for many more items than there are clusters, adds in device memory
// (common/attention_sm90/split_kv.cuh). Where most users are split, one kernel does the others too.
//
// Idle warps append the new rows to the pages, where the call asks for it, and write zeros for rows that are not
// computed.
//
// The loop is in common/attention_sm90, which knows no model. What makes it HSTU's is in hstu_variant.cuh.

#include "common/attention_sm90/kernel.cuh"
#include "hstu/hstu_variant.cuh"

namespace pagoda {

template <int D, sm90::Mode MODE> using Hstu = sm90::Traits<HstuVariant, D, MODE>;

#define KERNEL(NAME, T, D)                                                                                             \
    extern "C" __global__ void __launch_bounds__(Hstu<D, sm90::Mode::Whole>::THREADS, 1)                               \
        hopper_##NAME(const __grid_constant__ Call call, const __grid_constant__ sm90::AttentionMaps maps, int granule,\
                      int per, int duties) {                                                                           \
        sm90::Common none(nullptr, nullptr, 0);                                                                        \
        sm90::attend<T, Hstu<D, sm90::Mode::Whole>>(call, maps, granule, per, duties, none);                           \
    }                                                                                                                  \
    extern "C" __global__ void __cluster_dims__(sm90::CLUSTER, 1, 1)                                                   \
        __launch_bounds__(Hstu<D, sm90::Mode::Cluster>::THREADS, 1)                                                    \
        hopper_split_##NAME(const __grid_constant__ Call call, const __grid_constant__ sm90::AttentionMaps maps,       \
                            int granule, int duties) {                                                                 \
        sm90::Common none(nullptr, nullptr, 0);                                                                        \
        sm90::attend<T, Hstu<D, sm90::Mode::Cluster>>(call, maps, granule, 1, duties, none);                           \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(Hstu<D, sm90::Mode::Parts>::THREADS, 1)                               \
        hopper_parts_##NAME(const __grid_constant__ Call call, const __grid_constant__ sm90::AttentionMaps maps,       \
                            int granule, int duties, unsigned *counters, void *scratch, int64_t blocks) {              \
        sm90::Common common(counters, scratch, blocks);                                                                \
        sm90::attend<T, Hstu<D, sm90::Mode::Parts>>(call, maps, granule, 1, duties, common);                           \
    }

KERNEL(f16_32, __half, 32)
KERNEL(f16_64, __half, 64)
KERNEL(f16_128, __half, 128)
KERNEL(f16_256, __half, 256)
KERNEL(bf16_32, __nv_bfloat16, 32)
KERNEL(bf16_64, __nv_bfloat16, 64)
KERNEL(bf16_128, __nv_bfloat16, 128)
KERNEL(bf16_256, __nv_bfloat16, 256)

}  // namespace pagoda
