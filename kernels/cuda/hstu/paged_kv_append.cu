// PagedKvAppend in place: the new history rows of every user go into their pages, as bytes.

#include "common/dependent_launch.cuh"
#include "hstu/paged_kv_append.cuh"

namespace pagoda {

// A warp has a row.
template <class Unit>
__device__ void append(const Call &call, int element_bytes) {
    begin();
    int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (row < call.total_rows) append_row<Unit>(call, static_cast<int>(row), element_bytes);
}

extern "C" __global__ void __launch_bounds__(256) append_16(const __grid_constant__ Call call, int element_bytes) {
    append<uint4>(call, element_bytes);
}
extern "C" __global__ void __launch_bounds__(256) append_4(const __grid_constant__ Call call, int element_bytes) {
    append<uint32_t>(call, element_bytes);
}
extern "C" __global__ void __launch_bounds__(256) append_2(const __grid_constant__ Call call, int element_bytes) {
    append<uint16_t>(call, element_bytes);
}

}  // namespace pagoda
