// Brings one chunk's keys and its row's queries into shared memory, swizzled as wgmma reads them.
// Knows nothing of scores.
#pragma once
#include "scoring_params.cuh"
#include "scoring_ptx.cuh"

namespace zl {

// A task is one chunk of one row and head. A CTA has one head and tasks that follow one another, so that
// queries are copied once a row; CTAs of all heads go side by side, so that they read whole lines of the
// pool.
struct Share {
    int head;
    int first;  // task
    int end;

    __device__ __forceinline__ explicit Share(const ScoringParams& p) {
        const int number = p.by_heads.divide(blockIdx.x);
        head = blockIdx.x - number * p.heads;
        first = number * p.share_len + min(number, p.longer_shares);
        end = first + p.share_len + (number < p.longer_shares ? 1 : 0);
    }
};

struct Task {
    int head;
    int row;
    int start;   // of the chunk in the tail
    int length;  // slots
    int out;     // of the chunk's first slot in [rows, heads, max_tail]

    __device__ __forceinline__ Task(const ScoringParams& p, int own_head, int number) {
        head = own_head;
        row = p.by_num_chunks.divide(number);
        start = (number - row * p.num_chunks) * p.chunk;
        length = min(p.chunk, p.max_tail - start);
        out = (row * p.heads + head) * p.max_tail + start;
    }
};

// Which query and which of its group's members stand in a column. A thread holds all members of its
// queries: its 16 columns are 8 * t + 2 * (lane % 4) + e, in the order of 2 * t + e.
template <int kMembers>
struct Column {
    int lane4;
    int index;  // among the thread's

    __device__ __forceinline__ explicit Column(int column)
        : lane4((column & 7) >> 1), index((column >> 3) * 2 + (column & 1)) {}

    __device__ __forceinline__ int member() const { return index % kMembers; }
    __device__ __forceinline__ int query() const {
        return lane4 * (kThreadColumns / kMembers) + index / kMembers;
    }
};

// The thread's, -1: none.
__device__ __forceinline__ int slot_of(const ScoringParams& p, const Task& task) {
    const int index = threadIdx.x;
    if (index >= task.length) return -1;
    return static_cast<int>(__ldg(p.slots + (task.row * p.max_tail + task.start + index)));
}

// Of a slot's key, in keys from the start of the pool; values lie between blocks of keys.
__device__ __forceinline__ uint32_t key_of(const ScoringParams& p, int head, int slot) {
    const uint32_t line = slot + p.by_block_size.divide(slot) * p.block_size;
    return line * p.heads + head;
}

// Has the keys on their way into the L2 while their place in shared memory is still in use.
template <int kPanels>
__device__ __forceinline__ void prefetch_key(const ScoringParams& p, int head, int slot) {
    constexpr int kFetched = 64;  // bytes that one miss brings
    if (slot < 0) return;
    const char* key =
        element_of(reinterpret_cast<const char*>(p.kv), key_of(p, head, slot), kPanels * 128);
#pragma unroll
    for (int i = 0; i < kPanels * 128; i += kFetched) prefetch_l2(key + i);
}

// A warp copies its own 32 slots' keys: a row of the panels by kPanels * 8 lanes, which have as many slots.
template <int kPanels>
__device__ __forceinline__ void copy_keys(const ScoringParams& p, int head, int slot,
                                          uint32_t keys) {
    constexpr int kRowLanes = kPanels * 8;
    const int part = threadIdx.x % kRowLanes;
    const int first = threadIdx.x - part;  // slot
    const uint32_t is_there = __ballot_sync(0xFFFFFFFF, slot >= 0) >> (first & 31);
    const uint32_t key = key_of(p, head, max(slot, 0));
    const char* base = reinterpret_cast<const char*>(p.kv) + part * 16;
    const uint32_t target = keys + (part >> 3) * kKeyPanel + first * 128 + ((part & 7) << 4);
#pragma unroll
    for (int i = 0; i < kRowLanes; ++i) {
        const uint32_t own = __shfl_sync(0xFFFFFFFF, key, i, kRowLanes);
        copy_16((target ^ ((i & 7) << 4)) + i * 128, element_of(base, own, kPanels * 128),
                is_there & (1u << i));
    }
}

// Four threads copy a column of the row's queries; the first notes it.
template <int kPanels, int kMembers>
__device__ __forceinline__ void copy_query(const ScoringParams& p, const Task& task,
                                           QueryNotes& notes, uint32_t queries) {
    const int column = threadIdx.x >> 2;
    const Column<kMembers> place(column);
    const bool is_used = place.query() < p.queries && place.member() < p.group;
    const int at = task.row * p.queries + place.query();
    const int entry = is_used ? static_cast<int>(__ldg(p.ring_slots + at)) : -1;
    const bool is_there = entry >= 0;
    const int q_head = (max(entry, 0) * p.heads + task.head) * p.group + (is_there ? place.member() : 0);
    const __nv_bfloat16* source = p.ring + static_cast<int64_t>(q_head) * (kPanels * kPanelDims);
    const uint32_t row = queries + column * 128;
#pragma unroll
    for (int i = 0; i < kPanels * 2; ++i) {
        const int part = i * 4 + (threadIdx.x & 3);
        const uint32_t target = row + (part >> 3) * kQueryPanel + (((part ^ column) & 7) << 4);
        copy_16(target, source + part * 8, is_there);
    }
    const bool is_first = (threadIdx.x & 3) == 0;
    const bool is_query = is_first && place.member() == 0;
    const int count = __popc(__ballot_sync(0xFFFFFFFF, is_query && is_there));
    if ((threadIdx.x & 31) == 0) notes.counts[threadIdx.x >> 5] = count;
    if (is_first) {
        const float lse = is_there ? __ldg(p.ring_lse + q_head) : __int_as_float(0x7F800000);
        notes.lses[place.lane4 * kThreadColumns + place.index] = lse;
    }
    if (is_query) {
        const int64_t until = is_there ? __ldg(p.query_at + at) + 1 : 0;
        notes.until[place.query()] = static_cast<int>(min(until, static_cast<int64_t>(0x7FFFFFFF)));
    }
}

// Starts a task's copies; those of the row's queries if they are not those of the task before. Returns
// the age of the thread's key.
template <int kPanels, int kMembers>
__device__ __forceinline__ int start_copies(const ScoringParams& p, const Task& task,
                                            bool is_new_row, int slot, QueryNotes& queries,
                                            uint32_t keys) {
    copy_keys<kPanels>(p, task.head, slot, keys);
    if (is_new_row) copy_query<kPanels, kMembers>(p, task, queries, keys + kPanels * kKeyPanel);
    return slot >= 0 ? __ldg(p.positions + (task.out + threadIdx.x)) + 1 : 0;
}

}  // namespace zl
