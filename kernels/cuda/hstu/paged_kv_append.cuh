// The new history rows of a call into their pages, as bytes.
#pragma once

#include "common/attention/batch.cuh"

namespace pagoda {

// Where row number `row` of the call goes, if it is new history: the slot of its key, in rows of the pool; -1: nowhere. A whole
// warp calls it.
__device__ inline int64_t append_slot(const Call &call, int row) {
    int number = user_of(call, row);
    if (number < 0) return -1;
    User user = load_user(call, number);
    if (row >= user.row + (user.rows - clamped(call.num_candidates[number], 0, user.rows))) return -1;
    // New rows begin behind the cached ones. The room of the page list is checked slot by slot.
    int64_t position = static_cast<int64_t>(clamped(call.cached_len[number], 0, INT32_MAX - 4096)) + (row - user.row);
    return position > INT32_MAX ? -1 : pool_row(call, user, static_cast<int>(position), 0);
}

// Appends row number `row` of the call, if it is new history; a whole warp calls it. Loads and stores are streaming
// (evict first): the attention of the same call reads key and value, not the pages.
template <class Unit> __device__ void append_row(const Call &call, int row, int element_bytes) {
    constexpr int LANES = 32;
    int64_t row_units = static_cast<int64_t>(call.heads) * call.head_size * element_bytes / sizeof(Unit);
    int lane = threadIdx.x % LANES;
    const Unit *key = static_cast<const Unit *>(call.key) + row * row_units;
    const Unit *value = static_cast<const Unit *>(call.value) + row * row_units;
    // Loaded before it is known where they go: finding that out takes as long.
    Unit a{}, b{}, c{}, d{};
    if (lane < row_units) a = __ldcs(key + lane), b = __ldcs(value + lane);
    if (lane + LANES < row_units) c = __ldcs(key + lane + LANES), d = __ldcs(value + lane + LANES);
    int64_t slot = append_slot(call, row);
    if (slot < 0) return;
    Unit *to_key = static_cast<Unit *>(call.pool) + slot * row_units;
    Unit *to_value = to_key + call.page_size * row_units;
    if (lane < row_units) __stcs(to_key + lane, a), __stcs(to_value + lane, b);
    if (lane + LANES < row_units) __stcs(to_key + lane + LANES, c), __stcs(to_value + lane + LANES, d);
    for (int64_t i = lane + 2 * LANES; i < row_units; i += LANES) {
        __stcs(to_key + i, __ldcs(key + i));
        __stcs(to_value + i, __ldcs(value + i));
    }
}

}  // namespace pagoda
