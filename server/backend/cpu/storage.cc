#include "backend/cpu/storage.h"

#include <limits>
#include <memory>

#include "base/strings.h"

namespace saccade::cpu {

KvLayout MakeKvLayout(const Kernels& kernels, int64_t heads, int64_t head_dim, Type type) {
  KvLayout layout{};
  const int64_t size = type == Type::kF32 ? 4 : 2;
  layout.heads = heads;
  layout.head_dim = head_dim;
  const int64_t multiple = type == Type::kF32 ? 2 : kernels.key_multiple;
  layout.k_dim = (head_dim + multiple - 1) / multiple * multiple;
  layout.v_dim = (head_dim + 15) / 16 * 16;
  layout.type = type;
  layout.k_head_bytes = static_cast<size_t>(kPageTokens * layout.k_dim * size);
  layout.v_head_bytes = static_cast<size_t>(kPageTokens * layout.v_dim * size);
  layout.v_offset = static_cast<size_t>(heads) * layout.k_head_bytes;
  layout.block_stride = layout.v_offset + static_cast<size_t>(heads) * layout.v_head_bytes;
  return layout;
}

absl::StatusOr<std::unique_ptr<CpuKvStorage>> CpuKvStorage::Make(const Kernels& kernels,
                                                                 const KvGeometry& geometry,
                                                                 uint32_t num_blocks) {
  const auto invalid = [](std::string_view what) {
    return absl::InvalidArgumentError(StrCat("NewKvStorage: ", what));
  };
  if (geometry.layers == 0 || geometry.kv_heads == 0 || num_blocks == 0) {
    return invalid("layers, kv_heads and num_blocks must not be 0");
  }
  if (geometry.head_dim == 0 || geometry.head_dim > kMaxHeadDim) {
    return invalid(StrCat("head_dim ", geometry.head_dim, " is outside [1, ", kMaxHeadDim, "]"));
  }
  if (geometry.block_tokens != kPageTokens) {
    return invalid(StrCat("block_tokens ", geometry.block_tokens, " is not ", kPageTokens));
  }
  if (geometry.dtype != DType::kF32 && geometry.dtype != DType::kBf16) {
    return invalid(StrCat("dtype ", DTypeName(geometry.dtype), " is not f32 or bf16"));
  }
  if (num_blocks > std::numeric_limits<int32_t>::max() / kPageTokens) {
    return invalid("slots do not fit 32 bits");
  }
  std::unique_ptr<CpuKvStorage> kv(new CpuKvStorage(kernels.isa));
  kv->geometry_ = geometry;
  kv->num_blocks_ = num_blocks;
  kv->layout_ = MakeKvLayout(kernels, geometry.kv_heads, geometry.head_dim, TypeOf(geometry.dtype));
  kv->layer_bytes_ = kv->layout_.block_stride;
  const double bytes = static_cast<double>(kv->layer_bytes_) * geometry.layers * num_blocks;
  if (bytes > 0x1p47)
    return absl::ResourceExhaustedError(StrCat("NewKvStorage: ", bytes, " bytes"));
  ASSIGN_OR_RETURN(kv->memory_, Memory::Allocate(kv->block_bytes() * num_blocks));
  kv->layout_.block_stride = kv->block_bytes();
  kv->layout_.base = reinterpret_cast<unsigned char*>(kv->memory_.data());
  return kv;
}

KvLayout CpuKvStorage::Layer(uint32_t layer) const {
  KvLayout layout = layout_;
  layout.base += layer_bytes_ * layer;
  return layout;
}

}  // namespace saccade::cpu
