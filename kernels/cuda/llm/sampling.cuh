// Sampling: the logits of a row to a token, its log probability and the likeliest tokens. It takes the steps of
// sdk::engine::generate::sampling, in their order.
//
// One row is one cluster of BLOCKS blocks, or one block; each has a slice of the vocabulary. No step depends on another row.
// Nothing is sorted: top_k and top_p find their cut by a histogram, and look into the one bin that it falls into.
//
// Weights, that is e^((logit - max) / temperature), are the same bits as on the CPU. Their sums are of fixed point, in whole
// numbers, so that no order of additions changes them: the same row gives the same token on every chip, in every batch. A
// weight is rounded to 2^-fraction_bits of the largest one.
#pragma once

#include <cfloat>
#include <cstdint>

#include "common/mirrored.cuh"
#include "llm/sampling_row.cuh"
#include "llm/sampling_weights.cuh"

namespace pagoda {

constexpr int MOST_TOP = 20;

// A change of one token's logit: what is added, the number of times it is in the output, or nothing for a ban.
struct TokenEdit {
    uint32_t token;
    uint32_t value;
};
PAGODA_MIRRORED(llm, TokenEdit)

struct SamplingRow {
    uint64_t seed;
    uint64_t position;
    int row;            // of the logits
    int first_edit;     // the row's edits: biases, then tokens that were seen, then bans
    int biases;
    int seen;
    int bans;
    int mask;           // the row of the masks; -1: none
    int forced;         // the token that is taken in any case; -1: none
    int top_k;          // 0: all
    int top_n;          // -1: no log probabilities
    float temperature;  // 0: the largest logit
    float top_p;
    float min_p;
    float repetition;
    float presence;
    float frequency;
    int unused;
};
PAGODA_MIRRORED(llm, SamplingRow)

struct SamplingResult {
    int token;          // -1: no token is left
    int rank;           // among the raw logits, from 1 on
    float logprob;
    int top_count;
    uint32_t top_tokens[MOST_TOP];
    float top_logprobs[MOST_TOP];
};
PAGODA_MIRRORED(llm, SamplingResult)

struct SamplingCall {
    const float *logits;        // [logits_rows, vocab]
    const SamplingRow *rows;    // [rows]
    const TokenEdit *edits;     // [edit_count]
    const uint32_t *masks;      // [mask_rows, ceil(vocab / 32)]
    SamplingResult *results;    // [rows]
    float *scratch;             // [rows, vocab], for kernels without clusters
    int vocab;
    int logits_rows;
    int edit_count;
    int mask_rows;
    int fraction_bits;
    int slice;                  // tokens of a block; a multiple of 4
};
PAGODA_MIRRORED(llm, SamplingCall)

namespace sampling {

// A finite logit stays finite, however large the change is: only a ban makes -inf.
template <class Change> __device__ void change(float *logit, Change change) {
    if (isfinite(*logit)) *logit = fminf(fmaxf(change(*logit), -FLT_MAX), FLT_MAX);
}

// Applies the row's edits and its mask to the slice.
__device__ inline void adjust(const SamplingCall &call, const SamplingRow &row, float *values, int first, int count) {
    const TokenEdit *edits = call.edits + row.first_edit;
    auto each = [&](int edit_count, auto edit) {
        for (int at = threadIdx.x; at < edit_count; at += THREADS) {
            uint32_t place = edits[at].token - static_cast<uint32_t>(first);
            if (place < static_cast<uint32_t>(count)) edit(&values[place], edits[at].value);
        }
        edits += edit_count;
        // A token can be in each of the lists.
        __syncthreads();
    };
    __syncthreads();
    each(row.biases, [](float *logit, uint32_t value) {
        change(logit, [=](float x) { return __fadd_rn(x, __uint_as_float(value)); });
    });
    each(row.seen, [&](float *logit, uint32_t outputs) {
        if (row.repetition != 1.0f) {
            change(logit, [&](float x) { return x < 0.0f ? __fmul_rn(x, row.repetition) : __fdiv_rn(x, row.repetition); });
        }
        if (outputs > 0 && (row.presence != 0.0f || row.frequency != 0.0f)) {
            change(logit, [&](float x) {
                return __fsub_rn(__fsub_rn(x, __fmul_rn(__uint2float_rn(outputs), row.frequency)), row.presence);
            });
        }
    });
    each(row.bans, [](float *logit, uint32_t) { *logit = -INFINITY; });
    if (row.mask < 0) return;
    const uint32_t *mask = call.masks + static_cast<int64_t>(row.mask) * ((call.vocab + 31) / 32);
    for (int at = threadIdx.x; at < count; at += THREADS) {
        int token = first + at;
        if (!(mask[token / 32] >> token % 32 & 1)) values[at] = -INFINITY;
    }
    __syncthreads();
}

// Copies the slice, which begins with the token `first`. 16 bytes at a time where all rows are aligned.
__device__ inline OfThread load(const float *from, float *to, int first, int count, bool aligned) {
    OfThread own;
    int vectors = aligned ? count / 4 : 0;
#pragma unroll 8
    for (int at = threadIdx.x; at < vectors; at += THREADS) {
        float4 four = reinterpret_cast<const float4 *>(from)[at];
        reinterpret_cast<float4 *>(to)[at] = four;
        uint32_t token = first + at * 4;
        own.take(token, four.x), own.take(token + 1, four.y), own.take(token + 2, four.z), own.take(token + 3, four.w);
    }
    for (int at = vectors * 4 + threadIdx.x; at < count; at += THREADS) {
        to[at] = from[at];
        own.take(first + at, from[at]);
    }
    return own;
}

// Samples row `number` with block `block` of its blocks. `memory` is for the slice; null: it is left where it is, or copied to
// the call's scratch memory if something changes it.
template <int BLOCKS>
__device__ void run(const SamplingCall &call, int number, int block, Shared &shared, float *memory) {
    SamplingRow row = call.rows[number];
    // No number in the row makes the kernel read outside its tensors.
    if (row.row < 0 || row.row >= call.logits_rows) row.row = 0;
    int64_t last_edit = static_cast<int64_t>(row.first_edit) + row.biases + row.seen + row.bans;
    if (row.first_edit < 0 || row.biases < 0 || row.seen < 0 || row.bans < 0 || last_edit > call.edit_count) {
        row.first_edit = row.biases = row.seen = row.bans = 0;
    }
    if (row.mask >= call.mask_rows) row.mask = -1;
    if (row.forced >= call.vocab) row.forced = -1;
    row.top_n = min(row.top_n, MOST_TOP);

    int first = min(block * call.slice, call.vocab), count = min(call.slice, call.vocab - first);
    const float *raw = call.logits + static_cast<int64_t>(row.row) * call.vocab + first;
    bool edited = row.biases + row.seen + row.bans > 0 || row.mask >= 0;
    float *copy = memory != nullptr ? memory : call.scratch + static_cast<int64_t>(number) * call.vocab + first;
    bool copied = memory != nullptr || edited;
    OfThread loaded;
    if (copied) {
        bool aligned = memory != nullptr && call.vocab % 4 == 0 && reinterpret_cast<uint64_t>(call.logits) % 16 == 0;
        loaded = load(raw, copy, first, count, aligned);
    }
    Row<BLOCKS> of{shared, block, first, count, copied ? copy : raw};
    // For the copy, and because a block must have started before another one writes to its memory.
    of.wait();
    SamplingResult *result = &call.results[number];
    bool writes = block == 0 && threadIdx.x == 0;

    Extremes extremes = {NO_KEY, 0.0f, 0.0f};
    double log_sum = 0.0;
    float raw_max = 0.0f;
    auto logprob = [&](float logit) {
        double above = logit == raw_max ? 0.0 : static_cast<double>(logit) - static_cast<double>(raw_max);
        return isnan(logit) ? -INFINITY : __double2float_rn(above - log_sum);
    };
    bool logprobs = row.top_n >= 0, none = false;
    if (logprobs || !edited) {
        extremes = copied ? of.extremes(loaded) : of.extremes();
    }
    if (logprobs) {
        none = extremes.best == NO_KEY;
    }
    if (logprobs && !none) {
        raw_max = extremes.max;
        Softmax softmax(raw_max, 1.0f, call.fraction_bits);
        uint64_t own = 0;
        of.each([&](uint32_t, float logit) { own += softmax.fixed_of(logit); });
        log_sum = log(__ddiv_rn(__ull2double_rn(of.sum(own)), softmax.one));
        if (row.top_n > 0) {
            uint64_t last = of.last_kept(ByCount{static_cast<uint64_t>(row.top_n)}, extremes, 64.0f, NO_KEY);
            int listed = of.list([=](uint32_t token, float logit) { return key_of(logit, token) <= last; });
            if (block == 0 && threadIdx.x < listed) {
                uint64_t key = shared.keys[threadIdx.x];
                int place = 0;
                for (int other = 0; other < listed; other++) place += shared.keys[other] < key;
                result->top_tokens[place] = static_cast<uint32_t>(key);
                result->top_logprobs[place] = logprob(logit_of(key));
            }
            if (writes) result->top_count = listed;
        } else if (writes) {
            result->top_count = 0;
        }
    }

    int token = row.forced;
    if (token < 0 && !none) {
        if (edited) {
            adjust(call, row, copy, first, count);
            extremes = of.extremes();
        }
        int likeliest = static_cast<int>(extremes.best & 0xffffffffu);
        if (extremes.best == NO_KEY) {
            none = true;
        } else if (row.temperature == 0.0f) {
            token = likeliest;
        } else {
            Softmax softmax(extremes.max, row.temperature, call.fraction_bits);
            uint64_t end = NO_KEY;
            if (row.top_k > 0 && row.top_k < call.vocab) {
                uint64_t last = of.last_kept(ByCount{static_cast<uint64_t>(row.top_k)}, extremes, 64.0f, NO_KEY);
                // Those with the same logit as the last stay.
                end = ((last >> 32) + 1) << 32;
            }
            if (row.top_p < 1.0f) {
                // A weight beyond 32 bits is next to nothing.
                end = of.last_kept(ByProbability{softmax, row.top_p}, extremes, 22.18f * row.temperature, end) + 1;
            }
            token = of.draw(softmax, end, row.min_p, random_bits(row.seed, row.position), likeliest);
        }
    }

    if (logprobs && !none) {
        // Among the raw logits, of which NaN counts as -inf.
        auto key = [](float logit, uint32_t token) { return key_of(isnan(logit) ? -INFINITY : logit, token); };
        float logit = call.logits[static_cast<int64_t>(row.row) * call.vocab + token];
        uint64_t own = key(logit, token), ahead = 0;
        const float *from = edited ? raw : of.values;
        for (int at = threadIdx.x; at < count; at += THREADS) ahead += key(from[at], first + at) < own;
        ahead = of.sum(ahead);
        if (writes) result->rank = 1 + static_cast<int>(ahead), result->logprob = logprob(logit);
    }
    if (writes) result->token = none ? -1 : token;
    // No block ends while another one uses its memory.
    of.wait();
}

}  // namespace sampling
}  // namespace pagoda
