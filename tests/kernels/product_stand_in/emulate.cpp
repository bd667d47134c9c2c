// Runs the product kernel's source on a CPU, cluster after cluster.
// Knows nothing of how products are computed.
#include "cluster.h"
#include "linear.cuh"

using namespace zl;

char zl::shared[1];

namespace {

using Kernel = void (*)(CUtensorMap, CUtensorMap, Params);

Kernel kernel;
CUtensorMap weight_map, x_map;
const Params* params;

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
    body = [] { kernel(weight_map, x_map, *params); };
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
