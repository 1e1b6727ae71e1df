#include "model/resize_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cstring>

namespace saccade::resize_kernels {

// As the SSE kernel, two samples at a time.
__attribute__((target("avx2"))) void HorizontalAvx2(const uint8_t* in, const Taps& taps,
                                                    const SplitPair* pairs, uint8_t* out) {
  const size_t count = taps.begin.size();
  const auto pairs_per_sample = static_cast<size_t>(taps.stride / 2);
  const __m256i first = _mm256_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1,
                                         0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1);
  const __m256i second =
      _mm256_setr_epi8(6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1, 6, -1, 9, -1, 7,
                       -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1);
  const __m256i half = _mm256_set1_epi32(kHalf);
  for (size_t i = 0; i < count; i += 2) {
    const size_t j = std::min(i + 1, count - 1);
    const uint8_t* p = in + taps.begin[i] * 3;
    const uint8_t* q = in + taps.begin[j] * 3;
    const SplitPair* k = pairs + i * pairs_per_sample;
    const SplitPair* l = pairs + j * pairs_per_sample;
    __m256i high = _mm256_setzero_si256();
    __m256i low = half;
    for (int x = 0; x < taps.stride; x += 4, p += 12, q += 12, k += 2, l += 2) {
      const __m256i pixels = _mm256_inserti128_si256(
          _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(q)), 1);
      const __m256i weights = _mm256_inserti128_si256(
          _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(k))),
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(l)), 1);
      const __m256i p01 = _mm256_shuffle_epi8(pixels, first);
      const __m256i p23 = _mm256_shuffle_epi8(pixels, second);
      high = _mm256_add_epi32(high, _mm256_madd_epi16(p01, _mm256_shuffle_epi32(weights, 0x00)));
      low = _mm256_add_epi32(low, _mm256_madd_epi16(p01, _mm256_shuffle_epi32(weights, 0x55)));
      high = _mm256_add_epi32(high, _mm256_madd_epi16(p23, _mm256_shuffle_epi32(weights, 0xAA)));
      low = _mm256_add_epi32(low, _mm256_madd_epi16(p23, _mm256_shuffle_epi32(weights, 0xFF)));
    }
    __m256i sum = _mm256_add_epi32(_mm256_slli_epi32(high, kLowBits), low);
    sum = _mm256_srai_epi32(sum, kPrecisionBits);
    sum = _mm256_packus_epi16(_mm256_packs_epi32(sum, sum), sum);
    const int32_t rgb = _mm256_extract_epi32(sum, 0);
    const int32_t next = _mm256_extract_epi32(sum, 4);
    std::memcpy(out + i * 3, &rgb, 4);
    std::memcpy(out + j * 3, &next, 4);
  }
}

__attribute__((target("avx2"))) size_t VerticalAvx2(const uint8_t* const* rows,
                                                    const SplitPair* pairs, int size, size_t bytes,
                                                    uint8_t* out) {
  const __m256i zero = _mm256_setzero_si256();
  const __m256i half = _mm256_set1_epi32(kHalf);
  size_t x = 0;
  for (; x + 32 <= bytes; x += 32) {
    __m256i high[4] = {zero, zero, zero, zero};
    __m256i low[4] = {half, half, half, half};
    for (int y = 0; y < size; y += 2) {
      const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[y] + x));
      const __m256i b = y + 1 < size
                            ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[y + 1] + x))
                            : zero;
      const __m256i k_high = _mm256_set1_epi32(pairs[y / 2].high);
      const __m256i k_low = _mm256_set1_epi32(pairs[y / 2].low);
      // Inside each half of 16 bytes: unpacking here and packing at the end cancel out.
      const __m256i ab0 = _mm256_unpacklo_epi8(a, b);
      const __m256i ab1 = _mm256_unpackhi_epi8(a, b);
      const __m256i quarter[4] = {_mm256_unpacklo_epi8(ab0, zero), _mm256_unpackhi_epi8(ab0, zero),
                                  _mm256_unpacklo_epi8(ab1, zero), _mm256_unpackhi_epi8(ab1, zero)};
      for (int q = 0; q < 4; ++q) {
        high[q] = _mm256_add_epi32(high[q], _mm256_madd_epi16(quarter[q], k_high));
        low[q] = _mm256_add_epi32(low[q], _mm256_madd_epi16(quarter[q], k_low));
      }
    }
    __m256i sum[4];
    for (int q = 0; q < 4; ++q) {
      sum[q] = _mm256_srai_epi32(_mm256_add_epi32(_mm256_slli_epi32(high[q], kLowBits), low[q]),
                                 kPrecisionBits);
    }
    const __m256i packed =
        _mm256_packus_epi16(_mm256_packs_epi32(sum[0], sum[1]), _mm256_packs_epi32(sum[2], sum[3]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + x), packed);
  }
  return x;
}

}  // namespace saccade::resize_kernels
#endif  // __x86_64__
