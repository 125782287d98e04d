// HstuAttention as a variant of the attention on Hopper (common/attention_sm90/traits.cuh says what a variant is).
#pragma once

#include "common/attention_sm90/traits.cuh"
#include "hstu/hstu_mask.cuh"
#include "hstu/hstu_score.cuh"
#include "hstu/paged_kv_append.cuh"

namespace pagoda {

// Writes zeros for a row that is not computed; a whole warp calls it.
__device__ inline void clear_row(const Call &call, int row) {
    int number = user_of(call, row);
    if (number < 0) return;
    User user = load_user(call, number);
    if (row - user.row >= user.skipped) return;
    int64_t units = static_cast<int64_t>(call.heads) * call.head_size * 2 / sizeof(uint4);
    uint4 *to = static_cast<uint4 *>(call.output) + row * units;
    for (int64_t i = threadIdx.x % 32; i < units; i += 32) to[i] = make_uint4(0, 0, 0, 0);
}

struct HstuVariant {
    using Reach = pagoda::Reach;
    using Mask = HstuMask;
    using Score = SiluScore;

    // Every query head has keys and values of its own.
    __device__ static int kv_head(const Call &, int head) { return head; }

    // What idle warps do with a row of the call; a whole warp does it.
    __device__ static void beside(const Call &call, int duties, int row) {
        if ((duties & sm90::APPENDS) != 0) append_row<uint4>(call, row, 2);
        if ((duties & sm90::CLEARS) != 0) clear_row(call, row);
    }
};

}  // namespace pagoda
