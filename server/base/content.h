#pragma once
// A camera frame after decode and resize, interned: two frames with the same pixels are one object.
// Identity is decided once, where the bytes are (session/content_store), so the core compares
// pointers and never touches pixels.
#include <cstdint>
#include <memory>

#include "base/digest.h"
#include "base/memory_budget.h"
#include "base/pixels.h"

namespace saccade {

struct Content {
  Digest128 digest;    // of the fields below, domain "frame.v1"
  uint32_t width = 0;  // pixels, after resize to the model's input
  uint32_t height = 0;
  Pixels rgb;         // [height, width, 3] in the dtype of the model's camera
  MemoryHold memory;  // of the pixels
};
using ContentRef = std::shared_ptr<const Content>;

}  // namespace saccade
