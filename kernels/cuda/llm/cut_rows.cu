// Cuts rows into three tensors: what `Linear` with several outputs does behind a product of few hundred rows.

#include "common/dependent_launch.cuh"

#include <cstdint>

namespace pagoda {

// Sizes are in words of 16 bytes or of an element; a thread has one.
template <class Word> __device__ void cut(const Word *x, Word *a, Word *b, Word *c, int wide, int wider, int width, int64_t all) {
    begin();
    int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= all) return;
    int64_t row = at / width;
    int column = static_cast<int>(at - row * width);
    Word word = x[at];
    if (column < wide) {
        a[row * wide + column] = word;
    } else if (column < wider) {
        b[row * (wider - wide) + column - wide] = word;
    } else {
        c[row * (width - wider) + column - wider] = word;
    }
}

#define KERNEL(NAME, WORD)                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) cut_rows_##NAME(const WORD *x, WORD *a, WORD *b, WORD *c,        \
                                                                      int wide, int wider, int width, int64_t all) {   \
        cut<WORD>(x, a, b, c, wide, wider, width, all);                                                                \
    }

KERNEL(16, uint4)
KERNEL(4, uint32_t)
KERNEL(2, uint16_t)

}  // namespace pagoda
