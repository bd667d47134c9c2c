// Scores tails of bf16 keys: attention mass, and mean cosine with the other keys of a chunk without
// what each key's newest similar key drops. Each key is read once.
// Knows nothing of requests or of which slots are kept. What the numbers mean stands at the twin,
// kernels/reference/scores.py.
//
// A CTA takes one chunk (of one row and head) after another; two CTAs share an SM, so that one computes
// while the other's keys arrive. Warpgroup g has rows of tiles (64 slots) 2g and 2g + 1, but for the
// pairs of different tiles, of which both take three. For each chunk:
// 1. Each tile times itself: norms lie on the diagonal, the rest is compared in registers.
// 2. The sum over i of cos(j, i) is k_j . (sum over i of k_i / |k_i|) / |k_j|: two slim products,
//    for which float32 factors are split into three bf16 numbers each.
// 3. The other six pairs of tiles, once each. Signs of k_i . k_j - threshold * |k_i| * |k_j| are joined
//    by "and"; only where one is not negative is more than that done.
// 4. All keys times the queries and the sum of unit keys.
// 5. Where a key has a newest similar one, its cosine is computed again and taken from that one's sum.
// Sums are in fixed point and the newest is a maximum, so no order of additions matters.
#pragma once
#include "scoring_load.cuh"
#include "scoring_products.cuh"
#include "scoring_rows.cuh"

namespace zl {

// Ages and lse of the chunk that has arrived, into the notes.
__device__ __forceinline__ void note_arrivals(ScoringNotes& notes, const Found& found,
                                              const Arrival& arrival, int column_at,
                                              int query_at) {
    const int warp = threadIdx.x >> 5;
    const int oldest = __reduce_min_sync(0xFFFFFFFF, arrival.age > 0 ? arrival.age : 0x7FFFFFFF);
    const int youngest = __reduce_max_sync(0xFFFFFFFF, arrival.age);
    const int keys = __popc(__ballot_sync(0xFFFFFFFF, found.slot >= 0));
    const bool is_query = (threadIdx.x & 3) == 0 && query_at >= 0;
    const int queries = __popc(__ballot_sync(0xFFFFFFFF, is_query && found.entry >= 0));
    notes.ages[threadIdx.x] = arrival.age;
    notes.newest[threadIdx.x] = 0;
    if ((threadIdx.x & 3) == 0) notes.lses[column_at] = arrival.lse;
    if (is_query) notes.until[query_at] = arrival.until;
    if ((threadIdx.x & 31) == 0) {
        notes.oldest[warp] = oldest;
        notes.youngest[warp] = youngest;
        notes.key_counts[warp] = keys;
        notes.query_counts[warp] = queries;
    }
}

struct Counts {
    int keys = 0;
    int queries = 0;
    int oldest = 0x7FFFFFFF;
    int youngest = 0;

    __device__ __forceinline__ explicit Counts(const ScoringNotes& notes) {
#pragma unroll
        for (int warp = 0; warp < kScoreWarps; ++warp) {
            keys += notes.key_counts[warp];
            queries += notes.query_counts[warp];
            oldest = min(oldest, notes.oldest[warp]);
            youngest = max(youngest, notes.youngest[warp]);
        }
    }
};

__device__ __forceinline__ uint32_t code_of(const ScoringNotes& notes, const Counts& counts,
                                            int age) {
    if (age == 0) return 0;
    uint32_t order = kLongestSpan - (counts.youngest - age);
    if (counts.youngest - counts.oldest >= kLongestSpan) {
        order = 1;
        for (int i = 0; i < kChunkSlots; ++i) order += notes.ages[i] < age;
    }
    return order << 8 | threadIdx.x;
}

template <int kPanels>
__device__ __forceinline__ float dot(const char* keys, int left, int right) {
    float total[2] = {0.0f, 0.0f};
#pragma unroll 4
    for (int part = 0; part < kPanels * 8; ++part) {
        const char* panel = keys + (part >> 3) * kKeyPanel;
        const uint4 a = *reinterpret_cast<const uint4*>(panel + left * 128 +
                                                        (((part ^ left) & 7) << 4));
        const uint4 b = *reinterpret_cast<const uint4*>(panel + right * 128 +
                                                        (((part ^ right) & 7) << 4));
        const uint32_t a_pairs[4] = {a.x, a.y, a.z, a.w}, b_pairs[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            total[0] = fmaf(__uint_as_float(a_pairs[i] << 16), __uint_as_float(b_pairs[i] << 16),
                            total[0]);
            total[1] = fmaf(upper_half(__uint_as_float(a_pairs[i])),
                            upper_half(__uint_as_float(b_pairs[i])), total[1]);
        }
    }
    return total[0] + total[1];
}

// Where a thread stands. What is uniform in a warp is known to be so.
struct Place {
    int warp;
    int group;      // warpgroup
    int strip;      // the lane's first row of a tile's product
    int pair;       // and its first column
    int tile_rows;  // the lane's first slot of the warpgroup's first tile
    int column_at;  // of the column that the thread helps to copy, in the notes
    int query_at;   // its query in the notes, -1 but for the first member

    template <int kMembers>
    static __device__ __forceinline__ Place of() {
        const int lane = threadIdx.x & 31;
        const Column<kMembers> column(threadIdx.x >> 2);
        Place place;
        place.warp = __shfl_sync(0xFFFFFFFF, threadIdx.x >> 5, 0);
        place.group = place.warp >> 2;
        place.strip = (place.warp & 3) * 16 + (lane >> 2);
        place.pair = 2 * (lane & 3);
        place.tile_rows = place.group * 2 * kTileSlots + place.strip;
        place.column_at = column.lane4 * kThreadColumns + column.index;
        place.query_at = column.member() == 0 ? column.query() : -1;
        return place;
    }
};

__device__ __forceinline__ float2 row_terms(const ScoringNotes& notes, float threshold, int row) {
    return {-threshold * notes.norms[row], -threshold * notes.norms[row + 8]};
}

// Compares the warp's rows with the 64 columns from `column` on; whether any pair may be similar.
template <int kFirst, bool kTwoTiles, int kCount>
__device__ __forceinline__ bool compare(float (&d)[kCount], ScoringNotes& notes, float2 terms,
                                        int row, int column) {
    const bool is_any = subtract_threshold<kFirst>(d, terms, notes.norms + column);
    if (is_any) note_newest<kFirst, kTwoTiles>(d, notes, row, column);
    return is_any;
}

// Step 1 and the keys' codes.
template <int kPanels>
__device__ __forceinline__ bool compare_own_tiles(const ScoringParams& p, ScoringNotes& notes,
                                                  const Place& place, const Counts& counts,
                                                  uint32_t keys, int age) {
    float d[2][32];
    const uint32_t own = keys + place.group * 2 * kTileBytes;
    multiply<64, kPanels>(d[0], own, own, kKeyPanel);
    multiply<64, kPanels>(d[1], own + kTileBytes, own + kTileBytes, kKeyPanel);
    notes.codes[threadIdx.x] = code_of(notes, counts, age);
    wgmma_wait<0>();
    bool is_any = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        pin_registers(d[i]);
        note_norms(d[i], notes, place.warp & 3, place.tile_rows + i * kTileSlots);
    }
    __syncthreads();  // all norms and codes are there
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = place.tile_rows + i * kTileSlots;
        const int column = (place.group * 2 + i) * kTileSlots + place.pair;
        is_any |= compare<0, false>(d[i], notes, row_terms(notes, p.threshold, row), row, column);
    }
    return is_any;
}

// Step 2 up to the sum of unit keys, while tile 0 or 1 is multiplied with tiles 2 and 3.
template <int kPanels>
__device__ __forceinline__ bool compare_halves(const ScoringParams& p, ScoringNotes& notes,
                                               const Place& place, uint32_t keys) {
    float d[64];
    multiply<128, kPanels>(d, keys + place.group * kTileBytes, keys + 2 * kTileBytes, kKeyPanel);
    add_unit_keys<kPanels>(keys, notes.inverses, notes.directions + place.warp * 2);
    __syncthreads();  // all parts of the sum are there
    store_direction<kPanels>(notes, keys + kPanels * kKeyPanel);
    show_to_wgmma();
    wgmma_wait<0>();
    pin_registers(d);
    const int row = place.group * kTileSlots + place.strip;
    const float2 terms = row_terms(notes, p.threshold, row);
    // Late slots tend to be new, and what is older than what was found costs less.
    bool is_any = compare<32, true>(d, notes, terms, row, 3 * kTileSlots + place.pair);
    is_any |= compare<0, true>(d, notes, terms, row, 2 * kTileSlots + place.pair);
    __syncthreads();  // the sum of unit keys is there
    return is_any;
}

// The last of step 3, tiles 0 and 1 or 2 and 3, and step 4.
template <int kPanels, int kMembers>
__device__ __forceinline__ bool compare_and_score(const ScoringParams& p, ScoringNotes& notes,
                                                  const Place& place, uint32_t keys) {
    float d[32], scores[2][36];
    const uint32_t own = keys + place.group * 2 * kTileBytes;
    const uint32_t queries = keys + kPanels * kKeyPanel;
    multiply<64, kPanels>(d, own, own + kTileBytes, kKeyPanel);
    multiply<72, kPanels>(scores[0], own, queries, kQueryPanel);
    wgmma_wait<1>();
    pin_registers(d);
    const int column = (place.group * 2 + 1) * kTileSlots + place.pair;
    const float2 terms = row_terms(notes, p.threshold, place.tile_rows);
    const bool is_any = compare<0, true>(d, notes, terms, place.tile_rows, column);
    multiply<72, kPanels>(scores[1], own + kTileBytes, queries, kQueryPanel);
    wgmma_wait<1>();
    pin_registers(scores[0]);
    note_scores<kMembers>(scores[0], notes, place.tile_rows, p.scale_log2);
    wgmma_wait<0>();
    pin_registers(scores[1]);
    note_scores<kMembers>(scores[1], notes, place.tile_rows + kTileSlots, p.scale_log2);
    return is_any;
}

// Step 5, of the thread's slot.
template <int kPanels>
__device__ __forceinline__ void drop_newest(ScoringNotes& notes, const char* keys) {
    const uint32_t code = notes.newest[threadIdx.x];
    if (code == 0) return;
    const int newest = code & 255;
    const float cosine = dot<kPanels>(keys, threadIdx.x, newest) * notes.inverses[threadIdx.x] *
                         notes.inverses[newest];
    atomicAdd(notes.sums + newest, -to_fixed(cosine));
}

__device__ __forceinline__ void store_results(const ScoringParams& p, const ScoringNotes& notes,
                                              const Counts& counts, const Task& task, bool is_key) {
    const int index = threadIdx.x;
    if (index >= task.length) return;
    const float share = __fdividef(notes.masses[index], max(counts.queries, 1));
    const float sum = static_cast<float>(notes.sums[index]);
    const float mean = __fdividef(sum, kFixedPoint * counts.keys);
    p.mass[task.out + index] = is_key ? share : 0.0f;
    p.similarity[task.out + index] = is_key ? mean : 0.0f;
}

template <int kPanels, int kMembers>
__global__ void __launch_bounds__(kScoreThreads, 2) scoring_kernel(const ScoringParams p) {
    extern __shared__ char dynamic[];
    // Swizzled rows must start at multiples of 1024.
    char* const shared = dynamic + ((1024 - (shared_address(dynamic) & 1023)) & 1023);
    const uint32_t keys = shared_address(shared);
    ScoringNotes& notes =
        *reinterpret_cast<ScoringNotes*>(shared + kPanels * (kKeyPanel + kQueryPanel));
    const Place place = Place::of<kMembers>();
    clear_direction<kPanels>(shared + kPanels * kKeyPanel);

    int number = blockIdx.x;
    Found found = find<kMembers>(p, Task(p, number));
    Arrival arrival = start_copies<kPanels, kMembers>(p, Task(p, number), found, keys);
    for (;;) {
        note_arrivals(notes, found, arrival, place.column_at, place.query_at);
        wait_for_copies();
        show_to_wgmma();
        __syncthreads();
        const Counts counts(notes);
        const int next_number = number + gridDim.x;
        const bool is_last = next_number >= p.num_tasks;
        if (is_last) let_next_grid_start();  // its CTAs take the room that this one leaves
        Found next_found{-1, -1};
        if (!is_last) next_found = find<kMembers>(p, Task(p, next_number));
        bool is_any = false;
        if (counts.keys > 0) {
            is_any |= compare_own_tiles<kPanels>(p, notes, place, counts, keys, arrival.age);
            if (!is_last) prefetch_key<kPanels>(p, Task(p, next_number), next_found.slot);
            is_any |= compare_halves<kPanels>(p, notes, place, keys);
            is_any |= compare_and_score<kPanels, kMembers>(p, notes, place, keys);
        }
        // Sums and newest keys are there, and no product reads any more.
        if (__syncthreads_or(is_any)) {
            drop_newest<kPanels>(notes, shared);
            __syncthreads();
        }
        const bool is_key = found.slot >= 0;
        if (!is_last) {
            found = next_found;
            arrival = start_copies<kPanels, kMembers>(p, Task(p, next_number), found, keys);
        }
        store_results(p, notes, counts, Task(p, number), is_key);
        if (is_last) break;
        number = next_number;
    }
}

}  // namespace zl
