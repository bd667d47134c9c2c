// wgmma on a CPU: nothing is multiplied before it is waited for.
// Knows nothing of any kernel.
#pragma once
#include "ptx.cuh"

namespace zl {

constexpr uint64_t kDescriptorStepK16 = 32 >> 4;

using Work = std::vector<std::function<void()>>;
inline Work open_work[kNumThreads];                   // not committed
inline std::vector<Work> committed_work[kNumThreads];  // not waited for

inline uint64_t operand_descriptor(uint32_t address) {
    must_be_aligned(address, 1024, __FILE__, __LINE__);
    return address >> 4;
}

inline void wgmma_fence() {}

inline void wgmma_commit() {
    Work& work = open_work[current->thread];
    committed_work[current->thread].push_back(std::move(work));
    work.clear();
}

template <int kPending>
void wgmma_wait() {
    std::vector<Work>& groups = committed_work[current->thread];
    while (static_cast<int>(groups.size()) > kPending) {
        for (const auto& product : groups.front()) product();
        groups.erase(groups.begin());
    }
    meet(kWarpgroups + (current->thread >> 7), 128);
}

template <int kCount>
void pin_registers(float (&)[kCount]) {}

// Element k of row `row` of an operand with 128-byte swizzle.
inline float operand_at(uint64_t descriptor, int row, int k) {
    const uint32_t address = (descriptor << 4) + row / 8 * 1024 + row % 8 * 128 + 2 * k;
    return bf16_at(address ^ (address >> 7 & 7) << 4);
}

template <int kRows>
void wgmma(float (&d)[kRows / 2], uint64_t a, uint64_t b, uint32_t accumulate) {
    float* const target = d;
    const int lane = current->thread & 31, warp = current->thread >> 5 & 3;
    if (!accumulate) std::fill_n(target, kRows / 2, NAN);
    open_work[current->thread].push_back([=] {
        float rows[2][16], column[16];
        for (int h = 0; h < 2; ++h) {
            const int row = warp * 16 + lane / 4 + 8 * h;
            for (int k = 0; k < 16; ++k) rows[h][k] = operand_at(a, row, k);
        }
        for (int i = 0; i < kRows / 4; ++i) {
            const int t = i / 2, e = i % 2;
            for (int k = 0; k < 16; ++k) column[k] = operand_at(b, 8 * t + 2 * (lane % 4) + e, k);
            for (int h = 0; h < 2; ++h) {
                float& element = target[4 * t + 2 * h + e];
                if (!accumulate) element = 0.0f;
                for (int k = 0; k < 16; ++k) element += rows[h][k] * column[k];
            }
        }
    });
}

}  // namespace zl
