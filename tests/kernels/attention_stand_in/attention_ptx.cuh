// The attention kernel's other instructions on a CPU: those of a warp, and memory of other CTAs.
// Knows nothing of attention.
#pragma once
#include "ptx.cuh"
#include "slim_product.h"

namespace zl {

inline void barrier_arrive(uint32_t barrier) { barrier_arrive_at(barrier, own_cta()); }
inline float exp2_fast(float value) { return exp2f(value); }
inline int add_atomically(int* counter, int value) {
    const int before = *counter;
    *counter += value;
    return before;
}
inline int arrive_in_memory(int* counter) { return add_atomically(counter, 1); }
inline float4 load_shared(uint32_t address) {
    must_be_aligned(address, 16, __FILE__, __LINE__);
    float4 value;
    memcpy(&value, shared_at(address, own_cta()), 16);
    return value;
}
inline float2 load_two_from_l2(const float* address) {
    must_be_aligned(reinterpret_cast<uint64_t>(address), 8, __FILE__, __LINE__);
    return {address[0], address[1]};
}
inline float4 load_float4_from_l2(const float* address) {
    must_be_aligned(reinterpret_cast<uint64_t>(address), 16, __FILE__, __LINE__);
    return {address[0], address[1], address[2], address[3]};
}

// Element (row, column) of matrix `matrix` among the four whose rows the lanes give.
inline uint16_t matrix_element(int matrix, int row, int column) {
    const uint64_t address = fibers[(current->thread & ~31) + matrix * 8 + row].box;
    uint16_t value;
    memcpy(&value, shared_at(static_cast<uint32_t>(address) + column * 2, own_cta()), 2);
    return value;
}

template <bool kTransposed>
void load_matrices(uint32_t (&a)[4], uint32_t address) {
    const int lane = current->thread & 31;
    must_be_aligned(address, 16, __FILE__, __LINE__);
    current->box = address;
    __syncwarp();
    for (int matrix = 0; matrix < 4; ++matrix) {
        uint32_t pair = 0;
        for (int e = 0; e < 2; ++e) {
            const int row = lane / 4, column = 2 * (lane % 4) + e;
            pair |= uint32_t(kTransposed ? matrix_element(matrix, column, row)
                                         : matrix_element(matrix, row, column)) << 16 * e;
        }
        a[matrix] = pair;
    }
    __syncwarp();
}
inline void load_rows(uint32_t (&a)[4], uint32_t address) { load_matrices<false>(a, address); }
inline void load_transposed(uint32_t (&a)[4], uint32_t address) {
    load_matrices<true>(a, address);
}

inline uint32_t slim_a[kNumThreads][4], slim_b[kNumThreads][2];

inline void multiply_slim(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    multiply_slim_of(d, a, b, slim_a, slim_b, current->thread, [] { __syncwarp(); });
}

}  // namespace zl
