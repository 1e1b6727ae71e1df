#include "model/resize.h"

#include <algorithm>
#include <random>
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

Rgb8Image Noise(uint32_t width, uint32_t height, uint32_t seed) {
  std::mt19937 random(seed);
  Rgb8Image image{width, height, Pixels(size_t{width} * height * 3, 0)};
  // Mostly extremes, which is where clipping and overflow would show.
  for (uint8_t& v : image.rgb) {
    const uint32_t r = random();
    v = (r & 3) == 0 ? static_cast<uint8_t>(r >> 8) : (r & 4) != 0 ? 255 : 0;
  }
  return image;
}

absl::StatusOr<Rgb8Image> ResizeWindow(const Rgb8Image& image, const ResizeSpec& spec,
                                       ResizeKernels kernels = BestResizeKernels()) {
  PixelRows rows(image);
  return saccade::ResizeWindow(rows, spec, kernels);
}

absl::StatusOr<Rgb8Image> ResizeWindowScalar(const Rgb8Image& image, const ResizeSpec& spec) {
  return ResizeWindow(image, spec, ResizeKernels::kScalar);
}

TEST(ResizeTest, EqualsPillowBitForBit) {
  const auto file = SafetensorsFile::Open(kData + "resize.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  const std::pair<const char*, ResizeFilter> filters[] = {{"bicubic", ResizeFilter::kBicubic},
                                                          {"bilinear", ResizeFilter::kBilinear},
                                                          {"lanczos", ResizeFilter::kLanczos}};
  int compared = 0;
  for (const auto& [name, entry] : file->entries()) {
    for (const auto& [filter_name, filter] : filters) {
      const size_t at = name.find(std::string(".pil_") + filter_name);
      if (at == std::string::npos) continue;
      const Rgb8Image in = ImageOf(*file, name.substr(0, at) + ".in_u8");
      const Rgb8Image expected = ImageOf(*file, name);
      const auto out = Resize(in, expected.width, expected.height, filter);
      ASSERT_TRUE(out.ok()) << out.status();
      EXPECT_TRUE(out->rgb == expected.rgb) << name;
      ++compared;
    }
  }
  EXPECT_EQ(compared, 15);
}

TEST(ResizeTest, TheSameSizeIsACopy) {
  const Rgb8Image in = Noise(37, 23, 1);
  for (const auto filter :
       {ResizeFilter::kBilinear, ResizeFilter::kBicubic, ResizeFilter::kLanczos}) {
    EXPECT_EQ(Resize(in, 37, 23, filter)->rgb, in.rgb);
  }
}

TEST(ResizeTest, ShrinkingAntialiases) {
  // One-pixel checkerboard: without a widened filter it would come out as 0 and 255.
  Rgb8Image in{672, 672, Pixels(size_t{672} * 672 * 3, 0)};
  for (size_t i = 0; i < in.rgb.size(); ++i) {
    const size_t pixel = i / 3;
    in.rgb[i] = (pixel / 672 + pixel % 672) % 2 == 0 ? 255 : 0;
  }
  const auto out = Resize(in, 224, 224, ResizeFilter::kBilinear);
  ASSERT_TRUE(out.ok());
  const auto [low, high] = std::minmax_element(out->rgb.begin(), out->rgb.end());
  EXPECT_GE(*low, 126);
  EXPECT_LE(*high, 129);
}

TEST(ResizeTest, EveryKernelAndWindowAgreesWithTheScalarWhole) {
  std::mt19937 random(7);
  const auto pick = [&random](uint32_t low, uint32_t high) {
    return low + random() % (high - low + 1);
  };
  for (int round = 0; round < 400; ++round) {
    const Rgb8Image in = Noise(pick(1, 70), pick(1, 70), round);
    ResizeSpec spec;
    spec.filter = static_cast<ResizeFilter>(round % 3);
    if (round % 4 == 0) {
      spec.pad_x = pick(0, 9);
      spec.pad_y = pick(0, 9);
      spec.fill = {17, 0, 255};
    }
    const uint32_t padded_width = in.width + 2 * spec.pad_x;
    const uint32_t padded_height = in.height + 2 * spec.pad_y;
    spec.width = round % 5 == 0 ? padded_width : pick(1, 90);
    spec.height = round % 7 == 0 ? padded_height : pick(1, 90);
    // The whole, from a padded copy and scalar kernels.
    Rgb8Image padded{padded_width, padded_height, {}};
    for (int64_t y = 0; y < padded_height; ++y) {
      for (int64_t x = 0; x < padded_width; ++x) {
        const int64_t sx = x - spec.pad_x;
        const int64_t sy = y - spec.pad_y;
        const bool inside = sx >= 0 && sy >= 0 && sx < in.width && sy < in.height;
        for (int64_t c = 0; c < 3; ++c) {
          padded.rgb.push_back(inside ? in.rgb[static_cast<size_t>((sy * in.width + sx) * 3 + c)]
                                      : spec.fill[static_cast<size_t>(c)]);
        }
      }
    }
    ResizeSpec whole_spec;
    whole_spec.filter = spec.filter;
    whole_spec.width = whole_spec.window_width = spec.width;
    whole_spec.height = whole_spec.window_height = spec.height;
    const auto whole = ResizeWindowScalar(padded, whole_spec);
    ASSERT_TRUE(whole.ok()) << whole.status();

    spec.window_x = pick(0, static_cast<uint32_t>(spec.width) - 1);
    spec.window_y = pick(0, static_cast<uint32_t>(spec.height) - 1);
    spec.window_width = pick(1, static_cast<uint32_t>(spec.width - spec.window_x));
    spec.window_height = pick(1, static_cast<uint32_t>(spec.height - spec.window_y));
    const auto fast = ResizeWindow(in, spec);
    const auto slow = ResizeWindowScalar(in, spec);
    ASSERT_TRUE(fast.ok()) << fast.status();
    ASSERT_TRUE(slow.ok());
    ASSERT_EQ(fast->rgb, slow->rgb) << round;
    ASSERT_EQ(ResizeWindow(in, spec, ResizeKernels::kSse41)->rgb, slow->rgb) << round;
    for (int64_t y = 0; y < spec.window_height; ++y) {
      const auto* expected =
          whole->rgb.data() + ((y + spec.window_y) * spec.width + spec.window_x) * 3;
      ASSERT_TRUE(std::equal(expected, expected + spec.window_width * 3,
                             fast->rgb.data() + y * spec.window_width * 3))
          << round << " row " << y;
    }
  }
}

// White rows of which one, or the end behind the last one, is damaged.
class DamagedRows final : public ImageRows {
 public:
  DamagedRows(uint32_t height, uint32_t damaged)
      : ImageRows(8, height), damaged_(damaged), row_(8 * 3 + kSlack, 255) {}
  absl::StatusOr<const uint8_t*> Next() override {
    if (taken_++ == damaged_) return InvalidField("image", "damaged row");
    return row_.data();
  }
  absl::Status Finish() override {
    return damaged_ == height() ? InvalidField("image", "damaged end") : absl::OkStatus();
  }
  uint32_t taken() const { return taken_; }

 private:
  const uint32_t damaged_;
  uint32_t taken_ = 0;
  std::vector<uint8_t> row_;
};

TEST(ResizeTest, APictureIsGoodOnlyAsAWhole) {
  ResizeSpec spec;  // rows 8 to 11 of 20, as they are
  spec.width = 8;
  spec.height = 20;
  spec.window_y = 8;
  spec.window_width = 8;
  spec.window_height = 4;
  for (uint32_t damaged = 0; damaged <= 20; ++damaged) {
    DamagedRows rows(20, damaged);
    const absl::Status status = saccade::ResizeWindow(rows, spec).status();
    EXPECT_EQ(status.message(), damaged == 20 ? "image: damaged end" : "image: damaged row");
    EXPECT_EQ(rows.taken(), std::min(damaged + 1, 20U));
  }
  DamagedRows whole(20, 21);
  EXPECT_TRUE(saccade::ResizeWindow(whole, spec).ok());
  EXPECT_EQ(whole.taken(), 20U);
}

TEST(ResizeTest, LongTapsStayExact) {
  // More than 2048 taps: the split sums wrap on their way, the total must not.
  for (const auto& [w, h] : {std::pair{9001U, 1U}, std::pair{1U, 9001U}}) {
    Rgb8Image in{w, h, Pixels(size_t{w} * h * 3, 255)};
    ResizeSpec spec;
    spec.width = spec.height = spec.window_width = spec.window_height = 1;
    EXPECT_EQ(ResizeWindow(in, spec)->rgb, (Pixels{255, 255, 255}));
    in = Noise(w, h, 3);
    EXPECT_EQ(ResizeWindow(in, spec)->rgb, ResizeWindowScalar(in, spec)->rgb);
  }
}

TEST(ResizeTest, AWindowOfAHugeImageIsCheap) {
  // Short side to 224 of a 1 x 20000 frame: 4.48 million rows, of which 224 are computed.
  const Rgb8Image in = Noise(1, 20000, 5);
  ResizeSpec spec;
  spec.width = spec.window_width = spec.window_height = 224;
  spec.height = 4480000;
  spec.window_y = (spec.height - 224) / 2;
  const auto out = ResizeWindow(in, spec);
  ASSERT_TRUE(out.ok()) << out.status();
  EXPECT_EQ(out->rgb.size(), size_t{224} * 224 * 3);
}

TEST(ResizeTest, RefusesWhatCannotBe) {
  const Rgb8Image in = Noise(4, 4, 1);
  const auto code = [](const Rgb8Image& image, const ResizeSpec& spec) {
    return ResizeWindow(image, spec).status().code();
  };
  ResizeSpec good;
  good.width = good.height = good.window_width = good.window_height = 2;
  ASSERT_TRUE(ResizeWindow(in, good).ok());
  const auto with = [&good](auto&& change) {
    ResizeSpec spec = good;
    change(spec);
    return spec;
  };
  const ResizeSpec bad[] = {
      with([](ResizeSpec& s) { s.width = 0; }),
      with([](ResizeSpec& s) { s.height = -1; }),
      with([](ResizeSpec& s) { s.width = int64_t{1} << 40; }),
      with([](ResizeSpec& s) { s.window_x = -1; }),
      with([](ResizeSpec& s) { s.window_x = 1; }),
      with([](ResizeSpec& s) { s.window_y = 3; }),
      with([](ResizeSpec& s) { s.window_width = 0; }),
      with([](ResizeSpec& s) { s.window_width = 3; }),
      with([](ResizeSpec& s) { s.window_y = INT64_MAX; }),
      with([](ResizeSpec& s) { s.window_height = INT64_MAX; }),
      with([](ResizeSpec& s) { s.pad_x = UINT32_MAX; }),
      with([](ResizeSpec& s) { s.width = s.height = s.window_width = s.window_height = 1 << 20; }),
  };
  for (const ResizeSpec& spec : bad) {
    EXPECT_EQ(code(in, spec), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(code(Rgb8Image{}, good), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Rgb8Image{4, 4, Pixels(47, 0)}, good), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace saccade
