// The type that the kernel's parameters name, and CUDA's small vectors.
// Knows nothing of arithmetic beyond them.
#pragma once
#include <stdint.h>

struct __nv_bfloat16 {
    uint16_t bits;
};

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
