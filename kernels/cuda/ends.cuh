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

}  // namespace ends
}  // namespace pagoda
