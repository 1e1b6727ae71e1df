#pragma once
// Wakeup: one thread sleeps until any other says there is work, without a lock. The sleeper reads
// Epoch() before it looks for work, so a Notify() in between is never lost.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>

#include "base/clock.h"

namespace saccade {

class Wakeup {
 public:
  uint32_t Epoch() const { return epoch_.load(std::memory_order_acquire); }

  // Any thread.
  void Notify() {
    epoch_.fetch_add(1, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst)) {
      syscall(SYS_futex, Word(), FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
    }
  }

  // The one sleeper: returns when the epoch is not `seen`, or at `until`, or spuriously.
  void WaitUntil(uint32_t seen, TimePoint until) {
    sleeping_.store(true, std::memory_order_seq_cst);
    if (epoch_.load(std::memory_order_seq_cst) == seen) {
      timespec relative{};
      timespec* timeout = nullptr;
      if (until != kNever) {
        const auto left = std::max(std::chrono::nanoseconds(0),
                                   std::chrono::duration_cast<std::chrono::nanoseconds>(
                                       until - std::chrono::steady_clock::now()));
        relative.tv_sec = static_cast<time_t>(left.count() / 1'000'000'000);
        relative.tv_nsec = static_cast<long>(left.count() % 1'000'000'000);
        timeout = &relative;
      }
      syscall(SYS_futex, Word(), FUTEX_WAIT_PRIVATE, seen, timeout, nullptr, 0);
    }
    sleeping_.store(false, std::memory_order_relaxed);
  }

 private:
  uint32_t* Word() { return reinterpret_cast<uint32_t*>(&epoch_); }
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  std::atomic<uint32_t> epoch_{0};
  std::atomic<bool> sleeping_{false};
};

}  // namespace saccade
