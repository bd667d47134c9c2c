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
//
// An RMSNorm ahead of the product is in its weight but for 1 / rms of each row of x, which multiplies that
// row of the result: it comes from `in_squares`. A product that adds to the residual stream starts from
// `residual`, and leaves the sums of squares of what it stored in `out_squares`, for the next norm.
struct Params {
    __nv_bfloat16* out;             // [rows, out_stride]
    const __nv_bfloat16* bias;      // [weight_rows] or null
    const __nv_bfloat16* residual;  // [rows, residual_stride] or null
    float* out_squares;             // [weight tiles, rows]; null without residual
    const float* in_squares;        // [num_in_squares, rows], to be added; or null: no norm
    int num_in_squares;
    float mean_factor;              // 1 / columns of x
    float eps;                      // added to the mean square
    int out_stride;                 // elements
    int residual_stride;            // elements
    int rows;                       // of x
    int weight_rows;                // N
    int k_blocks;                   // K / kBlockK
    int rounds;                     // groups of `sharers` weight tiles
    int stages;
    int splits;
    int sharers;
    bool gated;

    // Whether a CTA, which then has one round, lays its sums down in shared memory before it is done.
    __host__ __device__ bool meets_in_shared() const { return splits > 1 || residual != nullptr; }
};

}  // namespace zl
