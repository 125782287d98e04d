// How the attention on Hopper is compiled: for which variant, which head size, and with which tiles.
//
// A variant is a struct with
//   Reach     what the rows of a block see together: `Reach::of(call, user, first row, last row)`, and what `Tiles` asks of it
//   Mask      what a thread's rows see: `any`, `all`, and `row(which).sees(position)`
//   Score     how scores become weights, and sums the output: `weigh`, `rescale`, `finish`
//   beside    what idle warps do with a row of the call
//   kv_head   which head of the keys and values a query head has: grouped query heads share one
// All of it is inlined: a variant costs nothing beside what it computes. hstu/hstu_variant.cuh is one.
#pragma once

#include "common/attention/tiles.cuh"
#include "common/mirrored.cuh"
#include "common/tma.cuh"

namespace pagoda {
namespace sm90 {

constexpr int BOX = 64;      // rows of a TMA box of queries, keys or values; of pages it is the call's granule
constexpr int SEGMENTS = 4;  // of the keys of a user that is split
constexpr int CLUSTER = SEGMENTS;
constexpr int NO_END = INT32_MAX;  // of a segment that a part does not have
constexpr int BARRIER_BYTES = 256;  // of shared memory
constexpr int OUTSIDE = INT32_MAX - 1024;  // a row outside every tensor: the TMA fills in zeros

// Barriers by number; 0 is __syncthreads. TURN and ARRIVED have one for each warpgroup that computes.
constexpr int TAIL = 1, TURN = 2, ARRIVED = 5;

// What a block does: all keys of an item; or a segment of them (split-KV), whose sums it adds up with the other blocks
// of its cluster, or with other blocks in device memory.
enum class Mode { Whole, Cluster, Parts };

// Flags of a launch. APPENDS: the kernel appends the new rows to the pages. ALONE: it is the call's only kernel, and
// does the users that are not split too (Mode::Parts always is). CLEARS: it writes zeros for rows that are not
// computed. EARLY: nothing on the stream writes the index tensors, and no other launch has the counters, so that the
// kernel schedules before the kernel in front has ended.
constexpr int APPENDS = 1, ALONE = 2, CLEARS = 4, EARLY = 8;

// Which segments of an item a part has: the first of a half, or the second; a run of all but the last, the last alone,
// or all.
enum class Role { First, Second, Last, Run, All };

struct AttentionMaps {
    CUtensorMap query, key, value, pool;
};
PAGODA_MIRRORED(common, AttentionMaps)

template <class VARIANT, int D_, Mode MODE_> struct Traits {
    using Variant = VARIANT;
    static constexpr int D = D_;
    static constexpr Mode MODE = MODE_;
    static constexpr bool SPLIT = MODE != Mode::Whole;
    static_assert(!SPLIT || Variant::Score::ADDITIVE, "split-KV adds the sums of segments up");
    // Consumer warpgroups. With small heads the weights take as long as the products: a third warpgroup fills the gaps,
    // and there are registers for it. Parts have a third for D = 128 too, with tiles of half the keys so that it fits:
    // the more rows share a tile, the fewer bytes come out of the L2 cache, whose bandwidth two warpgroups use up.
    // Clusters have one: there are few rows, and the fewer a block has, the more blocks there are for them.
    static constexpr int GROUPS = MODE == Mode::Cluster ? 1 : D <= 64 || (D == 128 && MODE == Mode::Parts) ? 3 : 2;
    static constexpr int ROWS = 64 * GROUPS;
    static constexpr int COMPUTING = 128 * GROUPS;         // threads
    static constexpr int THREADS = COMPUTING + 128;        // of the last four warps one is the producer, another schedules
    // Registers a thread, by setmaxnreg. A block starts with 65,536 divided among its threads, rounded down to 8 for
    // each. A warpgroup that asks for more than the others have released waits for ever. The producer warps get what
    // the consumers can spare.
    static constexpr int REGISTERS = GROUPS == 2 ? 232 : D == 128 ? 152 : 160;
    static constexpr int FETCHING_REGISTERS = GROUPS == 2 ? 40 : D == 128 ? 56 : 32;
    static_assert(GROUPS == 1 || GROUPS * REGISTERS + FETCHING_REGISTERS <= (GROUPS + 1) * (65536 / THREADS / 8 * 8),
                  "registers");
    static constexpr int KEYS = D == 256 || (D == 128 && GROUPS == 3) ? 64 : 128;  // of a tile
    static constexpr int SEGMENT_KEYS = D == 256 ? 64 : 128;  // segments begin at multiples, whatever the tiles are
    // Stages of the ring: tiles of keys or values in shared memory at once. Few blocks read a split user's pages, so
    // they come from device memory and not from the L2 cache: more stages.
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

}  // namespace sm90
}  // namespace pagoda
