// The scoring kernel's other instructions on a CPU: copies arrive when they are waited for.
// Knows nothing of scores.
#pragma once
#include "ptx.cuh"
#include "slim_product.h"
#include "wgmma.cuh"

namespace zl {

inline void copy_16(uint32_t target, const void* source, bool is_there) {
    must_be_aligned(target, 16, __FILE__, __LINE__);
    must_be_aligned(reinterpret_cast<uint64_t>(source), 16, __FILE__, __LINE__);
    memset(shared_at(target), 0xFF, 16);  // NaN until it has arrived
    current->copies.push_back({target, source, is_there});
}

inline void wait_for_copies() {
    for (const Copy& copy : current->copies) {
        memset(shared_at(copy.target), 0, 16);
        if (copy.is_there) memcpy(shared_at(copy.target), copy.source, 16);
    }
    current->copies.clear();
}

inline void prefetch_l2(const void*) {}
inline void let_next_grid_start() {}
inline const char* element_of(const char* base, uint32_t index, uint32_t size) {
    return base + uint64_t(index) * size;
}
inline void show_to_wgmma() {}
inline void store_half(uint32_t address, uint16_t value) {
    must_be_aligned(address, 2, __FILE__, __LINE__);
    memcpy(shared_at(address), &value, 2);
}
inline float exp2_fast(float value) { return exp2f(value); }
inline float rsqrt_fast(float value) { return 1.0f / sqrtf(value) * (1 + 1e-7f); }

inline void load_transposed(uint32_t (&a)[4], uint32_t address) {
    const int lane = current->thread & 31;
    must_be_aligned(address, 16, __FILE__, __LINE__);
    current->box = address;
    meet_warp();
    for (int matrix = 0; matrix < 4; ++matrix) {
        uint16_t values[2];
        for (int e = 0; e < 2; ++e) {
            const uint64_t row = own_warp()[matrix * 8 + 2 * (lane % 4) + e].box;
            memcpy(values + e, shared_at(static_cast<uint32_t>(row) + lane / 4 * 2), 2);
        }
        a[matrix] = values[0] | uint32_t(values[1]) << 16;
    }
    meet_warp();
}

inline uint32_t slim_a[kNumThreads][4], slim_b[kNumThreads][2];

inline void multiply_slim(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    multiply_slim_of(d, a, b, slim_a, slim_b, current->thread, [] { meet_warp(); });
}

}  // namespace zl
