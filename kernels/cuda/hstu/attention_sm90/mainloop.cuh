// The warpgroups of the Hopper kernel that compute.
#pragma once

#include "common/convert.cuh"
#include "common/wgmma.cuh"
#include "hstu/attention_sm90/split_kv.cuh"

namespace pagoda {
namespace hopper {

// Zeros over the values behind the end of a tile: no weight is left for them, but 0 · NaN is NaN.
template <class S> __device__ void clear_tail(uint32_t values, int from) {
    constexpr int CHUNKS = S::ROW_BYTES / 16;
    int count = (S::KEYS - from) * CHUNKS;
    for (int i = threadIdx.x; i < count * S::BOXES; i += S::COMPUTING) {
        uint32_t to = values + i / count * S::KEYS * S::ROW_BYTES + from * S::ROW_BYTES + i % count * 16;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
    }
    fence_async();
    named_wait(TAIL, S::COMPUTING);
}

// A warpgroup's part of an item: its sums over the item's tiles.
template <class T, class S> struct Computing {
    using Scores = wgmma::Multiply<T, S::KEYS>;
    using Sums = wgmma::Multiply<T, S::PART>;
    // With small heads there are few steps, and computing places anew was 1 % faster.
    static constexpr bool ONCE = S::D > 64;

    const Call &call;
    const Ring<S> &ring;
    const Item<S> &item;
    int number;  // of the item
    int at;      // the next tile's place
    float sums[S::PARTS][S::PART / 2];

    // Where the warpgroup's rows begin among the block's.
    __device__ static int rows_at() { return threadIdx.x / 128 * 64; }

    __device__ void multiply_scores(float (&scores)[S::KEYS / 2], int at) const {
        wgmma::Matrix<S::ROW_BYTES, 16, ONCE> queries(ring.queries(number) + rows_at() * S::ROW_BYTES), keys(ring.keys(at));
        wgmma::fence();
#pragma unroll
        for (int step = 0; step < S::D / 16; step++) {
            int box = step * 16 / S::COLUMNS, inside = step * 32 % S::ROW_BYTES;
            Scores::ss(scores, queries.at(box * S::ROWS * S::ROW_BYTES + inside),
                       keys.at(box * S::KEYS * S::ROW_BYTES + inside), step > 0);
        }
    }

    __device__ void add_values(const uint32_t (&weights)[S::KEYS / 4], int at) {
        wgmma::Matrix<S::ROW_BYTES, S::KEYS * S::ROW_BYTES, ONCE> values(ring.values(at));
        wgmma::fence();
#pragma unroll
        for (int step = 0; step < S::KEYS / 16; step++) {
#pragma unroll
            for (int part = 0; part < S::PARTS; part++) {
                int offset = (part * (S::PART / S::COLUMNS) * S::KEYS + step * 16) * S::ROW_BYTES;
                Sums::rs(sums[part], &weights[step * 4], values.at(offset));
            }
        }
    }

    template <bool WHOLE>
    __device__ void weigh(const float (&scores)[S::KEYS / 2], uint32_t (&weights)[S::KEYS / 4], const Tile &tile,
                          const Seen (&seen)[2]) const {
        float half = call.alpha * 0.5f;
        int column = tile.position + (threadIdx.x & 3) * 2;
#pragma unroll
        for (int i = 0; i < S::KEYS / 4; i++) {
            float pair[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                pair[j] = silu_of_half(scores[i * 2 + j] * half);
                int position = column + i / 2 * 8 + j;
                // Selected, not multiplied: a score that no one sees may be NaN.
                if (!WHOLE && !(seen[i & 1].sees(position) & (position < tile.limit))) pair[j] = 0;
            }
            weights[i] = Pack<T>::of(pair[0], pair[1]);
        }
    }

    // How many tiles, from the first on, there are up to the last that the warpgroup sees. One in between that it does not
    // see gets weights of 0: a jump over it would make the matrix instructions wait for one another.
    __device__ int tiles_to_see(const Reach &reach, int begin, int end) const {
        while (end > begin && !item.tiles.at(end - 1).template seen<S::KEYS>(reach)) end--;
        return __shfl_sync(~0u, end, 0);
    }

    __device__ void weigh(const float (&scores)[S::KEYS / 2], uint32_t (&weights)[S::KEYS / 4], const Tile &tile,
                          const Seen (&seen)[2], const Reach &reach) const {
        if (tile.template whole<S::KEYS>(reach)) {
            weigh<true>(scores, weights, tile, seen);
        } else {
            weigh<false>(scores, weights, tile, seen);
        }
    }

    // The thread needs neither the queries nor the item's place in shared memory any more.
    __device__ void leave_item() const { barrier_arrive(ring.item_empty(number)); }

    // Waits for the values of a tile, and makes zeros of those that are behind its end.
    __device__ void wait_values(const Tile &tile, int at) const {
        barrier_wait(ring.values_full(at), ring.values_phase(at));
        if (tile.limit < tile.position + S::KEYS) clear_tail<S>(ring.values(at), tile.limit - tile.position);
    }

    __device__ void clear() {
#pragma unroll
        for (int part = 0; part < S::PARTS; part++) {
#pragma unroll
            for (int i = 0; i < S::PART / 2; i++) sums[part][i] = 0;
        }
    }

    __device__ void touch() {
#pragma unroll
        for (int part = 0; part < S::PARTS; part++) wgmma::touch(sums[part]);
    }

    __device__ static void take(int turn) {
        if (S::GROUPS > 1) named_wait(TURN + turn, 256);
    }
    __device__ static void pass(int turn) {
        if (S::GROUPS > 1) named_arrive(TURN + (turn + 1) % S::GROUPS, 256);
    }
    __device__ static void arrive(uint32_t barrier) {
        if ((threadIdx.x & 31) == 0) barrier_arrive(barrier);
    }

    // Goes through the item's tiles. Of a part, `pause(index)` is called behind the tile number `when`, and gives the next such.
    // Gives the first one that was not reached.
    template <class Pause> __device__ int run(const Seen (&seen)[2], const Reach &reach, int when, Pause pause) {
        int turn = __shfl_sync(~0u, threadIdx.x / 128, 0);
        int index = item.begin, end = tiles_to_see(reach, index, item.end);
        if (end > index) {
            // One warpgroup has scores of two tiles: while it turns those of one into weights, those of the next are multiplied.
            // Several take turns with the matrix units instead.
            constexpr bool ALONE = S::GROUPS == 1;
            float scores[S::KEYS / 2], others[ALONE ? S::KEYS / 2 : 1];
            barrier_wait(ring.keys_full(at), ring.phase(at));
            multiply_scores(scores, at);
            wgmma::commit();
            wgmma::wait();
            wgmma::touch(scores);
            arrive(ring.keys_empty(at));
            if constexpr (ALONE) {
                for (; index + 2 < end; index += 2) {
                    step_alone(scores, others, index, seen, reach);
                    step_alone(others, scores, index + 1, seen, reach);
                }
                if (index + 1 < end) {
                    step_alone(scores, others, index, seen, reach);
#pragma unroll
                    for (int i = 0; i < S::KEYS / 2; i++) scores[i] = others[i];
                    index++;
                }
            } else if constexpr (S::MODE == Mode::Parts) {
                while (index + 1 < end) {
                    int stop = min(when, end - 2);
                    for (; index <= stop; index++) step(scores, index, turn, seen, reach);
                    if (stop == when) {
                        touch();
                        when = pause(stop);
                    }
                }
            } else {
                for (; index + 1 < end; index++) step(scores, index, turn, seen, reach);
            }
            leave_item();
            uint32_t weights[S::KEYS / 4];
            Tile tile = item.tiles.at(index);
            weigh(scores, weights, tile, seen, reach);
            wait_values(tile, at);
            take(turn);
            add_values(weights, at);
            wgmma::commit();
            pass(turn);
            wgmma::wait();
            arrive(ring.values_empty(at));
            index++;
            at = ring.behind(at, 2);
        } else {
            leave_item();
        }
        // The other warpgroups' are passed on, and turns with them: each has as many.
        for (; index < item.end; index++, at = ring.behind(at, 2)) {
            barrier_wait(ring.keys_full(at), ring.phase(at));
            wait_values(item.tiles.at(index), at);
            arrive(ring.values_empty(at));
            arrive(ring.keys_empty(at));
            take(turn);
            pass(turn);
        }
        touch();
        return when;
    }

    // Adds the values of a tile and multiplies the next one's scores, in one turn.
    __device__ void step(float (&scores)[S::KEYS / 2], int index, int turn, const Seen (&seen)[2], const Reach &reach) {
        uint32_t weights[S::KEYS / 4];
        Tile tile = item.tiles.at(index);
        weigh(scores, weights, tile, seen, reach);
        wait_values(tile, at);
        int next = ring.behind(at, 2);
        barrier_wait(ring.keys_full(next), ring.phase(next));
        take(turn);
        add_values(weights, at);
        multiply_scores(scores, next);
        wgmma::commit();
        pass(turn);
        wgmma::wait();
        wgmma::touch(scores);
        arrive(ring.values_empty(at));
        arrive(ring.keys_empty(next));
        at = next;
    }

    // The same without turns.
    __device__ void step_alone(float (&scores)[S::KEYS / 2], float (&next_scores)[S::KEYS / 2], int index,
                               const Seen (&seen)[2], const Reach &reach) {
        uint32_t weights[S::KEYS / 4];
        Tile tile = item.tiles.at(index);
        int next = ring.behind(at, 2);
        barrier_wait(ring.keys_full(next), ring.phase(next));
        multiply_scores(next_scores, next);
        wgmma::commit();
        weigh(scores, weights, tile, seen, reach);
        wait_values(tile, at);
        add_values(weights, at);
        wgmma::commit();
        wgmma::wait();
        wgmma::touch(next_scores);
        arrive(ring.values_empty(at));
        arrive(ring.keys_empty(next));
        at = next;
    }

    // The thread's columns of one of its two rows, pair by pair: `to(column, low, high)`.
    template <class To> __device__ void each(int which, To to) const {
#pragma unroll
        for (int part = 0; part < S::PARTS; part++) {
#pragma unroll
            for (int n = 0; n < S::PART / 8; n++) {
                to(part * S::PART + n * 8 + (threadIdx.x & 3) * 2, sums[part][n * 4 + which * 2],
                   sums[part][n * 4 + which * 2 + 1]);
            }
        }
    }
};

// The thread's first row of its warpgroup's; the other is 8 below.
__device__ inline int own_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

// Adds up what the blocks of the cluster have of this block's share of the rows.
template <class T, class S> __device__ void add_up(const Call &call, const Ring<S> &ring, const Item<S> &item, int rank) {
    constexpr int SHARE = S::ROWS / CLUSTER, FOURS = S::D / 4;
    for (int unit = threadIdx.x; unit < SHARE * FOURS; unit += S::COMPUTING) {
        int row = rank * SHARE + unit / FOURS, column = unit % FOURS * 4;
        uint32_t from = ring.base + (row * S::SUM_STRIDE + column) * 4;
        float4 parts[CLUSTER];
#pragma unroll
        for (int block = 0; block < CLUSTER; block++) parts[block] = load_from(from, block);
        float4 sum = add_segments(parts);
        if (item.first + row >= item.user.rows) continue;
        T *to = output_at<T>(call, item.user, item.head, item.first + row) + column;
        float scale = call.scale;
        *reinterpret_cast<uint2 *>(to) =
            make_uint2(Pack<T>::of(sum.x * scale, sum.y * scale), Pack<T>::of(sum.z * scale, sum.w * scale));
    }
}

// A computing warp's part of an item; `at` is its first tile's place. Gives that of the next item's.
template <class T, class S>
__device__ int compute(const Call &call, const Ring<S> &ring, const Item<S> &item, int number, int at,
                       const Common &common) {
    extern __shared__ __align__(1024) uint8_t shared[];
    Computing<T, S> computing{call, ring, item, number, at};
    int group_first = item.first + computing.rows_at(), first_row = group_first + own_row(), last = item.user.rows - 1;
    Reach reach = Reach::of(call, item.user, group_first, min(group_first + 63, last));
    Seen seen[2];
    for (int i = 0; i < 2; i++) seen[i] = seen_by(call, item.user, min(first_row + 8 * i, last));
    bool complete = S::MODE == Mode::Whole || item.slot < 0;
    computing.clear();
    if (S::MODE == Mode::Parts) {
        // Behind the third tile what the part before has written has arrived, and every warpgroup has begun with this one: they
        // take turns. When two more are to come it is time to ask what others have done; not before one has said that one has
        // begun.
        auto early = [](const Item<S> &now) { return now.begin + 2; };
        auto late = [](const Item<S> &now) { return max(now.end - 3, now.begin + 2); };
        // Looked up again and again: the loop over the tiles has no registers to spare.
        auto now = [&]() -> const Item<S> & { return ring.record(number); };
        auto slot = [&] { return Slot<S>{common, ring, now().slot, now().role}; };
        auto next = [&](int index) {
            int next = NO_END;
            for (int at : {early(now()), now().ends[0] - 1, now().ends[1] - 1, now().ends[2] - 1, late(now())}) {
                if (at > index) next = min(next, at);
            }
            return next;
        };
        bool any = group_first <= last, parted = !complete && any;
        if (!any) {
            // Others may wait for what this warpgroup, which does nothing now, has left before.
            Slot<S>::meet();
            Slot<S>::tell(common, ring);
        }
        for (int i = 0; parted && i < SEGMENTS - 1; i++) {
            if (now().ends[i] == now().begin) slot().put(computing.sums, i);
        }
        int when = computing.run(seen, reach, next(item.begin - 1), [&](int index) {
            Slot<S>::tell(common, ring);
            if (index == early(now())) slot().say_taken();
            for (int i = 0; i < SEGMENTS - 1; i++) {
                if (index == now().ends[i] - 1) slot().put(computing.sums, i);
            }
            if (index == late(now()) && now().slot >= 0) slot().look_early();
            return next(index);
        });
        // What the warpgroup had too few tiles for.
        bool looked = when > late(now());
        if (when <= early(now())) {
            Slot<S>::meet();
            Slot<S>::tell(common, ring);
        }
        for (int i = 0; parted && i < SEGMENTS - 1; i++) {
            int end = now().ends[i];
            if (end != NO_END && end > now().begin && end > when) slot().put(computing.sums, i);
        }
        if (parted) complete = slot().leave(computing.sums, looked);
    } else {
        computing.run(seen, reach, 0, [](int) { return 0; });
    }
    if (complete) {
        for (int i = 0; i < 2; i++) {
            int row = first_row + 8 * i;
            if (row > last) continue;
            T *to = output_at<T>(call, item.user, item.head, row);
            computing.each(i, [&](int column, float low, float high) {
                *reinterpret_cast<uint32_t *>(to + column) = Pack<T>::of(low * call.scale, high * call.scale);
            });
        }
    }
    if (S::MODE != Mode::Cluster || complete) return computing.at;
    // Every warpgroup has to be done with the tiles before sums go where they were.
    named_wait(TAIL, S::COMPUTING);
    float *sums = reinterpret_cast<float *>(shared);
    for (int i = 0; i < 2; i++) {
        float *to = sums + (computing.rows_at() + own_row() + 8 * i) * S::SUM_STRIDE;
        computing.each(i, [&](int column, float low, float high) {
            *reinterpret_cast<float2 *>(to + column) = make_float2(low, high);
        });
    }
    cluster_wait();
    add_up<T, S>(call, ring, item, blockIdx.x % CLUSTER);
    fence_async();
    // No block may go on, or end, while another reads its sums.
    cluster_wait();
    return computing.at;
}

}  // namespace hopper
}  // namespace pagoda
