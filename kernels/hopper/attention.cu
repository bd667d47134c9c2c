// The C interface of decode attention.
// Knows nothing of how it is computed.
#include <cstring>

#include "attention_kernel.cuh"

namespace zl {
namespace {

using AttentionKernel = void (*)(CUtensorMap, AttentionParams);

AttentionKernel attention_of(int dim, int* shared_bytes) {
    switch (dim) {
        case 64: *shared_bytes = AttentionTile<64>::kSharedBytes; return attention_kernel<64>;
        case 128: *shared_bytes = AttentionTile<128>::kSharedBytes; return attention_kernel<128>;
        default: return nullptr;
    }
}

}  // namespace
}  // namespace zl

using namespace zl;

// Tensors as in AttentionParams; q rows 4-byte aligned, out 8, sums 16. map: zl_pool_map's. -1: not for
// these sizes.
extern "C" int zl_attention(const void* map, const void* q, int q_stride, void* out, void* lse,
                            const void* num_items, const void* items, const void* block_ids,
                            void* queue, void* arrived, void* sums, void* stats, int heads,
                            int group, int dim, float scale_log2, int num_ctas, void* stream) {
    int shared_bytes = 0;
    const AttentionKernel kernel = attention_of(dim, &shared_bytes);
    if (kernel == nullptr || group < 1 || group > kMaxGroup || q_stride % 2 != 0) return -1;
    const AttentionParams params{static_cast<const __nv_bfloat16*>(q),
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
    const void* const entry = reinterpret_cast<const void*>(kernel);
    cudaError_t error =
        cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
    error = cudaFuncSetAttribute(entry, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);  // room for two CTAs
    if (error != cudaSuccess) return error;
    alignas(64) CUtensorMap pool;
    std::memcpy(&pool, map, sizeof(pool));
    cudaLaunchAttribute dependent{};
    dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    dependent.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(num_ctas);
    config.blockDim = dim3(kAttentionThreads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &dependent;
    config.numAttrs = 1;
    void* arguments[] = {&pool, const_cast<AttentionParams*>(&params)};
    return cudaLaunchKernelExC(&config, entry, arguments);
}
