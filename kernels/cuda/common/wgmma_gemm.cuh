// The wgmma instructions of the matrix products: 64 rows, N columns, 16 deep, both operands from shared memory, rows of
// 128 bytes, swizzled as the TMA does it. The rest is in wgmma.cuh.
#pragma once

#include "common/wgmma.cuh"

namespace pagoda {
namespace dense {

// Until at most one group of instructions is under way.
__device__ inline void wait_but_one() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }

template <class T, int N> struct Multiply;

#define PAGODA_SUMS_AT(I)                                                                                              \
    "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3]), "+f"(d[I + 4]), "+f"(d[I + 5]), "+f"(d[I + 6]),        \
        "+f"(d[I + 7]), "+f"(d[I + 8]), "+f"(d[I + 9]), "+f"(d[I + 10]), "+f"(d[I + 11]), "+f"(d[I + 12]),             \
        "+f"(d[I + 13]), "+f"(d[I + 14]), "+f"(d[I + 15])

#define PAGODA_D2 PAGODA_SUMS_AT(0), PAGODA_SUMS_AT(16)
#define PAGODA_D3 PAGODA_D2, PAGODA_SUMS_AT(32)
#define PAGODA_D4 PAGODA_D3, PAGODA_SUMS_AT(48)
#define PAGODA_D5 PAGODA_D4, PAGODA_SUMS_AT(64)
#define PAGODA_D6 PAGODA_D5, PAGODA_SUMS_AT(80)
#define PAGODA_D7 PAGODA_D6, PAGODA_SUMS_AT(96)
#define PAGODA_D8 PAGODA_D7, PAGODA_SUMS_AT(112)

#define PAGODA_N2                                                                                                      \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PAGODA_N3 PAGODA_N2 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define PAGODA_N4 PAGODA_N3 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PAGODA_N5 PAGODA_N4 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define PAGODA_N6 PAGODA_N5 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define PAGODA_N7                                                                                                      \
    PAGODA_N6 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define PAGODA_N8                                                                                                      \
    PAGODA_N7 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// SIXTEENS: how many times sixteen sums a thread has; A, B, P: the numbers of the operands behind them.
#define PAGODA_DENSE(T, KIND, N, SIXTEENS, A, B, P)                                                                    \
    template <> struct Multiply<T, N> {                                                                                \
        __device__ static void of(float (&d)[N / 2], uint64_t a, uint64_t b, int add) {                                \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                                              \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND "." KIND " {" PAGODA_N##SIXTEENS       \
                         "}, %" #A ", %" #B ", p, 1, 1, 0, 0;\n}"                                                      \
                         : PAGODA_D##SIXTEENS                                                                          \
                         : "l"(a), "l"(b), "r"(add));                                                                  \
        }                                                                                                              \
    };

#define PAGODA_DENSE_BOTH(N, SIXTEENS, A, B, P)                                                                        \
    PAGODA_DENSE(__half, "f16", N, SIXTEENS, A, B, P)                                                                  \
    PAGODA_DENSE(__nv_bfloat16, "bf16", N, SIXTEENS, A, B, P)

PAGODA_DENSE_BOTH(64, 2, 32, 33, 34)
PAGODA_DENSE_BOTH(96, 3, 48, 49, 50)
PAGODA_DENSE_BOTH(128, 4, 64, 65, 66)
PAGODA_DENSE_BOTH(160, 5, 80, 81, 82)
PAGODA_DENSE_BOTH(256, 8, 128, 129, 130)

// Of f32 by 10 bits of their fractions, which is what these instructions look at: 8 deep, 64 rows and 128 columns.
struct MultiplyTf32 {
    __device__ static void of(float (&d)[64], uint64_t a, uint64_t b, int add) {
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 {" PAGODA_N4 "}, %64, %65, p, 1, 1;\n}"
                     : PAGODA_D4
                     : "l"(a), "l"(b), "r"(add));
    }
};

}  // namespace dense
}  // namespace pagoda
