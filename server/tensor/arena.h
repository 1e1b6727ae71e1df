#pragma once
// Arena: bump allocation of device scratch inside one buffer made at start-up. One worker owns it
// and resets it per step.
#include <cstddef>
#include <initializer_list>

#include "base/status.h"
#include "tensor/backend.h"

namespace saccade {

class Arena {
 public:
  explicit Arena(Buffer& buffer) : buffer_(&buffer) {}
  // RESOURCE_EXHAUSTED when the buffer is too small; the step's plan is sized so that it is not.
  absl::StatusOr<TensorView> New(DType dtype, std::initializer_list<int64_t> dims);
  void Reset() { used_ = 0; }
  size_t used() const { return used_; }
  size_t Mark() const { return used_; }
  void Release(size_t mark) {
    used_ = mark;
  }  // everything allocated after Mark() may be reused, in stream order

 private:
  Buffer* buffer_;
  size_t used_ = 0;
};

}  // namespace saccade
