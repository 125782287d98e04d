// HstuLinear on Hopper (sm_90a): x weightᵀ of f32 by TF32, with bias and activation.
//
// Rows are few and the depth is long, so the time is that of fetching. Split-K: a cluster of two blocks has a tile of
// the output, and each block half of the depth. One producer warp fetches by the TMA, without waiting for the first
// STAGES steps; one warpgroup multiplies by wgmma. Then each of the two blocks adds up both sums for half of the tile's
// rows.
//
// The split depends on the depth alone, and the sums are added in the order of the blocks: the other rows of the batch
// do not change a bit of a row.

#include "common/dependent_launch.cuh"
#include "common/mirrored.cuh"
#include "common/tma.cuh"
#include "common/wgmma_gemm.cuh"
#include "hstu/dense.cuh"

namespace pagoda {
namespace dense {
namespace linear {

// src/cuda/hstu/linear.rs has the same numbers.
constexpr int CLUSTER = 2, ROWS = 64, COLUMNS = 128, DEPTH = 32, STAGES = 8;
constexpr int FETCHING = 4, WARPS = FETCHING + 1;  // the warps before it compute
constexpr int ROW_BYTES = DEPTH * 4, STAGE_BYTES = (ROWS + COLUMNS) * ROW_BYTES;
// Row pitch of the sums in shared memory: four more than there are columns, which avoids bank conflicts.
constexpr int PITCH = COLUMNS + 4;
static_assert(ROWS * PITCH * 4 <= STAGES * STAGE_BYTES, "sums lie where the stages were");

// The descriptions of the tensors for the TMA, which rounds to TF32.
struct LinearMaps {
    CUtensorMap x, weight;
};
PAGODA_MIRRORED(hstu, LinearMaps)

struct Worker {
    const Product &call;
    const LinearMaps &maps;
    uint32_t base;
    int rank, row, column;  // in the cluster; of the tile's first element
    int first, steps;       // of the depth

    __device__ Worker(const Product &call, const LinearMaps &maps, uint32_t base) : call(call), maps(maps), base(base) {
        int down = (call.rows + ROWS - 1) / ROWS, tile = blockIdx.x / CLUSTER;
        rank = blockIdx.x % CLUSTER, row = tile % down * ROWS, column = tile / down * COLUMNS;
        int all = (call.depth + DEPTH - 1) / DEPTH, each = (all + CLUSTER - 1) / CLUSTER;
        first = rank * each, steps = min(each, all - first);
    }

    __device__ uint32_t full(int stage) const { return base + STAGES * STAGE_BYTES + stage * 8; }
    __device__ uint32_t empty(int stage) const { return full(STAGES + stage); }

    __device__ void init() const {
        for (int stage = 0; stage < STAGES; stage++) barrier_init(full(stage), 1), barrier_init(empty(stage), FETCHING);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }

    __device__ void fetch_weight(int stage, int step) const {
        barrier_expect(full(stage), STAGE_BYTES);
        uint32_t to = base + stage * STAGE_BYTES + ROWS * ROW_BYTES;
        fetch_box(to, &maps.weight, full(stage), (first + step) * DEPTH, column);
    }

    // One thread.
    __device__ void fetch() const {
        prefetch_map(&maps.weight), prefetch_map(&maps.x);
        // The weight is fetched while the kernel in front still runs, if that one does not write it.
        int early = call.constant ? min(STAGES, steps) : 0;
        for (int step = 0; step < early; step++) fetch_weight(step, step);
        wait_for_previous();
        for (int step = 0; step < steps; step++) {
            int stage = step % STAGES;
            if (step >= early) {
                barrier_wait(empty(stage), (step / STAGES & 1) ^ 1);
                fetch_weight(stage, step);
            }
            fetch_box(base + stage * STAGE_BYTES, &maps.x, full(stage), (first + step) * DEPTH, row);
        }
    }

    // One warpgroup. Its sums are left in shared memory.
    __device__ void compute(float *part) const {
        int thread = threadIdx.x, lane = thread % 32;
        wgmma::Matrix<ROW_BYTES, 16, true> x(base), weight(base + ROWS * ROW_BYTES);
        // If the depth is short, the last block has none of it.
        float sums[COLUMNS / 2] = {};
        for (int step = 0; step < steps; step++) {
            int stage = step % STAGES;
            barrier_wait(full(stage), step / STAGES & 1);
            wgmma::fence();
#pragma unroll
            for (int k = 0; k < DEPTH / 8; k++) {
                uint32_t offset = stage * STAGE_BYTES + k * 32;
                MultiplyTf32::of(sums, x.at(offset), weight.at(offset), step + k > 0);
            }
            wgmma::commit();
            // The products of the step before have read their stage.
            wait_but_one();
            if (step > 0 && lane == 0) barrier_arrive(empty((step - 1) % STAGES));
        }
        wgmma::wait();
        wgmma::touch(sums);
        // The sums overwrite stages that other warps may still read.
        named_wait(1, 128);
        float *to = part + (thread / 32 * 16 + lane / 4) * PITCH + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++) {
            *reinterpret_cast<float2 *>(to + j * 8) = {sums[j * 4], sums[j * 4 + 1]};
            *reinterpret_cast<float2 *>(to + 8 * PITCH + j * 8) = {sums[j * 4 + 2], sums[j * 4 + 3]};
        }
    }

    // A warp has a row, and a lane four columns of it.
    __device__ void write(int warp) const {
        int lane = threadIdx.x % 32, at = column + lane * 4;
        const float *bias = static_cast<const float *>(call.bias);
        float add[4];
#pragma unroll
        for (int i = 0; i < 4; i++) add[i] = bias != nullptr && at + i < call.columns ? bias[at + i] : 0.0f;
        bool whole = call.columns % 4 == 0;
        for (int line = rank * (ROWS / CLUSTER) + warp; line < (rank + 1) * (ROWS / CLUSTER); line += WARPS) {
            if (row + line >= call.rows || at >= call.columns) continue;
            float4 sum = {};
#pragma unroll
            for (int block = 0; block < CLUSTER; block++) {
                float4 some = load_from(base + (line * PITCH + lane * 4) * 4, block);
                sum.x += some.x, sum.y += some.y, sum.z += some.z, sum.w += some.w;
            }
            sum.x = activated(sum.x + add[0], call.activation), sum.y = activated(sum.y + add[1], call.activation);
            sum.z = activated(sum.z + add[2], call.activation), sum.w = activated(sum.w + add[3], call.activation);
            float *to = static_cast<float *>(call.outputs[0]) + static_cast<int64_t>(row + line) * call.columns + at;
            if (whole) {
                *reinterpret_cast<float4 *>(to) = sum;
                continue;
            }
            float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (at + i < call.columns) to[i] = values[i];
            }
        }
    }
};

}  // namespace linear
}  // namespace dense

extern "C" __global__ void __cluster_dims__(dense::linear::CLUSTER, 1, 1) __launch_bounds__(32 * dense::linear::WARPS)
    linear_tf32(const __grid_constant__ dense::Product call, const __grid_constant__ dense::linear::LinearMaps maps) {
    using namespace dense::linear;
    extern __shared__ __align__(1024) uint8_t shared[];
    Worker worker(call, maps, shared_address(shared));
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    launch_dependents();
    if (threadIdx.x == 0) worker.init();
    __syncthreads();
    if (warp == FETCHING) {
        if (threadIdx.x % 32 == 0) worker.fetch();
    } else {
        worker.compute(reinterpret_cast<float *>(shared));
    }
    // The output is written, and the bias read, behind the kernel in front of this one, which may use either.
    wait_for_previous();
    __syncwarp();
    cluster_wait();
    worker.write(warp);
    __syncwarp();
    // The sums are there until the other block has read them.
    cluster_wait();
}

}  // namespace pagoda
