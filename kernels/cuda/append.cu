// PagedKvAppend in place: the new history rows of every user go into their pages, as bytes.

#include "call.cuh"

namespace pagoda {

// A block takes a stretch of rows; each thread copies units of a row's keys and of its values. A row is looked up once
// by the threads of a group, which then copy it together.
template <class Unit>
__device__ void append(const Call &call, int element_bytes) {
    constexpr int LANES = 32;
    int64_t row_units = static_cast<int64_t>(call.heads) * call.head_size * element_bytes / sizeof(Unit);
    int lane = threadIdx.x % LANES;
    int64_t warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / LANES);
    int64_t warp = static_cast<int64_t>(blockIdx.x) * (blockDim.x / LANES) + threadIdx.x / LANES;
    int64_t per_warp = (call.total_rows + warps - 1) / warps;
    int row = clamped(warp * per_warp, 0, call.total_rows);
    int last = clamped((warp + 1) * per_warp, 0, call.total_rows);

    User user{};
    int after = -1;  // the first row that is not this user's; nothing is known at first
    int fresh_end = 0;
    for (; row < last; row++) {
        if (row >= after) {
            // The user who has the row: the last whose rows begin at or before it and do not end before it.
            int found = -1, next = call.total_rows;
            for (int base = 0; base < call.users; base += LANES) {
                int number = base + lane;
                bool has = false;
                if (number < call.users) {
                    int first = clamped(call.row_offsets[number], 0, call.total_rows);
                    has = row >= first && row < first + rows_of(call, number);
                }
                unsigned those = __ballot_sync(~0u, has);
                if (those != 0) found = base + 31 - __clz(those);
            }
            if (found < 0) {
                after = row + 1;
                fresh_end = 0;
                continue;
            }
            user = load_user(call, found);
            // What is cached is where the new rows begin: the room of the page list is checked slot by slot.
            user.cached = clamped(call.cached_len[found], 0, INT32_MAX - 4096);
            next = user.row + user.rows;
            fresh_end = user.row + (user.rows - clamped(call.num_candidates[found], 0, user.rows));
            after = next;
        }
        if (row >= fresh_end) continue;
        int64_t position = static_cast<int64_t>(user.cached) + (row - user.row);
        if (position > INT32_MAX) continue;
        int64_t slot = pool_row(call, user, static_cast<int>(position), 0);
        if (slot < 0) continue;
        const Unit *key = static_cast<const Unit *>(call.key) + row * row_units;
        const Unit *value = static_cast<const Unit *>(call.value) + row * row_units;
        Unit *to_key = static_cast<Unit *>(call.pool) + slot * row_units;
        Unit *to_value = to_key + call.page_size * row_units;
        int64_t i = lane;
        // Two of each in flight before the first is stored.
        for (; i + LANES < row_units; i += 2 * LANES) {
            Unit a = key[i], b = value[i], c = key[i + LANES], d = value[i + LANES];
            to_key[i] = a;
            to_value[i] = b;
            to_key[i + LANES] = c;
            to_value[i + LANES] = d;
        }
        if (i < row_units) {
            Unit a = key[i], b = value[i];
            to_key[i] = a;
            to_value[i] = b;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) append_16(const __grid_constant__ Call call, int element_bytes) {
    append<uint4>(call, element_bytes);
}
extern "C" __global__ void __launch_bounds__(256) append_4(const __grid_constant__ Call call, int element_bytes) {
    append<uint32_t>(call, element_bytes);
}
extern "C" __global__ void __launch_bounds__(256) append_2(const __grid_constant__ Call call, int element_bytes) {
    append<uint16_t>(call, element_bytes);
}

}  // namespace pagoda
