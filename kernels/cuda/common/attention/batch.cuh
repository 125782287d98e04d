// A batch of the attention: users with rows of their own in the call, and with earlier tokens in the pages of a pool.
// How every kernel reads the index tensors: clamped, so that no value in them makes a kernel read or write outside its
// tensors.
#pragma once

#include <cstdint>

#include "common/mirrored.cuh"

namespace pagoda {

// One call of HstuAttention or PagedKvAppend.
struct Call {
    const void *query;
    const void *key;
    const void *value;
    void *output;
    void *pool;
    const int *row_offsets;
    const int *num_candidates;
    const int *cached_len;      // null: no user has cached tokens
    const int *page_indptr;
    const int *page_ids;
    const int *num_contextual;  // null: none
    int64_t pool_pages;
    int64_t group;
    int64_t window;             // 0: unlimited
    int users;
    int total_rows;
    int heads;
    int head_size;
    int page_size;
    int page_entries;           // how many entries page_ids has
    float alpha;
    float scale;                // 1 / scaling_seqlen
    int candidates_only;        // history rows come out as zeros
};
PAGODA_MIRRORED(common, Call)

__device__ inline int clamped(int64_t value, int64_t low, int64_t high) {
    return static_cast<int>(value < low ? low : value > high ? high : value);
}

// One user of a call. Positions count from the user's first cached token: [0, cached) lie in pages, [cached, keys) are
// the user's own rows.
struct User {
    int row;         // the first of the user's rows in [T, H, D]
    int rows;
    int cached;
    int history;     // cached and new tokens
    int contextual;
    int skipped;     // rows from the first on that are not computed
    const int *pages;
    int page_count;

    __device__ int keys() const { return cached + rows; }
};

__device__ inline int rows_of(const Call &call, int user) {
    int first = clamped(call.row_offsets[user], 0, call.total_rows);
    return clamped(call.row_offsets[user + 1], first, call.total_rows) - first;
}

// Those of a user's rows that are computed, the last ones.
__device__ inline int computed_of(const Call &call, int user, int rows) {
    return call.candidates_only ? clamped(call.num_candidates[user], 0, rows) : rows;
}

// Positions are 32-bit: a user with more tokens than that keeps the first ones.
__device__ inline int cached_of(const Call &call, int user, int rows, const int *&pages, int &page_count) {
    pages = nullptr;
    page_count = 0;
    if (call.cached_len == nullptr) return 0;
    int first = clamped(call.page_indptr[user], 0, call.page_entries);
    page_count = clamped(call.page_indptr[user + 1], first, call.page_entries) - first;
    pages = call.page_ids + first;
    int64_t room = static_cast<int64_t>(page_count) * call.page_size;
    int64_t most = INT32_MAX - 4096 - static_cast<int64_t>(rows);
    return clamped(call.cached_len[user], 0, room < most ? room : most < 0 ? 0 : most);
}

__device__ inline User load_user(const Call &call, int user) {
    User found;
    found.row = clamped(call.row_offsets[user], 0, call.total_rows);
    found.rows = rows_of(call, user);
    found.cached = cached_of(call, user, found.rows, found.pages, found.page_count);
    int fresh = found.rows - clamped(call.num_candidates[user], 0, found.rows);
    found.history = found.cached + fresh;
    // Contextual rows together with cached tokens are refused before a launch; here they must only do no harm.
    bool contextual = call.num_contextual != nullptr && found.cached == 0;
    found.contextual = contextual ? clamped(call.num_contextual[user], 0, fresh) : 0;
    found.skipped = call.candidates_only ? fresh : 0;
    return found;
}

// The user that has the row; the last one where offsets overlap; -1: none has it. A whole warp calls it.
__device__ inline int user_of(const Call &call, int row) {
    int lane = threadIdx.x & 31;
    int found = -1;
    for (int base = 0; base < call.users; base += 32) {
        int user = base + lane;
        bool has = false;
        if (user < call.users) {
            int first = clamped(call.row_offsets[user], 0, call.total_rows);
            has = row >= first && row < first + rows_of(call, user);
        }
        unsigned those = __ballot_sync(~0u, has);
        if (those != 0) found = base + 31 - __clz(those);
    }
    return found;
}

// Where the pool holds the token at `position` of a user, in rows of H·D elements; -1 where no page of the pool does.
__device__ inline int64_t pool_row(const Call &call, const User &user, int position, int which) {
    unsigned page_size = static_cast<unsigned>(call.page_size);
    unsigned entry = static_cast<unsigned>(position) / page_size;
    unsigned slot = static_cast<unsigned>(position) - entry * page_size;
    int page = entry < static_cast<unsigned>(user.page_count) ? user.pages[entry] : -1;
    if (page < 0 || page >= call.pool_pages) return -1;
    return (static_cast<int64_t>(page) * 2 + which) * page_size + slot;
}

// Whether the work over a user's keys is shared out among several blocks (split-KV). It depends on the user's own
// numbers alone: the rest of the batch must not change a bit.
enum class Kind { All, Whole, Split };

__device__ inline bool is_split(int rows, int keys) { return keys >= 1024 && keys / 4 >= rows; }

// A user, and the rest of an index that counts over all users.
struct Found {
    int user;  // -1: the index is behind the last user's
    int64_t rest;
    int64_t before;  // the index at which the user's begin
    int rows;        // as `rows` gave them
};

// The user that has number `index`, where a user with `rows(user)` rows has `count(rows)` of what is counted. A whole
// warp calls it; every lane gets the answer.
template <class Rows, class Count>
__device__ inline Found find_user(const Call &call, int64_t index, Rows rows, Count count) {
    int lane = threadIdx.x & 31;
    int64_t before = 0;
    for (int base = 0; base < call.users; base += 32) {
        int user = base + lane, own_rows = user < call.users ? rows(user) : 0;
        auto own = count(own_rows), sum = own;
        for (int step = 1; step < 32; step *= 2) {
            auto other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += other;
        }
        unsigned after = __ballot_sync(~0u, before + sum > index);
        if (after != 0) {
            int owner = __ffs(after) - 1;
            before += __shfl_sync(~0u, sum - own, owner);
            return {base + owner, index - before, before, __shfl_sync(~0u, own_rows, owner)};
        }
        before += __shfl_sync(~0u, sum, 31);
    }
    return {-1, 0, before, 0};
}

// The rows of a user of that kind that are computed, 0 of another's.
template <Kind KIND> __device__ inline int rows_of_kind(const Call &call, int user) {
    int rows = rows_of(call, user), computed = computed_of(call, user, rows);
    if (KIND == Kind::All) return computed;
    const int *pages;
    int page_count;
    int cached = cached_of(call, user, rows, pages, page_count);
    return is_split(rows, cached + rows) == (KIND == Kind::Split) ? computed : 0;
}

// A piece of work: some of the blocks of rows of one user.
struct Piece {
    int user;    // -1: there is none of that number
    int number;  // of the user's pieces
    int blocks;  // of computed rows that the user has
};

// The piece number `index`, counted over all users of one kind; a piece has `per` of a user's blocks of ROWS rows. A
// whole warp calls it; every lane gets the answer.
template <int ROWS, Kind KIND>
__device__ inline Piece find_piece(const Call &call, int64_t index, int per) {
    auto rows = [&](int user) { return rows_of_kind<KIND>(call, user); };
    Found found = find_user(call, index, rows, [&](int rows) { return ((rows + ROWS - 1) / ROWS + per - 1) / per; });
    return {found.user, static_cast<int>(found.rest), (found.rows + ROWS - 1) / ROWS};
}

}  // namespace pagoda
