// What one product is told, the same on host and device.
// Knows nothing of how it is computed.
#pragma once
#include <cuda_bf16.h>

namespace zl {

constexpr int kBlockK = 64;        // one 128-byte swizzled row of bf16
constexpr int kGroupM = 64;        // weight rows of one warpgroup: wgmma's M
constexpr int kWarpM = 16;         // weight rows of one warp's accumulators
constexpr int kMaxSplits = 8;      // CTAs of a cluster
constexpr int kMaxStages = 16;
constexpr int kSwizzleBytes = 1024;

// A cluster is `splits` times `sharers` CTAs: those with one split share each x tile, those with one
// weight tile add their partial sums.
struct Params {
    __nv_bfloat16* out;         // [rows, out_stride]
    const __nv_bfloat16* bias;  // [weight_rows] or null
    int out_stride;             // elements
    int rows;                   // of x
    int weight_rows;            // N
    int k_blocks;               // K / kBlockK
    int rounds;                 // groups of `sharers` weight tiles
    int stages;
    int splits;
    int sharers;
    bool gated;
};

}  // namespace zl
