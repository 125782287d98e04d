// The tiles of keys that a block of rows goes over. `Reach` is what the rows see together, by the variant's mask.
#pragma once

#include "common/attention/batch.cuh"

namespace pagoda {

// Consecutive keys, all from pages or all from the user's own rows.
struct Tile {
    int position;
    int limit;    // keys at and after this position are not the tile's
    bool cached;

    template <int KEYS, class Reach> __device__ bool seen(const Reach &reach) const {
        int end = min(position + KEYS, limit);
        return (position < reach.end && end > reach.first) || (position < reach.candidate_end && end > reach.candidate);
    }

    // Every row sees every key: no mask.
    template <int KEYS, class Reach> __device__ bool whole(const Reach &reach) const {
        return position >= reach.whole_first && position + KEYS <= min(reach.whole_end, limit);
    }
};

// The tiles that a block of rows looks at: of the cached history, of the new history, of the candidates. Tiles of pages
// begin at multiples of KEYS, so that a stretch of keys that fits into a page at such a place lies in one page.
template <int KEYS>
struct Tiles {
    int cached_first, cached_count;
    int fresh_first, fresh_count;
    int candidate_first, candidate_count;
    int cached, keys;

    template <class Reach> __device__ static Tiles of(const User &user, const Reach &reach) {
        Tiles tiles;
        tiles.cached = user.cached;
        tiles.keys = user.keys();
        int end = min(reach.end, user.cached);
        tiles.cached_first = reach.first / KEYS;
        tiles.cached_count = max(0, (end + KEYS - 1) / KEYS - tiles.cached_first);
        if (end <= reach.first) tiles.cached_count = 0;
        int fresh = max(reach.first - user.cached, 0), fresh_end = max(reach.end - user.cached, 0);
        tiles.fresh_first = fresh / KEYS;
        tiles.fresh_count = fresh_end > fresh ? (fresh_end + KEYS - 1) / KEYS - tiles.fresh_first : 0;
        int candidate = max(reach.candidate - user.cached, 0), candidate_end = max(reach.candidate_end - user.cached, 0);
        tiles.candidate_first = candidate / KEYS;
        if (tiles.fresh_count > 0) {
            tiles.candidate_first = max(tiles.candidate_first, tiles.fresh_first + tiles.fresh_count);
        }
        int last = candidate_end > candidate ? (candidate_end + KEYS - 1) / KEYS : 0;
        tiles.candidate_count = max(0, last - tiles.candidate_first);
        return tiles;
    }

    __device__ int count() const { return cached_count + fresh_count + candidate_count; }

    __device__ Tile at(int index) const {
        if (index < cached_count) return {(cached_first + index) * KEYS, cached, true};
        index -= cached_count;
        int tile = index < fresh_count ? fresh_first + index : candidate_first + index - fresh_count;
        return {cached + tile * KEYS, keys, false};
    }
};

}  // namespace pagoda
