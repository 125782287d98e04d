// A set-associative cache of an embedding table's rows in device memory. Lookups take no lock while other streams put
// rows.
//
// As in host memory (sdk/src/embedding), a key belongs to one set of seven rows. Sets are seqlocks: a reader copies the
// row and then checks whether the set has changed meanwhile; if so it tries again. A writer locks the set against other
// writers.

#pragma once

#include <cstdint>
#include <cuda_fp16.h>

#include "common/mirrored.cuh"

namespace pagoda {

constexpr int WAYS = 7;
constexpr int LANES = 32;
// Lanes that read a set together, a word each.
constexpr int READERS = 8;
// Keys that a warp looks up at once.
constexpr int AT_ONCE = LANES / READERS;
constexpr int THREADS = 256;

// The state of a set: flags, which ways hold a row, and above that a count of changes. A reader would have to miss
// exactly 2^23 of them to take a changed set for the same.
constexpr uint32_t LOCKED = 1;
constexpr uint32_t WRITING = 2;
constexpr int PRESENT_SHIFT = 2;
constexpr uint32_t PRESENT = (1u << WAYS) - 1;
constexpr uint32_t CHANGE = 1u << (PRESENT_SHIFT + WAYS);

// How often a reader tries before it reports the row as missing; a change takes less time than that.
constexpr int PATIENCE = 200;

// An approximate LRU: four bits a way, set by a use and aged by every row that is put into the set.
constexpr uint32_t FRESH = 15;

struct alignas(64) Set {
    uint32_t state;
    uint32_t freshness;
    int64_t keys[WAYS];
};
static_assert(sizeof(Set) == READERS * sizeof(uint64_t));

struct Table {
    Set *sets;
    void *rows;          // [sets, WAYS, dim]
    uint64_t *versions;  // [sets, WAYS]
    uint64_t set_count;
    int dim;
};
PAGODA_MIRRORED(embedding, Table)

__device__ inline uint64_t load_relaxed(const uint64_t *from) {
    uint64_t value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}
// The same, with evict-last priority in the L2 cache, so that rows that stream through do not evict the line.
__device__ inline uint64_t load_kept(const uint64_t *from) {
    uint64_t value, policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("ld.relaxed.gpu.global.L2::cache_hint.u64 %0, [%1], %2;"
                 : "=l"(value)
                 : "l"(from), "l"(policy)
                 : "memory");
    return value;
}
__device__ inline uint32_t load_relaxed(const uint32_t *from) {
    uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
__device__ inline void store_relaxed(uint32_t *to, uint32_t value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
}
__device__ inline void store_relaxed(uint64_t *to, uint64_t value) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" : : "l"(to), "l"(value) : "memory");
}

// Elements of a row that may be written at the same time: four of them, or one.
template <class T, int COUNT> struct Piece;

template <> struct Piece<float, 4> {
    uint32_t bits[4];
    __device__ void load(const float *from) {
        asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3])
                     : "l"(from)
                     : "memory");
    }
    __device__ uint32_t mixed() const { return bits[0] ^ bits[1] ^ bits[2] ^ bits[3]; }
    __device__ float value(int i) const { return __uint_as_float(bits[i]); }
    __device__ void store(float *to) const {
        __stcs(reinterpret_cast<uint4 *>(to), make_uint4(bits[0], bits[1], bits[2], bits[3]));
    }
};

template <> struct Piece<__half, 4> {
    uint32_t bits[2];
    __device__ void load(const __half *from) {
        asm volatile("ld.relaxed.gpu.global.v2.b32 {%0, %1}, [%2];"
                     : "=r"(bits[0]), "=r"(bits[1])
                     : "l"(from)
                     : "memory");
    }
    __device__ uint32_t mixed() const { return bits[0] ^ bits[1]; }
    __device__ float value(int i) const {
        return __half2float(__ushort_as_half(static_cast<uint16_t>(bits[i / 2] >> (16 * (i % 2)))));
    }
    __device__ void store(float *to) const {
        float2 low = __half22float2(*reinterpret_cast<const __half2 *>(&bits[0]));
        float2 high = __half22float2(*reinterpret_cast<const __half2 *>(&bits[1]));
        __stcs(reinterpret_cast<float4 *>(to), make_float4(low.x, low.y, high.x, high.y));
    }
};

template <> struct Piece<float, 1> {
    uint32_t bits;
    __device__ void load(const float *from) { bits = load_relaxed(reinterpret_cast<const uint32_t *>(from)); }
    __device__ float value(int) const { return __uint_as_float(bits); }
    __device__ void store(float *to) const { *to = value(0); }
};

template <> struct Piece<__half, 1> {
    uint16_t bits;
    __device__ void load(const __half *from) {
        asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(bits) : "l"(from) : "memory");
    }
    __device__ float value(int) const { return __half2float(__ushort_as_half(bits)); }
    __device__ void store(float *to) const { *to = value(0); }
};

// Hashes a key to a set; consecutive keys are spread too.
__device__ inline uint64_t set_of(const Table &table, int64_t key) {
    uint64_t keyed = static_cast<uint64_t>(key) ^ 0x9E3779B97F4A7C15ull;
    uint64_t bits = __umul64hi(keyed, 0xD6E8FEB86659FD93ull) ^ (keyed * 0xD6E8FEB86659FD93ull);
    return __umul64hi(bits, table.set_count);
}

// The way that has a key, of a set whose words the eight lanes of a group hold; -1: none. `state` is the set's.
__device__ inline int way_of(uint64_t word, int64_t key, uint32_t state, int lane) {
    int member = lane % READERS;
    uint32_t present = state >> PRESENT_SHIFT & PRESENT;
    bool has = member > 0 && word == static_cast<uint64_t>(key) && (present >> (member - 1) & 1);
    uint32_t those = __ballot_sync(~0u, has) >> (lane & ~(READERS - 1)) & ((1u << READERS) - 1);
    return __ffs(those) - 2 < 0 ? -1 : __ffs(those) - 2;
}

// The fields of a set's first word.
__device__ inline uint32_t state_of(uint64_t head) { return static_cast<uint32_t>(head); }
__device__ inline uint32_t freshness_of(uint64_t head) { return static_cast<uint32_t>(head >> 32); }

// Whether a set has not changed between two reads of its state.
__device__ inline bool unchanged(uint32_t before, uint32_t now) {
    return (before & WRITING) == 0 && ((before ^ now) & ~LOCKED) == 0;
}

// Written only where it changes something, so that readers of the same row do not contend for it.
__device__ inline void touch(Set *set, uint32_t freshness, int way) {
    if ((freshness >> (4 * way) & FRESH) != FRESH) atomicOr(&set->freshness, FRESH << (4 * way));
}

}  // namespace pagoda
