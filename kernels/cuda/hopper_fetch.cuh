// The warp of the Hopper kernel that finds the items and has the copy engine bring what they need.
#pragma once

#include "hopper_ring.cuh"

namespace pagoda {
namespace hopper {

// The fetching warp.
template <class S> struct Fetching {
    const Call &call;
    const Maps &maps;
    int granule;
    const Ring<S> &ring;
    int per;           // items in a piece, 1 or 2
    int64_t slots;     // Parts: how many there is memory for
    int items, tiles;  // so far, and the next one's place

    int rows;          // where the stretch of keys number `lane` of the cached tiles from `known` on lies in the pool
    int known;
    int other_rows, other_known;  // of a pair's other segment

    static constexpr int UNKNOWN = INT32_MAX / 2;

    // Looks up where the next cached tiles lie, a stretch of `granule` keys a lane: one wait for the page table for all.
    __device__ void look_up(const Item<S> &item, int index) {
        Tile tile = item.tiles.at(index);
        int position = tile.position + (threadIdx.x & 31) * granule;
        int64_t row = position < tile.limit ? pool_row(call, item.user, position, 0) : -1;
        rows = row < 0 ? OUTSIDE : static_cast<int>(row);
        known = index;
    }

    // Goes through the boxes of a tile, lanes side by side: `to(map, offset in the tile, column, row)`. Of a cached tile
    // the rows have been looked up.
    template <class To>
    __device__ void each_box(const Item<S> &item, const Tile &tile, int index, bool values, To to) const {
        int lane = threadIdx.x & 31, step = tile.cached ? granule : BOX, stretches = S::KEYS / step;
        const CUtensorMap *map = tile.cached ? &maps.pool : values ? &maps.value : &maps.key;
        int row = __shfl_sync(~0u, rows, ((index - known) * stretches + lane % stretches) & 31);
        if (!tile.cached) {
            int position = tile.position + lane % stretches * step;
            row = position < tile.limit ? item.user.row + position - item.user.cached : OUTSIDE;
        } else if (values && row != OUTSIDE) {
            row += call.page_size;
        }
        for (int box = lane / stretches; box < S::BOXES; box += 32 / stretches) {
            to(map, (box * S::KEYS + lane % stretches * step) * S::ROW_BYTES, box * S::COLUMNS, row);
        }
    }

    __device__ void fetch_tile(const Item<S> &item, const Tile &tile, int index, bool values) const {
        uint32_t memory = values ? ring.values(tiles) : ring.keys(tiles);
        uint32_t full = values ? ring.values_full(tiles) : ring.keys_full(tiles);
        barrier_wait(values ? ring.values_empty(tiles) : ring.keys_empty(tiles), ring.phase(tiles) ^ 1);
        if ((threadIdx.x & 31) == 0) barrier_expect(full, S::TILE_BYTES);
        __syncwarp();
        each_box(item, tile, index, values, [&](const CUtensorMap *map, uint32_t offset, int column, int row) {
            copy_box(memory + offset, map, full, column, item.head, row);
        });
    }

    // Tells the other warps of an item and fetches its queries.
    __device__ void announce(const Item<S> &item) const {
        barrier_wait(ring.item_empty(items), ring.item_phase(items) ^ 1);
        if ((threadIdx.x & 31) == 0) {
            ring.items[items % S::ITEMS] = item;
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

    __device__ Item<S> item_of(const User &user, int head, int first) const {
        Item<S> item{user, head, first};
        Reach reach = Reach::of(call, user, first, min(first + S::ROWS, user.rows) - 1);
        item.tiles = Tiles<S::KEYS>::of(user, reach);
        item.end = item.tiles.count();
        return item;
    }

    // The tiles of a segment, of all that an item has.
    __device__ static int first_of(int64_t count, int segment) { return static_cast<int>(count * segment / SEGMENTS); }

    __device__ void fetch(const Item<S> &item) {
        known = other_known = UNKNOWN;
        int count = item.count();
        for (int number = 0; number < count; number++, tiles = ring.behind(tiles, 1)) {
            // The first tiles need not wait until the place of the item and its queries is free.
            if (number == S::AHEAD) announce(item);
            int index = item.index(number);
            Tile tile = item.tiles.at(index);
            bool looked_up = index >= known && (index - known + 1) * (S::KEYS / granule) <= 32;
            if (tile.cached && !looked_up) look_up(item, index);
            fetch_tile(item, tile, index, false);
            fetch_tile(item, tile, index, true);
            if (S::PAIRS && item.pair) {
                int before = rows, before_known = known;
                rows = other_rows;
                known = other_known;
                other_rows = before;
                other_known = before_known;
            }
        }
        if (count <= S::AHEAD) announce(item);
        items++;
    }

    __device__ static void wait_for_sums() {
        __syncwarp();
        cluster_wait();
        cluster_wait();
    }

    __device__ void run_pieces() {
        constexpr Kind KIND = S::SPLIT ? Kind::Split : Kind::Whole;
        int64_t index = S::SPLIT ? blockIdx.x / CLUSTER : blockIdx.x, step = S::SPLIT ? gridDim.x / CLUSTER : gridDim.x;
        Piece piece = find_piece<S::ROWS, KIND>(call, index / call.heads, per);
        while (piece.user >= 0) {
            User user = load_user(call, piece.user);
            int head = static_cast<int>(index % call.heads), last = piece.blocks - 1 - piece.number;
            Item<S> item = item_of(user, head, last * S::ROWS);
            if (S::SPLIT) {
                item.begin = item.first_of(blockIdx.x % CLUSTER);
                item.end = item.first_of(blockIdx.x % CLUSTER + 1);
            }
            // Sums of the item before were exchanged where this one's queries and tiles will be.
            if (S::SPLIT && items > 0) wait_for_sums();
            fetch(item);
            if (per == 2 && piece.number != last) fetch(item_of(user, head, piece.number * S::ROWS));
            index += step;
            piece = find_piece<S::ROWS, KIND>(call, index / call.heads, per);
        }
        if (S::SPLIT && items > 0) wait_for_sums();
    }

    __device__ void run_parts() {
        for (int64_t index = blockIdx.x; index < slots; index += gridDim.x) {
            Found found = find_split<S>(call, index, UNIT_PARTS<S>);
            if (found.user < 0) break;
            User user = load_user(call, found.user);
            Part part = Part::of<S>(user.rows, found.rest);
            Item<S> item = item_of(user, part.head, part.block * S::ROWS);
            item.slot = index;
            item.begin = item.first_of(part.segment);
            item.end = item.first_of(part.segment + 1);
            item.pair = part.pair;
            if (S::PAIRS && part.pair) {
                int begin = item.end, end = item.first_of(part.segment + 2);
                item.swapped = end - begin > item.end - item.begin;
                item.second_begin = item.swapped ? item.begin : begin;
                item.second_end = item.swapped ? item.end : end;
                item.begin = item.swapped ? begin : item.begin;
                item.end = item.swapped ? end : item.end;
            }
            fetch(item);
        }
    }

    __device__ void run() {
        if (S::MODE == Mode::Parts) {
            run_parts();
        } else {
            run_pieces();
        }
        Item<S> none{};
        none.user.rows = -1;
        announce(none);
    }
};

}  // namespace hopper
}  // namespace pagoda
