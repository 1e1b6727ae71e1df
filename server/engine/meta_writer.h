#pragma once
// MetaWriter: the small arrays of a step on their way to the device. Private to engine/.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/strings.h"
#include "tensor/backend.h"

namespace saccade {

inline absl::Status PlanTooLarge(std::string_view what) {
  return absl::InternalError(StrCat("a step plan passes the worker's limit of ", what));
}

// Lays arrays one after another into pinned memory, behind the first `used` words, and gives their
// device views.
class MetaWriter {
 public:
  MetaWriter(Buffer& host, Buffer& device, size_t capacity_words, size_t used)
      : host_(&host), device_(&device), capacity_(capacity_words), begin_(used), used_(used) {}
  size_t used() const { return used_; }

  // Room for `count` words; nullptr when the staging is too small, which a plan within its limits
  // never is.
  int32_t* Reserve(size_t count, TensorView& view) {
    const size_t padded = (count + 15) / 16 * 16;  // keeps every array 64-byte aligned
    if (used_ + padded > capacity_) return nullptr;
    auto* words = reinterpret_cast<int32_t*>(host_->data()) + used_;
    view = device_->View(DType::kI32, {static_cast<int64_t>(count)}, used_ * sizeof(int32_t));
    used_ += padded;
    return words;
  }
  bool Add(const std::vector<int32_t>& values, TensorView& view) {
    int32_t* words = Reserve(values.size(), view);
    if (words == nullptr) return false;
    std::copy(values.begin(), values.end(), words);
    return true;
  }
  // [values.size() / columns, columns] F32.
  bool Add(std::span<const float> values, int64_t columns, TensorView& view) {
    TensorView words;
    int32_t* const to = Reserve(values.size(), words);
    if (to == nullptr) return false;
    if (!values.empty()) std::memcpy(to, values.data(), values.size_bytes());
    view = TensorView::Dense(words.data, DType::kF32, MemKind::kDevice,
                             {static_cast<int64_t>(values.size()) / columns, columns});
    return true;
  }
  absl::Status Upload(Stream& stream) const {
    if (used_ == begin_) return absl::OkStatus();
    const auto count = static_cast<int64_t>(used_ - begin_);
    const size_t offset = begin_ * sizeof(int32_t);
    return stream.Copy(device_->View(DType::kI32, {count}, offset),
                       host_->View(DType::kI32, {count}, offset));
  }

 private:
  Buffer* host_;
  Buffer* device_;
  size_t capacity_;
  size_t begin_;
  size_t used_;
};

}  // namespace saccade
