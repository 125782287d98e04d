// The attention on Hopper as a whole: which warp does what.
#pragma once

#include "common/attention_sm90/consumer.cuh"
#include "common/attention_sm90/tile_scheduler.cuh"
#include "common/dependent_launch.cuh"

namespace pagoda {
namespace sm90 {

// The work of idle warps, a row each. There are `idle` of them in each block, and this is number `warp`.
template <class S> __device__ void work_beside(const Call &call, int duties, int warp, int idle) {
    int64_t step = static_cast<int64_t>(gridDim.x) * idle;
    for (int64_t row = static_cast<int64_t>(blockIdx.x) * idle + warp; row < call.total_rows; row += step) {
        S::Variant::beside(call, duties, static_cast<int>(row));
    }
}

template <class T, class S>
__device__ void attend(const Call &call, const AttentionMaps &maps, int granule, int per, int duties,
                       const Common &common) {
    constexpr int FETCHING = S::COMPUTING / 32, FIRST_IDLE = FETCHING + (S::MODE == Mode::Parts ? 2 : 1);
    extern __shared__ __align__(1024) uint8_t shared[];
    Ring<S> ring(shared);
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    // The kernels behind work on other rows, or wait for the end of this one.
    launch_dependents();
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
            work_beside<S>(call, duties, warp - FIRST_IDLE, FETCHING + 4 - FIRST_IDLE);
        }
        // Made by the warps that need one: it begins with a division.
        auto scheduler = [&] {
            return TileScheduler<S>{call, ring, per, duties, common, {call, maps, granule, ring, duties}};
        };
        if (warp == FETCHING) {
            scheduler().run();
        } else if (S::MODE == Mode::Parts) {
            if (warp == FETCHING + 1) scheduler().plan_parts();
        } else if (S::MODE == Mode::Cluster) {
            // Idle, but the barriers of a cluster count all of its threads.
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
    // The end of this kernel implies the end of the one in front: the next kernel on the stream relies on that.
    if (S::SPLIT) wait_for_previous();
}

}  // namespace sm90
}  // namespace pagoda
