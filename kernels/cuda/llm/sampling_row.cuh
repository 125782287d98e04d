// The blocks that sample one row together: sums over all logits, the search for a cut, and the draw.
#pragma once

#include <cstdint>

#include "llm/sampling_weights.cuh"

namespace pagoda {
namespace sampling {

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr int BINS = 2048;
// Up to so many tokens of a bin are compared with one another. More are put into bins again.
constexpr int FEW = 512;
constexpr int MOST_BLOCKS = 8;

struct Shared {
    uint2 histogram[BINS];       // of this block: the low and the high half of a sum
    uint64_t sums[BINS];         // of all blocks of the row
    uint64_t keys[FEW];          // of the first block: tokens of one bin
    uint64_t weights[FEW];
    uint64_t slots[2][MOST_BLOCKS][2];
    uint64_t of_warps[MOST_BLOCKS * WARPS];
    uint64_t partial[WARPS][2];
    uint64_t before;
    uint64_t last;
    int crossing;
    int cursor;
    int listed;
    int token;
};
// Behind it a block can have its slice; the launcher counts with this number.
constexpr int SHARED_BYTES = 43008;
static_assert(sizeof(Shared) <= SHARED_BYTES);

__device__ inline uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

__device__ inline uint64_t sum_of_warp(uint64_t value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

// The sum of this lane's value and those of the lanes before it.
__device__ inline uint64_t sum_up_to_lane(uint64_t value) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        uint64_t before = __shfl_up_sync(~0u, value, step);
        if (threadIdx.x % 32 >= step) value += before;
    }
    return value;
}

// How top_k and the likeliest tokens are cut: by their number.
struct ByCount {
    uint64_t wanted;

    __device__ uint64_t weigh(float) const { return 1; }
    __device__ void all(uint64_t) {}
    __device__ bool keeps(uint64_t before) const { return before < wanted; }
};

// How top_p cuts: a token stays while the probability before it is at most top_p. In f32, as the option is.
struct ByProbability {
    const Softmax &softmax;
    float top_p;
    double total = 0.0;

    __device__ uint64_t weigh(float logit) const { return softmax.fixed_of(logit); }
    // The first histogram has all tokens.
    __device__ void all(uint64_t sum) {
        if (total == 0.0) total = __ull2double_rn(sum);
    }
    __device__ bool keeps(uint64_t before) const {
        return __double2float_rn(__ddiv_rn(__ull2double_rn(before), total)) <= top_p;
    }
};

// The largest logit with its token, and the smallest one.
struct Extremes {
    uint64_t best;
    float max, least;
};

// Those that one thread has seen. Tokens come in order: the first of equals stays.
struct OfThread {
    float max = -INFINITY, least = INFINITY;
    uint32_t token = 0;

    __device__ void take(uint32_t at, float logit) {
        if (!counts(logit)) return;
        if (logit > max) max = logit, token = at;
        least = fminf(least, logit);
    }
};

// The blocks of one row. All threads call its methods together.
template <int BLOCKS> struct Row {
    Shared &shared;
    int block;          // of the row
    int first, count;   // the slice of this block
    const float *values;
    int phase = 0;

    __device__ void wait() const {
        __syncwarp();
#if __CUDA_ARCH__ >= 900
        if constexpr (BLOCKS > 1) {
            asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
            return;
        }
#endif
        __syncthreads();
    }

    // The same variable of another block's shared memory.
    template <class T> __device__ T *there(T *here, int block) const {
#if __CUDA_ARCH__ >= 900
        if constexpr (BLOCKS > 1) {
            uint64_t address;
            asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(here), "r"(block));
            return reinterpret_cast<T *>(address);
        }
#endif
        return here;
    }

    // Two reductions over all threads of all blocks. The slots are used in turn: a block is at most one reduction ahead.
    template <class Op> __device__ void reduce(uint64_t &a, uint64_t &b, Op op) {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            a = op(a, __shfl_xor_sync(~0u, a, step));
            b = op(b, __shfl_xor_sync(~0u, b, step));
        }
        if (lane == 0) shared.partial[warp][0] = a, shared.partial[warp][1] = b;
        __syncthreads();
        if (warp == 0) {
            a = shared.partial[lane % WARPS][0], b = shared.partial[lane % WARPS][1];
#pragma unroll
            for (int step = WARPS / 2; step > 0; step /= 2) {
                a = op(a, __shfl_xor_sync(~0u, a, step));
                b = op(b, __shfl_xor_sync(~0u, b, step));
            }
            if (lane < BLOCKS) {
                uint64_t *slot = there(&shared.slots[phase][block][0], lane);
                slot[0] = a, slot[1] = b;
            }
        }
        wait();
        a = shared.slots[phase][0][0], b = shared.slots[phase][0][1];
#pragma unroll
        for (int other = 1; other < BLOCKS; other++) {
            a = op(a, shared.slots[phase][other][0]);
            b = op(b, shared.slots[phase][other][1]);
        }
        phase ^= 1;
    }

    __device__ uint64_t sum(uint64_t value) {
        uint64_t none = 0;
        reduce(value, none, [](uint64_t a, uint64_t b) { return a + b; });
        return value;
    }

    // Calls `take(token, logit)` for every logit of the slice that counts.
    template <class Take> __device__ void each(Take take) const {
        for (int at = threadIdx.x; at < count; at += THREADS) {
            float logit = values[at];
            if (counts(logit)) take(static_cast<uint32_t>(first + at), logit);
        }
    }

    __device__ Extremes extremes() {
        OfThread own;
        each([&](uint32_t token, float logit) { own.take(token, logit); });
        return extremes(own);
    }

    __device__ Extremes extremes(const OfThread &own) {
        uint64_t best = counts(own.max) ? key_of(own.max, own.token) : NO_KEY;
        uint64_t worst = counts(own.max) ? ~key_of(own.least, 0) : NO_KEY;
        reduce(best, worst, smaller);
        return {best, logit_of(best), logit_of(~worst)};
    }

    // The sums of `weigh` in bins that `bin_of(token, logit)` chooses, -1 for none; of them the last bin that has a token which
    // stays, if `before` is the sum of those in front of all bins. Then `before` is that of those in front of the bin.
    template <class By, class BinOf> __device__ int crossing(By &by, uint64_t &before, BinOf bin_of) {
        for (int bin = threadIdx.x; bin < BINS; bin += THREADS) shared.histogram[bin] = make_uint2(0, 0);
        if (threadIdx.x == 0) shared.crossing = 0;
        __syncthreads();
        auto add = [&](int bin, uint64_t weight) {
            uint32_t low = static_cast<uint32_t>(weight), high = static_cast<uint32_t>(weight >> 32);
            uint32_t old = atomicAdd(&shared.histogram[bin].x, low);
            high += old + low < old;
            if (high != 0) atomicAdd(&shared.histogram[bin].y, high);
        };
        // Most tokens can be in the last bin. They are added up outside it, because additions to one place take turns.
        uint64_t rest = 0;
        each([&](uint32_t token, float logit) {
            int bin = bin_of(token, logit);
            if (bin < 0) return;
            uint64_t weight = by.weigh(logit);
            if (bin == BINS - 1) {
                rest += weight;
            } else {
                add(bin, weight);
            }
        });
        rest = sum_of_warp(rest);
        if (threadIdx.x % 32 == 0 && rest != 0) add(BINS - 1, rest);
        wait();
        constexpr int SHARE = BINS / BLOCKS;
        for (int at = threadIdx.x; at < SHARE; at += THREADS) {
            int bin = block * SHARE + at;
            uint64_t sum = 0;
#pragma unroll
            for (int other = 0; other < BLOCKS; other++) {
                uint2 halves = *there(&shared.histogram[bin], other);
                sum += static_cast<uint64_t>(halves.y) << 32 | halves.x;
            }
#pragma unroll
            for (int other = 0; other < BLOCKS; other++) *there(&shared.sums[bin], other) = sum;
        }
        wait();
        constexpr int EACH = BINS / THREADS;
        uint64_t own = 0;
#pragma unroll
        for (int n = 0; n < EACH; n++) own += shared.sums[threadIdx.x * EACH + n];
        uint64_t up_to = sum_up_to_lane(own);
        if (threadIdx.x % 32 == 31) shared.partial[threadIdx.x / 32][0] = up_to;
        __syncthreads();
        up_to += before - own;
        uint64_t all = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) {
            if (warp == threadIdx.x / 32) up_to += all;
            all += shared.partial[warp][0];
        }
        by.all(all);
        int found = -1;
        uint64_t in_front = 0;
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            uint64_t sum = shared.sums[threadIdx.x * EACH + n];
            if (sum != 0 && by.keeps(up_to)) found = threadIdx.x * EACH + n, in_front = up_to;
            up_to += sum;
        }
        if (found >= 0) atomicMax(&shared.crossing, found);
        __syncthreads();
        int bin = shared.crossing;
        if (found == bin) shared.before = in_front;
        __syncthreads();
        before = shared.before;
        return bin;
    }

    // Lists the tokens for which `wanted(token, logit)` holds in the memory of the first block, in any order, up to FEW. Returns
    // how many there are.
    template <class Wanted> __device__ int list(Wanted wanted) {
        if (threadIdx.x == 0) shared.cursor = 0;
        wait();
        int *cursor = there(&shared.cursor, 0);
        each([&](uint32_t token, float logit) {
            if (!wanted(token, logit)) return;
            int place = atomicAdd(cursor, 1);
            if (place < FEW) *there(&shared.keys[place], 0) = key_of(logit, token);
        });
        wait();
        if (threadIdx.x < BLOCKS && block == 0) *there(&shared.listed, threadIdx.x) = shared.cursor;
        wait();
        return shared.listed;
    }

    // The last of the listed tokens that stays, for all blocks.
    template <class By> __device__ uint64_t last_listed(const By &by, int listed, uint64_t before) {
        if (block == 0) {
            uint64_t own = threadIdx.x < listed ? shared.keys[threadIdx.x] : NO_KEY;
            if (threadIdx.x < listed) shared.weights[threadIdx.x] = by.weigh(logit_of(own));
            if (threadIdx.x == 0) shared.last = 0;
            __syncthreads();
            if (threadIdx.x < listed) {
                for (int other = 0; other < listed; other++) {
                    if (shared.keys[other] < own) before += shared.weights[other];
                }
                if (by.keeps(before)) atomicMax(reinterpret_cast<unsigned long long *>(&shared.last), own);
            }
            __syncthreads();
            if (threadIdx.x > 0 && threadIdx.x < BLOCKS) *there(&shared.last, threadIdx.x) = shared.last;
        }
        wait();
        return shared.last;
    }

    // The last token that stays of those in front of `end`. At least one of them does.
    template <class By>
    __device__ uint64_t last_kept(By by, const Extremes &of, float range, uint64_t end) {
        float max = of.max, scale = (BINS - 1) / fmaxf(fminf(__fsub_rn(max, of.least), range), 1e-30f);
        auto linear = [=](float logit) {
            return logit == max ? 0 : static_cast<int>(fminf((max - logit) * scale, BINS - 1));
        };
        uint64_t before = 0;
        int bin = crossing(by, before, [=](uint32_t token, float logit) {
            return key_of(logit, token) < end ? linear(logit) : -1;
        });
        int listed = list([=](uint32_t token, float logit) {
            return linear(logit) == bin && key_of(logit, token) < end;
        });
        if (listed <= FEW) return last_listed(by, listed, before);
        // The range of keys of the bin, which is divided until few tokens are left: keys differ, so it comes to an end.
        uint64_t low = NO_KEY, high = NO_KEY;
        each([&](uint32_t token, float logit) {
            uint64_t key = key_of(logit, token);
            if (linear(logit) == bin && key < end) low = smaller(low, key), high = smaller(high, ~key);
        });
        reduce(low, high, smaller);
        high = ~high;
        while (true) {
            int shift = 64 - __clzll(static_cast<long long>(high - low)) - 11;
            if (shift < 0) shift = 0;
            bin = crossing(by, before, [=](uint32_t token, float logit) {
                uint64_t key = key_of(logit, token);
                return key >= low && key <= high ? static_cast<int>((key - low) >> shift) : -1;
            });
            low += static_cast<uint64_t>(bin) << shift;
            high = smaller(high, low + ((1ull << shift) - 1));
            listed = list([=](uint32_t token, float logit) {
                uint64_t key = key_of(logit, token);
                return key >= low && key <= high;
            });
            if (listed <= FEW) return last_listed(by, listed, before);
        }
    }

    // Draws one of the tokens in front of `end` that have at least min_p of the probability of the likeliest one, which is
    // the result where options that make no sense leave none.
    __device__ int draw(const Softmax &softmax, uint64_t end, float min_p, uint64_t bits, int likeliest) {
        if (threadIdx.x == 0) shared.token = likeliest;
        auto weigh = [&](int at) -> uint64_t {
            float logit = at < count ? values[at] : -INFINITY;
            if (!counts(logit) || key_of(logit, first + at) >= end) return 0;
            double weight = softmax.weight(logit);
            return min_p > 0.0f && !(__double2float_rn(weight) >= min_p) ? 0 : softmax.fixed(weight);
        };
        // A warp has tokens that are next to one another, because a draw goes by their ids.
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        int each_warp = (count + THREADS - 1) / THREADS * 32;
        int begin = warp * each_warp;
        uint64_t own = 0;
        for (int at = begin + lane; at < begin + each_warp; at += 32) own += weigh(at);
        own = sum_of_warp(own);
        if (lane < BLOCKS) *there(&shared.of_warps[block * WARPS + warp], lane) = own;
        wait();
        constexpr int EACH = (BLOCKS * WARPS + 31) / 32;
        uint64_t of_lane = 0, before = 0;
        int place = block * WARPS + warp;
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            int other = lane * EACH + n;
            uint64_t sum = other < BLOCKS * WARPS ? shared.of_warps[other] : 0;
            of_lane += sum;
            if (other < place) before += sum;
        }
        uint64_t total = sum_of_warp(of_lane);
        before = sum_of_warp(before);
        // (2 * bits + 1) / 2^53 of the total.
        uint64_t odd = 2 * bits + 1;
        uint64_t target = __umul64hi(total, odd) << 11 | (total * odd) >> 53;
        if (before <= target && target < before + own) {
            for (int at = begin; at < begin + each_warp; at += 32) {
                uint64_t up_to = before + sum_up_to_lane(weigh(at + lane));
                uint32_t beyond = __ballot_sync(~0u, up_to > target);
                if (beyond != 0) {
                    if (lane < BLOCKS) *there(&shared.token, lane) = first + at + __ffs(beyond) - 1;
                    break;
                }
                before = __shfl_sync(~0u, up_to, 31);
            }
        }
        wait();
        return shared.token;
    }
};

}  // namespace sampling
}  // namespace pagoda
