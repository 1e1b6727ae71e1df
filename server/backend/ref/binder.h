#pragma once
// Binder checks the arguments of one op when it is enqueued, replaces the address in each view by
// that of the bytes, and collects the memory the task uses. The first mistake wins and becomes the
// op's INVALID_ARGUMENT.
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/ref/stream.h"

namespace saccade::ref {

inline constexpr int64_t kAnyDim = -1;

class Binder {
 public:
  Binder(const RefStream& stream, std::string_view op) : table_(stream.table()), op_(op) {}

  // Device memory of one of `dtypes` and of shape `dims` (kAnyDim: any size), inside a live buffer,
  // last stride 1.
  TensorView Device(const TensorView& view, std::string_view name,
                    std::initializer_list<DType> dtypes, std::initializer_list<int64_t> dims);
  // A dense rank-1 device array of at least `count` elements.
  TensorView Array(const TensorView& view, std::string_view name, DType dtype, int64_t count);
  // Device or pinned memory, any dtype and shape.
  TensorView Copyable(const TensorView& view, std::string_view name);
  PagedBatch Batch(const PagedBatch& batch);
  void Use(std::shared_ptr<Memory> memory) { uses_.push_back(std::move(memory)); }
  // Fails with `message` unless `condition`.
  void Require(bool condition, std::string_view message);

  bool ok() const { return status_.ok(); }
  const absl::Status& status() const { return status_; }
  absl::Status Submit(RefStream& stream, std::function<absl::Status()> run);

 private:
  TensorView Bound(const TensorView& view, std::string_view name);

  const MemoryTable& table_;
  std::string_view op_;
  absl::Status status_;
  std::vector<std::shared_ptr<Memory>> uses_;
};

}  // namespace saccade::ref
