#pragma once
#include <cstddef>
#include <utility>

#include "base/status.h"

namespace saccade::cpu {

// Zeroed memory: 64-byte aligned, or in large allocations 2 MiB aligned and on huge pages where the
// system has them.
class Memory {
 public:
  // RESOURCE_EXHAUSTED when the system has none.
  static absl::StatusOr<Memory> Allocate(size_t bytes);
  Memory() = default;
  Memory(Memory&& other) noexcept { Swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    Swap(other);
    return *this;
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory();

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void Swap(Memory& other) {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(mapping_, other.mapping_);
    std::swap(mapped_, other.mapped_);
  }

  std::byte* data_ = nullptr;
  size_t size_ = 0;
  void* mapping_ = nullptr;
  size_t mapped_ = 0;
};

// Memory that is kept between ops and only grows.
class Workspace {
 public:
  absl::StatusOr<std::byte*> Reserve(size_t bytes);

 private:
  Memory memory_;
};

}  // namespace saccade::cpu
