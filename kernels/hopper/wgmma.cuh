// wgmma: D[64, kRows] (+)= A[64, 16] B[kRows, 16]^T, bf16 into float32, both operands in shared memory.
// Knows nothing of pipelines.
#pragma once
#include <stdint.h>

namespace zl {

// A K-major operand tile as the copy engine leaves it with 128-byte swizzle: rows of 128 bytes, groups
// of 8 rows 1024 bytes apart. `address` is a multiple of 1024; a step of 16 along K adds 32 bytes.
__device__ __forceinline__ uint64_t operand_descriptor(uint32_t address) {
    constexpr uint64_t kSwizzle128 = 1ull << 62;
    constexpr uint64_t kGroupStride = (1024ull >> 4) << 32;
    constexpr uint64_t kUnusedLeadingStride = 1ull << 16;
    return kSwizzle128 | kGroupStride | kUnusedLeadingStride | ((address & 0x3FFFF) >> 4);
}

constexpr uint64_t kDescriptorStepK16 = 32 >> 4;

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from reading accumulators ahead of the wait before this.
template <int kCount>
__device__ __forceinline__ void pin_registers(float (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void clear(float (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = 0.0f;
}

template <int kRows>
__device__ __forceinline__ void wgmma(float (&d)[kRows / 2], uint64_t a, uint64_t b,
                                      uint32_t accumulate);

// clang-format off
#define ZL_R0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define ZL_R1 "%8,%9,%10,%11,%12,%13,%14,%15"
#define ZL_R2 "%16,%17,%18,%19,%20,%21,%22,%23"
#define ZL_R3 "%24,%25,%26,%27,%28,%29,%30,%31"
#define ZL_R4 "%32,%33,%34,%35,%36,%37,%38,%39"
#define ZL_R5 "%40,%41,%42,%43,%44,%45,%46,%47"
#define ZL_R6 "%48,%49,%50,%51,%52,%53,%54,%55"
#define ZL_R7 "%56,%57,%58,%59,%60,%61,%62,%63"
#define ZL_R8 "%64,%65,%66,%67,%68,%69,%70,%71"
#define ZL_R9 "%72,%73,%74,%75,%76,%77,%78,%79"
#define ZL_R10 "%80,%81,%82,%83,%84,%85,%86,%87"
#define ZL_R11 "%88,%89,%90,%91,%92,%93,%94,%95"
#define ZL_R12 "%96,%97,%98,%99,%100,%101,%102,%103"
#define ZL_R13 "%104,%105,%106,%107,%108,%109,%110,%111"
#define ZL_R14 "%112,%113,%114,%115,%116,%117,%118,%119"
#define ZL_R15 "%120,%121,%122,%123,%124,%125,%126,%127"
#define ZL_D0 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define ZL_D1 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define ZL_D2 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define ZL_D3 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define ZL_D4 "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define ZL_D5 "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define ZL_D6 "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define ZL_D7 "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define ZL_D8 "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define ZL_D9 "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define ZL_D10 "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define ZL_D11 "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define ZL_D12 "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define ZL_D13 "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define ZL_D14 "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define ZL_D15 "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

#define ZL_WGMMA(ROWS, REGISTERS, A, B, ACCUMULATE, ...)                                          \
    template <>                                                                                   \
    __device__ __forceinline__ void wgmma<ROWS>(float (&d)[ROWS / 2], uint64_t a, uint64_t b,     \
                                                uint32_t accumulate) {                            \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ACCUMULATE ", 0;\n"                      \
                     "wgmma.mma_async.sync.aligned.m64n" #ROWS "k16.f32.bf16.bf16 {" REGISTERS    \
                     "}, " A ", " B ", p, 1, 1, 0, 0;\n}\n"                                       \
                     : __VA_ARGS__                                                                \
                     : "l"(a), "l"(b), "r"(accumulate));                                          \
    }

ZL_WGMMA(16, ZL_R0,
         "%8", "%9", "%10",
         ZL_D0)
ZL_WGMMA(32, ZL_R0 "," ZL_R1,
         "%16", "%17", "%18",
         ZL_D0, ZL_D1)
ZL_WGMMA(64, ZL_R0 "," ZL_R1 "," ZL_R2 "," ZL_R3,
         "%32", "%33", "%34",
         ZL_D0, ZL_D1, ZL_D2, ZL_D3)
ZL_WGMMA(96, ZL_R0 "," ZL_R1 "," ZL_R2 "," ZL_R3 "," ZL_R4 "," ZL_R5,
         "%48", "%49", "%50",
         ZL_D0, ZL_D1, ZL_D2, ZL_D3, ZL_D4, ZL_D5)
ZL_WGMMA(112, ZL_R0 "," ZL_R1 "," ZL_R2 "," ZL_R3 "," ZL_R4 "," ZL_R5 "," ZL_R6,
         "%56", "%57", "%58",
         ZL_D0, ZL_D1, ZL_D2, ZL_D3, ZL_D4, ZL_D5, ZL_D6)
ZL_WGMMA(128, ZL_R0 "," ZL_R1 "," ZL_R2 "," ZL_R3 "," ZL_R4 "," ZL_R5 "," ZL_R6 "," ZL_R7,
         "%64", "%65", "%66",
         ZL_D0, ZL_D1, ZL_D2, ZL_D3, ZL_D4, ZL_D5, ZL_D6, ZL_D7)
ZL_WGMMA(144, ZL_R0 "," ZL_R1 "," ZL_R2 "," ZL_R3 "," ZL_R4 "," ZL_R5 "," ZL_R6 "," ZL_R7 "," ZL_R8,
         "%72", "%73", "%74",
         ZL_D0, ZL_D1, ZL_D2, ZL_D3, ZL_D4, ZL_D5, ZL_D6, ZL_D7, ZL_D8)
ZL_WGMMA(160, ZL_R0 "," ZL_R1 "," ZL_R2 "," ZL_R3 "," ZL_R4 "," ZL_R5 "," ZL_R6 "," ZL_R7 "," ZL_R8 "," ZL_R9,
         "%80", "%81", "%82",
         ZL_D0, ZL_D1, ZL_D2, ZL_D3, ZL_D4, ZL_D5, ZL_D6, ZL_D7, ZL_D8, ZL_D9)
ZL_WGMMA(176, ZL_R0 "," ZL_R1 "," ZL_R2 "," ZL_R3 "," ZL_R4 "," ZL_R5 "," ZL_R6 "," ZL_R7 "," ZL_R8 "," ZL_R9 "," ZL_R10,
         "%88", "%89", "%90",
         ZL_D0, ZL_D1, ZL_D2, ZL_D3, ZL_D4, ZL_D5, ZL_D6, ZL_D7, ZL_D8, ZL_D9, ZL_D10)
ZL_WGMMA(192, ZL_R0 "," ZL_R1 "," ZL_R2 "," ZL_R3 "," ZL_R4 "," ZL_R5 "," ZL_R6 "," ZL_R7 "," ZL_R8 "," ZL_R9 "," ZL_R10 "," ZL_R11,
         "%96", "%97", "%98",
         ZL_D0, ZL_D1, ZL_D2, ZL_D3, ZL_D4, ZL_D5, ZL_D6, ZL_D7, ZL_D8, ZL_D9, ZL_D10, ZL_D11)
ZL_WGMMA(208, ZL_R0 "," ZL_R1 "," ZL_R2 "," ZL_R3 "," ZL_R4 "," ZL_R5 "," ZL_R6 "," ZL_R7 "," ZL_R8 "," ZL_R9 "," ZL_R10 "," ZL_R11 "," ZL_R12,
         "%104", "%105", "%106",
         ZL_D0, ZL_D1, ZL_D2, ZL_D3, ZL_D4, ZL_D5, ZL_D6, ZL_D7, ZL_D8, ZL_D9, ZL_D10, ZL_D11, ZL_D12)
ZL_WGMMA(224, ZL_R0 "," ZL_R1 "," ZL_R2 "," ZL_R3 "," ZL_R4 "," ZL_R5 "," ZL_R6 "," ZL_R7 "," ZL_R8 "," ZL_R9 "," ZL_R10 "," ZL_R11 "," ZL_R12 "," ZL_R13,
         "%112", "%113", "%114",
         ZL_D0, ZL_D1, ZL_D2, ZL_D3, ZL_D4, ZL_D5, ZL_D6, ZL_D7, ZL_D8, ZL_D9, ZL_D10, ZL_D11, ZL_D12, ZL_D13)
ZL_WGMMA(240, ZL_R0 "," ZL_R1 "," ZL_R2 "," ZL_R3 "," ZL_R4 "," ZL_R5 "," ZL_R6 "," ZL_R7 "," ZL_R8 "," ZL_R9 "," ZL_R10 "," ZL_R11 "," ZL_R12 "," ZL_R13 "," ZL_R14,
         "%120", "%121", "%122",
         ZL_D0, ZL_D1, ZL_D2, ZL_D3, ZL_D4, ZL_D5, ZL_D6, ZL_D7, ZL_D8, ZL_D9, ZL_D10, ZL_D11, ZL_D12, ZL_D13, ZL_D14)
ZL_WGMMA(256, ZL_R0 "," ZL_R1 "," ZL_R2 "," ZL_R3 "," ZL_R4 "," ZL_R5 "," ZL_R6 "," ZL_R7 "," ZL_R8 "," ZL_R9 "," ZL_R10 "," ZL_R11 "," ZL_R12 "," ZL_R13 "," ZL_R14 "," ZL_R15,
         "%128", "%129", "%130",
         ZL_D0, ZL_D1, ZL_D2, ZL_D3, ZL_D4, ZL_D5, ZL_D6, ZL_D7, ZL_D8, ZL_D9, ZL_D10, ZL_D11, ZL_D12, ZL_D13, ZL_D14, ZL_D15)
// clang-format on

#undef ZL_R0
#undef ZL_D0
#undef ZL_R1
#undef ZL_D1
#undef ZL_R2
#undef ZL_D2
#undef ZL_R3
#undef ZL_D3
#undef ZL_R4
#undef ZL_D4
#undef ZL_R5
#undef ZL_D5
#undef ZL_R6
#undef ZL_D6
#undef ZL_R7
#undef ZL_D7
#undef ZL_R8
#undef ZL_D8
#undef ZL_R9
#undef ZL_D9
#undef ZL_R10
#undef ZL_D10
#undef ZL_R11
#undef ZL_D11
#undef ZL_R12
#undef ZL_D12
#undef ZL_R13
#undef ZL_D13
#undef ZL_R14
#undef ZL_D14
#undef ZL_R15
#undef ZL_D15
#undef ZL_WGMMA

}  // namespace zl
