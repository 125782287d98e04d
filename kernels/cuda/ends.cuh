// What one call of the operators around the layers carries, as the launchers (src/cuda/ends.rs) lay it out.
#pragma once

#include <cstdint>

namespace pagoda {
namespace ends {

// HstuUnit. Mirrored by `RawUnit`.
struct Unit {
    const void *x;  // [rows, size]
    float *y;       // as x
    int64_t rows;
    int size;
    float epsilon;
};

// HstuSelect. Rows go as bytes, in units of what kernels copy at once. Mirrored by `RawSelect`.
struct Select {
    const int64_t *index;  // [count]
    int64_t count;
    int64_t rows;
    struct {
        const void *from;  // [rows, units]
        void *to;          // [count, units]
        int64_t units;
    } parts[3];
    int part_count;
};

}  // namespace ends
}  // namespace pagoda
