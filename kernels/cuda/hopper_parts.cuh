// How the work over the keys of users that are split is shared out where their sums are added up in device memory.
//
// A part is two segments of the keys of a block of rows, one behind the other, for one head; an item of a user who is not split
// is taken as a part too, with all keys. Every block begins with one and takes others by a counter. A warpgroup leaves the sums of its 64 rows over the first segment in the part's slot and adds
// those over the second; the last to come of the parts of the same rows adds up the slots and writes the output.
#pragma once

#include "hopper_ring.cuh"

namespace pagoda {
namespace hopper {

constexpr int A_BLOCK = SEGMENTS / 2;  // parts of a block of rows

// How many of a block's parts, the last ones, are taken in the order of their size, whole blocks of rows first: the less is
// left to do when some find nothing more.
constexpr int LAST_PARTS = 2;

// What the blocks share in device memory: counters, which are 0 before and after a call, and the slots, which have the sums of
// a part each.
struct Common {
    unsigned *next;   // how many items were taken
    unsigned *ended;  // how many blocks have found nothing more to do
    unsigned *done;   // how many parts of each warpgroup's rows are done
    float *sums;
    int64_t slots;

    __device__ Common(unsigned *counters, void *scratch, int64_t slots)
        : next(counters), ended(counters + 1), done(counters + 4), sums(static_cast<float *>(scratch)), slots(slots) {}

    // A number that no one has got. A whole warp asks.
    __device__ int64_t take() const {
        return __shfl_sync(~0u, (threadIdx.x & 31) == 0 ? atomicAdd(next, 1u) : 0u, 0);
    }

    // The block takes no more; the last one to say so leaves zeros. A whole warp says so.
    __device__ void end() const {
        if ((threadIdx.x & 31) == 0 && atomicInc(ended, gridDim.x - 1) == gridDim.x - 1) atomicExch(next, 0u);
    }
};

// Where the keys of a user are cut. Pages, and behind them the user's own rows, are counted in stretches of SEGMENT_KEYS
// keys; the segments have as many, from the first on that any row sees.
template <class S> struct Segments {
    int cached, first, count;

    __device__ Segments(const Call &call, const User &user) {
        int seen = Reach::of(call, user, 0, user.rows - 1).first;
        cached = up(user.cached);
        first = seen < user.cached ? seen / S::SEGMENT_KEYS : cached + (seen - user.cached) / S::SEGMENT_KEYS;
        count = cached + up(user.rows) - first;
    }

    __device__ static int up(int keys) { return (keys + S::SEGMENT_KEYS - 1) / S::SEGMENT_KEYS; }

    // How many of the tiles that some rows look at come before a segment.
    __device__ int first_of(const Tiles<S::KEYS> &tiles, int segment) const {
        constexpr int EACH = S::SEGMENT_KEYS / S::KEYS;
        int at = first + static_cast<int>(static_cast<int64_t>(count) * segment / SEGMENTS);
        int paged = min(at, cached) * EACH, own = max(at - cached, 0) * EACH;
        return clamped(paged - tiles.cached_first, 0, tiles.cached_count) +
               clamped(own - tiles.fresh_first, 0, tiles.fresh_count) +
               clamped(own - tiles.candidate_first, 0, tiles.candidate_count);
    }
};

struct Part {
    int user;  // -1: there is none of that number
    int head, block, number;
    int64_t slot;  // -1: all keys
};

// All parts of a call, in their order: the blocks of rows of users who are not split; the first parts of all others, then the
// second ones, of each the whole blocks first and then the users' last ones, which have fewer rows. (With the parts of a block
// one behind the other those who add up in the middle of a call are late with what they take next: 10 % slower.)
template <class S> struct Parts {
    int own_whole, own_split;    // rows of user number `lane`, as one who is not split and as one who is
    int64_t alone, whole, last;  // blocks of rows, of all heads

    __device__ explicit Parts(const Call &call) {
        int lane = threadIdx.x & 31;
        bool any = lane < call.users;
        own_whole = any ? rows_of_kind<Kind::Whole>(call, lane) : 0;
        own_split = any ? rows_of_kind<Kind::Split>(call, lane) : 0;
        alone = find_alone(call, INT64_MAX).before;
        whole = find<true>(call, INT64_MAX).before;
        last = find<false>(call, INT64_MAX).before;
    }

    __device__ Found find_alone(const Call &call, int64_t index) const {
        return find_user(
            call, index, [&](int user) { return user < 32 ? own_whole : rows_of_kind<Kind::Whole>(call, user); },
            [&](int rows) { return static_cast<int64_t>((rows + S::ROWS - 1) / S::ROWS) * call.heads; });
    }

    template <bool WHOLE> __device__ Found find(const Call &call, int64_t index) const {
        return find_user(
            call, index, [&](int user) { return user < 32 ? own_split : rows_of_kind<Kind::Split>(call, user); },
            [&](int rows) {
                return static_cast<int64_t>(WHOLE ? rows / S::ROWS : rows % S::ROWS > 0) * call.heads;
            });
    }

    __device__ Part at(const Call &call, int64_t index) const {
        constexpr int BEFORE = A_BLOCK - LAST_PARTS;
        if (index < alone) {
            Found found = find_alone(call, index);
            int blocks = (found.rows + S::ROWS - 1) / S::ROWS, rest = static_cast<int>(found.rest);
            // Those with the most keys first.
            return {found.user, rest / blocks, blocks - 1 - rest % blocks, 0, -1};
        }
        index -= alone;
        int64_t blocks = whole + last;
        if (index >= A_BLOCK * blocks) return {-1};
        int64_t number = index / blocks, block = index % blocks;
        bool is_whole = block < whole;
        if (!is_whole) block -= whole;
        if (number >= BEFORE) {
            block = index - BEFORE * blocks;
            is_whole = block < LAST_PARTS * whole;
            if (!is_whole) block -= LAST_PARTS * whole;
            int64_t each = is_whole ? whole : last;
            number = BEFORE + block / each;
            block %= each;
        }
        Found found = is_whole ? find<true>(call, block) : find<false>(call, block);
        int full = found.rows / S::ROWS, rest = static_cast<int>(found.rest);
        int64_t slot = (is_whole ? block : whole + block) * A_BLOCK + number;
        if (!is_whole) return {found.user, rest, full, static_cast<int>(number), slot};
        return {found.user, rest / full, rest % full, static_cast<int>(number), slot};
    }
};

// The same everywhere, and as the L2 cache adds: it takes tiny numbers for 0.
__device__ inline float add(float a, float b) {
    float sum;
    asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
}

__device__ inline void add_to(float4 &sum, const float4 &other) {
    sum = make_float4(add(sum.x, other.x), add(sum.y, other.y), add(sum.z, other.z), add(sum.w, other.w));
}

// The order in which sums are added up, everywhere: those of two segments first.
__device__ inline float4 add_parts(const float4 (&parts)[A_BLOCK]) {
    float4 sum = parts[0];
#pragma unroll
    for (int part = 1; part < A_BLOCK; part++) add_to(sum, parts[part]);
    return sum;
}

__device__ inline float4 add_segments(const float4 (&segments)[SEGMENTS]) {
    float4 parts[A_BLOCK];
#pragma unroll
    for (int part = 0; part < A_BLOCK; part++) {
        parts[part] = segments[2 * part];
        add_to(parts[part], segments[2 * part + 1]);
    }
    return add_parts(parts);
}

// What a warpgroup has of a slot. There a thread's sums of eight columns are together, a pair of them in each of its two rows,
// for 128 threads side by side; then those of the next columns.
template <class S> struct Slot {
    static constexpr int FOURS = S::D / 8, A_SLOT = 16 * S::D * S::GROUPS;

    float4 *own;   // the thread's
    int part;      // of the block of rows
    unsigned *done;
    bool put_any;  // there are sums in it

    __device__ Slot(const Common &common, const Item<S> &item) : put_any(false) {
        int group = threadIdx.x / 128;
        own = reinterpret_cast<float4 *>(common.sums) + item.slot * A_SLOT + group * (16 * S::D) + threadIdx.x % 128;
        part = static_cast<int>(item.slot % A_BLOCK);
        done = common.done + item.slot / A_BLOCK * S::GROUPS + group;
    }

    template <class Each> __device__ static void each(float (&sums)[S::PARTS][S::PART / 2], Each each) {
#pragma unroll
        for (int n = 0; n < FOURS; n++) each(n, &sums[n / (S::PART / 8)][n % (S::PART / 8) * 4]);
    }

    // Leaves the sums here, and zeros in their place.
    __device__ void put(float (&sums)[S::PARTS][S::PART / 2]) {
        each(sums, [&](int n, float *four) {
            __stcg(own + n * 128, make_float4(four[0], four[1], four[2], four[3]));
            four[0] = four[1] = four[2] = four[3] = 0;
        });
        put_any = true;
    }

    // Adds the sums. True where the other parts are there already: then they become those of all.
    __device__ bool add(const Ring<S> &ring, float (&sums)[S::PARTS][S::PART / 2]) const {
        each(sums, [&](int n, const float *four) {
            if (put_any) {
                asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(own + n * 128), "f"(four[0]),
                             "f"(four[1]), "f"(four[2]), "f"(four[3])
                             : "memory");
            } else {
                float4 sum = make_float4(four[0], four[1], four[2], four[3]);
                add_to(sum, make_float4(0, 0, 0, 0));
                __stcg(own + n * 128, sum);
            }
        });
        int group = threadIdx.x / 128;
        named_wait(ARRIVED + group, 128);
        if (threadIdx.x % 128 == 0) {
            int before;
            // The last one leaves 0.
            asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(done), "n"(A_BLOCK - 1) : "memory");
            ring.arrived[group] = before;
        }
        named_wait(ARRIVED + group, 128);
        if (ring.arrived[group] != A_BLOCK - 1) return false;
        add_up(sums);
        return true;
    }

    // The sums of all parts of the thread's rows.
    __device__ void add_up(float (&sums)[S::PARTS][S::PART / 2]) const {
        constexpr int AT_ONCE = 4;
        const float4 *first = own - part * A_SLOT;
#pragma unroll
        for (int n = 0; n < FOURS; n += AT_ONCE) {
            float4 parts[AT_ONCE][A_BLOCK];
#pragma unroll
            for (int i = 0; i < AT_ONCE * A_BLOCK; i++) {
                parts[i / A_BLOCK][i % A_BLOCK] = __ldcg(first + i % A_BLOCK * A_SLOT + (n + i / A_BLOCK) * 128);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                float4 sum = add_parts(parts[i]);
                float *four = &sums[(n + i) / (S::PART / 8)][(n + i) % (S::PART / 8) * 4];
                four[0] = sum.x, four[1] = sum.y, four[2] = sum.z, four[3] = sum.w;
            }
        }
    }
};

}  // namespace hopper
}  // namespace pagoda
