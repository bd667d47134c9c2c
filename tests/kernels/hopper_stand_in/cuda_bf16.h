// The type that the kernel's parameters name. Knows nothing of arithmetic.
#pragma once
#include <stdint.h>

#include "ptx.cuh"

struct __nv_bfloat16 {
    uint16_t bits;
};
