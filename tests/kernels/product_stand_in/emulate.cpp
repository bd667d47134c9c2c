// Runs the product kernel's source on a CPU, cluster after cluster; which warp runs next is drawn, and it
// runs as far as it can, so that a missing barrier shows.
// Knows nothing of how products are computed.
#include <random>

#include "linear.cuh"

using namespace zl;

char zl::shared[1];

namespace {

constexpr int kStackBytes = 64 << 10;
using Kernel = void (*)(CUtensorMap, CUtensorMap, Params);

Kernel kernel;
CUtensorMap weight_map, x_map;
const Params* params;

void body() {
    kernel(weight_map, x_map, *params);
    current->is_done = true;
    swapcontext(&current->context, &scheduler);
}

struct Instance {
    Kernel kernel;
    int groups, rows, stage_bytes, threads;
};

template <int kGroups, int kRows>
Instance instance(Kernel kernel) {
    using T = Tile<kGroups, kRows>;
    return {kernel, kGroups, kRows, T::kStageBytes, T::kThreads};
}

const Instance kInstances[] = {
    instance<1, 16>(linear_kernel<1, 16>), instance<2, 32>(linear_kernel<2, 32>),
    instance<3, 64>(linear_kernel<3, 64>), instance<4, 16>(linear_kernel<4, 16>),
    instance<2, 224>(linear_kernel<2, 224>), instance<3, 224>(uneven_linear_kernel<3, 224>),
    instance<1, 144>(linear_kernel<1, 144>), instance<3, 208>(uneven_linear_kernel<3, 208>),
};

void start(int first_block) {
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
        makecontext(&fiber.context, body, 0);
    }
}

// Whether any thread of the warp could.
bool run_warp(int warp) {
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
bool run_cluster(std::mt19937& random) {
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

}  // namespace

extern "C" int emulate(const void* weight, int weight_rows, int columns, const void* x,
                       int x_stride, void* out, int out_stride, const void* bias,
                       const void* residual, int residual_stride, void* out_squares,
                       const void* in_squares, int num_in_squares, float eps, int rows, int gated,
                       int groups, int splits, int sharers, int padded_rows, int max_clusters,
                       int stages, int seed) {
    const Instance* found = nullptr;
    for (const Instance& one : kInstances) {
        if (one.groups == groups && one.rows == padded_rows) found = &one;
    }
    if (found == nullptr) return 2;
    kernel = found->kernel;
    cta_threads = found->threads;
    cluster_size = splits * sharers;
    const int tile_rows = groups * kGroupM * sharers;
    const int rounds = (weight_rows + tile_rows - 1) / tile_rows;
    const Params all{static_cast<__nv_bfloat16*>(out),
                     static_cast<const __nv_bfloat16*>(bias),
                     static_cast<const __nv_bfloat16*>(residual),
                     static_cast<float*>(out_squares),
                     static_cast<const float*>(in_squares),
                     num_in_squares,
                     1.0f / static_cast<float>(columns),
                     eps,
                     out_stride,
                     residual_stride,
                     rows,
                     weight_rows,
                     columns / kBlockK,
                     rounds,
                     stages,
                     splits,
                     sharers,
                     gated != 0};
    params = &all;
    weight_map = {static_cast<const uint16_t*>(weight), weight_rows, columns, columns, kGroupM};
    x_map = {static_cast<const uint16_t*>(x), rows, columns, x_stride, padded_rows / sharers};
    std::mt19937 random(seed);
    const int num_clusters = all.meets_in_shared() ? rounds : min(rounds, max_clusters);
    gridDim.x = num_clusters * cluster_size;
    first_static = nullptr;
    for (int cluster = 0; cluster < num_clusters; ++cluster) {
        start(cluster * cluster_size);
        if (!run_cluster(random)) return 1;
    }
    return 0;
}
