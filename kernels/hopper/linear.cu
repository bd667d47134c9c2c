// Host side of the Hopper product: a plain C interface, called through ctypes.
// Knows nothing of torch; pointers, sizes and a stream come in, an error code goes out.
#include <cstring>
#include <utility>

#include "linear.cuh"

namespace zl {
namespace {

constexpr int kMaxGroups = 4;
constexpr int kRowSizes[] = {16, 32, 64, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256};
constexpr int kNumRowSizes = sizeof(kRowSizes) / sizeof(kRowSizes[0]);
constexpr int kMaxRows = kRowSizes[kNumRowSizes - 1];
constexpr int kMaxCluster = 8;
constexpr int kMaxDynamicBytes = 225 * 1024;  // the card allows 227, of which 2 are static
constexpr int kStageRoom = 208 * 1024;  // the rest is for the next kernel's small CTAs

enum Code : int {
    kOk = 0,
    kNoDriverEntry = 1001,
    kBadShape = 1002,
    kBadConfig = 1003,
    kNoMap = 1004,
    kTooMuchShared = 1005,
    kBadStream = 1006,
};

using Kernel = void (*)(CUtensorMap, CUtensorMap, Params);

struct Instance {
    Kernel kernel;
    int stage_bytes;
    int partial_bytes_per_row;  // 0: has neither splits nor residuals
    int threads;
};

// Accumulators, rows / 2 a thread, must leave room for addresses: a CTA of 9, 13 or 17 warps gets 168,
// 128 or 96 registers a thread, since the SM's four parts each hold a quarter of the warps, rounded up;
// with 13, the feeder can leave the others 160.
constexpr bool fits_registers(int groups, int rows) {
    return groups <= 3 || rows <= 128;
}

template <int kGroups, int kRows>
Instance make_instance() {
    if constexpr (fits_registers(kGroups, kRows)) {
        using T = Tile<kGroups, kRows>;
        Kernel kernel;
        if constexpr (T::kMovesRegisters) {
            kernel = uneven_linear_kernel<kGroups, kRows>;
        } else {
            kernel = linear_kernel<kGroups, kRows>;
        }
        const int partial_bytes = T::kCanMeet ? Partials<kGroups>::kPitch * 4 : 0;
        return {kernel, T::kStageBytes, partial_bytes, T::kThreads};
    } else {
        return {nullptr, 0, 0, 0};
    }
}

template <int kGroups, int... kIndices>
Instance instance_of_rows(int size_index, std::integer_sequence<int, kIndices...>) {
    static const Instance all[] = {make_instance<kGroups, kRowSizes[kIndices]>()...};
    return all[size_index];
}

Instance find_instance(int groups, int size_index) {
    constexpr auto kIndices = std::make_integer_sequence<int, kNumRowSizes>();
    switch (groups) {
        case 1: return instance_of_rows<1>(size_index, kIndices);
        case 2: return instance_of_rows<2>(size_index, kIndices);
        case 3: return instance_of_rows<3>(size_index, kIndices);
        default: return instance_of_rows<4>(size_index, kIndices);
    }
}

int size_index_of(int rows) {
    int index = 0;
    while (index < kNumRowSizes - 1 && kRowSizes[index] < rows) ++index;
    return index;
}

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled encode_function() {
    static EncodeTiled found = [] {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult result;
        const cudaError_t error = cudaGetDriverEntryPointByVersion(
            "cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
        const bool there = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
        return there ? reinterpret_cast<EncodeTiled>(entry) : nullptr;
    }();
    return found;
}

// Boxes of [box_rows, kBlockK] of a row-major bf16 matrix, 128-byte swizzled; zeros outside of it.
int encode_map(CUtensorMap* map, const void* data, int64_t rows, int64_t columns, int64_t stride,
               int box_rows, CUtensorMapL2promotion promotion) {
    const EncodeTiled encode = encode_function();
    if (encode == nullptr) return kNoDriverEntry;
    const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
    const cuuint64_t strides[] = {static_cast<cuuint64_t>(stride) * 2};
    const cuuint32_t box[] = {kBlockK, static_cast<cuuint32_t>(box_rows)};
    const cuuint32_t steps[] = {1, 1};
    const CUresult result =
        encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), sizes, strides,
               box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? kOk : kNoMap;
}

// How a product is cut, chosen by the caller.
struct Cut {
    int groups;
    int splits;
    int sharers;

    int cluster_size() const { return splits * sharers; }
};

struct Plan {
    Instance instance;
    int size_index;
    int stages;
    int dynamic_bytes;
};

int larger(int a, int b) { return a > b ? a : b; }
int smaller(int a, int b) { return a < b ? a : b; }

int make_plan(Plan* plan, const Cut& cut, int rows, bool meets_in_shared) {
    const bool known = cut.groups >= 1 && cut.groups <= kMaxGroups && cut.splits >= 1 &&
                       cut.sharers >= 1 && cut.cluster_size() <= kMaxCluster;
    if (!known) return kBadConfig;
    plan->size_index = size_index_of(rows);
    plan->instance = find_instance(cut.groups, plan->size_index);
    const int part_rows = kRowSizes[plan->size_index] / cut.sharers;
    // A sharer's part of x must be whole swizzle atoms of 8 rows.
    const bool parts = part_rows * cut.sharers == kRowSizes[plan->size_index] && part_rows % 8 == 0;
    if (plan->instance.kernel == nullptr || !parts) return kBadConfig;
    if (meets_in_shared && plan->instance.partial_bytes_per_row == 0) return kBadConfig;
    const int stage_bytes = plan->instance.stage_bytes;
    plan->stages = smaller((kStageRoom - kSwizzleBytes) / stage_bytes, kMaxStages);
    const int partial_bytes = meets_in_shared ? rows * plan->instance.partial_bytes_per_row : 0;
    plan->dynamic_bytes = larger(plan->stages * stage_bytes, partial_bytes) + kSwizzleBytes;
    if (plan->stages < 2 || plan->dynamic_bytes > kMaxDynamicBytes) return kTooMuchShared;
    return kOk;
}

// Each instance must once be allowed more than 48 KB of shared memory.
int allow_shared_memory(int groups, int size_index, const Instance& instance) {
    static bool allowed[kMaxGroups + 1][kNumRowSizes] = {};
    if (allowed[groups][size_index]) return kOk;
    const cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(instance.kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxDynamicBytes);
    allowed[groups][size_index] = error == cudaSuccess;
    return error;
}

struct Launch {
    cudaLaunchConfig_t config{};
    cudaLaunchAttribute attributes[2]{};

    Launch(const Plan& plan, int num_ctas, int cluster_size, cudaStream_t stream) {
        config.gridDim = dim3(num_ctas);
        config.blockDim = dim3(plan.instance.threads);
        config.dynamicSmemBytes = plan.dynamic_bytes;
        config.stream = stream;
        config.attrs = attributes;
        if (cluster_size > 1) {
            cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
            cluster.id = cudaLaunchAttributeClusterDimension;
            cluster.val.clusterDim.x = cluster_size;
            cluster.val.clusterDim.y = 1;
            cluster.val.clusterDim.z = 1;
        }
    }

    // Start before the kernel ahead in the stream is done, which sets no order but the kernel's own
    // wait for it: sound if that kernel, too, waits for its predecessor.
    void overlap_with_previous() {
        cudaLaunchAttribute& dependent = attributes[config.numAttrs++];
        dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        dependent.val.programmaticStreamSerializationAllowed = 1;
    }
};

// How many clusters the card holds at once, in *count; asked once for each kind of launch.
int count_clusters(int* count, const Plan& plan, const Cut& cut) {
    static int known[kMaxGroups + 1][kNumRowSizes][kMaxCluster + 1] = {};
    const int cluster_size = cut.cluster_size();
    int& entry = known[cut.groups][plan.size_index][cluster_size];
    if (entry == 0) {
        const Launch launch(plan, cluster_size, cluster_size, nullptr);
        const void* kernel = reinterpret_cast<const void*>(plan.instance.kernel);
        cudaError_t error;
        if (cluster_size == 1) {
            int device = 0;
            error = cudaGetDevice(&device);
            if (error != cudaSuccess) return error;
            error = cudaDeviceGetAttribute(&entry, cudaDevAttrMultiProcessorCount, device);
        } else {
            error = cudaOccupancyMaxActiveClusters(&entry, kernel, &launch.config);
        }
        if (error != cudaSuccess) return error;
    }
    *count = entry;
    return entry > 0 ? kOk : kBadConfig;
}

}  // namespace
}  // namespace zl

using namespace zl;

extern "C" {

// A host buffer of sizeof(CUtensorMap) = 128 bytes, aligned to 64, for a weight [rows, columns], bf16,
// contiguous.
int zl_weight_map(void* map, const void* weight, int rows, int columns) {
    const bool shape = rows > 0 && columns > 0 && rows % kGroupM == 0 && columns % kBlockK == 0;
    if (!shape) return kBadShape;
    alignas(64) CUtensorMap made;
    const int code = encode_map(&made, weight, rows, columns, columns, kGroupM,
                                CU_TENSOR_MAP_L2_PROMOTION_NONE);
    if (code == kOk) std::memcpy(map, &made, sizeof(made));
    return code;
}

// As zl_weight_map, of a layer's pool as the attention kernel reads it: [rows, columns], bf16, a block's 16 keys,
// then its 16 values, heads side by side; in boxes of a block. L2 is asked for no more than a box's row: to ask for
// 256 bytes cost 5% of bandwidth (BENCHMARKS.md).
int zl_pool_map(void* map, const void* pool, int rows, int columns) {
    constexpr int kBlockRows = 32;
    const bool shape = rows > 0 && columns > 0 && rows % kBlockRows == 0 && columns % kBlockK == 0;
    if (!shape) return kBadShape;
    alignas(64) CUtensorMap made;
    const int code = encode_map(&made, pool, rows, columns, columns, kBlockRows,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
    if (code == kOk) std::memcpy(map, &made, sizeof(made));
    return code;
}

// out[rows, weight_rows] = x[rows, columns] weight^T + bias; with gated weights (groups of 8 gate rows
// and their 8 up rows) out[rows, weight_rows / 2] = silu(gate) * up. Strides in elements; out 8-byte
// aligned and out_stride % 4 == 0, x 16-byte aligned and x_stride % 8 == 0.
// With in_squares, float32 [num_in_squares, rows], row r of x weight^T is divided by
// sqrt(sum(in_squares[:, r]) / columns + eps). With residual (aligned as out; then neither gated nor
// in_squares) it is added to out, and out_squares, float32 [weight tiles, rows], gets the sums of squares of
// what each tile of 64 * groups columns stored.
int zl_linear(const void* weight_map, int weight_rows, int columns, const void* x, int x_stride,
              void* out, int out_stride, const void* bias, const void* residual,
              int residual_stride, void* out_squares, const void* in_squares, int num_in_squares,
              float eps, int rows, int gated, int groups, int splits, int sharers, void* stream) {
    const bool shape = rows >= 1 && rows <= kMaxRows && weight_rows % kGroupM == 0 &&
                       columns % kBlockK == 0 && x_stride % 8 == 0 && out_stride % 4 == 0 &&
                       residual_stride % 4 == 0;
    if (!shape) return kBadShape;
    const bool adds = residual != nullptr;
    if (adds != (out_squares != nullptr) || (adds && (gated || in_squares))) return kBadStream;
    const Cut cut{groups, splits, sharers};
    const int k_blocks = columns / kBlockK;
    Plan plan;
    int code = make_plan(&plan, cut, rows, splits > 1 || adds);
    if (code != kOk) return code;
    if (splits > k_blocks) return kBadConfig;
    code = allow_shared_memory(groups, plan.size_index, plan.instance);
    if (code != kOk) return code;

    alignas(64) CUtensorMap weights;
    alignas(64) CUtensorMap x_map;
    std::memcpy(&weights, weight_map, sizeof(weights));
    code = encode_map(&x_map, x, rows, columns, x_stride, kRowSizes[plan.size_index] / sharers,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
    if (code != kOk) return code;

    const int tile_rows = groups * kGroupM * sharers;
    const int rounds = (weight_rows + tile_rows - 1) / tile_rows;
    int num_clusters = rounds;
    if (splits == 1 && !adds) {  // else a CTA has one round
        int held = 0;
        code = count_clusters(&held, plan, cut);
        if (code != kOk) return code;
        num_clusters = smaller(rounds, held);
    }
    Params params{static_cast<__nv_bfloat16*>(out),
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
                  k_blocks,
                  rounds,
                  plan.stages,
                  splits,
                  sharers,
                  gated != 0};
    const int cluster_size = cut.cluster_size();
    Launch launch(plan, num_clusters * cluster_size, cluster_size,
                  static_cast<cudaStream_t>(stream));
    launch.overlap_with_previous();
    void* arguments[] = {&weights, &x_map, &params};
    return cudaLaunchKernelExC(&launch.config,
                               reinterpret_cast<const void*>(plan.instance.kernel), arguments);
}

// How many clusters of this kind the card holds at once, or minus an error code.
int zl_max_clusters(int rows, int groups, int splits, int sharers) {
    const Cut cut{groups, splits, sharers};
    Plan plan;
    int code = make_plan(&plan, cut, rows, splits > 1);
    if (code == kOk) code = allow_shared_memory(groups, plan.size_index, plan.instance);
    int count = 0;
    if (code == kOk) code = count_clusters(&count, plan, cut);
    return code == kOk ? count : -code;
}

const char* zl_error(int code) {
    switch (code) {
        case kNoDriverEntry: return "the driver has no cuTensorMapEncodeTiled (CUDA 12 or newer)";
        case kBadShape: return "rows must be 1 to 256, weight sides multiples of 64, strides aligned";
        case kBadConfig: return "no kernel is built for this tile, splits and sharers";
        case kNoMap: return "cuTensorMapEncodeTiled refused the tensor (16-byte alignment?)";
        case kTooMuchShared: return "the stages or partial sums exceed shared memory";
        case kBadStream: return "a residual needs out_squares and takes no gate and no norm";
        default: return cudaGetErrorString(static_cast<cudaError_t>(code));
    }
}

}  // extern "C"
