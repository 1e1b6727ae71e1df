#include "model/resize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/strings.h"
#include "model/resize_kernels.h"

namespace saccade {
namespace {

using namespace resize_kernels;  // NOLINT(google-build-using-namespace): its other half

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

// Pillow's precompute_coeffs and normalize_coeffs_8bpc for the output samples [first, first +
// count).
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
    const int64_t first_tap = std::min(begin, std::max<int64_t>(in_size - taps.stride, 0));
    const auto zeros = static_cast<int>(begin - first_tap);
    int32_t* out = taps.coefficients.data() + i * taps.stride + zeros;
    for (int x = 0; x < size; ++x) {
      double w = weights[static_cast<size_t>(x)];
      if (sum != 0.0) w /= sum;
      w *= 1 << kPrecisionBits;
      out[x] = static_cast<int32_t>(w < 0 ? -0.5 + w : 0.5 + w);
    }
    taps.begin[static_cast<size_t>(i)] = first_tap;
    taps.size[static_cast<size_t>(i)] = zeros + size;
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

#if defined(__x86_64__)

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

// Takes all taps of the stride, zeros too: a count that differs from sample to sample is a branch
// that nobody predicts once a decoder runs in between. Reads up to 3 pixels and 4 bytes beyond a
// row.
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
    for (int x = 0; x < taps.stride; x += 4, p += 12, k += 2) {
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

#endif  // __x86_64__

// Bytes that a SIMD pass may read past the last pixel of a row: 3 taps of padding and 4 bytes.
constexpr size_t kRowSlack = 16;
static_assert(kRowSlack <= ImageRows::kSlack);

absl::Status CheckSpec(const ImageRows& image, const ResizeSpec& spec) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  if (image.width() == 0 || image.height() == 0) return InvalidField("image", "empty");
  if (static_cast<int64_t>(image.width()) + 2 * static_cast<int64_t>(spec.pad_x) > kMax ||
      static_cast<int64_t>(image.height()) + 2 * static_cast<int64_t>(spec.pad_y) > kMax) {
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

// The first pass: rows of the padded image, cut to the window and resampled horizontally. Keeps the
// last `keep` of them.
class WideRows {
 public:
  WideRows(ImageRows& image, const ResizeSpec& spec, size_t keep, ResizeKernels kernels)
      : image_(image),
        spec_(spec),
        kernels_(kernels),
        row_bytes_(static_cast<size_t>(spec.window_width) * 3),
        stride_(row_bytes_ + kRowSlack),
        kept_(keep * stride_),
        rows_(keep) {
    const int64_t in_width =
        static_cast<int64_t>(image.width()) + 2 * static_cast<int64_t>(spec.pad_x);
    horizontal_ = spec.width != in_width;
    if (horizontal_) {
      taps_ =
          MakeTaps(in_width, spec.width, spec.window_x, spec.window_width, KernelOf(spec.filter));
#if defined(__x86_64__)
      if (kernels_ != ResizeKernels::kScalar) pairs_ = SplitAll(taps_);
#endif
    }
    if (spec.pad_x > 0 || spec.pad_y > 0) {
      padded_.resize(static_cast<size_t>(in_width) * 3 + kRowSlack);
      Fill(padded_.data(), static_cast<size_t>(in_width));
    }
    if (spec.pad_y > 0) {
      fill_row_.resize(stride_);
      Pass(padded_.data(), fill_row_.data());
    }
  }

  // Makes rows until `end` is the next one; of those before `begin` nothing is kept.
  absl::Status Advance(int64_t begin, int64_t end) {
    for (; next_ < end; ++next_) {
      const int64_t y = next_ - static_cast<int64_t>(spec_.pad_y);
      uint8_t* slot = kept_.data() + Slot(next_) * stride_;
      rows_[Slot(next_)] = slot;
      if (y < 0 || y >= static_cast<int64_t>(image_.height())) {
        rows_[Slot(next_)] = fill_row_.data();
        continue;
      }
      ASSIGN_OR_RETURN(const uint8_t* source, image_.Next());
      ++taken_;
      if (next_ < begin) continue;
      if (spec_.pad_x > 0) {
        std::memcpy(padded_.data() + static_cast<size_t>(spec_.pad_x) * 3, source,
                    static_cast<size_t>(image_.width()) * 3);
        source = padded_.data();
      }
      Pass(source, slot);
    }
    return absl::OkStatus();
  }
  const uint8_t* Row(int64_t y) const { return rows_[Slot(y)]; }

  // The rows that the window does not need.
  absl::Status Finish() {
    for (; taken_ < image_.height(); ++taken_) RETURN_IF_ERROR(image_.Next().status());
    return image_.Finish();
  }

 private:
  size_t Slot(int64_t y) const { return static_cast<size_t>(y) % rows_.size(); }
  void Fill(uint8_t* out, size_t pixels) const {
    for (size_t x = 0; x < pixels; ++x) std::memcpy(out + x * 3, spec_.fill.data(), 3);
  }
  void Pass(const uint8_t* in, uint8_t* out) const {
    if (!horizontal_) {
      std::memcpy(out, in + spec_.window_x * 3, row_bytes_);
      return;
    }
#if defined(__x86_64__)
    if (kernels_ == ResizeKernels::kAvx2) return HorizontalAvx2(in, taps_, pairs_.data(), out);
    if (kernels_ == ResizeKernels::kSse41) return HorizontalSse(in, taps_, pairs_.data(), out);
#endif
    HorizontalScalar(in, taps_, out);
  }

  ImageRows& image_;
  const ResizeSpec& spec_;
  const ResizeKernels kernels_;
  const size_t row_bytes_;
  const size_t stride_;  // of a kept row; SIMD writes a byte beyond its end
  bool horizontal_ = false;
  Taps taps_;
#if defined(__x86_64__)
  std::vector<SplitPair> pairs_;
#endif
  Pixels padded_;    // one input row between its borders
  Pixels fill_row_;  // a row of the border
  Pixels kept_;
  std::vector<const uint8_t*> rows_;  // where row y is, at y % keep
  int64_t next_ = 0;                  // of the padded image
  uint32_t taken_ = 0;                // of the input
};

absl::StatusOr<Rgb8Image> Resample(ImageRows& image, const ResizeSpec& spec,
                                   ResizeKernels kernels) {
  RETURN_IF_ERROR(CheckSpec(image, spec));
  const int64_t in_height =
      static_cast<int64_t>(image.height()) + 2 * static_cast<int64_t>(spec.pad_y);
  const bool vertical = spec.height != in_height;
  const size_t row_bytes = static_cast<size_t>(spec.window_width) * 3;
  Taps down;
  int keep = 1;
  if (vertical) {
    down =
        MakeTaps(in_height, spec.height, spec.window_y, spec.window_height, KernelOf(spec.filter));
    keep = *std::max_element(down.size.begin(), down.size.end());
  }
#if defined(__x86_64__)
  const std::vector<SplitPair> pairs =
      kernels == ResizeKernels::kScalar ? std::vector<SplitPair>() : SplitAll(down);
#endif

  WideRows wide(image, spec, static_cast<size_t>(keep), kernels);
  std::vector<const uint8_t*> in(static_cast<size_t>(keep));
  Rgb8Image result;
  result.width = static_cast<uint32_t>(spec.window_width);
  result.height = static_cast<uint32_t>(spec.window_height);
  result.rgb.resize(static_cast<size_t>(spec.window_height) * row_bytes);
  for (size_t r = 0; r < result.height; ++r) {
    uint8_t* out = result.rgb.data() + r * row_bytes;
    const int64_t begin = vertical ? down.begin[r] : spec.window_y + static_cast<int64_t>(r);
    const int size = vertical ? down.size[r] : 1;
    RETURN_IF_ERROR(wide.Advance(begin, begin + size));
    if (!vertical) {
      std::memcpy(out, wide.Row(begin), row_bytes);
      continue;
    }
    for (int y = 0; y < size; ++y) in[static_cast<size_t>(y)] = wide.Row(begin + y);
    const size_t k = r * static_cast<size_t>(down.stride);
#if defined(__x86_64__)
    if (kernels != ResizeKernels::kScalar) {
      const int32_t* const weights = down.coefficients.data() + k;
      const SplitPair* const split = pairs.data() + k / 2;
      if (kernels == ResizeKernels::kAvx2) {
        const size_t done = VerticalAvx2(in.data(), split, size, row_bytes, out);
        VerticalScalar(in.data(), weights, size, row_bytes, done, out);
      } else {
        VerticalSse(in.data(), weights, split, size, row_bytes, out);
      }
      continue;
    }
#endif
    VerticalScalar(in.data(), down.coefficients.data() + k, size, row_bytes, 0, out);
  }
  RETURN_IF_ERROR(wide.Finish());
  return result;
}

}  // namespace

ResizeKernels BestResizeKernels() {
#if defined(__x86_64__)
  static const bool have_avx2 = __builtin_cpu_supports("avx2") > 0;
  return have_avx2 ? ResizeKernels::kAvx2 : ResizeKernels::kSse41;  // which every build needs
#else
  return ResizeKernels::kScalar;
#endif
}

absl::StatusOr<Rgb8Image> ResizeWindow(ImageRows& rows, const ResizeSpec& spec,
                                       ResizeKernels kernels) {
  return Resample(rows, spec, std::min(kernels, BestResizeKernels()));
}

absl::StatusOr<Rgb8Image> Resize(ImageRows& rows, uint32_t width, uint32_t height,
                                 ResizeFilter filter) {
  ResizeSpec spec;
  spec.filter = filter;
  spec.width = spec.window_width = width;
  spec.height = spec.window_height = height;
  return ResizeWindow(rows, spec);
}

}  // namespace saccade
