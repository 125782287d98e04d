// The TMA (Tensor Memory Accelerator, Hopper's copy engine), mbarriers (its barriers in shared memory), and thread
// block clusters: thin names over the instructions.
#pragma once

#include <cstdint>
#include <cuda.h>

namespace pagoda {

__device__ inline uint32_t shared_address(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ inline void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ inline void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void barrier_wait(uint32_t barrier, int phase) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier),
        "r"(phase)
        : "memory");
}

// A box of a [rows, heads, head size] tensor into shared memory; what lies outside the tensor becomes zeros.
__device__ inline void copy_box(uint32_t to, const CUtensorMap *map, uint32_t barrier, int column, int head, int row) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(column), "r"(head), "r"(row)
        : "memory");
}

// The same of a tensor of rows and columns.
__device__ inline void fetch_box(uint32_t to, const CUtensorMap *map, uint32_t barrier, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
            "r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row)
        : "memory");
}

// The same of four dimensions.
__device__ inline void fetch_box(uint32_t to, const CUtensorMap *map, uint32_t barrier, int a, int b, int c, int d) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::
            "r"(to), "l"(map), "r"(barrier), "r"(a), "r"(b), "r"(c), "r"(d)
        : "memory");
}

// The same with a hint (evict first): what is read once leaves the L2 cache first, so that what is read again stays.
__device__ inline void fetch_box_once(uint32_t to, const CUtensorMap *map, uint32_t barrier, int a, int b, int c, int d) {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::
            "r"(to), "l"(map), "r"(barrier), "r"(a), "r"(b), "r"(c), "r"(d), "l"(policy)
        : "memory");
}

// Prefetches the description of a tensor, which the first box needs.
__device__ inline void prefetch_map(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Between ordinary accesses to shared memory and those of wgmma or the TMA (the async proxy).
__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Named barriers: among some of a block's threads, by number.
__device__ inline void named_wait(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

__device__ inline void named_arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// All threads of all blocks of the cluster.
__device__ inline void cluster_wait() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Four numbers out of the shared memory of another block of the cluster.
__device__ inline float4 load_from(uint32_t address, int block) {
    float4 value;
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
        : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
        : "r"(address), "r"(block)
        : "memory");
    return value;
}

}  // namespace pagoda
