// Runs CTAs side by side on a CPU; which warp runs next is drawn, and it runs as far as it can, so that a
// missing barrier shows.
// Knows nothing of what the threads do.
#pragma once
#include <random>

#include "ptx.cuh"

namespace zl {

constexpr int kStackBytes = 64 << 10;

inline void (*body)();  // of each thread

inline void run_thread() {
    body();
    current->is_done = true;
    swapcontext(&current->context, &scheduler);
}

inline void start(int first_block) {
    fibers.resize(cluster_size * kThreadsOfCta);
    memset(memory_of_ctas, 0xFF, sizeof(memory_of_ctas));
    meetings.clear();
    barriers_of_ctas.clear();
    for (int thread = 0; thread < static_cast<int>(fibers.size()); ++thread) {
        Fiber& fiber = fibers[thread];
        fiber.thread = thread;
        fiber.block = first_block + thread / kThreadsOfCta;
        fiber.may_go_on = nullptr;
        fiber.is_done = thread % kThreadsOfCta >= cta_threads;
        if (fiber.is_done) continue;
        fiber.stack.resize(kStackBytes);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, run_thread, 0);
    }
}

// Whether any thread of the warp could.
inline bool run_warp(int warp) {
    bool has_run = false;
    for (bool is_going = true; is_going; has_run |= is_going) {
        is_going = false;
        for (int lane = 0; lane < 32; ++lane) {
            Fiber& fiber = fibers[warp * 32 + lane];
            current = &fiber;
            if (fiber.is_done || (fiber.may_go_on && !fiber.may_go_on())) continue;
            is_going = true;
            swapcontext(&scheduler, &fiber.context);
        }
    }
    return has_run;
}

// Whether all threads came to their end, and every barrier got what it was told to expect.
inline bool run_cluster(std::mt19937& random) {
    std::vector<int> order(fibers.size() / 32);
    for (size_t warp = 0; warp < order.size(); ++warp) order[warp] = static_cast<int>(warp);
    bool is_going = true;
    while (is_going) {
        std::shuffle(order.begin(), order.end(), random);
        is_going = false;
        for (int warp : order) is_going |= run_warp(warp);
    }
    bool is_whole = true;
    for (const Fiber& fiber : fibers) is_whole &= fiber.is_done;
    for (const auto& one : barriers_of_ctas) {
        is_whole &= one.second.bytes == 0 && one.second.pending == one.second.expected;
    }
    return is_whole;
}

}  // namespace zl
