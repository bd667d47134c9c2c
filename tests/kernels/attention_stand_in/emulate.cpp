// Runs the attention kernel's source on a CPU, all CTAs at once.
// Knows nothing of how attention is computed.
#include "cluster.h"
#include "attention_kernel.cuh"

using namespace zl;

char zl::shared[1];

namespace {

CUtensorMap map;
const AttentionParams* params;

}  // namespace

extern "C" int emulate(const void* pool, int num_blocks, const void* q, int q_stride, void* out,
                       void* lse, const void* num_items, const void* items, const void* block_ids,
                       void* queue, void* arrived, void* sums, void* stats, int heads, int group,
                       int dim, float scale_log2, int num_ctas, int seed) {
    const AttentionParams all{static_cast<const __nv_bfloat16*>(q),
                              static_cast<__nv_bfloat16*>(out),
                              static_cast<float*>(lse),
                              static_cast<const int*>(num_items),
                              static_cast<const int*>(items),
                              static_cast<const int*>(block_ids),
                              static_cast<int*>(queue),
                              static_cast<int*>(arrived),
                              static_cast<float*>(sums),
                              static_cast<float*>(stats),
                              q_stride, heads, group, scale_log2};
    params = &all;
    map = {static_cast<const uint16_t*>(pool), int64_t(num_blocks) * 2 * kBlockSlots, heads * dim,
           heads * dim, 2 * kBlockSlots};
    if (num_ctas > kMaxCtas) return 2;
    if (dim == 64) {
        body = [] { attention_kernel<64>(map, *params); };
    } else {
        body = [] { attention_kernel<128>(map, *params); };
    }
    cluster_size = num_ctas;
    cta_threads = kAttentionThreads;
    gridDim.x = num_ctas;
    first_static = nullptr;
    std::mt19937 random(seed);
    start(0);
    return run_cluster(random) ? 0 : 1;
}
