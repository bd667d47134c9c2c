// CUDA's words on a CPU: the threads of one CTA are fibers that switch only where they must wait for one
// another. Knows nothing of any kernel.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__
#define __launch_bounds__(...)
#define threadIdx (Index{current->thread})

using std::max;
using std::min;

struct Index {
    int x;
};
// Aligned as on the card, where the compiler reads each in one go.
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

constexpr int kNumThreads = 256;
constexpr int kWholeCta = 8;      // meeting places: 8 warps, the CTA, 2 warpgroups
constexpr int kWarpgroups = 9;

struct Copy {
    uint32_t target;
    const void* source;
    bool is_there;
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    std::vector<Copy> copies;  // not waited for yet
    int thread;
    bool is_done;
    int place;   // where it waits, -1: nowhere
    long turn;   // of the meeting that it waits for
    uint64_t box;  // what it shows to the others of a meeting
};

struct Meeting {
    int count = 0;
    long turn = 0;
};

inline Fiber fibers[kNumThreads];
inline Fiber* current;
inline ucontext_t scheduler;
inline Meeting meetings[16];
inline Index blockIdx, gridDim;

inline void meet(int place, int size) {
    Meeting& meeting = meetings[place];
    current->place = place;
    current->turn = meeting.turn;
    if (++meeting.count == size) {
        meeting.count = 0;
        ++meeting.turn;
    }
    swapcontext(&current->context, &scheduler);
    current->place = -1;
}

inline void meet_warp() { meet(current->thread >> 5, 32); }
inline Fiber* own_warp() { return fibers + (current->thread & ~31); }

inline int num_misaligned;

// The card ends a kernel that does so; here it goes on, so that a test can fail for it.
inline void note_misaligned(uint64_t address, int bytes, const char* file, int line) {
    constexpr int kMostShown = 3;
    if (num_misaligned++ >= kMostShown) return;
    fprintf(stderr, "%s:%d: %#lx is no multiple of %d\n", file, line, address, bytes);
}

inline void must_be_aligned(uint64_t address, int bytes, const char* file, int line) {
    if (address % bytes != 0) note_misaligned(address, bytes, file, line);
}

template <class To, class From>
To bits_of(From value) {
    To result{};
    memcpy(&result, &value, min(sizeof(To), sizeof(From)));
    return result;
}

// What `read` makes of the boxes of the warp, in which each thread has put its value.
template <class Value, class Read>
auto of_warp(Value value, Read read) {
    current->box = bits_of<uint64_t>(value);
    meet_warp();
    const auto result = read(own_warp());
    meet_warp();
    return result;
}

template <class Value>
Value __shfl_sync(uint32_t, Value value, int from, int width = 32) {
    const int lane = (current->thread & 31 & -width) + from % width;
    return of_warp(value, [&](Fiber* warp) { return bits_of<Value>(warp[lane].box); });
}
template <class Value>
Value __shfl_xor_sync(uint32_t mask, Value value, int lanes) {
    return __shfl_sync(mask, value, (current->thread & 31) ^ lanes);
}
inline uint32_t __ballot_sync(uint32_t, bool value) {
    return of_warp(value, [](Fiber* warp) {
        uint32_t votes = 0;
        for (int lane = 0; lane < 32; ++lane) votes |= uint32_t(warp[lane].box) << lane;
        return votes;
    });
}
inline bool __any_sync(uint32_t mask, bool value) { return __ballot_sync(mask, value) != 0; }
template <class Value, class Choose>
Value reduce(Value value, Choose choose) {
    return of_warp(value, [&](Fiber* warp) {
        Value result = bits_of<Value>(warp[0].box);
        for (int lane = 1; lane < 32; ++lane) {
            result = choose(result, bits_of<Value>(warp[lane].box));
        }
        return result;
    });
}
inline int __reduce_min_sync(uint32_t, int value) {
    return reduce(value, [](int left, int right) { return min(left, right); });
}
template <class Value>
Value __reduce_max_sync(uint32_t, Value value) {
    return reduce(value, [](Value left, Value right) { return max(left, right); });
}
inline int __reduce_add_sync(uint32_t, int value) {
    return reduce(value, [](int left, int right) { return left + right; });
}
inline void __syncwarp() { meet_warp(); }
inline void __syncthreads() { meet(kWholeCta, kNumThreads); }
inline bool __syncthreads_or(bool value) {
    current->box = value;
    __syncthreads();
    bool result = false;
    for (const Fiber& fiber : fibers) result |= fiber.box != 0;
    __syncthreads();
    return result;
}
inline bool __syncthreads_and(bool value) { return !__syncthreads_or(!value); }

template <class Value>
Value __ldg(const Value* address) {
    return *address;
}
inline void atomicMax(uint32_t* target, uint32_t value) { *target = max(*target, value); }
inline void atomicAdd(int* target, int value) { *target += value; }
inline int __clz(uint32_t value) { return value == 0 ? 32 : __builtin_clz(value); }
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, int by) {
    return (uint64_t(high) << 32 | low) << by >> 32;
}
inline int __popc(uint32_t value) { return __builtin_popcount(value); }
inline float __uint_as_float(uint32_t value) { return bits_of<float>(value); }
inline float __int_as_float(int value) { return bits_of<float>(value); }
inline uint32_t __float_as_uint(float value) { return bits_of<uint32_t>(value); }
inline int __float_as_int(float value) { return bits_of<int>(value); }
inline int __float2int_rn(float value) { return static_cast<int>(lrintf(value)); }
inline float __fdividef(float left, float right) { return left / right; }
inline uint32_t __umulhi(uint32_t left, uint32_t right) { return uint64_t(left) * right >> 32; }
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selectors) {
    const uint64_t both = uint64_t(high) << 32 | low;
    uint32_t result = 0;
    for (int byte = 0; byte < 4; ++byte) {
        result |= uint32_t(both >> 8 * (selectors >> 4 * byte & 7) & 255) << 8 * byte;
    }
    return result;
}
namespace zl {

alignas(1024) inline char dynamic[120 * 1024];
constexpr uint32_t kSharedBase = 528;  // a kernel must align what needs it
static_assert(kSharedBase % sizeof(uint4) == 0, "else addresses here and there differ in alignment");

inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(static_cast<const char*>(pointer) - dynamic) + kSharedBase;
}

inline char* shared_at(uint32_t address) {
    const uint32_t offset = address - kSharedBase;
    if (offset >= sizeof(dynamic)) {
        fprintf(stderr, "no shared memory at %u\n", address);
        abort();
    }
    return dynamic + offset;
}

inline float bf16_at(uint32_t address) {
    uint16_t value;
    memcpy(&value, shared_at(address), 2);
    return __uint_as_float(uint32_t(value) << 16);
}

}  // namespace zl
