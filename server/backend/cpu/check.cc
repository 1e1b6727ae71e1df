#include "backend/cpu/check.h"

#include <algorithm>

#include "absl/strings/str_join.h"
#include "base/strings.h"

namespace saccade::cpu {

void Check::Require(bool condition, std::string_view message) {
  if (!condition && status_.ok()) status_ = absl::InvalidArgumentError(StrCat(op_, ": ", message));
}

void Check::Device(const TensorView& view, std::string_view name,
                   std::initializer_list<DType> dtypes, std::initializer_list<int64_t> dims) {
  if (!ok()) return;
  bool fits = view.mem == MemKind::kDevice && view.rank == dims.size() &&
              std::find(dtypes.begin(), dtypes.end(), view.dtype) != dtypes.end();
  for (size_t d = 0; fits && d < dims.size(); ++d) {
    const int64_t want = dims.begin()[d];
    fits = view.dims[d] >= 0 && view.strides[d] >= 0 && (want == kAnyDim || want == view.dims[d]);
  }
  fits = fits && view.strides[view.rank - 1u] == 1 &&
         reinterpret_cast<uintptr_t>(view.data) % DTypeSize(view.dtype) == 0 &&
         (view.data != nullptr || view.numel() == 0);
  if (fits) return;
  const auto name_of = [](std::string* out, DType dtype) { StrAppend(out, DTypeName(dtype)); };
  Require(false, StrCat(name, " is ", view.DebugString(), "; expected device memory, ",
                        absl::StrJoin(dtypes, " or ", name_of), "[", absl::StrJoin(dims, ", "),
                        "] (-1: any), last stride 1"));
}

void Check::Array(const TensorView& view, std::string_view name, DType dtype, int64_t count) {
  if (!ok()) return;
  Device(view, name, {dtype}, {kAnyDim});
  if (ok() && view.dims[0] < count) {
    Require(false, StrCat(name, " is ", view.DebugString(), "; expected ", count, " elements"));
  }
}

void Check::Batch(const PagedBatch& batch) {
  Require(
      batch.num_seqs >= 0 && batch.num_rows >= 0 && batch.num_pages >= 0 && batch.max_pages >= 0,
      "batch: negative count");
  Array(batch.row_begin, "batch.row_begin", DType::kI32, int64_t{batch.num_seqs} + 1);
  Array(batch.page_begin, "batch.page_begin", DType::kI32, int64_t{batch.num_seqs} + 1);
  Array(batch.pages, "batch.pages", DType::kI32, batch.num_pages);
  Array(batch.page_len, "batch.page_len", DType::kI32, batch.num_pages);
  Array(batch.page_pos, "batch.page_pos", DType::kI32, batch.num_pages);
  Array(batch.row_pos, "batch.row_pos", DType::kI32, batch.num_rows);
  Array(batch.row_limit, "batch.row_limit", DType::kI32, batch.num_rows);
  Array(batch.row_slot, "batch.row_slot", DType::kI32, batch.num_rows);
}

namespace {

absl::Status CheckRanges(const int32_t* begin, int32_t count, int32_t limit,
                         std::string_view name) {
  for (int32_t s = 0; s < count; ++s) {
    if (begin[s] < 0 || begin[s + 1] < begin[s] || begin[s + 1] > limit) {
      return absl::InternalError(StrCat("batch.", name, "[", s, "] = ", begin[s], ", then ",
                                        begin[s + 1], "; must ascend within [0, ", limit, "]"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckPages(const PagedBatch& batch, const CpuKvStorage& kv) {
  const auto* page_begin = batch.page_begin.As<const int32_t>();
  RETURN_IF_ERROR(CheckRanges(batch.row_begin.As<const int32_t>(), batch.num_seqs, batch.num_rows,
                              "row_begin"));
  RETURN_IF_ERROR(CheckRanges(page_begin, batch.num_seqs, batch.num_pages, "page_begin"));
  for (int32_t s = 0; s < batch.num_seqs; ++s) {
    if (page_begin[s + 1] - page_begin[s] > batch.max_pages) {
      return absl::InternalError(StrCat("batch: sequence ", s, " has ",
                                        page_begin[s + 1] - page_begin[s], " pages, max_pages is ",
                                        batch.max_pages));
    }
  }
  const auto* pages = batch.pages.As<const int32_t>();
  const auto* lengths = batch.page_len.As<const int32_t>();
  for (int32_t p = 0; p < batch.num_pages; ++p) {
    if (pages[p] < 0 || static_cast<uint32_t>(pages[p]) >= kv.num_blocks() || lengths[p] < 0 ||
        lengths[p] > kPageTokens) {
      return absl::InternalError(
          StrCat("batch: page ", p, " is block ", pages[p], " with ", lengths[p], " tokens"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckIndices(const TensorView& index, int64_t count, int64_t lowest, int64_t limit,
                          std::string_view name) {
  const auto* values = index.As<const int32_t>();
  for (int64_t i = 0; i < count; ++i) {
    if (values[i] < lowest || values[i] >= limit) {
      return absl::InternalError(
          StrCat(name, "[", i, "] = ", values[i], " outside [", lowest, ", ", limit, ")"));
    }
  }
  return absl::OkStatus();
}

}  // namespace saccade::cpu
