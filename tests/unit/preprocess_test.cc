#include "model/preprocess.h"

#include <cmath>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/checkpoint.h"
#include "model/safetensors.h"

namespace saccade {
namespace {

using ::testing::HasSubstr;

const std::string kTests = std::string(SACCADE_SOURCE_DIR) + "/tests/";

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

// A configuration as the reference writes it, `towers` times the same.
Json Config(const std::string& strategy, int side, int towers = 1) {
  Json config = {{"image_processor_type", "PrismaticImageProcessor"},
                 {"image_resize_strategy", strategy},
                 {"tvf_do_letterbox", strategy == "letterbox"},
                 {"tvf_letterbox_fill", nullptr}};
  if (strategy == "letterbox") config["tvf_letterbox_fill"] = {123, 116, 103};
  for (int i = 0; i < towers; ++i) {
    config["input_sizes"].push_back({3, side, side});
    config["interpolations"].push_back("bicubic");
    config["means"].push_back({0.485, 0.456, 0.406});
    config["stds"].push_back({0.229, 0.224, 0.225});
    config["tvf_crop_params"].push_back({{"output_size", {side, side}}});
    Json size = side;
    if (strategy == "resize-naive") size = {side, side};
    config["tvf_resize_params"].push_back(
        {{"antialias", true}, {"interpolation", 3}, {"max_size", nullptr}, {"size", size}});
    config["tvf_normalize_params"].push_back({{"inplace", false},
                                              {"mean", {0.484375, 0.455078125, 0.40625}},
                                              {"std", {0.25, 0.5, 1.0}}});
  }
  return config;
}

absl::StatusOr<Rgb8Image> Apply(const Preprocessor& preprocessor, const Rgb8Image& image) {
  PixelRows rows(image);
  return preprocessor.Apply(rows);
}

absl::StatusOr<Preprocessor> Make(const Json& config) {
  return Preprocessor::FromJson(config, "preprocessor_config.json");
}

TEST(PreprocessTest, ReproducesTheGoldenPixels) {
  for (const char* name : {"openvla", "openvla_v01"}) {
    const std::string folder = kTests + "golden/data/" + name;
    const auto checkpoint = Checkpoint::Open(folder + "/checkpoint");
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    const auto preprocessor = Preprocessor::Load(*checkpoint);
    ASSERT_TRUE(preprocessor.ok()) << preprocessor.status();
    const auto golden = SafetensorsFile::Open(folder + "/golden.safetensors");
    ASSERT_TRUE(golden.ok()) << golden.status();
    const auto image = Apply(*preprocessor, ImageOf(*golden, "image_u8"));
    ASSERT_TRUE(image.ok()) << image.status();
    const auto expected = golden->Tensor("pixel_values");  // [1, 3 * towers, height, width]
    ASSERT_TRUE(expected.ok());
    const size_t towers = preprocessor->towers().size();
    ASSERT_EQ(expected->dim(1), static_cast<int64_t>(3 * towers));
    ASSERT_EQ(expected->dim(2), preprocessor->height());
    ASSERT_EQ(expected->dim(3), preprocessor->width());
    const size_t pixels = size_t{image->width} * image->height;
    float worst = 0.0F;
    for (size_t channel = 0; channel < 3 * towers; ++channel) {
      const TowerNormalization& tower = preprocessor->towers()[channel / 3];
      for (size_t i = 0; i < pixels; ++i) {
        const float x = static_cast<float>(image->rgb[i * 3 + channel % 3]) / 255.0F;
        const float y = (x - tower.mean[channel % 3]) / tower.std[channel % 3];
        worst = std::max(worst, std::abs(y - expected->As<float>()[channel * pixels + i]));
      }
    }
    EXPECT_LE(worst, 1.5e-5F) << name;
  }
}

TEST(PreprocessTest, EqualsTorchvisionOnOddSizes) {
  const auto file = SafetensorsFile::Open(kTests + "data/preprocess.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  int compared = 0;
  for (const char* strategy : {"resize-naive", "resize-crop", "letterbox"}) {
    const auto preprocessor = Make(Config(strategy, 56));
    ASSERT_TRUE(preprocessor.ok()) << preprocessor.status();
    for (const auto& [name, entry] : file->entries()) {
      const size_t dot = name.rfind(std::string(".") + strategy);
      if (!name.starts_with("case.") || dot == std::string::npos) continue;
      const auto out = Apply(*preprocessor, ImageOf(*file, name.substr(0, dot) + ".in"));
      ASSERT_TRUE(out.ok()) << out.status();
      EXPECT_TRUE(out->rgb == ImageOf(*file, name).rgb) << name;
      ++compared;
    }
  }
  EXPECT_EQ(compared, 30);

  const Rgb8Image in = ImageOf(*file, "in_u8");
  const auto crop = Make(Config("resize-crop", 56));
  EXPECT_TRUE(Apply(*crop, in)->rgb == ImageOf(*file, "resize_crop_u8").rgb);
  Json config = Config("letterbox", 56);
  config["tvf_letterbox_fill"] = {127, 127, 127};
  EXPECT_TRUE(Apply(*Make(config), in)->rgb == ImageOf(*file, "letterbox_resize_crop_u8").rgb);
}

TEST(PreprocessTest, LetterboxPadsBothSidesAndKeepsTheAspect) {
  Json config = Config("letterbox", 224);
  config["tvf_letterbox_fill"] = {0, 0, 0};
  const auto preprocessor = Make(config);
  ASSERT_TRUE(preprocessor.ok());
  const auto rows_of = [&](uint32_t width, uint32_t height) {
    const Rgb8Image white{width, height, Pixels(size_t{width} * height * 3, 255)};
    const auto out = Apply(*preprocessor, white);
    EXPECT_TRUE(out.ok()) << out.status();
    std::pair<int, int> rows = {-1, -1};
    for (int y = 0; y < 224; ++y) {
      if (out->rgb[(static_cast<size_t>(y) * 224 + 112) * 3] < 128) continue;
      if (rows.first < 0) rows.first = y;
      rows.second = y;
    }
    return rows;
  };
  EXPECT_EQ(rows_of(1280, 720), (std::pair{49, 174}));  // 126 rows in the middle
  EXPECT_EQ(rows_of(640, 480), (std::pair{28, 195}));   // 168 rows
  EXPECT_EQ(rows_of(224, 224), (std::pair{0, 223}));
}

TEST(PreprocessTest, AnyFrameGivesTheModelsSize) {
  for (const char* strategy : {"resize-naive", "resize-crop", "letterbox"}) {
    const auto preprocessor = Make(Config(strategy, 224));
    ASSERT_TRUE(preprocessor.ok());
    for (const auto& [w, h] : {std::pair{1U, 1U},
                               {1U, 1000U},
                               {1000U, 1U},
                               {2U, 8192U},
                               {8192U, 2U},
                               {641U, 481U},
                               {480U, 640U},
                               {224U, 224U},
                               {223U, 224U}}) {
      const Rgb8Image in{w, h, Pixels(size_t{w} * h * 3, 200)};
      const auto out = Apply(*preprocessor, in);
      ASSERT_TRUE(out.ok()) << strategy << " " << w << "x" << h << ": " << out.status();
      EXPECT_EQ(out->width, 224U);
      EXPECT_EQ(out->height, 224U);
      EXPECT_EQ(out->rgb.size(), size_t{224} * 224 * 3);
    }
    EXPECT_EQ(Apply(*preprocessor, Rgb8Image{}).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  // An image of the model's size passes unchanged.
  Rgb8Image same{224, 224, Pixels(size_t{224} * 224 * 3, 0)};
  for (size_t i = 0; i < same.rgb.size(); ++i) same.rgb[i] = static_cast<uint8_t>(i * 7);
  EXPECT_EQ(Apply(*Make(Config("resize-naive", 224)), same)->rgb, same.rgb);
}

TEST(PreprocessTest, RecordedParametersWinOverDerivedOnes) {
  const auto recorded = Make(Config("resize-naive", 56, 2));
  ASSERT_TRUE(recorded.ok()) << recorded.status();
  ASSERT_EQ(recorded->towers().size(), 2U);
  EXPECT_EQ(recorded->towers()[1].mean[0], 0.484375F);
  EXPECT_EQ(recorded->towers()[1].std[2], 1.0F);
  // Without them, everything follows from the constructor's arguments.
  for (const char* strategy : {"resize-naive", "resize-crop", "letterbox"}) {
    Json config = Config(strategy, 56, 2);
    for (const char* key : {"tvf_crop_params", "tvf_resize_params", "tvf_normalize_params",
                            "tvf_do_letterbox", "tvf_letterbox_fill"}) {
      config.erase(key);
    }
    const auto derived = Make(config);
    ASSERT_TRUE(derived.ok()) << derived.status();
    EXPECT_EQ(derived->towers()[0].mean[0], 0.485F);
    Rgb8Image in{101, 60, Pixels(size_t{101} * 60 * 3, 0)};
    for (size_t i = 0; i < in.rgb.size(); ++i) in.rgb[i] = static_cast<uint8_t>(i * 31);
    // int(255 * mean) is (123, 116, 103), the fill that Config() records.
    EXPECT_EQ(Apply(*derived, in)->rgb, Apply(*Make(Config(strategy, 56)), in)->rgb);
  }
}

TEST(PreprocessTest, RefusesWhatItWouldGetWrong) {
  const auto expect = [](absl::StatusCode code, const std::string& part, auto&& change) {
    Json config = Config("resize-naive", 56, 2);
    change(config);
    const absl::Status status = Make(config).status();
    EXPECT_EQ(status.code(), code) << part << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  };
  constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  expect(kUnimplemented, "image_processor_type",
         [](Json& c) { c["image_processor_type"] = "CLIPImageProcessor"; });
  expect(kUnimplemented, "image_resize_strategy",
         [](Json& c) { c["image_resize_strategy"] = "x"; });
  expect(kUnimplemented, "differently",
         [](Json& c) { c["tvf_resize_params"][1]["interpolation"] = 2; });
  expect(kUnimplemented, "differently", [](Json& c) {
    c["input_sizes"][1] = {3, 28, 28};
    c["tvf_crop_params"][1]["output_size"] = {28, 28};
    c["tvf_resize_params"][1]["size"] = {28, 28};
  });
  expect(kUnimplemented, "max_size", [](Json& c) { c["tvf_resize_params"][0]["max_size"] = 9; });
  expect(kUnimplemented, "mode 0", [](Json& c) { c["tvf_resize_params"][0]["interpolation"] = 0; });
  expect(kUnimplemented, "crop larger", [](Json& c) {
    c["tvf_resize_params"][0]["size"] = {28, 56};
  });
  expect(kInvalid, "interpolation",
         [](Json& c) { c["tvf_resize_params"][0]["interpolation"] = 9; });
  expect(kInvalid, "resize-naive", [](Json& c) { c["tvf_resize_params"][0]["size"] = 56; });
  expect(kInvalid, "resize-crop", [](Json& c) { c["image_resize_strategy"] = "resize-crop"; });
  expect(kInvalid, "tvf_do_letterbox", [](Json& c) { c["tvf_do_letterbox"] = true; });
  expect(kInvalid, "input_sizes", [](Json& c) { c["input_sizes"] = Json::array(); });
  expect(kInvalid, "input_sizes[0]", [](Json& c) { c["input_sizes"][0] = {1, 56, 56}; });
  expect(kInvalid, "input_sizes[0]", [](Json& c) { c["input_sizes"][0] = {3, 56, 1 << 20}; });
  expect(kInvalid, "tvf_normalize_params[1].std", [](Json& c) {
    c["tvf_normalize_params"][1]["std"] = {0, 1, 1};
  });
  expect(kInvalid, "tvf_normalize_params[1].mean", [](Json& c) {
    c["tvf_normalize_params"][1]["mean"] = {0, 1};
  });
  expect(kInvalid, "tvf_normalize_params", [](Json& c) { c["tvf_normalize_params"].erase(1); });
}

}  // namespace
}  // namespace saccade
