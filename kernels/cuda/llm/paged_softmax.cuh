// Softmax attention of a warp: 16 rows against tiles of keys, by mma.sync. A row of a tile is one new token with one query head
// of the group that shares a kv head, so a group reads its keys and values once.
#pragma once

#include <type_traits>

#include "llm/paged_fragments.cuh"

namespace pagoda {
namespace paged {

constexpr int ROWS = 16;  // of a warp
constexpr float LOG2_E = 1.4426950408889634f;

// One of a thread's two rows.
struct Row {
    int position;  // negative: there is no such row
    float slope;   // of ALiBi, for powers of two
};

// The numbers of the call by which scores become weights.
struct Scoring {
    float scale;  // what makes a score a power of two, or with a softcap what goes into tanh
    float cap;    // 0: none
    int window;   // INT32_MAX: unlimited
    bool plain;   // neither a softcap nor slopes

    __device__ explicit Scoring(const PagedCall &call) {
        cap = call.softcap > 0 ? call.softcap * LOG2_E : 0.0f;
        scale = call.softcap > 0 ? call.scale / call.softcap : call.scale * LOG2_E;
        plain = call.softcap <= 0 && call.slopes == nullptr;
        window = call.window <= 0 || call.window > INT32_MAX ? INT32_MAX : static_cast<int>(call.window);
    }

    // cap · tanh(x), through a power that saturates to the right ends.
    __device__ float capped(float x) const {
        float power = exp2f(x * (2 * LOG2_E));
        return cap - __fdividef(2 * cap, 1.0f + power);
    }

    // The score of a row against the key at a position, whose product with the query it is given.
    __device__ float of(float product, const Row &row, int at) const {
        float score = product * scale;
        int distance = row.position - at;
        if (cap > 0) score = capped(score);
        score -= row.slope * static_cast<float>(distance);
        // Selected: a score that is not seen may be NaN.
        return at >= 0 & at <= row.position & distance < window ? score : -INFINITY;
    }
};

__device__ inline float power_of_two(float value) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value));
    return power;
}

// A sum of values becomes a number of the output.
__device__ inline float share_of(float sum, float total) { return total == 0 ? 0.0f : sum / total; }

// A sink joins the sum of weights: returns what sums are multiplied by.
template <class T>
__device__ inline float join_sink(const PagedCall &call, int head, float &most, float &total) {
    if (call.sinks == nullptr) return 1.0f;
    float sink = wide(static_cast<const T *>(call.sinks)[head]) * LOG2_E;
    float larger = fmaxf(most, sink), factor = most == -INFINITY ? 0.0f : power_of_two(most - larger);
    total = fmaf(total, factor, power_of_two(sink - larger));
    most = larger;
    return factor;
}

__device__ inline float group_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
    return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}

__device__ inline float group_sum(float value) {
    value += __shfl_xor_sync(~0u, value, 1);
    return value + __shfl_xor_sync(~0u, value, 2);
}

// The queries of a warp, in the order in which keys are read. Small heads stay in registers.
template <class T, int D, int FORMAT, bool KEPT = D <= 128> struct Queries {
    using L = Layout<D, FORMAT>;
    static constexpr int STRIDE = D + 8;  // numbers from row to row in shared memory
    const T *shared;
    uint32_t kept[KEPT ? D / 16 : 1][4];

    __device__ void load(uint32_t (&to)[4], int step) const {
        constexpr int STEPS = L::KEY_NUMBERS / 4;
        int lane = threadIdx.x & 31;
        int column = (step / STEPS * 4 + (lane & 3)) * L::KEY_NUMBERS + step % STEPS * 4;
        const uint32_t *from = reinterpret_cast<const uint32_t *>(shared + lane / 4 * STRIDE + column);
        to[0] = from[0], to[2] = from[1];
        to[1] = from[8 * STRIDE / 2], to[3] = from[8 * STRIDE / 2 + 1];
    }

    __device__ explicit Queries(const T *shared) : shared(shared) {
        if constexpr (KEPT) {
#pragma unroll
            for (int step = 0; step < D / 16; step++) load(kept[step], step);
        }
    }

    __device__ void at(uint32_t (&to)[4], int step) const {
        if constexpr (KEPT) {
#pragma unroll
            for (int i = 0; i < 4; i++) to[i] = kept[step][i];
        } else {
            load(to, step);
        }
    }
};

// Scores that nobody keeps.
struct NoScores {
    __device__ void operator()(int, const float (&)[4]) const {}
};

// What a row's query is in f16, for products with codes.
struct FoldedQuery {
    float sum;    // of its numbers
    float scale;  // what makes a product with it one with the query itself
};

// FOLDED: products are with codes of 8 bits in f16, which are exact, and the ranges of keys and values are folded into scores and
// weights: fewer instructions than codes that become numbers. Queries are in f16 then.
template <class T, int D, int FORMAT, int KEYS, bool FOLDED = false> struct Attention {
    static_assert(!FOLDED || FORMAT == INT8, "codes of 8 bits");
    using L = Layout<D, FORMAT>;
    using M = typename std::conditional<FOLDED, __half, T>::type;
    float sums[D / 8][4];
    float most[2], total[2];  // of the two rows; `total` is this thread's share until `finish`
    float lows[FOLDED ? 2 : 1];  // the same of weights times the lows of values
    float of_scales;          // what sums are multiplied by in the end: the largest scale of a value
    FoldedQuery folded[FOLDED ? 2 : 1];

    __device__ void clear() {
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sums[n][i] = 0;
        }
        for (int i = 0; i < 2; i++) most[i] = -INFINITY, total[i] = 0;
        if constexpr (FOLDED) lows[0] = lows[1] = 0;
    }

    // Adds a tile. `ranges(which, key)`: that of a key or a value; `position(key)`: that of the token; keys and values are in
    // shared memory. `plain`: every row sees every key, and a score is a product alone. Both ways give the same bits. Where a tile is
    // not plain, `keep(n, scores)` gets the scores of keys `n * 8 + (lane & 3) * 2` and the next, of the first row and of the second.
    template <class Q, class Position, class Ranges, class Keep = NoScores>
    __device__ void add(bool plain, const Q &queries, const uint8_t *keys, const uint8_t *values,
                        const Scoring &scoring, const Row (&rows)[2], Position position, Ranges ranges, Keep keep = {}) {
        float scores[KEYS / 8][4] = {};
        multiply_keys(scores, queries, keys, ranges, folded);
        if (plain) weigh<true>(scores, scoring, rows, position, NoScores{});
        else weigh<false>(scores, scoring, rows, position, keep);
        add_values(scores, values, ranges);
    }

    // The products of rows with a tile's keys. `folded`: what the rows' queries are, with FOLDED.
    template <class Q, class Ranges>
    __device__ static void multiply_keys(float (&scores)[KEYS / 8][4], const Q &queries, const uint8_t *keys, Ranges ranges,
                                         const FoldedQuery *folded = nullptr) {
        constexpr int STEPS = L::KEY_NUMBERS / 4;
        int lane = threadIdx.x & 31;
        Range range[FORMAT == NATIVE || FOLDED ? 1 : KEYS / 8] = {};
        if constexpr (FORMAT != NATIVE && !FOLDED) {
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) range[n] = ranges(0, n * 8 + lane / 4);
        }
#pragma unroll
        for (int unit = 0; unit < L::KEY_UNITS; unit++) {
            uint32_t a[STEPS][4];
#pragma unroll
            for (int step = 0; step < STEPS; step++) queries.at(a[step], unit * STEPS + step);
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
                Words<L::KEY_UNIT> words(keys + n * 8 * L::KEY_STRIDE +
                                         L::key_at(lane / 4, (unit * 4 + (lane & 3)) * L::KEY_UNIT));
                Range own = range[FORMAT == NATIVE || FOLDED ? 0 : n];
#pragma unroll
                for (int step = 0; step < STEPS; step++) {
                    if constexpr (FOLDED) {
                        uint32_t word = words.words[step];
                        mma::multiply<M>(scores[n], a[step], codes_of(word, false), codes_of(word, true));
                    } else {
                        mma::multiply<T>(scores[n], a[step], words.template pair<T, FORMAT>(step * 4, own),
                                         words.template pair<T, FORMAT>(step * 4 + 2, own));
                    }
                }
            }
        }
        if constexpr (FOLDED) {
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (int column = 0; column < 2; column++) {
                    Range own = ranges(0, n * 8 + (lane & 3) * 2 + column);
#pragma unroll
                    for (int row = 0; row < 2; row++) {
                        float &score = scores[n][row * 2 + column];
                        score = fmaf(score, own.scale, own.low * folded[row].sum) * folded[row].scale;
                    }
                }
            }
        }
    }

    // Scores become weights, relative to the largest score so far, or to one that is not much less.
    template <bool PLAIN, class Position, class Keep>
    __device__ void weigh(float (&scores)[KEYS / 8][4], const Scoring &scoring, const Row (&rows)[2], Position position,
                          Keep keep) {
        int lane = threadIdx.x & 31;
        float larger[2] = {most[0], most[1]};
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
            int positions[2] = {};
            if constexpr (!PLAIN) {
                for (int i = 0; i < 2; i++) positions[i] = position(n * 8 + (lane & 3) * 2 + i);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float score = PLAIN ? scores[n][i] * scoring.scale : scoring.of(scores[n][i], rows[i / 2], positions[i & 1]);
                scores[n][i] = score;
                // A comparison with NaN leaves the maximum as it is; the weight becomes NaN.
                larger[i / 2] = fmaxf(larger[i / 2], score);
            }
            keep(n, scores[n]);
        }
        float base[2], factor[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            larger[i] = group_max(larger[i]);
            // As long as no weight is above 2^8, what they are relative to stays: sums need not be multiplied.
            if (larger[i] - most[i] <= 8.0f) larger[i] = most[i];
            // Nothing but -inf so far: weights of 0.
            base[i] = larger[i] == -INFINITY ? 0.0f : larger[i];
            // The first time there are no sums.
            factor[i] = most[i] == -INFINITY ? 1.0f : power_of_two(most[i] - base[i]);
            most[i] = larger[i];
            total[i] *= factor[i];
            if constexpr (FOLDED) lows[i] *= factor[i];
        }
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                scores[n][i] = power_of_two(scores[n][i] - base[i / 2]);
                total[i / 2] += scores[n][i];
            }
        }
        // The same bits with it and without.
        if (__any_sync(~0u, factor[0] != 1.0f | factor[1] != 1.0f)) {
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) sums[n][i] *= factor[i / 2];
            }
        }
    }

    template <class Ranges>
    __device__ void add_values(const float (&scores)[KEYS / 8][4], const uint8_t *values, Ranges ranges) {
        int lane = threadIdx.x & 31;
#pragma unroll
        for (int step = 0; step < KEYS / 16; step++) {
            if constexpr (FOLDED) {
                add_codes(scores[step * 2], scores[step * 2 + 1], values, step, ranges);
                continue;
            }
            const float(&low)[4] = scores[step * 2], (&high)[4] = scores[step * 2 + 1];
            uint32_t a[4] = {Pack<T>::of(low[0], low[1]), Pack<T>::of(low[2], low[3]), Pack<T>::of(high[0], high[1]),
                             Pack<T>::of(high[2], high[3])};
            Range range[4] = {};
            if constexpr (FORMAT != NATIVE) {
#pragma unroll
                for (int i = 0; i < 4; i++) range[i] = ranges(1, step * 16 + (lane & 3) * 2 + i / 2 * 8 + i % 2);
            }
#pragma unroll
            for (int unit = 0; unit < L::VALUE_UNITS; unit++) {
                const uint8_t *at = values + step * 16 * L::VALUE_STRIDE +
                                    L::value_at((lane & 3) * 2, (unit * 8 + lane / 4) * L::VALUE_UNIT);
                Words<L::VALUE_UNIT> first(at), second(at + L::VALUE_STRIDE), third(at + 8 * L::VALUE_STRIDE),
                    fourth(at + 9 * L::VALUE_STRIDE);
#pragma unroll
                for (int i = 0; i < L::VALUE_NUMBERS; i++) {
                    mma::multiply<T>(sums[unit * L::VALUE_NUMBERS + i], a,
                                     across<T, FORMAT>(first, second, i, range[0], range[1]),
                                     across<T, FORMAT>(third, fourth, i, range[2], range[3]));
                }
            }
        }
    }

    // As `add_values`, of 16 keys, whose weights are `low` and `high`.
    template <class Ranges>
    __device__ void add_codes(const float (&low)[4], const float (&high)[4], const uint8_t *values, int step, Ranges ranges) {
        int lane = threadIdx.x & 31;
        float factor = 1.0f / of_scales, weights[2][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            Range range = ranges(1, step * 16 + (lane & 3) * 2 + i / 2 * 8 + i % 2);
#pragma unroll
            for (int row = 0; row < 2; row++) {
                float weight = i < 2 ? low[row * 2 + i] : high[row * 2 + i - 2];
                lows[row] = fmaf(weight, range.low, lows[row]);
                weights[row][i] = weight * (range.scale * factor);
            }
        }
        uint32_t a[4] = {Pack<__half>::of(weights[0][0], weights[0][1]), Pack<__half>::of(weights[1][0], weights[1][1]),
                         Pack<__half>::of(weights[0][2], weights[0][3]), Pack<__half>::of(weights[1][2], weights[1][3])};
#pragma unroll
        for (int unit = 0; unit < L::VALUE_UNITS; unit++) {
            const uint8_t *at = values + step * 16 * L::VALUE_STRIDE +
                                L::value_at((lane & 3) * 2, (unit * 8 + lane / 4) * L::VALUE_UNIT);
            Words<L::VALUE_UNIT> first(at), second(at + L::VALUE_STRIDE), third(at + 8 * L::VALUE_STRIDE),
                fourth(at + 9 * L::VALUE_STRIDE);
#pragma unroll
            for (int i = 0; i < L::VALUE_NUMBERS; i += 2) {
                // Two codes of each of two values.
                constexpr int SELECT[2] = {0x5140, 0x7362};
                uint32_t near = __byte_perm(first.words[i / 4], second.words[i / 4], SELECT[i % 4 / 2]);
                uint32_t far = __byte_perm(third.words[i / 4], fourth.words[i / 4], SELECT[i % 4 / 2]);
                mma::multiply<M>(sums[unit * L::VALUE_NUMBERS + i], a, codes_of(near, false), codes_of(far, false));
                mma::multiply<M>(sums[unit * L::VALUE_NUMBERS + i + 1], a, codes_of(near, true), codes_of(far, true));
            }
        }
    }

    // The whole sums of weights.
    __device__ void finish() {
        for (int i = 0; i < 2; i++) total[i] = group_sum(total[i]);
        if constexpr (FOLDED) {
            for (int i = 0; i < 2; i++) lows[i] = group_sum(lows[i]);
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) sums[n][i] = fmaf(sums[n][i], of_scales, lows[i / 2]);
            }
        }
    }

    // Visits the thread's sums of one of its two rows: `to(first number, numbers[VALUE_NUMBERS])`, neighbours of a head.
    template <class To> __device__ void each(int which, To to) const {
        int lane = threadIdx.x & 31;
#pragma unroll
        for (int unit = 0; unit < L::VALUE_UNITS; unit++) {
#pragma unroll
            for (int column = 0; column < 2; column++) {
                float numbers[L::VALUE_NUMBERS];
#pragma unroll
                for (int i = 0; i < L::VALUE_NUMBERS; i++) {
                    numbers[i] = sums[unit * L::VALUE_NUMBERS + i][which * 2 + column];
                }
                to((unit * 8 + (lane & 3) * 2 + column) * L::VALUE_NUMBERS, numbers);
            }
        }
    }
};

}  // namespace paged
}  // namespace pagoda
