// Scores tails of bf16 keys: attention mass, and mean cosine with the other keys of a chunk without
// what each key's newest similar key drops. Each key is read once.
// Knows nothing of requests or of which slots are kept. What the numbers mean stands at the twin,
// kernels/reference/scores.py.
//
// A CTA takes one chunk (of one row and head) after another; two CTAs share an SM, so that one computes
// while the other's keys arrive. Warpgroup g has rows of tiles (64 slots) 2g and 2g + 1, but where it
// compares tile g with tiles 2 and 3. For each chunk:
// 1. Each tile times itself: norms lie on the diagonal, the rest is compared in registers.
// 2. The sum over i of cos(j, i) is k_j . (sum over i of k_i / |k_i|) / |k_j|: two slim products,
//    for which float32 factors are split into three bf16 numbers each.
// 3. The six pairs of different tiles, once each, two of them in one product with step 1. Signs of
//    threshold * |k_i| * |k_j| - k_i . k_j are joined by "or"; only where one is negative is more done.
// 4. All keys times the queries and the sum of unit keys.
// 5. Where a key has a newest similar one, its cosine is computed again and taken from that one's sum.
// 6. While the next chunk's keys arrive, scores are made of the products of 4.
// Where all keys of earlier chunks had similar ones, 1 and 3 are first tried with the newest keys alone.
// Sums are in fixed point and the newest is a maximum, so no order of additions matters.
#pragma once
#include "scoring_load.cuh"
#include "scoring_newest.cuh"

namespace zl {

constexpr int kPatience = 8;

// For how many chunks the newest keys alone are not tried. is_sure: they were enough. is_open: a key has
// no similar one.
__device__ __forceinline__ int patience_after(int patience, bool is_sure, bool is_open) {
    if (is_sure) return 0;
    if (patience == 0) return kPatience;
    return max(patience - 1, is_open ? 1 : 0);
}

// The chunk that has arrived, into the notes. age: of the thread's key.
__device__ __forceinline__ void note_arrival(ScoringNotes& notes, KeyNotes& own, int age) {
    const int oldest = __reduce_min_sync(0xFFFFFFFF, age > 0 ? age : 0x7FFFFFFF);
    const int youngest = __reduce_max_sync(0xFFFFFFFF, age);
    const int keys = __popc(__ballot_sync(0xFFFFFFFF, age > 0));
    own.ages[threadIdx.x] = age;
    own.dropped[threadIdx.x] = 0;
    notes.newest[threadIdx.x] = 0;
    if ((threadIdx.x & 31) == 0) notes.counts[threadIdx.x >> 5] = {oldest, youngest, keys, 0};
}

// Of the whole chunk.
__device__ __forceinline__ WarpCounts add_counts(const ScoringNotes& notes) {
    static_assert(kScoreWarps == 8, "four lanes read each warp's");
    WarpCounts all = notes.counts[threadIdx.x & 7];
    all.oldest = __reduce_min_sync(0xFFFFFFFF, all.oldest);
    all.youngest = __reduce_max_sync(0xFFFFFFFF, all.youngest);
    all.keys = __reduce_add_sync(0xFFFFFFFF, all.keys) / 4;
    return all;
}

__device__ __forceinline__ uint32_t code_of(const KeyNotes& own, const WarpCounts& counts,
                                            int age) {
    if (age == 0) return 0;
    uint32_t order = kLongestSpan - (counts.youngest - age);
    if (counts.youngest - counts.oldest >= kLongestSpan) {
        order = 1;
#pragma unroll 1
        for (int i = 0; i < kChunkSlots; ++i) order += own.ages[i] < age;
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

    __device__ __forceinline__ Place() {
        const int lane = threadIdx.x & 31;
        warp = __shfl_sync(0xFFFFFFFF, threadIdx.x >> 5, 0);
        group = warp >> 2;
        strip = (warp & 3) * 16 + (lane >> 2);
        pair = 2 * (lane & 3);
        tile_rows = group * 2 * kTileSlots + strip;
    }
};

__device__ __forceinline__ float2 row_terms(const ScoringNotes& notes, float threshold, int row) {
    return {threshold * notes.norms[row], threshold * notes.norms[row + 8]};
}

// Compares the warp's rows with the 64 columns from `column` on; whether any pair may be similar.
template <int kFirst, bool kTwoTiles, int kCount>
__device__ __forceinline__ bool compare(float (&d)[kCount], ScoringNotes& notes, float2 terms,
                                        int row, int column) {
    const bool is_any = find_excess<kFirst>(d, terms, notes.norms + column);
    if (is_any) note_newest<kFirst, kTwoTiles>(d, notes, row, column);
    return is_any;
}

// Step 1 without comparing: norms and codes.
template <int kPanels>
__device__ __forceinline__ void note_own_tiles(ScoringNotes& notes, const Place& place,
                                               uint32_t keys) {
    float d[2][32];
    const uint32_t own = keys + place.group * 2 * kTileBytes;
    multiply<64, kPanels>(d[0], own, own, kKeyPanel);
    multiply<64, kPanels>(d[1], own + kTileBytes, own + kTileBytes, kKeyPanel);
    wgmma_wait<1>();
    pin_registers(d[0]);
    note_norms(d[0], notes, place.warp & 3, place.tile_rows);
    wgmma_wait<0>();
    pin_registers(d[1]);
    note_norms(d[1], notes, place.warp & 3, place.tile_rows + kTileSlots);
    __syncthreads();  // all norms and codes are there
}

// Steps 1 and 3 with the newest keys alone, and step 2 up to the sum of unit keys. Whether that was
// enough: else all keys must be compared.
template <int kPanels>
__device__ __forceinline__ bool compare_with_newest(const ScoringParams& p, ScoringNotes& notes,
                                                    const Place& place, char* shared) {
    const uint32_t keys = shared_address(shared);
    note_own_tiles<kPanels>(notes, place, keys);
    note_group(notes, place.warp);
    __syncthreads();  // the group is known
    copy_group<kPanels>(notes, shared);
    show_to_wgmma();
    __syncthreads();  // the group can be read
    float d[2][kGroup / 2];
    const uint32_t own = keys + place.group * 2 * kTileBytes;
    const uint32_t queries = keys + kPanels * kKeyPanel;
    const uint32_t group = queries + kPanels * kQueryPanel;
    multiply<kGroup, kPanels>(d[0], own, group, kGroupPanel);
    multiply<kGroup, kPanels>(d[1], own + kTileBytes, group, kGroupPanel);
    store_direction<kPanels>(notes, keys, queries, place.warp);
    show_to_wgmma();
    const uint32_t rest = __reduce_max_sync(0xFFFFFFFF, notes.rest[threadIdx.x & 7]);
    wgmma_wait<0>();
    bool is_sure = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        pin_registers(d[i]);
        const int row = place.tile_rows + i * kTileSlots;
        is_sure &= note_sure(d[i], notes, row_terms(notes, p.threshold, row), row, rest);
    }
    return __syncthreads_and(is_sure);  // the sum of unit keys is there
}

// Step 1, and of step 3 tiles 0 and 1 or 2 and 3.
template <int kPanels>
__device__ __forceinline__ bool compare_near_tiles(const ScoringParams& p, ScoringNotes& notes,
                                                   const Place& place, uint32_t keys) {
    float both[64], second[32];  // the first tile with itself and the second; the second with itself
    const uint32_t own = keys + place.group * 2 * kTileBytes;
    multiply<128, kPanels>(both, own, own, kKeyPanel);
    multiply<64, kPanels>(second, own + kTileBytes, own + kTileBytes, kKeyPanel);
    wgmma_wait<1>();
    pin_registers(both);
    note_norms(both, notes, place.warp & 3, place.tile_rows);
    wgmma_wait<0>();
    pin_registers(second);
    note_norms(second, notes, place.warp & 3, place.tile_rows + kTileSlots);
    __syncthreads();  // all norms and codes are there
    const int rows[2] = {place.tile_rows, place.tile_rows + kTileSlots};
    const int column = place.group * 2 * kTileSlots + place.pair;
    float2 terms = row_terms(notes, p.threshold, rows[1]);
    bool is_any = compare<0, false>(second, notes, terms, rows[1], column + kTileSlots);
    terms = row_terms(notes, p.threshold, rows[0]);
    is_any |= compare<32, true>(both, notes, terms, rows[0], column + kTileSlots);
    is_any |= compare<0, false>(both, notes, terms, rows[0], column);
    return is_any;
}

// Step 2 up to the sum of unit keys, while tile 0 or 1 is multiplied with tiles 2 and 3.
template <int kPanels>
__device__ __forceinline__ bool compare_halves(const ScoringParams& p, ScoringNotes& notes,
                                               const Place& place, uint32_t keys) {
    float d[64];
    multiply<128, kPanels>(d, keys + place.group * kTileBytes, keys + 2 * kTileBytes, kKeyPanel);
    store_direction<kPanels>(notes, keys, keys + kPanels * kKeyPanel, place.warp);
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

// Step 4. Returns the scores of the warpgroup's first tile; `second` is the product of the other.
template <int kPanels, int kMembers>
__device__ __forceinline__ RowScores score_first(const ScoringParams& p, const ScoringNotes& notes,
                                                 const KeyNotes& key_notes,
                                                 const QueryNotes& query_notes,
                                                 const Place& place, uint32_t keys,
                                                 float (&second)[36]) {
    float first[36];
    const uint32_t own = keys + place.group * 2 * kTileBytes;
    const uint32_t queries = keys + kPanels * kKeyPanel;
    multiply<72, kPanels>(first, own, queries, kQueryPanel);
    multiply<72, kPanels>(second, own + kTileBytes, queries, kQueryPanel);
    wgmma_wait<1>();
    pin_registers(first);
    const RowScores scores =
        scores_of<kMembers>(first, notes, key_notes, query_notes, place.tile_rows, p.scale_log2);
    wgmma_wait<0>();
    pin_registers(second);
    return scores;
}

// Step 5, of the thread's slot; whether it has a similar key.
template <int kPanels>
__device__ __forceinline__ bool drop_newest(ScoringNotes& notes, KeyNotes& own,
                                            const char* keys) {
    const uint32_t code = notes.newest[threadIdx.x];
    if (code == 0) return false;
    const int newest = code & 255;
    const float cosine = dot<kPanels>(keys, threadIdx.x, newest) * notes.inverses[threadIdx.x] *
                         notes.inverses[newest];
    atomicAdd(own.dropped + newest, to_fixed(cosine));
    return true;
}

// Of one query and of one key, shares of what a row's scores are summed to.
struct Weights {
    float query;
    float key;

    __device__ __forceinline__ Weights(const QueryNotes& queries, int num_keys) {
        static_assert(kScoreWarps == 8, "four lanes read each warp's");
        const int count = __reduce_add_sync(0xFFFFFFFF, queries.counts[threadIdx.x & 7]) / 4;
        query = __fdividef(1.0f, max(count, 1));
        key = __fdividef(1.0f, kFixedPoint * num_keys);
    }
};

// Of a lane's two rows, by the first of four lanes.
__device__ __forceinline__ void store_scores(const ScoringParams& p, const KeyNotes& keys,
                                             const Weights& weights, const Task& task,
                                             const RowScores& scores, int row) {
    if ((threadIdx.x & 3) != 0) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int index = row + 8 * h;
        if (index >= task.length) continue;
        const bool is_key = keys.ages[index] > 0;
        const float sum = static_cast<float>(scores.sums[h] - keys.dropped[index]);
        p.mass[task.out + index] = is_key ? scores.shares[h] * weights.query : 0.0f;
        p.similarity[task.out + index] = is_key ? sum * weights.key : 0.0f;
    }
}

__device__ __forceinline__ void store_zeros(const ScoringParams& p, const Task& task) {
    const int index = threadIdx.x;
    if (index >= task.length) return;
    p.mass[task.out + index] = 0.0f;
    p.similarity[task.out + index] = 0.0f;
}

template <int kPanels, int kMembers>
__global__ void __launch_bounds__(kScoreThreads, 2) scoring_kernel(const ScoringParams p) {
    extern __shared__ char dynamic[];
    // Swizzled rows must start at multiples of 1024.
    char* const shared = dynamic + ((1024 - (shared_address(dynamic) & 1023)) & 1023);
    const uint32_t keys = shared_address(shared);
    ScoringNotes& notes =
        *reinterpret_cast<ScoringNotes*>(shared + kPanels * (kKeyPanel + kQueryPanel + kGroupPanel));
    const Place place;
    clear_unused<kPanels>(notes, shared + kPanels * kKeyPanel);

    const Share share(p);
    if (threadIdx.x == 0) notes.patience = 1;
    int age;
    {
        const Task task(p, share.head, share.first);
        age = start_copies<kPanels, kMembers>(p, task, true, slot_of(p, task),
                                              notes.queries[task.row & 1], keys);
    }
    for (int number = share.first; number < share.end; ++number) {
        const Task task(p, share.head, number);
        const Task next(p, share.head, number + 1);
        const bool is_last = number + 1 == share.end;
        const int next_slot = is_last ? -1 : slot_of(p, next);
        KeyNotes& own = notes.keys[number & 1];
        const QueryNotes& queries = notes.queries[task.row & 1];
        note_arrival(notes, own, age);
        wait_for_copies();
        show_to_wgmma();
        __syncthreads();
        const WarpCounts counts = add_counts(notes);
        prefetch_key<kPanels>(p, share.head, next_slot);
        bool is_any = false, is_sure = false;
        RowScores first;
        float second[36];
        if (counts.keys > 0) {
            notes.codes[threadIdx.x] = code_of(own, counts, age);
            if (notes.patience == 0) {
                is_any = is_sure = compare_with_newest<kPanels>(p, notes, place, shared);
            }
            if (!is_sure) {
                is_any |= compare_near_tiles<kPanels>(p, notes, place, keys);
                is_any |= compare_halves<kPanels>(p, notes, place, keys);
            }
            first = score_first<kPanels, kMembers>(p, notes, own, queries, place, keys, second);
        }
        // Newest keys are there, and no product reads any more.
        bool is_open = true;
        if (__syncthreads_or(is_any)) {
            const bool is_similar = drop_newest<kPanels>(notes, own, shared);
            is_open = __syncthreads_or(own.ages[threadIdx.x] > 0 && !is_similar);
        }
        if (threadIdx.x == 0) notes.patience = patience_after(notes.patience, is_sure, is_open);
        if (!is_last) {
            age = start_copies<kPanels, kMembers>(p, next, next.row != task.row, next_slot,
                                                  notes.queries[next.row & 1], keys);
        }
        if (counts.keys > 0) {
            const Weights weights(queries, counts.keys);
            store_scores(p, own, weights, task, first, place.tile_rows);
            const int row = place.tile_rows + kTileSlots;
            store_scores(p, own, weights, task,
                         scores_of<kMembers>(second, notes, own, queries, row, p.scale_log2), row);
        } else {
            store_zeros(p, task);
        }
    }
}

}  // namespace zl
