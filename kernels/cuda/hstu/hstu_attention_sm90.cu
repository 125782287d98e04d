// HstuAttention on Hopper (sm_90a): bf16 and f16, D = 32, 64, 128, 256.
//
// An item is 128 (192, 64) rows of one user and head against the keys that they see. There are as many blocks as multiprocessors,
// and each goes through its share of the items. One of its warps fetches: it finds the items, and the copy engine brings
// queries, and tiles of keys and values page by page, into rings in shared memory, ahead of their use. Two or three warpgroups
// of 64 rows compute: while one turns scores into weights, another has the matrix units (in clusters one of them computes, which
// multiplies the next scores meanwhile). Under a causal mask the first rows of
// a user see few keys and the last see all: an item from either end makes a piece, so that pieces are alike.
//
// Where a user brings few rows against many keys (`is_split`), the keys of an item are cut into segments, whose sums are
// added up in a fixed order: by the blocks of a cluster through one another's shared memory, or, where there are many more items
// than clusters, in device memory (hopper_parts.cuh). Where most users are split, one kernel does these and the others.
//
// Warps that have nothing else to do append the new rows to the pages, where the call asks for it, and write zeros for rows that
// are not computed.

#include "common/attention_sm90/kernel.cuh"
#include "hstu/hstu_variant.cuh"

namespace pagoda {

template <int D, sm90::Mode MODE> using Hstu = sm90::Traits<HstuVariant, D, MODE>;

#define KERNEL(NAME, T, D)                                                                                             \
    extern "C" __global__ void __launch_bounds__(Hstu<D, sm90::Mode::Whole>::THREADS, 1) hopper_##NAME(                \
        const __grid_constant__ Call call, const __grid_constant__ sm90::AttentionMaps maps, int granule, int per, int duties) { \
        sm90::Common none(nullptr, nullptr, 0);                                                                        \
        sm90::attend<T, Hstu<D, sm90::Mode::Whole>>(call, maps, granule, per, duties, none);                           \
    }                                                                                                                  \
    extern "C" __global__ void __cluster_dims__(sm90::CLUSTER, 1, 1)                                                   \
        __launch_bounds__(Hstu<D, sm90::Mode::Cluster>::THREADS, 1) hopper_split_##NAME(                               \
            const __grid_constant__ Call call, const __grid_constant__ sm90::AttentionMaps maps, int granule, int duties) { \
        sm90::Common none(nullptr, nullptr, 0);                                                                        \
        sm90::attend<T, Hstu<D, sm90::Mode::Cluster>>(call, maps, granule, 1, duties, none);                           \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(Hstu<D, sm90::Mode::Parts>::THREADS, 1) hopper_parts_##NAME(          \
        const __grid_constant__ Call call, const __grid_constant__ sm90::AttentionMaps maps, int granule, int duties,  \
        unsigned *counters, void *scratch, int64_t blocks) {                                                           \
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
