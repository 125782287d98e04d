// What sampling computes of one logit: its place in the order, and its weight, e^((logit - max) / temperature). The weights are
// the same bits as on the CPU, and so are the random numbers.
#pragma once

#include <cstdint>

namespace pagoda {
namespace sampling {

constexpr uint64_t NO_KEY = ~0ull;

// A token's place in the order from the largest logit to the smallest; of equal logits the lower id is first.
__device__ inline uint32_t descending(float logit) {
    uint32_t bits = __float_as_uint(__fadd_rn(logit, 0.0f));  // -0 becomes 0
    return bits >> 31 ? bits : ~bits ^ 0x80000000u;
}
__device__ inline uint64_t key_of(float logit, uint32_t token) {
    return static_cast<uint64_t>(descending(logit)) << 32 | token;
}
__device__ inline float logit_of(uint64_t key) {
    uint32_t bits = static_cast<uint32_t>(key >> 32);
    return __uint_as_float(bits >> 31 ? bits : ~bits ^ 0x80000000u);
}

// Neither -inf nor NaN.
__device__ inline bool counts(float logit) { return logit > -INFINITY; }

// The exponential of the CPU (sampling/weights.rs), operation by operation: products and sums must stay two roundings.
__device__ inline double exp2_of(double x) {
    constexpr double SMALLEST = -1000.0, ROUND = 6755399441055744.0;
    constexpr double TAYLOR[] = {1.0,
                                 0x1.62e42fefa39efp-1,
                                 0x1.ebfbdff82c58ep-3,
                                 0x1.c6b08d704a0bfp-5,
                                 0x1.3b2ab6fba4e77p-7,
                                 0x1.5d87fe78a6731p-10,
                                 0x1.430912f86c787p-13,
                                 0x1.ffcbfc588b0c6p-17,
                                 0x1.62c0223a5c823p-20,
                                 0x1.b5253d395e7c3p-24,
                                 0x1.e4cf5158b8ec8p-28,
                                 0x1.e8cac7351bb23p-32};
    double shifted = __dadd_rn(fmax(x, SMALLEST), ROUND);
    double fraction = __dsub_rn(x, __dsub_rn(shifted, ROUND));
    double power = __longlong_as_double((__double_as_longlong(shifted) + 1023) << 52);
    double sum = TAYLOR[11];
#pragma unroll
    for (int n = 10; n >= 0; n--) sum = __dadd_rn(__dmul_rn(sum, fraction), TAYLOR[n]);
    return x >= SMALLEST ? __dmul_rn(sum, power) : 0.0;
}

struct Softmax {
    double max, scale, one;

    __device__ Softmax(float max, float temperature, int fraction_bits)
        : max(max), scale(1.4426950408889634 / static_cast<double>(temperature)), one(scalbn(1.0, fraction_bits)) {}

    __device__ double weight(float logit) const {
        double wide = logit;
        return exp2_of(wide == max ? 0.0 : __dmul_rn(__dsub_rn(wide, max), scale));
    }
    __device__ uint64_t fixed(double weight) const { return __double2ull_rn(__dmul_rn(weight, one)); }
    __device__ uint64_t fixed_of(float logit) const { return fixed(weight(logit)); }
};

// 52 random bits of (seed, position): the first two words of Philox4x32-10, as on the CPU (sampling/random.rs).
__device__ inline uint64_t random_bits(uint64_t seed, uint64_t position) {
    uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0};
#pragma unroll
    for (int round = 0; round < 10; round++) {
        uint64_t even = static_cast<uint64_t>(counter[0]) * 0xD2511F53u;
        uint64_t odd = static_cast<uint64_t>(counter[2]) * 0xCD9E8D57u;
        counter[0] = static_cast<uint32_t>(odd >> 32) ^ counter[1] ^ key[0];
        counter[1] = static_cast<uint32_t>(odd);
        counter[2] = static_cast<uint32_t>(even >> 32) ^ counter[3] ^ key[1];
        counter[3] = static_cast<uint32_t>(even);
        key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
    }
    return (static_cast<uint64_t>(counter[1]) << 32 | counter[0]) >> 12;
}

}  // namespace sampling
}  // namespace pagoda
