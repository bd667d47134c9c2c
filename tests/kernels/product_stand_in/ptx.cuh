// CUDA's words on a CPU for a cluster of CTAs: threads are fibers that switch only where they must wait,
// copies of the copy engine arrive at once, barriers count bytes and arrivals.
// Knows nothing of any kernel.
#pragma once
#include <cuda_bf16.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <map>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __shared__ static
#define __maxnreg__(...)
#define __launch_bounds__(...)
#define threadIdx (Index{current->thread % kThreadsOfCta})
#define blockIdx (Index{current->block})

using std::max;
using std::min;

// The card ends a kernel whose address is not aligned, and so does this.
inline void must_be_aligned(uint64_t address, int bytes, const char* file, int line) {
    if (address % bytes == 0) return;
    fprintf(stderr, "%s:%d: %#lx is no multiple of %d\n", file, line, address, bytes);
    abort();
}

struct Index {
    int x;
};
struct CUtensorMap {
    const uint16_t* data;
    int64_t rows, columns, stride;
    int box_rows;
};

constexpr int kMaxCtas = 8;
constexpr int kThreadsOfCta = 640;  // numbers, of which a kernel uses fewer; whole warpgroups
constexpr int kNumThreads = kMaxCtas * kThreadsOfCta;
constexpr int kSharedBytes = 228 * 1024;
// Where threads meet: by warpgroup, then by other groups of threads.
constexpr int kWarpgroups = 0, kWarps = 1000, kHalfWarps = 2000, kCtas = 3000, kNamed = 4000,
              kCluster = 5000;

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    std::function<bool()> may_go_on;  // empty: nothing to wait for
    int thread;                       // of the cluster
    int block;
    bool is_done;
    uint64_t box;  // what it shows to the others of a meeting
};
struct Meeting {
    int count = 0;
    long turn = 0;
};
struct Barrier {
    int expected, pending;
    int64_t bytes = 0;
    uint32_t phase = 0;

    void settle() {
        if (pending > 0 || bytes != 0) return;
        pending = expected;
        ++phase;
    }
};

inline std::vector<Fiber> fibers;
inline Fiber* current;
inline ucontext_t scheduler;
inline Index gridDim;
inline int cluster_size, cta_threads;
inline std::map<int, Meeting> meetings;
inline std::map<uint64_t, Barrier> barriers_of_ctas;
inline const char* first_static;
alignas(1024) inline char memory_of_ctas[kMaxCtas][kSharedBytes];

inline int own_cta() { return current->thread / kThreadsOfCta; }

inline void wait_until(std::function<bool()> may_go_on) {
    if (may_go_on()) return;
    current->may_go_on = std::move(may_go_on);
    swapcontext(&current->context, &scheduler);
    current->may_go_on = nullptr;
}

inline void meet(int place, int size) {
    Meeting& meeting = meetings[place];
    if (++meeting.count == size) {
        meeting.count = 0;
        ++meeting.turn;
        return;
    }
    wait_until([&meeting, turn = meeting.turn] { return meeting.turn != turn; });
}

inline void __syncwarp() { meet(kWarps + current->thread / 32, 32); }
inline void __syncthreads() { meet(kCtas + own_cta(), cta_threads); }

inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}
inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// What lane `from` of those that take part (a warp or half of one) shows.
inline uint32_t exchanged(uint32_t mask, uint32_t shown, int from) {
    const int half = mask == 0xFFFF ? 0 : 1;
    const int place = mask == 0xFFFFFFFF ? kWarps + current->thread / 32
                                         : kHalfWarps + current->thread / 32 * 2 + half;
    const int size = mask == 0xFFFFFFFF ? 32 : 16;
    current->box = shown;
    meet(place, size);
    const auto received = static_cast<uint32_t>(fibers[(current->thread & ~31) + from].box);
    meet(place, size);
    return received;
}
inline int __shfl_sync(uint32_t mask, int value, int from) { return exchanged(mask, value, from); }
inline uint32_t __shfl_xor_sync(uint32_t mask, uint32_t value, int lanes) {
    return exchanged(mask, value, (current->thread & 31) ^ lanes);
}
inline float __shfl_xor_sync(uint32_t mask, float value, int lanes) {
    return float_of(__shfl_xor_sync(mask, bits_of(value), lanes));
}

inline float __bfloat162float(__nv_bfloat16 value) { return float_of(uint32_t(value.bits) << 16); }
inline float __fdividef(float left, float right) { return left / right; }
inline float __expf(float value) { return expf(value); }
inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }

namespace zl {

extern char shared[];
constexpr uint32_t kSharedBase = 528;           // the kernel must align what needs it
constexpr uint32_t kStaticBase = 1u << 20;
constexpr uint32_t kRankUnit = 1u << 24;        // of an address in another CTA, rank + 1 of these

inline uint32_t shared_address(const void* pointer) {
    const char* at = static_cast<const char*>(pointer);
    if (at == shared) return kSharedBase;
    if (first_static == nullptr) first_static = at;
    return kStaticBase + static_cast<uint32_t>(at - first_static);
}

inline char* shared_at(uint32_t address, int cta) {
    const uint32_t offset = address - kSharedBase;
    if (offset >= kSharedBytes - kSharedBase) {
        fprintf(stderr, "no shared memory at %u\n", address);
        abort();
    }
    return memory_of_ctas[cta] + address;
}

inline float bf16_at(uint32_t address) {
    uint16_t value;
    memcpy(&value, shared_at(address, own_cta()), 2);
    return float_of(uint32_t(value) << 16);
}

inline Barrier& barrier_at(uint32_t address, int cta) {
    const auto found = barriers_of_ctas.find(uint64_t(cta) << 32 | address);
    if (found == barriers_of_ctas.end()) {
        fprintf(stderr, "CTA %d has no barrier at %u yet\n", cta, address);
        abort();
    }
    return found->second;
}

inline void barrier_init(uint32_t barrier, uint32_t num_arrivals) {
    const int count = num_arrivals;
    barriers_of_ctas[uint64_t(own_cta()) << 32 | barrier] = {count, count};
}
inline void barrier_init_fence() {}
inline void barrier_arrive_expect(uint32_t barrier, uint32_t num_bytes) {
    Barrier& own = barrier_at(barrier, own_cta());
    own.bytes += num_bytes;
    --own.pending;
    own.settle();
}
inline void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
    Barrier& other = barrier_at(barrier, rank);
    --other.pending;
    other.settle();
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
    Barrier& own = barrier_at(barrier, own_cta());
    wait_until([&own, parity] { return (own.phase & 1) != parity; });
}

inline uint64_t policy_evict_first() { return 0; }
inline uint64_t policy_evict_last() { return 0; }
inline void prefetch_map(const CUtensorMap*) {}

inline void load_box_into(uint16_t ranks, const CUtensorMap* map, int column, int row,
                          uint32_t target, uint32_t barrier, uint64_t) {
    for (int cta = 0; cta < kMaxCtas; ++cta) {
        if (!(ranks >> cta & 1)) continue;
        for (int i = 0; i < map->box_rows * 64; ++i) {
            const int at_row = row + i / 64, at_column = column + i % 64;
            const bool is_there = at_row < map->rows && at_column < map->columns;
            const uint16_t value = is_there ? map->data[at_row * map->stride + at_column] : 0;
            const uint32_t address = target + i * 2;
            memcpy(shared_at(address ^ (address >> 7 & 7) << 4, cta), &value, 2);
        }
        Barrier& waiting = barrier_at(barrier, cta);
        waiting.bytes -= map->box_rows * 128;
        waiting.settle();
    }
}
inline void load_box(const CUtensorMap* map, int column, int row, uint32_t target,
                     uint32_t barrier, uint64_t policy = 0) {
    load_box_into(1 << own_cta(), map, column, row, target, barrier, policy);
}

inline uint32_t cluster_rank() { return own_cta(); }
inline void cluster_sync() { meet(kCluster, cluster_size * cta_threads); }
inline void cluster_meet() { cluster_sync(); }
inline uint32_t address_in(uint32_t address, uint32_t rank) {
    return address + (rank + 1) * kRankUnit;
}
inline void store_shared(uint32_t address, float value) {
    memcpy(shared_at(address, own_cta()), &value, 4);
}
inline float4 load_remote(uint32_t address) {
    float4 value;
    memcpy(&value, shared_at(address % kRankUnit, address / kRankUnit - 1), 16);
    return value;
}
inline float load_from_l2(const float* address) { return *address; }
inline uint2 load_four_from_l2(const __nv_bfloat16* address) {
    uint2 value;
    memcpy(&value, address, 8);
    return value;
}

inline void wait_for_previous_grid() {}
inline void let_next_grid_start() {}
template <int kCount>
void shrink_registers() {
    meet(kWarpgroups + current->thread / 128, 128);
}
template <int kCount>
void grow_registers() {
    meet(kWarpgroups + current->thread / 128, 128);
}
inline void named_sync(uint32_t num_threads) { meet(kNamed + own_cta(), num_threads); }

template <class T>
void compute_in_place(T*&) {}

template <int kCount>
void clear(float (&values)[kCount]) {
    std::fill_n(values, kCount, 0.0f);
}

inline uint32_t transpose_8x8(uint32_t pair) {
    const int lane = current->thread & 31;
    uint32_t result = 0;
    current->box = pair;
    __syncwarp();
    for (int e = 0; e < 2; ++e) {
        const int row = 2 * (lane % 4) + e, column = lane / 4;
        const auto from = static_cast<uint32_t>(
            fibers[(current->thread & ~31) + row * 4 + column / 2].box);
        result |= (from >> 16 * (column % 2) & 0xFFFF) << 16 * e;
    }
    __syncwarp();
    return result;
}
inline uint32_t bf16_bits(float value) {
    const uint32_t bits = bits_of(value);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline uint32_t pack_bf16(float first, float second) {
    return bf16_bits(first) | bf16_bits(second) << 16;
}
inline float2 unpack_bf16(uint32_t pair) {
    return {float_of(pair << 16), float_of(pair & 0xFFFF0000)};
}

}  // namespace zl
