// Keys and values of a pool as operands of mma.sync: a tile of stored heads lies in shared memory as it lies in its pages, and
// becomes numbers of T in registers, whatever the format.
//
// A product does not care in which order its inner dimension is added up, as long as both operands agree. So a thread takes
// whole words of a key, and the queries are permuted alike. The columns of the values' product are permuted too: a thread
// knows which numbers of a head its sums are of. That spares every shuffle between threads.
#pragma once

#include "common/mma.cuh"
#include "llm/paged_attention.cuh"

namespace pagoda {
namespace paged {

constexpr int largest_power(int value, int most) { return most == 1 || value % most == 0 ? most : largest_power(value, most / 2); }

// The least stride of at least `bytes` bytes, a multiple of 16, that leaves `rest` when divided by `by`.
constexpr int stride_of(int bytes, int by, int rest) { return bytes % by == rest ? bytes : stride_of(bytes + 16, by, rest); }

// How a head of D numbers lies in a tile. A warp is 8 groups of 4 threads, as mma.sync has it.
template <int D, int FORMAT> struct Layout {
    static constexpr int BITS = FORMAT == NATIVE ? 16 : FORMAT == INT4 ? 4 : 8;
    static constexpr int BYTES = D * BITS / 8;
    static_assert(BYTES % 16 == 0, "copied 16 bytes at a time");
    // The 4 threads of a group have a key each in units of so many bytes, the 8 groups a value.
    static constexpr int KEY_UNIT = largest_power(BYTES / 4, 16), VALUE_UNIT = largest_power(BYTES / 8, 16);
    static_assert(KEY_UNIT >= 4 && VALUE_UNIT >= 4, "whole words");
    static constexpr int KEY_NUMBERS = KEY_UNIT * 8 / BITS, VALUE_NUMBERS = VALUE_UNIT * 8 / BITS;
    static constexpr int KEY_UNITS = BYTES / 4 / KEY_UNIT, VALUE_UNITS = BYTES / 8 / VALUE_UNIT;
    // What the threads read at once has to be in different banks: 16-byte chunks are permuted by the number of the key
    // (swizzle) where heads fill lines of 128 bytes, otherwise heads are padded.
    static constexpr bool SWIZZLED = BYTES % 128 == 0;
    static constexpr int KEY_STRIDE = SWIZZLED ? BYTES : stride_of(BYTES, 128, 64);
    static constexpr int VALUE_STRIDE = SWIZZLED ? BYTES : stride_of(BYTES, 64, 16);

    // Where byte `byte` of a key or a value lies.
    __device__ static int key_at(int key, int byte) { return key * KEY_STRIDE + (SWIZZLED ? byte ^ (key & 1) << 6 : byte); }
    __device__ static int value_at(int key, int byte) {
        return key * VALUE_STRIDE + (SWIZZLED ? byte ^ (key >> 1 & 3) << 5 : byte);
    }
};

// Two of four codes of 8 bits as f16, which has them exactly: the codes as the lowest bits of 1024, which is then subtracted.
__device__ inline uint32_t codes_of(uint32_t word, bool second) {
    uint32_t bits = __byte_perm(word, 0x64646464u, second ? 0x4342 : 0x4140), offset = 0x64006400u;
    __half2 codes = __hsub2(*reinterpret_cast<__half2 *>(&bits), *reinterpret_cast<__half2 *>(&offset));
    return *reinterpret_cast<uint32_t *>(&codes);
}

// Number `index` of two values as a register.
template <class T, int FORMAT, class W>
__device__ inline uint32_t across(const W &first, const W &second, int index, Range first_range, Range second_range) {
    if constexpr (FORMAT == NATIVE) {
        return __byte_perm(first.words[index / 2], second.words[index / 2], index % 2 == 0 ? 0x5410 : 0x7632);
    } else {
        return Pack<T>::of(first.template number<FORMAT>(index, first_range),
                           second.template number<FORMAT>(index, second_range));
    }
}

}  // namespace paged
}  // namespace pagoda
