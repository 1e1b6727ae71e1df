#include "model/preprocess.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "base/strings.h"
#include "model/checkpoint.h"

namespace saccade {
namespace {

constexpr std::string_view kFileName = "preprocessor_config.json";
constexpr int64_t kMaxSide = 4096;
constexpr size_t kMaxTowers = 8;

// Everything that happens to a frame before normalisation, for one tower.
struct Geometry {
  uint32_t width = 0;
  uint32_t height = 0;
  uint32_t resize_width = 0;
  uint32_t resize_height = 0;
  uint32_t short_side = 0;
  ResizeFilter filter = ResizeFilter::kBicubic;
  friend bool operator==(const Geometry&, const Geometry&) = default;
};

// A size as torchvision takes it: one number, or [height, width].
absl::StatusOr<std::vector<int64_t>> SizeOf(const JsonView& value) {
  if (!value.json().is_array()) {
    ASSIGN_OR_RETURN(const int64_t side, value.AsInt(1, kMaxSide));
    return std::vector<int64_t>{side};
  }
  ASSIGN_OR_RETURN(std::vector<int64_t> size, value.AsInts(1, kMaxSide));
  if (size.empty() || size.size() > 2) return value.Error("expected a number or [height, width]");
  return size;
}

absl::StatusOr<ResizeFilter> FilterOf(const JsonView& value) {
  if (value.json().is_string()) {
    ASSIGN_OR_RETURN(const std::string name, value.AsString());
    if (name == "bilinear") return ResizeFilter::kBilinear;
    if (name == "bicubic") return ResizeFilter::kBicubic;
    if (name == "lanczos") return ResizeFilter::kLanczos;
    return absl::UnimplementedError(StrCat(value.origin(), ": ", value.path(), ": interpolation \"",
                                           name, "\" is not supported"));
  }
  ASSIGN_OR_RETURN(const int64_t mode, value.AsInt(0, 5));  // PIL.Image.Resampling
  switch (mode) {
    case 1:
      return ResizeFilter::kLanczos;
    case 2:
      return ResizeFilter::kBilinear;
    case 3:
      return ResizeFilter::kBicubic;
    default:
      return absl::UnimplementedError(StrCat(value.origin(), ": ", value.path(),
                                             ": PIL resampling mode ", mode, " is not supported"));
  }
}

absl::StatusOr<std::array<float, 3>> Triple(const JsonView& value, bool positive) {
  ASSIGN_OR_RETURN(const std::vector<double> values, value.AsDoubles());
  if (values.size() != 3) return value.Error(StrCat("expected 3 values, got ", values.size()));
  std::array<float, 3> triple{};
  for (size_t i = 0; i < 3; ++i) {
    triple[i] = static_cast<float>(values[i]);
    if (!std::isfinite(triple[i]) || (positive && triple[i] <= 0.0F)) {
      return value.Error(StrCat("element ", i, " is out of range"));
    }
  }
  return triple;
}

// The i-th element of the array `key`.
absl::StatusOr<JsonView> Element(const JsonView& root, std::string_view key, size_t i) {
  ASSIGN_OR_RETURN(const JsonView array, root.Get(key));
  return array.At(i);
}

absl::StatusOr<Geometry> TowerGeometry(const JsonView& root, const std::string& strategy,
                                       size_t tower) {
  Geometry g;
  ASSIGN_OR_RETURN(const JsonView input_view, Element(root, "input_sizes", tower));
  ASSIGN_OR_RETURN(const std::vector<int64_t> input, input_view.AsInts(1, kMaxSide));
  if (input.size() != 3 || input[0] != 3) return input_view.Error("expected [3, height, width]");
  std::vector<int64_t> crop = {input[1], input[2]};
  if (root.Has("tvf_crop_params")) {
    ASSIGN_OR_RETURN(const JsonView params, Element(root, "tvf_crop_params", tower));
    ASSIGN_OR_RETURN(const JsonView output, params.Get("output_size"));
    ASSIGN_OR_RETURN(crop, SizeOf(output));
    if (crop.size() == 1) crop.push_back(crop[0]);
    if (crop[0] != input[1] || crop[1] != input[2]) {
      return output.Error("differs from input_sizes");
    }
  }
  g.height = static_cast<uint32_t>(crop[0]);
  g.width = static_cast<uint32_t>(crop[1]);

  std::vector<int64_t> size;
  if (root.Has("tvf_resize_params")) {
    ASSIGN_OR_RETURN(const JsonView params, Element(root, "tvf_resize_params", tower));
    if (params.Has("max_size")) {
      return absl::UnimplementedError(
          StrCat(root.origin(), ": ", params.path(), ".max_size: is not supported"));
    }
    ASSIGN_OR_RETURN(const JsonView size_view, params.Get("size"));
    ASSIGN_OR_RETURN(size, SizeOf(size_view));
    ASSIGN_OR_RETURN(const JsonView mode, params.Get("interpolation"));
    ASSIGN_OR_RETURN(g.filter, FilterOf(mode));
  } else {
    ASSIGN_OR_RETURN(const JsonView name, Element(root, "interpolations", tower));
    ASSIGN_OR_RETURN(g.filter, FilterOf(name));
    if (strategy == "resize-naive") {
      size = {crop[0], crop[1]};
    } else if (crop[0] == crop[1]) {
      size = {crop[0]};
    } else {
      return absl::UnimplementedError(
          StrCat(root.origin(), ": ", strategy, " to a size that is not square"));
    }
  }
  if (size.size() == 2) {
    if (strategy != "resize-naive") {
      return root.Error(
          StrCat("image_resize_strategy is ", strategy, ", but tvf_resize_params sets both sides"));
    }
    g.resize_height = static_cast<uint32_t>(size[0]);
    g.resize_width = static_cast<uint32_t>(size[1]);
  } else {
    if (strategy == "resize-naive") {
      return root.Error(
          "image_resize_strategy is resize-naive, but tvf_resize_params sets one side only");
    }
    g.short_side = static_cast<uint32_t>(size[0]);
  }
  const uint32_t low_height = g.short_side > 0 ? g.short_side : g.resize_height;
  const uint32_t low_width = g.short_side > 0 ? g.short_side : g.resize_width;
  if (low_height < g.height || low_width < g.width) {
    return absl::UnimplementedError(
        StrCat(root.origin(), ": a crop larger than the resized image is not supported"));
  }
  return g;
}

// Python's round(): halves go to the even neighbour.
int64_t RoundHalf(int64_t twice) {
  const int64_t floor = twice / 2;  // twice >= 0
  return twice % 2 == 0 ? floor : floor + (floor % 2);
}

}  // namespace

std::string KnownResizeStrategies() {
  std::string names;
  for (const std::string_view name : kResizeStrategies) {
    StrAppend(&names, names.empty() ? "" : ", ", name);
  }
  return names;
}

absl::StatusOr<Preprocessor> Preprocessor::Load(const Checkpoint& checkpoint) {
  ASSIGN_OR_RETURN(const std::optional<Json> config, checkpoint.OptionalJson(kFileName));
  if (!config) {
    return absl::NotFoundError(StrCat(checkpoint.dir(), "/", kFileName, ": no such file"));
  }
  return FromJson(*config, kFileName);
}

absl::StatusOr<Preprocessor> Preprocessor::FromJson(const Json& config, std::string_view origin) {
  const JsonView root(config, origin);
  ASSIGN_OR_RETURN(const std::string type, root.String("image_processor_type"));
  if (type != "PrismaticImageProcessor") {
    return absl::UnimplementedError(
        StrCat(origin, ": image_processor_type: \"", type, "\" is not supported"));
  }
  ASSIGN_OR_RETURN(const std::string strategy, root.String("image_resize_strategy"));
  const auto* known = std::find(kResizeStrategies.begin(), kResizeStrategies.end(), strategy);
  if (known == kResizeStrategies.end()) {
    return absl::UnimplementedError(StrCat(origin, ": image_resize_strategy: unknown \"", strategy,
                                           "\"; known: ", KnownResizeStrategies()));
  }
  ASSIGN_OR_RETURN(const JsonView sizes, root.Get("input_sizes"));
  ASSIGN_OR_RETURN(const size_t towers, sizes.ArraySize());
  if (towers < 1 || towers > kMaxTowers) {
    return sizes.Error(StrCat("expected 1 to ", kMaxTowers, " towers, got ", towers));
  }

  Preprocessor result;
  ASSIGN_OR_RETURN(const Geometry geometry, TowerGeometry(root, strategy, 0));
  for (size_t i = 1; i < towers; ++i) {
    ASSIGN_OR_RETURN(const Geometry other, TowerGeometry(root, strategy, i));
    if (!(other == geometry)) {
      return absl::UnimplementedError(
          StrCat(origin, ": towers 0 and ", i, " resize frames differently"));
    }
  }
  result.strategy_ = *known;
  result.width_ = geometry.width;
  result.height_ = geometry.height;
  result.resize_width_ = geometry.resize_width;
  result.resize_height_ = geometry.resize_height;
  result.short_side_ = geometry.short_side;
  result.filter_ = geometry.filter;

  for (size_t i = 0; i < towers; ++i) {
    TowerNormalization tower;
    if (root.Has("tvf_normalize_params")) {
      ASSIGN_OR_RETURN(const JsonView params, Element(root, "tvf_normalize_params", i));
      ASSIGN_OR_RETURN(const JsonView mean, params.Get("mean"));
      ASSIGN_OR_RETURN(const JsonView std, params.Get("std"));
      ASSIGN_OR_RETURN(tower.mean, Triple(mean, /*positive=*/false));
      ASSIGN_OR_RETURN(tower.std, Triple(std, /*positive=*/true));
    } else {
      ASSIGN_OR_RETURN(const JsonView mean, Element(root, "means", i));
      ASSIGN_OR_RETURN(const JsonView std, Element(root, "stds", i));
      ASSIGN_OR_RETURN(tower.mean, Triple(mean, /*positive=*/false));
      ASSIGN_OR_RETURN(tower.std, Triple(std, /*positive=*/true));
    }
    result.towers_.push_back(tower);
  }

  ASSIGN_OR_RETURN(result.letterbox_, root.Bool("tvf_do_letterbox", strategy == "letterbox"));
  if (result.letterbox_ != (strategy == "letterbox")) {
    return root.Error(
        StrCat("image_resize_strategy is ", strategy, ", but tvf_do_letterbox says otherwise"));
  }
  if (result.letterbox_) {
    if (root.Has("tvf_letterbox_fill")) {
      ASSIGN_OR_RETURN(const JsonView fill_view, root.Get("tvf_letterbox_fill"));
      ASSIGN_OR_RETURN(const std::vector<int64_t> fill, fill_view.AsInts(0, 255));
      if (fill.size() != 3) return fill_view.Error("expected 3 values");
      for (size_t c = 0; c < 3; ++c) result.fill_[c] = static_cast<uint8_t>(fill[c]);
    } else {
      // The reference keeps the fill of the last tower it looks at.
      ASSIGN_OR_RETURN(const JsonView means, Element(root, "means", towers - 1));
      ASSIGN_OR_RETURN(const std::vector<double> mean, means.AsDoubles());
      if (mean.size() != 3) return means.Error("expected 3 values");
      for (size_t c = 0; c < 3; ++c) {
        const double value = mean[c] * 255;
        if (!(value >= 0 && value < 256)) return means.Error("expected values in [0, 1]");
        result.fill_[c] = static_cast<uint8_t>(value);
      }
    }
  }
  return result;
}

absl::StatusOr<Rgb8Image> Preprocessor::Apply(ImageRows& rows) const {
  if (rows.width() == 0 || rows.height() == 0) return InvalidField("image", "empty");
  ResizeSpec spec;
  spec.filter = filter_;
  spec.window_width = width_;
  spec.window_height = height_;
  int64_t width = rows.width();
  int64_t height = rows.height();
  if (letterbox_) {
    const int64_t side = std::max(width, height);
    spec.fill = fill_;
    spec.pad_x = static_cast<uint32_t>((side - width) / 2);
    spec.pad_y = static_cast<uint32_t>((side - height) / 2);
    width += 2 * static_cast<int64_t>(spec.pad_x);
    height += 2 * static_cast<int64_t>(spec.pad_y);
  }
  if (short_side_ > 0) {
    // torchvision: int(size * long / short) in double precision.
    const auto [low, high] = std::minmax(width, height);
    const auto long_side =
        static_cast<int64_t>(static_cast<double>(short_side_ * high) / static_cast<double>(low));
    spec.width = width <= height ? short_side_ : long_side;
    spec.height = width <= height ? long_side : short_side_;
  } else {
    spec.width = resize_width_;
    spec.height = resize_height_;
  }
  spec.window_x = RoundHalf(spec.width - width_);
  spec.window_y = RoundHalf(spec.height - height_);
  return ResizeWindow(rows, spec);
}

}  // namespace saccade
