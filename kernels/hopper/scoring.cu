// The C interface of the scoring kernel.
// Knows nothing of how it is computed.
#include "scoring_kernel.cuh"

namespace zl {
namespace {

using ScoringKernel = void (*)(ScoringParams);

template <int kPanels>
ScoringKernel kernel_of(int members) {
    switch (members) {
        case 1: return scoring_kernel<kPanels, 1>;
        case 2: return scoring_kernel<kPanels, 2>;
        case 4: return scoring_kernel<kPanels, 4>;
        case 8: return scoring_kernel<kPanels, 8>;
        default: return nullptr;
    }
}

int padded(int group) {
    int members = 1;
    while (members < group) members *= 2;
    return members;
}

int num_processors(int* count) {
    int device = 0;
    const cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace
}  // namespace zl

using namespace zl;

// Tensors as in ScoringParams, contiguous; keys and queries 16-byte aligned. -1: not for these sizes.
extern "C" int zl_scoring(const void* kv, const void* slots, const void* positions, const void* ring,
                          const void* ring_lse, const void* ring_slots, const void* query_at,
                          void* mass, void* similarity, int rows, int heads, int dim, int group,
                          int queries, int max_tail, int chunk, int block_size, float scale_log2,
                          float threshold, void* stream) {
    const int members = padded(group);
    const ScoringKernel kernel = dim == 128  ? kernel_of<2>(members)
                                 : dim == 64 ? kernel_of<1>(members)
                                             : nullptr;
    const bool fits = kernel != nullptr && members * queries <= kColumns && chunk >= 1 &&
                      chunk <= kChunkSlots;
    if (!fits) return -1;
    const int num_chunks = (max_tail + chunk - 1) / chunk;
    const int num_tasks = rows * heads * num_chunks;
    if (num_tasks == 0) return cudaSuccess;
    const ScoringParams params{static_cast<const __nv_bfloat16*>(kv),
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
    int processors = 0;
    int error = num_processors(&processors);
    if (error != cudaSuccess) return error;
    const int shared_bytes = scoring_shared_bytes(dim / kPanelDims);
    const void* const entry = reinterpret_cast<const void*>(kernel);
    error = cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
    error = cudaFuncSetAttribute(entry, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);  // room for two CTAs
    if (error != cudaSuccess) return error;
    const int num_ctas = num_tasks < 2 * processors ? num_tasks : 2 * processors;
    kernel<<<num_ctas, kScoreThreads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(
        params);
    return cudaGetLastError();
}
