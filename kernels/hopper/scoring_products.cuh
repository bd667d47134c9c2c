// The products of the scoring kernel: keys with keys, with queries, and with their inverse norms.
// Knows nothing of what they are for.
#pragma once
#include "scoring_params.cuh"
#include "scoring_ptx.cuh"

namespace zl {

// Starts d[64, kRows] = A[64, dims] B[kRows, dims]^T and commits it. a, b: addresses of the first row
// in the first panel, of whole groups of 8 rows.
template <int kRows, int kPanels>
__device__ __forceinline__ void multiply(float (&d)[kRows / 2], uint32_t a, uint32_t b,
                                         uint32_t b_panel) {
    wgmma_fence();
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
        const uint64_t a_rows = operand_descriptor(a + panel * kKeyPanel);
        const uint64_t b_rows = operand_descriptor(b + panel * b_panel);
#pragma unroll
        for (int step = 0; step < kPanelDims / 16; ++step) {
            wgmma<kRows>(d, a_rows + step * kDescriptorStepK16, b_rows + step * kDescriptorStepK16,
                         panel + step > 0);
        }
    }
    wgmma_commit();
}

// The upper half of a float32 is a bfloat16 that holds its first 8 bits; three hold all 24.
__device__ __forceinline__ float upper_half(float value) {
    return __uint_as_float(__float_as_uint(value) & 0xFFFF0000);
}

// Part 0, 1 or 2 of a value as those bfloat16 numbers, still a float32; beyond, 0.
__device__ __forceinline__ float part_of(float value, int part) {
    const float first = upper_half(value);
    const float rest = value - first;
    const float second = upper_half(rest);
    const float third = upper_half(rest - second);
    const float low = part == 1 ? second : third;
    return part == 0 ? first : (part < 3 ? low : 0.0f);
}

// The bits of such a number.
__device__ __forceinline__ uint16_t half_of(float part) {
    return static_cast<uint16_t>(__float_as_uint(part) >> 16);
}

// Where the inverse norm of a slot stands: what one lane needs for two steps of `store_direction` lies
// together. Of the slot 8 further, when that has the same bits 4 and up: 2 further.
__device__ __forceinline__ int inverse_place(int slot) {
    const int step = (slot >> 4) & 1, half = (slot >> 3) & 1, lane4 = (slot >> 1) & 3;
    return (slot & ~31) | lane4 << 3 | step << 2 | half << 1 | (slot & 1);
}

// Writes 16 dims of the sum of key / |key| over all slots, split, as rows 64 to 66 of the queries'
// operand. `warp`: which dims; uniform.
template <int kPanels>
__device__ __forceinline__ void store_direction(const ScoringNotes& notes, uint32_t keys,
                                                uint32_t queries, int warp) {
    if (warp >= kPanels * kPanelDims / 16) return;
    const int lane = threadIdx.x & 31;
    const uint16_t* inverses = notes.inverse_parts[min(lane >> 2, 3)] + (lane & 3) * 8;
    // Matrix 0: the 8 low slots and dims; 1: the next dims; 2 and 3: the next slots.
    const int slot = (lane & 7) + ((lane >> 4) << 3);
    const int at = (warp & 3) * 2 + ((lane >> 3) & 1);  // 16 bytes of the panel's row
    const uint32_t row = keys + (warp >> 2) * kKeyPanel + slot * 128 + (((at ^ slot) & 7) << 4);
    float d[2][4] = {};
#pragma unroll
    for (int i = 0; i < kChunkSlots / 32; ++i) {
        const uint4 parts = *reinterpret_cast<const uint4*>(inverses + i * 32);
        const uint32_t b[2][2] = {{parts.x, parts.y}, {parts.z, parts.w}};
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            uint32_t a[4];
            load_transposed(a, row + (i * 2 + step) * 16 * 128);
            multiply_slim(d[step], a, b[step]);
        }
    }
    // Columns 0 to 2 hold the parts, all others zeros.
    const int part = lane & 3;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float sum = d[0][2 * h] + d[1][2 * h] + (d[0][2 * h + 1] + d[1][2 * h + 1]);
        sum += __shfl_xor_sync(0xFFFFFFFF, sum, 1);
        sum += __shfl_xor_sync(0xFFFFFFFF, sum, 2);
        const int dim = (lane >> 2) + 8 * h;  // of the 16
        const uint32_t chunk = (((warp & 3) * 2 + h) ^ part) << 4;  // of row 64 + part
        const uint32_t target = queries + (warp >> 2) * kQueryPanel + (kColumns + part) * 128;
        if (part < 3) store_half(target + chunk + (dim & 7) * 2, half_of(part_of(sum, part)));
    }
}

// What is never written again: rows 64 to 71 of the queries' operand, of which `store_direction` fills
// three, and the inverses' row of zeros.
template <int kPanels>
__device__ __forceinline__ void clear_unused(ScoringNotes& notes, char* queries) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kPanels * 256; i += kScoreThreads) {
        char* panel = queries + (i >> 8) * kQueryPanel + kColumns * 128;
        reinterpret_cast<uint32_t*>(panel)[i & 255] = 0;
    }
    notes.inverse_parts[3][threadIdx.x] = 0;
}

}  // namespace zl
