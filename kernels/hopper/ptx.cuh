// Thin names for the Hopper instructions that the product kernel uses: barriers, bulk copies, clusters.
// Knows nothing of matrices.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace zl {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarriers (addresses are 32-bit shared addresses) ----
// Arrivals and waits are of CTA scope also across the cluster: what they order is read by wgmma and
// written by the copy engine, never by ordinary accesses; cluster scope would fence all of memory.

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t num_arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(num_arrivals)
                 : "memory");
}

// Makes fresh barriers visible to the cluster and to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(num_bytes)
                 : "memory");
}

// Arrives at the barrier that lies at the same offset in CTA `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}\n" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

__device__ __forceinline__ bool barrier_try_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

// Nothing legitimate takes this many tries: end in an error, not in a hang.
constexpr uint32_t kMaxTries = 1u << 23;

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    for (uint32_t tries = 0; !barrier_try_wait(barrier, parity); ++tries) {
        if (tries == kMaxTries) __trap();
    }
}

// ---- bulk tensor copies ----

__device__ __forceinline__ uint64_t policy_evict_first() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ uint64_t policy_evict_last() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void load_box(const CUtensorMap* map, int column, int row,
                                         uint32_t target, uint32_t barrier, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
        : "memory");
}

// As load_box, with nothing said about how long L2 keeps it. To ask for evict_normal in so many words cost
// 8% of bandwidth (BENCHMARKS.md).
__device__ __forceinline__ void load_box(const CUtensorMap* map, int column, int row,
                                         uint32_t target, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3}], [%4];" ::"r"(target),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// As load_box, into the same offset of every CTA in `ranks`, and onto each one's own barrier.
__device__ __forceinline__ void load_box_into(uint16_t ranks, const CUtensorMap* map, int column,
                                              int row, uint32_t target, uint32_t barrier,
                                              uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(target),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(ranks), "l"(policy)
        : "memory");
}

// ---- clusters ----

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Every thread of every CTA of the cluster; writes before it are seen after it.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// As cluster_sync, but orders no writes and so waits for none.
__device__ __forceinline__ void cluster_meet() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ uint32_t address_in(uint32_t address, uint32_t rank) {
    uint32_t remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(remote)
                 : "r"(address), "r"(rank));
    return remote;
}

__device__ __forceinline__ void store_shared(uint32_t address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

// Loads that ask L2: what an earlier kernel of an overlapping chain wrote.
__device__ __forceinline__ float load_from_l2(const float* address) {
    float value;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ uint2 load_four_from_l2(const __nv_bfloat16* address) {
    uint2 value;
    asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];"
                 : "=r"(value.x), "=r"(value.y)
                 : "l"(address)
                 : "memory");
    return value;
}

__device__ __forceinline__ float4 load_remote(uint32_t address) {
    float4 value;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

// ---- programmatic dependent launch ----

__device__ __forceinline__ void wait_for_previous_grid() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void let_next_grid_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- registers ----

// Every warp of a warpgroup: hand back registers down to kCount a thread, or wait until as many are free.
template <int kCount>
__device__ __forceinline__ void shrink_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
__device__ __forceinline__ void grow_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// ---- small things ----

// Threads [0, num_threads) only; barrier 0 is __syncthreads.
__device__ __forceinline__ void named_sync(uint32_t num_threads) {
    asm volatile("bar.sync 1, %0;" ::"r"(num_threads) : "memory");
}

// Without it the compiler computes all addresses of an unrolled loop ahead, in as many registers.
template <class T>
__device__ __forceinline__ void compute_in_place(T*& pointer) {
    asm volatile("" : "+l"(pointer));
}

// Lane l holds elements (l/4, 2(l%4)) and (l/4, 2(l%4)+1) of an 8x8 matrix; returns its transpose.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t pair) {
    uint32_t out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
}

__device__ __forceinline__ uint32_t pack_bf16(float first, float second) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ float2 unpack_bf16(uint32_t pair) {
    // Not as a cast: the compiler would keep accumulators that begin so as integers, and turn them into
    // floats between products.
    float2 values;
    asm("mov.b32 %0, %1;" : "=f"(values.x) : "r"(pair << 16));
    asm("mov.b32 %0, %1;" : "=f"(values.y) : "r"(pair & 0xFFFF0000));
    return values;
}

}  // namespace zl
