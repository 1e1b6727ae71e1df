#pragma once
// Where weights come from by name: a checkpoint, or files beside one.
#include <string_view>

#include "base/status.h"
#include "tensor/tensor.h"

namespace saccade {

class TensorSource {
 public:
  virtual ~TensorSource() = default;
  virtual bool Has(std::string_view name) const = 0;
  // Read-only host memory, valid as long as the source. NOT_FOUND: no such tensor.
  virtual absl::StatusOr<TensorView> Tensor(std::string_view name) const = 0;
};

}  // namespace saccade
