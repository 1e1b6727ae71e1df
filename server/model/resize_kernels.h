#pragma once
// What the kernels of resize.cc share with those that need a wider instruction set, which have
// files of their own. Private to resize.
#include <cstddef>
#include <cstdint>
#include <vector>

namespace saccade::resize_kernels {

inline constexpr int kPrecisionBits = 32 - 8 - 2;  // Pillow's PRECISION_BITS
inline constexpr int32_t kHalf = 1 << (kPrecisionBits - 1);
// A 22-bit coefficient as kLowBits unsigned low bits and the signed rest, so that 16-bit multiplies
// suffice: sum(p * k) = (sum(p * high) << kLowBits) + sum(p * low), exact in 32 bits.
inline constexpr int kLowBits = 12;

// Which input samples make an output sample, and with which weights: Pillow's precompute_coeffs and
// normalize_coeffs_8bpc for the output samples [first, first + count).
struct Taps {
  int stride = 0;  // coefficients per output sample, a multiple of 4, padded with zeros
  std::vector<int64_t>
      begin;              // [count] first input sample; begin + stride is at most 3 behind the end
  std::vector<int> size;  // [count] input samples from there that count, >= 1
  std::vector<int32_t> coefficients;  // [count, stride]
};

// Two neighbouring coefficients as the 16-bit pairs that pmaddwd takes.
struct SplitPair {
  int32_t high;  // (k0 >> kLowBits) | (k1 >> kLowBits) << 16
  int32_t low;   // (k0 & mask) | (k1 & mask) << 16
};

// One row of RGB8, resampled horizontally; reads up to 3 pixels and 4 bytes beyond it.
void HorizontalAvx2(const uint8_t* in, const Taps& taps, const SplitPair* pairs, uint8_t* out);
// One output row from `size` input rows; the bytes it made, a multiple of 32.
size_t VerticalAvx2(const uint8_t* const* rows, const SplitPair* pairs, int size, size_t bytes,
                    uint8_t* out);

}  // namespace saccade::resize_kernels
