// What the scoring kernel is told, and how a CTA's shared memory lies; the same on host and device.
// Knows nothing of how it is computed.
#pragma once
#include <cuda_bf16.h>
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
    int num_tasks;
    Divisor by_heads;
    Divisor by_num_chunks;
    Divisor by_block_size;
    float scale_log2;
    float threshold;
};

// Beside keys and queries. A slot's notes stand at its index in the chunk; a column's at
// kThreadColumns * (thread's lane % 4) + the column's index in that thread.
struct ScoringNotes {
    float norms[kChunkSlots];      // of keys, at least 1e-12
    float inverses[kChunkSlots];   // 1 / norm
    float masses[kChunkSlots];     // first the cosine with itself: 1, or 0 of a key of zeros
    int sums[kChunkSlots];         // of cosines, in fixed point
    int ages[kChunkSlots];         // position + 1, 0 where there is no key
    uint32_t codes[kChunkSlots];   // rise with the age, the slot's index in the low 8 bits, 0: no key
    uint32_t newest[kChunkSlots];  // the highest code of a similar key, 0: none
    float lses[kColumns];          // inf where there is no query
    int until[kColumns];           // age of the newest key that a query sees; [lane % 4][query]
    int oldest[kScoreWarps];       // of each warp's slots
    int youngest[kScoreWarps];
    int key_counts[kScoreWarps];
    int query_counts[kScoreWarps];
    float directions[2 * kScoreWarps][2 * kPanelDims];  // parts of the sum of unit keys
};

constexpr int scoring_shared_bytes(int panels) {
    return 1024 + panels * (kKeyPanel + kQueryPanel) + static_cast<int>(sizeof(ScoringNotes));
}

}  // namespace zl
