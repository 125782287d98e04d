// The score function of HstuAttention, silu(alpha · S), and what its sums are multiplied by.
#pragma once

#include "common/attention/tiles.cuh"
#include "common/convert.cuh"

namespace pagoda {

// Turns a tile's scores into weights. There is no softmax: a weight depends on its own score alone, so nothing is kept
// from tile to tile.
struct SiluScore {
    // Whether the sums over earlier tiles have to be multiplied before those of a tile are added, as a softmax whose
    // maximum has grown has to; then there is `rescale(sums)`.
    static constexpr bool RESCALES = false;
    // Whether sums over parts of the keys are simply added up: split-KV relies on it.
    static constexpr bool ADDITIVE = true;

    const Call &call;

    // Scores and weights lie as wgmma has them: a thread has two columns of eight in each of its two rows.
    template <class T, int KEYS, class Mask>
    __device__ void weigh(const float (&scores)[KEYS / 2], uint32_t (&weights)[KEYS / 4], const Tile &tile,
                          const Mask &mask) const {
        if (mask.template all<KEYS>(tile)) {
            weigh<T, KEYS, false>(scores, weights, tile, mask);
        } else {
            weigh<T, KEYS, true>(scores, weights, tile, mask);
        }
    }

    template <class T, int KEYS, bool MASKED, class Mask>
    __device__ void weigh(const float (&scores)[KEYS / 2], uint32_t (&weights)[KEYS / 4], const Tile &tile,
                          const Mask &mask) const {
        float half = call.alpha * 0.5f;
        int column = tile.position + (threadIdx.x & 3) * 2;
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++) {
            float pair[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                pair[j] = silu_of_half(scores[i * 2 + j] * half);
                int position = column + i / 2 * 8 + j;
                // Selected, not multiplied: a masked score may be NaN.
                if (MASKED && !(mask.row(i & 1).sees(position) & (position < tile.limit))) pair[j] = 0;
            }
            weights[i] = Pack<T>::of(pair[0], pair[1]);
        }
    }

    // A finished sum of the thread's row `which`, as it is written.
    __device__ float finish(int which, float sum) const { return finish(call, sum); }
    // The same where another thread has the sum than computed it.
    __device__ static float finish(const Call &call, float sum) { return sum * call.scale; }
};

}  // namespace pagoda
