// The epilogue of the attention on Hopper: a warpgroup's sums become rows of the output.
#pragma once

#include "common/attention_sm90/mainloop.cuh"
#include "common/attention_sm90/split_kv.cuh"
#include "common/convert.cuh"

namespace pagoda {
namespace sm90 {

// The thread's first row of its warpgroup's; the other is 8 below.
__device__ inline int own_row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

// Writes the sums over all keys, from registers.
template <class T, class S> __device__ void write_rows(const Mainloop<T, S> &loop, int first_row, int last) {
    const Item<S> &item = loop.item;
    for (int i = 0; i < 2; i++) {
        int row = first_row + 8 * i;
        if (row > last) continue;
        T *to = output_at<T>(loop.call, item.user, item.head, row);
        loop.each(i, [&](int column, float low, float high) {
            *reinterpret_cast<uint32_t *>(to + column) =
                Pack<T>::of(loop.score.finish(i, low), loop.score.finish(i, high));
        });
    }
}

// Adds up the sums that the blocks of the cluster have of this block's share of the rows, out of their shared memory.
template <class T, class S>
__device__ void add_up_cluster(const Call &call, const Ring<S> &ring, const Item<S> &item, int rank) {
    constexpr int SHARE = S::ROWS / CLUSTER, FOURS = S::D / 4;
    for (int unit = threadIdx.x; unit < SHARE * FOURS; unit += S::COMPUTING) {
        int row = rank * SHARE + unit / FOURS, column = unit % FOURS * 4;
        uint32_t from = ring.base + (row * S::SUM_STRIDE + column) * 4;
        float4 parts[CLUSTER];
#pragma unroll
        for (int block = 0; block < CLUSTER; block++) parts[block] = load_from(from, block);
        float4 sum = add_segments(parts);
        if (item.first + row >= item.user.rows) continue;
        T *to = output_at<T>(call, item.user, item.head, item.first + row) + column;
        auto finish = [&](float sum) { return S::Variant::Score::finish(call, sum); };
        *reinterpret_cast<uint2 *>(to) =
            make_uint2(Pack<T>::of(finish(sum.x), finish(sum.y)), Pack<T>::of(finish(sum.z), finish(sum.w)));
    }
}

// Split-KV in a cluster: each block has the sums over one segment of the keys. They are exchanged through shared
// memory, and each block writes a share of the rows.
template <class T, class S> __device__ void write_cluster(const Mainloop<T, S> &loop) {
    extern __shared__ __align__(1024) uint8_t shared[];
    // Every warpgroup has to be done with the tiles before sums go where they were.
    named_wait(TAIL, S::COMPUTING);
    float *sums = reinterpret_cast<float *>(shared);
    for (int i = 0; i < 2; i++) {
        float *to = sums + (loop.rows_at() + own_row() + 8 * i) * S::SUM_STRIDE;
        loop.each(i, [&](int column, float low, float high) {
            *reinterpret_cast<float2 *>(to + column) = make_float2(low, high);
        });
    }
    cluster_wait();
    add_up_cluster<T, S>(loop.call, loop.ring, loop.item, blockIdx.x % CLUSTER);
    fence_async();
    // No block may go on, or end, while another reads its sums.
    cluster_wait();
}

}  // namespace sm90
}  // namespace pagoda
