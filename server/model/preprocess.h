#pragma once
// What happens to a camera frame between decode and the device, from a checkpoint's
// preprocessor_config.json (Prismatic: OpenVLA and its fine-tunes). All of it is uint8 and
// Pillow-exact; (x / 255 - mean) / std runs on the device. One resize, as the checkpoint declares:
//   resize-naive  straight to the input size, aspect ignored
//   resize-crop   short side to the input size (long side int(size * long / short)), centre crop
//   letterbox     pad the short side by int((max - side) / 2) on both ends with int(255 * mean),
//   then resize-crop
// The recorded tvf_* parameters win over the values they were derived from, as in the reference.
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/image_decode.h"
#include "model/json_util.h"
#include "model/resize.h"

namespace saccade {

class Checkpoint;

inline constexpr std::array<std::string_view, 3> kResizeStrategies = {"resize-naive", "resize-crop",
                                                                      "letterbox"};
// Their names for an error, "a, b, c".
std::string KnownResizeStrategies();

// Per-channel normalisation of one vision tower: (x / 255 - mean) / std.
struct TowerNormalization {
  std::array<float, 3> mean{};
  std::array<float, 3> std{};
};

class Preprocessor {
 public:
  // NOT_FOUND: the folder has no preprocessor_config.json. INVALID_ARGUMENT names the key.
  // UNIMPLEMENTED: another kind of processor, or towers whose frames differ before normalisation.
  static absl::StatusOr<Preprocessor> Load(const Checkpoint& checkpoint);
  static absl::StatusOr<Preprocessor> FromJson(const Json& config, std::string_view origin);

  uint32_t width() const { return width_; }  // of the result, pixels
  uint32_t height() const { return height_; }
  std::string_view strategy() const { return strategy_; }  // one of kResizeStrategies
  // In channel order of the model's input: for a fused backbone DINOv2, then SigLIP.
  const std::vector<TowerNormalization>& towers() const { return towers_; }

  // Any image of at least 1 x 1 pixel to width() x height(). Takes all rows. Thread-safe.
  absl::StatusOr<Rgb8Image> Apply(ImageRows& rows) const;

 private:
  Preprocessor() = default;

  std::string_view strategy_;  // a literal of ours
  uint32_t width_ = 0;
  uint32_t height_ = 0;
  uint32_t resize_width_ = 0;  // resize to exactly this
  uint32_t resize_height_ = 0;
  uint32_t short_side_ = 0;  // not 0: resize the short side to this instead
  bool letterbox_ = false;
  std::array<uint8_t, 3> fill_{};
  ResizeFilter filter_ = ResizeFilter::kBicubic;
  std::vector<TowerNormalization> towers_;
};

}  // namespace saccade
