#pragma once
// Encoded camera frames to RGB8, row by row: whoever wants a small picture of a large one never has
// the large one in memory. The content is sniffed, labels are never trusted. One documented setting
// on every path:
//   JPEG  libjpeg-turbo, accurate integer IDCT, smoothed ("fancy") chroma upsampling: bit-equal to
//   Pillow's decoder.
//         Grayscale is replicated. CMYK and YCCK are refused. Any libjpeg warning (truncated or
//         damaged data) is an error.
//   PNG   libpng without gamma or colour management. Palette, 1/2/4-bit and gray are expanded;
//   16-bit samples become
//         (v + 128) / 257; alpha (tRNS too) is composited on black. Wrong checksums are errors.
//   EXIF  orientation 1..8 of JPEG APP1 and PNG eXIf is applied; a malformed EXIF block counts as
//   orientation 1. Turned pictures and interlaced PNGs are decoded as a whole first.
// Bytes after the end of the image are ignored. Thread-safe, no state.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "base/pixels.h"
#include "base/status.h"

namespace saccade {

struct Rgb8Image {
  uint32_t width = 0;   // pixels
  uint32_t height = 0;  // pixels
  Pixels rgb;           // [height, width, 3], row-major, no padding
};

// A picture from its top row to its last one. Damage may show only in a late row or behind the last
// one: a picture is good when every row came and Finish said so.
class ImageRows {
 public:
  // So many bytes behind a row may be read (not used).
  static constexpr size_t kSlack = 16;

  virtual ~ImageRows() = default;
  ImageRows(const ImageRows&) = delete;
  ImageRows& operator=(const ImageRows&) = delete;

  uint32_t width() const { return width_; }    // pixels
  uint32_t height() const { return height_; }  // pixels
  // The next row, [width, 3]; valid until the next call. At most height() times, until an error.
  virtual absl::StatusOr<const uint8_t*> Next() = 0;
  // After the last row, once.
  virtual absl::Status Finish() { return absl::OkStatus(); }

 protected:
  ImageRows(uint32_t width, uint32_t height) : width_(width), height_(height) {}

 private:
  uint32_t width_;
  uint32_t height_;
};

// Rows of pixels in memory, which outlive it.
class PixelRows final : public ImageRows {
 public:
  // `rgb` holds [height, width, 3].
  PixelRows(uint32_t width, uint32_t height, std::span<const uint8_t> rgb);
  explicit PixelRows(const Rgb8Image& image) : PixelRows(image.width, image.height, image.rgb) {}
  absl::StatusOr<const uint8_t*> Next() override;

 private:
  std::span<const uint8_t> left_;
  Pixels last_;  // a row with nothing behind it, and slack
};

// The whole picture.
absl::StatusOr<Rgb8Image> ReadImage(ImageRows& rows);

// Read from the header, before a pixel is decoded. Width and height are those of the file, before
// EXIF is applied.
struct ImageLimits {
  size_t max_bytes = 16 << 20;       // of the encoded image
  uint32_t max_width = 8192;         // pixels
  uint32_t max_height = 8192;        // pixels
  uint64_t max_pixels = 1ULL << 24;  // width * height
};

// INVALID_ARGUMENT (field "image"), here or from the rows, for anything that is not a complete,
// supported image within the limits. `bytes` outlives the rows.
absl::StatusOr<std::unique_ptr<ImageRows>> OpenImage(std::span<const uint8_t> bytes,
                                                     const ImageLimits& limits);

// OpenImage and all its rows.
absl::StatusOr<Rgb8Image> DecodeImage(std::span<const uint8_t> bytes, const ImageLimits& limits);

// Width * height as the header of a JPEG or PNG states them: what decoding will cost. Empty when
// there is no readable header.
std::optional<uint64_t> PixelsInHeader(std::span<const uint8_t> bytes);

// A raw RGB8 frame: positive dimensions within the limits and exactly width * height * 3 bytes,
// computed without overflow. INVALID_ARGUMENT names the field ("width", "height", "data").
absl::Status CheckRawRgb8(int64_t width, int64_t height, size_t bytes, const ImageLimits& limits);

}  // namespace saccade
