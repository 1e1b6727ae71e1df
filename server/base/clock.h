#pragma once
// Time is an argument in sched/ and kv/; a Clock exists only at the edges.
#include <atomic>
#include <chrono>

namespace saccade {

using TimePoint = std::chrono::steady_clock::time_point;
using Micros = std::chrono::microseconds;
inline constexpr TimePoint kNever = TimePoint::max();

class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimePoint Now() const noexcept = 0;
};

class SteadyClock final : public Clock {
 public:
  TimePoint Now() const noexcept override { return std::chrono::steady_clock::now(); }
};

// Advances only when told; for tests.
class ManualClock final : public Clock {
 public:
  TimePoint Now() const noexcept override {
    return TimePoint(Micros(now_us_.load(std::memory_order_relaxed)));
  }
  void Advance(Micros by) { now_us_.fetch_add(by.count(), std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> now_us_{1'000'000};
};

inline double ToMillis(std::chrono::steady_clock::duration d) {
  return std::chrono::duration<double, std::milli>(d).count();
}
inline Micros ToMicros(std::chrono::steady_clock::duration d) {
  return std::chrono::duration_cast<Micros>(d);
}

}  // namespace saccade
