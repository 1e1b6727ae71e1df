#include "backend/cpu/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "base/strings.h"

namespace saccade::cpu {

absl::StatusOr<Memory> Memory::Allocate(size_t bytes) {
  constexpr size_t kPage = 4096;
  constexpr size_t kHuge = size_t{2} << 20;
  const auto exhausted = [bytes] {
    return absl::ResourceExhaustedError(StrCat("cpu: cannot allocate ", bytes, " bytes"));
  };
  if (bytes > std::numeric_limits<size_t>::max() / 2) return exhausted();
  const bool huge = bytes >= kHuge / 2;
  const size_t align = huge ? kHuge : kPage;
  Memory memory;
  memory.size_ = bytes;
  const size_t needed = (std::max(bytes, size_t{1}) + align - 1) / align * align;
  memory.mapped_ = huge ? needed + kHuge : needed;
  void* pages =
      mmap(nullptr, memory.mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return exhausted();
  memory.mapping_ = pages;
  const auto address = reinterpret_cast<uintptr_t>(pages);
  const uintptr_t aligned = (address + align - 1) / align * align;
  memory.data_ = static_cast<std::byte*>(pages) + (aligned - address);
  if (huge) madvise(memory.data_, needed, MADV_HUGEPAGE);  // a hint: it may fail
  return memory;
}

Memory::~Memory() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_);
}

absl::StatusOr<std::byte*> Workspace::Reserve(size_t bytes) {
  if (bytes > memory_.size()) {
    ASSIGN_OR_RETURN(memory_, Memory::Allocate(std::max(bytes, memory_.size() * 2)));
  }
  return memory_.data();
}

}  // namespace saccade::cpu
