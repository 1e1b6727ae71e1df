#pragma once
// A camera frame as a model takes it: resized to its input, in the pixels its CameraSpec names.
#include <cstdint>
#include <utility>

#include "base/pixels.h"
#include "model/image_decode.h"
#include "tensor/tensor.h"

namespace saccade {

struct ModelImage {
  ModelImage() = default;
  // NOLINTNEXTLINE(google-explicit-constructor): 8-bit pixels are what most preprocessors give
  ModelImage(Rgb8Image image)
      : width(image.width), height(image.height), rgb(std::move(image.rgb)) {}

  uint32_t width = 0;        // pixels
  uint32_t height = 0;       // pixels
  DType dtype = DType::kU8;  // or kF32: normalised already, nothing but the patches is left to do
  Pixels rgb;                // [height, width, 3] of that type, row-major, no padding
};

// All of it one gray, for runs whose answer nobody reads.
ModelImage GrayImage(uint32_t width, uint32_t height, DType dtype, uint8_t level);

}  // namespace saccade
