// The product kernel: out[rows, N] = x[rows, K] W[N, K]^T, weights streamed at memory bandwidth.
// Knows nothing of launches and of how shapes are cut into tiles.
//
// The weight tile is wgmma's M (64 rows a warpgroup), the rows of x are its N. One warp feeds a ring of
// stages [weight tile, x tile] through the copy engine; the warpgroups multiply. Each CTA owns a weight
// tile and a stretch of K; its cluster shares x tiles and sums the stretches (see Params).
#pragma once
#include "epilogue.cuh"
#include "params.cuh"
#include "ptx.cuh"
#include "ring.cuh"
#include "wgmma.cuh"

namespace zl {

template <int kGroups, int kRows>
struct Tile {
    // More accumulators than an equal share of the registers: the feeder is a warpgroup of its own, which
    // alone can hand registers over. There are none left for splits and residuals.
    static constexpr bool kMovesRegisters = kGroups == 3 && kRows > 192;
    static constexpr bool kCanMeet = !kMovesRegisters;
    static constexpr int kThreads = kGroups * 128 + (kMovesRegisters ? 128 : 32);
    static constexpr int kWeightRows = kGroups * kGroupM;
    static constexpr int kGroupBytes = kGroupM * kBlockK * 2;
    static constexpr int kWeightBytes = kGroups * kGroupBytes;
    static constexpr int kRowBytes = kBlockK * 2;
    static constexpr int kStageBytes = kWeightBytes + kRows * kRowBytes;
};

// Each quarter of the SM holds a quarter of the warps, rounded up, in 512 registers a lane. What is
// free beside them lets the next kernel's small CTAs start while this one runs, so take no more than
// the accumulators need.
template <int kGroups, int kRows>
constexpr int max_registers() {
    if (kGroups == 4) return 96;
    if (kGroups == 3) return kRows <= 128 ? 104 : (kRows <= 160 ? 112 : 128);
    if (kRows <= 128) return 120;
    if (kRows <= 160) return 144;
    return kRows <= 224 || kGroups == 2 ? 168 : 184;
}

// Where registers move: 4 warpgroups begin with 128 a thread, all there are.
constexpr int kFeederRegisters = 32;
constexpr int kConsumerRegisters = (512 - kFeederRegisters) / 3;

// Where a CTA stands in the grid; all its rounds have the same stretch of K.
struct Place {
    int sharer;       // its weight tile among those that share x tiles
    int first_rank;   // in the cluster, of those that share x tiles with it
    int split;        // its stretch of K
    int first_block;  // in K
    int num_blocks;   // in K, a round
    int first_round;
    int round_step;
    int num_rounds;

    __device__ __forceinline__ explicit Place(const Params& p) {
        const int cluster_size = p.splits * p.sharers;
        const int rank = cluster_size > 1 ? static_cast<int>(cluster_rank()) : 0;
        sharer = rank % p.sharers;
        first_rank = rank - sharer;
        split = rank / p.sharers;
        first_block = p.k_blocks * split / p.splits;
        num_blocks = p.k_blocks * (split + 1) / p.splits - first_block;
        first_round = static_cast<int>(blockIdx.x) / cluster_size;
        round_step = static_cast<int>(gridDim.x) / cluster_size;
        num_rounds = (p.rounds - first_round + round_step - 1) / round_step;
    }
};

// A position in the CTA's work: round by round, each along its stretch of K.
struct Cursor {
    int round;
    int block = 0;

    __device__ __forceinline__ explicit Cursor(const Place& place) : round(place.first_round) {}
    __device__ __forceinline__ void advance(const Place& place) {
        if (++block == place.num_blocks) {
            block = 0;
            round += place.round_step;
        }
    }
};

template <int kGroups, int kRows>
class Producer {
    using T = Tile<kGroups, kRows>;

  public:
    __device__ __forceinline__ Producer(const CUtensorMap* weight_map, const CUtensorMap* x_map,
                                        const Params& p, const Place& place, const Ring& ring)
        : weight_map_(weight_map),
          x_map_(x_map),
          p_(p),
          place_(place),
          ring_(ring),
          stream_once_(policy_evict_first()),
          keep_(policy_evict_last()) {}

    // Weights depend on no earlier kernel: fill every stage with them.
    __device__ __forceinline__ void load_first_weights() {
        Cursor cursor(place_);
        const int num_first = num_prefilled();
        for (int i = 0; i < num_first; ++i, cursor.advance(place_)) load_weights(cursor, i);
    }

    // x is there: the x tiles of the filled stages, then everything else as stages come free.
    __device__ __forceinline__ void load_rest() {
        Cursor cursor(place_);
        RingSlot slot;
        const int num_first = num_prefilled();
        for (int i = 0; i < num_first; ++i, cursor.advance(place_), slot.advance(p_.stages)) {
            load_x(cursor, slot.stage);
        }
        // The ring's turn n fills what was handed back in turn n - 1, whose parity is the other one.
        for (int i = num_first; i < num_total();
             ++i, cursor.advance(place_), slot.advance(p_.stages)) {
            barrier_wait(ring_.empty(slot.stage), slot.parity ^ 1);
            load_weights(cursor, slot.stage);
            load_x(cursor, slot.stage);
        }
        wait_for_hand_backs(slot);
    }

  private:
    // A CTA that ended before the last signals of its sharers arrived would have them hit whoever
    // gets its shared memory next.
    __device__ __forceinline__ void wait_for_hand_backs(RingSlot slot) const {
        if (num_total() < p_.stages) slot = RingSlot{0, 1};
        for (int i = 0; i < num_prefilled(); ++i, slot.advance(p_.stages)) {
            barrier_wait(ring_.empty(slot.stage), slot.parity ^ 1);
        }
    }

    __device__ __forceinline__ int num_total() const {
        return place_.num_rounds * place_.num_blocks;
    }
    __device__ __forceinline__ int num_prefilled() const { return min(p_.stages, num_total()); }
    __device__ __forceinline__ int k_of(const Cursor& cursor) const {
        return (place_.first_block + cursor.block) * kBlockK;
    }
    __device__ __forceinline__ int weight_row_of(const Cursor& cursor, int group) const {
        return (cursor.round * p_.sharers + place_.sharer) * T::kWeightRows + group * kGroupM;
    }
    __device__ __forceinline__ uint32_t stage_address(uint32_t stage) const {
        return ring_.stages_start + stage * T::kStageBytes;
    }

    __device__ __forceinline__ void load_weights(const Cursor& cursor, uint32_t stage) {
        // The bytes of x too: the sharers' parts of this stage count against the same barrier.
        barrier_arrive_expect(ring_.full(stage), T::kStageBytes);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            load_box(weight_map_, k_of(cursor), weight_row_of(cursor, group),
                     stage_address(stage) + group * T::kGroupBytes, ring_.full(stage),
                     stream_once_);
        }
    }

    // Each sharer loads its part of the rows of x for all of them.
    __device__ __forceinline__ void load_x(const Cursor& cursor, uint32_t stage) {
        const uint32_t target = stage_address(stage) + T::kWeightBytes;
        if (p_.sharers == 1) {
            load_box(x_map_, k_of(cursor), 0, target, ring_.full(stage), keep_);
            return;
        }
        const int part_rows = kRows / p_.sharers;
        const int row = part_rows * place_.sharer;
        const uint32_t ranks = ((1u << p_.sharers) - 1u) << place_.first_rank;
        load_box_into(static_cast<uint16_t>(ranks), x_map_, k_of(cursor), row,
                      target + row * T::kRowBytes, ring_.full(stage), keep_);
    }

    const CUtensorMap* weight_map_;
    const CUtensorMap* x_map_;
    const Params& p_;
    const Place& place_;
    const Ring& ring_;
    const uint64_t stream_once_;
    const uint64_t keep_;
};

// A warp is done with a stage: every CTA that writes x into it must know.
__device__ __forceinline__ void hand_back(const Params& p, const Place& place, const Ring& ring,
                                          uint32_t stage, int lane) {
    if (lane < p.sharers) {
        barrier_arrive_at(ring.empty(stage), place.first_rank + lane);
    }
}

// In two instructions where ptxas would not grant one of them its registers.
template <int kRows, bool kInTwo>
__device__ __forceinline__ void multiply_16(float (&acc)[kRows / 2], uint64_t weights,
                                            uint64_t x) {
    if constexpr (kInTwo) {
        constexpr int kFirst = kRows / 32 * 16;
        constexpr int kSecond = kRows - kFirst;
        constexpr uint64_t kFirstOfX = kFirst * kBlockK * 2 >> 4;
        wgmma<kFirst>(reinterpret_cast<float(&)[kFirst / 2]>(acc[0]), weights, x, 1);
        wgmma<kSecond>(reinterpret_cast<float(&)[kSecond / 2]>(acc[kFirst / 2]), weights, x + kFirstOfX, 1);
    } else {
        wgmma<kRows>(acc, weights, x, 1);
    }
}

// Adds one weight tile along the CTA's stretch of K to acc; leaves no wgmma in flight.
template <int kGroups, int kRows>
__device__ __forceinline__ void multiply(float (&acc)[kRows / 2], const Params& p,
                                         const Place& place, const Ring& ring, RingSlot& slot,
                                         int warpgroup, int lane) {
    using T = Tile<kGroups, kRows>;
    uint32_t last_stage = 0;
    pin_registers(acc);
    wgmma_fence();
    int block = 0;
    do {
        const uint32_t stage_start = ring.stages_start + slot.stage * T::kStageBytes;
        const uint64_t weights = operand_descriptor(stage_start + warpgroup * T::kGroupBytes);
        const uint64_t x = operand_descriptor(stage_start + T::kWeightBytes);
        barrier_wait(ring.full(slot.stage), slot.parity);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kBlockK / 16; ++step) {
            const uint64_t along_k = step * kDescriptorStepK16;
            multiply_16<kRows, T::kMovesRegisters>(acc, weights + along_k, x + along_k);
        }
        wgmma_commit();
        // All but the block just issued are done, so the stage before can be filled again.
        wgmma_wait<1>();
        if (block > 0) hand_back(p, place, ring, last_stage, lane);
        last_stage = slot.stage;
        slot.advance(p.stages);
    } while (++block < place.num_blocks);
    wgmma_wait<0>();
    pin_registers(acc);
    hand_back(p, place, ring, last_stage, lane);
}

template <int kGroups, int kRows>
__device__ __forceinline__ void consume(const Params& p, const Place& place, const Ring& ring,
                                        float* row_scales, int warp, int lane) {
    using T = Tile<kGroups, kRows>;
    // While the first x tile is on its way.
    if (p.in_squares != nullptr) {
        find_row_scales<kGroups * 128>(row_scales, p, warp * 32 + lane);
        named_sync(kGroups * 128);
    }
    RingSlot slot;
    const int warpgroup = warp / 4;
    for (int i = 0; i < place.num_rounds; ++i) {
        const int round = place.first_round + i * place.round_step;
        const int tile_start = (round * p.sharers + place.sharer) * T::kWeightRows;
        const int weight_row = tile_start + warp * kWarpM;
        const bool in_weight = weight_row < p.weight_rows;
        float acc[kRows / 2];
        const bool adds = T::kCanMeet && p.residual != nullptr && place.split == 0;
        if (adds && in_weight) {
            load_residual<kRows>(acc, p, weight_row, lane);
        } else {
            clear(acc);
        }
        multiply<kGroups, kRows>(acc, p, place, ring, slot, warpgroup, lane);
        if (p.in_squares != nullptr) scale_rows<kRows>(acc, row_scales, lane);
        if (p.bias != nullptr && place.split == 0 && in_weight) {
            add_bias<kRows>(acc, p, weight_row, lane);
        }
        if (T::kCanMeet && p.meets_in_shared()) {
            // All warpgroups are done with the stages that partial sums now overwrite.
            named_sync(kGroups * 128);
            write_partials<kGroups, kRows>(acc, ring.stages_start, p, warp * kWarpM, lane);
        } else if (in_weight) {
            if (p.gated) {
                store_gated<kRows>(acc, p, weight_row, lane);
            } else {
                store_plain<kRows>(acc, p, weight_row, lane);
            }
        }
    }
}

// All partial sums of the cluster are there; a CTA alone was not launched as one.
__device__ __forceinline__ void sync_partials(bool alone) {
    if (alone) {
        __syncthreads();
    } else {
        cluster_sync();
    }
}

template <int kGroups, int kRows>
__device__ __forceinline__ void run_cta(const CUtensorMap& weight_map, const CUtensorMap& x_map,
                                        const Params& p) {
    using T = Tile<kGroups, kRows>;
    extern __shared__ char shared[];
    alignas(8) __shared__ uint64_t barriers[2 * kMaxStages];
    alignas(8) __shared__ float row_scales[kRows];
    const uint32_t unaligned = shared_address(shared);
    const uint32_t stages_start = (unaligned + kSwizzleBytes - 1) & ~(kSwizzleBytes - 1u);
    const Ring ring{stages_start, shared_address(barriers),
                    shared_address(barriers + kMaxStages)};
    const Place place(p);
    // A value of lane 0, so that the compiler knows it is the same in the warp.
    const int warp = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 32, 0);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const bool meets = T::kCanMeet && p.meets_in_shared();
    const bool alone = p.sharers == 1 && p.splits == 1;
    const bool feeds = warp == kGroups * 4 && lane == 0;
    Producer<kGroups, kRows> producer(&weight_map, &x_map, p, place, ring);

    if (feeds) {
        prefetch_map(&weight_map);
        prefetch_map(&x_map);
        for (int stage = 0; stage < p.stages; ++stage) {
            barrier_init(ring.full(stage), 1);
            barrier_init(ring.empty(stage), kGroups * 4 * p.sharers);
        }
        barrier_init_fence();
        producer.load_first_weights();
    }
    // No one waits at barriers, signals or writes to another CTA before its barriers exist.
    __syncwarp();
    if (alone) {
        __syncthreads();
    } else {
        cluster_meet();
    }
    let_next_grid_start();
    // Everyone waits, and before this no one reads or writes but weights. So once the kernel ahead is
    // done all before it are: what two kernels ago wrote (the residual) is there, and no one reads any
    // more what lay in memory that has since become out or out_squares.
    wait_for_previous_grid();

    // Two paths to the end: with registers moved, the feeder's may hold no more than its own few.
    if (warp >= kGroups * 4) {
        if constexpr (T::kMovesRegisters) shrink_registers<kFeederRegisters>();
        if (feeds) producer.load_rest();
        __syncwarp();
        if (meets) {
            sync_partials(alone);
            if (!alone) cluster_meet();
        }
        return;
    }
    if constexpr (T::kMovesRegisters) grow_registers<kConsumerRegisters>();
    consume<kGroups, kRows>(p, place, ring, row_scales, warp, lane);
    if (!meets) return;
    __syncwarp();
    sync_partials(alone);
    const int tile_start = (place.first_round * p.sharers + place.sharer) * T::kWeightRows;
    const int thread = static_cast<int>(threadIdx.x);
    if (p.residual != nullptr) {
        finish_stream<kGroups>(stages_start, p, tile_start, place.split, place.sharer, thread);
    } else {
        reduce_splits<kGroups>(stages_start, p, tile_start, place.split, place.sharer, thread);
    }
    __syncwarp();
    if (!alone) cluster_meet();  // no CTA ends while another still reads its partial sums
}

template <int kGroups, int kRows>
__global__ void __maxnreg__((max_registers<kGroups, kRows>()))
    linear_kernel(const __grid_constant__ CUtensorMap weight_map,
                  const __grid_constant__ CUtensorMap x_map,
                  const __grid_constant__ Params p) {
    run_cta<kGroups, kRows>(weight_map, x_map, p);
}

// With registers moved, ptxas must be told how many threads there are, not how many registers.
template <int kGroups, int kRows>
__global__ void __launch_bounds__(Tile<kGroups, kRows>::kThreads, 1)
    uneven_linear_kernel(const __grid_constant__ CUtensorMap weight_map,
                         const __grid_constant__ CUtensorMap x_map,
                         const __grid_constant__ Params p) {
    run_cta<kGroups, kRows>(weight_map, x_map, p);
}

}  // namespace zl
