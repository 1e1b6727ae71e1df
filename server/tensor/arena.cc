#include "tensor/arena.h"

#include <limits>

#include "base/strings.h"

namespace saccade {
namespace {
constexpr size_t kAlignment = 64;  // bytes; a cache line and the widest vector
}

absl::StatusOr<TensorView> Arena::New(DType dtype, std::initializer_list<int64_t> dims) {
  if (dims.size() > TensorView::kMaxRank) {
    return absl::InvalidArgumentError(
        StrCat("arena: rank ", dims.size(), " is above ", TensorView::kMaxRank));
  }
  size_t bytes = DTypeSize(dtype);
  for (int64_t dim : dims) {
    if (dim < 0) return absl::InvalidArgumentError(StrCat("arena: negative dimension ", dim));
    const auto extent = static_cast<size_t>(dim);
    if (extent != 0 && bytes > std::numeric_limits<size_t>::max() / extent) {
      return absl::InvalidArgumentError("arena: the size of the tensor overflows");
    }
    bytes *= extent;
  }
  const size_t padding = (kAlignment - used_ % kAlignment) % kAlignment;
  const size_t left = buffer_->size() - used_;
  if (padding > left || bytes > left - padding) {
    return absl::ResourceExhaustedError(
        StrCat("arena: ", bytes, " bytes wanted, ", left, " of ", buffer_->size(), " left"));
  }
  const TensorView view = buffer_->View(dtype, dims, used_ + padding);
  used_ += padding + bytes;
  return view;
}

}  // namespace saccade
