// Cache policies: which slots the new tokens of a step overwrite, and what becomes of the slots' scores (sdk/src/kv/policy). A block
// has one head of one layer of one sequence. `plan_slots` changes nothing of what is known of the slots, so that a step that fails
// leaves it as it was; `commit_slots` takes the plan over once the step has run.
//
// The numbers that slots are ranked by have the bits that the CPU computes from the same scores: no fused multiply-add.

#include <cstdint>

#include "common/mirrored.cuh"

namespace pagoda {

enum Rule : int { RING = 0, LOWEST = 1 };

// The slots of one layer. What is known of them is [states, heads, len], by place.
struct PolicyLayer {
    int *positions;        // of the tokens; -1: none
    float *scores;         // null: no policy needs them, as the next two
    float *lengths;        // of values
    float *errors;         // of quantisation
    int *places;           // of slots, where a grace period moves them
    int *write_slots;      // [total_rows, heads]: the places of the step's tokens
    int *chosen;           // [total_rows, heads]: their slots
    int *token_pos;        // [sequences, heads, len]: the positions after the step's writes
    const float *weights;  // [sequences, heads, len]
    const float *norms;    // [total_rows, heads, 3]
    int len;
    int unused;
};
PAGODA_MIRRORED(llm, PolicyLayer)

// What a step does with one layer of one sequence. In the first step of a sequence nothing of what is known counts.
struct PolicyStep {
    int state;             // where its slots are known
    int row, rows;         // its rows in the batch
    int seen, first;       // tokens before the step, and those of the first one
    int rule;
    int kept;              // RING: slots at the beginning that stay
    int grace;
    float keep_initial;    // the part that the first eviction leaves alone, if the first step filled all slots
    int normalise;
    int by_length;         // weights count by the lengths of values
    int by_error;          // errors count against scores
    float score_share;
    int weighs;            // whether scores grow
};
PAGODA_MIRRORED(llm, PolicyStep)

struct PolicyCall {
    const PolicyLayer *layers;
    const PolicyStep *steps;  // [layers, sequences]
    int layer_count, sequences, heads, states, total_rows;
    int unused;
};
PAGODA_MIRRORED(llm, PolicyCall)

namespace policy {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int KEPT_KEYS = 4096;  // in shared memory

// The block's part of a call.
struct Part {
    const PolicyLayer &layer;
    const PolicyStep &step;
    int heads, head, sequence, len;
    int64_t known;  // where the head's slots begin in what is known
    int64_t now;    // and in the tensors of the step

    __device__ explicit Part(const PolicyCall &call)
        : layer(call.layers[blockIdx.x / call.heads / call.sequences]),
          step(call.steps[blockIdx.x / call.heads]),
          heads(call.heads),
          head(blockIdx.x % call.heads),
          sequence(blockIdx.x / call.heads % call.sequences),
          len(layer.len),
          known((static_cast<int64_t>(step.state) * heads + head) * len),
          now((static_cast<int64_t>(sequence) * heads + head) * len) {}

    __device__ bool is_valid(const PolicyCall &call) const {
        return step.state >= 0 && step.state < call.states && step.row >= 0 && step.rows >= 0 &&
               step.rows <= call.total_rows - step.row && step.grace >= 0 && step.grace < len && step.seen >= 0;
    }
    // Slots are in use from the first on, and stay so.
    __device__ int used() const { return min(step.seen, len); }
    __device__ int free_rows() const { return min(step.rows, len - used()); }
    __device__ int64_t of_row(int row) const { return static_cast<int64_t>(step.row + row) * heads + head; }
    __device__ int place(int slot) const {
        return step.grace > 0 && step.seen > 0 ? layer.places[known + slot] : slot;
    }
};

__device__ inline uint64_t lowest_of_block(uint64_t value) {
    __shared__ uint64_t of_warps[WARPS];
    for (int step = 16; step > 0; step /= 2) {
        uint64_t other = __shfl_xor_sync(~0u, static_cast<unsigned long long>(value), step);
        value = other < value ? other : value;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    value = of_warps[0];
    for (int i = 1; i < WARPS; i++) value = of_warps[i] < value ? of_warps[i] : value;
    return value;
}

// A number that compares as the f32 does, with -0 before 0 and NaN at the ends.
__device__ inline uint32_t order_of(float number) {
    int bits = __float_as_int(number);
    return static_cast<uint32_t>(bits ^ static_cast<int>(static_cast<uint32_t>(bits >> 31) >> 1)) ^ 0x80000000u;
}

__device__ inline float number_of(uint32_t order) {
    int bits = static_cast<int>(order ^ 0x80000000u);
    return __int_as_float(bits ^ static_cast<int>(static_cast<uint32_t>(bits >> 31) >> 1));
}

// The score of a place in a head whose slots begin at `known`, by age if it is asked for.
__device__ inline float score_at(const Part &part, int64_t known, int place) {
    float score = part.layer.scores[known + place];
    if (!part.step.normalise) return score;
    int entered = max(part.layer.positions[known + place], part.step.first - 1);
    return __fdiv_rn(score, __fsub_rn(static_cast<float>(part.step.seen), static_cast<float>(entered)));
}

// How numbers are scaled to between 0 and 1; equal ones to 0.
struct MinMax {
    float least, scale;

    // Of all slots of the sequence that can leave. NaN counts for neither end.
    template <class Number> __device__ MinMax(const Part &part, Number number) {
        float low = INFINITY, high = -INFINITY;
        int64_t first = part.known - static_cast<int64_t>(part.head) * part.len;
        for (int head = 0; head < part.heads; head++) {
            int64_t known = first + static_cast<int64_t>(head) * part.len;
            for (int slot = threadIdx.x; slot < part.len - part.step.grace; slot += THREADS) {
                int place = part.step.grace > 0 ? part.layer.places[known + slot] : slot;
                float own = number(known, place);
                low = fminf(low, own);
                high = fmaxf(high, own);
            }
        }
        least = number_of(static_cast<uint32_t>(lowest_of_block(order_of(low))));
        float most = -number_of(static_cast<uint32_t>(lowest_of_block(order_of(-high))));
        scale = most > least ? __fdiv_rn(1.0f, __fsub_rn(most, least)) : 0.0f;
    }
    __device__ float apply(float number) const { return __fmul_rn(__fsub_rn(number, least), scale); }
};

// Chooses the `count` slots with the lowest numbers, the lowest first, ties to the lowest slot.
template <class Number> __device__ void choose_lowest(const Part &part, int count, uint64_t *kept, Number number) {
    int open = part.len - part.step.grace, free = part.free_rows();
    auto key = [&](int slot) {
        return static_cast<uint64_t>(order_of(number(part.place(slot)))) << 32 | static_cast<uint32_t>(slot);
    };
    // A single one is found in the pass that would fill the memory.
    bool keeps = count > 1 && open <= KEPT_KEYS;
    if (keeps) {
        for (int slot = threadIdx.x; slot < open; slot += THREADS) kept[slot] = key(slot);
        __syncthreads();
    }
    uint64_t last = 0;
    for (int i = 0; i < count; i++) {
        uint64_t lowest = ~0ull;
        for (int slot = threadIdx.x; slot < open; slot += THREADS) {
            uint64_t own = keeps ? kept[slot] : key(slot);
            // Keys differ: the next is the lowest above the last.
            if ((i == 0 || own > last) && own < lowest) lowest = own;
        }
        last = lowest_of_block(lowest);
        if (threadIdx.x == 0) part.layer.chosen[part.of_row(free + i)] = static_cast<int>(static_cast<uint32_t>(last));
    }
    __syncthreads();
}

__device__ inline void choose(const Part &part, int count) {
    __shared__ uint64_t kept[KEPT_KEYS];
    const PolicyStep &step = part.step;
    int free = part.free_rows(), len = part.len;
    if (step.rule == RING) {
        int ring = max(len - step.kept, 1), turn = max(step.seen, len) - len;
        for (int i = threadIdx.x; i < count; i += THREADS) {
            part.layer.chosen[part.of_row(free + i)] = min(step.kept, len - 1) + static_cast<int>((turn + static_cast<int64_t>(i)) % ring);
        }
        __syncthreads();
    } else if (step.first == len && step.seen == len) {
        // There are no scores yet.
        int begin = min(static_cast<int>(__fmul_rn(step.keep_initial, static_cast<float>(len))), len - step.grace - count);
        for (int i = threadIdx.x; i < count; i += THREADS) part.layer.chosen[part.of_row(free + i)] = max(begin, 0) + i;
        __syncthreads();
    } else if (!step.by_error) {
        choose_lowest(part, count, kept, [&](int place) { return score_at(part, part.known, place); });
    } else {
        MinMax scores(part, [&](int64_t known, int place) { return score_at(part, known, place); });
        MinMax errors(part, [&](int64_t known, int place) { return part.layer.errors[known + place]; });
        float share = step.score_share, of_error = __fdiv_rn(__fsub_rn(share, 1.0f), 2.0f);
        choose_lowest(part, count, kept, [&](int place) {
            float error = __fmul_rn(of_error, errors.apply(part.layer.errors[part.known + place]));
            float score = __fmul_rn(share, scores.apply(score_at(part, part.known, place)));
            return __fadd_rn(__fadd_rn(score, error), __fsub_rn(1.0f, share));
        });
    }
}

__device__ inline void plan(const PolicyCall &call) {
    Part part(call);
    if (!part.is_valid(call)) return;
    const PolicyLayer &layer = part.layer;
    const PolicyStep &step = part.step;
    for (int i = threadIdx.x; i < part.len; i += THREADS) {
        layer.token_pos[part.now + i] = step.seen > 0 ? layer.positions[part.known + i] : -1;
    }
    int free = part.free_rows(), count = min(step.rows - free, part.len - step.grace);
    for (int i = threadIdx.x; i < free; i += THREADS) layer.chosen[part.of_row(i)] = part.used() + i;
    if (count > 0) choose(part, count);
    __syncthreads();
    for (int i = threadIdx.x; i < free + max(count, 0); i += THREADS) {
        int64_t at = part.of_row(i);
        int place = part.place(min(max(layer.chosen[at], 0), part.len - 1));
        layer.write_slots[at] = place;
        layer.token_pos[part.now + place] = step.seen + i;
    }
}

__device__ inline float sum_of_block(float value) {
    __shared__ float of_warps[WARPS];
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    value = of_warps[0];
    for (int i = 1; i < WARPS; i++) value += of_warps[i];
    return value;
}

__device__ inline void commit(const PolicyCall &call) {
    Part part(call);
    if (!part.is_valid(call)) return;
    const PolicyLayer &layer = part.layer;
    const PolicyStep &step = part.step;
    int len = part.len, free = part.free_rows();
    if (step.seen == 0) {
        for (int64_t at = part.known + threadIdx.x; at < part.known + len; at += THREADS) {
            layer.positions[at] = -1;
            layer.places[at] = static_cast<int>(at - part.known);
            if (layer.scores != nullptr) layer.scores[at] = 0;
            if (layer.lengths != nullptr) layer.lengths[at] = 0;
            if (layer.errors != nullptr) layer.errors[at] = 0;
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < step.rows; i += THREADS) {
        int64_t at = part.of_row(i), known = part.known + min(max(layer.write_slots[at], 0), len - 1);
        layer.positions[known] = step.seen + i;
        // A token enters with the score 0.
        if (layer.scores != nullptr) layer.scores[known] = 0;
        if (layer.lengths != nullptr) layer.lengths[known] = layer.norms[at * 3];
        if (layer.errors != nullptr) layer.errors[known] = __fadd_rn(layer.norms[at * 3 + 1], layer.norms[at * 3 + 2]);
    }
    // A token that leaves the grace period for a chosen slot stays where it is: the slots change places.
    if (step.grace > 0 && threadIdx.x == 0) {
        int turn = (max(step.seen, len) - len) % step.grace;
        for (int i = free; i < step.rows; i++) {
            int newest = len - step.grace + turn, chosen = min(max(layer.chosen[part.of_row(i)], 0), len - 1);
            int place = layer.places[part.known + newest];
            layer.places[part.known + newest] = layer.places[part.known + chosen];
            layer.places[part.known + chosen] = place;
            turn = (turn + 1) % step.grace;
        }
    }
    // The first step attends to everything.
    if (!step.weighs || step.seen == 0) return;
    __syncthreads();
    float scale = 0;
    if (step.by_length) {
        float sum = 0;
        for (int i = threadIdx.x; i < len; i += THREADS) {
            sum = fmaf(layer.weights[part.now + i], layer.lengths[part.known + i], sum);
        }
        sum = sum_of_block(sum);
        scale = sum > 0 ? __fdiv_rn(static_cast<float>(step.rows), sum) : 0.0f;
    }
    for (int i = threadIdx.x; i < len; i += THREADS) {
        float weight = layer.weights[part.now + i];
        if (step.by_length) weight = __fmul_rn(__fmul_rn(weight, layer.lengths[part.known + i]), scale);
        layer.scores[part.known + i] = __fadd_rn(layer.scores[part.known + i], weight);
    }
}

}  // namespace policy

extern "C" __global__ void __launch_bounds__(policy::THREADS) plan_slots(const __grid_constant__ PolicyCall call) {
    policy::plan(call);
}

extern "C" __global__ void __launch_bounds__(policy::THREADS) commit_slots(const __grid_constant__ PolicyCall call) {
    policy::commit(call);
}

}  // namespace pagoda
