// How the work over the keys of users that are split is shared out where their sums are added up in device memory.
//
// A part is two segments of the keys of a block of rows, one behind the other, for one head: the first two or the last two of
// either half of the segments. An item of a user who is not split is taken as a part too, with all keys. Blocks take parts in
// their order, by a counter. The sums of a half are added up in its slot, by the L2 cache: a warpgroup leaves those of its 64
// rows over the first segment there and adds those over the second; who has the other part of that half, which is taken later,
// adds his. Whoever completes the second half reads both and writes the output; if he knows in time, without adding before.
#pragma once

#include "hopper_ring.cuh"

namespace pagoda {
namespace hopper {

constexpr int A_BLOCK = SEGMENTS / 2;  // parts of a block of rows: the first of either half, then the second ones

// What is done of a warpgroup's rows: the first part of the first half, and of the second one; all of a half.
constexpr unsigned FIRST_DONE = 1, HALF_DONE = 4;

// How many of a block's parts, the last ones, are taken in the order of their size, whole blocks of rows first: the less is
// left to do when some find nothing more.
constexpr int LAST_PARTS = 2;

// What the blocks share in device memory: counters, which are 0 before and after a call, and as many slots as parts. Those of a
// block's first two parts have the sums of the halves; the others are used where a second part is done with a segment before it
// knows that the first part is done.
struct Common {
    unsigned *next;   // how many items were taken
    unsigned *ended;  // how many blocks have found nothing more to do
    unsigned *done;   // what is done of each warpgroup's rows
    float *sums;
    int64_t slots;

    __device__ Common(unsigned *counters, void *scratch, int64_t slots)
        : next(counters), ended(counters + 1), done(counters + 4), sums(static_cast<float *>(scratch)), slots(slots) {}

    // A number that no one has got, for the first lane of a warp. Who has a smaller one is running already: one may wait for him.
    __device__ unsigned take() const { return (threadIdx.x & 31) == 0 ? atomicAdd(next, 1u) : 0u; }

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

__device__ inline float4 add(const float4 &a, const float4 &b) {
    return make_float4(add(a.x, b.x), add(a.y, b.y), add(a.z, b.z), add(a.w, b.w));
}

// With the same sign of 0 whatever zeros were added before.
__device__ inline float4 add_halves(const float4 &one, const float4 &other) {
    return add(add(one, other), make_float4(0, 0, 0, 0));
}

// The order in which sums are added up, everywhere: those of a half's segments one after the other, then those of the halves.
__device__ inline float4 add_segments(const float4 (&segments)[SEGMENTS]) {
    constexpr int A_HALF = SEGMENTS / 2;
    float4 halves[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        halves[half] = segments[half * A_HALF];
#pragma unroll
        for (int segment = 1; segment < A_HALF; segment++) {
            halves[half] = add(halves[half], segments[half * A_HALF + segment]);
        }
    }
    return add_halves(halves[0], halves[1]);
}

// What a warpgroup knows of its part, and does with its sums in the slots. There a thread's sums of eight columns are together, a
// pair of them in each of its two rows, for 128 threads side by side; then those of the next columns. Little is kept in
// registers, of which the loop over the tiles has none to spare.
template <class S> struct Slot {
    static constexpr int FOURS = S::D / 8, A_SLOT = 16 * S::D * S::GROUPS;
    using Sums = float[S::PARTS][S::PART / 2];

    const Common &common;
    const Ring<S> &ring;
    int part;

    // Where the first segment's sums were put; anything else is the number of the tile behind which they will be, or of none.
    static constexpr int IN_PLACE = INT32_MIN, ASIDE = INT32_MIN + 1;
    static constexpr float NONE = -0.f;  // whatever it is added to stays as it is

    __device__ bool second() const { return part % A_BLOCK >= 2; }
    __device__ unsigned first_done() const { return FIRST_DONE << part % 2; }

    __device__ static int group() { return threadIdx.x / 128; }
    __device__ static void meet() { named_wait(ARRIVED + group(), 128); }

    __device__ static unsigned *done(const Common &common, int part) {
        return common.done + part / A_BLOCK * S::GROUPS + group();
    }

    // Where the thread's sums are in a slot.
    __device__ float4 *at(int slot) const {
        return reinterpret_cast<float4 *>(common.sums) + static_cast<int64_t>(slot) * A_SLOT + group() * (16 * S::D) +
               threadIdx.x % 128;
    }

    // Those of the part's half, and of the other.
    __device__ float4 *of_half() const { return at(part & ~2); }
    __device__ float4 *of_other() const { return at(part & ~2 ^ 1); }

    // Tells the others of the part that was left in its slot before, if there is one, when all of the warpgroup have met since.
    // Not at once: who tells waits until what was written has arrived.
    __device__ static void tell(const Common &common, const Ring<S> &ring) {
        if (threadIdx.x % 128 != 0) return;
        int &untold = ring.untold[group()];
        if (untold >= 0) {
            asm volatile("red.release.gpu.global.or.b32 [%0], %1;" ::"l"(done(common, untold)), "r"(FIRST_DONE << untold % 2)
                         : "memory");
        }
        untold = -1;
    }

    template <class Each> __device__ static void each(Sums &sums, Each each) {
#pragma unroll
        for (int n = 0; n < FOURS; n++) each(n, &sums[n / (S::PART / 8)][n % (S::PART / 8) * 4]);
    }

    __device__ static void add_at(float4 *to, float4 four) {
        asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(four.x), "f"(four.y),
                     "f"(four.z), "f"(four.w)
                     : "memory");
    }

    __device__ static float4 load(const float4 *from) {
        float4 four;
        asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
                     : "l"(from)
                     : "memory");
        return four;
    }

    __device__ static float4 as_four(const float *four) { return make_float4(four[0], four[1], four[2], four[3]); }

    // Asks what is done of the warpgroup's rows; all of its threads know when they have met. With `wait`: when the first part of
    // the half is.
    __device__ void look(bool wait) const {
        if (threadIdx.x % 128 != 0) return;
        unsigned what;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(what) : "l"(done(common, part)) : "memory");
        } while (wait && (what & first_done()) == 0);
        ring.done[group()] = what;
    }

    __device__ bool is_done(unsigned what) const { return (ring.done[group()] & what) != 0; }

    // Leaves the first segment's sums, and zeros in their place. Gives where they are.
    __device__ int put(Sums &sums, bool looked) const {
        if (second() && looked) meet();
        bool adds = second() && looked && is_done(first_done());
        float4 *to = adds ? of_half() : at(part);
        if (adds) {
            each(sums, [&](int n, const float *four) { add_at(to + n * 128, as_four(four)); });
        } else {
            each(sums, [&](int n, const float *four) { __stcg(to + n * 128, as_four(four)); });
        }
        each(sums, [&](int, float *four) { four[0] = four[1] = four[2] = four[3] = 0; });
        return second() && !adds ? ASIDE : IN_PLACE;
    }

    // Adds what is left. True where the other half is there already: then the sums become those of both.
    __device__ bool leave(Sums &sums, int where) const {
        float4 *to = of_half();
        if (where > ASIDE) {
            meet();
            tell(common, ring);
            // One of the segments has no tiles: as if zeros had been put, or were added.
            each(sums, [&](int, float *four) {
                for (int i = 0; i < 4; i++) four[i] = add(four[i], 0);
            });
        }
        if (!second()) {
            if (where == IN_PLACE) {
                each(sums, [&](int n, const float *four) { add_at(to + n * 128, as_four(four)); });
            } else {
                each(sums, [&](int n, const float *four) { __stcg(to + n * 128, as_four(four)); });
            }
            if (threadIdx.x % 128 == 0) ring.untold[group()] = part;
            return false;
        }
        if (where != IN_PLACE) {
            meet();
            look(true);
            meet();
        }
        if (where == ASIDE) add_aside();
        if (!is_done(HALF_DONE)) {
            each(sums, [&](int n, float *four) {
                add_at(to + n * 128, as_four(four));
                four[0] = four[1] = four[2] = four[3] = NONE;
            });
            meet();
            if (threadIdx.x % 128 == 0) {
                asm volatile("atom.acq_rel.gpu.global.or.b32 %0, [%1], %2;"
                             : "=r"(ring.done[group()])
                             : "l"(done(common, part)), "r"(HALF_DONE)
                             : "memory");
            }
            meet();
            if (!is_done(HALF_DONE)) return false;
        }
        // For the next call.
        if (threadIdx.x % 128 == 0) *done(common, part) = 0;
        add_up(sums);
        return true;
    }

    // Adds the first segment's sums, which were put aside, where they belong.
    __device__ void add_aside() const {
        constexpr int AT_ONCE = 4;
        const float4 *from = at(part);
        float4 *to = of_half();
#pragma unroll
        for (int n = 0; n < FOURS; n += AT_ONCE) {
            float4 fours[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) fours[i] = load(from + (n + i) * 128);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) add_at(to + (n + i) * 128, fours[i]);
        }
    }

    // Adds those of both halves to the sums.
    __device__ void add_up(Sums &sums) const {
        constexpr int AT_ONCE = 4;
        const float4 *half = of_half(), *other = of_other();
#pragma unroll
        for (int n = 0; n < FOURS; n += AT_ONCE) {
            float4 halves[AT_ONCE][2];
#pragma unroll
            for (int i = 0; i < AT_ONCE * 2; i++) halves[i / 2][i % 2] = load((i % 2 == 0 ? half : other) + (n + i / 2) * 128);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                float *four = &sums[(n + i) / (S::PART / 8)][(n + i) % (S::PART / 8) * 4];
                float4 sum = add_halves(add(halves[i][0], as_four(four)), halves[i][1]);
                four[0] = sum.x, four[1] = sum.y, four[2] = sum.z, four[3] = sum.w;
            }
        }
    }
};

}  // namespace hopper
}  // namespace pagoda
