// One call of the dense operators, as the launchers (src/cuda/hstu) fill it in.
#pragma once

#include "common/convert.cuh"
#include "common/mirrored.cuh"

namespace pagoda {
namespace dense {

// Some of the rows of a tensor.
struct Taken {
    const int64_t *index;  // null: all, in their order
    int64_t of;            // how many there are

    // The source row; below 0: it does not exist.
    __device__ int64_t source(int64_t row) const {
        if (index == nullptr) return row;
        int64_t from = index[row];
        return from >= 0 && from < of ? from : -1;
    }
};
PAGODA_MIRRORED(hstu, Taken)

// HstuNorm and HstuGate. A unit is what is normed together: a row, or one head of it.
struct Norm {
    const void *x;       // [rows that there are, groups, size]
    const void *u;       // as x; null: nothing is gated
    const void *weight;  // of a row: [size]; by group: [groups]
    const void *bias;
    void *y;
    Taken taken;         // of x and u; a row that does not exist counts as zeros
    int64_t units;       // of the output
    int size;            // elements of a unit
    int groups;          // units of a row
    int by_group;
    int concat;          // y is [u, x, y]
    int constant;        // nothing on the stream writes weight and bias
    float epsilon;
};
PAGODA_MIRRORED(hstu, Norm)

// The activation of a sum. `Activation` of src/hstu/linear.rs has the same numbers.
enum Activation : int { NONE, RELU, SILU, SIGMOID, TANH };

// HstuProject, HstuOutput and HstuLinear: x [rows, depth] times weightᵀ ([columns, depth]).
struct Product {
    const void *x;
    const void *weight;
    const void *bias;      // [columns]; null: none
    const void *residual;  // [rows that there are, columns]; null: none
    Taken taken;           // of the residual; one that does not exist counts as zeros
    void *outputs[4];      // [rows, part] each
    int rows;
    int depth;
    int columns;
    int part;
    int silu;              // columns from the first on that go through SiLU
    Activation activation; // of HstuLinear, for all columns
    int constant;          // nothing on the stream writes weight and bias
};
PAGODA_MIRRORED(hstu, Product)

__device__ inline float activated(float value, Activation activation) {
    switch (activation) {
        // Not fmaxf, which would return 0 for NaN.
        case RELU: return value < 0.0f ? 0.0f : value;
        case SILU: return value / (1.0f + expf(-value));
        case SIGMOID: return 1.0f / (1.0f + expf(-value));
        case TANH: return tanhf(value);
        default: return value;
    }
}

}  // namespace dense
}  // namespace pagoda
