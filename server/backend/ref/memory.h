#pragma once
// Memory of the reference backend and the table that turns the address a view carries into bytes.
// Thread-safe: buffers are made, freed and looked up from any thread.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "base/status.h"
#include "tensor/backend.h"

namespace saccade::ref {

// One allocation. Tasks share it, so that its bytes stay mapped while one runs; `released` says
// that its owner is gone.
class Memory {
 public:
  // `guarded`: address() is a mapping that the host cannot touch. RESOURCE_EXHAUSTED when the
  // system has no memory.
  static absl::StatusOr<std::shared_ptr<Memory>> Map(size_t size, MemKind kind, bool guarded);
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory();

  std::byte* address() const { return address_; }
  std::byte* bytes() const { return bytes_; }
  size_t size() const { return size_; }
  MemKind kind() const { return kind_; }
  bool released() const { return released_.load(std::memory_order_acquire); }
  void Release() { released_.store(true, std::memory_order_release); }

 private:
  Memory(size_t size, MemKind kind) : size_(size), kind_(kind) {}

  size_t size_;
  MemKind kind_;
  size_t mapped_ = 0;             // size_ rounded up to pages
  std::byte* address_ = nullptr;  // what views carry
  std::byte* bytes_ = nullptr;    // the alias; the same as address_ unless guarded
  std::atomic<bool> released_{false};
};

class MemoryTable {
 public:
  void Add(const std::shared_ptr<Memory>& memory);
  void Remove(const Memory& memory);
  // The live allocation that holds [address, address + size), or null.
  std::shared_ptr<Memory> Find(const std::byte* address, size_t size) const;

 private:
  mutable std::mutex mutex_;
  std::map<uintptr_t, std::shared_ptr<Memory>> by_address_;
};

class RefBuffer final : public Buffer {
 public:
  RefBuffer(std::shared_ptr<Memory> memory, std::shared_ptr<MemoryTable> table);
  ~RefBuffer() override;
  std::byte* data() const override { return memory_->address(); }
  size_t size() const override { return memory_->size(); }
  MemKind kind() const override { return memory_->kind(); }

 private:
  std::shared_ptr<Memory> memory_;
  std::shared_ptr<MemoryTable> table_;  // may outlive the backend
};

}  // namespace saccade::ref
