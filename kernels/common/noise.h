#pragma once
// The noise of flow heads: standard normal numbers that are a pure function of (seed, index).
// Box-Muller in F64 over Philox blocks of their own counters, then F32.
#include <cmath>
#include <cstdint>

#include "kernels/common/philox.h"

namespace saccade {

inline float NormalDraw(uint64_t seed, uint64_t index) {
  constexpr uint64_t kDomain = 1;  // counters that no other kind of draw uses
  const Philox4x32 block = PhiloxBlock(seed, index / 2, kDomain);
  const auto uniform = [&](int word) {  // (0, 1]
    const uint64_t bits = (static_cast<uint64_t>(block.word[word + 1]) << 32) | block.word[word];
    return static_cast<double>((bits >> 11) + 1) * 0x1p-53;
  };
  const double radius = std::sqrt(-2.0 * std::log(uniform(0)));
  const double angle = 2.0 * 3.14159265358979323846 * uniform(2);
  return static_cast<float>(radius * (index % 2 == 0 ? std::cos(angle) : std::sin(angle)));
}

}  // namespace saccade
