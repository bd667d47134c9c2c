// The quick way for a chunk of which nearly every key has a newest similar key among the newest 32.
// Knows nothing of attention.
//
// A warp gives its 4 newest of every 8th slot, so that the group is the newest 32 where slots are in
// order, and nearly so where they are not. What of its similar keys is newer than all keys outside the
// group is a key's newest similar one, whatever the others are.
#pragma once
#include "scoring_rows.cuh"

namespace zl {

// Of the warp's slots, which are as many of each other warp's.
__device__ __forceinline__ void note_group(ScoringNotes& notes, int warp) {
    constexpr int kEach = kGroup / kScoreWarps;
    const int lane = threadIdx.x & 31;
    uint32_t code = notes.codes[lane * kScoreWarps + warp];
#pragma unroll
    for (int i = 0; i <= kEach; ++i) {
        const uint32_t newest = __reduce_max_sync(0xFFFFFFFF, code);
        if (code == newest) code = 0;
        if (lane == 0) {
            if (i < kEach) notes.group_codes[warp * kEach + i] = newest;
            if (i == kEach) notes.rest[warp] = newest;
        }
    }
}

// Eight threads copy a key of the group, so that it can be an operand.
template <int kPanels>
__device__ __forceinline__ void copy_group(const ScoringNotes& notes, char* shared) {
    const int row = threadIdx.x >> 3;
    const int part = threadIdx.x & 7;
    const int slot = notes.group_codes[row] & 255;
    char* const group = shared + kPanels * (kKeyPanel + kQueryPanel);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
        const char* key = shared + panel * kKeyPanel + slot * 128 + (((part ^ slot) & 7) << 4);
        char* target = group + panel * kGroupPanel + row * 128 + (((part ^ row) & 7) << 4);
        *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(key);
    }
}

// Of a product of a tile with the group: notes the newest similar key of the lane's rows where it is
// sure to be the newest; whether it is of all rows. rest: the highest code outside the group.
__device__ __forceinline__ bool note_sure(const float (&d)[16], ScoringNotes& notes, float2 terms,
                                          int row, uint32_t rest) {
    uint32_t best[2] = {0, 0};
#pragma unroll
    for (int t = 0; t < kGroup / 8; ++t) {
        const int column = 8 * t + 2 * (threadIdx.x & 3);
        const uint2 pair = *reinterpret_cast<const uint2*>(notes.group_codes + column);
        const uint32_t codes[2] = {pair.x, pair.y};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int slot = codes[e] & 255;
            const float norm = notes.norms[slot];
            const bool is_low = fmaf(terms.x, norm, -d[4 * t + e]) < 0.0f && slot != row;
            const bool is_high = fmaf(terms.y, norm, -d[4 * t + 2 + e]) < 0.0f && slot != row + 8;
            best[0] = max(best[0], is_low ? codes[e] : 0u);
            best[1] = max(best[1], is_high ? codes[e] : 0u);
        }
    }
    bool is_sure = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        best[h] = max(best[h], __shfl_xor_sync(0xFFFFFFFF, best[h], 1));
        best[h] = max(best[h], __shfl_xor_sync(0xFFFFFFFF, best[h], 2));
        const int slot = row + 8 * h;
        const bool is_newest = best[h] > rest;
        if (is_newest && (threadIdx.x & 3) == 0) notes.newest[slot] = best[h];
        is_sure &= is_newest || notes.codes[slot] == 0;
    }
    return is_sure;
}

}  // namespace zl
