// Sampling on every chip: one block for each row.

#include "llm/sampling.cuh"

namespace pagoda {

extern "C" __global__ void __launch_bounds__(sampling::THREADS) sample_rows(SamplingCall call) {
    extern __shared__ __align__(16) unsigned char memory[];
    sampling::run<1>(call, blockIdx.x, 0, *reinterpret_cast<sampling::Shared *>(memory), nullptr);
}

}  // namespace pagoda
