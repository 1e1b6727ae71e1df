#pragma once
// MemoryBudget: one sum of bytes for the whole process. Whatever is big is held here before it is
// allocated, so what is refused is refused with a reason and the sum never passes the limit. Counts
// anonymous memory: clean pages of mapped files are the kernel's to take back. Any thread; no lock.
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "base/status.h"

namespace saccade {

// What memory is for. Also the values of the metric label `kind`.
enum class MemoryKind : uint8_t {
  kProcess,     // code's own data, threads, what the allocator keeps back; fixed at the start
  kWeights,     // packed for a device
  kKvCache,     // blocks of keys and values and the books over them
  kEmbeddings,  // pools of vision embeddings
  kScratch,     // of a step: activations
  kStaging,     // of a step: index arrays and pixels on their way to the device
  kFrames,      // decoded and resized, named by sessions, requests or caches
  kDecode,      // pictures while they are decoded
  kTransport,   // gRPC's own buffers of what clients send; fixed at the start
  kMessages,    // parsed, waiting for their turn
  kSessions,    // open streams and Predict calls: history, prompts, unread answers
  kRecorder,    // the last steps and requests
};
inline constexpr size_t kMemoryKinds = static_cast<size_t>(MemoryKind::kRecorder) + 1;
inline constexpr std::array<std::string_view, kMemoryKinds> kMemoryKindNames = {
    "process", "weights", "kv_cache",  "embeddings", "scratch",  "staging",
    "frames",  "decode",  "transport", "messages",   "sessions", "recorder"};

class MemoryBudget;

// Bytes held, until it is destroyed. Movable; the budget outlives it.
class MemoryHold {
 public:
  MemoryHold() = default;
  MemoryHold(MemoryHold&& other) noexcept { *this = std::move(other); }
  MemoryHold& operator=(MemoryHold&& other) noexcept;
  ~MemoryHold() { Release(); }

  uint64_t bytes() const { return bytes_; }
  // To another size of the same kind; growing may fail as Hold does, and nothing changes then.
  absl::Status Resize(uint64_t bytes);
  void Release();

 private:
  friend class MemoryBudget;
  MemoryHold(MemoryBudget* budget, MemoryKind kind, uint64_t bytes)
      : budget_(budget), kind_(kind), bytes_(bytes) {}
  MemoryBudget* budget_ = nullptr;
  MemoryKind kind_ = MemoryKind::kProcess;
  uint64_t bytes_ = 0;
};

class MemoryBudget {
 public:
  explicit MemoryBudget(uint64_t limit) : limit_(limit) {}
  MemoryBudget(const MemoryBudget&) = delete;
  MemoryBudget& operator=(const MemoryBudget&) = delete;

  // RESOURCE_EXHAUSTED (kOutOfMemory) with what is held, wanted and allowed.
  absl::StatusOr<MemoryHold> Hold(MemoryKind kind, uint64_t bytes);
  // The same where there may be no budget: the hold is empty then.
  static absl::StatusOr<MemoryHold> Hold(MemoryBudget* budget, MemoryKind kind, uint64_t bytes) {
    return budget == nullptr ? absl::StatusOr<MemoryHold>(MemoryHold()) : budget->Hold(kind, bytes);
  }

  uint64_t limit() const { return limit_; }
  uint64_t held() const { return total_.load(std::memory_order_relaxed); }
  uint64_t held(MemoryKind kind) const {
    return kinds_[static_cast<size_t>(kind)].load(std::memory_order_relaxed);
  }
  // "weights 12.0 + kv_cache 64.0 + ... = 80.5 of 512.0 MiB": the kinds that hold anything.
  std::string Sum() const;

 private:
  friend class MemoryHold;
  absl::Status Take(MemoryKind kind, uint64_t bytes);
  void GiveBack(MemoryKind kind, uint64_t bytes);

  const uint64_t limit_;
  std::atomic<uint64_t> total_{0};
  std::array<std::atomic<uint64_t>, kMemoryKinds> kinds_{};
};

// "12.5": mebibytes with one digit.
std::string Mebibytes(uint64_t bytes);

}  // namespace saccade
