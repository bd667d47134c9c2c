// What a warp reads off its accumulators: norms, similar pairs, shares of attention.
// Knows nothing of where keys come from.
//
// Of a product [64, columns], warp w % 4 of a warpgroup holds rows 16 * (w % 4) to + 15; its lane l has
// in d[4 * t + 2 * h + e] row l / 4 + 8 * h and column 8 * t + 2 * (l % 4) + e.
#pragma once
#include "scoring_params.cuh"
#include "scoring_products.cuh"

namespace zl {

constexpr float kTinySquare = 1e-24f;      // of the shortest norm that a key is divided by
constexpr float kFixedPoint = 4194304.0f;  // 2^22: 256 cosines of at most 1 fit an int32 twice
constexpr int kFew = 4;                    // similar pairs of a lane that are noted one by one
constexpr int kLongestSpan = (1 << 24) - 1;  // of ages whose codes need no sorting

__device__ __forceinline__ int to_fixed(float value) { return __float2int_rn(value * kFixedPoint); }

// Norms of the keys of one tile from the diagonal of its product with itself, of which a lane has one
// element in each half of its rows, or none. It is taken out of d, so that no key is similar to itself.
// warp: uniform, in its warpgroup. row: the lane's first.
template <int kCount>
__device__ __forceinline__ void note_norms(float (&d)[kCount], ScoringNotes& notes, int warp,
                                           int row) {
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
    if (!is_here) return;
    const int place = inverse_place(row);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float square = fmaxf(squares[h], kTinySquare);
        float inverse = rsqrt_fast(square);
        inverse *= 1.5f - 0.5f * square * inverse * inverse;  // once refined
        notes.norms[row + 8 * h] = square * inverse;
        notes.inverses[row + 8 * h] = inverse;
        notes.itself[row + 8 * h] = squares[h] * inverse * inverse;
#pragma unroll
        for (int part = 0; part < 3; ++part) {
            notes.inverse_parts[part][place + 2 * h] = half_of(part_of(inverse, part));
        }
    }
}

// d becomes threshold * |key| * |key| - key . key. Whether one of the warp's is negative: half an
// instruction a pair beside the multiply-add. norms: of the lane's first column.
template <int kFirst, int kCount>
__device__ __forceinline__ bool find_excess(float (&d)[kCount], float2 row_terms,
                                            const float* norms) {
    int any[2] = {0, 0};
#pragma unroll
    for (int t = 0; t < 8; ++t) {
        const float2 norm = *reinterpret_cast<const float2*>(norms + 8 * t);
        float* own = d + kFirst + 4 * t;
        own[0] = fmaf(row_terms.x, norm.x, -own[0]);
        own[1] = fmaf(row_terms.x, norm.y, -own[1]);
        own[2] = fmaf(row_terms.y, norm.x, -own[2]);
        own[3] = fmaf(row_terms.y, norm.y, -own[3]);
        any[0] |= __float_as_int(own[0]) | __float_as_int(own[1]);
        any[1] |= __float_as_int(own[2]) | __float_as_int(own[3]);
    }
    return __any_sync(0xFFFFFFFF, (any[0] | any[1]) < 0);
}

__device__ __forceinline__ void raise(uint32_t* newest, uint32_t code) {
    if (code > 0) atomicMax(newest, code);
}

// Bit 31 - i: whether d[kFirst + i] is negative.
template <int kFirst, int kCount>
__device__ __forceinline__ uint32_t signs_of(const float (&d)[kCount]) {
    uint32_t parts[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        parts[0] = __funnelshift_l(__float_as_uint(d[kFirst + i]), parts[0], 1);
        parts[1] = __funnelshift_l(__float_as_uint(d[kFirst + 16 + i]), parts[1], 1);
    }
    return parts[0] << 16 | parts[1];
}

// Notes similar keys one by one. signs: as `signs_of` gives them.
template <bool kTwoTiles>
__device__ __forceinline__ void note_few(uint32_t signs, ScoringNotes& notes, int row, int column) {
    while (signs != 0) {
        const int index = __clz(signs);
        signs &= ~(0x80000000u >> index);
        const int own_row = row + (index & 2) * 4;
        const int own_column = column + (index >> 2) * 8 + (index & 1);
        raise(notes.newest + own_row, notes.codes[own_column]);
        if (kTwoTiles) raise(notes.newest + own_column, notes.codes[own_row]);
    }
}

// Leaves a lane 2 of its 16 columns, with the maximum over all rows: columns 8 * t + e where t is
// `lane_turn()`. kHalf: of the columns left, how many stay.
template <int kHalf = 8>
__device__ __forceinline__ void join_columns(uint32_t (&best)[16]) {
    constexpr int kLanes = 32 / kHalf;  // 4, 8, 16: between lanes with other rows of the same columns
    const bool is_upper = (threadIdx.x & kLanes) != 0;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        const uint32_t first = best[i], second = best[i + kHalf];
        const uint32_t kept = is_upper ? second : first;
        const uint32_t given = is_upper ? first : second;
        best[i] = max(kept, __shfl_xor_sync(0xFFFFFFFF, given, kLanes));
    }
    if constexpr (kHalf > 2) join_columns<kHalf / 2>(best);
}

__device__ __forceinline__ int lane_turn() {
    const int lane = threadIdx.x;
    return (lane & 4) | (lane >> 2 & 2) | (lane >> 4 & 1);
}

template <int kFirst, bool kTwoTiles, int kCount>
__device__ __forceinline__ void note_many(const float (&d)[kCount], ScoringNotes& notes, int row,
                                          int column) {
    const uint32_t low = notes.codes[row], high = notes.codes[row + 8];
    uint32_t best_low = 0, best_high = 0, best[16];
#pragma unroll
    for (int t = 0; t < 8; ++t) {
        const uint2 codes = *reinterpret_cast<const uint2*>(notes.codes + column + 8 * t);
        const float* own = d + kFirst + 4 * t;
        uint32_t similar[4];  // all bits, or none
#pragma unroll
        for (int i = 0; i < 4; ++i) similar[i] = __float_as_int(own[i]) >> 31;
        best_low = max(best_low, max(similar[0] & codes.x, similar[1] & codes.y));
        best_high = max(best_high, max(similar[2] & codes.x, similar[3] & codes.y));
        best[2 * t] = max(similar[0] & low, similar[2] & high);
        best[2 * t + 1] = max(similar[1] & low, similar[3] & high);
    }
    if (kTwoTiles) {
        join_columns(best);
        uint32_t* own = notes.newest + column + 8 * lane_turn();
        raise(own, best[0]);
        raise(own + 1, best[1]);
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
}

// Notes the newest similar key of the rows' keys and, of two tiles, of the columns' too. d: as
// `find_excess` leaves it. row, column: the lane's first.
template <int kFirst, bool kTwoTiles, int kCount>
__device__ __forceinline__ void note_newest(const float (&d)[kCount], ScoringNotes& notes,
                                            int row, int column) {
    const uint32_t signs = signs_of<kFirst>(d);
    if (__reduce_max_sync(0xFFFFFFFF, __popc(signs)) <= kFew) {
        note_few<kTwoTiles>(signs, notes, row, column);
    } else {
        note_many<kFirst, kTwoTiles>(d, notes, row, column);
    }
    __syncwarp();  // wgmma, which may follow, wants whole warps
}

// Of a lane's two rows, whole in the first of four lanes.
struct RowScores {
    float shares[2];  // summed over queries
    int sums[2];      // of cosines with the chunk's other keys, in fixed point
};

// d: product with the queries and the split sum of unit keys. row: the lane's first.
template <int kMembers>
__device__ __forceinline__ RowScores scores_of(const float (&d)[36], const ScoringNotes& notes,
                                               const KeyNotes& keys, const QueryNotes& queries,
                                               int row, float scale_log2) {
    constexpr int kQueries = kThreadColumns / kMembers;
    const int lane4 = threadIdx.x & 3;
    float lses[kThreadColumns];
    int until[kQueries];
#pragma unroll
    for (int i = 0; i < kThreadColumns / 4; ++i) {
        const float4 four =
            *reinterpret_cast<const float4*>(queries.lses + lane4 * kThreadColumns + 4 * i);
        lses[4 * i] = four.x, lses[4 * i + 1] = four.y;
        lses[4 * i + 2] = four.z, lses[4 * i + 3] = four.w;
    }
#pragma unroll
    for (int query = 0; query < kQueries; ++query) {
        until[query] = queries.until[lane4 * kQueries + query];
    }
    RowScores scores;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int slot = row + 8 * h;
        const int age = keys.ages[slot];
        float share = 0.0f;
#pragma unroll
        for (int query = 0; query < kQueries; ++query) {
            float best = 0.0f;
#pragma unroll
            for (int member = 0; member < kMembers; ++member) {
                const int index = query * kMembers + member;
                const float own = d[index / 2 * 4 + 2 * h + index % 2];
                const float logit = fmaf(own, scale_log2, -lses[index]);
                best = member == 0 ? logit : fmaxf(best, logit);
            }
            share += age <= until[query] ? exp2_fast(best) : 0.0f;
        }
        float total = d[32 + 2 * h] + d[33 + 2 * h];
        total += __shfl_xor_sync(0xFFFFFFFF, total, 1);
        share += __shfl_xor_sync(0xFFFFFFFF, share, 1);
        share += __shfl_xor_sync(0xFFFFFFFF, share, 2);
        scores.shares[h] = share;
        scores.sums[h] = to_fixed(total * notes.inverses[slot] - notes.itself[slot]);
    }
    return scores;
}

}  // namespace zl
