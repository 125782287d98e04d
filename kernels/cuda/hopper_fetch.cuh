// The warp of the Hopper kernel that finds the items and has the copy engine bring what they need.
#pragma once

#include "hopper_ring.cuh"

namespace pagoda {
namespace hopper {

// The fetching warp.
template <class S, bool SPLIT> struct Fetching {
    const Call &call;
    const Maps &maps;
    int granule;
    const Ring<S> &ring;
    int per;           // items in a piece, 1 or 2
    int items, tiles;  // so far

    int rows;          // where the stretch of keys number `lane` of the cached tiles from `known` on lies in the pool
    int known;

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

    // An item; its first pages have been looked up.
    __device__ Item<S> item_of(const User &user, int head, int first) {
        Item<S> item{user, head, first};
        Reach reach = Reach::of(call, user, first, min(first + S::ROWS, user.rows) - 1);
        item.tiles = Tiles<S::KEYS>::of(user, reach);
        int64_t count = item.tiles.count();
        int rank = blockIdx.x % CLUSTER;
        item.begin = SPLIT ? static_cast<int>(count * rank / CLUSTER) : 0;
        item.end = SPLIT ? static_cast<int>(count * (rank + 1) / CLUSTER) : static_cast<int>(count);
        if (item.begin < item.end && item.tiles.at(item.begin).cached) look_up(item, item.begin);
        return item;
    }

    __device__ void fetch(const Item<S> &item) {
        announce(item);
        items++;
        for (int index = item.begin; index < item.end; index++, tiles++) {
            Tile tile = item.tiles.at(index);
            if (tile.cached && (index - known + 1) * (S::KEYS / granule) > 32) look_up(item, index);
            fetch_tile(item, tile, index, false);
            fetch_tile(item, tile, index, true);
        }
    }

    __device__ Piece find(int64_t index) const {
        return find_piece<S::ROWS, SPLIT ? Kind::Split : Kind::Whole>(call, index / call.heads, per);
    }

    __device__ static void wait_for_sums() {
        __syncwarp();
        cluster_wait();
        cluster_wait();
    }

    __device__ void run() {
        int64_t index = SPLIT ? blockIdx.x / CLUSTER : blockIdx.x, step = SPLIT ? gridDim.x / CLUSTER : gridDim.x;
        Piece piece = find(index);
        while (piece.user >= 0) {
            User user = load_user(call, piece.user);
            int head = static_cast<int>(index % call.heads), last = piece.blocks - 1 - piece.number;
            Item<S> item = item_of(user, head, last * S::ROWS);
            // Sums of the item before were exchanged where this one's queries and tiles will be.
            if (SPLIT && items > 0) wait_for_sums();
            fetch(item);
            if (per == 2 && piece.number != last) fetch(item_of(user, head, piece.number * S::ROWS));
            index += step;
            piece = find(index);
        }
        if (SPLIT && items > 0) wait_for_sums();
        Item<S> none{};
        none.user.rows = -1;
        announce(none);
    }
};

}  // namespace hopper
}  // namespace pagoda
