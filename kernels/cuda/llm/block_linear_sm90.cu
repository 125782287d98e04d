// BlockLinear on Hopper: the product of rows with a matrix of 4 bits, in blocks of 32 that share a scale, for f16 and bf16.
//
// Few rows: a cluster of thread blocks has 128 rows of the matrix, each block a share of the columns. Codes come by
// the TMA and scales by cp.async into a ring of stages in shared memory, some steps ahead of their use. A code becomes a number in a register by one operation:
// its bits are put behind those of a power of two, so that the number is the code and that power. Such numbers are the left side
// of mma.sync; what the power adds to a sum is known from the sum of x, and is taken off first; the scale of a block comes to
// the product of the block. So weights are not rounded. A product does not care in which order its inner dimension is added up,
// as long as both sides agree: a lane takes a whole word of codes, and pairs the numbers of x as the codes of a word are. The
// sums of the cluster are added up through shared memory, in a fixed order: what a row of x comes out as does not depend on the
// others.
//
// Many rows: the matrix is opened into memory, for cuBLASLt.

#include "common/dependent_launch.cuh"
#include "common/mirrored.cuh"
#include "common/mma.cuh"
#include "common/tma.cuh"

namespace pagoda {

struct BlockProduct {
    const void *x;         // [rows, inner]
    const uint8_t *codes;  // [width, inner / 32, 16]
    const void *scales;    // [width, inner / 32]
    const void *bias;      // [width]; null: none
    void *y;               // [rows, width]
    int rows;
    int inner;
    int width;
};
PAGODA_MIRRORED(llm, BlockProduct)

namespace block_linear {

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int BLOCK = 32;  // numbers with a scale
constexpr int SLABS = 2;   // of 16 rows, that a warp has
constexpr int SHARES = 2;  // of the columns of a step, each for half the warps
constexpr int ABREAST = WARPS / SHARES;
constexpr int HEIGHT = ABREAST * SLABS * 16;  // rows of the matrix that a block of threads has
constexpr int STEP = 8;                       // blocks of a row that are a step: 128 bytes
constexpr int OWN = STEP / SHARES;            // those that a warp has
constexpr int SUM_PITCH = HEIGHT + 4;

// `STAGES` of src/cuda/llm/block_linear.rs. x has two.
constexpr int STAGES = 4;
// A stage of the matrix, in units of 16 bytes: the codes of a step, a unit a block; and the scales, a unit a row.
constexpr int SCALES_AT = HEIGHT * STEP, STAGE_UNITS = SCALES_AT + HEIGHT;
static_assert(STAGE_UNITS * 16 % 1024 == 0, "the next stage begins at such a multiple too");
// A stage of x: a row's units, and four more, so that two rows are in different banks; and what the middle of the codes adds to
// the product of each block with each row, negated.
constexpr int UNITS = BLOCK / 8;  // that a block of x has
constexpr int ROW_UNITS = STEP * UNITS + 4;
template <int ROWS> constexpr int MIDDLES_AT = ROWS * ROW_UNITS;
template <int ROWS> constexpr int X_UNITS = MIDDLES_AT<ROWS> + STEP * ROWS / 4;

// Where the TMA puts the codes of a block: those of eight rows are in different banks.
__device__ inline int code_unit(int row, int block) { return row * STEP + (block ^ (row & 7)); }

// Numbers of T from codes. The code is put into the last bits of a number whose neighbours are 1 apart.
template <class T> struct Code;
template <> struct Code<__nv_bfloat16> {
    using Pair = __nv_bfloat162;
    static constexpr uint32_t AT = 0x43004300;  // 128
    static constexpr float MIDDLE = 136;
};
template <> struct Code<__half> {
    using Pair = __half2;
    static constexpr uint32_t AT = 0x64006400;  // 1024
    static constexpr float MIDDLE = 1032;
};

// Codes `index` and `index + 4` of the eight of a word, behind `Code::AT`: one operation on three words.
template <class T> __device__ inline uint32_t numbers_of(uint32_t word, int index) {
    uint32_t numbers;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(numbers) : "r"(word >> index * 4), "n"(0x000f000f), "r"(Code<T>::AT));
    return numbers;
}

template <class T> __device__ inline typename Code<T>::Pair as_pair(uint32_t bits) {
    return *reinterpret_cast<typename Code<T>::Pair *>(&bits);
}

// Brings the scales of a step into a stage; zeros for rows and blocks that there are not.
template <class T> __device__ void bring_scales(const BlockProduct &call, uint4 *stage, int first, int step) {
    int blocks = call.inner / BLOCK;
    const T *scales = static_cast<const T *>(call.scales);
    if (blocks % STEP == 0) {
        int row = threadIdx.x;
        bool is_there = first + row < call.width;
        scales += is_there ? static_cast<int64_t>(first + row) * blocks + step * STEP : 0;
        if (row < HEIGHT) mma::copy_async(mma::shared_address(stage + SCALES_AT + row), scales, is_there);
        return;
    }
    // Rows begin at no multiple of 16 bytes.
#pragma unroll 1
    for (int at = threadIdx.x; at < HEIGHT * STEP; at += THREADS) {
        int row = at / STEP, block = at % STEP;
        bool is_there = first + row < call.width && step * STEP + block < blocks;
        reinterpret_cast<T *>(stage + SCALES_AT)[at] =
            is_there ? scales[static_cast<int64_t>(first + row) * blocks + step * STEP + block] : T(0.0f);
    }
}

// The columns of a step of x, on their way through registers: a warp has a row, and a lane eight columns.
template <class T, int TILES> struct Columns {
    uint4 units[TILES];

    __device__ void load(const BlockProduct &call, int step) {
        int unit = step * STEP * UNITS + (threadIdx.x & 31), of_row = call.inner / 8;
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            int row = i * WARPS + threadIdx.x / 32;
            bool is_there = row < call.rows && unit < of_row;
            const uint4 *x = static_cast<const uint4 *>(call.x) + static_cast<int64_t>(row) * of_row + unit;
            units[i] = is_there ? *x : uint4{};
        }
    }

    // Eight columns are stored as pairs of those that are 4 apart, as `numbers_of` has them.
    __device__ void store(uint4 *stage) const {
        int lane = threadIdx.x & 31;
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            int row = i * WARPS + threadIdx.x / 32;
            uint4 unit = units[i];
            stage[row * ROW_UNITS + lane] =
                make_uint4(__byte_perm(unit.x, unit.z, 0x5410), __byte_perm(unit.x, unit.z, 0x7632),
                           __byte_perm(unit.y, unit.w, 0x5410), __byte_perm(unit.y, unit.w, 0x7632));
            float sum = 0;
            for (uint32_t two : {unit.x, unit.y, unit.z, unit.w}) {
                auto pair = as_pair<T>(two);
                sum += wide(pair.x) + wide(pair.y);
            }
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            float *middles = reinterpret_cast<float *>(stage + MIDDLES_AT<TILES * 8>);
            if (lane % UNITS == 0) middles[lane / UNITS * TILES * 8 + row] = -Code<T>::MIDDLE * sum;
        }
    }
};

// Adds the products of a step to the sums. The codes of a block are multiplied as they are, and its scale comes to the sum.
template <class T, int TILES>
__device__ void multiply_step(const uint4 *matrix, const uint4 *x, float (&sums)[SLABS][TILES][4]) {
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, group = lane / 4, quarter = lane & 3;
    int first = warp % ABREAST * SLABS * 16, first_block = warp / ABREAST * OWN;
    const float *middles = reinterpret_cast<const float *>(x + MIDDLES_AT<TILES * 8>);
    alignas(8) T scales[SLABS][2][OWN];
#pragma unroll
    for (int at = 0; at < SLABS * 2; at++) {
        const T *row = reinterpret_cast<const T *>(matrix + SCALES_AT + first + at * 8 + group);
        *reinterpret_cast<uint2 *>(scales[at / 2][at % 2]) = *reinterpret_cast<const uint2 *>(row + first_block);
    }
#pragma unroll
    for (int pair = 0; pair < OWN; pair += 2) {
        // A lane has a word of each of two rows, of two blocks.
        uint32_t words[SLABS][4];
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) {
            int row = first + slab * 16 + lane % 16, block = first_block + pair + lane / 16;
            mma::load_matrices(words[slab], mma::shared_address(matrix + code_unit(row, block)));
        }
#pragma unroll
        for (int second = 0; second < 2; second++) {
            uint32_t left[SLABS][2][4];
#pragma unroll
            for (int slab = 0; slab < SLABS; slab++) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    left[slab][i / 4][i % 4] = numbers_of<T>(words[slab][second * 2 + i % 2], i / 2);
                }
            }
            int block = first_block + pair + second;
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                uint4 right = x[(tile * 8 + group) * ROW_UNITS + block * UNITS + quarter];
                float2 middle = *reinterpret_cast<const float2 *>(middles + (block * TILES + tile) * 8 + quarter * 2);
#pragma unroll
                for (int slab = 0; slab < SLABS; slab++) {
                    float part[4] = {middle.x, middle.y, middle.x, middle.y};
                    mma::multiply<T>(part, left[slab][0], right.x, right.y);
                    mma::multiply<T>(part, left[slab][1], right.z, right.w);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        sums[slab][tile][i] = fmaf(part[i], wide(scales[slab][i / 2][pair + second]), sums[slab][tile][i]);
                    }
                }
            }
        }
    }
}

__device__ inline int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ inline int cluster_size() {
    int size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

// Adds up the sums of the cluster, of this block's share of the rows of the matrix.
template <class T, int ROWS> __device__ void write_share(const BlockProduct &call, uint32_t sums, int first) {
    int blocks = cluster_size(), fours = HEIGHT / blocks / 4, begin = cluster_rank() * HEIGHT / blocks;
    for (int at = threadIdx.x; at < ROWS * fours; at += THREADS) {
        int row = at / fours, column = begin + at % fours * 4, output = first + column;
        if (row >= call.rows) break;
        float sum[4] = {};
        for (int block = 0; block < blocks; block++) {
#pragma unroll
            for (int share = 0; share < SHARES; share++) {
                float4 part = load_from(sums + ((share * ROWS + row) * SUM_PITCH + column) * 4, block);
                sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
            }
        }
        for (int i = 0; i < 4 && output + i < call.width; i++) {
            float bias = call.bias == nullptr ? 0.0f : wide(static_cast<const T *>(call.bias)[output + i]);
            narrow(sum[i] + bias, static_cast<T *>(call.y) + static_cast<int64_t>(row) * call.width + output + i);
        }
    }
}

// Up to TILES * 8 rows. Each block of the cluster has `steps` steps of the columns.
template <class T, int TILES> __device__ void few_rows(const BlockProduct &call, const CUtensorMap &codes, int steps) {
    constexpr int ROWS = TILES * 8;
    // What the TMA arranges by the address itself has to begin at a multiple of 1024.
    extern __shared__ __align__(1024) uint4 shared[];
    __shared__ __align__(8) uint64_t arrived[STAGES];
    static_assert(STAGES * STAGE_UNITS * 16 >= SHARES * ROWS * SUM_PITCH * sizeof(float), "sums lie where stages were");
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    int first = static_cast<int>(blockIdx.x) / cluster_size() * HEIGHT, begin = cluster_rank() * steps;
    int count = min(steps, (call.inner / BLOCK + STEP - 1) / STEP - begin);
    auto matrix = [&](uint32_t i) { return shared + i % STAGES * STAGE_UNITS; };
    auto x = [&](uint32_t i) { return shared + STAGES * STAGE_UNITS + i % 2 * X_UNITS<ROWS>; };
    auto bring_matrix = [&](int i) {
        if (i >= count) return;
        if (threadIdx.x == 0) {
            uint32_t barrier = mma::shared_address(&arrived[i % STAGES]);
            barrier_expect(barrier, HEIGHT * STEP * 16);
            fetch_box(mma::shared_address(matrix(i)), &codes, barrier, (begin + i) * STEP * BLOCK / 4, first);
        }
        bring_scales<T>(call, matrix(i), first, begin + i);
    };
    launch_dependents();
    if (threadIdx.x == 0) {
        for (auto &barrier : arrived) barrier_init(mma::shared_address(&barrier), 1);
        fence_async();
    }
    __syncthreads();
    // Nothing on the stream writes the matrix.
    for (int i = 0; i < STAGES - 1; i++) {
        bring_matrix(i);
        mma::commit_copies();
    }
    wait_for_previous();
    Columns<T, TILES> columns;
    columns.load(call, begin);
    columns.store(x(0));
    columns.load(call, begin + 1);
    float sums[SLABS][TILES][4] = {};
    for (int i = 0; i < count; i++) {
        mma::wait_copies<STAGES - 2>();
        barrier_wait(mma::shared_address(&arrived[i % STAGES]), i / STAGES & 1);
        // All have what they brought of this step, and are done with the one before.
        __syncthreads();
        bring_matrix(i + STAGES - 1);
        mma::commit_copies();
        columns.store(x(i + 1));
        columns.load(call, begin + i + 2);
        multiply_step<T, TILES>(matrix(i), x(i), sums);
    }
    __syncthreads();
    float *parts = reinterpret_cast<float *>(shared) + warp / ABREAST * ROWS * SUM_PITCH + warp % ABREAST * SLABS * 16;
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int row = tile * 8 + (lane & 3) * 2 + i % 2, column = slab * 16 + i / 2 * 8 + lane / 4;
                parts[row * SUM_PITCH + column] = sums[slab][tile][i];
            }
        }
    }
    cluster_wait();
    write_share<T, ROWS>(call, mma::shared_address(shared), first);
    // No block may end while another reads its sums.
    cluster_wait();
}

// Opens eight numbers a thread into `y`, [width, inner].
template <class T> __device__ void open(const BlockProduct &call) {
    begin();
    int64_t at = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= static_cast<int64_t>(call.width) * (call.inner / 8)) return;
    uint32_t word = __ldcs(reinterpret_cast<const uint32_t *>(call.codes) + at);
    T scale = static_cast<const T *>(call.scales)[at / (BLOCK / 8)];
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        T middle = static_cast<T>(Code<T>::MIDDLE);
        auto pair = __hmul2(__hsub2(as_pair<T>(numbers_of<T>(word, i)), {middle, middle}), {scale, scale});
        pairs[i] = *reinterpret_cast<uint32_t *>(&pair);
    }
    static_cast<uint4 *>(call.y)[at] =
        make_uint4(__byte_perm(pairs[0], pairs[1], 0x5410), __byte_perm(pairs[2], pairs[3], 0x5410),
                   __byte_perm(pairs[0], pairs[1], 0x7632), __byte_perm(pairs[2], pairs[3], 0x7632));
}

}  // namespace block_linear

#define FEW_ROWS(NAME, T, TILES)                                                                                       \
    extern "C" __global__ void __launch_bounds__(block_linear::THREADS, 2)                                             \
        few_rows_##NAME(const __grid_constant__ BlockProduct call, const __grid_constant__ CUtensorMap codes,          \
                        int steps) {                                                                                   \
        block_linear::few_rows<T, TILES>(call, codes, steps);                                                          \
    }
#define KERNELS(NAME, T)                                                                                               \
    FEW_ROWS(NAME##_8, T, 1)                                                                                           \
    FEW_ROWS(NAME##_16, T, 2)                                                                                          \
    FEW_ROWS(NAME##_32, T, 4)                                                                                          \
    extern "C" __global__ void __launch_bounds__(block_linear::THREADS)                                                \
        open_##NAME(const __grid_constant__ BlockProduct call) {                                                       \
        block_linear::open<T>(call);                                                                                   \
    }

KERNELS(f16, __half)
KERNELS(bf16, __nv_bfloat16)

}  // namespace pagoda
