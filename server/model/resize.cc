#include "model/resize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <utility>
#include <vector>

#if defined(__SSE4_1__)
#include <smmintrin.h>
#endif

#include "base/strings.h"

namespace saccade {
namespace {

constexpr int kPrecisionBits = 32 - 8 - 2;  // Pillow's PRECISION_BITS
constexpr int32_t kHalf = 1 << (kPrecisionBits - 1);
// A 22-bit coefficient as kLowBits unsigned low bits and the signed rest, so that 16-bit multiplies
// suffice: sum(p * k) = (sum(p * high) << kLowBits) + sum(p * low), exact in 32 bits.
constexpr int kLowBits = 12;
constexpr int64_t kMaxWindowPixels = int64_t{1} << 26;

double Bilinear(double x) {
  if (x < 0.0) x = -x;
  return x < 1.0 ? 1.0 - x : 0.0;
}

double Bicubic(double x) {
  constexpr double a = -0.5;
  if (x < 0.0) x = -x;
  if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
  if (x < 2.0) return (((x - 5) * x + 8) * x - 4) * a;
  return 0.0;
}

double Sinc(double x) {
  if (x == 0.0) return 1.0;
  x = x * std::numbers::pi;
  return std::sin(x) / x;
}

double Lanczos(double x) { return -3.0 <= x && x < 3.0 ? Sinc(x) * Sinc(x / 3) : 0.0; }

struct FilterKernel {
  double (*weight)(double);
  double support;
};

FilterKernel KernelOf(ResizeFilter filter) {
  switch (filter) {
    case ResizeFilter::kBilinear:
      return {Bilinear, 1.0};
    case ResizeFilter::kBicubic:
      return {Bicubic, 2.0};
    case ResizeFilter::kLanczos:
      return {Lanczos, 3.0};
  }
  return {Bicubic, 2.0};
}

// Which input samples make an output sample, and with which weights: Pillow's precompute_coeffs and
// normalize_coeffs_8bpc for the output samples [first, first + count).
struct Taps {
  int stride = 0;              // coefficients per output sample, a multiple of 4, padded with zeros
  std::vector<int64_t> begin;  // [count] first input sample
  std::vector<int> size;       // [count] input samples, >= 1
  std::vector<int32_t> coefficients;  // [count, stride]
};

Taps MakeTaps(int64_t in_size, int64_t out_size, int64_t first, int64_t count,
              FilterKernel filter) {
  const double scale = static_cast<double>(in_size) / static_cast<double>(out_size);
  const double filter_scale = std::max(scale, 1.0);
  const double support = filter.support * filter_scale;
  const double inverse = 1.0 / filter_scale;
  const auto max_taps = static_cast<int64_t>(std::ceil(support)) * 2 + 1;
  Taps taps;
  taps.stride = static_cast<int>((std::min(max_taps, in_size) + 3) / 4 * 4);
  taps.begin.resize(static_cast<size_t>(count));
  taps.size.resize(static_cast<size_t>(count));
  taps.coefficients.assign(static_cast<size_t>(count * taps.stride), 0);
  std::vector<double> weights(static_cast<size_t>(taps.stride));
  for (int64_t i = 0; i < count; ++i) {
    const double center = (static_cast<double>(first + i) + 0.5) * scale;
    // Truncation after adding a half, as in Pillow: below zero that is not rounding.
    // NOLINTBEGIN(bugprone-incorrect-roundings)
    const int64_t begin = std::max<int64_t>(static_cast<int64_t>(center - support + 0.5), 0);
    const int64_t end = std::min<int64_t>(static_cast<int64_t>(center + support + 0.5), in_size);
    // NOLINTEND(bugprone-incorrect-roundings)
    const int size = static_cast<int>(std::min<int64_t>(end - begin, taps.stride));
    double sum = 0.0;
    for (int x = 0; x < size; ++x) {
      const double w = filter.weight((static_cast<double>(x + begin) - center + 0.5) * inverse);
      weights[static_cast<size_t>(x)] = w;
      sum += w;
    }
    int32_t* out = taps.coefficients.data() + i * taps.stride;
    for (int x = 0; x < size; ++x) {
      double w = weights[static_cast<size_t>(x)];
      if (sum != 0.0) w /= sum;
      w *= 1 << kPrecisionBits;
      out[x] = static_cast<int32_t>(w < 0 ? -0.5 + w : 0.5 + w);
    }
    taps.begin[static_cast<size_t>(i)] = begin;
    taps.size[static_cast<size_t>(i)] = size;
  }
  return taps;
}

uint8_t Clip8(int32_t sum) {
  return static_cast<uint8_t>(std::clamp(sum >> kPrecisionBits, 0, 255));
}

// One row of RGB8, resampled horizontally. `in` is the row's first pixel.
void HorizontalScalar(const uint8_t* in, const Taps& taps, uint8_t* out) {
  const size_t count = taps.begin.size();
  for (size_t i = 0; i < count; ++i) {
    const uint8_t* p = in + taps.begin[i] * 3;
    const int32_t* k = taps.coefficients.data() + i * static_cast<size_t>(taps.stride);
    int32_t sum[3] = {kHalf, kHalf, kHalf};
    for (int x = 0; x < taps.size[i]; ++x, p += 3) {
      for (int c = 0; c < 3; ++c) sum[c] += p[c] * k[x];
    }
    for (int c = 0; c < 3; ++c) out[i * 3 + static_cast<size_t>(c)] = Clip8(sum[c]);
  }
}

// One output row from `size` input rows of `bytes` bytes.
void VerticalScalar(const uint8_t* const* rows, const int32_t* coefficients, int size, size_t bytes,
                    size_t begin, uint8_t* out) {
  for (size_t x = begin; x < bytes; ++x) {
    int32_t sum = kHalf;
    for (int y = 0; y < size; ++y) sum += rows[y][x] * coefficients[y];
    out[x] = Clip8(sum);
  }
}

#if defined(__SSE4_1__)

// Two neighbouring coefficients as the 16-bit pairs that pmaddwd takes.
struct SplitPair {
  int32_t high;  // (k0 >> kLowBits) | (k1 >> kLowBits) << 16
  int32_t low;   // (k0 & mask) | (k1 & mask) << 16
};

SplitPair Split(int32_t k0, int32_t k1) {
  constexpr int32_t kMask = (1 << kLowBits) - 1;
  const auto pack = [](int32_t a, int32_t b) {
    return static_cast<int32_t>((static_cast<uint32_t>(b) << 16) |
                                (static_cast<uint32_t>(a) & 0xFFFFU));
  };
  return {pack(k0 >> kLowBits, k1 >> kLowBits), pack(k0 & kMask, k1 & kMask)};
}

std::vector<SplitPair> SplitAll(const Taps& taps) {
  std::vector<SplitPair> pairs(taps.coefficients.size() / 2);
  for (size_t i = 0; i < pairs.size(); ++i) {
    pairs[i] = Split(taps.coefficients[2 * i], taps.coefficients[2 * i + 1]);
  }
  return pairs;
}

// Reads whole groups of 4 taps, 16 bytes each: up to 3 taps and 4 bytes beyond the last tap, which
// must be readable.
void HorizontalSse(const uint8_t* in, const Taps& taps, const SplitPair* pairs, uint8_t* out) {
  const size_t count = taps.begin.size();
  const int pairs_per_sample = taps.stride / 2;
  // r0 r1 g0 g1 b0 b1 as 16-bit values from r0 g0 b0 r1 g1 b1, and the same for pixels 2 and 3.
  const __m128i first = _mm_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1);
  const __m128i second = _mm_setr_epi8(6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1);
  const __m128i half = _mm_set1_epi32(kHalf);
  for (size_t i = 0; i < count; ++i) {
    const uint8_t* p = in + taps.begin[i] * 3;
    const SplitPair* k = pairs + i * static_cast<size_t>(pairs_per_sample);
    __m128i high = _mm_setzero_si128();
    __m128i low = half;
    for (int x = 0; x < taps.size[i]; x += 4, p += 12, k += 2) {
      const __m128i pixels = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      const __m128i p01 = _mm_shuffle_epi8(pixels, first);
      const __m128i p23 = _mm_shuffle_epi8(pixels, second);
      high = _mm_add_epi32(high, _mm_madd_epi16(p01, _mm_set1_epi32(k[0].high)));
      low = _mm_add_epi32(low, _mm_madd_epi16(p01, _mm_set1_epi32(k[0].low)));
      high = _mm_add_epi32(high, _mm_madd_epi16(p23, _mm_set1_epi32(k[1].high)));
      low = _mm_add_epi32(low, _mm_madd_epi16(p23, _mm_set1_epi32(k[1].low)));
    }
    __m128i sum = _mm_add_epi32(_mm_slli_epi32(high, kLowBits), low);
    sum = _mm_srai_epi32(sum, kPrecisionBits);
    sum = _mm_packus_epi16(_mm_packs_epi32(sum, sum), sum);
    // 4 bytes of which the last is overwritten by the next sample; `out` has room for one more.
    const int32_t rgb = _mm_cvtsi128_si32(sum);
    std::memcpy(out + i * 3, &rgb, 4);
  }
}

void VerticalSse(const uint8_t* const* rows, const int32_t* coefficients, const SplitPair* pairs,
                 int size, size_t bytes, uint8_t* out) {
  const __m128i zero = _mm_setzero_si128();
  const __m128i half = _mm_set1_epi32(kHalf);
  size_t x = 0;
  for (; x + 16 <= bytes; x += 16) {
    __m128i high[4] = {zero, zero, zero, zero};
    __m128i low[4] = {half, half, half, half};
    for (int y = 0; y < size; y += 2) {
      const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[y] + x));
      const __m128i b =
          y + 1 < size ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[y + 1] + x)) : zero;
      const __m128i k_high = _mm_set1_epi32(pairs[y / 2].high);
      const __m128i k_low = _mm_set1_epi32(pairs[y / 2].low);
      const __m128i ab0 = _mm_unpacklo_epi8(a, b);
      const __m128i ab1 = _mm_unpackhi_epi8(a, b);
      const __m128i quarter[4] = {_mm_cvtepu8_epi16(ab0), _mm_unpackhi_epi8(ab0, zero),
                                  _mm_cvtepu8_epi16(ab1), _mm_unpackhi_epi8(ab1, zero)};
      for (int q = 0; q < 4; ++q) {
        high[q] = _mm_add_epi32(high[q], _mm_madd_epi16(quarter[q], k_high));
        low[q] = _mm_add_epi32(low[q], _mm_madd_epi16(quarter[q], k_low));
      }
    }
    __m128i sum[4];
    for (int q = 0; q < 4; ++q) {
      sum[q] =
          _mm_srai_epi32(_mm_add_epi32(_mm_slli_epi32(high[q], kLowBits), low[q]), kPrecisionBits);
    }
    const __m128i packed =
        _mm_packus_epi16(_mm_packs_epi32(sum[0], sum[1]), _mm_packs_epi32(sum[2], sum[3]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + x), packed);
  }
  VerticalScalar(rows, coefficients, size, bytes, x, out);
}

#endif  // __SSE4_1__

// Bytes that a SIMD pass may read past the last pixel of a row: 3 taps of padding and 4 bytes.
constexpr size_t kRowSlack = 16;

absl::Status CheckSpec(const Rgb8Image& image, const ResizeSpec& spec) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  if (image.width == 0 || image.height == 0 ||
      image.rgb.size() != static_cast<uint64_t>(image.width) * image.height * 3) {
    return InvalidField("image", StrCat(image.width, " x ", image.height, " pixels in ",
                                        image.rgb.size(), " bytes is not an RGB8 image"));
  }
  if (static_cast<int64_t>(image.width) + 2 * static_cast<int64_t>(spec.pad_x) > kMax ||
      static_cast<int64_t>(image.height) + 2 * static_cast<int64_t>(spec.pad_y) > kMax) {
    return InvalidField("image", "too large to be padded");
  }
  if (spec.width < 1 || spec.height < 1 || spec.width > kMax || spec.height > kMax) {
    return InvalidField("image", StrCat("cannot be resized to ", spec.width, " x ", spec.height));
  }
  const bool inside = spec.window_x >= 0 && spec.window_y >= 0 && spec.window_width >= 1 &&
                      spec.window_height >= 1 && spec.window_x <= spec.width &&
                      spec.window_y <= spec.height &&
                      spec.window_width <= spec.width - spec.window_x &&
                      spec.window_height <= spec.height - spec.window_y;
  if (!inside || spec.window_width > kMaxWindowPixels / spec.window_height) {
    return InvalidField(
        "image",
        StrCat("window ", spec.window_width, " x ", spec.window_height, " at (", spec.window_x,
               ", ", spec.window_y, ") does not fit a ", spec.width, " x ", spec.height, " image"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Rgb8Image> Resample(const Rgb8Image& image, const ResizeSpec& spec, bool simd) {
  RETURN_IF_ERROR(CheckSpec(image, spec));
  const int64_t in_width = static_cast<int64_t>(image.width) + 2 * static_cast<int64_t>(spec.pad_x);
  const int64_t in_height =
      static_cast<int64_t>(image.height) + 2 * static_cast<int64_t>(spec.pad_y);
  const FilterKernel kernel = KernelOf(spec.filter);
  const bool horizontal = spec.width != in_width;
  const bool vertical = spec.height != in_height;

  const size_t row_bytes = static_cast<size_t>(spec.window_width) * 3;
  Taps across;
  if (horizontal) {
    across = MakeTaps(in_width, spec.width, spec.window_x, spec.window_width, kernel);
  }
  Taps down;
  // Input rows that the window needs, in the padded image.
  int64_t first_row = spec.window_y;
  int64_t last_row = spec.window_y + spec.window_height;
  if (vertical) {
    down = MakeTaps(in_height, spec.height, spec.window_y, spec.window_height, kernel);
    first_row = down.begin.front();
    last_row = down.begin.back() + down.size.back();
  }

#if defined(__SSE4_1__)
  std::vector<SplitPair> across_pairs;
  std::vector<SplitPair> down_pairs;
  if (simd) {
    across_pairs = SplitAll(across);
    down_pairs = SplitAll(down);
  }
#else
  (void)simd;
#endif

  // First pass.
  const auto rows = static_cast<size_t>(last_row - first_row);
  const size_t in_row_bytes = static_cast<size_t>(image.width) * 3;
  Pixels fill_row;
  Pixels padded;  // one input row with its borders and slack behind
  Pixels pass;    // [rows, window_width, 3] and slack behind
  std::vector<const uint8_t*> row_pointers(rows);
  const auto fill = [&spec](uint8_t* out, size_t pixels) {
    for (size_t x = 0; x < pixels; ++x) std::memcpy(out + x * 3, spec.fill.data(), 3);
  };
  if (spec.pad_y > 0) {
    fill_row.resize(static_cast<size_t>(horizontal ? in_width : spec.window_width) * 3);
    fill(fill_row.data(), fill_row.size() / 3);
    if (horizontal) {
      Pixels resampled(row_bytes);
      HorizontalScalar(fill_row.data(), across, resampled.data());
      fill_row = std::move(resampled);
    }
  }
  if (horizontal || spec.pad_x > 0) {
    padded.resize(static_cast<size_t>(in_width) * 3 + kRowSlack);
    fill(padded.data(), spec.pad_x);
    fill(padded.data() + (static_cast<size_t>(spec.pad_x) + image.width) * 3, spec.pad_x);
  }
  if (horizontal) pass.resize(rows * row_bytes + kRowSlack);
  for (size_t r = 0; r < rows; ++r) {
    const int64_t y = first_row + static_cast<int64_t>(r) - static_cast<int64_t>(spec.pad_y);
    if (y < 0 || y >= static_cast<int64_t>(image.height)) {
      row_pointers[r] = fill_row.data();
      continue;
    }
    const uint8_t* source = image.rgb.data() + static_cast<size_t>(y) * in_row_bytes;
    const bool tail =
        static_cast<size_t>(y) * in_row_bytes + in_row_bytes + kRowSlack > image.rgb.size();
    if (!horizontal && spec.pad_x == 0) {
      row_pointers[r] = source + spec.window_x * 3;
      continue;
    }
    if (spec.pad_x > 0 || tail) {
      std::memcpy(padded.data() + static_cast<size_t>(spec.pad_x) * 3, source, in_row_bytes);
      source = padded.data();
    }
    if (!horizontal) {
      // Padded but not resampled: keep the window of each row.
      if (pass.empty()) pass.resize(rows * row_bytes + kRowSlack);
      std::memcpy(pass.data() + r * row_bytes, source + spec.window_x * 3, row_bytes);
      row_pointers[r] = pass.data() + r * row_bytes;
      continue;
    }
    uint8_t* out = pass.data() + r * row_bytes;
#if defined(__SSE4_1__)
    if (simd) {
      HorizontalSse(source, across, across_pairs.data(), out);
    } else {
      HorizontalScalar(source, across, out);
    }
#else
    HorizontalScalar(source, across, out);
#endif
    row_pointers[r] = out;
  }

  Rgb8Image result;
  result.width = static_cast<uint32_t>(spec.window_width);
  result.height = static_cast<uint32_t>(spec.window_height);
  result.rgb.resize(static_cast<size_t>(spec.window_height) * row_bytes);
  for (size_t r = 0; r < result.height; ++r) {
    uint8_t* out = result.rgb.data() + r * row_bytes;
    if (!vertical) {
      std::memcpy(out, row_pointers[r], row_bytes);
      continue;
    }
    const uint8_t* const* in = row_pointers.data() + (down.begin[r] - first_row);
    const size_t k = r * static_cast<size_t>(down.stride);
#if defined(__SSE4_1__)
    if (simd) {
      VerticalSse(in, down.coefficients.data() + k, down_pairs.data() + k / 2, down.size[r],
                  row_bytes, out);
      continue;
    }
#endif
    VerticalScalar(in, down.coefficients.data() + k, down.size[r], row_bytes, 0, out);
  }
  return result;
}

}  // namespace

absl::StatusOr<Rgb8Image> ResizeWindow(const Rgb8Image& image, const ResizeSpec& spec) {
  return Resample(image, spec, /*simd=*/true);
}

absl::StatusOr<Rgb8Image> ResizeWindowScalar(const Rgb8Image& image, const ResizeSpec& spec) {
  return Resample(image, spec, /*simd=*/false);
}

absl::StatusOr<Rgb8Image> Resize(const Rgb8Image& image, uint32_t width, uint32_t height,
                                 ResizeFilter filter) {
  ResizeSpec spec;
  spec.filter = filter;
  spec.width = spec.window_width = width;
  spec.height = spec.window_height = height;
  return ResizeWindow(image, spec);
}

}  // namespace saccade
