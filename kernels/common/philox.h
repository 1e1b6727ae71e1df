#pragma once
// Philox4x32-10, a counter-based random generator: four words are a pure function of a 64-bit key
// and a 128-bit counter. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
// 2011; the constants are the paper's.
#include <cstdint>

#include "kernels/common/host_device.h"

namespace saccade {

struct Philox4x32 {
  uint32_t word[4];
};

SACCADE_HD Philox4x32 PhiloxBlock(uint64_t key, uint64_t counter_low, uint64_t counter_high) {
  uint32_t c0 = static_cast<uint32_t>(counter_low);
  uint32_t c1 = static_cast<uint32_t>(counter_low >> 32);
  uint32_t c2 = static_cast<uint32_t>(counter_high);
  uint32_t c3 = static_cast<uint32_t>(counter_high >> 32);
  uint32_t k0 = static_cast<uint32_t>(key);
  uint32_t k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Uniform in [0, 1), 53 bits: the one number that draw `draw` of the sequence seeded `seed` uses.
SACCADE_HD double UniformDraw(uint64_t seed, uint64_t draw) {
  const Philox4x32 block = PhiloxBlock(seed, draw, 0);
  const uint64_t bits = (static_cast<uint64_t>(block.word[1]) << 32) | block.word[0];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

}  // namespace saccade
