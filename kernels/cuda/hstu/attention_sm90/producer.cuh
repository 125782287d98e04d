// The warp of the Hopper kernel that finds the items and has the copy engine bring what they need.
#pragma once

#include "common/dependent_launch.cuh"
#include "hstu/attention_sm90/split_kv.cuh"

namespace pagoda {
namespace hopper {

// The fetching warp.
template <class S> struct Fetching {
    const Call &call;
    const AttentionMaps &maps;
    int granule;
    const Ring<S> &ring;
    int per;           // items in a piece, 1 or 2
    int duties;
    const Common &common;
    int stretches = S::KEYS / granule;  // of a cached tile
    int items, tiles;  // so far, and the next one's place

    int rows;          // where the stretch of keys number `lane` of the cached tiles from `known` on lies in the pool
    int known;

    static constexpr int UNKNOWN = INT32_MAX / 2;

    // Looks up where the next cached tiles lie, a stretch of `granule` keys a lane: one wait for the page table for all.
    __device__ void look_up(const Item<S> &item, int index) {
        Tile tile = item.tiles.at(index);
        int position = tile.position + (threadIdx.x & 31) * granule;
        int64_t row = position < tile.limit ? pool_row(call, item.user, position, 0) : -1;
        rows = row < 0 ? OUTSIDE : static_cast<int>(row);
        known = index;
    }

    // A stretch of a tile that lies in one piece: one lane asks for its boxes.
    __device__ void copy_stretch(uint32_t to, const CUtensorMap *map, uint32_t full, int head, int row) const {
        if ((threadIdx.x & 31) != 0) return;
#pragma unroll
        for (int box = 0; box < S::BOXES; box++) {
            copy_box(to + box * S::KEYS * S::ROW_BYTES, map, full, box * S::COLUMNS, head, row);
        }
    }

    // The keys of a tile, or its values, into the place given. Of a cached tile the rows have been looked up. (Every instruction
    // here counts: with divisions in it this warp could not keep up with those that compute.)
    __device__ void fetch_tile(const Item<S> &item, const Tile &tile, int index, bool values, int place) const {
        uint32_t memory = ring.keys(place), full = ring.keys_full(place);
        barrier_wait(ring.keys_empty(place), ring.phase(place) ^ 1);
        if ((threadIdx.x & 31) == 0) barrier_expect(full, S::TILE_BYTES);
        if (tile.cached) {
            int first = (index - known) * stretches;
#pragma unroll 1
            for (int i = 0; i < stretches; i++, memory += granule * S::ROW_BYTES) {
                int row = __shfl_sync(~0u, rows, first + i);
                if (values && row != OUTSIDE) row += call.page_size;
                copy_stretch(memory, &maps.pool, full, item.head, row);
            }
        } else {
            int position = tile.position;
            for (int i = 0; i < S::KEYS / BOX; i++, position += BOX, memory += BOX * S::ROW_BYTES) {
                int row = position < tile.limit ? item.user.row + position - item.user.cached : OUTSIDE;
                copy_stretch(memory, values ? &maps.value : &maps.key, full, item.head, row);
            }
        }
        __syncwarp();
    }

    // Tells the other warps of an item and fetches its queries.
    __device__ void announce(const Item<S> &item) const {
        barrier_wait(ring.item_empty(items), ring.item_phase(items) ^ 1);
        if ((threadIdx.x & 31) == 0) {
            ring.record(items) = item;
            bool any = item.user.rows >= 0;
            barrier_expect(ring.item_full(items), any ? S::QUERY_BYTES : 0);
            for (int box = 0; any && box < S::BOXES; box++) {
                for (int row = 0; row < S::ROWS; row += BOX) {
                    copy_box(ring.queries(items) + (box * S::ROWS + row) * S::ROW_BYTES, &maps.query, ring.item_full(items),
                             box * S::COLUMNS, item.head, item.user.row + item.first + row);
                }
            }
        }
        __syncwarp();
    }

    // Block number `block` of the computed rows.
    __device__ Item<S> item_of(const User &user, int head, int block) const {
        int first = user.skipped + block * S::ROWS;
        Item<S> item{user, head, first};
        item.slot = -1;
        Reach reach = Reach::of(call, user, first, min(first + S::ROWS, user.rows) - 1);
        item.tiles = Tiles<S::KEYS>::of(user, reach);
        item.end = item.tiles.count();
        return item;
    }

    // Leaves some segments of an item's tiles. They are cut where the user's keys are, whatever the rows of the item see of
    // them: so it does not matter with which others a row is in an item.
    __device__ void cut(Item<S> &item, int segment, int count) const {
        Segments<S> segments(call, item.user);
        item.begin = segments.first_of(item.tiles, segment);
        for (int i = 0; i < SEGMENTS - 1; i++) {
            item.ends[i] = i + 1 < count ? segments.first_of(item.tiles, segment + i + 1) : NO_END;
        }
        item.end = segments.first_of(item.tiles, segment + count);
        item.slot = 0;
    }

    __device__ void fetch(const Item<S> &item) {
        if (items == 0 && (duties & EARLY) != 0) wait_for_previous();
        known = UNKNOWN;
        int count = item.end - item.begin;
        announce(item);
        for (int number = 0; number < count; number++, tiles = ring.behind(tiles, 2)) {
            int index = item.begin + number;
            Tile tile = item.tiles.at(index);
            bool looked_up = index >= known && (index - known + 1) * stretches <= 32;
            if (tile.cached && !looked_up) look_up(item, index);
#pragma unroll 1
            for (int which = 0; which < 2; which++) fetch_tile(item, tile, index, which == 1, ring.behind(tiles, which));
            // Early enough for the plan to be there in time, and no earlier: others may be free sooner. Surely they are where this
            // block has a run, or has begun with the second part of a half, whose first one others have just begun too.
            bool runs = item.role == Role::Run || item.role == Role::All;
            bool behind = runs || (items == 0 && item.role == Role::Second);
            if (S::MODE == Mode::Parts && number == (behind ? count - 1 : count / 2)) let_plan();
        }
        if (S::MODE == Mode::Parts && count == 0) let_plan();
        items++;
    }

    __device__ static void wait_for_sums() {
        __syncwarp();
        cluster_wait();
        cluster_wait();
    }

    // The pieces of split users, of which every block of a cluster has its segment; or those of the others, a block each.
    template <bool SPLIT> __device__ void run_pieces() {
        constexpr Kind KIND = SPLIT ? Kind::Split : Kind::Whole;
        int64_t index = SPLIT ? blockIdx.x / CLUSTER : blockIdx.x, step = SPLIT ? gridDim.x / CLUSTER : gridDim.x;
        Piece piece = find_piece<S::ROWS, KIND>(call, index / call.heads, per);
        while (piece.user >= 0) {
            User user = load_user(call, piece.user);
            int head = static_cast<int>(index % call.heads), last = piece.blocks - 1 - piece.number;
            // In a loop, so that the code to fetch an item is there once.
#pragma unroll 1
            for (int half = 0; half < per && (half == 0 || piece.number != last); half++) {
                Item<S> item = item_of(user, head, half == 0 ? last : piece.number);
                if (SPLIT) cut(item, blockIdx.x % CLUSTER, 1);
                // Sums of the item before were exchanged where this one's queries and tiles will be.
                if (SPLIT && items > 0) wait_for_sums();
                fetch(item);
            }
            index += step;
            piece = find_piece<S::ROWS, KIND>(call, index / call.heads, per);
        }
        if (SPLIT && items > 0) wait_for_sums();
    }

    // Every lane, as every lane has read the plan before.
    __device__ void let_plan() const { barrier_arrive(ring.may_plan()); }

    __device__ void run_parts() {
        let_plan();
        for (;;) {
            barrier_wait(ring.planned(), items & 1);
            Item<S> item = ring.plan();
            if (item.user.rows < 0) break;
            fetch(item);
        }
    }

    // What another warp does for the fetching one: it finds the next item while this one's tiles are fetched.
    __device__ void plan_parts() const {
        // On its way while parts are counted.
        unsigned index = common.take();
        Parts<S> parts(call);
        Item<S> item{};
        for (int number = 0; item.user.rows >= 0; number++) {
            barrier_wait(ring.may_plan(), number & 1);
            if (number > 0) index = common.take();
            Part part = parts.at(call, __shfl_sync(~0u, index, 0));
            // More than there is memory for: offsets that no call should have.
            while (part.user >= 0 && part.number >= common.blocks) part = parts.at(call, __shfl_sync(~0u, common.take(), 0));
            item.user.rows = -1;
            if (part.user >= 0) {
                item = item_of(load_user(call, part.user), part.head, part.block);
                if (part.number >= 0) {
                    cut(item, part.segment, part.count);
                    item.role = part.role;
                    item.slot = part.number * 2 + (part.segment + part.count - 1) / 2;
                }
            }
            if ((threadIdx.x & 31) == 0) {
                ring.plan() = item;
                barrier_arrive(ring.planned());
            }
        }
        common.end();
    }

    __device__ void run() {
        if (S::MODE == Mode::Parts) {
            run_parts();
        } else {
            if (S::MODE == Mode::Cluster) run_pieces<true>();
            if (S::MODE == Mode::Whole || (duties & ALONE) != 0) run_pieces<false>();
        }
        Item<S> none{};
        none.user.rows = -1;
        announce(none);
    }
};

}  // namespace hopper
}  // namespace pagoda
