// How the work over the keys of users that are split is shared out where their sums are added up in device memory.
//
// A part is one segment of the keys of a block of rows, for one head: a block's work, which leaves its sums in the slot
// of its number. Where the last block of rows has rows for one of two warpgroups alone, they take a segment each, and two
// segments make a part: so a user has 4 parts a head for every 64 rows begun, and all are as much work. Another kernel
// adds up the segments.
#pragma once

#include "hopper_ring.cuh"

namespace pagoda {
namespace hopper {

// Rows, and parts of each head for so many rows.
template <class S> constexpr int UNIT = S::PAIRS ? 64 : S::ROWS;
template <class S> constexpr int UNIT_PARTS = S::PAIRS ? SEGMENTS / 2 : SEGMENTS;

template <class S> __device__ int units_of(int rows) { return (rows + UNIT<S> - 1) / UNIT<S>; }

// The split user who has that number where each has `each` for each unit of rows and each head.
template <class S> __device__ Found find_split(const Call &call, int64_t index, int each) {
    return find_user(
        call, index, [&](int user) { return rows_of_kind<Kind::Split>(call, user); },
        [&](int rows) { return static_cast<int64_t>(units_of<S>(rows)) * call.heads * each; });
}

struct Part {
    int head;
    int block;    // of rows
    int segment;  // of a pair the first of two
    bool pair;

    // The part of that number of a user. Parts that read the same keys follow one another.
    template <class S> __device__ static Part of(int rows, int64_t number) {
        int units = units_of<S>(rows), blocks = S::PAIRS ? units / 2 : units;
        int64_t a_head = static_cast<int64_t>(units) * UNIT_PARTS<S>;
        int head = static_cast<int>(number / a_head), rest = static_cast<int>(number % a_head);
        if (!S::PAIRS) return {head, rest % blocks, rest / blocks, false};
        int two = rest / units, unit = rest % units;
        if (unit == 2 * blocks) return {head, blocks, 2 * two, true};
        return {head, unit % blocks, 2 * two + unit / blocks, false};
    }

    // Which of a user's slots has the sums of a segment of a unit of rows, in units.
    template <class S> __device__ static int64_t slot_of(int rows, int head, int unit, int segment) {
        int units = units_of<S>(rows), blocks = S::PAIRS ? units / 2 : units;
        int64_t first = static_cast<int64_t>(units) * UNIT_PARTS<S> * head;
        if (!S::PAIRS) return first + segment * blocks + unit;
        first += segment / 2 * units;
        if (unit == 2 * blocks) return (first + unit) * 2 + segment % 2;
        return (first + segment % 2 * blocks + unit / 2) * 2 + unit % 2;
    }
};

// The order in which segments are added up, everywhere.
__device__ inline float4 add_segments(const float4 (&parts)[SEGMENTS]) {
    float4 sum = parts[0];
#pragma unroll
    for (int segment = 1; segment < SEGMENTS; segment++) {
        sum.x += parts[segment].x;
        sum.y += parts[segment].y;
        sum.z += parts[segment].z;
        sum.w += parts[segment].w;
    }
    return sum;
}

// In a unit of a slot a thread's sums of eight columns are together: a pair of them in each of its two rows, for 128
// threads side by side; then those of the next columns.
template <class S> __device__ float4 *slot_at(float *scratch, int64_t unit) {
    return reinterpret_cast<float4 *>(scratch + unit * (UNIT<S> * S::D));
}

// Adds up the segments of a unit of rows. Each block has some of its sums, each thread of them two fours.
template <class T, class S> __device__ void add_parts(const Call &call, float *scratch, int64_t slots) {
    constexpr int FOURS = 2, A_BLOCK = 256 * FOURS, BLOCKS = UNIT<S> * S::D / 4 / A_BLOCK;
    Found found = find_split<S>(call, blockIdx.x / BLOCKS, 1);
    User user = load_user(call, max(found.user, 0));
    int units = units_of<S>(user.rows);
    wait_for_previous();
    if (found.user < 0) return;
    // More than there is memory for: offsets that no call should have.
    if ((found.before + static_cast<int64_t>(units) * call.heads) * UNIT_PARTS<S> > slots) return;
    int head = static_cast<int>(found.rest / units), unit = static_cast<int>(found.rest % units);
    int64_t before = found.before * UNIT_PARTS<S> * (S::PAIRS ? 2 : 1);
    int first = blockIdx.x % BLOCKS * A_BLOCK + threadIdx.x;
    float4 parts[FOURS][SEGMENTS];
#pragma unroll
    for (int segment = 0; segment < SEGMENTS; segment++) {
        const float4 *from = slot_at<S>(scratch, before + Part::slot_of<S>(user.rows, head, unit, segment)) + first;
#pragma unroll
        for (int i = 0; i < FOURS; i++) parts[i][segment] = __ldcs(from + i * 256);
    }
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        float4 sum = add_segments(parts[i]);
        int at = first + i * 256, group = at / (16 * S::D), inside = at % (16 * S::D), thread = inside % 128;
        int row = unit * UNIT<S> + group * 64 + thread / 32 * 16 + thread % 32 / 4;
        T *to = output_at<T>(call, user, head, row) + inside / 128 * 8 + (thread & 3) * 2;
        float scale = call.scale;
        if (row < user.rows) *reinterpret_cast<uint32_t *>(to) = Pack<T>::of(sum.x * scale, sum.y * scale);
        to += static_cast<int64_t>(8) * call.heads * S::D;
        if (row + 8 < user.rows) *reinterpret_cast<uint32_t *>(to) = Pack<T>::of(sum.z * scale, sum.w * scale);
    }
}

}  // namespace hopper
}  // namespace pagoda
