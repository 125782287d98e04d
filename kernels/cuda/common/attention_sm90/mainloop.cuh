// The main loop of the attention on Hopper: a warpgroup goes over the tiles of an item.
#pragma once

#include "common/attention_sm90/pipeline.cuh"
#include "common/wgmma.cuh"

namespace pagoda {
namespace sm90 {

// Writes zeros over the values behind the end of a tile: their weights are 0, but 0 · NaN is NaN.
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

// The main loop of one warpgroup: its accumulators, and the loop over the item's tiles. Mask and score function are the
// variant's.
template <class T, class S> struct Mainloop {
    using Mask = typename S::Variant::Mask;
    using Score = typename S::Variant::Score;
    using Scores = wgmma::Multiply<T, S::KEYS>;
    using Sums = wgmma::Multiply<T, S::PART>;
    // Matrix descriptors are computed once for a matrix; with small heads there are few steps, and computing each was 1
    // % faster.
    static constexpr bool ONCE = S::D > 64;

    const Call &call;
    const Ring<S> &ring;
    const Item<S> &item;
    int number;  // of the item
    int at;      // the next tile's place
    Score score;
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

    // The end of the tiles that the warpgroup has to compute: behind the last one that it sees. A tile in between that
    // it does not see gets weights of 0: a branch around it would serialise the wgmma instructions.
    __device__ int tiles_to_see(const Mask &mask, int begin, int end) const {
        while (end > begin && !mask.template any<S::KEYS>(item.tiles.at(end - 1))) end--;
        return __shfl_sync(~0u, end, 0);
    }

    // The weights of a tile. A score function that depends on all tiles so far rescales the accumulators here.
    __device__ void weigh(const float (&scores)[S::KEYS / 2], uint32_t (&weights)[S::KEYS / 4], const Tile &tile,
                          const Mask &mask) {
        score.template weigh<T, S::KEYS>(scores, weights, tile, mask);
        if constexpr (Score::RESCALES) score.rescale(sums);
    }

    // Releases the queries and the item's record in shared memory.
    __device__ void leave_item() const { barrier_arrive(ring.item_empty(number)); }

    // Waits for the values of a tile, and clears those behind its end.
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

    // Goes over the item's tiles. In Mode::Parts `pause(index)` is called behind tile number `when`, and returns the
    // next such number. Returns the first one that was not reached.
    template <class Pause> __device__ int run(const Mask &mask, int when, Pause pause) {
        int turn = __shfl_sync(~0u, threadIdx.x / 128, 0);
        int index = item.begin, end = tiles_to_see(mask, index, item.end);
        if (end > index) {
            // A single warpgroup has the scores of two tiles: while it turns those of one into weights, the tensor
            // cores compute those of the next. Several warpgroups alternate instead: one has the tensor cores while
            // another computes weights (ping-pong).
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
                    step_alone(scores, others, index, mask);
                    step_alone(others, scores, index + 1, mask);
                }
                if (index + 1 < end) {
                    step_alone(scores, others, index, mask);
#pragma unroll
                    for (int i = 0; i < S::KEYS / 2; i++) scores[i] = others[i];
                    index++;
                }
            } else if constexpr (S::MODE == Mode::Parts) {
                while (index + 1 < end) {
                    int stop = min(when, end - 2);
                    for (; index <= stop; index++) step(scores, index, turn, mask);
                    if (stop == when) {
                        touch();
                        when = pause(stop);
                    }
                }
            } else {
                for (; index + 1 < end; index++) step(scores, index, turn, mask);
            }
            leave_item();
            uint32_t weights[S::KEYS / 4];
            Tile tile = item.tiles.at(index);
            weigh(scores, weights, tile, mask);
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
        // Tiles that only other warpgroups see are released, and turns passed on: each warpgroup has as many.
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

    // Adds the values of a tile and computes the scores of the next, in one turn.
    __device__ void step(float (&scores)[S::KEYS / 2], int index, int turn, const Mask &mask) {
        uint32_t weights[S::KEYS / 4];
        Tile tile = item.tiles.at(index);
        weigh(scores, weights, tile, mask);
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
                               const Mask &mask) {
        uint32_t weights[S::KEYS / 4];
        Tile tile = item.tiles.at(index);
        int next = ring.behind(at, 2);
        barrier_wait(ring.keys_full(next), ring.phase(next));
        multiply_scores(next_scores, next);
        wgmma::commit();
        weigh(scores, weights, tile, mask);
        wait_values(tile, at);
        add_values(weights, at);
        wgmma::commit();
        wgmma::wait();
        wgmma::touch(next_scores);
        arrive(ring.values_empty(at));
        arrive(ring.keys_empty(next));
        at = next;
    }

    // Visits the thread's columns of one of its two rows, pair by pair: `to(column, low, high)`.
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

}  // namespace sm90
}  // namespace pagoda
