#include "model/layers_tap.h"

#include <numeric>
#include <utility>

namespace saccade {

absl::Status StageTap::Record(std::string_view name, const TensorView& view) {
  if (!Wants(name)) return absl::OkStatus();
  if (view.dtype == DType::kF32 && view.dense()) return ctx_.tap->Record(ctx_.stream, name, view);
  ASSIGN_OR_RETURN(const TensorView dense, Scratch(DType::kF32, {view.dim(0), view.dim(1)}));
  if (view.dtype == DType::kF32) {
    RETURN_IF_ERROR(ctx_.stream.Copy(dense, view));
  } else {
    RETURN_IF_ERROR(ctx_.ops.Convert(ctx_.stream, view, dense));
  }
  return ctx_.tap->Record(ctx_.stream, name, dense);
}

absl::StatusOr<TensorView> StageTap::Scratch(DType dtype, std::initializer_list<int64_t> dims) {
  size_t bytes = DTypeSize(dtype);
  for (const int64_t dim : dims) bytes *= static_cast<size_t>(dim);
  ASSIGN_OR_RETURN(std::unique_ptr<Buffer> buffer, backend_.Allocate(bytes, MemKind::kDevice));
  scratch_.push_back(std::move(buffer));
  return scratch_.back()->View(dtype, dims);
}

absl::StatusOr<int64_t> StageTap::CachedTokens(const PagedBatch& batch) {
  if (cached_tokens_.has_value()) return *cached_tokens_;
  const int64_t pages = batch.num_pages;
  ASSIGN_OR_RETURN(
      const std::unique_ptr<Buffer> host,
      backend_.Allocate(static_cast<size_t>(pages) * sizeof(int32_t), MemKind::kPinned));
  const TensorView lengths = host->View(DType::kI32, {pages});
  RETURN_IF_ERROR(ctx_.stream.Copy(lengths, batch.page_len.Rows(0, pages)));
  RETURN_IF_ERROR(ctx_.stream.Synchronize());
  const auto* length = lengths.As<int32_t>();
  cached_tokens_ = std::accumulate(length, length + pages, int64_t{0});
  return *cached_tokens_;
}

absl::Status StageTap::Finish() {
  if (scratch_.empty()) return absl::OkStatus();
  absl::Status status = ctx_.stream.Synchronize();
  scratch_.clear();
  return status;
}

}  // namespace saccade
