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

// Of two such numbers, the first in the low half.
__device__ __forceinline__ uint32_t pack_halves(float first, float second) {
    return __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632);
}

// The warp's part of the sum of key / |key|: of its 32 slots, the two terms of each dim into
// out[0][dim] and out[1][dim].
template <int kPanels>
__device__ __forceinline__ void add_unit_keys(uint32_t keys, const float* inverses,
                                              float (*out)[2 * kPanelDims]) {
    const int lane = threadIdx.x & 31;
    const int first = threadIdx.x & ~31;  // slot
    const int part = lane >> 2;           // column of the inverses
    uint32_t b[2][2];
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        const float* own = inverses + first + step * 16 + 2 * (lane & 3);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 pair = *reinterpret_cast<const float2*>(own + 8 * half);
            b[step][half] = pack_halves(part_of(pair.x, part), part_of(pair.y, part));
        }
    }
    // Matrix 0: the 8 low slots and dims; 1: the next dims; 2 and 3: the next slots.
    const int slot = (lane & 7) + ((lane >> 4) << 3);
    const int dim_half = (lane >> 3) & 1;
    float* const target = out[lane & 1] + (lane >> 2);
#pragma unroll
    for (int tile = 0; tile < kPanels * kPanelDims / 16; ++tile) {
        const int at = (tile & 3) * 2 + dim_half;  // 16 bytes of the panel's row
        const uint32_t row = keys + (tile >> 2) * kKeyPanel + (first + slot) * 128;
        float d[4] = {};
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            uint32_t a[4];
            load_transposed(a, row + step * 16 * 128 + (((at ^ slot) & 7) << 4));
            multiply_slim(d, a, b[step]);
        }
        if ((lane & 3) < 2) {  // columns 0 and 1, or column 2 and one of zeros
            target[tile * 16] = d[0] + d[1];
            target[tile * 16 + 8] = d[2] + d[3];
        }
    }
}

// Rows 64 to 71 of the queries' operand, of which the sum of unit keys fills three.
template <int kPanels>
__device__ __forceinline__ void clear_direction(char* queries) {
    for (int i = threadIdx.x; i < kPanels * 256; i += kScoreThreads) {
        char* panel = queries + (i >> 8) * kQueryPanel + kColumns * 128;
        reinterpret_cast<uint32_t*>(panel)[i & 255] = 0;
    }
}

// Thread `dim` of the first dims sums its parts and writes them, split, as rows 64 to 66 of the
// queries' operand.
template <int kPanels>
__device__ __forceinline__ void store_direction(const ScoringNotes& notes, uint32_t queries) {
    const int dim = threadIdx.x;
    if (dim >= kPanels * kPanelDims) return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * kScoreWarps; ++i) sum += notes.directions[i][dim];
    const uint32_t panel = queries + (dim >> 6) * kQueryPanel + kColumns * 128;
#pragma unroll
    for (int part = 0; part < 3; ++part) {
        const uint32_t at = (((dim >> 3) & 7) ^ part) << 4;  // row 64 + part: its low bits are part
        const uint32_t value = __float_as_uint(part_of(sum, part)) >> 16;
        store_half(panel + part * 128 + at + (dim & 7) * 2, static_cast<uint16_t>(value));
    }
}

}  // namespace zl
