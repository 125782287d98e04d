// Lookup of keys in an embedding table, row by row, and insertion of rows.

#include "common/mirrored.cuh"
#include "embedding/embedding_table.cuh"

namespace pagoda {

// Steps of a warp, each of AT_ONCE keys: while the rows of one step are stored, those of the next are loaded.
constexpr int STEPS = 4;
// Keys of a block.
constexpr int TILE = THREADS / LANES * AT_ONCE * STEPS;

struct Lookup {
    const int64_t *keys;
    float *output;             // [count, dim]
    const float *default_row;  // what a missing key gets; null: its output is left as it is
    uint8_t *found;            // null: not wanted
    int *missing;              // the places of missing keys, in no order
    int64_t *missing_keys;     // the keys there, in the same order; null: not wanted
    int *missing_count;
    unsigned long long *progress;  // 0 before and after
    int count;
};
PAGODA_MIRRORED(embedding, Lookup)

struct Put {
    const int64_t *keys;
    const int *places;         // row i is of key places[i]; null: of key i
    const int *place_count;    // how many places there are, if fewer than count; null: count
    const void *rows;          // [count, dim]
    const uint64_t *versions;  // null: all 0
    const uint8_t *deleted;    // rows to be removed; null: none
    unsigned long long *row_count;  // rows that the table has
    int key_count;
    int count;
    int only_present;          // 1: keys that the table does not have are passed over
};
PAGODA_MIRRORED(embedding, Put)

// A warp copies the row of one key, with retries; returns whether it is there.
template <class T, int PIECE>
__device__ bool copy_row(const Table &table, int64_t key, float *to) {
    int lane = threadIdx.x % LANES;
    uint64_t number = set_of(table, key);
    Set *set = table.sets + number;
    for (int attempt = 0; attempt < PATIENCE; attempt++) {
        uint32_t state = load_relaxed(&set->state);
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
        uint64_t word = load_relaxed(reinterpret_cast<const uint64_t *>(set) + lane % READERS);
        state = __shfl_sync(~0u, state, 0);
        int way = way_of(word, key, state, lane);
        if (way >= 0) {
            const T *row = static_cast<const T *>(table.rows) + (number * WAYS + way) * table.dim;
#pragma unroll 4
            for (int at = lane * PIECE; at < table.dim; at += LANES * PIECE) {
                Piece<T, PIECE> piece;
                piece.load(row + at);
                piece.store(to + at);
            }
        }
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

// Keys of a block that were not found: missing ones, and those whose set changed during the lookup.
struct Rest {
    int places[TILE];
    int changed_places[TILE];
    int missing;
    int changed;
    int before;

    __device__ void begin() {
        if (threadIdx.x == 0) missing = changed = 0;
        __syncthreads();
    }

    __device__ void add_missing(int place) { places[atomicAdd(&missing, 1)] = place; }
    __device__ void add_changed(int place) { changed_places[atomicAdd(&changed, 1)] = place; }

    // Retries the keys whose set changed, writes the default row for missing keys, and lists them.
    template <class T, int PIECE>
    __device__ void end(const Table &table, const Lookup &call) {
        int lane = threadIdx.x % LANES;
        __syncthreads();
        for (int i = threadIdx.x / LANES; i < changed; i += THREADS / LANES) {
            int place = changed_places[i];
            float *to = call.output + static_cast<int64_t>(place) * table.dim;
            bool hit = copy_row<T, PIECE>(table, __ldg(call.keys + place), to);
            if (lane == 0 && call.found != nullptr) call.found[place] = hit;
            if (lane == 0 && !hit) add_missing(place);
        }
        __syncthreads();
        // One atomic counts the missing keys and the blocks that are done. The last block writes the total and resets
        // it.
        if (threadIdx.x == 0) {
            unsigned long long sum = atomicAdd(call.progress, (1ull << 32) + missing);
            before = static_cast<int>(sum & 0xffffffff);
            if (sum >> 32 == gridDim.x - 1) {
                *call.missing_count = before + missing;
                *call.progress = 0;
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < missing; i += THREADS) {
            call.missing[before + i] = places[i];
            if (call.missing_keys != nullptr) call.missing_keys[before + i] = __ldg(call.keys + places[i]);
        }
        if (call.default_row == nullptr) return;
        for (int i = threadIdx.x / LANES; i < missing; i += THREADS / LANES) {
            float *to = call.output + static_cast<int64_t>(places[i]) * table.dim;
            for (int at = lane; at < table.dim; at += LANES) to[at] = __ldg(call.default_row + at);
        }
    }
};

// Rows of any length, one by one.
template <class T, int PIECE>
__device__ void lookup_one_by_one(const Table &table, const Lookup &call) {
    __shared__ Rest rest;
    rest.begin();
    int first = blockIdx.x * TILE + threadIdx.x / LANES * STEPS * AT_ONCE;
    for (int place = first; place < min(first + STEPS * AT_ONCE, call.count); place++) {
        float *to = call.output + static_cast<int64_t>(place) * table.dim;
        bool hit = copy_row<T, PIECE>(table, __ldg(call.keys + place), to);
        if (threadIdx.x % LANES != 0) continue;
        if (call.found != nullptr) call.found[place] = hit;
        if (!hit) rest.add_missing(place);
    }
    rest.end<T, PIECE>(table, call);
}

// Rows of up to four elements for each of ROW_LANES lanes. The eight lanes of a group find the row of one key; then
// ROW_LANES lanes copy it.
template <class T, int ROW_LANES>
__device__ void lookup(const Table &table, const Lookup &call) {
    constexpr int PIECE = 4;
    constexpr int ROUNDS = AT_ONCE * ROW_LANES / LANES;
    constexpr int PER_ROUND = LANES / ROW_LANES;
    __shared__ Rest rest;
    rest.begin();

    int lane = threadIdx.x % LANES, dim = table.dim;
    int first = blockIdx.x * TILE + threadIdx.x / LANES * STEPS * AT_ONCE;
    int end = min(STEPS * AT_ONCE, call.count - first);
    const T *rows = static_cast<const T *>(table.rows);
    int at = lane % ROW_LANES * PIECE;
    bool has_piece = at < dim;

    // Keys, one a lane; then the sets of all of them.
    int64_t keys = lane < end ? __ldg(call.keys + first + lane) : 0;
    uint32_t numbers = static_cast<uint32_t>(set_of(table, keys));
    uint64_t words[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        uint32_t number = __shfl_sync(~0u, numbers, step * AT_ONCE + lane / READERS);
        words[step] = load_kept(reinterpret_cast<const uint64_t *>(table.sets + number) + lane % READERS);
    }

    Piece<T, PIECE> pieces[2][ROUNDS];
    int ways[2];         // of the group's key; -1 where it is not there
    uint64_t agains[2];  // its key, read again
    auto begin = [&](int step) {
        int of = step * AT_ONCE + lane / READERS;
        int64_t key = __shfl_sync(~0u, keys, of);
        uint32_t number = __shfl_sync(~0u, numbers, of);
        uint32_t state = state_of(__shfl_sync(~0u, words[step], 0, READERS));
        int way = way_of(words[step], key, state, lane);
        if (of >= end || (state & WRITING) != 0) way = -1;
        ways[step % 2] = way;
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
            int group = round * PER_ROUND + lane / ROW_LANES;
            int from = __shfl_sync(~0u, way, group * READERS);
            uint64_t place = static_cast<uint64_t>(__shfl_sync(~0u, number, group * READERS)) * WAYS + from;
            pieces[step % 2][round] = {};
            if (from >= 0 && has_piece) pieces[step % 2][round].load(rows + place * dim + at);
        }
        // The words of a set are not read atomically: the key is read again, after the state.
        agains[step % 2] = way < 0 ? 0 : load_relaxed(reinterpret_cast<const uint64_t *>(&table.sets[number].keys[way]));
    };
    auto finish = [&](int step) {
        // The state has to be read after the row. A load whose value was used has been performed, so a dependency on
        // the row orders the two; a fence would wait for the rows of the next step too. (No row has these bits in
        // every lane; if one had, there would be a fence.)
        uint32_t bits = 0;
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) bits ^= pieces[step % 2][round].mixed();
        if (__all_sync(~0u, bits == 0x9E3779B9u && agains[step % 2] == 0x9E3779B97F4A7C15ull))
            asm volatile("fence.acq_rel.gpu;" ::: "memory");
        int of = step * AT_ONCE + lane / READERS, way = ways[step % 2];
        int64_t key = __shfl_sync(~0u, keys, of);
        Set *set = table.sets + __shfl_sync(~0u, numbers, of);
        uint64_t head = __shfl_sync(~0u, words[step], 0, READERS);
        bool whole = unchanged(state_of(head), load_relaxed(&set->state)) &&
                     (way < 0 || agains[step % 2] == static_cast<uint64_t>(key));
        whole = __shfl_sync(~0u, whole, 0, READERS);
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
            int group = round * PER_ROUND + lane / ROW_LANES;
            bool good = __shfl_sync(~0u, whole && way >= 0, group * READERS);
            if (good && has_piece)
                pieces[step % 2][round].store(call.output + static_cast<int64_t>(first + step * AT_ONCE + group) * dim + at);
        }
        if (lane % READERS == 0 && of < end) {
            bool hit = whole && way >= 0;
            if (call.found != nullptr) call.found[first + of] = hit;
            if (hit) touch(set, freshness_of(head), way);
            else if (whole) rest.add_missing(first + of);
            else rest.add_changed(first + of);
        }
    };
    begin(0);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        if (step + 1 < STEPS) begin(step + 1);
        finish(step);
    }
    rest.end<T, PIECE>(table, call);
}

// The way for another row: an empty one, or else the least recently used. Among equals it rotates.
__device__ inline int victim(uint32_t state, uint32_t freshness) {
    uint32_t present = state >> PRESENT_SHIFT & PRESENT;
    int turn = state / CHANGE % WAYS, best = 0;
    uint32_t least = ~0u;
    for (int i = 0; i < WAYS; i++) {
        int way = (i + turn) % WAYS;
        uint32_t fresh = (present >> way & 1) == 0 ? 0 : 1 + (freshness >> (4 * way) & FRESH);
        if (fresh < least) {
            least = fresh;
            best = way;
        }
    }
    return best;
}

__device__ inline void make_freshest(uint32_t *freshness, int way) {
    uint32_t before = load_relaxed(freshness), assumed;
    do {
        assumed = before;
        uint32_t after = 0;
        for (int other = 0; other < WAYS; other++) {
            uint32_t fresh = assumed >> (4 * other) & FRESH;
            after |= (other == way ? FRESH : fresh > 1 ? fresh - 1 : fresh) << (4 * other);
        }
        before = atomicCAS(freshness, assumed, after);
    } while (before != assumed);
}

// One warp for each key.
template <class Unit>
__device__ void put(const Table &table, const Put &call, int element_bytes) {
    int lane = threadIdx.x % LANES;
    int warps = gridDim.x * (blockDim.x / LANES);
    int64_t row_units = static_cast<int64_t>(table.dim) * element_bytes / sizeof(Unit);
    int count = call.place_count == nullptr ? call.count : max(0, min(call.count, *call.place_count));
    for (int i = blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES; i < count; i += warps) {
        int place = call.places == nullptr ? i : call.places[i];
        if (place < 0 || place >= call.key_count) continue;
        int64_t key = call.keys[place];
        bool deleted = call.deleted != nullptr && call.deleted[i] != 0;
        uint64_t version = call.versions == nullptr ? 0 : call.versions[i];
        uint64_t number = set_of(table, key);
        Set *set = table.sets + number;
        // Loaded while the set is being locked.
        const Unit *from = static_cast<const Unit *>(call.rows) + i * row_units;
        Unit early = {};
        if (!deleted && lane < row_units) early = from[lane];
        if (lane == 0) {
            uint32_t state = load_relaxed(&set->state);
            while ((state & LOCKED) != 0 || atomicCAS(&set->state, state, state | LOCKED) != state) {
                __nanosleep(50);
                state = load_relaxed(&set->state);
            }
            __threadfence();
        }
        __syncwarp();
        uint64_t word = load_relaxed(reinterpret_cast<const uint64_t *>(set) + lane % READERS);
        uint64_t head = __shfl_sync(~0u, word, 0);
        uint32_t state = static_cast<uint32_t>(head) & ~LOCKED, freshness = static_cast<uint32_t>(head >> 32);
        int way = way_of(word, key, state, lane);
        bool here = way >= 0;
        bool passed = here ? table.versions[number * WAYS + way] > version : deleted || call.only_present != 0;
        if (passed) {
            __syncwarp();
            if (lane == 0) {
                __threadfence();
                store_relaxed(&set->state, state);
            }
            continue;
        }
        if (!here) way = victim(state, freshness);
        uint32_t bit = 1u << (PRESENT_SHIFT + way);
        if (lane == 0) {
            store_relaxed(&set->state, state | LOCKED | WRITING);
            __threadfence();
        }
        __syncwarp();
        uint64_t slot = number * WAYS + way;
        if (!deleted) {
            Unit *to = static_cast<Unit *>(table.rows) + slot * row_units;
            if (lane < row_units) to[lane] = early;
            for (int64_t at = lane + LANES; at < row_units; at += LANES) to[at] = from[at];
        }
        if (lane == 0) {
            if (!here) store_relaxed(reinterpret_cast<uint64_t *>(&set->keys[way]), static_cast<uint64_t>(key));
            table.versions[slot] = version;
            if (!here) make_freshest(&set->freshness, way);
            int more = (deleted ? 0 : 1) - (state & bit ? 1 : 0);
            if (more != 0) atomicAdd(call.row_count, static_cast<unsigned long long>(static_cast<long long>(more)));
        }
        __syncwarp();
        if (lane == 0) {
            __threadfence();
            uint32_t present = deleted ? state & ~bit : state | bit;
            store_relaxed(&set->state, present + CHANGE);
        }
    }
}

#define PAGODA_LOOKUP(name, how)                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                           \
        lookup_##name(const __grid_constant__ Table table, const __grid_constant__ Lookup call) {                       \
        how(table, call);                                                                                               \
    }
PAGODA_LOOKUP(f32_32, (lookup<float, 8>))
PAGODA_LOOKUP(f32_64, (lookup<float, 16>))
PAGODA_LOOKUP(f32_128, (lookup<float, 32>))
PAGODA_LOOKUP(f32_long, (lookup_one_by_one<float, 4>))
PAGODA_LOOKUP(f32_odd, (lookup_one_by_one<float, 1>))
PAGODA_LOOKUP(f16_32, (lookup<__half, 8>))
PAGODA_LOOKUP(f16_64, (lookup<__half, 16>))
PAGODA_LOOKUP(f16_128, (lookup<__half, 32>))
PAGODA_LOOKUP(f16_long, (lookup_one_by_one<__half, 4>))
PAGODA_LOOKUP(f16_odd, (lookup_one_by_one<__half, 1>))

#define PAGODA_PUT(width, unit)                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                           \
        put_##width(const __grid_constant__ Table table, const __grid_constant__ Put call, int element_bytes) {         \
        put<unit>(table, call, element_bytes);                                                                          \
    }
PAGODA_PUT(16, uint4)
PAGODA_PUT(4, uint32_t)
PAGODA_PUT(2, uint16_t)

}  // namespace pagoda
