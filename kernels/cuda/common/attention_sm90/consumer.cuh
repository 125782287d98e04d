// The warpgroups of the attention on Hopper that compute: main loop, split-KV, epilogue.
#pragma once

#include "common/attention_sm90/epilogue.cuh"

namespace pagoda {
namespace sm90 {

// Goes over the tiles of a part (split_kv.cuh), and leaves the sums of its segments in their slots. `complete`: the
// tiles are all that there are. True where the loop has the sums over all keys afterwards.
template <class T, class S>
__device__ bool run_part(Mainloop<T, S> &loop, const typename S::Variant::Mask &mask, const Common &common,
                         bool complete, bool has_rows) {
    // Behind the third tile the stores of the part before have arrived, and every warpgroup has started this one,
    // because they take turns. When two tiles are left it is time to read the state of the other parts; not before this
    // one is marked as taken.
    auto early = [](const Item<S> &now) { return now.begin + 2; };
    auto late = [](const Item<S> &now) { return max(now.end - 3, now.begin + 2); };
    // Read from shared memory each time: the main loop has no registers to spare.
    auto now = [&]() -> const Item<S> & { return loop.ring.record(loop.number); };
    auto slot = [&] { return Slot<S>{common, loop.ring, now().slot, now().role}; };
    auto next = [&](int index) {
        int next = NO_END;
        for (int at : {early(now()), now().ends[0] - 1, now().ends[1] - 1, now().ends[2] - 1, late(now())}) {
            if (at > index) next = min(next, at);
        }
        return next;
    };
    bool parted = !complete && has_rows;
    if (!has_rows) {
        // This warpgroup has no rows here, but other parts may wait for what it stored before.
        Slot<S>::meet();
        Slot<S>::tell(common, loop.ring);
    }
    for (int i = 0; parted && i < SEGMENTS - 1; i++) {
        if (now().ends[i] == now().begin) slot().put(loop.sums, i);
    }
    int when = loop.run(mask, next(loop.item.begin - 1), [&](int index) {
        Slot<S>::tell(common, loop.ring);
        if (index == early(now())) slot().say_taken();
        for (int i = 0; i < SEGMENTS - 1; i++) {
            if (index == now().ends[i] - 1) slot().put(loop.sums, i);
        }
        if (index == late(now()) && now().slot >= 0) slot().look_early();
        return next(index);
    });
    // What the warpgroup had too few tiles to do in the loop.
    bool looked = when > late(now());
    if (when <= early(now())) {
        Slot<S>::meet();
        Slot<S>::tell(common, loop.ring);
    }
    for (int i = 0; parted && i < SEGMENTS - 1; i++) {
        int end = now().ends[i];
        if (end != NO_END && end > now().begin && end > when) slot().put(loop.sums, i);
    }
    return parted ? slot().leave(loop.sums, looked) : complete;
}

// A consumer warpgroup's part of an item; `at` is the place of its first tile. Returns the place of the next item's.
template <class T, class S>
__device__ int compute(const Call &call, const Ring<S> &ring, const Item<S> &item, int number, int at,
                       const Common &common) {
    Mainloop<T, S> loop{call, ring, item, number, at, {call}};
    int group_first = item.first + loop.rows_at(), first_row = group_first + own_row(), last = item.user.rows - 1;
    typename S::Variant::Mask mask(call, item.user, group_first, first_row, last);
    bool complete = S::MODE == Mode::Whole || item.slot < 0;
    loop.clear();
    if constexpr (S::MODE == Mode::Parts) {
        complete = run_part(loop, mask, common, complete, group_first <= last);
    } else {
        loop.run(mask, 0, [](int) { return 0; });
    }
    if (complete) write_rows(loop, first_row, last);
    if constexpr (S::MODE == Mode::Cluster) {
        if (!complete) write_cluster(loop);
    }
    return loop.at;
}

}  // namespace sm90
}  // namespace pagoda
