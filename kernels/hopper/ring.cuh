// A ring of stages in shared memory, each with a barrier for full and one for empty.
// Knows nothing of what the stages hold.
#pragma once
#include <stdint.h>

namespace zl {

struct Ring {
    uint32_t stages_start;  // shared address, a multiple of 1024
    uint32_t full_start;
    uint32_t empty_start;

    __device__ __forceinline__ uint32_t full(uint32_t stage) const { return full_start + stage * 8; }
    __device__ __forceinline__ uint32_t empty(uint32_t stage) const {
        return empty_start + stage * 8;
    }
};

// A position in the ring; the parity flips at each turn.
struct RingSlot {
    uint32_t stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance(uint32_t stages) {
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

}  // namespace zl
