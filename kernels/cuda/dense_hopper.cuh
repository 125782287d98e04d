// The products of the dense operators on Hopper (sm_90a): bf16 and f16.
//
// There are as many blocks as multiprocessors, or as tiles of the output if those are fewer, and each goes through its share
// of the tiles. One of its warps fetches: the copy engine brings boxes of x and of the weight, 64 deep, into a ring in shared
// memory, ahead of their use and from one tile to the next. The other warpgroups compute: all of them one tile, each 64 rows
// of it; or by turns, a tile each, so that one has the matrix units while another turns its sums into the output.
//
// Every element is summed up in the order of the depth by one thread's matrix instructions, whatever the tile: which shape a
// call gets does not change a bit.
#pragma once

#include "async.cuh"
#include "call.cuh"
#include "dense.cuh"
#include "dense_wgmma.cuh"

namespace pagoda {
namespace dense {

constexpr int DEPTH = 64, ROW_BYTES = DEPTH * 2;  // of a box in shared memory
constexpr int READY = 1;                          // barriers by number; there is one for each warpgroup that computes

// What the copy engine has to know of the tensors.
struct Maps {
    CUtensorMap x, weight, outputs[4];
};

// Mirrored by `TILES` of src/cuda/dense_hopper.rs.
template <int GROUPS_, int HIGH_, int COLUMNS_, int STAGES_, bool TURNS_> struct Tile {
    static constexpr int GROUPS = GROUPS_;     // warpgroups that compute
    static constexpr int HIGH = HIGH_;         // times 64 rows that each has
    static constexpr int COLUMNS = COLUMNS_;
    static constexpr int STAGES = STAGES_;
    static constexpr bool TURNS = TURNS_;      // a tile for each of them
    static constexpr int TOGETHER = TURNS ? 1 : GROUPS;
    static constexpr int ROWS = 64 * HIGH * TOGETHER;
    static constexpr int COMPUTING = 128 * GROUPS, THREADS = COMPUTING + 128;
    static constexpr int REGISTERS = GROUPS == 3 ? 160 : GROUPS == 2 ? 232 : 240;
    static constexpr int FETCHING_REGISTERS = GROUPS == 3 ? 32 : GROUPS == 2 ? 40 : 24;
    static constexpr int STAGE_BYTES = (ROWS + COLUMNS) * ROW_BYTES;
    // The output leaves by boxes of 64 rows, two of which each warpgroup has in shared memory.
    static constexpr int BOX = COLUMNS % 64 == 0 ? 64 : 32;
    static constexpr int BOX_BYTES = 64 * BOX * 2;
    static constexpr int DATA_BYTES = STAGES * STAGE_BYTES + GROUPS * 2 * BOX_BYTES;
    static constexpr int SHARED = DATA_BYTES + 256;
    static_assert(SHARED <= 227 * 1024, "shared memory");
};

__device__ inline void fetch_box(uint32_t to, const CUtensorMap *map, uint32_t barrier, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(column), "r"(row)
        : "memory");
}

// What lies outside the tensor is not written.
__device__ inline void store_box(const CUtensorMap *map, uint32_t from, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
                 "r"(column), "r"(row)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

__device__ inline uint32_t pair_at(const void *tensor, int64_t element) {
    return __ldg(reinterpret_cast<const uint32_t *>(static_cast<const uint16_t *>(tensor) + element));
}

template <class T> __device__ float2 unpack(uint32_t pair);
template <> __device__ inline float2 unpack<__half>(uint32_t pair) {
    return __half22float2(*reinterpret_cast<__half2 *>(&pair));
}
template <> __device__ inline float2 unpack<__nv_bfloat16>(uint32_t pair) {
    return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162 *>(&pair));
}

template <class T, class S> struct Worker {
    const Product &call;
    const Maps &maps;
    uint32_t base;

    __device__ uint32_t full(int stage) const { return base + S::DATA_BYTES + stage * 8; }
    __device__ uint32_t empty(int stage) const { return full(S::STAGES + stage); }
    __device__ int steps() const { return (call.depth + DEPTH - 1) / DEPTH; }
    __device__ int down() const { return (call.rows + S::ROWS - 1) / S::ROWS; }
    __device__ int tiles() const { return down() * ((call.columns + S::COLUMNS - 1) / S::COLUMNS); }

    __device__ void init() const {
        for (int stage = 0; stage < S::STAGES; stage++) {
            barrier_init(full(stage), 1);
            barrier_init(empty(stage), 4 * S::TOGETHER);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }

    // One thread.
    __device__ void fetch() const {
        int count = tiles(), deep = steps(), high = down();
        uint32_t at = 0;
        for (int tile = blockIdx.x; tile < count; tile += gridDim.x) {
            int row = tile % high * S::ROWS, column = tile / high * S::COLUMNS;
            for (int step = 0; step < deep; step++, at++) {
                uint32_t stage = at % S::STAGES, to = base + stage * S::STAGE_BYTES;
                barrier_wait(empty(stage), (at / S::STAGES & 1) ^ 1);
                barrier_expect(full(stage), S::STAGE_BYTES);
                fetch_box(to, &maps.x, full(stage), step * DEPTH, row);
                fetch_box(to + S::ROWS * ROW_BYTES, &maps.weight, full(stage), step * DEPTH, column);
            }
        }
    }

    // One warpgroup.
    __device__ void compute(int group) const {
        int count = tiles(), deep = steps(), high = down();
        uint32_t at = 0;
        int boxes = 0;
        for (int tile = blockIdx.x, number = 0; tile < count; tile += gridDim.x, number++, at += deep) {
            if (S::TURNS && number % S::GROUPS != group) continue;
            float sums[S::HIGH][S::COLUMNS / 2];
            add_up(sums, at, deep, group);
            int row = tile % high * S::ROWS + (S::TURNS ? 0 : group * S::HIGH * 64), column = tile / high * S::COLUMNS;
#pragma unroll
            for (int part = 0; part < S::HIGH; part++) {
                if (row + part * 64 < call.rows) write(sums[part], row + part * 64, column, group, boxes);
            }
        }
        if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }

    __device__ void add_up(float (&sums)[S::HIGH][S::COLUMNS / 2], uint32_t at, int deep, int group) const {
        int lane = threadIdx.x % 32;
        for (int step = 0; step < deep; step++) {
            uint32_t now = at + step, stage = now % S::STAGES, from = base + stage * S::STAGE_BYTES;
            barrier_wait(full(stage), now / S::STAGES & 1);
            wgmma::Matrix<ROW_BYTES, 16, true> x(from + (S::TURNS ? 0 : group * S::HIGH * 64 * ROW_BYTES));
            wgmma::Matrix<ROW_BYTES, 16, true> weight(from + S::ROWS * ROW_BYTES);
            wgmma::fence();
#pragma unroll
            for (int k = 0; k < DEPTH / 16; k++) {
#pragma unroll
                for (int part = 0; part < S::HIGH; part++) {
                    Multiply<T, S::COLUMNS>::of(sums[part], x.at(part * 64 * ROW_BYTES + k * 32), weight.at(k * 32),
                                                step + k > 0);
                }
            }
            wgmma::commit();
            // What was multiplied a step ago has been read.
            wait_but_one();
            if (step > 0 && lane == 0) barrier_arrive(empty((now - 1) % S::STAGES));
        }
        wgmma::wait();
        if (lane == 0) barrier_arrive(empty((at + deep - 1) % S::STAGES));
#pragma unroll
        for (int part = 0; part < S::HIGH; part++) wgmma::touch(sums[part]);
    }

    // The sums of 64 rows: bias, SiLU, residual, and out through shared memory.
    __device__ void write(float (&sums)[S::COLUMNS / 2], int row, int column, int group, int &boxes) const {
        constexpr int ACROSS = S::BOX / 8;
        int thread = threadIdx.x % 128, lane = thread % 32;
        int line = thread / 32 * 16 + lane / 4;
        uint32_t own = base + S::STAGES * S::STAGE_BYTES + group * 2 * S::BOX_BYTES;
#pragma unroll
        for (int box = 0; box < S::COLUMNS / S::BOX; box++) {
            int first = column + box * S::BOX;
            if (first >= call.columns) break;
            int mine = first + lane % 4 * 2;
            uint32_t above[ACROSS], below[ACROSS], bias[ACROSS];
            if (call.bias != nullptr) {
#pragma unroll
                for (int j = 0; j < ACROSS; j++) bias[j] = mine + j * 8 < call.columns ? pair_at(call.bias, mine + j * 8) : 0;
            }
            if (call.residual != nullptr) {
                int64_t from = static_cast<int64_t>(row + line) * call.columns + mine;
                int64_t further = from + static_cast<int64_t>(8) * call.columns;
#pragma unroll
                for (int j = 0; j < ACROSS; j++) {
                    bool inside = mine + j * 8 < call.columns;
                    above[j] = inside && row + line < call.rows ? pair_at(call.residual, from + j * 8) : 0;
                    below[j] = inside && row + line + 8 < call.rows ? pair_at(call.residual, further + j * 8) : 0;
                }
            }
            uint32_t to = own + (boxes & 1) * S::BOX_BYTES;
            // The one before the last from here has been read, so this place is free.
            if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
            named_wait(READY + group, 128);
#pragma unroll
            for (int j = 0; j < ACROSS; j++) {
                float *four = &sums[(box * ACROSS + j) * 4];
                float a = four[0], b = four[1], c = four[2], d = four[3];
                if (call.bias != nullptr) {
                    float2 add = unpack<T>(bias[j]);
                    a += add.x, b += add.y, c += add.x, d += add.y;
                }
                if (first < call.silu) {
                    a = silu_of_half(a * 0.5f), b = silu_of_half(b * 0.5f);
                    c = silu_of_half(c * 0.5f), d = silu_of_half(d * 0.5f);
                }
                if (call.residual != nullptr) {
                    float2 add = unpack<T>(above[j]), more = unpack<T>(below[j]);
                    a += add.x, b += add.y, c += more.x, d += more.y;
                }
                // Turned about as the copy engine expects it, which keeps the banks apart too.
                int turn = S::BOX == 64 ? line & 7 : line >> 1 & 3;
                uint32_t place = to + line * (S::BOX * 2) + (j ^ turn) * 16 + lane % 4 * 4;
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(place), "r"(Pack<T>::of(a, b)) : "memory");
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(place + 8 * S::BOX * 2), "r"(Pack<T>::of(c, d)) : "memory");
            }
            fence_async();
            named_wait(READY + group, 128);
            if (thread == 0) store_box(&maps.outputs[first / call.part], to, first % call.part, row);
            boxes++;
        }
    }
};

template <class T, class S> __device__ void multiply(const Product &call, const Maps &maps) {
    extern __shared__ __align__(1024) uint8_t shared[];
    Worker<T, S> worker{call, maps, shared_address(shared)};
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    let_follow();
    if (threadIdx.x == 0) worker.init();
    __syncthreads();
    wait_for_previous();
    if (warp >= S::COMPUTING / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::FETCHING_REGISTERS));
        if (threadIdx.x == S::COMPUTING) worker.fetch();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::REGISTERS));
        worker.compute(warp / 4);
    }
}

}  // namespace dense
}  // namespace pagoda
