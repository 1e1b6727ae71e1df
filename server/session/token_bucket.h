#pragma once
// TokenBucket: a sustained rate with bursts of one second's worth. Its owner's thread only; time is
// an argument.
#include <algorithm>
#include <optional>

#include "base/clock.h"

namespace saccade {

class TokenBucket {
 public:
  // `per_second` > 0.
  TokenBucket(double per_second, TimePoint now)
      : rate_(per_second), burst_(std::max(1.0, per_second)), tokens_(burst_), at_(now) {}

  // Takes one token, or tells how long until there is one.
  std::optional<Micros> Take(TimePoint now) {
    if (now > at_) {
      tokens_ =
          std::min(burst_, tokens_ + std::chrono::duration<double>(now - at_).count() * rate_);
      at_ = now;
    }
    if (tokens_ >= 1.0) {
      tokens_ -= 1.0;
      return std::nullopt;
    }
    return Micros(static_cast<int64_t>((1.0 - tokens_) / rate_ * 1e6) + 1);
  }

 private:
  double rate_;
  double burst_;
  double tokens_;
  TimePoint at_;
};

}  // namespace saccade
