#pragma once
// Argument checks. `Check` is for what a call says (INVALID_ARGUMENT, nothing is enqueued; the
// first mistake wins); the functions below it are for what device memory holds when the work runs
// (INTERNAL, sticks to the stream).
#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "backend/cpu/storage.h"
#include "base/status.h"
#include "tensor/ops.h"

namespace saccade::cpu {

inline constexpr int64_t kAnyDim = -1;

class Check {
 public:
  explicit Check(std::string_view op) : op_(op) {}

  void Require(bool condition, std::string_view message);
  // Device memory of one of `dtypes`, aligned to its elements, of shape `dims`, last stride 1.
  void Device(const TensorView& view, std::string_view name, std::initializer_list<DType> dtypes,
              std::initializer_list<int64_t> dims);
  // A rank-1 device array of at least `count` elements.
  void Array(const TensorView& view, std::string_view name, DType dtype, int64_t count);
  void Batch(const PagedBatch& batch);

  bool ok() const { return status_.ok(); }
  const absl::Status& status() const { return status_; }

 private:
  std::string_view op_;
  absl::Status status_;
};

// row_begin and page_begin ascend within their arrays; every page is a block of `kv` and not longer
// than one.
absl::Status CheckPages(const PagedBatch& batch, const CpuKvStorage& kv);
// Every index lies in [lowest, limit).
absl::Status CheckIndices(const TensorView& index, int64_t count, int64_t lowest, int64_t limit,
                          std::string_view name);

}  // namespace saccade::cpu
