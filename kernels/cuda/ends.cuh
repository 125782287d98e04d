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

// A row of a table for each row of the output. Mirrored by `RawLookup`.
struct Lookup {
    const float *table;    // [rows, width]
    const int64_t *index;
    int64_t rows;
};

// HstuEmbed. Mirrored by `RawEmbed`.
struct Embed {
    Lookup tables[8];
    Lookup learned[2];
    void *y;               // [rows, width]
    int64_t rows;
    int width;
    int table_count;
    int learned_count;
    float scale;
};

}  // namespace ends
}  // namespace pagoda
