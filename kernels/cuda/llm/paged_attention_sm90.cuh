// Softmax attention with grouped query heads as a variant of the attention on Hopper (common/attention_sm90/traits.cuh says what
// a variant is): prefill over pages of f16 or bf16. All keys and values are in their pages, those of the new tokens too, and
// queries are rotated already. So a `User` here has `cached` tokens in pages, its own rows among them.
#pragma once

#include "common/attention_sm90/epilogue.cuh"
#include "common/attention_sm90/producer.cuh"
#include "common/dependent_launch.cuh"
#include "llm/paged_softmax.cuh"
#include "llm/paged_parts.cuh"

namespace pagoda {
namespace sm90 {

// The positions that a row sees.
struct CausalSeen {
    int first, last;

    __device__ static CausalSeen of(const Call &call, const User &user, int row) {
        int position = user.cached - user.rows + row;
        bool unlimited = call.window == 0 || position < call.window;
        return {unlimited ? 0 : position + 1 - static_cast<int>(call.window), position};
    }
    // Without a branch: it is evaluated for every element of a masked tile.
    __device__ bool sees(int position) const {
        return static_cast<unsigned>(position - first) <= static_cast<unsigned>(last - first);
    }
};

// What a stretch of rows sees together; there are no candidates.
struct CausalReach {
    int first, end;              // that some row sees
    int whole_first, whole_end;  // that every row sees
    int candidate, candidate_end;

    __device__ static CausalReach of(const Call &call, const User &user, int first_row, int last_row) {
        if (last_row < first_row) return {0, 0, 0, 0, 0, 0};
        CausalSeen low = CausalSeen::of(call, user, first_row), high = CausalSeen::of(call, user, last_row);
        return {low.first, high.last + 1, high.first, low.last + 1, 0, 0};
    }
};

struct CausalMask {
    CausalReach reach;
    CausalSeen rows[2];

    // The warpgroup has the 64 rows of the user from `first` on, up to `last`; the thread has row `own` and the one 8 below.
    __device__ CausalMask(const Call &call, const User &user, int first, int own, int last) {
        reach = CausalReach::of(call, user, first, min(first + 63, last));
        for (int i = 0; i < 2; i++) rows[i] = CausalSeen::of(call, user, min(own + 8 * i, last));
    }
    template <int KEYS> __device__ bool any(const Tile &tile) const { return tile.seen<KEYS>(reach); }
    template <int KEYS> __device__ bool all(const Tile &tile) const { return tile.whole<KEYS>(reach); }
    __device__ const CausalSeen &row(int which) const { return rows[which]; }
};

// exp(scale · S), relative to the largest score so far, or to one that is not much less; sums are divided by the sum of the weights in
// the end.
struct SoftmaxScore {
    static constexpr bool RESCALES = true;
    static constexpr bool ADDITIVE = false;

    float scale;                  // for powers of two
    float most[2], total[2], factor[2];

    __device__ explicit SoftmaxScore(const Call &call) : scale(call.alpha * paged::LOG2_E) {
        for (int i = 0; i < 2; i++) most[i] = -INFINITY, total[i] = 0, factor[i] = 1;
    }

    template <class T, int KEYS, class Mask>
    __device__ void weigh(const float (&scores)[KEYS / 2], uint32_t (&weights)[KEYS / 4], const Tile &tile, const Mask &mask) {
        if (mask.template all<KEYS>(tile)) weigh<T, KEYS, false>(scores, weights, tile, mask);
        else weigh<T, KEYS, true>(scores, weights, tile, mask);
    }

    template <class T, int KEYS, bool MASKED, class Mask>
    __device__ void weigh(const float (&scores)[KEYS / 2], uint32_t (&weights)[KEYS / 4], const Tile &tile, const Mask &mask) {
        int column = tile.position + (threadIdx.x & 3) * 2;
        float own[KEYS / 2];
        // Several maxima of each row: one alone is a chain of instructions that wait for each other.
        float several[2][4] = {{most[0], most[0], most[0], most[0]}, {most[1], most[1], most[1], most[1]}};
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) {
            own[i] = scores[i];
            int which = i / 2 & 1;
            // Selected: a score that is not seen may be NaN.
            if (MASKED && !mask.row(which).sees(column + i / 4 * 8 + (i & 1))) own[i] = -INFINITY;
            float &of_some = several[which][i / 4 & 1 | (i & 1) << 1];
            of_some = fmaxf(of_some, own[i]);
        }
        float larger[2], base[2], sum[2] = {};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            larger[i] = paged::group_max(fmaxf(fmaxf(several[i][0], several[i][1]), fmaxf(several[i][2], several[i][3])));
            // As long as no weight is above 2^8, what they are relative to stays: sums need not be multiplied.
            if ((larger[i] - most[i]) * scale <= 8.0f) larger[i] = most[i];
            // Nothing but -inf so far: weights of 0.
            base[i] = larger[i] == -INFINITY ? 0.0f : larger[i] * scale;
            factor[i] = paged::power_of_two(fmaf(most[i], scale, -base[i]));
            most[i] = larger[i];
        }
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++) {
            int which = i & 1;
            float low = paged::power_of_two(fmaf(own[i * 2], scale, -base[which]));
            float high = paged::power_of_two(fmaf(own[i * 2 + 1], scale, -base[which]));
            sum[which] += low + high;
            weights[i] = Pack<T>::of(low, high);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) total[i] = fmaf(total[i], factor[i], sum[i]);
    }

    template <int PARTS, int N> __device__ void rescale(float (&sums)[PARTS][N]) const {
        // The same bits with it and without.
        if (!__any_sync(~0u, factor[0] != 1.0f | factor[1] != 1.0f)) return;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
#pragma unroll
            for (int i = 0; i < N; i++) sums[part][i] *= factor[i / 2 & 1];
        }
    }

    // Behind the last tile: the sink of the head joins, and `factor` becomes what the sums are multiplied by.
    template <class T> __device__ void close(const PagedCall &call, int head) {
        for (int i = 0; i < 2; i++) {
            float largest = most[i] == -INFINITY ? most[i] : most[i] * scale, all = paged::group_sum(total[i]);
            float own = paged::join_sink<T>(call, head, largest, all);
            factor[i] = all == 0 ? 0.0f : own / all;
        }
    }
    __device__ float finish(int which, float sum) const { return sum * factor[which]; }
};

struct SoftmaxVariant {
    using Reach = CausalReach;
    using Mask = CausalMask;
    using Score = SoftmaxScore;

    // `group` query heads share a kv head.
    __device__ static int kv_head(const Call &call, int head) { return head / static_cast<int>(call.group); }
};

// Sequences with few new tokens are not this kernel's.
__device__ inline int prefilled_rows(const Call &call, int user) {
    int rows = rows_of(call, user);
    return paged::is_decode(rows, static_cast<int>(call.group)) ? 0 : rows;
}

__device__ inline User prefilled_user(const Call &call, int number) {
    User user{};
    user.row = clamped(call.row_offsets[number], 0, call.total_rows);
    user.rows = rows_of(call, number);
    int cached = cached_of(call, number, user.rows, user.pages, user.page_count);
    user.cached = user.history = cached + user.rows;
    return user;
}

// One of the warps that fetch: the keys or the values, and of each head one box. A warp issues the boxes of its lanes one after the
// other, and a page of 16 tokens is a box or two of its own: a single warp could not keep up with the consumers.
template <class S> struct PageProducer : Producer<S> {
    using Base = Producer<S>;
    int which, box;

    static constexpr int WARPS = 2 * S::BOXES;
    static_assert(WARPS <= 4, "of a warpgroup");

    __device__ PageProducer(const Call &call, const AttentionMaps &maps, int granule, const Ring<S> &ring, int warp)
        : Base{call, maps, granule, ring, 0}, which(warp % 2), box(warp / 2) {}

    // The first one does it for all.
    __device__ void announce(const Item<S> &item) const {
        if (which == 0 && box == 0) Base::announce(item);
    }

    __device__ void fetch(const Item<S> &item) {
        const Ring<S> &ring = this->ring;
        int head = S::Variant::kv_head(this->call, item.head), lane = threadIdx.x & 31, stretches = this->stretches;
        this->known = Base::UNKNOWN;
        announce(item);
        for (int index = item.begin; index < item.end; index++, this->tiles = ring.behind(this->tiles, 2)) {
            if (index < this->known || (index - this->known + 1) * stretches > 32) this->look_up(item, index);
            int place = ring.behind(this->tiles, which);
            uint32_t memory = ring.keys(place) + box * S::KEYS * S::ROW_BYTES, full = ring.keys_full(place);
            barrier_wait(ring.keys_empty(place), ring.phase(place) ^ 1);
            if (lane == 0) barrier_expect(full, S::TILE_BYTES / S::BOXES);
            __syncwarp();
            int stretch = lane - (index - this->known) * stretches;
            if (stretch >= 0 && stretch < stretches) {
                int row = which == 1 && this->rows != OUTSIDE ? this->rows + this->call.page_size : this->rows;
                copy_box(memory + stretch * this->granule * S::ROW_BYTES, &this->maps.pool, full, box * S::COLUMNS, head, row);
            }
            __syncwarp();
        }
        this->items++;
    }
};

// Finds the items of a block one after the other, and has the producer fetch each. A piece is an item from either end of a
// sequence, which together cost about the same everywhere.
template <class S> __device__ void schedule(const Call &call, PageProducer<S> &producer, int per) {
    auto rows = [&](int user) { return prefilled_rows(call, user); };
    auto pieces = [&](int rows) { return ((rows + S::ROWS - 1) / S::ROWS + per - 1) / per; };
    for (int64_t index = blockIdx.x;; index += gridDim.x) {
        Found found = find_user(call, index / call.heads, rows, pieces);
        if (found.user < 0) break;
        User user = prefilled_user(call, found.user);
        int number = static_cast<int>(found.rest), last = (found.rows + S::ROWS - 1) / S::ROWS - 1 - number;
#pragma unroll 1
        for (int half = 0; half < per && (half == 0 || number != last); half++) {
            int first = (half == 0 ? last : number) * S::ROWS;
            Item<S> item{user, static_cast<int>(index % call.heads), first};
            item.slot = -1;
            item.tiles = Tiles<S::KEYS>::of(user, CausalReach::of(call, user, first, min(first + S::ROWS, user.rows) - 1));
            item.end = item.tiles.count();
            producer.fetch(item);
        }
    }
    Item<S> none{};
    none.user.rows = -1;
    producer.announce(none);
}

template <class T, class S>
__device__ void prefill(const Call &call, const AttentionMaps &maps, const PagedCall &paged, int granule, int per) {
    constexpr int FETCHING = S::COMPUTING / 32;
    extern __shared__ __align__(1024) uint8_t shared[];
    Ring<S> ring(shared);
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    wait_for_previous();
    launch_dependents();
    if (threadIdx.x == 0) {
        for (const CUtensorMap *map : {&maps.query, &maps.pool}) prefetch_map(map);
        ring.init(S::BOXES);
    }
    __syncthreads();
    if (warp >= FETCHING) {
        if (S::GROUPS > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::FETCHING_REGISTERS));
        if (warp < FETCHING + PageProducer<S>::WARPS) {
            PageProducer<S> producer(call, maps, granule, ring, warp - FETCHING);
            schedule<S>(call, producer, per);
        }
    } else {
        if (S::GROUPS > 1) {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::REGISTERS));
            if (warp >= FETCHING - 4) named_arrive(TURN, 256);
        }
        int at = 0;
        for (int number = 0;; number++) {
            Item<S> item = ring.item(number);
            if (item.user.rows < 0) break;
            Mainloop<T, S> loop{call, ring, item, number, at, SoftmaxScore(call)};
            int group_first = item.first + loop.rows_at(), first_row = group_first + own_row(), last = item.user.rows - 1;
            CausalMask mask(call, item.user, group_first, first_row, last);
            loop.clear();
            loop.run(mask, 0, [](int) { return 0; });
            loop.score.template close<T>(paged, item.head);
            write_rows(loop, first_row, last);
            at = loop.at;
        }
    }
}

}  // namespace sm90
}  // namespace pagoda
