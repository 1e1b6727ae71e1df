#pragma once
// The sampling rule that every backend follows, so that one (seed, draw) picks the same token
// everywhere.
//   temperature 0:  the lowest index among the largest logits.
//   temperature t:  w[i] = exp((logit[i] - max) / t) in F64; the smallest i with w[0] + ... + w[i]
//   > u * sum(w), sums taken
//                   in index order, u = UniformDraw(seed, draw).
// A row with a NaN or an Inf, an empty row, and a temperature that is negative or not finite give
// kNoSample.
#include <cmath>
#include <cstdint>

#include "kernels/common/philox.h"

namespace saccade {

inline constexpr int32_t kNoSample = -1;

inline int32_t SampleRow(const float* logits, int64_t n, float temperature, int64_t seed,
                         int32_t draw) {
  if (n <= 0 || !std::isfinite(temperature) || temperature < 0) return kNoSample;
  int64_t best = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (!std::isfinite(logits[i])) return kNoSample;
    if (logits[i] > logits[best]) best = i;
  }
  if (temperature == 0) return static_cast<int32_t>(best);
  const auto weight = [&](int64_t i) {
    return std::exp((static_cast<double>(logits[i]) - static_cast<double>(logits[best])) /
                    static_cast<double>(temperature));
  };
  double total = 0;
  for (int64_t i = 0; i < n; ++i) total += weight(i);
  const double target =
      UniformDraw(static_cast<uint64_t>(seed), static_cast<uint64_t>(static_cast<uint32_t>(draw))) *
      total;
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    sum += weight(i);
    if (sum > target) return static_cast<int32_t>(i);
  }
  return static_cast<int32_t>(best);  // u * total rounded up to total itself
}

}  // namespace saccade
