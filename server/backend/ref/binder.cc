#include "backend/ref/binder.h"

#include <algorithm>

#include "absl/strings/str_join.h"
#include "base/strings.h"

namespace saccade::ref {
namespace {

// Bytes from the first element to the end of the last one; nullopt when a dimension or a stride is
// negative, the last stride is not 1, or the extent overflows.
std::optional<size_t> Extent(const TensorView& view) {
  if (view.rank == 0 || view.rank > TensorView::kMaxRank) return std::nullopt;
  if (view.strides[view.rank - 1u] != 1) return std::nullopt;
  bool empty = false;
  __extension__ using Wide = __int128;
  Wide last = 0;
  for (size_t d = 0; d < view.rank; ++d) {
    if (view.dims[d] < 0 || view.strides[d] < 0) return std::nullopt;
    if (view.dims[d] == 0) {
      empty = true;
      continue;
    }
    last += static_cast<Wide>(view.dims[d] - 1) * view.strides[d];
  }
  if (empty) return 0;
  const Wide bytes = (last + 1) * static_cast<Wide>(DTypeSize(view.dtype));
  if (bytes > static_cast<Wide>(INT64_MAX)) return std::nullopt;
  return static_cast<size_t>(bytes);
}

}  // namespace

void Binder::Require(bool condition, std::string_view message) {
  if (!condition && status_.ok()) status_ = absl::InvalidArgumentError(StrCat(op_, ": ", message));
}

TensorView Binder::Bound(const TensorView& view, std::string_view name) {
  if (!status_.ok()) return view;
  const std::optional<size_t> extent = Extent(view);
  if (!extent) {
    Require(false, StrCat(name, ": shape or strides of ", view.DebugString()));
    return view;
  }
  if (*extent == 0) return view;
  std::shared_ptr<Memory> memory = table_.Find(view.data, *extent);
  if (memory == nullptr || memory->kind() != view.mem) {
    Require(false,
            StrCat(name, ": ", view.DebugString(), " is not inside a live buffer of that kind"));
    return view;
  }
  const auto offset = static_cast<size_t>(view.data - memory->address());
  Require(offset % DTypeSize(view.dtype) == 0, StrCat(name, ": misaligned"));
  TensorView bound = view;
  bound.data = memory->bytes() + offset;
  uses_.push_back(std::move(memory));
  return bound;
}

TensorView Binder::Device(const TensorView& view, std::string_view name,
                          std::initializer_list<DType> dtypes,
                          std::initializer_list<int64_t> dims) {
  if (!status_.ok()) return view;
  Require(view.mem == MemKind::kDevice,
          StrCat(name, ": ", view.DebugString(), " is not device memory"));
  Require(std::find(dtypes.begin(), dtypes.end(), view.dtype) != dtypes.end(),
          StrCat(name, ": dtype of ", view.DebugString()));
  bool fits = view.rank == dims.size();
  for (size_t d = 0; fits && d < dims.size(); ++d) {
    const int64_t want = dims.begin()[d];
    fits = want == kAnyDim || want == view.dims[d];
  }
  Require(fits,
          StrCat(name, ": ", view.DebugString(), ", expected [", absl::StrJoin(dims, ", "), "]"));
  return Bound(view, name);
}

TensorView Binder::Array(const TensorView& view, std::string_view name, DType dtype,
                         int64_t count) {
  if (!status_.ok()) return view;
  const bool fits = view.rank == 1 && count >= 0 && view.dims[0] >= count;
  Require(fits, StrCat(name, ": ", view.DebugString(), ", expected [", count, "]"));
  return Device(view, name, {dtype}, {kAnyDim});
}

TensorView Binder::Copyable(const TensorView& view, std::string_view name) {
  if (!status_.ok()) return view;
  Require(view.mem != MemKind::kHost,
          StrCat(name, ": ", view.DebugString(), " must be pinned or device memory"));
  return Bound(view, name);
}

PagedBatch Binder::Batch(const PagedBatch& batch) {
  PagedBatch bound = batch;
  Require(
      batch.num_seqs >= 0 && batch.num_rows >= 0 && batch.num_pages >= 0 && batch.max_pages >= 0,
      "batch: negative count");
  bound.row_begin =
      Array(batch.row_begin, "batch.row_begin", DType::kI32, int64_t{batch.num_seqs} + 1);
  bound.page_begin =
      Array(batch.page_begin, "batch.page_begin", DType::kI32, int64_t{batch.num_seqs} + 1);
  bound.pages = Array(batch.pages, "batch.pages", DType::kI32, batch.num_pages);
  bound.page_len = Array(batch.page_len, "batch.page_len", DType::kI32, batch.num_pages);
  bound.page_pos = Array(batch.page_pos, "batch.page_pos", DType::kI32, batch.num_pages);
  bound.row_pos = Array(batch.row_pos, "batch.row_pos", DType::kI32, batch.num_rows);
  bound.row_limit = Array(batch.row_limit, "batch.row_limit", DType::kI32, batch.num_rows);
  bound.row_slot = Array(batch.row_slot, "batch.row_slot", DType::kI32, batch.num_rows);
  return bound;
}

absl::Status Binder::Submit(RefStream& stream, std::function<absl::Status()> run) {
  if (!status_.ok()) return status_;
  return stream.Submit({std::move(run), std::move(uses_)});
}

}  // namespace saccade::ref
