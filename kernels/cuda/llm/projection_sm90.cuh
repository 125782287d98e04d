// The products of language models with few rows, on Hopper (sm_90a): x weightᵀ of bf16 and f16, with what stands behind them
// fused: a residual, or the gate of a GLU. The weight has numbers, or codes in blocks (block_weight_sm90.cuh).
//
// The time is that of reading the weight once. So the weight is the left operand of wgmma, 64 of its rows at a time, and the
// rows of x are its columns, 8 to 64. Stream-K: the steps of all tiles, one behind the other, are cut into equal shares, one
// for each block, so that no multiprocessor waits for another. A block whose share ends inside a tile leaves its sums to the
// block that has the end of that tile, which adds them up in the order of the blocks. The first steps of a block are fetched
// while the kernel in front still runs (programmatic dependent launch).
//
// The shares follow from the sizes of the weight alone, and a row of x is a column of its own in wgmma: the other rows of a
// batch do not change a bit of it.
#pragma once

#include "common/convert.cuh"
#include "common/dependent_launch.cuh"
#include "common/mirrored.cuh"
#include "common/tma.cuh"
#include "common/wgmma_gemm.cuh"

namespace pagoda {
namespace dense {

#define PAGODA_SUMS_4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define PAGODA_SUMS_8 PAGODA_SUMS_4, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define PAGODA_FEW(T, KIND, N, SUMS, NAMES, A, B, P)                                                                   \
    template <> struct Multiply<T, N> {                                                                                \
        __device__ static void of(float (&d)[N / 2], uint64_t a, uint64_t b, int add) {                                \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                                              \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND "." KIND " {" NAMES "}, %" #A ", %" #B \
                         ", p, 1, 1, 0, 0;\n}"                                                                         \
                         : SUMS                                                                                        \
                         : "l"(a), "l"(b), "r"(add));                                                                  \
        }                                                                                                              \
    };
#define PAGODA_FEW_BOTH(N, SUMS, NAMES, A, B, P)                                                                       \
    PAGODA_FEW(__half, "f16", N, PAGODA_##SUMS, NAMES, A, B, P)                                                        \
    PAGODA_FEW(__nv_bfloat16, "bf16", N, PAGODA_##SUMS, NAMES, A, B, P)
PAGODA_FEW_BOTH(8, SUMS_4, "%0, %1, %2, %3", 4, 5, 6)
PAGODA_FEW_BOTH(16, SUMS_8, "%0, %1, %2, %3, %4, %5, %6, %7", 8, 9, 10)
PAGODA_FEW_BOTH(32, SUMS_AT(0), "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15", 16, 17, 18)

}  // namespace dense

namespace few_rows {

using namespace dense;

constexpr int ROW_BYTES = 128;  // of a box, of the weight and of x
constexpr int HEIGHT = 128;     // rows of the weight that a block multiplies at a time
constexpr int COMPUTING = 256, THREADS = COMPUTING + 32;
constexpr int DONE = 1;         // the named barrier of the warps that compute

// Rows of the weight in a tile: eight and eight more, which are the eight behind them, or the ups to eight gates.
struct FewRowsMaps {
    CUtensorMap weight, scales, x;
};
PAGODA_MIRRORED(llm, FewRowsMaps)

// `GluActivation` of src/llm/glu.rs; NONE is another's.
enum Activation : int { NONE, SILU, GELU, GELU_TANH };

struct FewRows {
    const void *scales;    // [columns, depth / 32] of a weight in blocks, where the TMA can not fetch them; null: it does
    const void *bias;      // [columns]; null: none
    const void *residual;  // [rows, widths[0]]; null: none
    void *outputs[3];      // [rows, width] each
    float *parts;          // [blocks, COLUMNS * HEIGHT]
    uint32_t *ready;       // [blocks]: found and left 0
    int widths[3];         // of the outputs, which follow each other: together the columns, or half of them behind a gate
    int rows;
    int depth;
    int columns;           // rows of the weight
    Activation gate;       // NONE: there is none
    int unused;            // no byte of the struct is left undefined
};
PAGODA_MIRRORED(llm, FewRows)

// Some steps of a tile.
struct Segment {
    int tile, from, to;
};

// How many rows of x a block multiplies, and the stages of its ring.
template <int COLUMNS_, int STAGES_> struct Tile {
    static constexpr int COLUMNS = COLUMNS_, STAGES = STAGES_, SUMS = COLUMNS / 2;
};

// A box of a weight: so many rows of it, or as many gates and ups by turns of eight.
__device__ inline void fetch_rows(const FewRows &call, const CUtensorMap &map, uint32_t to, uint32_t barrier, int tile,
                                  int column) {
    bool gates = call.gate != NONE;
    fetch_box_once(to, &map, barrier, column, gates ? 0 : tile * HEIGHT, 0, gates ? tile * (HEIGHT / 16) : 0);
}

// A weight of numbers: a step is 64 columns. `SHAPES` of src/cuda/llm/projection.rs has the same numbers.
template <class T, int COLUMNS, int STAGES> struct Numbers : Tile<COLUMNS, STAGES> {
    using Type = T;
    static constexpr int DEPTH = 64, X_AT = HEIGHT * ROW_BYTES, STAGE_BYTES = X_AT + COLUMNS * ROW_BYTES;

    __device__ static void fetch_weight(const FewRows &call, const FewRowsMaps &maps, uint32_t to, uint32_t barrier, int tile,
                                        int step) {
        barrier_expect(barrier, STAGE_BYTES);
        fetch_rows(call, maps.weight, to, barrier, tile, step * DEPTH);
    }

    __device__ static void fetch_x(const FewRowsMaps &maps, uint32_t to, uint32_t barrier, int step) {
        fetch_box(to + X_AT, &maps.x, barrier, step * DEPTH, 0);
    }

    template <class W> __device__ static void add_up(const W &worker, float (&sums)[COLUMNS / 2], uint32_t at, Segment part) {
        using Matrix = wgmma::Matrix<ROW_BYTES, 16, true>;
        Matrix weight(worker.base + threadIdx.x / 128 * 64 * ROW_BYTES), x(worker.base + X_AT);
        uint32_t stage = at % STAGES, phase = at / STAGES & 1, before = 0;
        for (int step = 0; step < part.to - part.from; step++) {
            barrier_wait(worker.full(stage), phase);
            wgmma::fence();
#pragma unroll
            for (int k = 0; k < DEPTH / 16; k++) {
                uint32_t offset = stage * STAGE_BYTES + k * 32;
                Multiply<T, COLUMNS>::of(sums, weight.at(offset), x.at(offset), step + k > 0);
            }
            wgmma::commit();
            wait_but_one();
            if (step > 0 && threadIdx.x % 32 == 0) barrier_arrive(worker.empty(before));
            before = stage;
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        wgmma::wait();
        if (threadIdx.x % 32 == 0) barrier_arrive(worker.empty(before));
        wgmma::touch(sums);
    }
};

__device__ inline float gated(float gate, float up, Activation activation) {
    switch (activation) {
        case SILU: return gate / (1.0f + expf(-gate)) * up;
        case GELU: return gate * normcdff(gate) * up;
        default: return gate / (1.0f + expf(-1.5957691216057308f * gate * fmaf(0.044715f * gate, gate, 1.0f))) * up;
    }
}

template <class S> struct Worker {
    using T = typename S::Type;
    const FewRows &call;
    const FewRowsMaps &maps;
    uint32_t base;
    int steps;       // of a tile
    int first, last; // of this block

    __device__ Worker(const FewRows &call, const FewRowsMaps &maps, uint32_t base) : call(call), maps(maps), base(base) {
        steps = (call.depth + S::DEPTH - 1) / S::DEPTH;
        first = share(blockIdx.x), last = share(blockIdx.x + 1);
    }

    // The first step of a block. `Projection::is_few` of src/cuda/llm/projection.rs sees to it that 32 bits are enough.
    __device__ int share(int block) const {
        uint32_t all = (call.columns + HEIGHT - 1) / HEIGHT * steps;
        return all * block / gridDim.x;
    }
    __device__ uint32_t full(int stage) const { return base + S::STAGES * S::STAGE_BYTES + stage * 8; }
    __device__ uint32_t empty(int stage) const { return full(S::STAGES + stage); }

    __device__ void init() const {
        for (int stage = 0; stage < S::STAGES; stage++) {
            barrier_init(full(stage), 1), barrier_init(empty(stage), COMPUTING / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }

    __device__ int segments() const { return first < last ? (last - 1) / steps - first / steps + 1 : 0; }

    // The last segment comes first: another block may wait for it. The first one, which may wait for others, comes last.
    __device__ Segment segment(int number) const {
        int tile = (last - 1) / steps - number;
        int begin = tile * steps;
        return {tile, max(first - begin, 0), min(last - begin, steps)};
    }

    // One thread.
    __device__ void fetch() const {
        prefetch_map(&maps.weight), prefetch_map(&maps.x);
        int early = min(S::STAGES, last - first), at = 0;
        fetch_steps(early, at, [&](int stage, int tile, int step) { fetch_weight(stage, tile, step); });
        wait_for_previous();
        at = 0;
        fetch_steps(last - first, at, [&](int stage, int tile, int step) {
            if (at >= early) {
                barrier_wait(empty(stage), (at / S::STAGES & 1) ^ 1);
                fetch_weight(stage, tile, step);
            }
            S::fetch_x(maps, base + stage * S::STAGE_BYTES, full(stage), step);
        });
    }

    template <class Fetch> __device__ void fetch_steps(int count, int &at, Fetch fetch) const {
        for (int number = 0; number < segments() && at < count; number++) {
            Segment part = segment(number);
            for (int step = part.from; step < part.to && at < count; step++, at++) fetch(at % S::STAGES, part.tile, step);
        }
    }

    __device__ void fetch_weight(int stage, int tile, int step) const {
        S::fetch_weight(call, maps, base + stage * S::STAGE_BYTES, full(stage), tile, step);
    }

    // Two warpgroups.
    __device__ void compute() const {
        uint32_t at = 0;
        for (int number = 0; number < segments(); number++) {
            Segment part = segment(number);
            float sums[S::SUMS];
            S::add_up(*this, sums, at, part);
            if (number == 0) wait_for_previous();
            at += part.to - part.from;
            if (part.to < steps) {
                hand_over(sums);
            } else {
                // Loaded before it is needed.
                uint16_t residual[S::SUMS];
                load_residual(residual, part.tile);
                if (part.from > 0) take_over(sums, part.tile * steps);
                write(sums, residual, part.tile);
            }
        }
    }

    __device__ float *part(int block) const {
        return call.parts + block * (S::COLUMNS * HEIGHT) + static_cast<int>(threadIdx.x);
    }

    __device__ void hand_over(const float (&sums)[S::SUMS]) const {
        float *to = part(blockIdx.x);
#pragma unroll
        for (int i = 0; i < S::SUMS; i++) __stcg(to + i * COMPUTING, sums[i]);
        named_wait(DONE, COMPUTING);
        if (threadIdx.x == 0) asm volatile("st.release.gpu.u32 [%0], 1;" ::"l"(call.ready + blockIdx.x) : "memory");
    }

    // Whether a block in front has steps from `begin` on, which is the first of this block's last tile.
    __device__ bool has_part(int block, int begin) const {
        return block >= 0 && share(block + 1) > max(begin, share(block));
    }

    // Adds what the blocks in front have of the tile that begins at a step, the nearest first.
    __device__ void take_over(float (&sums)[S::SUMS], int begin) const {
        // A thread for each of them: only blocks with lower numbers are waited for, which have started, so that this ends
        // whatever else runs on the chip.
        int other = blockIdx.x - 1 - threadIdx.x;
        if (has_part(other, begin)) {
            uint32_t ready = 0;
            while (ready == 0) asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(ready) : "l"(call.ready + other) : "memory");
            call.ready[other] = 0;
        }
        named_wait(DONE, COMPUTING);
        constexpr int AT_ONCE = S::SUMS > 16 ? 1 : 4;
        for (int block = blockIdx.x - 1; block >= 0 && share(block + 1) > begin; block -= AT_ONCE) {
            float parts[AT_ONCE][S::SUMS];
#pragma unroll
            for (int one = 0; one < AT_ONCE; one++) {
                const float *from = part(block - one);
                bool there = has_part(block - one, begin);
#pragma unroll
                for (int i = 0; i < S::SUMS; i++) parts[one][i] = there ? __ldcg(from + i * COMPUTING) : 0.0f;
            }
#pragma unroll
            for (int one = 0; one < AT_ONCE; one++) {
#pragma unroll
                for (int i = 0; i < S::SUMS; i++) sums[i] += parts[one][i];
            }
        }
    }

    // A thread has two rows of the weight, eight apart, and of each pairs of columns: rows of x. `further` is 0 or 1, and
    // `each(i, row)` gets the sums of one of the two by their numbers.
    template <class Each> __device__ void rows_of(int further, Each each) const {
#pragma unroll
        for (int i = 0; i < S::COLUMNS / 4; i++) {
            int row = i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
            if (row < call.rows) each(i / 2 * 4 + i % 2 + further * 2, row);
        }
    }

    // The column of the output that the first of the two rows makes.
    __device__ int first_column(int tile) const {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        return call.gate != NONE ? tile * (HEIGHT / 2) + warp * 8 + lane / 4 : tile * HEIGHT + warp * 16 + lane / 4;
    }

    __device__ void load_residual(uint16_t (&residual)[S::SUMS], int tile) const {
        if (call.residual == nullptr) return;
#pragma unroll
        for (int further = 0; further < 2; further++) {
            int column = first_column(tile) + further * 8;
            if (column >= call.widths[0]) continue;
            const uint16_t *from = static_cast<const uint16_t *>(call.residual) + column;
            rows_of(further, [&](int at, int row) { residual[at] = from[static_cast<int64_t>(row) * call.widths[0]]; });
        }
    }

    __device__ void write(const float (&sums)[S::SUMS], const uint16_t (&residual)[S::SUMS], int tile) const {
        bool gate = call.gate != NONE;
        int half = call.columns / 2;
        const T *biases = static_cast<const T *>(call.bias);
#pragma unroll
        for (int further = 0; further < 2; further++) {
            int column = first_column(tile) + further * 8;
            if (column >= (gate ? half : call.columns) || (gate && further)) continue;
            float bias = biases != nullptr ? wide(biases[column]) : 0.0f;
            float up_bias = biases != nullptr && gate ? wide(biases[column + half]) : 0.0f;
            int output = 0;
            if (column >= call.widths[0]) column -= call.widths[0], output = 1;
            if (output == 1 && column >= call.widths[1]) column -= call.widths[1], output = 2;
            int width = output == 0 ? call.widths[0] : output == 1 ? call.widths[1] : call.widths[2];
            void *first = output == 0 ? call.outputs[0] : output == 1 ? call.outputs[1] : call.outputs[2];
            T *to = static_cast<T *>(first) + column;
            rows_of(further, [&](int at, int row) {
                float value = sums[at] + bias;
                // The up of a gate is eight rows behind it.
                if (gate) value = gated(value, sums[(at + 2) % S::SUMS] + up_bias, call.gate);
                if (call.residual != nullptr) value += wide(*reinterpret_cast<const T *>(&residual[at]));
                narrow(value, to + static_cast<int64_t>(row) * width);
            });
        }
    }
};

template <class S> __device__ void multiply(const FewRows &call, const FewRowsMaps &maps) {
    extern __shared__ __align__(1024) uint8_t shared[];
    Worker<S> worker(call, maps, shared_address(shared));
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    launch_dependents();
    if (threadIdx.x == 0) worker.init();
    __syncthreads();
    if (warp == COMPUTING / 32) {
        if (threadIdx.x == COMPUTING) worker.fetch();
    } else {
        worker.compute();
    }
    // A block without steps waits too: the kernel behind counts on all that is in front of this one.
    wait_for_previous();
}

}  // namespace few_rows
}  // namespace pagoda
