// The first bytes are a resize, the rest is a camera frame: row by row from the decoder, with the
// kernels of this machine, it comes to the same as from the whole picture with the scalar ones.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <span>

#include "model/image_decode.h"
#include "model/resize.h"

namespace {

constexpr size_t kSpecBytes = 14;

// Sizes up to 255, odd ones far outside of what is allowed now and then.
int64_t SizeOf(uint8_t byte, bool wild) {
  if (!wild) return byte;
  constexpr int64_t kWild[] = {-1, 0, 1 << 14, (1LL << 31) - 1, 1LL << 31, INT64_MIN, INT64_MAX};
  return kWild[byte % std::size(kWild)];
}

saccade::ResizeSpec SpecOf(std::span<const uint8_t> b) {
  saccade::ResizeSpec spec;
  spec.filter = static_cast<saccade::ResizeFilter>(b[0] % 3);
  const uint8_t wild = b[1] < 16 ? b[2] : 0;  // which of the sizes
  spec.width = SizeOf(b[3], (wild & 1) != 0);
  spec.height = SizeOf(b[4], (wild & 2) != 0);
  spec.window_x = SizeOf(b[5], (wild & 4) != 0);
  spec.window_y = SizeOf(b[6], (wild & 8) != 0);
  spec.window_width = SizeOf(b[7], (wild & 16) != 0);
  spec.window_height = SizeOf(b[8], (wild & 32) != 0);
  spec.pad_x = b[9];
  spec.pad_y = b[10];
  spec.fill = {b[11], b[12], b[13]};
  return spec;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < kSpecBytes) return 0;
  const saccade::ResizeSpec spec = SpecOf({data, kSpecBytes});
  const std::span<const uint8_t> bytes(data + kSpecBytes, size - kSpecBytes);
  const saccade::ImageLimits limits{
      .max_bytes = 1 << 16, .max_width = 300, .max_height = 200, .max_pixels = 40'000};
  const absl::StatusOr<saccade::Rgb8Image> whole = saccade::DecodeImage(bytes, limits);
  const auto rows = saccade::OpenImage(bytes, limits);
  if (!rows.ok()) {
    if (whole.ok()) std::abort();
    return 0;
  }
  const auto fused = saccade::ResizeWindow(**rows, spec);
  if (!whole.ok()) {
    if (fused.ok()) std::abort();  // damage in a late row is not forgotten
    return 0;
  }
  saccade::PixelRows pixels(*whole);
  const auto plain = saccade::ResizeWindow(pixels, spec, saccade::ResizeKernels::kScalar);
  if (fused.ok() != plain.ok()) std::abort();
  if (!fused.ok()) return 0;
  if (fused->width != spec.window_width || fused->height != spec.window_height) std::abort();
  if (fused->rgb != plain->rgb) std::abort();
  return 0;
}
