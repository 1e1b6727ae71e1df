#pragma once
// TokenBucket: a sustained rate with bursts, of one second's worth unless stated. Its owner's
// thread only; time is an argument.
#include <algorithm>
#include <optional>

#include "base/clock.h"

namespace saccade {

class TokenBucket {
 public:
  // `per_second` > 0.
  TokenBucket(double per_second, TimePoint now)
      : TokenBucket(per_second, std::max(1.0, per_second), now) {}
  TokenBucket(double per_second, double burst, TimePoint now)
      : rate_(per_second), burst_(burst), tokens_(burst), at_(now) {}

  // Takes `amount`, or tells how long until it is there. More than a whole burst is given when the
  // bucket is full, and owed: the rate holds for what is larger than a burst, too.
  std::optional<Micros> Take(TimePoint now, double amount = 1.0) {
    tokens_ = LevelAt(now);
    at_ = std::max(at_, now);
    const std::optional<Micros> wait = WaitFor(now, amount);
    if (!wait) tokens_ -= amount;
    return wait;
  }
  // The same without taking.
  std::optional<Micros> WaitFor(TimePoint now, double amount = 1.0) const {
    const double level = LevelAt(now);
    const double needed = std::min(amount, burst_);
    if (level >= needed) return std::nullopt;
    return Micros(static_cast<int64_t>((needed - level) / rate_ * 1e6) + 1);
  }
  // From now on; what has been saved up or is owed stays, within the new burst.
  void SetRate(double per_second, TimePoint now) {
    tokens_ = LevelAt(now);
    at_ = std::max(at_, now);
    rate_ = per_second;
    burst_ = std::max(1.0, per_second);
    tokens_ = std::min(tokens_, burst_);
  }
  // Nothing is owed or used up.
  bool Full(TimePoint now) const { return LevelAt(now) >= burst_; }

 private:
  double LevelAt(TimePoint now) const {
    if (now <= at_) return tokens_;
    return std::min(burst_, tokens_ + std::chrono::duration<double>(now - at_).count() * rate_);
  }

  double rate_;
  double burst_;
  double tokens_;
  TimePoint at_;
};

}  // namespace saccade
