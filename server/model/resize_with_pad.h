#pragma once
// What the lerobot and openpi policies (SmolVLA, pi0, pi0.5, pi0-FAST) do with a camera frame: keep
// its shape, fill the rest with black, scale to [-1, 1]. Their order of operations, in F32:
//   x = pixel / 255
//   torch.nn.functional.interpolate(x, mode="bilinear", align_corners=False, antialias=False)
//   pad with 0, then x * 2 - 1, so the border is -1
// The longer side, measured in target sides, becomes the target's: ratio = max(w / W, h / H), size
// int(w / ratio) x int(h / ratio). A frame of that shape already is only scaled to [-1, 1].
// openpi clamps to [0, 1] before it pads; a weighted mean of values in [0, 1], rounded, cannot
// leave it, so nothing is clamped here.
#include <cstdint>

#include "base/status.h"
#include "model/image_decode.h"
#include "model/model_image.h"

namespace saccade {

enum class PadSide : uint8_t {
  kLeftTop,   // all of the border (SmolVLA)
  kCentered,  // half on each side, the odd pixel right and bottom (pi0)
};

// Where the resized picture lies in the result, pixels.
struct PaddedPlace {
  uint32_t width = 0;  // of the picture
  uint32_t height = 0;
  uint32_t left = 0;  // of its top left corner
  uint32_t top = 0;
  friend bool operator==(const PaddedPlace&, const PaddedPlace&) = default;
};

// A frame of width x height in a result of to_width x to_height, all positive. INVALID_ARGUMENT
// (field "image"): so long and thin that no row or column of it would be left.
absl::StatusOr<PaddedPlace> PlaceWithPad(uint32_t width, uint32_t height, uint32_t to_width,
                                         uint32_t to_height, PadSide side);

// F32 pixels of to_width x to_height; `place` is inside. Takes all rows, keeping two.
// INVALID_ARGUMENT: what the rows say, an empty frame, a place outside of the result, a result over
// 2^26 pixels.
absl::StatusOr<ModelImage> ResizeInto(ImageRows& rows, const PaddedPlace& place, uint32_t to_width,
                                      uint32_t to_height);

// Both. Thread-safe.
absl::StatusOr<ModelImage> ResizeWithPad(ImageRows& rows, uint32_t to_width, uint32_t to_height,
                                         PadSide side);

}  // namespace saccade
