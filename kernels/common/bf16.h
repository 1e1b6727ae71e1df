#pragma once
// bfloat16 as raw 16-bit words: the upper half of an IEEE binary32.
#include <cstdint>
#include <cstring>

#include "kernels/common/host_device.h"

namespace saccade {

SACCADE_HD float Bf16ToF32(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value = 0;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// Round to nearest even. Overflow goes to infinity; a NaN keeps its sign and upper payload and is
// made quiet.
SACCADE_HD uint16_t F32ToBf16(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>(bits >> 16);
}

SACCADE_HD float RoundToBf16(float value) { return Bf16ToF32(F32ToBf16(value)); }

}  // namespace saccade
