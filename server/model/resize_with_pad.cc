#include "model/resize_with_pad.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/strings.h"

namespace saccade {
namespace {

constexpr uint64_t kMaxPixels = uint64_t{1} << 26;

// The two input samples of one output sample and their weights: torch's
// area_pixel_compute_source_index and guard_index_and_lambda, in F32, the index with one rounding
// as torch's builds for AVX2 have it (2e-6 closer).
struct Blend {
  uint32_t first = 0;
  uint32_t second = 0;
  float first_weight = 1;
  float second_weight = 0;
};

std::vector<Blend> Blends(uint32_t in, uint32_t out) {
  std::vector<Blend> blends(out);
  const float scale = static_cast<float>(in) / static_cast<float>(out);
  for (uint32_t i = 0; i < out; ++i) {
    Blend& blend = blends[i];
    if (in == out) {
      blend.first = blend.second = i;
      continue;
    }
    const float at = std::max(std::fma(scale, static_cast<float>(i) + 0.5F, -0.5F), 0.0F);
    blend.first = std::min(static_cast<uint32_t>(at), in - 1);
    blend.second = std::min(blend.first + 1, in - 1);
    blend.second_weight = std::clamp(at - static_cast<float>(blend.first), 0.0F, 1.0F);
    blend.first_weight = 1.0F - blend.second_weight;
  }
  return blends;
}

// pixel / 255.
std::array<float, 256> Units() {
  std::array<float, 256> units{};
  for (size_t i = 0; i < units.size(); ++i) units[i] = static_cast<float>(i) / 255.0F;
  return units;
}

// Rows of the input, resampled horizontally as they come. Keeps the last two.
class WideRows {
 public:
  WideRows(ImageRows& image, uint32_t width)
      : image_(image), across_(Blends(image.width(), width)) {
    for (std::vector<float>& row : rows_) row.resize(size_t{width} * 3);
  }

  // Row y; at least as far down as the row before the last one asked for.
  absl::StatusOr<const float*> Row(uint32_t y) {
    for (; next_ <= y; ++next_) {
      ASSIGN_OR_RETURN(const uint8_t* source, image_.Next());
      if (next_ + 1 < y) continue;  // neither this row nor the one before it: nobody asks for it
      Pass(source, rows_[next_ % 2].data());
    }
    return rows_[y % 2].data();
  }
  absl::Status Finish() {
    for (; next_ < image_.height(); ++next_) RETURN_IF_ERROR(image_.Next().status());
    return image_.Finish();
  }

 private:
  void Pass(const uint8_t* in, float* out) const {
    for (const Blend& blend : across_) {
      const uint8_t* const a = in + size_t{blend.first} * 3;
      const uint8_t* const b = in + size_t{blend.second} * 3;
      for (size_t c = 0; c < 3; ++c) {
        *out++ = blend.first_weight * units_[a[c]] + blend.second_weight * units_[b[c]];
      }
    }
  }

  ImageRows& image_;
  const std::vector<Blend> across_;
  const std::array<float, 256> units_ = Units();
  std::array<std::vector<float>, 2> rows_;  // row y at y % 2
  uint32_t next_ = 0;
};

}  // namespace

absl::StatusOr<PaddedPlace> PlaceWithPad(uint32_t width, uint32_t height, uint32_t to_width,
                                         uint32_t to_height, PadSide side) {
  if (width == 0 || height == 0) return InvalidField("image", "empty");
  const double ratio = std::max(static_cast<double>(width) / static_cast<double>(to_width),
                                static_cast<double>(height) / static_cast<double>(to_height));
  PaddedPlace place;
  place.width = std::min(static_cast<uint32_t>(static_cast<double>(width) / ratio), to_width);
  place.height = std::min(static_cast<uint32_t>(static_cast<double>(height) / ratio), to_height);
  if (place.width == 0 || place.height == 0) {
    return InvalidField(
        "image", StrCat(width, " x ", height, " pixels leave nothing when resized to ", to_width,
                        " x ", to_height));
  }
  const uint32_t share = side == PadSide::kCentered ? 2 : 1;
  place.left = (to_width - place.width) / share;
  place.top = (to_height - place.height) / share;
  return place;
}

absl::StatusOr<ModelImage> ResizeInto(ImageRows& rows, const PaddedPlace& place, uint32_t to_width,
                                      uint32_t to_height) {
  if (rows.width() == 0 || rows.height() == 0) return InvalidField("image", "empty");
  const bool inside = place.width >= 1 && place.height >= 1 && place.left <= to_width &&
                      place.top <= to_height && place.width <= to_width - place.left &&
                      place.height <= to_height - place.top;
  if (!inside || uint64_t{to_width} * to_height > kMaxPixels) {
    return InvalidField("image",
                        StrCat(place.width, " x ", place.height, " pixels at (", place.left, ", ",
                               place.top, ") do not fit ", to_width, " x ", to_height));
  }
  ModelImage image;
  image.width = to_width;
  image.height = to_height;
  image.dtype = DType::kF32;
  const size_t row_bytes = size_t{to_width} * 3 * sizeof(float);
  image.rgb.resize(size_t{to_height} * row_bytes);

  const std::vector<Blend> down = Blends(rows.height(), place.height);
  WideRows wide(rows, place.width);
  std::vector<float> line(size_t{to_width} * 3, -1.0F);
  float* const picture = line.data() + size_t{place.left} * 3;
  const size_t values = size_t{place.width} * 3;
  const std::vector<float> border = line;
  for (uint32_t y = 0; y < to_height; ++y) {
    uint8_t* const out = image.rgb.data() + size_t{y} * row_bytes;
    if (y < place.top || y >= place.top + place.height) {
      std::memcpy(out, border.data(), row_bytes);
      continue;
    }
    const Blend& blend = down[y - place.top];
    ASSIGN_OR_RETURN(const float* const b, wide.Row(blend.second));
    ASSIGN_OR_RETURN(const float* const a, wide.Row(blend.first));
    for (size_t i = 0; i < values; ++i) {
      picture[i] = (blend.first_weight * a[i] + blend.second_weight * b[i]) * 2.0F - 1.0F;
    }
    std::memcpy(out, line.data(), row_bytes);
  }
  RETURN_IF_ERROR(wide.Finish());
  return image;
}

absl::StatusOr<ModelImage> ResizeWithPad(ImageRows& rows, uint32_t to_width, uint32_t to_height,
                                         PadSide side) {
  ASSIGN_OR_RETURN(const PaddedPlace place,
                   PlaceWithPad(rows.width(), rows.height(), to_width, to_height, side));
  return ResizeInto(rows, place, to_width, to_height);
}

}  // namespace saccade
