#pragma once
// Pillow's resampling, bit for bit (Pillow <= 12: src/libImaging/Resample.c, 8 bits per channel):
// separable, horizontal pass first, filter support widened when shrinking, coefficients quantised
// to 22 bits, rounding to uint8 after each pass, a pass whose size does not change is skipped.
// Integer kernels: AVX2 or SSE4.1, scalar elsewhere; all give the same bits.
#include <array>
#include <cstdint>

#include "base/status.h"
#include "model/image_decode.h"

namespace saccade {

enum class ResizeFilter : uint8_t {
  kBilinear,
  kBicubic,
  kLanczos
};  // bicubic: a = -0.5; lanczos: 3 lobes

// A resize of the (virtually padded) input to width x height, of which only a window is computed
// and returned.
struct ResizeSpec {
  ResizeFilter filter = ResizeFilter::kBicubic;
  int64_t width = 0;  // of the whole resized image, pixels
  int64_t height = 0;
  // The window to return, inside the resized image. Nothing outside of what it needs is computed.
  int64_t window_x = 0;
  int64_t window_y = 0;
  int64_t window_width = 0;
  int64_t window_height = 0;
  // Constant border put around the input before it is resized; never materialised.
  uint32_t pad_x = 0;  // columns on the left and as many on the right
  uint32_t pad_y = 0;  // rows on the top and as many on the bottom
  std::array<uint8_t, 3> fill{};
};

// Takes all rows, keeping only those that the next row of the result is made of. INVALID_ARGUMENT:
// what the rows say, an empty image, a size that is not positive or over 2^31 - 1, a window outside
// the resized image or over 2^26 pixels.
enum class ResizeKernels : uint8_t { kScalar, kSse41, kAvx2 };  // each faster than the one before
ResizeKernels BestResizeKernels();                              // of this machine
absl::StatusOr<Rgb8Image> ResizeWindow(ImageRows& rows, const ResizeSpec& spec,
                                       ResizeKernels kernels = BestResizeKernels());

// The whole image to width x height; the same size is a copy.
absl::StatusOr<Rgb8Image> Resize(ImageRows& rows, uint32_t width, uint32_t height,
                                 ResizeFilter filter);
inline absl::StatusOr<Rgb8Image> Resize(const Rgb8Image& image, uint32_t width, uint32_t height,
                                        ResizeFilter filter) {
  PixelRows rows(image);
  return Resize(rows, width, height, filter);
}
}  // namespace saccade
