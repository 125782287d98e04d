// The warp of the attention on Hopper that fetches: queries, keys and values by the TMA.
#pragma once

#include "common/attention_sm90/split_kv.cuh"
#include "common/dependent_launch.cuh"

namespace pagoda {
namespace sm90 {

template <class S> struct Producer {
    const Call &call;
    const AttentionMaps &maps;
    int granule;
    const Ring<S> &ring;
    int duties;
    int stretches = S::KEYS / granule;  // of a cached tile
    int items, tiles;  // so far, and the next one's place

    int rows;          // where the stretch of keys number `lane` of the cached tiles from `known` on lies in the pool
    int known;

    static constexpr int UNKNOWN = INT32_MAX / 2;

    // Looks up the pages of the next cached tiles, a stretch of `granule` keys in each lane: one access to the page
    // table for all.
    __device__ void look_up(const Item<S> &item, int index) {
        Tile tile = item.tiles.at(index);
        int position = tile.position + (threadIdx.x & 31) * granule;
        int64_t row = position < tile.limit ? pool_row(call, item.user, position, 0) : -1;
        rows = row < 0 ? OUTSIDE : static_cast<int>(row);
        known = index;
    }

    // A stretch of a tile that is contiguous: one lane issues its TMA boxes.
    __device__ void copy_stretch(uint32_t to, const CUtensorMap *map, uint32_t full, int head, int row) const {
#pragma unroll
        for (int box = 0; box < S::BOXES; box++) {
            copy_box(to + box * S::KEYS * S::ROW_BYTES, map, full, box * S::COLUMNS, head, row);
        }
    }

    // Fetches the keys of a tile, or its values, into a place of the ring. The rows of a cached tile have been looked
    // up. (Every instruction counts here: with divisions this warp could not keep up with the consumers.)
    __device__ void fetch_tile(const Item<S> &item, const Tile &tile, int index, bool values, int place) const {
        uint32_t memory = ring.keys(place), full = ring.keys_full(place);
        int head = S::Variant::kv_head(call, item.head);
        barrier_wait(ring.keys_empty(place), ring.phase(place) ^ 1);
        int lane = threadIdx.x & 31;
        if (lane == 0) barrier_expect(full, S::TILE_BYTES);
        __syncwarp();
        if (tile.cached) {
            // Each lane fetches the stretch that it looked up: pages may be small, and one lane alone could not keep up.
            int stretch = lane - (index - known) * stretches;
            if (stretch >= 0 && stretch < stretches) {
                int row = values && rows != OUTSIDE ? rows + call.page_size : rows;
                copy_stretch(memory + stretch * granule * S::ROW_BYTES, &maps.pool, full, head, row);
            }
        } else if (lane < S::KEYS / BOX) {
            int position = tile.position + lane * BOX;
            int row = position < tile.limit ? item.user.row + position - item.user.cached : OUTSIDE;
            copy_stretch(memory + lane * BOX * S::ROW_BYTES, values ? &maps.value : &maps.key, full, head, row);
        }
        __syncwarp();
    }

    // Publishes an item to the other warps, and fetches its queries.
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

    // Every lane arrives, because every lane has read the plan before.
    __device__ void let_plan() const { barrier_arrive(ring.may_plan()); }

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
            // Early enough for the plan to be ready in time, and no earlier: another block may be free sooner. It
            // surely is where this block has a run, or has started with the second part of a half, whose first part has
            // just started elsewhere.
            bool runs = item.role == Role::Run || item.role == Role::All;
            bool behind = runs || (items == 0 && item.role == Role::Second);
            if (S::MODE == Mode::Parts && number == (behind ? count - 1 : count / 2)) let_plan();
        }
        if (S::MODE == Mode::Parts && count == 0) let_plan();
        items++;
    }
};

}  // namespace sm90
}  // namespace pagoda
