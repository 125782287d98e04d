// Sampling on Hopper: a cluster of eight blocks for each row, with the row in their shared memory. It is read once.

#include "llm/sampling.cuh"

namespace pagoda {

extern "C" __global__ void __cluster_dims__(sampling::MOST_BLOCKS, 1, 1) __launch_bounds__(sampling::THREADS, 2)
    sample_rows_cluster(SamplingCall call) {
    extern __shared__ __align__(16) unsigned char memory[];
    constexpr int BLOCKS = sampling::MOST_BLOCKS;
    float *values = reinterpret_cast<float *>(memory + sampling::SHARED_BYTES);
    sampling::run<BLOCKS>(call, blockIdx.x / BLOCKS, blockIdx.x % BLOCKS,
                          *reinterpret_cast<sampling::Shared *>(memory), values);
}

}  // namespace pagoda
