// Brings one chunk's keys and its row's queries into shared memory, swizzled as wgmma reads them.
// Knows nothing of scores.
#pragma once
#include "scoring_params.cuh"
#include "scoring_ptx.cuh"

namespace zl {

// A task is one chunk of one row and head. Heads go fastest, so that CTAs that run together read
// whole lines of the pool.
struct Task {
    int head;
    int row;
    int start;   // of the chunk in the tail
    int length;  // slots
    int out;     // of the chunk's first slot in [rows, heads, max_tail]

    __device__ __forceinline__ Task(const ScoringParams& p, int number) {
        const int rest = p.by_heads.divide(number);
        head = number - rest * p.heads;
        row = p.by_num_chunks.divide(rest);
        start = (rest - row * p.num_chunks) * p.chunk;
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

// What must be known before a task's copies can start; each thread has one slot and a quarter of one
// column's copies.
struct Found {
    int slot;   // -1: none
    int entry;  // of the ring, -1: none
};

// What is wanted when they have arrived.
struct Arrival {
    int age;    // position + 1, 0: no key
    int until;  // age of the newest key that the query sees, 0: no query
    float lse;  // inf: no query
};

template <int kMembers>
__device__ __forceinline__ Found find(const ScoringParams& p, const Task& task) {
    Found found{-1, -1};
    const int index = threadIdx.x;
    if (index < task.length) {
        const int at = task.row * p.max_tail + task.start + index;
        found.slot = static_cast<int>(__ldg(p.slots + at));
    }
    const Column<kMembers> column(threadIdx.x >> 2);
    if (column.query() < p.queries && column.member() < p.group) {
        found.entry = static_cast<int>(__ldg(p.ring_slots + (task.row * p.queries + column.query())));
    }
    return found;
}

// The slot's line of keys; values lie between blocks of keys.
__device__ __forceinline__ uint32_t line_of(const ScoringParams& p, int slot) {
    const int real = max(slot, 0);
    return real + p.by_block_size.divide(real) * p.block_size;
}

// Has the keys on their way into the L2 while their place in shared memory is still in use.
template <int kPanels>
__device__ __forceinline__ void prefetch_key(const ScoringParams& p, const Task& task, int slot) {
    constexpr int kFetched = 64;  // bytes that one miss brings
    if (slot < 0) return;
    const uint32_t stride = p.heads * (kPanels * 128);
    const char* key = reinterpret_cast<const char*>(p.kv) + task.head * (kPanels * 128) +
                      static_cast<uint64_t>(line_of(p, slot)) * stride;
#pragma unroll
    for (int i = 0; i < kPanels * 128; i += kFetched) prefetch_l2(key + i);
}

// A warp copies its own 32 slots' keys, a row of the panels by kPanels * 8 lanes.
template <int kPanels>
__device__ __forceinline__ void copy_keys(const ScoringParams& p, const Task& task, int slot,
                                          uint32_t keys) {
    constexpr int kRowLanes = kPanels * 8;
    constexpr int kRows = 32 / kRowLanes;  // at a time
    constexpr int kVariants = 8 / kRows;   // of the swizzle
    const int lane = threadIdx.x & 31;
    const int part = lane % kRowLanes;
    const int first = lane / kRowLanes;
    const uint32_t is_there = __ballot_sync(0xFFFFFFFF, slot >= 0) >> first;
    const uint32_t line = line_of(p, slot);
    const uint32_t stride = p.heads * (kPanels * 128);  // bytes from line to line
    const char* base = reinterpret_cast<const char*>(p.kv) + task.head * (kPanels * 128) + part * 16;
    const uint32_t panel = keys + (part >> 3) * kKeyPanel + ((threadIdx.x & ~31) + first) * 128;
#pragma unroll
    for (int variant = 0; variant < kVariants; ++variant) {
        const uint32_t target = panel + (((part ^ first ^ (variant * kRows)) & 7) << 4);
#pragma unroll
        for (int i = variant; i < 32 / kRows; i += kVariants) {
            const uint32_t own = __shfl_sync(0xFFFFFFFF, line, i * kRows + first);
            copy_16(target + i * kRows * 128, base + static_cast<uint64_t>(own) * stride,
                    is_there >> (i * kRows) & 1);
        }
    }
}

// Four threads copy a column. Returns the query's log-sum-exp, inf where there is none.
template <int kPanels, int kMembers>
__device__ __forceinline__ float copy_query(const ScoringParams& p, const Task& task, int entry,
                                            uint32_t queries) {
    const int column = threadIdx.x >> 2;
    const int member = entry < 0 ? 0 : Column<kMembers>(column).member();
    const int q_head = (max(entry, 0) * p.heads + task.head) * p.group + member;
    const __nv_bfloat16* source = p.ring + static_cast<int64_t>(q_head) * (kPanels * kPanelDims);
    const uint32_t row = queries + column * 128;
#pragma unroll
    for (int i = 0; i < kPanels * 2; ++i) {
        const int part = i * 4 + (threadIdx.x & 3);
        const uint32_t target = row + (part >> 3) * kQueryPanel + (((part ^ column) & 7) << 4);
        copy_16(target, source + part * 8, entry >= 0);
    }
    return entry >= 0 ? __ldg(p.ring_lse + q_head) : __int_as_float(0x7F800000);
}

// Starts all of a task's copies.
template <int kPanels, int kMembers>
__device__ __forceinline__ Arrival start_copies(const ScoringParams& p, const Task& task,
                                                const Found& found, uint32_t keys) {
    copy_keys<kPanels>(p, task, found.slot, keys);
    Arrival arrival{0, 0, 0.0f};
    arrival.lse = copy_query<kPanels, kMembers>(p, task, found.entry, keys + kPanels * kKeyPanel);
    if (found.slot >= 0) arrival.age = __ldg(p.positions + (task.out + threadIdx.x)) + 1;
    if (found.entry >= 0) {
        const int query = Column<kMembers>(threadIdx.x >> 2).query();
        const int64_t until = __ldg(p.query_at + (task.row * p.queries + query)) + 1;
        arrival.until = static_cast<int>(min(until, static_cast<int64_t>(0x7FFFFFFF)));
    }
    return arrival;
}

}  // namespace zl
