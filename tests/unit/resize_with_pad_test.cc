#include "model/resize_with_pad.h"

#include <cmath>
#include <cstring>
#include <string>

#include "gtest/gtest.h"
#include "model/safetensors.h"

namespace saccade {
namespace {

const std::string kData = std::string(SACCADE_SOURCE_DIR) + "/tests/data/";

Rgb8Image ImageOf(const SafetensorsFile& file, const std::string& name) {
  const auto view = file.Tensor(name);
  EXPECT_TRUE(view.ok()) << view.status();
  Rgb8Image image;
  if (!view.ok()) return image;
  image.height = static_cast<uint32_t>(view->dim(0));
  image.width = static_cast<uint32_t>(view->dim(1));
  const auto* data = view->As<const uint8_t>();
  image.rgb.assign(data, data + view->bytes());
  return image;
}

float At(const ModelImage& image, size_t y, size_t x, size_t c) {
  float value = 0;
  std::memcpy(&value, image.rgb.data() + ((y * image.width + x) * 3 + c) * sizeof(value),
              sizeof(value));
  return value;
}

// Of a value in [0, 1].
float FromHalf(uint16_t half) {
  const int exponent = half >> 10;
  const int digits = half & 0x3FF;
  if (exponent == 0) return std::ldexp(static_cast<float>(digits), -24);
  return std::ldexp(static_cast<float>(digits + 0x400), exponent - 25);
}

absl::StatusOr<ModelImage> Fit(const Rgb8Image& image, uint32_t width, uint32_t height,
                               PadSide side) {
  PixelRows rows(image);
  return ResizeWithPad(rows, width, height, side);
}

PaddedPlace Place(uint32_t width, uint32_t height, PadSide side) {
  return PlaceWithPad(width, height, 224, 224, side).value();
}

TEST(ResizeWithPadTest, EqualsTheReferencesPixels) {
  const auto file = SafetensorsFile::Open(kData + "resize_with_pad.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  int compared = 0;
  for (const auto& [name, entry] : file->entries()) {
    if (!name.ends_with(".out")) continue;
    const Rgb8Image in = ImageOf(*file, name.substr(0, name.size() - 4) + ".in");
    const TensorView expected = *file->Tensor(name);  // [3, height, width]
    const auto height = static_cast<uint32_t>(expected.dim(1));
    const auto width = static_cast<uint32_t>(expected.dim(2));
    const auto side = name.starts_with("smolvla") ? PadSide::kLeftTop : PadSide::kCentered;
    const auto out = Fit(in, width, height, side);
    ASSERT_TRUE(out.ok()) << out.status();
    ASSERT_EQ(out->dtype, DType::kF32);
    ASSERT_EQ(out->rgb.size(), expected.bytes());
    float worst = 0;
    for (size_t c = 0; c < 3; ++c) {
      for (size_t y = 0; y < height; ++y) {
        for (size_t x = 0; x < width; ++x) {
          const float want = expected.As<const float>()[(c * height + y) * width + x];
          const float got = At(*out, y, x, c);
          worst = std::max(worst, std::abs(got - want));
        }
      }
    }
    EXPECT_LE(worst, 5e-7F) << name;  // torch contracts some sums
    ++compared;
  }
  EXPECT_EQ(compared, 8);
}

// Shrinking reads two pixels of each side and no more, as the reference does.
TEST(ResizeWithPadTest, EqualsTorchWhateverTheAspect) {
  const auto file = SafetensorsFile::Open(kData + "resize_with_pad.safetensors");
  const auto inputs = SafetensorsFile::Open(kData + "resize.safetensors");
  ASSERT_TRUE(file.ok() && inputs.ok());
  int compared = 0;
  for (const auto& [name, entry] : file->entries()) {
    if (!name.ends_with("noaa")) continue;
    const std::string tag = name.substr(0, name.find('.'));
    const Rgb8Image in = ImageOf(*inputs, tag + ".in_u8");
    const uint32_t height = tag.ends_with("37x53") ? 37 : 224;
    const uint32_t width = tag.ends_with("37x53") ? 53 : 224;
    PixelRows rows(in);
    const auto out = ResizeInto(rows, {width, height, 0, 0}, width, height);
    ASSERT_TRUE(out.ok()) << out.status();
    const auto bytes = file->Bytes(name);
    size_t at = 0;
    float worst = 0;
    for (size_t c = 0; c < 3; ++c) {
      for (size_t y = 0; y < height; y += 4) {
        for (size_t x = 0; x < width; x += 4, ++at) {
          uint16_t half = 0;
          std::memcpy(&half, bytes->data() + at * 2, 2);
          const float want = FromHalf(half);
          worst = std::max(worst, std::abs((At(*out, y, x, c) + 1) / 2 - want));
        }
      }
    }
    EXPECT_EQ(at * 2, bytes->size());
    EXPECT_LE(worst, 2.5e-4F) << name;  // half a step of float16
    ++compared;
  }
  EXPECT_EQ(compared, 6);
}

TEST(ResizeWithPadTest, PlacesThePictureAsPythonDoes) {
  using P = PaddedPlace;
  EXPECT_EQ(Place(640, 480, PadSide::kLeftTop), (P{224, 168, 0, 56}));
  EXPECT_EQ(Place(480, 640, PadSide::kLeftTop), (P{168, 224, 56, 0}));
  EXPECT_EQ(Place(640, 480, PadSide::kCentered), (P{224, 168, 0, 28}));
  // 101 x 60: int(60 / (101 / 224)) = 133; 91 left, of which the odd one goes to the bottom.
  EXPECT_EQ(Place(101, 60, PadSide::kCentered), (P{224, 133, 0, 45}));
  EXPECT_EQ(Place(224, 224, PadSide::kCentered), (P{224, 224, 0, 0}));
  EXPECT_EQ(Place(1, 1, PadSide::kLeftTop), (P{224, 224, 0, 0}));
  EXPECT_EQ(Place(224, 1, PadSide::kLeftTop), (P{224, 1, 0, 223}));
}

TEST(ResizeWithPadTest, AFrameOfTheRightSizeIsOnlyScaled) {
  Rgb8Image in{256, 1, Pixels(768, 0)};
  for (size_t i = 0; i < in.rgb.size(); ++i) in.rgb[i] = static_cast<uint8_t>(i / 3);
  const auto out = Fit(in, 256, 1, PadSide::kCentered);
  ASSERT_TRUE(out.ok());
  for (size_t x = 0; x < 256; ++x) {
    EXPECT_EQ(At(*out, 0, x, 2), static_cast<float>(x) / 255.0F * 2.0F - 1.0F);
  }
}

// A third of the size, so the reference reads every third pixel and no other.
TEST(ResizeWithPadTest, ShrinkingDoesNotAntialias) {
  Rgb8Image in{672, 672, Pixels(size_t{672} * 672 * 3, 0)};
  for (size_t i = 0; i < in.rgb.size(); ++i) {
    in.rgb[i] = (i / 3 / 672 + i / 3 % 672) % 2 == 0 ? 255 : 0;
  }
  const auto out = Fit(in, 224, 224, PadSide::kLeftTop);
  ASSERT_TRUE(out.ok());
  for (size_t y = 0; y < 224; ++y) {
    for (size_t x = 0; x < 224; ++x) {
      ASSERT_NEAR(At(*out, y, x, 1), (x + y) % 2 == 0 ? 1.0F : -1.0F, 1e-3F) << x << " " << y;
    }
  }
}

TEST(ResizeWithPadTest, TheBorderIsBlackAndNothingLeavesTheRange) {
  for (const PadSide side : {PadSide::kLeftTop, PadSide::kCentered}) {
    const Rgb8Image white{33, 100, Pixels(size_t{33} * 100 * 3, 255)};
    const auto out = Fit(white, 61, 61, side);
    ASSERT_TRUE(out.ok());
    const PaddedPlace place = PlaceWithPad(33, 100, 61, 61, side).value();
    for (uint32_t x = 0; x < 61; ++x) {
      const bool inside = x >= place.left && x < place.left + place.width;
      for (uint32_t y = 0; y < 61; ++y) EXPECT_EQ(At(*out, y, x, 0), inside ? 1.0F : -1.0F);
    }
  }
}

TEST(ResizeWithPadTest, RefusesWhatLeavesNothing) {
  const auto refused = [](const absl::Status& status) {
    return status.code() == absl::StatusCode::kInvalidArgument &&
           GetErrorInfo(status).field == "image";
  };
  EXPECT_TRUE(refused(Fit({1000, 1, Pixels(3000, 0)}, 224, 224, PadSide::kLeftTop).status()));
  EXPECT_TRUE(refused(Fit({1, 1000, Pixels(3000, 0)}, 224, 224, PadSide::kCentered).status()));
  EXPECT_TRUE(refused(Fit({}, 224, 224, PadSide::kCentered).status()));
  EXPECT_TRUE(refused(Fit({4, 4, Pixels(47, 0)}, 8, 8, PadSide::kCentered).status()));
  EXPECT_TRUE(refused(Fit({4, 4, Pixels(48, 0)}, 0, 8, PadSide::kCentered).status()));
  EXPECT_TRUE(refused(Fit({4, 4, Pixels(48, 0)}, 1 << 14, 1 << 14, PadSide::kCentered).status()));
  const Rgb8Image small{4, 4, Pixels(48, 0)};
  PixelRows rows(small);
  EXPECT_TRUE(refused(ResizeInto(rows, {5, 4, 4, 0}, 8, 4).status()));
}

TEST(GrayImageTest, IsGrayInEveryType) {
  const ModelImage bytes = GrayImage(2, 3, DType::kU8, 127);
  EXPECT_EQ(bytes.rgb, Pixels(18, 127));
  const ModelImage floats = GrayImage(2, 3, DType::kF32, 255);
  ASSERT_EQ(floats.rgb.size(), 72U);
  for (size_t c = 0; c < 3; ++c) EXPECT_EQ(At(floats, 2, 1, c), 1.0F);
}

}  // namespace
}  // namespace saccade
