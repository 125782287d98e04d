// The products of the dense operators on Hopper (sm_90a): bf16 and f16.
//
// A persistent, warp-specialised GEMM. There are as many blocks as multiprocessors, or as tiles of the output if those
// are fewer, and each goes through its share of the tiles. One producer warp fetches: the TMA brings boxes of x and of
// the weight, 64 deep, into a ring in shared memory, ahead of their use and across tiles. The consumer warpgroups
// compute by wgmma: all of them one tile, 64 rows each (cooperative); or in turns, a tile each, so that one has the
// tensor cores while another is in its epilogue (ping-pong).
//
// Every element is accumulated in the order of the depth by the same sequence of instructions, whatever the tile: the
// shape that a call gets does not change a bit.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/mirrored.cuh"
#include "common/tma.cuh"
#include "common/wgmma_gemm.cuh"
#include "hstu/dense.cuh"

namespace pagoda {
namespace dense {

constexpr int DEPTH = 64, ROW_BYTES = DEPTH * 2;  // of a box in shared memory
constexpr int BAND = 16;                          // tiles above each other
constexpr int READY = 1, TURN = 4;                // barriers by number; there is one for each warpgroup that computes

// The descriptions of the tensors for the TMA.
struct GemmMaps {
    CUtensorMap x, weight, outputs[4];
};
PAGODA_MIRRORED(hstu, GemmMaps)

// `TILES` of src/cuda/hstu/gemm_sm90.rs has the same numbers.
template <int GROUPS_, int COLUMNS_, int STAGES_, bool TURNS_, bool SMALL_, bool GATED_ = false> struct Tile {
    static constexpr int GROUPS = GROUPS_;     // warpgroups that compute
    static constexpr int COLUMNS = COLUMNS_;
    static constexpr int STAGES = STAGES_;
    static constexpr bool TURNS = TURNS_;      // a tile for each of them
    // Half of a multiprocessor's registers, so that blocks of the kernels before and behind fit beside.
    static constexpr bool SMALL = SMALL_;
    // The weight's rows come eight gates and eight ups by turns, so that a thread has the sums of both, and half as many
    // columns leave.
    static constexpr bool GATED = GATED_;
    static constexpr int TOGETHER = TURNS ? 1 : GROUPS;
    static constexpr int ROWS = 64 * TOGETHER;
    static constexpr int COMPUTING = 128 * GROUPS, THREADS = COMPUTING + 128;
    static constexpr int REGISTERS = GROUPS == 3 ? 160 : SMALL ? 104 : 232;
    static constexpr int FETCHING_REGISTERS = GROUPS == 3 ? 32 : SMALL ? 24 : 40;
    static_assert(GROUPS > 1 || SMALL, "one warpgroup makes do with what a block begins with");
    static constexpr int STAGE_BYTES = (ROWS + COLUMNS) * ROW_BYTES;
    // The output leaves by boxes of 64 rows, of which each warpgroup has a row of boxes in shared memory.
    static constexpr int LEAVING = GATED ? COLUMNS / 2 : COLUMNS;
    static constexpr int BOX = LEAVING % 64 == 0 ? 64 : 32, BOXES = LEAVING / BOX;
    static constexpr int BOX_BYTES = 64 * BOX * 2;
    static constexpr int DATA_BYTES = STAGES * STAGE_BYTES + GROUPS * BOXES * BOX_BYTES;
    // Behind them: barriers, and the bias of the columns of a tile for each warpgroup.
    static constexpr int BARRIER_BYTES = 256, BIASES = (COLUMNS + 127) / 128;
    static constexpr int SHARED = DATA_BYTES + BARRIER_BYTES + GROUPS * COLUMNS * 4;
    static_assert(2 * STAGES * 8 <= BARRIER_BYTES, "barriers");
    static_assert(SHARED <= 227 * 1024, "shared memory");
};

// What lies outside the tensor is not written.
__device__ inline void store_box(const CUtensorMap *map, uint32_t from, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
                 "r"(column), "r"(row)
                 : "memory");
}

__device__ inline uint32_t pair_at(const void *tensor, int64_t element) {
    return *reinterpret_cast<const uint32_t *>(static_cast<const uint16_t *>(tensor) + element);
}

template <class T, class S> struct Worker {
    const Product &call;
    const GemmMaps &maps;
    uint32_t base;

    __device__ uint32_t full(int stage) const { return base + S::DATA_BYTES + stage * 8; }
    __device__ uint32_t empty(int stage) const { return full(S::STAGES + stage); }
    __device__ int steps() const { return (call.depth + DEPTH - 1) / DEPTH; }
    __device__ int down() const { return (call.rows + S::ROWS - 1) / S::ROWS; }
    __device__ int tiles() const { return down() * ((call.columns + S::COLUMNS - 1) / S::COLUMNS); }

    // Where a tile begins. Tiles that run at the same time are BAND high at most, so that L2 has what they share: rows of x and of
    // the weight.
    __device__ void place(int tile, int &row, int &column) const {
        int across = (call.columns + S::COLUMNS - 1) / S::COLUMNS;
        int band = tile / (BAND * across), high = min(BAND, down() - band * BAND), inside = tile - band * BAND * across;
        row = (band * BAND + inside % high) * S::ROWS, column = inside / high * S::COLUMNS;
    }

    __device__ void init() const {
        for (int stage = 0; stage < S::STAGES; stage++) {
            barrier_init(full(stage), 1);
            barrier_init(empty(stage), 4 * S::TOGETHER);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }

    // One thread.
    __device__ void fetch() const {
        for (const CUtensorMap *map : {&maps.weight, &maps.x}) prefetch_map(map);
        for (const CUtensorMap &map : maps.outputs) prefetch_map(&map);
        int count = tiles(), deep = steps(), row, column;
        // The weight is fetched while the kernel in front still runs, if that one does not write it.
        int early = call.constant ? min(S::STAGES, deep) : 0;
        place(blockIdx.x, row, column);
        for (int step = 0; step < early; step++) fetch_weight(step, step, column);
        wait_for_previous();
        uint32_t at = 0;
        for (int tile = blockIdx.x; tile < count; tile += gridDim.x) {
            place(tile, row, column);
            for (int step = 0; step < deep; step++, at++) {
                uint32_t stage = at % S::STAGES;
                if (at >= early) {
                    barrier_wait(empty(stage), (at / S::STAGES & 1) ^ 1);
                    fetch_weight(stage, step, column);
                }
                fetch_box(base + stage * S::STAGE_BYTES, &maps.x, full(stage), step * DEPTH, row);
            }
        }
    }

    __device__ void fetch_weight(uint32_t stage, int step, int column) const {
        barrier_expect(full(stage), S::STAGE_BYTES);
        uint32_t to = base + stage * S::STAGE_BYTES + S::ROWS * ROW_BYTES;
        if constexpr (S::GATED) {
            fetch_box(to, &maps.weight, full(stage), step * DEPTH, 0, 0, column / 16);
        } else {
            fetch_box(to, &maps.weight, full(stage), step * DEPTH, column);
        }
    }

    // One warpgroup.
    __device__ void compute(int group) const {
        int count = tiles(), deep = steps(), row, column;
        uint32_t at = 0;
        if (S::TURNS && group == S::GROUPS - 1) named_arrive(TURN, 256);
        if (!call.constant) wait_for_previous();
        for (int tile = blockIdx.x, number = 0; tile < count; tile += gridDim.x, number++, at += deep) {
            if (S::TURNS && number % S::GROUPS != group) continue;
            place(tile, row, column);
            row += S::TURNS ? 0 : group * 64;
            // Loaded before it is needed.
            float bias[S::BIASES];
            load_bias(bias, column);
            if (number < S::GROUPS) wait_for_previous();
            uint32_t residual[S::GATED ? 1 : S::COLUMNS / 4];
            if (!S::GATED && call.residual != nullptr) load_residual(residual, row, column);
            float sums[S::COLUMNS / 2];
            // Stages go by turns too: a warpgroup ahead of its turn would take an earlier filling of a stage for its
            // own.
            if (S::TURNS) named_wait(TURN + group, 256);
            add_up(sums, at, deep, group);
            if (row < call.rows) write(sums, bias, residual, row, column, group);
        }
        if (threadIdx.x % 128 == 0) wait_for_boxes();
    }

    __device__ void add_up(float (&sums)[S::COLUMNS / 2], uint32_t at, int deep, int group) const {
        int lane = threadIdx.x % 32;
        // Descriptors are computed once; those of other stages differ by a constant.
        using Matrix = wgmma::Matrix<ROW_BYTES, 16, true>;
        Matrix x(base + (S::TURNS ? 0 : group * 64 * ROW_BYTES)), weight(base + S::ROWS * ROW_BYTES);
        uint32_t stage = at % S::STAGES, phase = at / S::STAGES & 1, before = 0;
        for (int step = 0; step < deep; step++) {
            barrier_wait(full(stage), phase);
            wgmma::fence();
#pragma unroll
            for (int k = 0; k < DEPTH / 16; k++) {
                uint32_t offset = stage * S::STAGE_BYTES + k * 32;
                Multiply<T, S::COLUMNS>::of(sums, x.at(offset), weight.at(offset), step + k > 0);
            }
            wgmma::commit();
            // The products of the step before have read their stage.
            wait_but_one();
            if (step > 0 && lane == 0) barrier_arrive(empty(before));
            before = stage;
            if (++stage == S::STAGES) stage = 0, phase ^= 1;
        }
        if (S::TURNS) named_arrive(TURN + (group + 1) % S::GROUPS, 256);
        wgmma::wait();
        if (lane == 0) barrier_arrive(empty(before));
        wgmma::touch(sums);
    }

    // The epilogue of 64 rows: bias, SiLU, residual, and out through shared memory.
    __device__ void write(float (&sums)[S::COLUMNS / 2], const float (&bias)[S::BIASES],
                          const uint32_t (&residual)[S::GATED ? 1 : S::COLUMNS / 4], int row, int column, int group) const {
        int thread = threadIdx.x % 128, lane = thread % 32, line = thread / 32 * 16 + lane / 4;
        uint32_t boxes = base + S::STAGES * S::STAGE_BYTES + group * S::BOXES * S::BOX_BYTES;
        // The boxes of the tile before have been stored.
        if (thread == 0) wait_for_boxes();
        store_bias(bias, group);
        named_wait(READY + group, 128);
        // Box by box: loads, arithmetic and stores of different boxes overlap.
#pragma unroll
        for (int box = 0; box < S::BOXES; box++) {
            constexpr int ACROSS = S::BOX / 8;
            if constexpr (S::GATED) {
                write_gated(sums, boxes, box, line, lane);
                continue;
            }
            bool silu = column + box * S::BOX < call.silu;
            float2 add[ACROSS];
            uint32_t above[ACROSS], below[ACROSS];
#pragma unroll
            for (int j = 0; j < ACROSS; j++) {
                asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                             : "=f"(add[j].x), "=f"(add[j].y)
                             : "r"(biases(group) + (box * S::BOX + j * 8 + lane % 4 * 2) * 4));
            }
#pragma unroll
            for (int j = 0; j < ACROSS; j++) {
                const int pair = box * ACROSS + j;
                float a = sums[pair * 4] + add[j].x, b = sums[pair * 4 + 1] + add[j].y;
                float c = sums[pair * 4 + 2] + add[j].x, d = sums[pair * 4 + 3] + add[j].y;
                if (silu) {
                    a = silu_of_half(a * 0.5f), b = silu_of_half(b * 0.5f);
                    c = silu_of_half(c * 0.5f), d = silu_of_half(d * 0.5f);
                }
                if (call.residual != nullptr) {
                    float2 high = unpack<T>(residual[2 * pair]), low = unpack<T>(residual[2 * pair + 1]);
                    a += high.x, b += high.y, c += low.x, d += low.y;
                }
                above[j] = Pack<T>::of(a, b), below[j] = Pack<T>::of(c, d);
            }
            // Swizzled as the TMA expects it, which avoids bank conflicts too.
            int turn = S::BOX == 64 ? line & 7 : line >> 1 & 3;
            uint32_t to = boxes + box * S::BOX_BYTES + line * (S::BOX * 2) + lane % 4 * 4;
#pragma unroll
            for (int j = 0; j < ACROSS; j++) {
                uint32_t place = to + (j ^ turn) * 16;
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(place), "r"(above[j]) : "memory");
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(place + 8 * S::BOX * 2), "r"(below[j]) : "memory");
            }
        }
        fence_async();
        named_wait(READY + group, 128);
        if (thread != 0) return;
        for (int box = 0; box < S::BOXES; box++) {
            int first = (S::GATED ? column / 2 : column) + box * S::BOX;
            if (first >= (S::GATED ? call.part : call.columns)) break;
            store_box(&maps.outputs[first / call.part], boxes + box * S::BOX_BYTES, first % call.part, row);
        }
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }

    // A box of a GLU without biases: sums of eight gates, then of their ups.
    __device__ void write_gated(const float (&sums)[S::COLUMNS / 2], uint32_t boxes, int box, int line, int lane) const {
        int turn = S::BOX == 64 ? line & 7 : line >> 1 & 3;
        uint32_t to = boxes + box * S::BOX_BYTES + line * (S::BOX * 2) + lane % 4 * 4;
#pragma unroll
        for (int j = 0; j < S::BOX / 8; j++) {
            const int gate = (box * S::BOX / 8 + j) * 8, up = gate + 4;
            float values[4];
            // By an exponential: the tanh of the chip is off by more than the output is rounded by.
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float value = sums[gate + i];
                values[i] = __fdividef(value, 1.0f + __expf(-value)) * sums[up + i];
            }
            uint32_t place = to + (j ^ turn) * 16;
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(place), "r"(Pack<T>::of(values[0], values[1])) : "memory");
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(place + 8 * S::BOX * 2), "r"(Pack<T>::of(values[2], values[3])) : "memory");
        }
    }

    // Waits until the TMA has read what it has to store.
    __device__ static void wait_for_boxes() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

    __device__ uint32_t biases(int group) const {
        return base + S::DATA_BYTES + S::BARRIER_BYTES + group * S::COLUMNS * 4;
    }

    __device__ void load_bias(float (&bias)[S::BIASES], int column) const {
#pragma unroll
        for (int i = 0; i < S::BIASES; i++) {
            int inside = i * 128 + threadIdx.x % 128, at = column + inside;
            bool there = call.bias != nullptr && inside < S::COLUMNS && at < call.columns;
            bias[i] = there ? wide(static_cast<const T *>(call.bias)[at]) : 0.0f;
        }
    }

    __device__ void store_bias(const float (&bias)[S::BIASES], int group) const {
#pragma unroll
        for (int i = 0; i < S::BIASES; i++) {
            int inside = i * 128 + threadIdx.x % 128;
            if (inside >= S::COLUMNS) continue;
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(biases(group) + inside * 4), "f"(bias[i]) : "memory");
        }
    }

    // Pairs of columns of a thread's two rows, by turns.
    __device__ void load_residual(uint32_t (&residual)[S::GATED ? 1 : S::COLUMNS / 4], int row, int column) const {
        int thread = threadIdx.x % 128, above = row + thread / 32 * 16 + thread % 32 / 4;
        column += thread % 4 * 2;
        int64_t from = above < call.rows ? call.taken.source(above) : -1;
        int64_t further = above + 8 < call.rows ? call.taken.source(above + 8) : -1;
#pragma unroll
        for (int j = 0; j < S::COLUMNS / 8; j++) {
            bool inside = column + j * 8 < call.columns;
            int at = column + j * 8;
            residual[2 * j] = inside && from >= 0 ? pair_at(call.residual, from * call.columns + at) : 0;
            residual[2 * j + 1] = inside && further >= 0 ? pair_at(call.residual, further * call.columns + at) : 0;
        }
    }
};

template <class T, class S> __device__ void multiply(const Product &call, const GemmMaps &maps) {
    extern __shared__ __align__(1024) uint8_t shared[];
    Worker<T, S> worker{call, maps, shared_address(shared)};
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    launch_dependents();
    if (threadIdx.x == 0) worker.init();
    __syncthreads();
    if (warp >= S::COMPUTING / 32) {
        if (S::GROUPS > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::FETCHING_REGISTERS));
        if (threadIdx.x == S::COMPUTING) worker.fetch();
    } else {
        if (S::GROUPS > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::REGISTERS));
        worker.compute(warp / 4);
    }
}

}  // namespace dense
}  // namespace pagoda
