// How the work over the keys of users that are split is shared out where their sums are added up in device memory.
//
// A part is some segments of the keys of a block of rows, for one head; an item of a user who is not split is taken as a part too,
// with all keys. Blocks take parts in their order, by a counter. There is a slot for the sums of either half of the segments, and
// whoever comes last reads both and writes the output.
//
// Where there are few blocks of rows for the chip, a part is one segment: a warpgroup leaves its sums over a half's first segment in
// the slot, and who has the second one, which is taken later, adds his; if he knows in time that the other half is done he adds up
// without leaving his. Otherwise one part has a run of all segments but the last, or of all: it leaves the sums of one and goes on
// with the next, with the same queries and without a gap in the tiles. The last segments are for those who find no run. Who has a
// run may wait for the last segment of it only if that was begun: it is taken after the run. Otherwise whoever has it waits.
#pragma once

#include "common/attention_sm90/pipeline.cuh"

namespace pagoda {
namespace sm90 {

// What is known of a warpgroup's rows: the first part of the first half is done, and of the second one; all of a half; of a block
// with a run, that the part behind it is taken, or that the run has ended before.
constexpr unsigned FIRST_DONE = 1, HALF_DONE = 4, TAKEN = 8, ENDED = 16;

// How many of a block's parts, the last ones, are taken in the order of their size, whole blocks of rows first: the less is
// left to do when some find nothing more.
constexpr int LAST_PARTS = 2;

// What the blocks share in device memory: counters, which are 0 before and after a call, and slots, a half of a block of rows
// each.
struct Common {
    unsigned *next;   // how many items were taken
    unsigned *ended;  // how many blocks have found nothing more to do
    unsigned *done;   // what is done of each warpgroup's rows
    float *sums;
    int64_t blocks;   // of rows that there is memory for

    __device__ Common(unsigned *counters, void *scratch, int64_t blocks)
        : next(counters), ended(counters + 1), done(counters + 4), sums(static_cast<float *>(scratch)), blocks(blocks) {}

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
        int seen = S::Variant::Reach::of(call, user, 0, user.rows - 1).first;
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
    int head, block;
    int number;  // of the block, over all users and heads; -1: all keys
    Role role;
    int segment, count;
};

// All parts of a call, in their order: the blocks of rows of users who are not split; the first parts of all others, then the
// second ones, or the runs and then the last segments; of each the whole blocks first and then the users' last ones, which have
// fewer rows. (With parts of one segment of a block one behind the other those who add up in the middle of a call are late with
// what they take next: 10 % slower.)
template <class S> struct Parts {
    enum Blocks { ALONE, WHOLE, LAST };  // of users who are not split; of others, whole ones and their last

    int rows;                // computed ones of user number `lane`, those of one who is split as their complement
    int alone, whole, last;  // how many there are, of one head
    int run;                 // segments that one has behind one another

    __device__ explicit Parts(const Call &call) : rows(rows_of(call, threadIdx.x & 31)), alone(0), whole(0), last(0) {
        for (int base = 0; base < call.users; base += 32) {
            int own = base == 0 ? rows : rows_of(call, base + (threadIdx.x & 31));
            alone += __reduce_add_sync(~0u, blocks<ALONE>(own));
            whole += __reduce_add_sync(~0u, blocks<WHOLE>(own));
            last += __reduce_add_sync(~0u, blocks<LAST>(own));
        }
        // As many as take no longer than one at a time would: then there are SEGMENTS * all / gridDim.x rounds of them, rounded up.
        unsigned all = (whole + last) * call.heads, each = (all + gridDim.x - 1) / gridDim.x;
        auto fits = [&](unsigned segments) { return (segments * each - 1) * gridDim.x < SEGMENTS * all; };
        run = all == 0 ? 1 : fits(SEGMENTS) ? SEGMENTS : fits(SEGMENTS - 1) ? SEGMENTS - 1 : 1;
    }

    __device__ static int rows_of(const Call &call, int user) {
        if (user >= call.users) return 0;
        const int *pages;
        int page_count, rows = pagoda::rows_of(call, user), cached = cached_of(call, user, rows, pages, page_count);
        int computed = computed_of(call, user, rows);
        return is_split(rows, cached + rows) ? ~computed : computed;
    }

    template <Blocks WHICH> __device__ static int blocks(int rows) {
        unsigned all = rows < 0 ? ~rows : rows;
        if (WHICH == ALONE) return rows < 0 ? 0 : (all + S::ROWS - 1) / S::ROWS;
        return rows >= 0 ? 0 : WHICH == WHOLE ? all / S::ROWS : all % S::ROWS > 0;
    }

    // The block `index` of those of a kind.
    template <Blocks WHICH> __device__ Part find(const Call &call, unsigned index) const {
        unsigned lane = threadIdx.x & 31, before = 0;
        for (int base = 0; base < call.users; base += 32) {
            int own = base == 0 ? rows : rows_of(call, base + lane);
            unsigned each = blocks<WHICH>(own), sum = each * call.heads;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                unsigned other = __shfl_up_sync(~0u, sum, step);
                if (lane >= step) sum += other;
            }
            unsigned after = __ballot_sync(~0u, before + sum > index);
            if (after == 0) {
                before += __shfl_sync(~0u, sum, 31);
                continue;
            }
            int owner = __ffs(after) - 1;
            each = __shfl_sync(~0u, each, owner);
            unsigned rest = index - before - __shfl_sync(~0u, sum, owner) + each * call.heads, head = rest / each;
            Part part{base + owner, static_cast<int>(head), static_cast<int>(rest - head * each), -1};
            // Of those who are not split the blocks with the most keys come first.
            if (WHICH == ALONE) part.block = each - 1 - part.block;
            if (WHICH == LAST) part.block = ~__shfl_sync(~0u, own, owner) / S::ROWS;
            if (WHICH != ALONE) part.number = static_cast<int>(index + (WHICH == LAST ? whole * call.heads : 0));
            return part;
        }
        return {-1};
    }

    __device__ Part at(const Call &call, unsigned index) const {
        constexpr int BEFORE = SEGMENTS - LAST_PARTS;
        unsigned wholes = whole * call.heads, lasts = last * call.heads, all = wholes + lasts;
        if (index < alone * call.heads) return find<ALONE>(call, index);
        index -= alone * call.heads;
        int number = 0;
        if (run > 1) {
            for (; number < SEGMENTS - run + 1 && index >= all; number++) index -= all;
            if (number > SEGMENTS - run) return {-1};
        } else if (index < BEFORE * all) {
            for (; index >= all; number++) index -= all;
        } else {
            // The last ones in the order of their size.
            index -= BEFORE * all;
            number = BEFORE;
            if (index < LAST_PARTS * wholes) {
                for (; index >= wholes; number++) index -= wholes;
            } else {
                index -= LAST_PARTS * wholes;
                for (; number < SEGMENTS && index >= lasts; number++) index -= lasts;
                if (number == SEGMENTS) return {-1};
                index += wholes;
            }
        }
        Part part = index < wholes ? find<WHOLE>(call, index) : find<LAST>(call, index - wholes);
        if (run > 1) {
            part.role = run == SEGMENTS ? Role::All : number == 0 ? Role::Run : Role::Last;
            part.segment = number == 0 ? 0 : run;
            part.count = number == 0 ? run : 1;
        } else {
            part.role = number < 2 ? Role::First : Role::Second;
            part.segment = number % 2 * 2 + number / 2;
            part.count = 1;
        }
        return part;
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
    int slot;
    Role role;

    static constexpr float NONE = -0.f;  // whatever it is added to stays as it is

    __device__ unsigned first_done() const { return FIRST_DONE << slot % 2; }

    __device__ static int group() { return threadIdx.x / 128; }
    __device__ static void meet() { named_wait(ARRIVED + group(), 128); }

    __device__ static unsigned *done(const Common &common, int slot) { return common.done + slot / 2 * S::GROUPS + group(); }

    // Where the thread's sums are in a slot.
    __device__ float4 *at(int slot) const {
        return reinterpret_cast<float4 *>(common.sums) + static_cast<int64_t>(slot) * A_SLOT + group() * (16 * S::D) +
               threadIdx.x % 128;
    }

    // Tells the others of the part that was left in its slot before, if there is one, when all of the warpgroup have met since.
    // Not at once where that can be helped: who tells waits until what was written has arrived.
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
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(what) : "l"(done(common, slot)) : "memory");
        } while (wait && (what & first_done()) == 0);
        ring.done[group()] = what;
    }

    // The same, and says something.
    __device__ void look_and_say(unsigned what) const {
        if (threadIdx.x % 128 != 0) return;
        asm volatile("atom.acq_rel.gpu.global.or.b32 %0, [%1], %2;"
                     : "=r"(ring.done[group()])
                     : "l"(done(common, slot)), "r"(what)
                     : "memory");
    }

    // The end of a run, unless the segment behind it is taken.
    __device__ void look_and_end() const {
        if (threadIdx.x % 128 != 0) return;
        asm volatile("atom.acq_rel.gpu.global.cas.b32 %0, [%1], 0, %2;"
                     : "=r"(ring.done[group()])
                     : "l"(done(common, slot)), "r"(ENDED)
                     : "memory");
    }

    // When every warpgroup of the block has begun with the part: nothing keeps it from its end any more, and others may wait for it.
    __device__ void say_taken() const {
        if (role != Role::Last || threadIdx.x % 128 != 0) return;
        asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(done(common, slot)), "r"(TAKEN) : "memory");
    }

    // In time for `leave`.
    __device__ void look_early() const {
        if (role == Role::Second || role == Role::Last) look(false);
        if (role == Role::Run) look_and_end();
    }

    __device__ bool is_done(unsigned what) const { return (ring.done[group()] & what) != 0; }

    // Leaves the sums of a run's segment that is not its last, and zeros in their place.
    __device__ void put(Sums &sums, int segment) const {
        float4 *to = at(slot & ~1 | segment / 2);
        if (segment % 2 == 0) {
            each(sums, [&](int n, const float *four) { __stcg(to + n * 128, as_four(four)); });
        } else {
            each(sums, [&](int n, const float *four) { add_at(to + n * 128, as_four(four)); });
        }
        each(sums, [&](int, float *four) { four[0] = four[1] = four[2] = four[3] = 0; });
    }

    // Leaves the sums. True where the others' are all there already: then they become those of all.
    __device__ bool leave(Sums &sums, bool looked) const {
        float4 *to = at(slot);
        bool second = role != Role::First, joined = role != Role::Second;
        if (role == Role::Run || role == Role::Last) {
            if (!looked && role == Role::Run) look_and_end();
            if (!looked && role == Role::Last) look_and_say(TAKEN);
            meet();
            second = role == Role::Run ? is_done(TAKEN) && !is_done(ENDED) : is_done(ENDED);
        }
        if (!second) {
            each(sums, [&](int n, const float *four) { __stcg(to + n * 128, as_four(four)); });
            if (threadIdx.x % 128 == 0) ring.untold[group()] = slot;
            if (role != Role::First) {
                // At once: the block's other warpgroup may be the second, and wait for one whose other warpgroup waits for this.
                meet();
                tell(common, ring);
            }
            return false;
        }
        if (role != Role::All) {
            meet();
            bool there = looked && is_done(first_done());
            // No one looks again before all have seen this.
            meet();
            if (!there) {
                look(true);
                meet();
            }
            if (!joined && !is_done(HALF_DONE)) {
                each(sums, [&](int n, float *four) {
                    add_at(to + n * 128, as_four(four));
                    four[0] = four[1] = four[2] = four[3] = NONE;
                });
                meet();
                look_and_say(HALF_DONE);
                meet();
                if (!is_done(HALF_DONE)) return false;
            }
            // For the next call.
            if (threadIdx.x % 128 == 0) *done(common, slot) = 0;
        }
        add_up(sums);
        return true;
    }

    // Adds those of both halves to the sums.
    __device__ void add_up(Sums &sums) const {
        constexpr int AT_ONCE = FOURS < 8 ? FOURS : 8;
        const float4 *half = at(slot), *other = at(slot ^ 1);
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

}  // namespace sm90
}  // namespace pagoda
