// From accumulators to out: straight from registers, or summed over the splits of a cluster; norms and
// residuals on the way.
// Knows nothing of how the accumulators came about.
//
// A warp holds kWarpM weight rows by kRows rows of x; lane l's acc[4j + 2h + c] is weight row
// l/4 + 8h and x row 8j + 2(l%4) + c. Gated weights come in groups of 8 gate rows and their 8 up rows,
// so h = 0 is a gate, h = 1 its up, and the pair meets in one thread.
#pragma once
#include "params.cuh"
#include "ptx.cuh"

namespace zl {

__device__ __forceinline__ float silu_times(float gate, float up) {
    return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// 1 / rms of every row of x, from the sums of squares of its parts, added in their order.
template <int kThreads>
__device__ __forceinline__ void find_row_scales(float* scales, const Params& p, int thread) {
    constexpr int kAtOnce = 32;  // one wait for 4,096 columns, as long as the first x tile takes
    for (int row = thread; row < p.rows; row += kThreads) {
        const float* at = p.in_squares + row;
        float sum = 0.0f;
        for (int first = 0; first < p.num_in_squares; first += kAtOnce) {
            float parts[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int64_t offset = static_cast<int64_t>(first + i) * p.rows;
                parts[i] = first + i < p.num_in_squares ? load_from_l2(at + offset) : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) sum += parts[i];
        }
        scales[row] = rsqrtf(sum * p.mean_factor + p.eps);
    }
}

// Rows of x that are not there have any scale: nothing of them is stored.
template <int kRows>
__device__ __forceinline__ void scale_rows(float (&acc)[kRows / 2], const float* scales, int lane) {
    const float2* pairs = reinterpret_cast<const float2*>(scales) + lane % 4;
#pragma unroll
    for (int i = 0; i < kRows / 2; i += 4) {
        const float2 scale = pairs[i];
        acc[i] *= scale.x;
        acc[i + 1] *= scale.y;
        acc[i + 2] *= scale.x;
        acc[i + 3] *= scale.y;
    }
}

template <int kRows>
__device__ __forceinline__ void add_bias(float (&acc)[kRows / 2], const Params& p, int weight_row,
                                         int lane) {
    const float low = __bfloat162float(p.bias[weight_row + lane / 4]);
    const float high = __bfloat162float(p.bias[weight_row + lane / 4 + 8]);
#pragma unroll
    for (int i = 0; i < kRows / 2; i += 4) {
        acc[i] += low;
        acc[i + 1] += low;
        acc[i + 2] += high;
        acc[i + 3] += high;
    }
}

// Two lanes next to each other swap what the other stores, so that each has 4 neighbours in a row:
// the even lane of `first`, the odd lane of `second`.
__device__ __forceinline__ uint2 gather_pairs(uint32_t first, uint32_t second, int lane) {
    const bool odd = lane & 1;
    const uint32_t received = __shfl_xor_sync(0xFFFFFFFF, odd ? first : second, 1);
    return odd ? make_uint2(received, second) : make_uint2(first, received);
}

// What `gather_pairs` was given.
__device__ __forceinline__ uint2 scatter_pairs(uint2 values, int lane) {
    const bool odd = lane & 1;
    const uint32_t received = __shfl_xor_sync(0xFFFFFFFF, odd ? values.x : values.y, 1);
    return odd ? make_uint2(received, values.y) : make_uint2(values.x, received);
}

// Accumulators to start from: `store_plain` backwards. All loads are on their way before the first is
// needed; in registers that the accumulators take over.
template <int kRows>
__device__ __forceinline__ void load_residual(float (&acc)[kRows / 2], const Params& p,
                                              int weight_row, int lane) {
    int row = lane / 4;
    const __nv_bfloat16* at = p.residual + static_cast<int64_t>(row) * p.residual_stride +
                              weight_row + (lane & 1) * 8 + ((lane >> 1) & 1) * 4;
    uint2 loaded[kRows / 8];
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j, row += 8, at += 8 * p.residual_stride) {
        compute_in_place(at);
        loaded[j] = row < p.rows ? load_four_from_l2(at) : make_uint2(0, 0);
    }
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
        const uint2 pairs = scatter_pairs(loaded[j], lane);
        const float2 low = unpack_bf16(transpose_8x8(pairs.x));
        const float2 high = unpack_bf16(transpose_8x8(pairs.y));
        acc[4 * j] = low.x;
        acc[4 * j + 1] = low.y;
        acc[4 * j + 2] = high.x;
        acc[4 * j + 3] = high.y;
    }
}

__device__ __forceinline__ __nv_bfloat16* out_at(const Params& p, int row, int column) {
    return p.out + static_cast<int64_t>(row) * p.out_stride + column;
}

__device__ __forceinline__ void store_four(__nv_bfloat16* at, uint2 values) {
    *reinterpret_cast<uint2*>(at) = values;
}

// Each store of a warp fills 8 whole 32-byte sectors.
template <int kRows>
__device__ __forceinline__ void store_plain(const float (&acc)[kRows / 2], const Params& p,
                                            int weight_row, int lane) {
    int row = lane / 4;
    __nv_bfloat16* at =
        out_at(p, row, weight_row + (lane & 1) * 8 + ((lane >> 1) & 1) * 4);
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j, row += 8, at += 8 * p.out_stride) {
        compute_in_place(at);
        const uint32_t low = transpose_8x8(pack_bf16(acc[4 * j], acc[4 * j + 1]));
        const uint32_t high = transpose_8x8(pack_bf16(acc[4 * j + 2], acc[4 * j + 3]));
        const uint2 values = gather_pairs(low, high, lane);
        if (row < p.rows) store_four(at, values);
    }
}

template <int kRows>
__device__ __forceinline__ void store_gated(const float (&acc)[kRows / 2], const Params& p,
                                            int weight_row, int lane) {
    int row = lane / 4 + 8 * (lane & 1);
    __nv_bfloat16* at = out_at(p, row, weight_row / 2 + ((lane >> 1) & 1) * 4);
#pragma unroll
    for (int j = 0; j < kRows / 8; j += 2, row += 16, at += 16 * p.out_stride) {
        compute_in_place(at);
        uint32_t block[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = 4 * (j + half);
            block[half] = transpose_8x8(pack_bf16(silu_times(acc[i], acc[i + 2]),
                                                  silu_times(acc[i + 1], acc[i + 3])));
        }
        const uint2 values = gather_pairs(block[0], block[1], lane);
        if (row < p.rows) store_four(at, values);
    }
}

// Partial sums lie as float32 [row of x, weight row of the tile]. The pitch spreads a warp's 32 values,
// 8 weight rows by every second of 8 rows of x, over all banks.
template <int kGroups>
struct Partials {
    static constexpr int kPitch = kGroups * kGroupM + 4;
};

template <int kGroups, int kRows>
__device__ __forceinline__ void write_partials(const float (&acc)[kRows / 2], uint32_t partials,
                                               const Params& p, int tile_row, int lane) {
    constexpr int kPitch = Partials<kGroups>::kPitch;
    const int first_row = 2 * (lane % 4);
    const uint32_t start = partials + (first_row * kPitch + tile_row + lane / 4) * 4;
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
        const int row = 8 * (i / 4) + i % 2;
        const int offset = row * kPitch + 8 * ((i / 2) % 2);
        if (first_row + row < p.rows) store_shared(start + offset * 4, acc[i]);
    }
}

// The sum over splits of 4 neighbours, in the order of the splits, whoever came first.
__device__ __forceinline__ float4 sum_splits(const float4 (&parts)[kMaxSplits], int splits) {
    float4 sum = parts[0];
#pragma unroll
    for (int split = 1; split < kMaxSplits; ++split) {
        if (split < splits) {
            sum.x += parts[split].x;
            sum.y += parts[split].y;
            sum.z += parts[split].z;
            sum.w += parts[split].w;
        }
    }
    return sum;
}

__device__ __forceinline__ float4 load_and_sum(uint32_t address, const Params& p, int sharer) {
    float4 parts[kMaxSplits];
#pragma unroll
    for (int split = 0; split < kMaxSplits; ++split) {
        if (split < p.splits) {
            parts[split] = load_remote(address_in(address, split * p.sharers + sharer));
        }
    }
    return sum_splits(parts, p.splits);
}

// CTA `split` of a tile finishes its share of the rows of x: sums, activation, store.
template <int kGroups>
__device__ __forceinline__ void reduce_splits(uint32_t partials, const Params& p, int tile_start,
                                              int split, int sharer, int thread) {
    constexpr int kPitch = Partials<kGroups>::kPitch;
    constexpr int kThreads = kGroups * 128;
    const int columns = p.gated ? kGroups * kGroupM / 2 : kGroups * kGroupM;
    const int quads = columns / 4;
    const int first_row = p.rows * split / p.splits;
    const int num_rows = p.rows * (split + 1) / p.splits - first_row;
#pragma unroll 2
    for (int index = thread; index < num_rows * quads; index += kThreads) {
        const int row = first_row + index / quads;
        const int column = index % quads * 4;
        const int tile_row = p.gated ? column / 8 * 16 + column % 8 : column;
        if (tile_start + tile_row >= p.weight_rows) continue;
        const uint32_t address = partials + (row * kPitch + tile_row) * sizeof(float);
        float4 value = load_and_sum(address, p, sharer);
        if (p.gated) {
            const float4 up = load_and_sum(address + 8 * sizeof(float), p, sharer);
            value = make_float4(silu_times(value.x, up.x), silu_times(value.y, up.y),
                                silu_times(value.z, up.z), silu_times(value.w, up.w));
        }
        const int start = p.gated ? tile_start / 2 : tile_start;
        store_four(out_at(p, row, start + column),
                   make_uint2(pack_bf16(value.x, value.y), pack_bf16(value.z, value.w)));
    }
}

__device__ __forceinline__ float sum_of_squares(uint32_t pair) {
    const float2 values = unpack_bf16(pair);
    return values.x * values.x + values.y * values.y;
}

// As reduce_splits, for a product that adds to the residual stream (one split too): half a warp has a row
// of the tile, so that its squares meet in one thread in an order that never changes.
template <int kGroups>
__device__ __forceinline__ void finish_stream(uint32_t partials, const Params& p, int tile_start,
                                              int split, int sharer, int thread) {
    constexpr int kPitch = Partials<kGroups>::kPitch;
    constexpr int kLanes = 16;
    constexpr int kRowStep = kGroups * 128 / kLanes;
    if (tile_start >= p.weight_rows) return;
    float* const squares_out = p.out_squares + tile_start / (kGroups * kGroupM) * p.rows;
    const uint32_t own_half = 0xFFFFu << (thread & kLanes);
    const int lane = thread % kLanes;
    const int end_row = p.rows * (split + 1) / p.splits;
    for (int row = p.rows * split / p.splits + thread / kLanes; row < end_row; row += kRowStep) {
        float squares = 0.0f;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            const int column = group * kGroupM + lane * 4;
            if (tile_start + column >= p.weight_rows) continue;
            const uint32_t address = partials + (row * kPitch + column) * sizeof(float);
            const float4 value = load_and_sum(address, p, sharer);
            const uint2 stored =
                make_uint2(pack_bf16(value.x, value.y), pack_bf16(value.z, value.w));
            store_four(out_at(p, row, tile_start + column), stored);
            squares += sum_of_squares(stored.x) + sum_of_squares(stored.y);
        }
#pragma unroll
        for (int step = kLanes / 2; step > 0; step /= 2) {
            squares += __shfl_xor_sync(own_half, squares, step);
        }
        if (lane == 0) squares_out[row] = squares;
    }
}

}  // namespace zl
