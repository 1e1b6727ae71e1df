#include "backend/ref/ref_backend.h"

#include <cmath>
#include <limits>
#include <utility>

#include "backend/ref/memory.h"
#include "backend/ref/ops.h"
#include "backend/ref/storage.h"
#include "backend/ref/stream.h"
#include "base/strings.h"
#include "kernels/common/bf16.h"

namespace saccade {
namespace {

using ref::KvData;
using ref::Memory;
using ref::WeightData;

absl::Status CheckPart(const TensorView& part, int64_t k) {
  const bool fits = part.mem != MemKind::kDevice && part.rank == 2 && part.dims[0] > 0 &&
                    part.dims[1] == k && k > 0 && part.strides[1] == 1 && part.strides[0] >= k &&
                    (part.dtype == DType::kF32 || part.dtype == DType::kBf16);
  if (fits) return absl::OkStatus();
  return absl::InvalidArgumentError(StrCat("PackLinear: ", part.DebugString(),
                                           " must be host memory, f32 or bf16, [n, ", k, "]"));
}

float HostElement(const TensorView& view, int64_t row, int64_t column) {
  const int64_t at = row * view.strides[0] + column;
  return view.dtype == DType::kF32 ? view.As<const float>()[at]
                                   : Bf16ToF32(view.As<const uint16_t>()[at]);
}

class RefBackend final : public Backend {
 public:
  explicit RefBackend(const RefOptions& options)
      : options_(options), table_(std::make_shared<ref::MemoryTable>()) {}

  std::string_view kind() const override { return "ref"; }
  std::string Describe() const override {
    return options_.guarded ? "ref: scalar reference, guarded memory, asynchronous streams"
                            : "ref: scalar reference, one thread";
  }
  const Ops& ops() const override { return ops_; }

  absl::StatusOr<std::unique_ptr<Buffer>> Allocate(size_t bytes, MemKind kind) override {
    ASSIGN_OR_RETURN(std::shared_ptr<Memory> memory,
                     Memory::Map(bytes, kind, options_.guarded && kind == MemKind::kDevice));
    return std::make_unique<ref::RefBuffer>(std::move(memory), table_);
  }

  absl::StatusOr<std::unique_ptr<Stream>> NewStream() override {
    return std::make_unique<ref::RefStream>(
        table_, ref::RefStream::Options{options_.guarded, options_.max_delay, options_.delay_seed});
  }

  absl::StatusOr<std::unique_ptr<PackedWeight>> PackLinear(std::span<const TensorView> parts,
                                                           DType dtype) override {
    return Pack(parts, dtype, false);
  }

  absl::StatusOr<std::unique_ptr<PackedWeight>> PackGated(TensorView gate, TensorView up,
                                                          DType dtype) override {
    if (gate.dims != up.dims) {
      return absl::InvalidArgumentError(
          StrCat("PackGated: gate ", gate.DebugString(), " and up ", up.DebugString(), " differ"));
    }
    const std::array<TensorView, 2> parts = {gate, up};
    return Pack(parts, dtype, true);
  }

  absl::StatusOr<std::unique_ptr<KvStorage>> NewKvStorage(const KvGeometry& geometry,
                                                          uint32_t num_blocks) override {
    const bool valid = geometry.layers > 0 && geometry.kv_heads > 0 && geometry.head_dim > 0 &&
                       geometry.block_tokens > 0 && geometry.block_tokens % 2 == 0 &&
                       num_blocks > 0 &&
                       (geometry.dtype == DType::kF32 || geometry.dtype == DType::kBf16);
    if (!valid) return absl::InvalidArgumentError("NewKvStorage: geometry");
    const double bytes = static_cast<double>(geometry.layers) * geometry.kv_heads *
                         geometry.head_dim * 2.0 * static_cast<double>(DTypeSize(geometry.dtype)) *
                         geometry.block_tokens * num_blocks;
    const double slots = static_cast<double>(geometry.block_tokens) * num_blocks;
    if (bytes > 0x1p47)
      return absl::ResourceExhaustedError(StrCat("NewKvStorage: ", bytes, " bytes"));
    if (slots > std::numeric_limits<int32_t>::max()) {
      return absl::InvalidArgumentError("NewKvStorage: slots do not fit 32 bits");
    }
    KvData data{geometry, num_blocks, nullptr};
    ASSIGN_OR_RETURN(data.memory, Memory::Map(data.block_bytes() * num_blocks * geometry.layers,
                                              MemKind::kDevice, options_.guarded));
    return std::make_unique<ref::RefKvStorage>(std::move(data));
  }

 private:
  absl::StatusOr<std::unique_ptr<PackedWeight>> Pack(std::span<const TensorView> parts, DType dtype,
                                                     bool gated) const {
    if (parts.empty()) return absl::InvalidArgumentError("PackLinear: no parts");
    if (dtype != DType::kF32 && dtype != DType::kBf16) {
      return absl::InvalidArgumentError(StrCat("PackLinear: dtype ", DTypeName(dtype)));
    }
    WeightData weight;
    weight.dtype = dtype;
    weight.gated = gated;
    weight.k = parts[0].dims[1];
    for (const TensorView& part : parts) {
      RETURN_IF_ERROR(CheckPart(part, weight.k));
      weight.n += part.dims[0];
    }
    const size_t bytes =
        static_cast<size_t>(weight.n) * static_cast<size_t>(weight.k) * sizeof(float);
    ASSIGN_OR_RETURN(weight.memory, Memory::Map(bytes, MemKind::kDevice, options_.guarded));
    auto* out = reinterpret_cast<float*>(weight.memory->bytes());
    int64_t column = 0;
    for (const TensorView& part : parts) {
      for (int64_t row = 0; row < part.dims[0]; ++row, ++column) {
        for (int64_t i = 0; i < weight.k; ++i) {
          const float value = HostElement(part, row, i);
          out[i * weight.n + column] = dtype == DType::kBf16 ? RoundToBf16(value) : value;
        }
      }
    }
    return std::make_unique<ref::RefPackedWeight>(std::move(weight));
  }

  const RefOptions options_;
  const std::shared_ptr<ref::MemoryTable> table_;
  const ref::RefOps ops_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> MakeRefBackend(const RefOptions& options) {
  if (options.max_delay.count() < 0)
    return absl::InvalidArgumentError("ref: max_delay is negative");
  return std::make_unique<RefBackend>(options);
}

}  // namespace saccade
