// Thin names for the instructions that decode attention uses beside those of the other kernels.
// Knows nothing of attention.
#pragma once
#include "scoring_ptx.cuh"

namespace zl {

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Four 8x8 matrices as they lie; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_rows(uint32_t (&a)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ float4 load_shared(uint32_t address) {
    float4 value;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

// What other CTAs of this launch wrote.
__device__ __forceinline__ float2 load_two_from_l2(const float* address) {
    float2 value;
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];"
                 : "=f"(value.x), "=f"(value.y)
                 : "l"(address)
                 : "memory");
    return value;
}

__device__ __forceinline__ float4 load_float4_from_l2(const float* address) {
    float4 value;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "l"(address)
                 : "memory");
    return value;
}

__device__ __forceinline__ int add_atomically(int* counter, int value) {
    return atomicAdd(counter, value);
}

// Counts one more, and says how many there were. What was written before is seen by who comes later, and
// what they wrote is seen behind it.
__device__ __forceinline__ int arrive_in_memory(int* counter) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(counter)
                 : "memory");
    return before;
}

}  // namespace zl
