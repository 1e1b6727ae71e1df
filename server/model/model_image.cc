#include "model/model_image.h"

#include <cstring>

namespace saccade {

ModelImage GrayImage(uint32_t width, uint32_t height, DType dtype, uint8_t level) {
  ModelImage image;
  image.width = width;
  image.height = height;
  image.dtype = dtype;
  const size_t values = size_t{width} * height * 3;
  image.rgb.assign(values * DTypeSize(dtype), level);
  if (dtype == DType::kU8) return image;
  const float value = static_cast<float>(level) / 127.5F - 1.0F;
  for (size_t i = 0; i < values; ++i) {
    std::memcpy(image.rgb.data() + i * sizeof(value), &value, sizeof(value));
  }
  return image;
}

}  // namespace saccade
