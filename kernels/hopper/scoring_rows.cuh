// What a warp reads off its accumulators: norms, similar pairs, shares of attention.
// Knows nothing of where keys come from.
//
// Of a product [64, columns], warp w % 4 of a warpgroup holds rows 16 * (w % 4) to + 15; its lane l has
// in d[4 * t + 2 * h + e] row l / 4 + 8 * h and column 8 * t + 2 * (l % 4) + e.
#pragma once
#include "scoring_params.cuh"
#include "scoring_ptx.cuh"

namespace zl {

constexpr float kTinySquare = 1e-24f;      // of the shortest norm that a key is divided by
constexpr float kFixedPoint = 4194304.0f;  // 2^22: 256 cosines of at most 1 fit an int32 twice
constexpr int kLongestSpan = (1 << 24) - 1;  // of ages whose codes need no sorting

__device__ __forceinline__ int to_fixed(float value) { return __float2int_rn(value * kFixedPoint); }

// Norms of the keys of one tile from the diagonal of its product with itself, of which a lane has one
// element in each half of its rows, or none. It is taken out of d, so that no key is similar to itself.
// warp: uniform, in its warpgroup. row: the lane's first.
__device__ __forceinline__ void note_norms(float (&d)[32], ScoringNotes& notes, int warp, int row) {
    constexpr float kLowest = -3.0e38f;
    const bool is_here = ((threadIdx.x >> 3) & 3) == (threadIdx.x & 3);
    const bool is_odd = (threadIdx.x >> 2) & 1;
    float squares[2];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        if (warp == w) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float* own = d + (2 * w + h) * 4 + 2 * h;
                squares[h] = is_odd ? own[1] : own[0];
                own[0] = is_here && !is_odd ? kLowest : own[0];
                own[1] = is_here && is_odd ? kLowest : own[1];
            }
        }
    }
    if (is_here) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float square = fmaxf(squares[h], kTinySquare);
            float inverse = rsqrt_fast(square);
            inverse *= 1.5f - 0.5f * square * inverse * inverse;  // once refined
            notes.norms[row + 8 * h] = square * inverse;
            notes.inverses[row + 8 * h] = inverse;
            notes.masses[row + 8 * h] = squares[h] * inverse * inverse;
        }
    }
}

// d becomes key . key - threshold * |key| * |key|. Whether one of the warp's is not negative: half an
// instruction a pair beside the multiply-add. norms: of the lane's first column.
template <int kFirst, int kCount>
__device__ __forceinline__ bool subtract_threshold(float (&d)[kCount], float2 row_terms,
                                                   const float* norms) {
    int both = -1;
#pragma unroll
    for (int t = 0; t < 8; ++t) {
        const float2 norm = *reinterpret_cast<const float2*>(norms + 8 * t);
        float* own = d + kFirst + 4 * t;
        own[0] = fmaf(row_terms.x, norm.x, own[0]);
        own[1] = fmaf(row_terms.x, norm.y, own[1]);
        own[2] = fmaf(row_terms.y, norm.x, own[2]);
        own[3] = fmaf(row_terms.y, norm.y, own[3]);
        both &= __float_as_int(own[0]) & __float_as_int(own[1]);
        both &= __float_as_int(own[2]) & __float_as_int(own[3]);
    }
    return __any_sync(0xFFFFFFFF, both >= 0);
}

__device__ __forceinline__ void raise(uint32_t* newest, uint32_t code) {
    if (code > *newest) atomicMax(newest, code);  // what is read may be old, never too high
}

// Notes the newest similar key of the rows' keys and, of two tiles, of the columns' too. d: as
// subtract_threshold leaves it. row, column: the lane's first.
template <int kFirst, bool kTwoTiles, int kCount>
__device__ __forceinline__ void note_newest(const float (&d)[kCount], ScoringNotes& notes,
                                            int row, int column) {
    const uint32_t low = notes.codes[row], high = notes.codes[row + 8];
    uint32_t best_low = 0, best_high = 0;
#pragma unroll
    for (int t = 0; t < 8; ++t) {
        const uint2 codes = *reinterpret_cast<const uint2*>(notes.codes + column + 8 * t);
        const float* own = d + kFirst + 4 * t;
        best_low = max(best_low, own[0] > 0.0f ? codes.x : 0u);
        best_low = max(best_low, own[1] > 0.0f ? codes.y : 0u);
        best_high = max(best_high, own[2] > 0.0f ? codes.x : 0u);
        best_high = max(best_high, own[3] > 0.0f ? codes.y : 0u);
        if (kTwoTiles) {
            uint32_t first = max(own[0] > 0.0f ? low : 0u, own[2] > 0.0f ? high : 0u);
            uint32_t second = max(own[1] > 0.0f ? low : 0u, own[3] > 0.0f ? high : 0u);
            raise(notes.newest + column + 8 * t, first);
            raise(notes.newest + column + 8 * t + 1, second);
        }
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        best_low = max(best_low, __shfl_xor_sync(0xFFFFFFFF, best_low, step));
        best_high = max(best_high, __shfl_xor_sync(0xFFFFFFFF, best_high, step));
    }
    if ((threadIdx.x & 3) == 0) {
        raise(notes.newest + row, best_low);
        raise(notes.newest + row + 8, best_high);
    }
    __syncwarp();  // wgmma, which may follow, wants whole warps
}

// The shares that the queries give the rows' keys, and the sums of their cosines with all keys. d:
// product with the queries and the split sum of unit keys. row: the lane's first.
template <int kMembers>
__device__ __forceinline__ void note_scores(const float (&d)[36], ScoringNotes& notes, int row,
                                            float scale_log2) {
    constexpr int kQueries = kThreadColumns / kMembers;
    const int lane4 = threadIdx.x & 3;
    const float* lses = notes.lses + lane4 * kThreadColumns;
    const int* until = notes.until + lane4 * kQueries;
    const int ages[2] = {notes.ages[row], notes.ages[row + 8]};
    float shares[2] = {0.0f, 0.0f};
#pragma unroll
    for (int query = 0; query < kQueries; ++query) {
        float best[2];
#pragma unroll
        for (int member = 0; member < kMembers; ++member) {
            const int index = query * kMembers + member;
            const float lse = lses[index];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float own = d[index / 2 * 4 + 2 * h + index % 2];
                const float logit = fmaf(own, scale_log2, -lse);
                best[h] = member == 0 ? logit : fmaxf(best[h], logit);
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float share = exp2_fast(best[h]);
            shares[h] += ages[h] <= until[query] ? share : 0.0f;
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float total = d[32 + 2 * h] + d[33 + 2 * h];
        total += __shfl_xor_sync(0xFFFFFFFF, total, 1);
        shares[h] += __shfl_xor_sync(0xFFFFFFFF, shares[h], 1);
        shares[h] += __shfl_xor_sync(0xFFFFFFFF, shares[h], 2);
        if (lane4 == 0) {
            const int slot = row + 8 * h;
            const float itself = notes.masses[slot];
            notes.sums[slot] = to_fixed(total * notes.inverses[slot] - itself);
            notes.masses[slot] = shares[h];
        }
    }
}

}  // namespace zl
