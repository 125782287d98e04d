// The mask of HstuAttention.
#pragma once

#include "common/attention/tiles.cuh"

namespace pagoda {

// The positions that one row sees: an interval of the history and one of the candidates (src/hstu/mask.rs says why).
struct Seen {
    int first, end, candidate, candidate_end;

    // Without a branch: it is evaluated for every element of a masked tile.
    __device__ bool sees(int position) const {
        bool history = static_cast<unsigned>(position - first) < static_cast<unsigned>(max(end - first, 0));
        return history | (static_cast<unsigned>(position - candidate) < static_cast<unsigned>(candidate_end - candidate));
    }
};

__device__ inline Seen seen_by(const Call &call, const User &user, int row) {
    int position = user.cached + row;
    Seen seen{0, user.history, 0, 0};
    if (position >= user.contextual) {
        int last = min(position, user.history);
        bool unlimited = call.window == 0 || last - user.contextual < call.window;
        seen.first = unlimited ? 0 : last - static_cast<int>(call.window);
        seen.end = min(position + 1, user.history);
    }
    if (position >= user.history) {
        int candidate = position - user.history;
        int group = call.group > INT32_MAX ? INT32_MAX : static_cast<int>(call.group);
        seen.candidate = user.history + candidate / group * group;
        seen.candidate_end = position + 1;
    }
    return seen;
}

// What a stretch of rows sees together.
struct Reach {
    int first, end;              // history that some row sees
    int whole_first, whole_end;  // history that every row sees
    int candidate, candidate_end;

    // Rows first_row to last_row of the user, both included; last_row < first_row: no row, which sees nothing.
    __device__ static Reach of(const Call &call, const User &user, int first_row, int last_row) {
        if (last_row < first_row) return {0, 0, 0, 0, 0, 0};
        Seen low = seen_by(call, user, first_row), high = seen_by(call, user, last_row);
        Reach reach;
        // Windows move on with the rows; contextual rows, which come first, see everything.
        reach.first = low.first;
        reach.end = max(low.end, high.end);
        reach.whole_first = high.first;
        reach.whole_end = min(low.end, high.end);
        if (user.cached + first_row < user.contextual && user.cached + last_row >= user.contextual) {
            reach.whole_end = min(reach.whole_end, user.contextual + 1);
        }
        int first_candidate = max(first_row, user.history - user.cached);
        reach.candidate = reach.candidate_end = 0;
        if (first_candidate <= last_row) {
            reach.candidate = seen_by(call, user, first_candidate).candidate;
            reach.candidate_end = high.candidate_end;
        }
        return reach;
    }
};

// The mask of the two rows that a thread has, and of the rows of its warpgroup: the mask of the variant `HstuVariant`.
struct HstuMask {
    Reach reach;
    Seen rows[2];

    // The warpgroup has the 64 rows of the user from `first` on, up to `last`; the thread has row `own` and the one 8
    // below.
    __device__ HstuMask(const Call &call, const User &user, int first, int own, int last) {
        reach = Reach::of(call, user, first, min(first + 63, last));
        for (int i = 0; i < 2; i++) rows[i] = seen_by(call, user, min(own + 8 * i, last));
    }

    // Whether some row of the warpgroup sees some key of the tile.
    template <int KEYS> __device__ bool any(const Tile &tile) const { return tile.seen<KEYS>(reach); }
    // Whether every row of the warpgroup sees every key of the tile: then there is nothing to mask.
    template <int KEYS> __device__ bool all(const Tile &tile) const { return tile.whole<KEYS>(reach); }
    // What the thread's row `which` sees.
    __device__ const Seen &row(int which) const { return rows[which]; }
};

}  // namespace pagoda
