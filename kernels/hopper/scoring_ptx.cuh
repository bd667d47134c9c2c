// Thin names for the instructions that the scoring kernel uses beside those of the products.
// Knows nothing of scores.
#pragma once
#include "ptx.cuh"
#include "wgmma.cuh"

namespace zl {

// clang-format off
template <>
__device__ __forceinline__ void wgmma<72>(float (&d)[36], uint64_t a, uint64_t b,
                                          uint32_t accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %38, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,"
        "%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35"
        "}, %36, %37, p, 1, 1, 0, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
        : "l"(a), "l"(b), "r"(accumulate));
}
// clang-format on

__device__ __forceinline__ void prefetch_l2(const void* source) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(source));
}

// 16 bytes, or zeros without reading.
__device__ __forceinline__ void copy_16(uint32_t target, const void* source, bool is_there) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                 "r"(is_there ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// Ordinary writes before it are seen by wgmma after the next barrier.
__device__ __forceinline__ void show_to_wgmma() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void store_half(uint32_t address, uint16_t value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

// Four 8x8 matrices, transposed; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_transposed(uint32_t (&a)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address)
                 : "memory");
}

// d[16, 8] += a[16, 16] b[16, 8], of one warp.
__device__ __forceinline__ void multiply_slim(float (&d)[4], const uint32_t (&a)[4],
                                              const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Of a value from 1e-37 up.
__device__ __forceinline__ float rsqrt_fast(float value) {
    float result;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

__device__ __forceinline__ float exp2_fast(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

}  // namespace zl
