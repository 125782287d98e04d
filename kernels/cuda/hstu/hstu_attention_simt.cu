// HstuAttention without tensor cores (SIMT), for f32 and for head sizes that the other kernels do not take. It is also
// their oracle on the device. A warp computes one row of one head, key by key, in f32.

#include "common/convert.cuh"
#include "hstu/hstu_mask.cuh"

namespace pagoda {

constexpr int MOST = 16;  // elements of a row that a lane holds: D up to 512

template <class T>
__device__ void attend(const Call &call) {
    int lane = threadIdx.x & 31;
    int64_t task = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (task >= static_cast<int64_t>(call.total_rows) * call.heads) return;
    int head = static_cast<int>(task % call.heads);
    int row = static_cast<int>(task / call.heads);
    int size = call.head_size;
    int64_t width = static_cast<int64_t>(call.heads) * size;
    int64_t at = row * width + static_cast<int64_t>(head) * size;

    float sums[MOST] = {};
    int number = user_of(call, row);
    if (number >= 0) {
        User user = load_user(call, number);
        Seen seen = seen_by(call, user, row - user.row);
        float query[MOST] = {};
        for (int i = 0; i < MOST; i++) {
            if (i * 32 + lane < size) query[i] = wide(static_cast<const T *>(call.query)[at + i * 32 + lane]);
        }
        for (int part = 0; part < 2 && row - user.row >= user.skipped; part++) {
            int end = part == 0 ? seen.end : seen.candidate_end;
            for (int position = part == 0 ? seen.first : seen.candidate; position < end; position++) {
                const T *key, *value;
                if (position < user.cached) {
                    int64_t slot = pool_row(call, user, position, 0);
                    if (slot < 0) continue;
                    key = static_cast<const T *>(call.pool) + slot * width + static_cast<int64_t>(head) * size;
                    value = key + call.page_size * width;
                } else {
                    int64_t from = (user.row + position - user.cached) * width + static_cast<int64_t>(head) * size;
                    key = static_cast<const T *>(call.key) + from;
                    value = static_cast<const T *>(call.value) + from;
                }
                float dot = 0;
                for (int i = 0; i < MOST; i++) {
                    if (i * 32 + lane < size) dot = fmaf(query[i], wide(key[i * 32 + lane]), dot);
                }
                for (int step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(~0u, dot, step);
                float score = dot * call.alpha;
                float weight = score / (1.0f + expf(-score));
                for (int i = 0; i < MOST; i++) {
                    if (i * 32 + lane < size) sums[i] = fmaf(weight, wide(value[i * 32 + lane]), sums[i]);
                }
            }
        }
    }
    for (int i = 0; i < MOST; i++) {
        if (i * 32 + lane < size) narrow(sums[i] * call.scale, static_cast<T *>(call.output) + at + i * 32 + lane);
    }
}

extern "C" __global__ void __launch_bounds__(128) plain_f32(const __grid_constant__ Call call) { attend<float>(call); }
extern "C" __global__ void __launch_bounds__(128) plain_f16(const __grid_constant__ Call call) { attend<__half>(call); }
extern "C" __global__ void __launch_bounds__(128) plain_bf16(const __grid_constant__ Call call) {
    attend<__nv_bfloat16>(call);
}

}  // namespace pagoda
