#include "model/image_decode.h"

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/safetensors.h"

namespace saccade {
namespace {

using ::testing::HasSubstr;

class ImageDecodeTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    file_ = new absl::StatusOr<SafetensorsFile>(
        SafetensorsFile::Open(std::string(SACCADE_SOURCE_DIR) + "/tests/data/images.safetensors"));
    ASSERT_TRUE(file_->ok()) << file_->status();
  }
  static void TearDownTestSuite() { delete file_; }

  static std::vector<uint8_t> Bytes(const std::string& name) {
    const auto bytes = (*file_)->Bytes(name + ".bytes");
    EXPECT_TRUE(bytes.ok()) << bytes.status();
    if (!bytes.ok()) return {};
    return {bytes->begin(), bytes->end()};
  }
  static absl::StatusOr<Rgb8Image> Decode(const std::string& name) {
    return DecodeImage(Bytes(name), ImageLimits{});
  }
  static void ExpectInvalid(std::span<const uint8_t> bytes, const std::string& part = "image",
                            const ImageLimits& limits = {}) {
    const absl::Status status = DecodeImage(bytes, limits).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
    EXPECT_EQ(GetErrorInfo(status).field, "image");
  }

  static absl::StatusOr<SafetensorsFile>* file_;
};
absl::StatusOr<SafetensorsFile>* ImageDecodeTest::file_ = nullptr;

TEST_F(ImageDecodeTest, EqualsTheReferencePixels) {
  int compared = 0;
  for (const auto& [name, entry] : (*file_)->entries()) {
    if (!name.ends_with(".rgb")) continue;
    const std::string base = name.substr(0, name.size() - 4);
    const auto image = Decode(base);
    ASSERT_TRUE(image.ok()) << base << ": " << image.status();
    const auto expected = (*file_)->Bytes(name);
    EXPECT_EQ(image->height, entry.dims[0]) << base;
    EXPECT_EQ(image->width, entry.dims[1]) << base;
    ASSERT_EQ(image->rgb.size(), expected->size()) << base;
    int worst = 0;
    for (size_t i = 0; i < expected->size(); ++i) {
      worst = std::max(worst, std::abs(image->rgb[i] - (*expected)[i]));
    }
    EXPECT_EQ(worst, 0) << base;
    ++compared;
  }
  EXPECT_GE(compared, 70);
}

TEST_F(ImageDecodeTest, ExifTurnsTheFrame) {
  const auto upright = Decode("jpeg_exif1");
  const auto turned = Decode("jpeg_exif6");
  ASSERT_TRUE(upright.ok() && turned.ok());
  EXPECT_EQ(upright->width, 24U);
  EXPECT_EQ(turned->width, 16U);
  EXPECT_EQ(turned->height, 24U);
  // Clockwise: the first row is the first column from below.
  for (size_t x = 0; x < 16; ++x) {
    EXPECT_EQ(turned->rgb[x * 3], upright->rgb[(15 - x) * 24 * 3]);
  }
}

TEST_F(ImageDecodeTest, AMalformedExifBlockIsNoOrientation) {
  const std::vector<uint8_t> good = Bytes("jpeg_exif6");
  const auto tiff = static_cast<size_t>(
      std::search(good.begin(), good.end(), std::begin("II*"), std::end("II*")) - good.begin());
  ASSERT_LT(tiff, good.size());
  // Byte order, magic, offset of the directory, number of entries, type and value of the tag.
  for (const auto& [at, value] : {std::pair<size_t, uint8_t>{0, 'X'},
                                  {2, 41},
                                  {4, 0xff},
                                  {7, 0xff},
                                  {8, 0},
                                  {12, 9},
                                  {18, 0},
                                  {18, 9}}) {
    std::vector<uint8_t> bytes = good;
    bytes[tiff + at] = value;
    const auto image = DecodeImage(bytes, ImageLimits{});
    ASSERT_TRUE(image.ok()) << image.status();
    EXPECT_EQ(image->width, 24U) << at;
  }
  // More entries than the block holds: what is there still counts, and nothing behind is read.
  std::vector<uint8_t> bytes = good;
  bytes[tiff + 9] = 0xff;
  EXPECT_EQ(DecodeImage(bytes, ImageLimits{})->width, 16U);
}

TEST_F(ImageDecodeTest, ColoursUnderFullTransparencyDoNotMatter) {
  EXPECT_EQ(Decode("png_hidden_a")->rgb, Decode("png_hidden_b")->rgb);
  EXPECT_NE(Bytes("png_hidden_a"), Bytes("png_hidden_b"));
}

TEST_F(ImageDecodeTest, ChannelsAreRedGreenBlue) {
  const auto png = Decode("png_red");
  const auto jpeg = Decode("jpeg_red");
  ASSERT_TRUE(png.ok() && jpeg.ok());
  for (size_t i = 0; i < png->rgb.size(); ++i) {
    EXPECT_EQ(png->rgb[i], i % 3 == 0 ? 255 : 0);
    EXPECT_NEAR(jpeg->rgb[i], png->rgb[i], 2);
  }
}

TEST_F(ImageDecodeTest, RefusesCmyk) { ExpectInvalid(Bytes("jpeg_cmyk"), "CMYK"); }

TEST_F(ImageDecodeTest, EveryTruncationIsRefused) {
  for (const char* name : {"jpeg_420_odd", "jpeg_progressive", "jpeg_gray", "png_rgb8",
                           "png_palette4_trns_interlaced", "png_rgba16"}) {
    const std::vector<uint8_t> whole = Bytes(name);
    for (size_t n = 0; n < whole.size(); ++n) {
      const auto image = DecodeImage(std::span(whole).first(n), ImageLimits{});
      ASSERT_EQ(image.status().code(), absl::StatusCode::kInvalidArgument) << name << " " << n;
    }
  }
}

TEST_F(ImageDecodeTest, BytesBehindTheImageAreIgnored) {
  for (const char* name : {"jpeg_420_odd", "jpeg_progressive", "png_rgb8"}) {
    std::vector<uint8_t> bytes = Bytes(name);
    for (int i = 0; i < 100; ++i) bytes.push_back(static_cast<uint8_t>(i * 37));
    const auto image = DecodeImage(bytes, ImageLimits{});
    ASSERT_TRUE(image.ok()) << image.status();
    EXPECT_EQ(image->rgb, Decode(name)->rgb);
  }
}

TEST_F(ImageDecodeTest, DamageIsRefusedOrHarmless) {
  std::mt19937 random(3);
  for (const auto& [name, entry] : (*file_)->entries()) {
    if (!name.ends_with(".bytes") || entry.bytes > 20000) continue;
    const std::vector<uint8_t> whole = Bytes(name.substr(0, name.size() - 6));
    for (int round = 0; round < 60; ++round) {
      std::vector<uint8_t> bytes = whole;
      const uint32_t flips = 1 + random() % 4;
      for (uint32_t i = 0; i < flips; ++i) {
        bytes[random() % bytes.size()] = static_cast<uint8_t>(random());
      }
      const auto image = DecodeImage(bytes, ImageLimits{.max_pixels = 1 << 20});
      if (image.ok()) {
        EXPECT_EQ(image->rgb.size(), size_t{image->width} * image->height * 3);
      } else {
        EXPECT_EQ(image.status().code(), absl::StatusCode::kInvalidArgument);
      }
    }
  }
}

TEST_F(ImageDecodeTest, AnAnimationIsRefused) {
  std::vector<uint8_t> png = Bytes("png_rgb8");
  // An animation control chunk of two frames, behind the 33 bytes of signature and header.
  const std::vector<uint8_t> control = {0, 0, 0, 8, 'a', 'c', 'T', 'L', 0, 0,
                                        0, 2, 0, 0, 0,   0,   0,   0,   0, 0};
  png.insert(png.begin() + 33, control.begin(), control.end());
  ExpectInvalid(png, "animation");
}

TEST_F(ImageDecodeTest, ADamagedPngChecksumIsRefused) {
  std::vector<uint8_t> bytes = Bytes("png_rgb8");
  bytes[bytes.size() - 14] ^= 1;  // in the checksum of IDAT
  ExpectInvalid(bytes, "PNG");
}

TEST_F(ImageDecodeTest, LimitsComeFromTheHeader) {
  ExpectInvalid(Bytes("png_claims_60000"), "width of 60000");
  const ImageLimits limits;
  EXPECT_TRUE(DecodeImage(Bytes("png_text_bomb"), limits).ok());  // the text is never expanded
  for (const char* name : {"jpeg_420_odd", "png_rgb8"}) {
    const std::vector<uint8_t> bytes = Bytes(name);
    const auto image = DecodeImage(bytes, limits);
    ASSERT_TRUE(image.ok());
    const uint64_t pixels = uint64_t{image->width} * image->height;
    ExpectInvalid(bytes, "limit", {.max_bytes = bytes.size() - 1});
    ExpectInvalid(bytes, "width", {.max_width = image->width - 1});
    ExpectInvalid(bytes, "height", {.max_height = image->height - 1});
    ExpectInvalid(bytes, "limit", {.max_pixels = pixels - 1});
    EXPECT_TRUE(DecodeImage(bytes, {.max_bytes = bytes.size(),
                                    .max_width = image->width,
                                    .max_height = image->height,
                                    .max_pixels = pixels})
                    .ok());
    // The header alone is enough to refuse: the rest is never looked at.
    ExpectInvalid(std::span(bytes).first(bytes.size() / 2), "limit", {.max_pixels = pixels - 1});
  }
}

TEST_F(ImageDecodeTest, OtherContentIsRefused) {
  ExpectInvalid({}, "empty");
  const std::string texts[] = {"GIF89a", "RIFF....WEBP", "\x80\x04\x95pickle",
                               "hello",  "\xff\xd8",     "\x89PNG"};
  for (const std::string& text : texts) {
    ExpectInvalid({reinterpret_cast<const uint8_t*>(text.data()), text.size()}, "neither");
  }
  const std::vector<uint8_t> starts = {0xff, 0xd8, 0xff};
  ExpectInvalid(starts, "JPEG");
}

TEST_F(ImageDecodeTest, TheHeaderTellsThePixels) {
  for (const auto& [name, entry] : (*file_)->entries()) {
    if (!name.ends_with(".rgb")) continue;
    const std::string base = name.substr(0, name.size() - 4);
    const std::vector<uint8_t> bytes = Bytes(base);
    EXPECT_EQ(PixelsInHeader(bytes), entry.dims[0] * entry.dims[1]) << base;
    EXPECT_EQ(PixelsInHeader(std::span(bytes).first(18)), std::nullopt) << base;
  }
  const std::vector<uint8_t> empty_jpeg = {0xFF, 0xD8, 0xFF, 0xC0, 0, 11,   8, 0,
                                           0,    0,    9,    1,    1, 0x11, 0};
  EXPECT_EQ(PixelsInHeader(empty_jpeg), std::nullopt);
  EXPECT_EQ(PixelsInHeader({}), std::nullopt);
}

// libjpeg takes such a segment for an empty one, and reads on. What limits and accounts go by does
// not.
TEST_F(ImageDecodeTest, ASegmentOfNoLengthIsRefused) {
  for (const char* name : {"jpeg_420_odd", "jpeg_progressive", "jpeg_gray"}) {
    for (const uint8_t length : {0, 1}) {
      std::vector<uint8_t> bytes = Bytes(name);
      const uint8_t segment[] = {0xFF, 0xEB, 0, length};
      bytes.insert(bytes.begin() + 2, std::begin(segment), std::end(segment));
      EXPECT_EQ(PixelsInHeader(bytes), std::nullopt);
      ExpectInvalid(bytes, "length");
    }
  }
}

TEST(RawRgb8Test, TheByteCountMustMatchExactly) {
  const ImageLimits limits;
  EXPECT_TRUE(CheckRawRgb8(640, 480, 921600, limits).ok());
  const auto field = [&](int64_t width, int64_t height, size_t bytes) {
    const absl::Status status = CheckRawRgb8(width, height, bytes, limits);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << width << "x" << height;
    return GetErrorInfo(status).field;
  };
  for (const size_t bytes : {size_t{0}, size_t{921599}, size_t{921601}, size_t{307200},
                             size_t{640 * 480 * 2}, size_t{640 * 480 * 4}, size_t{640 * 480 * 5}}) {
    EXPECT_EQ(field(640, 480, bytes), "data");
  }
  for (const int64_t width :
       {int64_t{-1}, int64_t{0}, int64_t{INT32_MAX}, int64_t{65536}, INT64_MAX, INT64_MIN}) {
    EXPECT_EQ(field(width, 480, 921600), "width");
    EXPECT_EQ(field(640, width, 921600), "height");
  }
  // The product of these wraps to 0 in 32 bits.
  const ImageLimits wide{.max_width = 1 << 20, .max_height = 1 << 20};
  EXPECT_FALSE(CheckRawRgb8(65536, 65536, 0, wide).ok());
}

}  // namespace
}  // namespace saccade
