// Which block of the attention on Hopper computes which rows against which keys.
#pragma once

#include "common/attention_sm90/producer.cuh"

namespace pagoda {
namespace sm90 {

// Finds the items of a block one after the other, and has the producer fetch each.
template <class S> struct TileScheduler {
    const Call &call;
    const Ring<S> &ring;
    int per;  // items in a piece, 1 or 2
    int duties;
    const Common &common;
    Producer<S> producer;

    // Block number `block` of the computed rows.
    __device__ Item<S> item_of(const User &user, int head, int block) const {
        int first = user.skipped + block * S::ROWS;
        Item<S> item{user, head, first};
        item.slot = -1;
        auto reach = S::Variant::Reach::of(call, user, first, min(first + S::ROWS, user.rows) - 1);
        item.tiles = Tiles<S::KEYS>::of(user, reach);
        item.end = item.tiles.count();
        return item;
    }

    // Restricts an item to some segments of its tiles. Segments are cut by the user's keys, whatever the rows of the
    // item see of them: so a row's bits do not depend on the other rows of its item.
    __device__ void cut(Item<S> &item, int segment, int count) const {
        Segments<S> segments(call, item.user);
        item.begin = segments.first_of(item.tiles, segment);
        for (int i = 0; i < SEGMENTS - 1; i++) {
            item.ends[i] = i + 1 < count ? segments.first_of(item.tiles, segment + i + 1) : NO_END;
        }
        item.end = segments.first_of(item.tiles, segment + count);
        item.slot = 0;
    }

    __device__ static void wait_for_sums() {
        __syncwarp();
        cluster_wait();
        cluster_wait();
    }

    // The pieces of split users, of which every block of a cluster has one segment; or those of the other users, a
    // block each.
    template <bool SPLIT> __device__ void run_pieces() {
        constexpr Kind KIND = SPLIT ? Kind::Split : Kind::Whole;
        int64_t index = SPLIT ? blockIdx.x / CLUSTER : blockIdx.x, step = SPLIT ? gridDim.x / CLUSTER : gridDim.x;
        Piece piece = find_piece<S::ROWS, KIND>(call, index / call.heads, per);
        while (piece.user >= 0) {
            User user = load_user(call, piece.user);
            int head = static_cast<int>(index % call.heads), last = piece.blocks - 1 - piece.number;
            // A loop, so that the code that fetches an item is there once.
#pragma unroll 1
            for (int half = 0; half < per && (half == 0 || piece.number != last); half++) {
                Item<S> item = item_of(user, head, half == 0 ? last : piece.number);
                if (SPLIT) cut(item, blockIdx.x % CLUSTER, 1);
                // The sums of the item before are exchanged in the memory of this one's queries and tiles.
                if (SPLIT && producer.items > 0) wait_for_sums();
                producer.fetch(item);
            }
            index += step;
            piece = find_piece<S::ROWS, KIND>(call, index / call.heads, per);
        }
        if (SPLIT && producer.items > 0) wait_for_sums();
    }

    __device__ void run_parts() {
        producer.let_plan();
        for (;;) {
            barrier_wait(ring.planned(), producer.items & 1);
            Item<S> item = ring.plan();
            if (item.user.rows < 0) break;
            producer.fetch(item);
        }
    }

    // The scheduler warp of Mode::Parts: it finds the next item while the producer fetches the tiles of this one.
    __device__ void plan_parts() const {
        // The atomic is in flight while the parts are counted.
        unsigned index = common.take();
        Parts<S> parts(call);
        Item<S> item{};
        for (int number = 0; item.user.rows >= 0; number++) {
            barrier_wait(ring.may_plan(), number & 1);
            if (number > 0) index = common.take();
            Part part = parts.at(call, __shfl_sync(~0u, index, 0));
            // More blocks than there is scratch memory for: only invalid offsets have them.
            while (part.user >= 0 && part.number >= common.blocks) part = parts.at(call, __shfl_sync(~0u, common.take(), 0));
            item.user.rows = -1;
            if (part.user >= 0) {
                item = item_of(load_user(call, part.user), part.head, part.block);
                if (part.number >= 0) {
                    cut(item, part.segment, part.count);
                    item.role = part.role;
                    item.slot = part.number * 2 + (part.segment + part.count - 1) / 2;
                }
            }
            if ((threadIdx.x & 31) == 0) {
                ring.plan() = item;
                barrier_arrive(ring.planned());
            }
        }
        common.end();
    }

    __device__ void run() {
        if (S::MODE == Mode::Parts) {
            run_parts();
        } else {
            if (S::MODE == Mode::Cluster) run_pieces<true>();
            if (S::MODE == Mode::Whole || (duties & ALONE) != 0) run_pieces<false>();
        }
        Item<S> none{};
        none.user.rows = -1;
        producer.announce(none);
    }
};

}  // namespace sm90
}  // namespace pagoda
