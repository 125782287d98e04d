// PagedAttention without tensor cores (SIMT): every element type, format and option. It is the oracle of the faster kernels on
// the device. A warp computes one row of one query head, slot by slot, in f32.

#include "llm/paged_append.cuh"

namespace pagoda {

template <class T>
__device__ inline float stored_number(const PagedCall &call, int64_t block, int index) {
    int size = call.head_size;
    if (call.format == NATIVE) return wide(static_cast<const T *>(call.pool)[block * size + index]);
    const uint8_t *codes = static_cast<const uint8_t *>(call.pool);
    if (call.format == FP8) {
        return __fmul_rn(from_fp8(codes[block * size + index]), __half2float(call.scales[block]));
    }
    unsigned code = call.format == INT8 ? codes[block * size + index]
                                        : (codes[(block * size + index) / 2] >> (index % 2 * 4)) & 15u;
    float scale = __half2float(call.scales[block * 2]), low = __half2float(call.scales[block * 2 + 1]);
    return __fadd_rn(low, __fmul_rn(static_cast<float>(code), scale));
}

// A warp appends the key or the value of one head of one row.
template <class T>
__device__ void append(const PagedCall &call) {
    int lane = threadIdx.x & 31;
    int64_t task = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (task >= static_cast<int64_t>(call.total_rows) * call.kv_heads * 2) return;
    int which = static_cast<int>(task % 2);
    int head = static_cast<int>(task / 2 % call.kv_heads);
    int row = static_cast<int>(task / 2 / call.kv_heads);
    int number = sequence_of(call, row);
    if (number < 0) return;
    Sequence sequence = load_sequence(call, number);
    append_row<T>(call, sequence, row, head, which, write_slot(call, sequence, row, head), lane);
}

// The score of a row against a slot. All lanes have it.
template <class T>
__device__ inline float score_of(const PagedCall &call, const float *query, int64_t block, int query_head,
                                 int64_t distance, int lane) {
    float dot = 0;
    for (int i = 0; i < MOST; i++) {
        if (i * 32 + lane < call.head_size) dot = fmaf(query[i], stored_number<T>(call, block, i * 32 + lane), dot);
    }
    float score = warp_sum(dot) * call.scale;
    if (call.softcap > 0) score = call.softcap * tanhf(score / call.softcap);
    if (call.slopes != nullptr) score -= call.slopes[query_head] * static_cast<float>(distance);
    return score;
}

template <class T>
__device__ inline void load_query(const PagedCall &call, int row, int head, float *query, int lane) {
    const T *from = static_cast<const T *>(call.query) +
                    (static_cast<int64_t>(row) * call.query_heads + head) * call.head_size;
    for (int i = 0; i < MOST; i++) {
        query[i] = i * 32 + lane < call.head_size ? rotated(call, from, row, i * 32 + lane) : 0.0f;
    }
}

// A warp computes one row of one query head.
template <class T>
__device__ void attend(const PagedCall &call) {
    int lane = threadIdx.x & 31;
    int64_t task = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (task >= static_cast<int64_t>(call.total_rows) * call.query_heads) return;
    int head = static_cast<int>(task % call.query_heads);
    int row = static_cast<int>(task / call.query_heads);
    int kv_head = head / (call.query_heads / call.kv_heads);
    float sums[MOST] = {}, query[MOST];
    float most = -INFINITY, total = 0;
    int number = sequence_of(call, row);
    if (number >= 0) {
        Sequence sequence = load_sequence(call, number);
        load_query<T>(call, row, head, query, lane);
        int64_t position = row_position(call, sequence, row);
        int end = slot_count(call, sequence);
        int first = 0;
        if (call.token_pos == nullptr) {
            end = static_cast<int>(clamp64(position + 1, 0, end));
            if (call.window > 0) first = static_cast<int>(clamp64(position + 1 - call.window, 0, end));
        }
        for (int slot = first; slot < end; slot++) {
            int64_t at = slot_position(call, number, kv_head, slot);
            if (!sees(call, position, at)) continue;
            int64_t key = sequence.block(call, slot, 0, kv_head);
            if (key < 0) continue;
            float score = score_of<T>(call, query, key, head, position - at, lane);
            // NaN stays: every comparison with it is false, and its weight is NaN.
            float larger = score > most ? score : most;
            float scale = most == -INFINITY ? 0.0f : expf(most - larger);
            float weight = larger == -INFINITY ? (score == score ? 0.0f : score) : expf(score - larger);
            most = larger;
            total = fmaf(total, scale, weight);
            int64_t value = key + static_cast<int64_t>(call.page_size) * call.kv_heads;
            for (int i = 0; i < MOST; i++) {
                if (i * 32 + lane < call.head_size) {
                    sums[i] = fmaf(weight, stored_number<T>(call, value, i * 32 + lane), sums[i] * scale);
                }
            }
        }
    }
    if (call.sinks != nullptr) {
        float sink = wide(static_cast<const T *>(call.sinks)[head]);
        float larger = sink > most ? sink : most;
        float scale = most == -INFINITY ? 0.0f : expf(most - larger);
        total = fmaf(total, scale, expf(sink - larger));
        for (int i = 0; i < MOST; i++) sums[i] *= scale;
        most = larger;
    }
    int64_t to = task * call.head_size;
    for (int i = 0; i < MOST; i++) {
        if (i * 32 + lane < call.head_size) {
            narrow(total == 0 ? 0.0f : sums[i] / total, static_cast<T *>(call.output) + to + i * 32 + lane);
        }
    }
    if (call.row_sums != nullptr && lane == 0) {
        call.row_sums[2 * task] = most;
        call.row_sums[2 * task + 1] = total;
    }
}

// A warp computes the weight of one slot of one kv head: the rows of its sequence one after the other.
template <class T>
__device__ void weigh(const PagedCall &call) {
    int lane = threadIdx.x & 31;
    int64_t task = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (task >= static_cast<int64_t>(call.sequences) * call.kv_heads * call.weights_len) return;
    int slot = static_cast<int>(task % call.weights_len);
    int kv_head = static_cast<int>(task / call.weights_len % call.kv_heads);
    int number = static_cast<int>(task / call.weights_len / call.kv_heads);
    Sequence sequence = load_sequence(call, number);
    int group = call.query_heads / call.kv_heads;
    float sum = 0;
    if (slot < slot_count(call, sequence)) {
        int64_t at = slot_position(call, number, kv_head, slot);
        int64_t key = sequence.block(call, slot, 0, kv_head);
        for (int row = sequence.row; key >= 0 && row < sequence.row + sequence.rows; row++) {
            int64_t position = row_position(call, sequence, row);
            if (!sees(call, position, at)) continue;
            for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
                float query[MOST];
                load_query<T>(call, row, head, query, lane);
                float score = score_of<T>(call, query, key, head, position - at, lane);
                // A weight of 0, also where the row has nothing but such scores.
                if (score == -INFINITY) continue;
                const float *of_row = call.row_sums + 2 * (static_cast<int64_t>(row) * call.query_heads + head);
                sum += expf(score - of_row[0]) / of_row[1];
            }
        }
    }
    if (lane == 0) call.key_weights[task] = sum / static_cast<float>(group);
}

// A warp computes the norms of what one row of one kv head has appended: the length of the value, and those of what the pool's format
// took from the key, rotated, and from the value. A row of no sequence gets zeros.
template <class T>
__device__ void norms(const PagedCall &call, float *to) {
    int lane = threadIdx.x & 31;
    int64_t task = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (task >= static_cast<int64_t>(call.total_rows) * call.kv_heads) return;
    int head = static_cast<int>(task % call.kv_heads);
    int row = static_cast<int>(task / call.kv_heads);
    float length = 0, lost[2] = {};
    int number = sequence_of(call, row);
    if (number >= 0) {
        Sequence sequence = load_sequence(call, number);
        int slot = write_slot(call, sequence, row, head);
        for (int which = 0; which < 2; which++) {
            const T *from = static_cast<const T *>(which == 0 ? call.key : call.value) + task * call.head_size;
            int64_t block = sequence.block(call, slot, which, head);
            for (int index = lane; index < call.head_size; index += 32) {
                float own = which == 0 ? rotated(call, from, row, index) : wide(from[index]);
                if (which == 1) length = fmaf(own, own, length);
                float off = block < 0 ? 0.0f : own - stored_number<T>(call, block, index);
                lost[which] = fmaf(off, off, lost[which]);
            }
        }
    }
    float numbers[] = {warp_sum(length), warp_sum(lost[0]), warp_sum(lost[1])};
    if (lane == 0) {
        for (int i = 0; i < 3; i++) to[task * 3 + i] = sqrtf(numbers[i]);
    }
}

#define PAGODA_PAGED(name, T)                                                                                          \
    extern "C" __global__ void __launch_bounds__(128) paged_append_##name(const __grid_constant__ PagedCall call) {   \
        append<T>(call);                                                                                              \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(128) paged_attend_##name(const __grid_constant__ PagedCall call) {   \
        attend<T>(call);                                                                                              \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(128) paged_weigh_##name(const __grid_constant__ PagedCall call) {    \
        weigh<T>(call);                                                                                               \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(128)                                                                 \
        paged_norms_##name(const __grid_constant__ PagedCall call, float *to) {                                       \
        norms<T>(call, to);                                                                                           \
    }

PAGODA_PAGED(f32, float)
PAGODA_PAGED(f16, __half)
PAGODA_PAGED(bf16, __nv_bfloat16)

}  // namespace pagoda
