#pragma once
// How layers say which tensors of a checkpoint they need, and how they get them onto a device.
// Used while a model loads, by one thread.
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
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

  // Rows of all `names` stacked; a tensor of higher rank counts as [dims[0], the rest].
  absl::StatusOr<std::unique_ptr<PackedWeight>> Linear(std::initializer_list<std::string> names);
  absl::StatusOr<std::unique_ptr<PackedWeight>> Gated(const std::string& gate,
                                                      const std::string& up);
  // All elements as F32, one after another over `names`: a vector, or rows of a matrix.
  absl::StatusOr<std::unique_ptr<Buffer>> Vector(std::initializer_list<std::string> names);
  // A rank-2 table as stored; F16 becomes F32. `dtype` receives what it is on the device.
  absl::StatusOr<std::unique_ptr<Buffer>> Table(const std::string& name, DType* dtype);

 private:
  // A view [dims[0], rest] of F32 or BF16; F16 is widened into `storage`.
  absl::StatusOr<TensorView> Matrix(const std::string& name,
                                    std::vector<std::vector<float>>& storage) const;

  const TensorSource& checkpoint_;
  Backend& backend_;
  Stream& stream_;
  DType compute_;
  size_t device_bytes_ = 0;
};

}  // namespace saccade
