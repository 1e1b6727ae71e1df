#pragma once
// How layers say which tensors of a checkpoint they need, and how they get them onto a device.
// Used while a model loads, by one thread.
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/tensor_source.h"
#include "tensor/backend.h"

namespace saccade {

// What becomes of a tensor on the device; decides the bytes it takes.
enum class TensorUse : uint8_t {
  kMatrix,  // packed in the compute dtype
  kHead,    // packed as F32 in any model: the small ends of a flow head
  kVector,  // F32: biases, norms, scales, positions
  kTable,   // as stored (F16: F32): the embedding table
};

// A tensor that a model reads from its checkpoint.
struct TensorSpec {
  std::string name;
  std::vector<int64_t> dims;
  TensorUse use = TensorUse::kVector;
  int64_t numel() const;
};

// One line per tensor of `specs` that is absent, mis-shaped or not a floating-point tensor; empty
// when all are as expected.
std::vector<std::string> CheckTensors(const TensorSource& checkpoint,
                                      std::span<const TensorSpec> specs);

// Device bytes of `specs` without the padding a backend may add.
size_t TensorBytes(const TensorSource& checkpoint, std::span<const TensorSpec> specs,
                   DType compute);

// y = x W^T + bias.
struct LinearLayer {
  std::unique_ptr<PackedWeight> weight;
  std::unique_ptr<Buffer> bias;  // null without
  LinearArgs Args(const TensorView& x, const TensorView& y) const;
};

// Moves tensors of one checkpoint, or of files beside it, to one backend, converting to the type
// each use wants. Shapes were checked before (CheckTensors); a name that is absent is an error here
// too.
class WeightLoader {
 public:
  // All three must outlive the loader; what it returns must not outlive `backend`.
  WeightLoader(const TensorSource& checkpoint, Backend& backend, Stream& stream, DType compute)
      : checkpoint_(checkpoint), backend_(backend), stream_(stream), compute_(compute) {}

  DType compute() const { return compute_; }
  size_t device_bytes() const { return device_bytes_; }  // of everything loaded so far

  // Rows of all `names` stacked, in the compute dtype unless another is named; a tensor of higher
  // rank counts as [dims[0], the rest].
  absl::StatusOr<std::unique_ptr<PackedWeight>> Linear(std::initializer_list<std::string> names,
                                                       std::optional<DType> dtype = std::nullopt);
  // "<name>.weight" and "<name>.bias" of all `names`, each stacked.
  absl::StatusOr<LinearLayer> WithBias(std::span<const std::string> names,
                                       std::optional<DType> dtype = std::nullopt);
  absl::StatusOr<LinearLayer> WithBias(const std::string& name,
                                       std::optional<DType> dtype = std::nullopt) {
    return WithBias(std::span(&name, 1), dtype);
  }
  absl::StatusOr<std::unique_ptr<PackedWeight>> Gated(const std::string& gate,
                                                      const std::string& up);
  // All elements as F32 plus `offset`, one after another over `names`: a vector, or rows of a
  // matrix.
  absl::StatusOr<std::unique_ptr<Buffer>> Vector(std::initializer_list<std::string> names,
                                                 float offset = 0);
  // Rows of a matrix as F32, in that order.
  absl::StatusOr<std::unique_ptr<Buffer>> Rows(const std::string& name,
                                               std::span<const uint32_t> rows);
  // A rank-2 table as stored; F16 becomes F32. `dtype` receives what it is on the device.
  absl::StatusOr<std::unique_ptr<Buffer>> Table(const std::string& name, DType* dtype);
  // The same as F32, and behind it the rows of `ids` divided by `scale`: as rows that are
  // multiplied with it later they are what they were, to a last bit.
  absl::StatusOr<std::unique_ptr<Buffer>> TableWithUnscaled(const std::string& name,
                                                            std::span<const int32_t> ids,
                                                            float scale);

 private:
  // A view [dims[0], rest] of F32 or BF16; F16 is widened into `storage`.
  absl::StatusOr<TensorView> Matrix(const std::string& name,
                                    std::vector<std::vector<float>>& storage) const;
  absl::StatusOr<std::unique_ptr<PackedWeight>> Pack(std::span<const std::string> names,
                                                     DType dtype);
  absl::StatusOr<std::unique_ptr<Buffer>> Values(std::span<const std::string> names, float offset);
  absl::StatusOr<std::unique_ptr<Buffer>> UploadValues(std::vector<float>& values);

  const TensorSource& checkpoint_;
  Backend& backend_;
  Stream& stream_;
  DType compute_;
  size_t device_bytes_ = 0;
};

}  // namespace saccade
