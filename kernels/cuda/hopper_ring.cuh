// What the warps of the Hopper kernel share: items, and the rings in shared memory through which queries, keys and values
// come.
#pragma once

#include "async.cuh"
#include "tiles.cuh"

namespace pagoda {
namespace hopper {

constexpr int BOX = 64;      // rows of a box of queries, keys or values; of pages it is the call's
constexpr int SEGMENTS = 8;  // of the keys of a user that is split
constexpr int CLUSTER = SEGMENTS;
constexpr int OUTSIDE = INT32_MAX - 1024;  // a row that no tensor has: the copy engine gives zeros

// Barriers by number; 0 is __syncthreads. TURN has one for each warpgroup that computes.
constexpr int TAIL = 1, TURN = 2;

// What a block does: all keys of an item; a segment of them, adding up with the other blocks of its cluster; a segment of
// them, leaving its sums in device memory for another kernel to add up.
enum class Mode { Whole, Cluster, Parts };

struct Maps {
    CUtensorMap query, key, value, pool;
};

template <int D_, Mode MODE_> struct Shape {
    static constexpr int D = D_;
    static constexpr Mode MODE = MODE_;
    static constexpr bool SPLIT = MODE != Mode::Whole;
    // Warpgroups that compute. With small heads the weights take as long as the products: a third one fills the gaps, and
    // there are registers for it.
    static constexpr int GROUPS = D <= 64 ? 3 : 2;
    static constexpr int ROWS = 64 * GROUPS;
    static constexpr int COMPUTING = 128 * GROUPS;         // threads
    static constexpr int THREADS = COMPUTING + 128;        // the fetching warp has three idle ones beside it
    // A block begins with 65,536 shared out among its threads, rounded down to 8 for each; a warpgroup that asks for more
    // than the others have left waits for ever.
    static constexpr int REGISTERS = GROUPS == 3 ? 160 : 232;
    static constexpr int FETCHING_REGISTERS = GROUPS == 3 ? 32 : 40;
    static_assert(GROUPS * REGISTERS + FETCHING_REGISTERS <= (GROUPS + 1) * (65536 / THREADS / 8 * 8), "registers");
    // Whether the two warpgroups take a segment each where there are rows for one of them alone.
    static constexpr bool PAIRS = MODE == Mode::Parts && GROUPS == 2;
    static constexpr int KEYS = D == 256 ? 64 : 128;       // of a tile
    // Tiles on their way at once. Few blocks look at a split user's pages, so they come from far away: more of them.
    static constexpr int STAGES = D <= 64 ? (SPLIT ? 6 : 4) : D == 128 && SPLIT ? 3 : 2;
    static constexpr int ITEMS = D == 256 || SPLIT ? 1 : 2;  // whose queries are in shared memory at once
    static constexpr int AHEAD = MODE == Mode::Parts ? STAGES - 1 : 0;  // tiles fetched before queries
    static constexpr int COLUMNS = D < 64 ? D : 64;        // of a box
    static constexpr int BOXES = D / COLUMNS;
    static constexpr int ROW_BYTES = COLUMNS * 2;
    static constexpr int QUERY_BYTES = ROWS * D * 2;
    static constexpr int TILE_BYTES = KEYS * D * 2;
    static constexpr int PARTS = D / (D < 128 ? D : 128);  // the sums of a row are computed 128 at a time
    static constexpr int PART = D / PARTS;
    static constexpr int DATA_BYTES = ITEMS * QUERY_BYTES + 2 * STAGES * TILE_BYTES;
    static constexpr int SUM_STRIDE = D + 8;               // floats from row to row where blocks exchange sums
    static_assert(ROWS * SUM_STRIDE * 4 <= DATA_BYTES, "sums are exchanged where tiles were");
    static_assert((4 * STAGES + 2 * ITEMS) * 8 <= 256, "items come behind the barriers");
};

// One block of rows against some of its tiles.
template <class S> struct Item {
    User user;       // user.rows < 0: there is no further item
    int head;
    int first;       // row of the user
    Tiles<S::KEYS> tiles;
    int begin, end;  // the tiles that are this block's
    int64_t slot;    // Parts: where the sums go, in blocks of ROWS rows
    // Pairs: the first warpgroup has the tiles above and the second has these, both for the same 64 rows. The second's
    // are as many or one less, and they come by turns.
    bool pair;
    bool swapped;    // the first warpgroup has the later segment
    int second_begin, second_end;

    // The first tile of a segment, of all that the rows look at.
    __device__ int first_of(int segment) const {
        return static_cast<int>(static_cast<int64_t>(tiles.count()) * segment / SEGMENTS);
    }
    // How many tiles the block goes through, and which the one of that number is.
    __device__ int count() const {
        return end - begin + (S::PAIRS && pair ? second_end - second_begin : 0);
    }
    __device__ int index(int number) const {
        if (!S::PAIRS || !pair) return begin + number;
        return (number & 1 ? second_begin : begin) + number / 2;
    }
};

template <class T> __device__ T *output_at(const Call &call, const User &user, int head, int row) {
    int64_t at = static_cast<int64_t>(user.row + row) * call.heads + head;
    return static_cast<T *>(call.output) + at * call.head_size;
}

// The rings in shared memory: of items with their queries, which count up from 0, and of tiles.
template <class S> struct Ring {
    uint32_t base, barriers;
    Item<S> *items;

    __device__ explicit Ring(uint8_t *shared) {
        base = shared_address(shared);
        barriers = base + S::DATA_BYTES;
        items = reinterpret_cast<Item<S> *>(shared + S::DATA_BYTES + 256);
    }

    __device__ uint32_t queries(int item) const { return base + item % S::ITEMS * S::QUERY_BYTES; }
    // Places of tiles count up from 0, and begin again where that saves a division.
    static constexpr bool WRAPS = (S::STAGES & (S::STAGES - 1)) != 0;
    __device__ static int behind(int tile, int by) {
        int next = tile + by;
        return WRAPS && next >= 2 * S::STAGES ? next - 2 * S::STAGES : next;
    }
    __device__ static int stage(int tile) {
        return WRAPS ? (tile >= S::STAGES ? tile - S::STAGES : tile) : tile % S::STAGES;
    }
    __device__ static int phase(int tile) { return WRAPS ? tile >= S::STAGES : tile / S::STAGES & 1; }

    __device__ uint32_t keys(int tile) const {
        return base + S::ITEMS * S::QUERY_BYTES + stage(tile) * 2 * S::TILE_BYTES;
    }
    __device__ uint32_t values(int tile) const { return keys(tile) + S::TILE_BYTES; }
    __device__ uint32_t barrier(int number) const { return barriers + number * 8; }
    __device__ uint32_t keys_full(int tile) const { return barrier(stage(tile)); }
    __device__ uint32_t values_full(int tile) const { return barrier(S::STAGES + stage(tile)); }
    __device__ uint32_t keys_empty(int tile) const { return barrier(2 * S::STAGES + stage(tile)); }
    __device__ uint32_t values_empty(int tile) const { return barrier(3 * S::STAGES + stage(tile)); }
    __device__ uint32_t item_full(int item) const { return barrier(4 * S::STAGES + item % S::ITEMS); }
    __device__ uint32_t item_empty(int item) const { return barrier(4 * S::STAGES + S::ITEMS + item % S::ITEMS); }
    __device__ static int item_phase(int item) { return item / S::ITEMS & 1; }

    __device__ void init() const {
        for (int stage = 0; stage < S::STAGES; stage++) {
            barrier_init(keys_full(stage), 1);
            barrier_init(values_full(stage), 1);
            barrier_init(keys_empty(stage), S::COMPUTING / 32);
            barrier_init(values_empty(stage), S::COMPUTING / 32);
        }
        for (int item = 0; item < S::ITEMS; item++) {
            barrier_init(item_full(item), 1);
            barrier_init(item_empty(item), S::COMPUTING);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }

    // Waits for an item and gives it.
    __device__ Item<S> item(int number) const {
        barrier_wait(item_full(number), item_phase(number));
        return items[number % S::ITEMS];
    }
};

}  // namespace hopper
}  // namespace pagoda
