// Split-KV by device memory (Mode::Parts): how the work over the keys of split users is shared out, and how its sums
// are added up.
//
// A part is some segments of the keys of a block of rows, for one head. An item of a user that is not split is a part
// too, with all keys. Thread blocks take parts in order, by a counter. Each block of rows has two slots in scratch
// memory, one for the sums of either half of its segments. The warpgroup that finishes last reads both and writes the
// output.
//
// Where there are few blocks of rows for the chip, a part is one segment. A warpgroup stores its sums over a half's
// first segment in the slot; the warpgroup with the second segment, which is taken later, adds its own. If that one
// sees in time that the other half is done, it keeps its sums in registers and writes the output. Otherwise one part is
// a run of all segments but the last, or of all: the warpgroup stores the sums of one segment and continues with the
// next, with the same queries and without a gap in the tiles. The last segments are left for blocks that find no run. A
// run may wait for its last segment only after that has started, because it is taken after the run; otherwise the last
// segment waits for the run.
#pragma once

#include "common/attention_sm90/pipeline.cuh"

namespace pagoda {
namespace sm90 {

// The state of a warpgroup's rows: the first part of the first half is done, or of the second half (FIRST_DONE << 1); a
// whole half is done; of a block with a run: the part behind the run is taken, or the run has ended before that.
constexpr unsigned FIRST_DONE = 1, HALF_DONE = 4, TAKEN = 8, ENDED = 16;

// How many of a block's parts, the last ones, are taken in the order of their size, whole blocks of rows first: the
// less is left to do when the first thread blocks find nothing more.
constexpr int LAST_PARTS = 2;

// What the thread blocks share in device memory: counters, which are 0 before and after a call, and slots, each for a
// half of a block of rows.
struct Common {
    unsigned *next;   // how many parts were taken
    unsigned *ended;  // how many thread blocks have found nothing more to do
    unsigned *done;   // the state of each warpgroup's rows
    float *sums;
    int64_t blocks;   // of rows that there is memory for

    __device__ Common(unsigned *counters, void *scratch, int64_t blocks)
        : next(counters), ended(counters + 1), done(counters + 4), sums(static_cast<float *>(scratch)), blocks(blocks) {}

    // The next free number, for the first lane of a warp. The thread blocks with smaller numbers are running: it is
    // safe to wait for them.
    __device__ unsigned take() const { return (threadIdx.x & 31) == 0 ? atomicAdd(next, 1u) : 0u; }

    // The thread block takes no more; the last one resets the counter. A whole warp calls it.
    __device__ void end() const {
        if ((threadIdx.x & 31) == 0 && atomicInc(ended, gridDim.x - 1) == gridDim.x - 1) atomicExch(next, 0u);
    }
};

// Where the keys of a user are cut. Pages, and behind them the user's own rows, are counted in stretches of
// SEGMENT_KEYS keys; the segments have as many, from the first on that any row sees.
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

// All parts of a call, in order: the blocks of rows of users that are not split; of all others the first parts and then
// the second ones, or the runs and then the last segments; of each the whole blocks first, then the users' last blocks,
// which have fewer rows. (If the parts of a block follow one another, warpgroups that add up in the middle of a call
// are late with their next part: 10 % slower.)
template <class S> struct Parts {
    enum Blocks { ALONE, WHOLE, LAST };  // of users that are not split; of the others, whole blocks and last ones

    int rows;                // computed rows of user number `lane`; of a split user the complement
    int alone, whole, last;  // how many there are, of one head
    int run;                 // segments of a run

    __device__ explicit Parts(const Call &call) : rows(rows_of(call, threadIdx.x & 31)), alone(0), whole(0), last(0) {
        for (int base = 0; base < call.users; base += 32) {
            int own = base == 0 ? rows : rows_of(call, base + (threadIdx.x & 31));
            alone += __reduce_add_sync(~0u, blocks<ALONE>(own));
            whole += __reduce_add_sync(~0u, blocks<WHOLE>(own));
            last += __reduce_add_sync(~0u, blocks<LAST>(own));
        }
        // As many segments as take no longer than one at a time would: that is SEGMENTS * all / gridDim.x rounds,
        // rounded up.
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
            // Of users that are not split the blocks with the most keys come first.
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

// The same in every mode, and as the L2 cache adds (red.add): denormals count as 0.
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

// The order in which sums are added up, everywhere: those of a half's segments one after the other, then those of the
// halves.
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

// The slot of a warpgroup's part, and what is done with the sums in it. Layout: the four sums that a thread has of
// eight columns (a pair in each of its two rows) are one float4; those of the 128 threads are side by side; then come
// the next eight columns. Little is kept in registers, of which the main loop has none to spare.
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

    // Publishes the part that was stored in its slot before, if there is one. All threads of the warpgroup have met
    // since. It is called late where possible: a release waits until the stores have arrived.
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

    // Reads the state of the warpgroup's rows; all of its threads have it after they have met. With `wait`: spins until
    // the first part of the half is done.
    __device__ void look(bool wait) const {
        if (threadIdx.x % 128 != 0) return;
        unsigned what;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(what) : "l"(done(common, slot)) : "memory");
        } while (wait && (what & first_done()) == 0);
        ring.done[group()] = what;
    }

    // The same, and sets flags.
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

    // Called when every warpgroup of the block has started the part: nothing can block it any more, so other parts may
    // wait for it.
    __device__ void say_taken() const {
        if (role != Role::Last || threadIdx.x % 128 != 0) return;
        asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(done(common, slot)), "r"(TAKEN) : "memory");
    }

    // Reads the state early, so that `leave` finds it.
    __device__ void look_early() const {
        if (role == Role::Second || role == Role::Last) look(false);
        if (role == Role::Run) look_and_end();
    }

    __device__ bool is_done(unsigned what) const { return (ring.done[group()] & what) != 0; }

    // Stores the sums of a run's segment that is not its last, and resets them.
    __device__ void put(Sums &sums, int segment) const {
        float4 *to = at(slot & ~1 | segment / 2);
        if (segment % 2 == 0) {
            each(sums, [&](int n, const float *four) { __stcg(to + n * 128, as_four(four)); });
        } else {
            each(sums, [&](int n, const float *four) { add_at(to + n * 128, as_four(four)); });
        }
        each(sums, [&](int, float *four) { four[0] = four[1] = four[2] = four[3] = 0; });
    }

    // Stores the sums. True if those of all other segments are there already: then the sums become those over all keys.
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
                // At once: another warpgroup of this block may wait for a block of which another warpgroup waits for
                // this part.
                meet();
                tell(common, ring);
            }
            return false;
        }
        if (role != Role::All) {
            meet();
            bool there = looked && is_done(first_done());
            // All threads have read the state before it is read again.
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

    // Adds the sums in the slots of both halves.
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
