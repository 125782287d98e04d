// A weight in blocks of 32 codes that share a scale, for the products of projection_sm90.cuh.
//
// The codes come by the TMA, and become numbers in registers, from where wgmma takes its left operand: a code is put behind
// the bits of a power of two, so that the number is the code and that power. The product of a block is multiplied by its
// scale in f32, and added to the sum. So weights are not rounded. What the power and the middle of the codes add to all of
// that is taken off by a product too, of scales and of the sums of x over blocks; or from the numbers, where they have 8
// bits or are f16.
//
// A product does not care in which order its inner dimension is added up, as long as both sides agree: a lane has eight codes
// that follow each other, and x has its columns in the order in which wgmma then needs them (block_rows.cu).
#pragma once

#include "common/mma.cuh"
#include "llm/projection_sm90.cuh"

namespace pagoda {
namespace few_rows {

#define PAGODA_LEFT(T, KIND, N, SUMS, NAMES, A, B, C, D, X, P)                                                         \
    template <> struct MultiplyLeft<T, N> {                                                                            \
        __device__ static void of(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t x, int add) {                    \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                                              \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND "." KIND " {" NAMES "}, {%" #A ", %" #B \
                         ", %" #C ", %" #D "}, %" #X ", p, 1, 1, 0;\n}"                                                \
                         : SUMS                                                                                        \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(add));                              \
        }                                                                                                              \
    };
#define PAGODA_LEFT_BOTH(N, SUMS, NAMES, A, B, C, D, X, P)                                                             \
    PAGODA_LEFT(__half, "f16", N, PAGODA_##SUMS, NAMES, A, B, C, D, X, P)                                              \
    PAGODA_LEFT(__nv_bfloat16, "bf16", N, PAGODA_##SUMS, NAMES, A, B, C, D, X, P)

// The left operand out of registers.
template <class T, int N> struct MultiplyLeft;
PAGODA_LEFT_BOTH(8, SUMS_4, "%0, %1, %2, %3", 4, 5, 6, 7, 8, 9)
PAGODA_LEFT_BOTH(16, SUMS_8, "%0, %1, %2, %3, %4, %5, %6, %7", 8, 9, 10, 11, 12, 13)
PAGODA_LEFT_BOTH(32, SUMS_AT(0), "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15", 16, 17, 18, 19, 20, 21)
PAGODA_LEFT_BOTH(64, D2, PAGODA_N2, 32, 33, 34, 35, 36, 37)

template <class T> struct Half;
template <> struct Half<__nv_bfloat16> {
    using Pair = __nv_bfloat162;
    static constexpr uint32_t AT = 0x43004300;  // 128, whose neighbours are 1 apart
    static constexpr float POWER = 128;
};
template <> struct Half<__half> {
    using Pair = __half2;
    static constexpr uint32_t AT = 0x64006400;  // 1024
    static constexpr float POWER = 1024;
};

template <class T> __device__ inline uint32_t less(uint32_t numbers, uint32_t by) {
    using Pair = typename Half<T>::Pair;
    Pair result = __hsub2(*reinterpret_cast<Pair *>(&numbers), *reinterpret_cast<Pair *>(&by));
    return *reinterpret_cast<uint32_t *>(&result);
}

template <class T> __device__ inline uint32_t pair_of(float number) {
    T one;
    narrow(number, &one);
    uint32_t bits = *reinterpret_cast<uint16_t *>(&one);
    return bits << 16 | bits;
}

// Codes `i` and `i + 4` of the eight of a word, behind the power.
template <class T> __device__ inline uint32_t of_four_bits(uint32_t word, int i) {
    uint32_t numbers;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(numbers) : "r"(word >> i * 4), "n"(0x000f000f), "r"(Half<T>::AT));
    return numbers;
}

// Code `i` of each of two words of four, less their middle.
template <class T> __device__ inline uint32_t of_eight_bits(uint32_t first, uint32_t second, int i) {
    uint32_t codes = __byte_perm(first, second, i | (i + 4) << 8);  // and two bytes that are masked
    if constexpr (std::is_same<T, __half>::value) {
        return less<T>((codes & 0x00ff00ff) | Half<T>::AT, pair_of<T>(Half<T>::POWER + 128));
    } else {
        // The first bit of a code is one more than fits behind the power: it halves what is taken off.
        return less<T>((codes & 0x007f007f) | Half<T>::AT, (codes & 0x00800080) ^ 0x43804380);
    }
}

// A step is 256 columns. `BLOCK_SHAPES` of src/cuda/llm/projection.rs has the same numbers.
// GROUP: blocks that are multiplied at a time; and the next ones become numbers meanwhile, where RING is 2.
template <class T, int BITS, int COLUMNS, int STAGES, int GROUP, int RING> struct Blocks : Tile<COLUMNS, STAGES> {
    using Type = T;
    static constexpr int SUMS = COLUMNS / 2;
    static constexpr int BLOCK = 32, DEPTH = 256, BLOCKS = DEPTH / BLOCK;
    static constexpr int BOX_CODES = ROW_BYTES * 8 / BITS, BOXES = DEPTH / BOX_CODES, BOX_BYTES = HEIGHT * ROW_BYTES;
    static constexpr int SCALES_AT = BOXES * BOX_BYTES, SCALE_BYTES = HEIGHT * BLOCKS * 2, X_AT = SCALES_AT + SCALE_BYTES;
    // Of x a step has four boxes, and one with the sums of its blocks.
    static constexpr int X_BOXES = DEPTH * 2 / ROW_BYTES + 1, X_BOX_BYTES = COLUMNS * ROW_BYTES;
    static constexpr int STAGE_BYTES = X_AT + X_BOXES * X_BOX_BYTES;
    // f16 has no room for such sums.
    static constexpr bool HAS_SUMS = BITS == 4 && !std::is_same<T, __half>::value;

    __device__ static void fetch_weight(const FewRows &call, const FewRowsMaps &maps, uint32_t to, uint32_t barrier, int tile,
                                        int step) {
        bool scales = call.scales == nullptr;
        barrier_expect(barrier, scales ? STAGE_BYTES : STAGE_BYTES - SCALE_BYTES);
        // An element of the map is two bytes.
        for (int box = 0; box < BOXES; box++) {
            fetch_rows(call, maps.weight, to + box * BOX_BYTES, barrier, tile, (step * BOXES + box) * (ROW_BYTES / 2));
        }
        if (scales) fetch_rows(call, maps.scales, to + SCALES_AT, barrier, tile, step * BLOCKS);
    }

    // x has whole steps.
    __device__ static void fetch_x(const FewRowsMaps &maps, uint32_t to, uint32_t barrier, int step) {
        copy_box(to + X_AT, &maps.x, barrier, 0, 0, step * X_BOXES);
    }

    template <class W> __device__ static void add_up(const W &worker, float (&sums)[SUMS], uint32_t at, Segment part) {
        uint32_t stage = at % STAGES, phase = at / STAGES & 1;
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[i] = 0;
        for (int step = part.from; step < part.to; step++) {
            uint32_t from = worker.base + stage * STAGE_BYTES;
            barrier_wait(worker.full(stage), phase);
            if (worker.call.scales != nullptr) bring_scales(worker.call, from, part.tile, step);
            multiply_step(from, sums);
            if (threadIdx.x % 32 == 0) barrier_arrive(worker.empty(stage));
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
    }

    // Where the TMA can not: rows of scales that begin at no multiple of 16 bytes.
    __device__ static __noinline__ void bring_scales(const FewRows &call, uint32_t stage, int tile, int step) {
        const uint16_t *scales = static_cast<const uint16_t *>(call.scales);
        int blocks = call.depth / BLOCK;
        for (int at = threadIdx.x; at < HEIGHT * BLOCKS; at += COMPUTING) {
            int place = at / BLOCKS, block = step * BLOCKS + at % BLOCKS, row = tile * HEIGHT + place;
            // Eight gates, then their ups.
            if (call.gate != NONE) {
                row = tile * (HEIGHT / 2) + place / 16 * 8 + place % 8 + place / 8 % 2 * (call.columns / 2);
            }
            bool there = row < call.columns && block < blocks;
            uint16_t scale = there ? scales[static_cast<int64_t>(row) * blocks + block] : 0;
            asm volatile("st.shared.u16 [%0], %1;" ::"r"(stage + SCALES_AT + at * 2), "h"(scale) : "memory");
        }
        named_wait(DONE, COMPUTING);
    }

    __device__ static void multiply_step(uint32_t from, float (&sums)[SUMS]) {
        wgmma::Matrix<ROW_BYTES, 16, true> x(from + X_AT);
        int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
        Codes codes;
        codes.load(from);
        uint32_t scales[2][BLOCKS / 2];
#pragma unroll
        for (int i = 0; i < 2; i++) load(scales[i], from + SCALES_AT + (row + i * 8) * BLOCKS * 2);
        uint32_t numbers[RING][GROUP][2][4];
        float parts[RING][GROUP][SUMS], middles[SUMS];
#pragma unroll
        for (int group = 0; group < BLOCKS / GROUP; group++) {
            auto &left = numbers[group % RING];
            if (group >= RING) settle(parts[group % RING], scales, (group - RING) * GROUP, sums);
#pragma unroll
            for (int i = 0; i < GROUP; i++) codes.open(left[i], group * GROUP + i);
            if (HAS_SUMS && group == 0) {
                take_middles(from, x, row, middles);
            } else {
                wgmma::fence();
            }
#pragma unroll
            for (int i = 0; i < GROUP; i++) {
                int block = group * GROUP + i;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    uint64_t right = x.at(block / 2 * X_BOX_BYTES + block % 2 * 64 + half * 32);
                    MultiplyLeft<T, COLUMNS>::of(parts[group % RING][i], left[i][half], right, half);
                }
            }
            wgmma::commit();
            if (RING > 1) wait_but_one();
            else wgmma::wait();
        }
        wgmma::wait();
#pragma unroll
        for (int group = BLOCKS / GROUP - RING; group < BLOCKS / GROUP; group++) {
            settle(parts[group % RING], scales, group * GROUP, sums);
        }
        if constexpr (HAS_SUMS) {
            // In each step: what it takes off is large where all numbers of x have the same sign.
            wgmma::touch(middles);
#pragma unroll
            for (int i = 0; i < SUMS; i++) sums[i] += middles[i];
        }
    }

    // What the powers and the middles of the codes of a step added is taken off: scales times sums of x, which come rounded,
    // and what rounding took from them.
    template <class X> __device__ static void take_middles(uint32_t from, const X &x, int row, float (&middles)[SUMS]) {
        uint32_t address = from + SCALES_AT + row * BLOCKS * 2 + threadIdx.x % 4 * 4, pairs[2];
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pairs[0]) : "r"(address));
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pairs[1]) : "r"(address + 8 * BLOCKS * 2));
        uint32_t twice[4] = {pairs[0], pairs[1], pairs[0], pairs[1]};
        wgmma::fence();
        MultiplyLeft<T, COLUMNS>::of(middles, twice, x.at((X_BOXES - 1) * X_BOX_BYTES), 0);
    }

    __device__ static void load(uint32_t (&words)[BLOCKS / 2], uint32_t address) {
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "r"(address));
    }

    __device__ static float scale_of(const uint32_t (&scales)[BLOCKS / 2], int block) {
        float2 two = unpack<T>(scales[block / 2]);
        return block % 2 ? two.y : two.x;
    }

    // The products of blocks, times their scales, come to the sums.
    __device__ static void settle(float (&parts)[GROUP][SUMS], const uint32_t (&scales)[2][BLOCKS / 2], int first,
                                  float (&sums)[SUMS]) {
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            wgmma::touch(parts[i]);
#pragma unroll
            for (int sum = 0; sum < SUMS; sum++) {
                sums[sum] = fmaf(parts[i][sum], scale_of(scales[sum / 2 % 2], first + i), sums[sum]);
            }
        }
    }

    // The codes of a step that a lane has: of each block a word of two rows, or two.
    struct Codes {
        static constexpr int WORDS = BITS / 2;
        uint32_t words[BLOCKS][WORDS];

        __device__ void load(uint32_t from) {
            int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
#pragma unroll
            for (int block = 0; block < BLOCKS; block += 4 / WORDS) {
                if constexpr (BITS == 4) {
                    int row = first + lane % 16, unit = block + lane / 16;
                    uint32_t two[4];
                    mma::load_matrices(two, from + row * ROW_BYTES + (unit ^ (row & 7)) * 16);
#pragma unroll
                    for (int i = 0; i < 4; i++) words[block + i / 2][i % 2] = two[i];
                } else {
#pragma unroll
                    for (int further = 0; further < 2; further++) {
                        int row = first + lane / 4 + further * 8, unit = block % 4 * 2 + lane % 4 / 2;
                        uint32_t address = from + block / 4 * BOX_BYTES + row * ROW_BYTES;
                        address += (unit ^ (row & 7)) * 16 + lane % 2 * 8;
                        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                                     : "=r"(words[block][further]), "=r"(words[block][further + 2])
                                     : "r"(address));
                    }
                }
            }
        }

        __device__ void open(uint32_t (&left)[2][4], int block) const {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                if constexpr (BITS == 4) {
                    left[i / 4][i % 4] = of_four_bits<T>(words[block][i % 2], i / 2);
                    if (!HAS_SUMS) left[i / 4][i % 4] = less<T>(left[i / 4][i % 4], pair_of<T>(Half<T>::POWER + 8));
                } else {
                    left[i / 4][i % 4] = of_eight_bits<T>(words[block][i % 2], words[block][i % 2 + 2], i / 2);
                }
            }
        }
    };
};

}  // namespace few_rows
}  // namespace pagoda
