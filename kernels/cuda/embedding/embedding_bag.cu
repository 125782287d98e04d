// Looks keys up in an embedding table and combines their rows into one vector for each slot, in one launch.
//
// A slot's rows are added one after the other, in the order of its keys: the sums are those of the CPU, to the bit.
// A row stays in registers or shared memory until the set's state shows that it was read whole.

#include "common/mirrored.cuh"
#include "embedding/embedding_table.cuh"

namespace pagoda {

// src/cuda/embedding/bag.rs has the same numbers.
constexpr int SUM = 0;
constexpr int MEAN = 1;

struct Bag {
    const int64_t *keys;
    const int64_t *offsets;    // [slots + 1]: where the keys of each slot begin; null: each key is a slot
    float *vectors;            // [slots, dim]
    const float *default_row;  // what a missing key counts as
    uint8_t *found;            // null: not wanted
    int *missing;              // the places of missing keys, in no order
    int64_t *missing_keys;     // the keys there, in the same order; null: not wanted
    int *missing_count;
    unsigned *progress;        // [2]: keys listed, blocks done; 0 before and after
    const int *given;          // [count]: which of given_rows a key has; -1: the table's row; null: -1 for all
    const float *given_rows;   // [given_count, dim]
    int64_t no_key;            // a key that is none: zeros, neither found nor missing
    int has_no_key;
    int given_count;
    int count;
    int slots;
    int combiner;
};
PAGODA_MIRRORED(embedding, Bag)

// The keys of a slot. Offsets are clamped: no value in them leads outside the keys.
struct Keys {
    int64_t first = 0, end = 0;

    __device__ Keys(const Bag &call, int64_t slot) {
        if (slot >= call.slots) return;
        int64_t count = call.count;
        first = call.offsets == nullptr ? slot : max(min(__ldg(call.offsets + slot), count), int64_t(0));
        end = call.offsets == nullptr ? slot + 1 : max(min(__ldg(call.offsets + slot + 1), count), first);
    }
    __device__ float divisor(int combiner) const {
        double count = static_cast<double>(end - first);
        return static_cast<float>(combiner == SUM ? 1.0 : combiner == MEAN ? count : sqrt(count));
    }
};

// Which of the given rows a key has; -1: none.
__device__ inline int given_of(const Bag &call, int64_t place) {
    int given = call.given == nullptr ? -1 : __ldg(call.given + place);
    return given < call.given_count ? given : -1;
}

// Whether a key is none.
__device__ inline bool is_none(const Bag &call, int64_t key) { return call.has_no_key != 0 && key == call.no_key; }

// Lists a missing key. Slots that overlap could list more than there is room for.
__device__ inline void list(const Bag &call, int64_t place, unsigned at) {
    if (at >= static_cast<unsigned>(call.count)) return;
    call.missing[at] = static_cast<int>(place);
    if (call.missing_keys != nullptr) call.missing_keys[at] = __ldg(call.keys + place);
}

// The last block writes how many keys are missing, and resets the counters.
__device__ inline void tell(const Bag &call) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence();
    if (atomicAdd(call.progress + 1, 1) != gridDim.x - 1) return;
    __threadfence();
    *call.missing_count = static_cast<int>(min(atomicExch(call.progress, 0), static_cast<unsigned>(call.count)));
    call.progress[1] = 0;
}

// A row in a warp's registers, PIECES for each lane.
template <class T, int PIECE, int PIECES> struct Row {
    Piece<T, PIECE> pieces[PIECES];

    __device__ static int at(int piece) { return (piece * LANES + static_cast<int>(threadIdx.x % LANES)) * PIECE; }
    __device__ void load(const T *from, int dim) {
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
            pieces[piece] = {};
            if (at(piece) < dim) pieces[piece].load(from + at(piece));
        }
    }
    // Reads the row of one key, with retries; returns whether it is there.
    __device__ bool insist(const Table &table, int64_t key) {
        int lane = threadIdx.x % LANES;
        uint64_t number = set_of(table, key);
        Set *set = table.sets + number;
        for (int attempt = 0; attempt < PATIENCE; attempt++) {
            uint32_t state = __shfl_sync(~0u, load_relaxed(&set->state), 0);
            asm volatile("fence.acq_rel.gpu;" ::: "memory");
            uint64_t word = load_relaxed(reinterpret_cast<const uint64_t *>(set) + lane % READERS);
            int way = way_of(word, key, state, lane);
            if (way >= 0) load(static_cast<const T *>(table.rows) + (number * WAYS + way) * table.dim, table.dim);
            asm volatile("fence.acq_rel.gpu;" ::: "memory");
            __syncwarp();
            if (__all_sync(~0u, unchanged(state, load_relaxed(&set->state)))) {
                if (way >= 0 && lane == 0) touch(set, load_relaxed(&set->freshness), way);
                return way >= 0;
            }
            __nanosleep(100);
        }
        return false;
    }
};

template <int PIECE, int PIECES> struct Sums {
    float sums[PIECES][PIECE];

    // From the first row, not from 0: a single row comes out to the bit.
    template <class Value>
    __device__ void add(bool first, Value value) {
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
#pragma unroll
            for (int i = 0; i < PIECE; i++) {
                float number = value(piece, i);
                sums[piece][i] = first ? number : __fadd_rn(sums[piece][i], number);
            }
        }
    }
};

// Rows that fit into a warp's registers; one warp for each slot.
template <class T, int PIECE, int PIECES>
__device__ void bag(const Table &table, const Bag &call) {
    int lane = threadIdx.x % LANES, dim = table.dim;
    int64_t slot = static_cast<int64_t>(blockIdx.x) * (THREADS / LANES) + threadIdx.x / LANES;
    if (slot < call.slots) {
        Keys keys(call, slot);
        Sums<PIECE, PIECES> sums = {};
        auto add_numbers = [&](bool first, const float *numbers) {
            sums.add(first, [&](int piece, int i) {
                int at = Row<T, PIECE, PIECES>::at(piece) + i;
                return at < dim ? __ldg(numbers + at) : 0.0f;
            });
        };
        for (int64_t at = keys.first; at < keys.end; at += AT_ONCE) {
            // The eight lanes of a group find the row of one key; then all lanes read the rows of all groups.
            int64_t place = at + lane / READERS;
            bool there = place < keys.end;
            int64_t key = there ? __ldg(call.keys + place) : 0;
            int given = there ? given_of(call, place) : -1;
            uint64_t number = set_of(table, key);
            Set *set = table.sets + number;
            uint64_t word = load_relaxed(reinterpret_cast<const uint64_t *>(set) + lane % READERS);
            uint64_t head = __shfl_sync(~0u, word, 0, READERS);
            int way = way_of(word, key, state_of(head), lane);
            if (!there || given >= 0 || is_none(call, key) || (state_of(head) & WRITING) != 0) way = -1;
            Row<T, PIECE, PIECES> rows[AT_ONCE];
#pragma unroll
            for (int group = 0; group < AT_ONCE; group++) {
                int from = __shfl_sync(~0u, way, group * READERS);
                uint64_t row = __shfl_sync(~0u, number, group * READERS) * WAYS + from;
                if (from >= 0) rows[group].load(static_cast<const T *>(table.rows) + row * dim, dim);
            }
            // The words of a set are not read atomically: the key is read again, after the state.
            uint64_t again = way < 0 ? 0 : load_relaxed(reinterpret_cast<const uint64_t *>(&set->keys[way]));
            asm volatile("fence.acq_rel.gpu;" ::: "memory");
            __syncwarp();
            bool whole = unchanged(state_of(head), load_relaxed(&set->state)) &&
                         (way < 0 || again == static_cast<uint64_t>(key));
            whole = __shfl_sync(~0u, whole, 0, READERS);
            if (whole && way >= 0 && lane % READERS == 0) touch(set, freshness_of(head), way);
            uint32_t absent = 0, none = 0;
#pragma unroll
            for (int group = 0; group < AT_ONCE; group++) {
                int from = group * READERS;
                bool first = at + group == keys.first;
                int of_given = __shfl_sync(~0u, given, from);
                bool here = __shfl_sync(~0u, way, from) >= 0;
                bool good = __shfl_sync(~0u, whole, from);
                int64_t of_key = __shfl_sync(~0u, key, from);
                if (at + group >= keys.end) continue;
                if (of_given >= 0) {
                    add_numbers(first, call.given_rows + static_cast<int64_t>(of_given) * dim);
                    continue;
                }
                if (is_none(call, of_key)) {
                    sums.add(first, [](int, int) { return 0.0f; });
                    none |= 1u << group;
                    continue;
                }
                if (!good) here = rows[group].insist(table, of_key);
                if (here) {
                    sums.add(first, [&](int piece, int i) { return rows[group].pieces[piece].value(i); });
                } else {
                    add_numbers(first, call.default_row);
                    absent |= 1u << group;
                }
            }
            if (lane < AT_ONCE && at + lane < keys.end && call.found != nullptr)
                call.found[at + lane] = ((absent | none) >> lane & 1) == 0;
            if (absent == 0) continue;
            unsigned before = 0;
            if (lane == 0) before = atomicAdd(call.progress, __popc(absent));
            before = __shfl_sync(~0u, before, 0);
            if (lane < AT_ONCE && (absent >> lane & 1) != 0)
                list(call, at + lane, before + __popc(absent & ((1u << lane) - 1)));
        }
        float divisor = keys.divisor(call.combiner);
        float *to = call.vectors + slot * dim;
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
            int at = Row<T, PIECE, PIECES>::at(piece);
            if (at >= dim) break;
            float numbers[PIECE];
#pragma unroll
            for (int i = 0; i < PIECE; i++)
                numbers[i] = keys.first == keys.end ? 0.0f : __fdiv_rn(sums.sums[piece][i], divisor);
            if constexpr (PIECE == 4) {
                __stcs(reinterpret_cast<float4 *>(to + at), make_float4(numbers[0], numbers[1], numbers[2], numbers[3]));
            } else {
                __stcs(to + at, numbers[0]);
            }
        }
    }
    tell(call);
}

// Rows of any length that fit into shared memory; one block for each slot.
template <class T>
__device__ void bag_long(const Table &table, const Bag &call) {
    extern __shared__ unsigned char memory[];
    __shared__ uint32_t state;
    __shared__ int way;
    __shared__ bool whole;
    T *row = reinterpret_cast<T *>(memory);
    int dim = table.dim;
    Keys keys(call, blockIdx.x);
    float *to = call.vectors + static_cast<int64_t>(blockIdx.x) * dim;
    auto add = [&](bool first, auto value) {
        for (int at = threadIdx.x; at < dim; at += THREADS) to[at] = first ? value(at) : __fadd_rn(to[at], value(at));
    };
    for (int64_t place = keys.first; place < keys.end; place++) {
        bool first = place == keys.first;
        int given = given_of(call, place);
        if (given >= 0) {
            const float *numbers = call.given_rows + static_cast<int64_t>(given) * dim;
            add(first, [&](int at) { return __ldg(numbers + at); });
            if (threadIdx.x == 0 && call.found != nullptr) call.found[place] = 1;
            continue;
        }
        int64_t key = __ldg(call.keys + place);
        if (is_none(call, key)) {
            add(first, [](int) { return 0.0f; });
            if (threadIdx.x == 0 && call.found != nullptr) call.found[place] = 0;
            continue;
        }
        uint64_t number = set_of(table, key);
        Set *set = table.sets + number;
        bool good = false;
        for (int attempt = 0; attempt < PATIENCE && !good; attempt++) {
            if (threadIdx.x < LANES) {
                uint32_t seen = __shfl_sync(~0u, load_relaxed(&set->state), 0);
                asm volatile("fence.acq_rel.gpu;" ::: "memory");
                uint64_t word = load_relaxed(reinterpret_cast<const uint64_t *>(set) + threadIdx.x % READERS);
                int of_key = way_of(word, key, seen, threadIdx.x);
                if (threadIdx.x == 0) {
                    state = seen;
                    way = of_key;
                }
            }
            __syncthreads();
            if (way >= 0) {
                const T *from = static_cast<const T *>(table.rows) + (number * WAYS + way) * dim;
                for (int at = threadIdx.x; at < dim; at += THREADS) {
                    Piece<T, 1> piece;
                    piece.load(from + at);
                    *reinterpret_cast<decltype(piece.bits) *>(row + at) = piece.bits;
                }
            }
            asm volatile("fence.acq_rel.gpu;" ::: "memory");
            __syncthreads();
            if (threadIdx.x == 0) {
                whole = unchanged(state, load_relaxed(&set->state));
                if (whole && way >= 0) touch(set, load_relaxed(&set->freshness), way);
            }
            __syncthreads();
            good = whole;
            if (!good) __nanosleep(100);
        }
        bool here = good && way >= 0;
        if (here) add(first, [&](int at) { return static_cast<float>(row[at]); });
        else add(first, [&](int at) { return __ldg(call.default_row + at); });
        if (threadIdx.x == 0) {
            if (call.found != nullptr) call.found[place] = here;
            if (!here) list(call, place, atomicAdd(call.progress, 1));
        }
        // The next key's row overwrites this one, and its way too.
        __syncthreads();
    }
    if (blockIdx.x < call.slots) {
        float divisor = keys.divisor(call.combiner);
        for (int at = threadIdx.x; at < dim; at += THREADS)
            to[at] = keys.first == keys.end ? 0.0f : __fdiv_rn(to[at], divisor);
    }
    tell(call);
}

#define PAGODA_BAG(name, how)                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        bag_##name(const __grid_constant__ Table table, const __grid_constant__ Bag call) {                             \
        how(table, call);                                                                                               \
    }
PAGODA_BAG(f32_128, (bag<float, 4, 1>))
PAGODA_BAG(f32_256, (bag<float, 4, 2>))
PAGODA_BAG(f32_512, (bag<float, 4, 4>))
PAGODA_BAG(f32_odd, (bag<float, 1, 4>))
PAGODA_BAG(f32_long, (bag_long<float>))
PAGODA_BAG(f16_128, (bag<__half, 4, 1>))
PAGODA_BAG(f16_256, (bag<__half, 4, 2>))
PAGODA_BAG(f16_512, (bag<__half, 4, 4>))
PAGODA_BAG(f16_odd, (bag<__half, 1, 4>))
PAGODA_BAG(f16_long, (bag_long<__half>))

}  // namespace pagoda
