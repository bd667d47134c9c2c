// Runs the scoring kernel's source on a CPU, CTA after CTA; which warp runs next is drawn, and it runs as
// far as it can, so that a missing barrier shows.
// Knows nothing of how scores are computed.
//
// To be compiled with -fsanitize=alignment, whose checks of ordinary loads and stores call a function
// that stands below.
#include <random>

#include "scoring_kernel.cuh"

using namespace zl;

namespace {

constexpr int kStackBytes = 256 << 10;
using Kernel = void (*)(ScoringParams);

Kernel kernel;
const ScoringParams* params;

void body() {
    kernel(*params);
    current->is_done = true;
    swapcontext(&current->context, &scheduler);
}

template <int kPanels>
Kernel kernel_of(int members) {
    switch (members) {
        case 1: return scoring_kernel<kPanels, 1>;
        case 2: return scoring_kernel<kPanels, 2>;
        case 4: return scoring_kernel<kPanels, 4>;
        default: return scoring_kernel<kPanels, 8>;
    }
}

void start(int cta) {
    blockIdx.x = cta;
    memset(dynamic, 0xFF, sizeof(dynamic));
    std::fill(std::begin(meetings), std::end(meetings), Meeting{});
    for (int thread = 0; thread < kNumThreads; ++thread) {
        Fiber& fiber = fibers[thread];
        fiber.thread = thread;
        fiber.is_done = false;
        fiber.place = -1;
        fiber.stack.resize(kStackBytes);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, body, 0);
    }
}

bool can_run(const Fiber& fiber) {
    return !fiber.is_done && (fiber.place < 0 || meetings[fiber.place].turn != fiber.turn);
}

// Whether any thread of the warp could.
bool run_warp(int warp) {
    bool has_run = false;
    for (bool is_going = true; is_going; has_run |= is_going) {
        is_going = false;
        for (int lane = 0; lane < 32; ++lane) {
            Fiber& fiber = fibers[warp * 32 + lane];
            if (!can_run(fiber)) continue;
            is_going = true;
            current = &fiber;
            swapcontext(&scheduler, &fiber.context);
        }
    }
    return has_run;
}

// Whether all threads came to their end, with nothing left that they never waited for.
bool run_cta(std::mt19937& random) {
    int order[kNumThreads / 32];
    for (int warp = 0; warp < kNumThreads / 32; ++warp) order[warp] = warp;
    do {
        std::shuffle(std::begin(order), std::end(order), random);
    } while (std::any_of(std::begin(order), std::end(order), run_warp));
    bool is_whole = true;
    for (const Fiber& fiber : fibers) {
        is_whole &= fiber.is_done && fiber.copies.empty() && committed_work[fiber.thread].empty();
    }
    return is_whole;
}

}  // namespace

// What the compiler tells of an access: see TypeMismatchData in GCC's libsanitizer/ubsan.
struct Access {
    const char* file;
    uint32_t line, column;
    const void* type;
    unsigned char log_alignment, kind;
};

extern "C" void __ubsan_handle_type_mismatch_v1(const Access* access, uint64_t address) {
    note_misaligned(address, 1 << access->log_alignment, access->file, access->line);
}

// 0, or 1: the threads wait for each other or end with work left, 2: an address is misaligned.
extern "C" int emulate(const void* kv, const void* slots, const void* positions, const void* ring,
                       const void* ring_lse, const void* ring_slots, const void* query_at,
                       void* mass, void* similarity, int rows, int heads, int dim, int group,
                       int queries, int max_tail, int chunk, int block_size, float scale_log2,
                       float threshold, int num_ctas, int seed) {
    int members = 1;
    while (members < group) members *= 2;
    const int num_chunks = (max_tail + chunk - 1) / chunk;
    const int num_tasks = rows * heads * num_chunks;
    const ScoringParams all{static_cast<const __nv_bfloat16*>(kv),
                            static_cast<const int64_t*>(slots),
                            static_cast<const int32_t*>(positions),
                            static_cast<const __nv_bfloat16*>(ring),
                            static_cast<const float*>(ring_lse),
                            static_cast<const int64_t*>(ring_slots),
                            static_cast<const int64_t*>(query_at),
                            static_cast<float*>(mass),
                            static_cast<float*>(similarity),
                            heads, group, queries, max_tail, chunk, block_size,
                            num_chunks, num_tasks, Divisor(heads), Divisor(num_chunks),
                            Divisor(block_size), scale_log2, threshold};
    params = &all;
    kernel = dim == 128 ? kernel_of<2>(members) : kernel_of<1>(members);
    std::mt19937 random(seed);
    num_misaligned = 0;
    gridDim.x = min(num_ctas, num_tasks);
    for (int cta = 0; cta < gridDim.x; ++cta) {
        start(cta);
        if (!run_cta(random)) return 1;
    }
    return num_misaligned == 0 ? 0 : 2;
}
