// What one launch of decode attention is told, the same on host and device.
// Knows nothing of how it is computed.
#pragma once
#include <cuda_bf16.h>

namespace zl {

constexpr int kBlockSlots = 16;
constexpr int kTileBlocks = 4;  // one for each consumer warp
constexpr int kMaxGroup = 8;    // query heads of a KV head

// A stretch of one row's slots, of one KV head; a (row, KV head) pair is one item or several.
struct AttentionItem {
    int row;
    int head;
    int first_block;  // in block_ids
    int num_blocks;   // >= 1
    int last_slots;   // of its last block, 1 to kBlockSlots
    int part;         // where its sums go; -1: it is a whole pair
    int first_part;   // of the pair
    int num_parts;    // of the pair; their places follow each other
};
constexpr int kItemNumbers = sizeof(AttentionItem) / sizeof(int);

struct AttentionParams {
    const __nv_bfloat16* q;      // [rows, q_stride], heads side by side
    __nv_bfloat16* out;          // [rows, heads * group, dim]
    float* lse;                  // [rows, heads * group], base 2; or null
    const int* num_items;        // one number
    const int* items;            // [num_items, kItemNumbers]; room for at least one for each CTA
    const int* block_ids;        // of all rows
    int* queue;                  // [2], zero before and after: items taken, CTAs that are done
    int* arrived;                // [parts], zero before and after: parts of a pair, at its first
    float* sums;                 // [parts, group, dim]
    float* stats;                // [parts, group, 2]: maximum in base 2, sum of weights
    int q_stride;                // elements
    int heads;                   // KV heads
    int group;                   // query heads of each
    float scale_log2;            // of q.k, in base 2
};

}  // namespace zl
