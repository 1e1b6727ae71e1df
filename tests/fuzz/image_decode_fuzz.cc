// Any bytes are a camera frame: refused, or decoded to exactly the pixels that the limits allow and
// the header announced.
#include <cstdint>
#include <cstdlib>

#include "model/image_decode.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const saccade::ImageLimits limits{
      .max_bytes = 1 << 16, .max_width = 300, .max_height = 200, .max_pixels = 40'000};
  const std::optional<uint64_t> announced = saccade::PixelsInHeader({data, size});
  const absl::StatusOr<saccade::Rgb8Image> image = saccade::DecodeImage({data, size}, limits);
  if (!image.ok()) return 0;
  const uint64_t pixels = uint64_t{image->width} * image->height;
  if (pixels == 0 || pixels > limits.max_pixels || image->rgb.size() != 3 * pixels) std::abort();
  if (announced != pixels) std::abort();
  return 0;
}
