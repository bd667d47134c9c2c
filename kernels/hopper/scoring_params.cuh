// What the scoring kernel is told, and how a CTA's shared memory lies; the same on host and device.
// Knows nothing of how it is computed.
#pragma once
#include <cuda_bf16.h>
#include <stddef.h>
#include <stdint.h>

namespace zl {

constexpr int kChunkSlots = 256;
constexpr int kScoreThreads = 256;   // a thread to a slot; two warpgroups
constexpr int kScoreWarps = kScoreThreads / 32;
constexpr int kTileSlots = 64;
constexpr int kTileBytes = kTileSlots * 128;  // of a panel
constexpr int kPanelDims = 64;       // 128 bytes: one swizzled row
constexpr int kColumns = 64;         // queries times padded group
constexpr int kMassColumns = 72;     // and 8 for the sum of unit keys, of which 3 are used
constexpr int kThreadColumns = 16;   // of those 64 that one thread's accumulators hold
constexpr int kKeyPanel = kChunkSlots * 128;   // bytes
constexpr int kQueryPanel = kMassColumns * 128;
constexpr int kGroup = 32;           // of the newest keys, an equal number of each warp's
constexpr int kGroupPanel = kGroup * 128;
constexpr int kInverseRow = kChunkSlots + 32;  // bf16 numbers; rows are 16 banks apart

// Division of numbers below 2^31 by one that the host knows: two multiplications' worth.
struct Divisor {
    uint32_t multiplier;
    uint32_t shift;

    explicit Divisor(uint32_t number) : multiplier(1), shift(0) {
        while ((1ull << shift) < number) ++shift;
        multiplier = static_cast<uint32_t>(((1ull << 32) * ((1ull << shift) - number)) / number + 1);
    }

    __device__ __forceinline__ int divide(int value) const {
        const uint32_t number = static_cast<uint32_t>(value);
        return static_cast<int>((__umulhi(number, multiplier) + number) >> shift);
    }
};

struct ScoringParams {
    const __nv_bfloat16* kv;    // [blocks, 2, block_size, heads, dim]
    const int64_t* slots;       // [rows, max_tail], padding -1
    const int32_t* positions;   // [rows, heads, max_tail]
    const __nv_bfloat16* ring;  // [entries, heads * group, dim]
    const float* ring_lse;      // [entries, heads * group]
    const int64_t* ring_slots;  // [rows, queries], padding -1
    const int64_t* query_at;    // [rows, queries]
    float* mass;                // [rows, heads, max_tail], fewer than 2^31
    float* similarity;          // [rows, heads, max_tail]
    int heads;
    int group;
    int queries;
    int max_tail;
    int chunk;
    int block_size;
    int num_chunks;             // of a row
    int share_len;              // of a head's tasks, its chunks of all rows, those that a CTA takes
    int longer_shares;          // as many shares, the first, have one task more
    Divisor by_heads;
    Divisor by_num_chunks;
    Divisor by_block_size;
    float scale_log2;
    float threshold;
};

// Of the keys of a chunk; those of the chunk before are still in use when it arrives.
struct alignas(16) KeyNotes {
    int ages[kChunkSlots];     // position + 1, 0 where there is no key
    int dropped[kChunkSlots];  // from the slot's sum of cosines, in fixed point
};

// Of the queries of a row, likewise. A column stands at kThreadColumns * (thread's lane % 4) + its index
// in that thread.
struct alignas(16) QueryNotes {
    float lses[kColumns];     // inf where there is no query
    int until[kColumns];      // age of the newest key that a query sees; [lane % 4][query]
    int counts[kScoreWarps];  // queries that are there
};

struct alignas(16) WarpCounts {
    int oldest;  // age, of the warp's slots
    int youngest;
    int keys;
    int unused;
};

// Beside keys, queries and the group. A slot's notes stand at its index in the chunk.
struct alignas(16) ScoringNotes {
    WarpCounts counts[kScoreWarps];
    // 1 / norm split into three bf16 numbers, and zeros; the slots in the order of `inverse_place`.
    uint16_t inverse_parts[4][kInverseRow];
    float norms[kChunkSlots];      // of keys, at least 1e-12
    float inverses[kChunkSlots];   // 1 / norm
    float itself[kChunkSlots];     // the cosine with itself: 1, or 0 of a key of zeros
    uint32_t codes[kChunkSlots];   // rise with the age, the slot's index in the low 8 bits, 0: no key
    uint32_t newest[kChunkSlots];  // the highest code of a similar key, 0: none
    uint32_t group_codes[kGroup];   // of the group's keys
    uint32_t rest[kScoreWarps];     // the highest code of a warp's other keys
    KeyNotes keys[2];
    QueryNotes queries[2];
    int patience;                   // for how many chunks the group is not tried
};

// What is read 16 or 8 bytes at a time.
static_assert(offsetof(QueryNotes, lses) % 16 == 0, "float4");
static_assert(offsetof(ScoringNotes, counts) % 16 == 0 && sizeof(WarpCounts) == 16, "whole");
static_assert(offsetof(ScoringNotes, inverse_parts) % 16 == 0 && kInverseRow % 8 == 0, "uint4");
static_assert(offsetof(ScoringNotes, norms) % 8 == 0, "float2");
static_assert(offsetof(ScoringNotes, codes) % 8 == 0, "uint2");
static_assert(offsetof(ScoringNotes, group_codes) % 8 == 0, "uint2");
// Swizzled rows start at multiples of 1024 in each panel; behind them lie the notes.
static_assert(kKeyPanel % 1024 == 0 && kQueryPanel % 1024 == 0 && kGroupPanel % 1024 == 0 &&
              kTileBytes % 1024 == 0, "operands");

constexpr int scoring_shared_bytes(int panels) {
    return 1024 + panels * (kKeyPanel + kQueryPanel + kGroupPanel) +
           static_cast<int>(sizeof(ScoringNotes));
}

}  // namespace zl
