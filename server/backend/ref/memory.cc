#include "backend/ref/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "base/strings.h"

namespace saccade::ref {
namespace {

std::byte* MapPages(size_t size, int protection, int extra_flags) {
  void* pages = mmap(nullptr, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | extra_flags, -1, 0);
  return pages == MAP_FAILED ? nullptr : static_cast<std::byte*>(pages);
}

}  // namespace

absl::StatusOr<std::shared_ptr<Memory>> Memory::Map(size_t size, MemKind kind, bool guarded) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (size > std::numeric_limits<size_t>::max() - page) {
    return absl::ResourceExhaustedError(StrCat("ref: cannot allocate ", size, " bytes"));
  }
  std::shared_ptr<Memory> memory(new Memory(size, kind));
  memory->mapped_ = (std::max(size, size_t{1}) + page - 1) / page * page;
  memory->bytes_ = MapPages(memory->mapped_, PROT_READ | PROT_WRITE, 0);
  if (memory->bytes_ == nullptr) {
    return absl::ResourceExhaustedError(StrCat("ref: cannot allocate ", size, " bytes"));
  }
  if (!guarded) {
    memory->address_ = memory->bytes_;
    return memory;
  }
  memory->address_ = MapPages(memory->mapped_, PROT_NONE, MAP_NORESERVE);
  if (memory->address_ == nullptr) {
    return absl::ResourceExhaustedError(StrCat("ref: cannot reserve ", size, " bytes"));
  }
  std::memset(memory->bytes_, 0xFF, size);
  return memory;
}

Memory::~Memory() {
  if (bytes_ != nullptr) munmap(bytes_, mapped_);
  if (address_ != nullptr && address_ != bytes_) munmap(address_, mapped_);
}

void MemoryTable::Add(const std::shared_ptr<Memory>& memory) {
  const std::lock_guard lock(mutex_);
  by_address_[reinterpret_cast<uintptr_t>(memory->address())] = memory;
}

void MemoryTable::Remove(const Memory& memory) {
  const std::lock_guard lock(mutex_);
  by_address_.erase(reinterpret_cast<uintptr_t>(memory.address()));
}

std::shared_ptr<Memory> MemoryTable::Find(const std::byte* address, size_t size) const {
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  const std::lock_guard lock(mutex_);
  auto after = by_address_.upper_bound(wanted);
  if (after == by_address_.begin()) return nullptr;
  const auto& [begin, memory] = *std::prev(after);
  const size_t offset = wanted - begin;
  if (offset > memory->size() || size > memory->size() - offset) return nullptr;
  return memory;
}

RefBuffer::RefBuffer(std::shared_ptr<Memory> memory, std::shared_ptr<MemoryTable> table)
    : memory_(std::move(memory)), table_(std::move(table)) {
  table_->Add(memory_);
}

RefBuffer::~RefBuffer() {
  table_->Remove(*memory_);
  memory_->Release();
}

}  // namespace saccade::ref
