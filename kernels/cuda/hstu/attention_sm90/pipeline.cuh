// What the warps of the Hopper kernel share: items, and the rings in shared memory through which queries, keys and values
// come.
#pragma once

#include "common/mirrored.cuh"
#include "common/tma.cuh"
#include "hstu/tiles.cuh"

namespace pagoda {
namespace hopper {

constexpr int BOX = 64;      // rows of a box of queries, keys or values; of pages it is the call's
constexpr int SEGMENTS = 4;  // of the keys of a user that is split
constexpr int CLUSTER = SEGMENTS;
constexpr int NO_END = INT32_MAX;  // of a segment that a part does not have
constexpr int BARRIER_BYTES = 256;  // of shared memory
constexpr int OUTSIDE = INT32_MAX - 1024;  // a row that no tensor has: the copy engine gives zeros

// Barriers by number; 0 is __syncthreads. TURN and ARRIVED have one for each warpgroup that computes.
constexpr int TAIL = 1, TURN = 2, ARRIVED = 5;

// What a block does: all keys of an item; a segment of them, adding up with the other blocks of its cluster, or with others in
// device memory.
enum class Mode { Whole, Cluster, Parts };

// What a kernel does beside: it appends the new rows to the pages; it is the call's only one, so that it has the users who are
// not split too (parts always are); it writes zeros for rows that are not computed. With EARLY nothing on the stream writes the
// index tensors, and no one else has its counters: one that is alone finds out who does what before the kernel in front has ended.
constexpr int APPENDS = 1, ALONE = 2, CLEARS = 4, EARLY = 8;

// Which segments of a block's keys a part has: the first of a half or the second, or a run of all but the last, that one, or all.
enum class Role { First, Second, Last, Run, All };

struct AttentionMaps {
    CUtensorMap query, key, value, pool;
};
PAGODA_MIRRORED(hstu, AttentionMaps)

template <int D_, Mode MODE_> struct Shape {
    static constexpr int D = D_;
    static constexpr Mode MODE = MODE_;
    static constexpr bool SPLIT = MODE != Mode::Whole;
    // Warpgroups that compute. With small heads the weights take as long as the products: a third one fills the gaps, and
    // there are registers for it. Parts have a third one for D = 128 too, with tiles of half the keys so that it fits: the more
    // rows share a tile, the less has to come out of the L2 cache, which gives no more than two warpgroups ask for. Clusters have
    // one: there are few rows, and the fewer a block has, the more blocks there are for them.
    static constexpr int GROUPS = MODE == Mode::Cluster ? 1 : D <= 64 || (D == 128 && MODE == Mode::Parts) ? 3 : 2;
    static constexpr int ROWS = 64 * GROUPS;
    static constexpr int COMPUTING = 128 * GROUPS;         // threads
    static constexpr int THREADS = COMPUTING + 128;        // one warp of the last four fetches, another plans
    // A block begins with 65,536 shared out among its threads, rounded down to 8 for each; a warpgroup that asks for more
    // than the others have left waits for ever. What the computing ones can spare, those that fetch and plan make use of.
    static constexpr int REGISTERS = GROUPS == 2 ? 232 : D == 128 ? 152 : 160;
    static constexpr int FETCHING_REGISTERS = GROUPS == 2 ? 40 : D == 128 ? 56 : 32;
    static_assert(GROUPS == 1 || GROUPS * REGISTERS + FETCHING_REGISTERS <= (GROUPS + 1) * (65536 / THREADS / 8 * 8),
                  "registers");
    static constexpr int KEYS = D == 256 || (D == 128 && GROUPS == 3) ? 64 : 128;  // of a tile
    static constexpr int SEGMENT_KEYS = D == 256 ? 64 : 128;  // segments begin at multiples, whatever the tiles are
    // Tiles of keys or values in shared memory at once, in turn. Few blocks look at a split user's pages, so they come from far
    // away: more of them.
    static constexpr int BUFFERS = D <= 64 ? (MODE == Mode::Whole ? 8 : MODE == Mode::Cluster ? 12 : 10)
                                   : MODE == Mode::Cluster ? 6 : D == 256 ? 5 : MODE == Mode::Whole ? 4 : 8;
    static constexpr int ITEMS = D == 256 || MODE == Mode::Cluster ? 1 : 2;  // whose queries are in shared memory at once
    static constexpr int COLUMNS = D < 64 ? D : 64;        // of a box
    static constexpr int BOXES = D / COLUMNS;
    static constexpr int ROW_BYTES = COLUMNS * 2;
    static constexpr int QUERY_BYTES = ROWS * D * 2;
    static constexpr int TILE_BYTES = KEYS * D * 2;
    static constexpr int PARTS = D / (D < 128 ? D : 128);  // the sums of a row are computed 128 at a time
    static constexpr int PART = D / PARTS;
    static constexpr int DATA_BYTES = ITEMS * QUERY_BYTES + BUFFERS * TILE_BYTES;
    static constexpr int SUM_STRIDE = D + 8;               // floats from row to row where blocks exchange sums
    static_assert(MODE != Mode::Cluster || ROWS * SUM_STRIDE * 4 <= DATA_BYTES, "sums are exchanged where tiles were");
    static_assert((2 * BUFFERS + 2 * ITEMS + 2) * 8 + 2 * GROUPS * 4 <= BARRIER_BYTES, "items come behind the barriers");
};

// One block of rows against some of its tiles.
template <class S> struct Item {
    User user;       // user.rows < 0: there is no further item
    int head;
    int first;       // row of the user
    Tiles<S::KEYS> tiles;
    int begin, end;  // the tiles that are this block's
    // Parts: the slot where the sums go, -1 if the tiles are all that there are; which segments they are; the tile behind each of a
    // run's segments but the last.
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
    // One more than have queries, so that one may be looked up until all of its sums are left; behind them the one that is planned.
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
    // Places of tiles count up from 0, keys and values in turn, and begin again where that saves a division. Where the buffers
    // are an even number, values have the one behind their keys'.
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

    __device__ void init() const {
        for (int place = 0; place < S::BUFFERS; place++) {
            barrier_init(keys_full(place), 1);
            barrier_init(keys_empty(place), S::COMPUTING / 32);
        }
        for (int item = 0; item < S::ITEMS; item++) {
            barrier_init(item_full(item), 1);
            // In clusters the warps that are idle look at items too.
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

}  // namespace hopper
}  // namespace pagoda
