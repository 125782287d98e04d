// HstuAttention by the tensor cores of every chip since sm_80 (mma.sync): bf16 and f16, D = 32, 64, 128, 256.
//
// A block of four warps has 64 rows of one user and head, 16 a warp, and walks over tiles of keys: while one tile is
// computed the next is copied into shared memory (cp.async), row by row out of its page. There is no softmax: the
// weights silu(S) go from the first product's registers straight into the second product.

#include "common/mma.cuh"
#include "hstu/hstu_mask.cuh"

namespace pagoda {
namespace mma {

constexpr int ROWS = 64;
constexpr int THREADS = 128;

// Where 16-byte chunk `chunk` of row `row` lies: swizzled, so that eight rows of a column are in eight banks.
template <int D>
__device__ inline uint32_t place(int row, int chunk) {
    int turn = D == 32 ? (row >> 1) & 3 : row & 7;
    return static_cast<uint32_t>(row * D * 2 + ((chunk ^ turn) << 4));
}

template <int D> constexpr int keys_of_tile() { return D == 256 ? 32 : 64; }
template <int D> constexpr int shared_bytes() { return (ROWS + 4 * keys_of_tile<D>()) * D * 2; }

template <class T, int D>
struct Kernel {
    static constexpr int KEYS = keys_of_tile<D>();
    static constexpr int CHUNKS = D / 8;                  // of 16 bytes in a row
    static constexpr int PASS = THREADS / CHUNKS;         // rows that the threads copy at once
    static constexpr int TILE_BYTES = KEYS * D * 2;
    static constexpr bool QUERY_IN_REGISTERS = D <= 128;

    const Call &call;
    User user;
    int head;
    uint32_t queries, stages;

    __device__ void bring(const Tile &tile, int stage) const {
        int chunk = threadIdx.x % CHUNKS;
        int64_t width = static_cast<int64_t>(call.heads) * D;
        int64_t column = static_cast<int64_t>(head) * D + chunk * 8;
        uint32_t keys = stages + stage * 2 * TILE_BYTES;
#pragma unroll
        for (int pass = 0; pass < KEYS / PASS; pass++) {
            int row = pass * PASS + threadIdx.x / CHUNKS;
            int position = tile.position + row;
            const T *key = static_cast<const T *>(call.query), *value = key;  // any address, where nothing is read
            bool valid = position < tile.limit;
            if (valid && tile.cached) {
                int64_t slot = pool_row(call, user, position, 0);
                valid = slot >= 0;
                if (valid) {
                    key = static_cast<const T *>(call.pool) + slot * width + column;
                    value = key + call.page_size * width;
                }
            } else if (valid) {
                int64_t from = static_cast<int64_t>(user.row + position - user.cached) * width + column;
                key = static_cast<const T *>(call.key) + from;
                value = static_cast<const T *>(call.value) + from;
            }
            copy_async(keys + place<D>(row, chunk), key, valid);
            copy_async(keys + TILE_BYTES + place<D>(row, chunk), value, valid);
        }
    }

    __device__ void bring_queries(int first) const {
        int chunk = threadIdx.x % CHUNKS;
        for (int row = threadIdx.x / CHUNKS; row < ROWS; row += PASS) {
            bool valid = first + row < user.rows;
            int64_t from = (static_cast<int64_t>(user.row + (valid ? first + row : 0)) * call.heads + head) * D + chunk * 8;
            copy_async(queries + place<D>(row, chunk), static_cast<const T *>(call.query) + from, valid);
        }
    }

    __device__ void load_query(uint32_t (&to)[4], int step) const {
        int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
        load_matrices(to, queries + place<D>(warp * 16 + (lane & 15), step * 2 + (lane >> 4)));
    }

    __device__ void run(int first) {
        int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
        int last = min(first + ROWS, user.rows) - 1;
        Tiles<KEYS> tiles = Tiles<KEYS>::of(user, Reach::of(call, user, first, last));
        int own = first + warp * 16;
        Reach reach = Reach::of(call, user, own, min(own + 15, user.rows - 1));
        int rows[2] = {own + lane / 4, own + lane / 4 + 8};
        Seen seen[2];
        for (int i = 0; i < 2; i++) seen[i] = seen_by(call, user, min(rows[i], user.rows - 1));

        bring_queries(first);
        int count = tiles.count();
        if (count > 0) bring(tiles.at(0), 0);
        commit_copies();

        float out[D / 8][4] = {};
        uint32_t query[QUERY_IN_REGISTERS ? D / 16 : 1][4];
        float half = call.alpha * 0.5f;
        for (int index = 0; index < count; index++) {
            if (index + 1 < count) bring(tiles.at(index + 1), (index + 1) & 1);
            commit_copies();
            wait_copies<1>();
            __syncthreads();
            if constexpr (QUERY_IN_REGISTERS) {
                if (index == 0) {
#pragma unroll
                    for (int step = 0; step < D / 16; step++) load_query(query[step], step);
                }
            }
            Tile tile = tiles.at(index);
            if (tile.seen<KEYS>(reach)) {
                attend(tile, index & 1, reach, seen, half, query, out);
            }
            __syncthreads();
        }
        wait_copies<0>();
        for (int i = 0; i < 2; i++) {
            if (rows[i] >= user.rows) continue;
            int64_t at = (static_cast<int64_t>(user.row + rows[i]) * call.heads + head) * D + (lane & 3) * 2;
            uint32_t *to = reinterpret_cast<uint32_t *>(static_cast<T *>(call.output) + at);
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                to[n * 4] = Pack<T>::of(out[n][i * 2] * call.scale, out[n][i * 2 + 1] * call.scale);
            }
        }
    }

    __device__ void attend(const Tile &tile, int stage, const Reach &reach, const Seen (&seen)[2], float half,
                           const uint32_t (&query)[QUERY_IN_REGISTERS ? D / 16 : 1][4], float (&out)[D / 8][4]) const {
        int lane = threadIdx.x & 31;
        uint32_t keys = stages + stage * 2 * TILE_BYTES, values = keys + TILE_BYTES;
        float scores[KEYS / 8][4] = {};
#pragma unroll
        for (int step = 0; step < D / 16; step++) {
            uint32_t a[4];
            if constexpr (QUERY_IN_REGISTERS) {
                for (int i = 0; i < 4; i++) a[i] = query[step][i];
            } else {
                load_query(a, step);
            }
#pragma unroll
            for (int n = 0; n < KEYS / 16; n++) {
                uint32_t b[4];
                load_matrices(b, keys + place<D>(n * 16 + (lane & 7) + ((lane >> 4) << 3), step * 2 + ((lane >> 3) & 1)));
                multiply<T>(scores[n * 2], a, b[0], b[1]);
                multiply<T>(scores[n * 2 + 1], a, b[2], b[3]);
            }
        }
        bool whole = tile.whole<KEYS>(reach);
        int column = tile.position + (lane & 3) * 2;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float weight = silu_of_half(scores[n][i] * half);
                int position = column + n * 8 + (i & 1);
                // Selected, not multiplied: a masked score may be NaN.
                if (!whole && !(seen[i / 2].sees(position) & (position < tile.limit))) weight = 0;
                scores[n][i] = weight;
            }
        }
#pragma unroll
        for (int step = 0; step < KEYS / 16; step++) {
            const float(&low)[4] = scores[step * 2], (&high)[4] = scores[step * 2 + 1];
            uint32_t a[4] = {Pack<T>::of(low[0], low[1]), Pack<T>::of(low[2], low[3]), Pack<T>::of(high[0], high[1]),
                             Pack<T>::of(high[2], high[3])};
#pragma unroll
            for (int n = 0; n < D / 16; n++) {
                uint32_t b[4];
                load_matrices_transposed(
                    b, values + place<D>(step * 16 + (lane & 7) + ((lane >> 3) & 1) * 8, n * 2 + (lane >> 4)));
                multiply<T>(out[n * 2], a, b[0], b[1]);
                multiply<T>(out[n * 2 + 1], a, b[2], b[3]);
            }
        }
    }
};

template <class T, int D>
__device__ void attend(const Call &call) {
    extern __shared__ __align__(128) uint8_t shared[];
    Piece piece = find_piece<ROWS, Kind::All>(call, blockIdx.x / call.heads, 1);
    if (piece.user < 0) return;
    uint32_t base = shared_address(shared);
    Kernel<T, D> kernel{call, load_user(call, piece.user), static_cast<int>(blockIdx.x % call.heads), base,
                        base + ROWS * D * 2};
    // The last rows see the most keys: they begin first.
    kernel.run(kernel.user.skipped + (piece.blocks - 1 - piece.number) * ROWS);
}

}  // namespace mma

#define KERNEL(NAME, T, D)                                                                                             \
    extern "C" __global__ void __launch_bounds__(mma::THREADS) NAME(const __grid_constant__ Call call) {               \
        mma::attend<T, D>(call);                                                                                       \
    }

KERNEL(mma_f16_32, __half, 32)
KERNEL(mma_f16_64, __half, 64)
KERNEL(mma_f16_128, __half, 128)
KERNEL(mma_f16_256, __half, 256)
KERNEL(mma_bf16_32, __nv_bfloat16, 32)
KERNEL(mma_bf16_64, __nv_bfloat16, 64)
KERNEL(mma_bf16_128, __nv_bfloat16, 128)
KERNEL(mma_bf16_256, __nv_bfloat16, 256)

}  // namespace pagoda
