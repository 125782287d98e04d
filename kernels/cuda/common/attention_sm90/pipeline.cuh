// What the warps of the attention on Hopper share: items of work, and the rings in shared memory through which queries,
// keys and values come.
#pragma once

#include "common/attention_sm90/traits.cuh"

namespace pagoda {
namespace sm90 {

// An item: one block of rows against some of its tiles.
template <class S> struct Item {
    User user;       // user.rows < 0: there is no further item
    int head;
    int first;       // row of the user
    Tiles<S::KEYS> tiles;
    int begin, end;  // the tiles that are this block's
    // Parts: the slot where the sums go, -1 if the tiles are all that there are; which segments they are; the tile
    // behind each of a run's segments but the last.
    int slot;
    Role role;
    int ends[SEGMENTS - 1];
};

template <class T> __device__ T *output_at(const Call &call, const User &user, int head, int row) {
    int64_t at = static_cast<int64_t>(user.row + row) * call.heads + head;
    return static_cast<T *>(call.output) + at * call.head_size;
}

// The rings in shared memory: of items with their queries, which count up from 0, and of tiles.
template <class S> struct Ring {
    uint32_t base, barriers;
    // Parts: what is done of each warpgroup's rows, and of which part it has to tell the others.
    int *done, *untold;
    // Records of items: one more than have queries, so that an item can be read until all of its sums are stored;
    // behind them the one that is planned.
    static constexpr int RECORDS = S::ITEMS + 1;
    static_assert(BARRIER_BYTES + (RECORDS + 1) * sizeof(Item<S>) <= 1024, "what the launcher leaves room for");
    Item<S> *items;

    __device__ explicit Ring(uint8_t *shared) {
        base = shared_address(shared);
        barriers = base + S::DATA_BYTES;
        done = reinterpret_cast<int *>(shared + S::DATA_BYTES + BARRIER_BYTES) - 2 * S::GROUPS;
        untold = done + S::GROUPS;
        items = reinterpret_cast<Item<S> *>(shared + S::DATA_BYTES + BARRIER_BYTES);
    }

    __device__ uint32_t queries(int item) const { return base + item % S::ITEMS * S::QUERY_BYTES; }
    // Places of tiles count up from 0, keys and values alternating, and wrap around where that saves a division. If the
    // number of buffers is even, values have the buffer behind that of their keys.
    static constexpr bool WRAPS = (S::BUFFERS & (S::BUFFERS - 1)) != 0, EVEN = S::BUFFERS % 2 == 0;
    __device__ static int behind(int place, int by) {
        int next = place + by;
        return WRAPS && next >= 2 * S::BUFFERS ? next - 2 * S::BUFFERS : next;
    }
    __device__ static int buffer(int place) {
        return WRAPS ? (place >= S::BUFFERS ? place - S::BUFFERS : place) : place % S::BUFFERS;
    }
    __device__ static int phase(int place) { return WRAPS ? place >= S::BUFFERS : place / S::BUFFERS & 1; }

    __device__ uint32_t barrier(int number) const { return barriers + number * 8; }
    __device__ uint32_t keys(int at) const { return base + S::ITEMS * S::QUERY_BYTES + buffer(at) * S::TILE_BYTES; }
    __device__ uint32_t keys_full(int at) const { return barrier(buffer(at)); }
    __device__ uint32_t keys_empty(int at) const { return barrier(S::BUFFERS + buffer(at)); }
    // Of the values whose keys' place this is.
    __device__ uint32_t values(int at) const { return EVEN ? keys(at) + S::TILE_BYTES : keys(behind(at, 1)); }
    __device__ uint32_t values_full(int at) const { return EVEN ? keys_full(at) + 8 : keys_full(behind(at, 1)); }
    __device__ uint32_t values_empty(int at) const { return EVEN ? keys_empty(at) + 8 : keys_empty(behind(at, 1)); }
    __device__ static int values_phase(int at) { return phase(EVEN ? at : behind(at, 1)); }
    __device__ uint32_t item_full(int item) const { return barrier(2 * S::BUFFERS + item % S::ITEMS); }
    __device__ uint32_t item_empty(int item) const { return barrier(2 * S::BUFFERS + S::ITEMS + item % S::ITEMS); }
    // Parts: the next item is planned, and there is room for a plan.
    __device__ uint32_t planned() const { return barrier(2 * S::BUFFERS + 2 * S::ITEMS); }
    __device__ uint32_t may_plan() const { return barrier(2 * S::BUFFERS + 2 * S::ITEMS + 1); }
    __device__ static int item_phase(int item) { return item / S::ITEMS & 1; }

    // `fetching`: warps that each fetch a share of a tile.
    __device__ void init(int fetching = 1) const {
        for (int place = 0; place < S::BUFFERS; place++) {
            barrier_init(keys_full(place), fetching);
            barrier_init(keys_empty(place), S::COMPUTING / 32);
        }
        for (int item = 0; item < S::ITEMS; item++) {
            barrier_init(item_full(item), 1);
            // In clusters the idle warps read items too.
            barrier_init(item_empty(item), S::COMPUTING + (S::MODE == Mode::Cluster ? 96 : 0));
        }
        if (S::MODE == Mode::Parts) {
            barrier_init(planned(), 1);
            barrier_init(may_plan(), 32);
            for (int group = 0; group < S::GROUPS; group++) untold[group] = -1;
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }

    // Waits for an item and gives it.
    __device__ Item<S> item(int number) const {
        barrier_wait(item_full(number), item_phase(number));
        return record(number);
    }

    __device__ Item<S> &record(int number) const { return items[number % RECORDS]; }
    __device__ Item<S> &plan() const { return items[RECORDS]; }
};

}  // namespace sm90
}  // namespace pagoda
