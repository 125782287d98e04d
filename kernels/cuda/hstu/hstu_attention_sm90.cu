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

#include "common/dependent_launch.cuh"
#include "hstu/attention_sm90/mainloop.cuh"
#include "hstu/attention_sm90/producer.cuh"
#include "hstu/paged_kv_append.cuh"

namespace pagoda {
namespace hopper {

// Zeros for a row that is not computed; a warp writes them.
__device__ inline void clear_row(const Call &call, int row) {
    int number = user_of(call, row);
    if (number < 0) return;
    User user = load_user(call, number);
    if (row - user.row >= user.skipped) return;
    int64_t units = static_cast<int64_t>(call.heads) * call.head_size * 2 / sizeof(uint4);
    uint4 *to = static_cast<uint4 *>(call.output) + row * units;
    for (int64_t i = threadIdx.x % 32; i < units; i += 32) to[i] = make_uint4(0, 0, 0, 0);
}

// What idle warps do, a row each: `idle` of each block, of which this is number `warp`.
__device__ inline void work_beside(const Call &call, int duties, int warp, int idle) {
    int64_t step = static_cast<int64_t>(gridDim.x) * idle;
    for (int64_t row = static_cast<int64_t>(blockIdx.x) * idle + warp; row < call.total_rows; row += step) {
        if ((duties & APPENDS) != 0) append_row<uint4>(call, static_cast<int>(row), 2);
        if ((duties & CLEARS) != 0) clear_row(call, static_cast<int>(row));
    }
}

template <class T, class S>
__device__ void attend(const Call &call, const AttentionMaps &maps, int granule, int per, int duties, const Common &common) {
    constexpr int FETCHING = S::COMPUTING / 32, FIRST_IDLE = FETCHING + (S::MODE == Mode::Parts ? 2 : 1);
    extern __shared__ __align__(1024) uint8_t shared[];
    Ring<S> ring(shared);
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    // What follows works on other rows, or waits for this kernel's end.
    let_follow();
    if (threadIdx.x == 0) {
        for (const CUtensorMap *map : {&maps.query, &maps.key, &maps.value, &maps.pool}) prefetch_map(map);
        ring.init();
    }
    bool alone = S::MODE == Mode::Parts || (S::MODE == Mode::Cluster && (duties & ALONE) != 0);
    if (alone && (duties & EARLY) == 0) wait_for_previous();
    __syncthreads();
    if (warp >= FETCHING) {
        if (S::GROUPS > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::FETCHING_REGISTERS));
        if (warp >= FIRST_IDLE && (duties & (APPENDS | CLEARS)) != 0) {
            if (alone) wait_for_previous();
            work_beside(call, duties, warp - FIRST_IDLE, FETCHING + 4 - FIRST_IDLE);
        }
        if (warp == FETCHING) {
            Fetching<S>{call, maps, granule, ring, per, duties, common}.run();
        } else if (S::MODE == Mode::Parts) {
            if (warp == FETCHING + 1) Fetching<S>{call, maps, granule, ring, per, duties, common}.plan_parts();
        } else if (S::MODE == Mode::Cluster) {
            // Idle, but a cluster waits for all of its threads.
            for (int number = 0;; number++) {
                Item<S> item = ring.item(number);
                barrier_arrive(ring.item_empty(number));
                if (item.user.rows < 0) break;
                if (item.slot < 0) continue;
                cluster_wait();
                cluster_wait();
            }
        }
    } else {
        if (S::GROUPS > 1) {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::REGISTERS));
            if (warp >= FETCHING - 4) named_arrive(TURN, 256);
        }
        int at = 0;
        for (int number = 0;; number++) {
            Item<S> item = ring.item(number);
            if (item.user.rows < 0) break;
            at = compute<T, S>(call, ring, item, number, at, common);
        }
        if (S::MODE == Mode::Parts) {
            Slot<S>::meet();
            Slot<S>::tell(common, ring);
        }
    }
    // When this kernel has ended, the one that it followed has too: whoever comes next relies on that.
    if (S::SPLIT) wait_for_previous();
}

}  // namespace hopper

#define KERNEL(NAME, T, D)                                                                                             \
    extern "C" __global__ void __launch_bounds__(hopper::Shape<D, hopper::Mode::Whole>::THREADS, 1) hopper_##NAME(       \
        const __grid_constant__ Call call, const __grid_constant__ hopper::AttentionMaps maps, int granule, int per, int duties) { \
        hopper::Common none(nullptr, nullptr, 0);                                                                      \
        hopper::attend<T, hopper::Shape<D, hopper::Mode::Whole>>(call, maps, granule, per, duties, none);              \
    }                                                                                                                  \
    extern "C" __global__ void __cluster_dims__(hopper::CLUSTER, 1, 1)                                                 \
        __launch_bounds__(hopper::Shape<D, hopper::Mode::Cluster>::THREADS, 1) hopper_split_##NAME(                    \
            const __grid_constant__ Call call, const __grid_constant__ hopper::AttentionMaps maps, int granule, int duties) {   \
        hopper::Common none(nullptr, nullptr, 0);                                                                      \
        hopper::attend<T, hopper::Shape<D, hopper::Mode::Cluster>>(call, maps, granule, 1, duties, none);              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(hopper::Shape<D, hopper::Mode::Parts>::THREADS, 1) hopper_parts_##NAME( \
        const __grid_constant__ Call call, const __grid_constant__ hopper::AttentionMaps maps, int granule, int duties,         \
        unsigned *counters, void *scratch, int64_t blocks) {                                                            \
        hopper::Common common(counters, scratch, blocks);                                                               \
        hopper::attend<T, hopper::Shape<D, hopper::Mode::Parts>>(call, maps, granule, 1, duties, common);              \
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
