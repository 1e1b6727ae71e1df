#include "backend/cpu/stream.h"

#include <array>
#include <cstring>

#include "base/strings.h"

namespace saccade::cpu {
namespace {

// Work is done before Record is called, so an event only remembers how it went.
class DoneEvent final : public Event {
 public:
  explicit DoneEvent(absl::Status status) : status_(std::move(status)) {}
  bool Done() const override { return true; }
  absl::Status Wait() const override { return status_; }

 private:
  absl::Status status_;
};

bool Copyable(const TensorView& view) {
  if (view.mem == MemKind::kHost || view.rank == 0 || view.rank > TensorView::kMaxRank)
    return false;
  for (size_t d = 0; d < view.rank; ++d) {
    if (view.dims[d] < 0 || view.strides[d] < 0) return false;
  }
  return view.strides[view.rank - 1u] == 1;
}

// Rows of the last dimension, one after another.
void CopyBytes(const TensorView& dst, const TensorView& src) {
  if (dst.numel() == 0) return;
  if (dst.dense() && src.dense()) {
    std::memmove(dst.data, src.data, dst.bytes());
    return;
  }
  const auto last = static_cast<size_t>(dst.rank) - 1;
  std::array<int64_t, TensorView::kMaxRank> dims{1, 1, 1, 1};
  std::array<int64_t, TensorView::kMaxRank> to{};
  std::array<int64_t, TensorView::kMaxRank> from{};
  for (size_t d = 0; d < last; ++d) {
    dims[d] = dst.dims[d];
    to[d] = dst.strides[d];
    from[d] = src.strides[d];
  }
  const auto element = static_cast<int64_t>(DTypeSize(dst.dtype));
  const auto row_bytes = static_cast<size_t>(dst.dims[last] * element);
  for (int64_t i = 0; i < dims[0]; ++i) {
    for (int64_t j = 0; j < dims[1]; ++j) {
      for (int64_t k = 0; k < dims[2]; ++k) {
        std::memmove(dst.data + (i * to[0] + j * to[1] + k * to[2]) * element,
                     src.data + (i * from[0] + j * from[1] + k * from[2]) * element, row_bytes);
      }
    }
  }
}

}  // namespace

absl::Status CpuStream::Copy(TensorView dst, TensorView src) {
  if (!Copyable(dst) || !Copyable(src)) {
    return absl::InvalidArgumentError(
        StrCat("Copy: ", dst.DebugString(), " from ", src.DebugString(),
               ": device or pinned memory with last stride 1 is needed"));
  }
  if (dst.dtype != src.dtype || dst.rank != src.rank || dst.dims != src.dims) {
    return absl::InvalidArgumentError(
        StrCat("Copy: ", src.DebugString(), " does not fit ", dst.DebugString()));
  }
  if (!error_.ok()) return error_;
  CopyBytes(dst, src);  // needs nothing of the core: loading holds up no step
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Event>> CpuStream::Record() {
  return std::make_unique<DoneEvent>(error_);
}

}  // namespace saccade::cpu
