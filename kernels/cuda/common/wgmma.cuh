// wgmma, the matrix instructions of sm_90a for a warpgroup: 64 rows, N columns, 16 deep, sums in f32. One function for
// each shape that the attention uses. SS takes both operands from shared memory; RS takes the left one from registers
// and the right one transposed.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace pagoda {
namespace wgmma {

// Before the first instruction that uses registers which other code wrote.
__device__ inline void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ inline void wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Tells the compiler that registers change here, so that it moves no access to them across.
template <int N> __device__ inline void touch(float (&sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

// A number that is the same in the whole warp, which the compiler can not know: it goes into a uniform register, where
// wgmma takes its descriptors from.
__device__ inline uint32_t uniform(uint32_t value) { return __reduce_max_sync(~0u, value); }

// The matrix descriptor of a matrix in shared memory: rows of ROW_BYTES (128 or 64) bytes, swizzled as the TMA does it
// (the 16-byte chunks of a row are permuted by the row's number, which avoids bank conflicts). LEADING is the distance
// from one 128 bytes of columns to the next where the matrix is transposed; 8 rows follow 8 rows. With ONCE the
// descriptor is computed once for a matrix, and places in it are further by a constant; without, for each place.
template <int ROW_BYTES, int LEADING, bool ONCE> struct Matrix {
    uint32_t start;  // an address, or the lower half of the description of what is there

    __device__ static uint32_t describe(uint32_t address) { return (address & 0x3ffff) >> 4 | LEADING >> 4 << 16; }

    __device__ explicit Matrix(uint32_t address) : start(uniform(ONCE ? describe(address) : address)) {}

    __device__ uint64_t at(uint32_t offset) const {
        constexpr uint64_t STRIDE = 8 * ROW_BYTES, SWIZZLE = ROW_BYTES == 128 ? 1 : 2;
        return (STRIDE >> 4 | SWIZZLE << 30) << 32 | (ONCE ? start + (offset >> 4) : describe(start + offset));
    }
};

template <class T, int N> struct Multiply;

#define PAGODA_SUMS_32 \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])

#define PAGODA_NAMES_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"

#define PAGODA_SUMS_64 \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])

#define PAGODA_NAMES_64 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"

#define PAGODA_SUMS_128 \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
    "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
    "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
    "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
    "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])

#define PAGODA_NAMES_128 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define PAGODA_MULTIPLY(T, KIND, N, A, B, P, R0, R1, R2, R3, RB, RP)                                                     \
    template <> struct Multiply<T, N> {                                                                                \
        __device__ static void ss(float (&d)[N / 2], uint64_t a, uint64_t b, int add) {                                \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                                              \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND "." KIND " {" PAGODA_NAMES_##N "}, "   \
                         "%" #A ", %" #B ", p, 1, 1, 0, 0;\n}"                                                         \
                         : PAGODA_SUMS_##N                                                                             \
                         : "l"(a), "l"(b), "r"(add));                                                                  \
        }                                                                                                              \
        __device__ static void rs(float (&d)[N / 2], const uint32_t *a, uint64_t b) {                                  \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #RP ", 0;\n"                                             \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND "." KIND " {" PAGODA_NAMES_##N "}, "   \
                         "{%" #R0 ", %" #R1 ", %" #R2 ", %" #R3 "}, %" #RB ", p, 1, 1, 1;\n}"                          \
                         : PAGODA_SUMS_##N                                                                             \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));                                \
        }                                                                                                              \
    };

PAGODA_MULTIPLY(__half, "f16", 32, 16, 17, 18, 16, 17, 18, 19, 20, 21)
PAGODA_MULTIPLY(__nv_bfloat16, "bf16", 32, 16, 17, 18, 16, 17, 18, 19, 20, 21)
PAGODA_MULTIPLY(__half, "f16", 64, 32, 33, 34, 32, 33, 34, 35, 36, 37)
PAGODA_MULTIPLY(__nv_bfloat16, "bf16", 64, 32, 33, 34, 32, 33, 34, 35, 36, 37)
PAGODA_MULTIPLY(__half, "f16", 128, 64, 65, 66, 64, 65, 66, 67, 68, 69)
PAGODA_MULTIPLY(__nv_bfloat16, "bf16", 128, 64, 65, 66, 64, 65, 66, 67, 68, 69)

}  // namespace wgmma
}  // namespace pagoda
