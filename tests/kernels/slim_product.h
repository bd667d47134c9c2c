// One warp's product of 16 by 16 and 16 by 8 bf16 numbers on a CPU, for stand-ins that have threads of
// their own. Knows nothing of how they meet.
#pragma once
#include <stdint.h>
#include <string.h>

#include <algorithm>

namespace zl {

inline float half_of_pair(uint32_t pair, int e) {
    const uint32_t bits = e == 1 ? pair & 0xFFFF0000 : pair << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// slim_a, slim_b: what each thread of all gives; meet: returns when all of the warp have come.
template <typename Meet>
void multiply_slim_of(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                      uint32_t (*slim_a)[4], uint32_t (*slim_b)[2], int thread, Meet meet) {
    const int first = thread & ~31, lane = thread & 31;
    std::copy_n(a, 4, slim_a[thread]);
    std::copy_n(b, 2, slim_b[thread]);
    meet();
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = 2 * (lane % 4) + i % 2;
        for (int k = 0; k < 16; ++k) {
            const uint32_t* own_a = slim_a[first + row % 8 * 4 + k % 8 / 2];
            const uint32_t* own_b = slim_b[first + column * 4 + k % 8 / 2];
            d[i] += half_of_pair(own_a[row / 8 + k / 8 * 2], k % 2) * half_of_pair(own_b[k / 8], k % 2);
        }
    }
    meet();
}

}  // namespace zl
