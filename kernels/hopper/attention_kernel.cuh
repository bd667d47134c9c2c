// Decode attention over paged keys and values: one query token a row, keys and values read once.
// Knows nothing of how rows were divided into items, or of launches.
//
// Each CTA takes items from a queue. One warp feeds a ring of tiles (4 blocks of 16 slots, keys and values)
// through the copy engine; of each tile every other warp has a block. It multiplies keys [16 slots, dim] by
// queries [dim, 8 heads], and values^T [dim, 16 slots] by weights [16 slots, 8 heads], with a running maximum
// (Milakov and Gimelshein 2018) of its own. At the end of an item the warps' sums meet; parts of a
// pair meet in memory, where whoever comes last adds them in the order of the slots.
#pragma once
#include "attention_params.cuh"
#include "attention_ptx.cuh"
#include "ring.cuh"

namespace zl {

constexpr int kAttentionWarps = 4;
constexpr int kAttentionConsumers = kAttentionWarps * 32;
constexpr int kAttentionThreads = kAttentionConsumers + 32;
constexpr int kPanelColumns = 64;  // 128 bytes, one swizzled row
constexpr int kAlignment = 1024;
constexpr uint32_t kAllLanes = 0xFFFFFFFF;

template <int kDim>
struct AttentionTile {
    static constexpr int kPanels = kDim / kPanelColumns;
    static constexpr int kBoxBytes = 2 * kBlockSlots * kPanelColumns * 2;  // a block's keys, then values
    static constexpr int kPanelBytes = kTileBlocks * kBoxBytes;
    static constexpr int kStageBytes = kPanels * kPanelBytes;
    static constexpr int kStages = 96 * 1024 / kStageBytes;
    static constexpr int kHalfDim = kDim / 2;
    static constexpr int kPitch = kHalfDim + 4;  // spreads 8 dims of 4 heads over all banks
    static constexpr int kWarpSums = kMaxGroup * kPitch;
    static constexpr int kSharedBytes =
        kAlignment + kStages * kStageBytes + kAttentionWarps * kWarpSums * 4;
};

// What a stage holds: written by the feeder ahead of its arrival, read behind the wait for it.
struct StageNote {
    AttentionItem item;  // row -1: no more items
    int tile;
};

// ---- the feeder, one warp ----

template <int kDim>
class Feeder {
    using T = AttentionTile<kDim>;

  public:
    __device__ __forceinline__ Feeder(const CUtensorMap* map, const AttentionParams& p,
                                      const Ring& ring, StageNote* notes, int lane)
        : map_(map), p_(p), ring_(ring), notes_(notes), lane_(lane),
          block_(lane / T::kPanels),
          panel_(lane % T::kPanels) {}

    __device__ __forceinline__ void run() {
        int index = blockIdx.x;
        int number = number_of(index);  // there is room for it even if it is no item
        prefetch_map(map_);
        const int num_items = *p_.num_items;
        while (index < num_items) {
            // Until this launch's predecessor is done an earlier one may still use the queue.
            const bool takes_early = has_waited_;
            int next = takes_early ? take() : 0;
            const int last_tile = (__shfl_sync(kAllLanes, number, 3) - 1) / kTileBlocks;
            feed(number, 0, last_tile);
            wait_for_previous();
            if (!takes_early) next = take();
            index = __shfl_sync(kAllLanes, next, 0);
            const int next_number = index < num_items ? number_of(index) : 0;
            feed(number, last_tile, last_tile + 1);
            number = next_number;
        }
        wait_for_previous();
        if (lane_ == 0) leave();
        wait_for_room();
        if (lane_ == 0) {
            notes_[slot_.stage].item.row = -1;
            barrier_arrive_expect(ring_.full(slot_.stage), 0);
        }
    }

  private:
    // This lane's number of an item.
    __device__ __forceinline__ int number_of(int index) const {
        return lane_ < kItemNumbers ? p_.items[index * kItemNumbers + lane_] : 0;
    }

    // The next item of the queue, to lane 0.
    __device__ __forceinline__ int take() const {
        return lane_ == 0 ? static_cast<int>(gridDim.x) + add_atomically(p_.queue, 1) : 0;
    }

    // Tiles [first, end) of an item, of which every lane has a number. Before the wait for the kernel ahead
    // only what that does not write: all but the row's last block, and so all but an item's last tile.
    __device__ __forceinline__ void feed(int number, int first, int end) {
        const int head = __shfl_sync(kAllLanes, number, 1);
        const int num_blocks = __shfl_sync(kAllLanes, number, 3);
        const int* ids = p_.block_ids + __shfl_sync(kAllLanes, number, 2);
        const int column = head * kDim + panel_ * kPanelColumns;
        int id = id_of(ids, first, num_blocks);
        for (int tile = first; tile < end; ++tile) {
            const int next_id = id_of(ids, tile + 1, num_blocks);
            wait_for_room();
            const int left = num_blocks - tile * kTileBlocks;
            const int here = left < kTileBlocks ? left : kTileBlocks;
            int* const note = reinterpret_cast<int*>(notes_ + slot_.stage);
            if (lane_ < kItemNumbers) note[lane_] = number;
            if (lane_ == kItemNumbers) note[lane_] = tile;
            __syncwarp();
            const uint32_t full = ring_.full(slot_.stage);
            if (lane_ == 0) barrier_arrive_expect(full, here * T::kPanels * T::kBoxBytes);
            if (block_ < here) {
                const uint32_t target = ring_.stages_start + slot_.stage * T::kStageBytes +
                                        panel_ * T::kPanelBytes + block_ * T::kBoxBytes;
                load_box(map_, column, id * 2 * kBlockSlots, target, full);
            }
            slot_.advance(T::kStages);
            id = next_id;
        }
    }

    // The block of this lane's box.
    __device__ __forceinline__ int id_of(const int* ids, int tile, int num_blocks) const {
        const int block = tile * kTileBlocks + block_;
        return block_ < kTileBlocks && block < num_blocks ? ids[block] : 0;
    }

    __device__ __forceinline__ void wait_for_previous() {
        if (!has_waited_) wait_for_previous_grid();
        has_waited_ = true;
    }

    __device__ __forceinline__ void wait_for_room() {
        if (slot_.parity != 0) wait_for_previous();  // nor do consumers free a stage before
        barrier_wait(ring_.empty(slot_.stage), slot_.parity ^ 1);
        __syncwarp();
    }

    // Every CTA has taken its last item when all have left.
    __device__ __forceinline__ void leave() {
        if (add_atomically(p_.queue + 1, 1) != static_cast<int>(gridDim.x) - 1) return;
        p_.queue[0] = 0;
        p_.queue[1] = 0;
    }

    const CUtensorMap* map_;
    const AttentionParams& p_;
    const Ring& ring_;
    StageNote* notes_;
    RingSlot slot_;
    int lane_;
    int block_;  // of a tile: this lane's box
    int panel_;
    bool has_waited_ = false;
};

// ---- the consumers ----

// Sums of one warp over the slots it has seen; a thread has dims lane / 4 and lane / 4 + 8 of every 16,
// of heads 2 (lane % 4) and the next.
template <int kDim>
struct WarpSums {
    float values[kDim / 16][4];
    float maximum[2];  // base 2
    float weights[2];  // of this thread's slots only

    __device__ __forceinline__ void reset() {
#pragma unroll
        for (int tile = 0; tile < kDim / 16; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) values[tile][i] = 0.0f;
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            maximum[e] = -INFINITY;
            weights[e] = 0.0f;
        }
    }
};

// Over the 8 lanes that have the same heads.
__device__ __forceinline__ float largest_of_heads(float value) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
        value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, lanes));
    }
    return value;
}

__device__ __forceinline__ float sum_of_heads(float value) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) value += __shfl_xor_sync(kAllLanes, value, lanes);
    return value;
}

// queries[k step][2]: dims 16 k + 2 (lane % 4) and 8 further, of head lane / 4.
template <int kDim>
__device__ __forceinline__ void load_queries(uint32_t (&queries)[kDim / 16][2],
                                             const AttentionParams& p, int row, int head, int lane) {
    const int member = lane / 4;
    const __nv_bfloat16* q = p.q + static_cast<int64_t>(row) * p.q_stride +
                             (head * p.group + member) * kDim + 2 * (lane % 4);
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto* at = reinterpret_cast<const uint32_t*>(q + step * 16 + half * 8);
            queries[step][half] = member < p.group ? *at : 0u;
        }
    }
}

// Address of 16 bytes of a block's box: 8 dims of a slot's key, or of slot - 16's value.
__device__ __forceinline__ uint32_t box_address(uint32_t box, int panel_bytes, int slot, int chunk) {
    return box + chunk / 8 * panel_bytes + slot * 128 + ((chunk % 8) ^ (slot % 8)) * 16;
}

// Both halves of a pair of slots that are there.
__device__ __forceinline__ uint32_t slots_there(int first, int num_slots) {
    return (first < num_slots ? 0xFFFFu : 0u) | (first + 1 < num_slots ? 0xFFFF0000u : 0u);
}

// One block of `num_slots` slots added to a warp's sums.
template <int kDim>
__device__ __forceinline__ void attend(WarpSums<kDim>& sums, const uint32_t (&queries)[kDim / 16][2],
                                       uint32_t box, int num_slots, float scale_log2, int lane) {
    using T = AttentionTile<kDim>;
    const int matrix = lane / 8, matrix_row = lane % 8;
    float scores[2][4] = {};  // two chains of products; [slot lane / 4 and + 8][head 2 (lane % 4) and + 1]
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
        uint32_t keys[4];
        load_rows(keys, box_address(box, T::kPanelBytes, matrix % 2 * 8 + matrix_row,
                                    step * 2 + matrix / 2));
        multiply_slim(scores[step % 2], keys, queries[step]);
    }
    float weights[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const bool is_there = lane / 4 + i / 2 * 8 < num_slots;
        weights[i] = is_there ? (scores[0][i] + scores[1][i]) * scale_log2 : -INFINITY;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const float largest = largest_of_heads(fmaxf(weights[e], weights[2 + e]));
        const float maximum = fmaxf(sums.maximum[e], largest);
        const float factor = exp2_fast(sums.maximum[e] - maximum);
        sums.maximum[e] = maximum;
        weights[e] = exp2_fast(weights[e] - maximum);
        weights[2 + e] = exp2_fast(weights[2 + e] - maximum);
        sums.weights[e] = sums.weights[e] * factor + weights[e] + weights[2 + e];
#pragma unroll
        for (int tile = 0; tile < kDim / 16; ++tile) {
            sums.values[tile][e] *= factor;
            sums.values[tile][2 + e] *= factor;
        }
    }
    // From [slot, head] to what a product takes: [head, slot].
    const uint32_t turned[2] = {transpose_8x8(pack_bf16(weights[0], weights[1])),
                                transpose_8x8(pack_bf16(weights[2], weights[3]))};
    const uint32_t there[2] = {slots_there(2 * (lane % 4), num_slots),
                               slots_there(2 * (lane % 4) + 8, num_slots)};
#pragma unroll
    for (int tile = 0; tile < kDim / 16; ++tile) {
        uint32_t values[4];
        load_transposed(values, box_address(box, T::kPanelBytes,
                                            kBlockSlots + matrix / 2 * 8 + matrix_row,
                                            tile * 2 + matrix % 2));
        // A slot never written may hold NaN, which no weight of 0 makes harmless.
        if (num_slots < kBlockSlots) {
#pragma unroll
            for (int i = 0; i < 4; ++i) values[i] &= there[i / 2];
        }
        multiply_slim(sums.values[tile], values, turned);
    }
}

// What the consumers of a CTA share at the end of an item.
struct Meeting {
    float stats[kAttentionWarps][kMaxGroup][2];  // maximum, sum of weights
    int is_last;
};

// Where a pair's result goes.
template <int kDim>
__device__ __forceinline__ void store_out(const AttentionParams& p, int row, int head, int member,
                                          int dim, float4 sum, float weights) {
    const int64_t query_head = static_cast<int64_t>(row) * p.heads * p.group + head * p.group + member;
    const float factor = 1.0f / weights;
    const uint2 packed = make_uint2(pack_bf16(sum.x * factor, sum.y * factor),
                                    pack_bf16(sum.z * factor, sum.w * factor));
    *reinterpret_cast<uint2*>(p.out + query_head * kDim + dim) = packed;
}

__device__ __forceinline__ void store_lse(const AttentionParams& p, int row, int head, int member,
                                          float maximum, float weights) {
    if (p.lse == nullptr) return;
    const int64_t query_head = static_cast<int64_t>(row) * p.heads * p.group + head * p.group + member;
    p.lse[query_head] = maximum + log2f(weights);
}

__device__ __forceinline__ void add_scaled(float4& sum, const float4& more, float factor) {
    sum.x += more.x * factor;
    sum.y += more.y * factor;
    sum.z += more.z * factor;
    sum.w += more.w * factor;
}

// The pair's parts lie in memory: their sum, in the order of the slots.
template <int kDim>
__device__ __forceinline__ void add_parts(const AttentionParams& p, const AttentionItem& item,
                                          int thread) {
    constexpr int kQuads = kDim / 4;
    constexpr int kAtOnce = 8;  // loads under way together
    for (int index = thread; index < p.group * kQuads; index += kAttentionConsumers) {
        const int member = index / kQuads, dim = index % kQuads * 4;
        const float* stats = p.stats + (item.first_part * p.group + member) * 2;
        const float* sums = p.sums + (item.first_part * p.group + member) * kDim + dim;
        float maximum = -INFINITY, weights = 0.0f;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int first = 0; first < item.num_parts; first += kAtOnce) {
            float2 own[kAtOnce];
            float4 more[kAtOnce];
            float largest = maximum;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int part = first + i < item.num_parts ? first + i : first;
                own[i] = load_two_from_l2(stats + part * p.group * 2);
                more[i] = load_float4_from_l2(sums + part * p.group * kDim);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) largest = fmaxf(largest, own[i].x);
            const float kept = exp2_fast(maximum - largest);
            maximum = largest;
            weights *= kept;
            sum = make_float4(sum.x * kept, sum.y * kept, sum.z * kept, sum.w * kept);
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const float factor = first + i < item.num_parts ? exp2_fast(own[i].x - maximum) : 0.0f;
                weights += own[i].y * factor;
                add_scaled(sum, more[i], factor);
            }
        }
        store_out<kDim>(p, item.row, item.head, member, dim, sum, weights);
        if (dim == 0) store_lse(p, item.row, item.head, member, maximum, weights);
    }
}

// The warps' sums of one item meet, half of the dims at a time; `area`: [warp, head, kPitch] floats.
template <int kDim>
__device__ __forceinline__ void finish_item(WarpSums<kDim>& sums, const AttentionParams& p,
                                            const AttentionItem& item, Meeting& meeting,
                                            uint32_t area, int warp, int lane) {
    using T = AttentionTile<kDim>;
    const int thread = warp * 32 + lane;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const float weights = sum_of_heads(sums.weights[e]);
        if (lane < 4) {
            meeting.stats[warp][2 * lane + e][0] = sums.maximum[e];
            meeting.stats[warp][2 * lane + e][1] = weights;
        }
    }
    named_sync(kAttentionConsumers);
    constexpr int kQuads = T::kHalfDim / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint32_t own = area + warp * T::kWarpSums * 4;
#pragma unroll
        for (int tile = 0; tile < kDim / 32; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int member = 2 * (lane % 4) + i % 2;
                const int dim = tile * 16 + lane / 4 + i / 2 * 8;
                store_shared(own + (member * T::kPitch + dim) * 4,
                             sums.values[half * (kDim / 32) + tile][i]);
            }
        }
        named_sync(kAttentionConsumers);
        for (int index = thread; index < p.group * kQuads; index += kAttentionConsumers) {
            const int member = index / kQuads, dim = index % kQuads * 4;
            float maximum = -INFINITY;
#pragma unroll
            for (int from = 0; from < kAttentionWarps; ++from) {
                maximum = fmaxf(maximum, meeting.stats[from][member][0]);
            }
            float weights = 0.0f;
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int from = 0; from < kAttentionWarps; ++from) {
                const float factor = exp2_fast(meeting.stats[from][member][0] - maximum);
                weights += meeting.stats[from][member][1] * factor;
                const uint32_t at = area + (from * T::kWarpSums + member * T::kPitch + dim) * 4;
                add_scaled(sum, load_shared(at), factor);
            }
            const int whole_dim = half * T::kHalfDim + dim;
            if (item.part < 0) {
                store_out<kDim>(p, item.row, item.head, member, whole_dim, sum, weights);
                if (whole_dim == 0) store_lse(p, item.row, item.head, member, maximum, weights);
            } else {
                const int place = item.part * p.group + member;
                *reinterpret_cast<float4*>(p.sums + place * kDim + whole_dim) = sum;
                if (whole_dim == 0) {
                    p.stats[place * 2] = maximum;
                    p.stats[place * 2 + 1] = weights;
                }
            }
        }
        named_sync(kAttentionConsumers);
    }
    if (item.part < 0) return;
    // The barrier above brings all threads' stores before thread 0's arrival, which orders them.
    if (thread == 0) {
        const int arrived = arrive_in_memory(p.arrived + item.first_part);
        meeting.is_last = arrived == item.num_parts - 1;
        if (meeting.is_last) p.arrived[item.first_part] = 0;
    }
    named_sync(kAttentionConsumers);
    if (meeting.is_last) add_parts<kDim>(p, item, thread);
}

template <int kDim>
__device__ __forceinline__ void consume_items(const AttentionParams& p, const Ring& ring,
                                              const StageNote* notes, Meeting& meeting,
                                              uint32_t area, int warp, int lane) {
    using T = AttentionTile<kDim>;
    wait_for_previous_grid();
    RingSlot slot;
    WarpSums<kDim> sums;
    uint32_t queries[kDim / 16][2];
    for (;;) {
        barrier_wait(ring.full(slot.stage), slot.parity);
        const StageNote note = notes[slot.stage];
        if (note.item.row < 0) return;
        if (note.tile == 0) {
            load_queries<kDim>(queries, p, note.item.row, note.item.head, lane);
            sums.reset();
        }
        const int block = note.tile * kTileBlocks + warp;
        if (block < note.item.num_blocks) {
            const bool is_last = block == note.item.num_blocks - 1;
            const uint32_t box =
                ring.stages_start + slot.stage * T::kStageBytes + warp * T::kBoxBytes;
            attend<kDim>(sums, queries, box, is_last ? note.item.last_slots : kBlockSlots,
                         p.scale_log2, lane);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(ring.empty(slot.stage));
        slot.advance(T::kStages);
        if ((note.tile + 1) * kTileBlocks >= note.item.num_blocks) {
            finish_item<kDim>(sums, p, note.item, meeting, area, warp, lane);
        }
    }
}

template <int kDim>
__device__ __forceinline__ void attention_cta(const CUtensorMap& map, const AttentionParams& p) {
    using T = AttentionTile<kDim>;
    extern __shared__ char shared[];
    alignas(8) __shared__ uint64_t attention_barriers[2 * T::kStages];
    alignas(16) __shared__ StageNote notes[T::kStages];
    __shared__ Meeting meeting;
    const uint32_t unaligned = shared_address(shared);
    const Ring ring{(unaligned + kAlignment - 1) & ~(kAlignment - 1u),
                             shared_address(attention_barriers),
                             shared_address(attention_barriers + T::kStages)};
    const uint32_t area = ring.stages_start + T::kStages * T::kStageBytes;
    const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < T::kStages; ++stage) {
            barrier_init(ring.full(stage), 1);
            barrier_init(ring.empty(stage), kAttentionWarps);
        }
        barrier_init_fence();
    }
    __syncthreads();
    let_next_grid_start();
    if (warp == kAttentionWarps) {
        Feeder<kDim>(&map, p, ring, notes, lane).run();
    } else {
        consume_items<kDim>(p, ring, notes, meeting, area, warp, lane);
    }
}

template <int kDim>
__global__ void __launch_bounds__(kAttentionThreads, 2)
    attention_kernel(const __grid_constant__ CUtensorMap map,
                     const __grid_constant__ AttentionParams p) {
    attention_cta<kDim>(map, p);
}

}  // namespace zl
