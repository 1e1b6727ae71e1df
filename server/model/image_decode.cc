#include "model/image_decode.h"

#include <png.h>
// jpeglib.h needs FILE and size_t before it.
#include <cstdio>

#include <jerror.h>
#include <jpeglib.h>

#include <algorithm>
#include <array>
#include <csetjmp>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "base/strings.h"

namespace saccade {
namespace {

constexpr std::string_view kField = "image";
constexpr std::array<uint8_t, 8> kPngSignature = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1A, '\n'};

absl::Status CheckSize(uint64_t width, uint64_t height, const ImageLimits& limits,
                       std::string_view width_field, std::string_view height_field) {
  if (width < 1 || width > limits.max_width) {
    return InvalidField(width_field,
                        StrCat("width of ", width, " pixels, allowed 1 to ", limits.max_width));
  }
  if (height < 1 || height > limits.max_height) {
    return InvalidField(height_field,
                        StrCat("height of ", height, " pixels, allowed 1 to ", limits.max_height));
  }
  if (width * height > limits.max_pixels) {  // both fit in 32 bits
    return InvalidField(width_field, StrCat(width, " x ", height,
                                            " pixels, more than the limit of ", limits.max_pixels));
  }
  return absl::OkStatus();
}

// ---------------------------------------------------------------------------------------- EXIF

// Reads inside one EXIF block in its byte order; out of range reads give nullopt.
class TiffReader {
 public:
  TiffReader(std::span<const uint8_t> bytes, bool big_endian)
      : bytes_(bytes), big_endian_(big_endian) {}
  std::optional<uint32_t> Read(size_t offset, size_t size) const {
    if (offset > bytes_.size() || size > bytes_.size() - offset) return std::nullopt;
    uint32_t value = 0;
    for (size_t i = 0; i < size; ++i) {
      const uint32_t byte = bytes_[offset + i];
      value |= byte << (8 * (big_endian_ ? size - 1 - i : i));
    }
    return value;
  }

 private:
  std::span<const uint8_t> bytes_;
  bool big_endian_;
};

// Orientation (tag 0x0112, a SHORT in IFD0) of a TIFF block; 1 when absent or malformed.
int OrientationOfTiff(std::span<const uint8_t> tiff) {
  if (tiff.size() < 8) return 1;
  const bool big = tiff[0] == 'M' && tiff[1] == 'M';
  if (!big && !(tiff[0] == 'I' && tiff[1] == 'I')) return 1;
  const TiffReader reader(tiff, big);
  if (reader.Read(2, 2) != 42U) return 1;
  const size_t ifd = *reader.Read(4, 4);
  const std::optional<uint32_t> count = reader.Read(ifd, 2);
  if (!count) return 1;
  for (size_t i = 0; i < *count; ++i) {
    const size_t entry = ifd + 2 + i * 12;
    const std::optional<uint32_t> tag = reader.Read(entry, 2);
    if (!tag) return 1;
    if (*tag != 0x0112) continue;
    const uint32_t value = reader.Read(entry + 8, 2).value_or(1);
    const bool is_short = reader.Read(entry + 2, 2) == 3U && reader.Read(entry + 4, 4) == 1U;
    return is_short && value >= 1 && value <= 8 ? static_cast<int>(value) : 1;
  }
  return 1;
}

// Calls visit(marker, payload) for the header segments of a JPEG, until it returns true or the
// pixels or damage begin.
template <class Visit>
void VisitJpegHeader(std::span<const uint8_t> bytes, const Visit& visit) {
  size_t i = 2;  // after SOI
  while (i + 4 <= bytes.size() && bytes[i] == 0xFF) {
    const uint8_t marker = bytes[i + 1];
    if (marker == 0xFF) {  // fill byte
      ++i;
      continue;
    }
    if (marker == 0xDA || marker == 0xD9) return;  // scan data or the end: no more headers
    if (marker == 0x01 || (marker >= 0xD0 && marker <= 0xD7)) {
      i += 2;
      continue;
    }
    const size_t size = static_cast<size_t>(bytes[i + 2]) << 8 | bytes[i + 3];
    if (size < 2 || size > bytes.size() - i - 2) return;
    if (visit(marker, bytes.subspan(i + 4, size - 2))) return;
    i += 2 + size;
  }
}

int OrientationOfJpeg(std::span<const uint8_t> bytes) {
  constexpr std::string_view kExif("Exif\0\0", 6);
  int orientation = 1;
  VisitJpegHeader(bytes, [&](uint8_t marker, std::span<const uint8_t> payload) {
    const bool exif = marker == 0xE1 && payload.size() > kExif.size() &&
                      std::memcmp(payload.data(), kExif.data(), kExif.size()) == 0;
    if (exif) orientation = OrientationOfTiff(payload.subspan(kExif.size()));
    return exif;
  });
  return orientation;
}

// Width * height of the frame header (SOF0 to SOF15).
std::optional<uint64_t> PixelsOfJpeg(std::span<const uint8_t> bytes) {
  std::optional<uint64_t> pixels;
  VisitJpegHeader(bytes, [&](uint8_t marker, std::span<const uint8_t> payload) {
    const bool frame = marker >= 0xC0 && marker <= 0xCF && marker != 0xC4 && marker != 0xC8 &&
                       marker != 0xCC && payload.size() >= 6;
    if (!frame) return false;
    const uint64_t height = static_cast<uint64_t>(payload[1]) << 8 | payload[2];
    const uint64_t width = static_cast<uint64_t>(payload[3]) << 8 | payload[4];
    if (width * height > 0) pixels = width * height;
    return true;
  });
  return pixels;
}

uint32_t ReadBig32(const uint8_t* p) {
  return static_cast<uint32_t>(p[0]) << 24 | static_cast<uint32_t>(p[1]) << 16 |
         static_cast<uint32_t>(p[2]) << 8 | p[3];
}

int OrientationOfPng(std::span<const uint8_t> bytes) {
  size_t i = kPngSignature.size();
  while (bytes.size() - i >= 12) {
    const size_t size = ReadBig32(bytes.data() + i);
    if (size > bytes.size() - i - 12) break;
    if (std::memcmp(bytes.data() + i + 4, "eXIf", 4) == 0) {
      return OrientationOfTiff(bytes.subspan(i + 8, size));
    }
    if (std::memcmp(bytes.data() + i + 4, "IEND", 4) == 0) break;
    i += 12 + size;
  }
  return 1;
}

// The picture as it is to be looked at.
Rgb8Image Orient(Rgb8Image in, int orientation) {
  if (orientation == 1) return in;
  const bool swap = orientation >= 5;
  Rgb8Image out;
  out.width = swap ? in.height : in.width;
  out.height = swap ? in.width : in.height;
  out.rgb.resize(in.rgb.size());
  const auto w = static_cast<ptrdiff_t>(in.width);
  const auto h = static_cast<ptrdiff_t>(in.height);
  // Source pixel of output (x, y): start + x * step_x + y * step_y.
  ptrdiff_t start = 0;
  ptrdiff_t step_x = 1;
  ptrdiff_t step_y = w;
  switch (orientation) {
    case 2:  // mirrored left to right
      start = w - 1, step_x = -1, step_y = w;
      break;
    case 3:  // upside down
      start = h * w - 1, step_x = -1, step_y = -w;
      break;
    case 4:  // mirrored top to bottom
      start = (h - 1) * w, step_x = 1, step_y = -w;
      break;
    case 5:  // transposed
      start = 0, step_x = w, step_y = 1;
      break;
    case 6:  // to be turned clockwise
      start = (h - 1) * w, step_x = -w, step_y = 1;
      break;
    case 7:  // transposed about the other diagonal
      start = h * w - 1, step_x = -w, step_y = -1;
      break;
    default:  // 8: to be turned counter-clockwise
      start = w - 1, step_x = w, step_y = -1;
      break;
  }
  uint8_t* to = out.rgb.data();
  for (ptrdiff_t y = 0; y < static_cast<ptrdiff_t>(out.height); ++y) {
    const uint8_t* from = in.rgb.data() + (start + y * step_y) * 3;
    for (uint32_t x = 0; x < out.width; ++x, to += 3, from += step_x * 3) {
      std::memcpy(to, from, 3);
    }
  }
  return out;
}

bool IsJpeg(std::span<const uint8_t> bytes) {
  return bytes.size() >= 3 && bytes[0] == 0xFF && bytes[1] == 0xD8 && bytes[2] == 0xFF;
}

bool IsPng(std::span<const uint8_t> bytes) {
  return bytes.size() >= kPngSignature.size() &&
         std::equal(kPngSignature.begin(), kPngSignature.end(), bytes.begin());
}

// Rows of a picture that had to be made as a whole.
class WholeRows final : public ImageRows {
 public:
  explicit WholeRows(Rgb8Image image)
      : ImageRows(image.width, image.height), image_(std::move(image)), rows_(image_) {}
  absl::StatusOr<const uint8_t*> Next() override { return rows_.Next(); }

 private:
  const Rgb8Image image_;
  PixelRows rows_;
};

absl::StatusOr<std::unique_ptr<ImageRows>> Oriented(std::unique_ptr<ImageRows> rows,
                                                    int orientation) {
  if (orientation == 1) return rows;
  ASSIGN_OR_RETURN(Rgb8Image image, ReadImage(*rows));
  return std::make_unique<WholeRows>(Orient(std::move(image), orientation));
}

// ---------------------------------------------------------------------------------------- JPEG

// A progressive JPEG of few bytes can make the decoder walk a large picture for ever.
constexpr int kMaxJpegScans = 500;

// libjpeg's state with its errors as return values. libjpeg leaves the functions that can fail by
// longjmp: nothing in them has a destructor.
class JpegDecoder {
 public:
  JpegDecoder() {
    info_.err = jpeg_std_error(&errors_.base);
    errors_.base.error_exit = Fail;
    errors_.base.emit_message = OnMessage;
    info_.progress = &progress_;
    progress_.progress_monitor = OnProgress;
  }
  ~JpegDecoder() { jpeg_destroy_decompress(&info_); }
  JpegDecoder(const JpegDecoder&) = delete;
  JpegDecoder& operator=(const JpegDecoder&) = delete;

  uint32_t width() const { return info_.image_width; }
  uint32_t height() const { return info_.image_height; }
  J_COLOR_SPACE color_space() const { return info_.jpeg_color_space; }
  const char* error() const { return errors_.message.data(); }

  bool ReadHeader(std::span<const uint8_t> bytes) {
    if (setjmp(errors_.jump) != 0) return false;  // NOLINT(cert-err52-cpp)
    jpeg_create_decompress(&info_);
    // Creation clears what it does not know of.
    info_.progress = &progress_;
    jpeg_mem_src(&info_, bytes.data(), static_cast<unsigned long>(bytes.size()));
    return jpeg_read_header(&info_, TRUE) == JPEG_HEADER_OK;
  }
  bool Start() {
    if (setjmp(errors_.jump) != 0) return false;  // NOLINT(cert-err52-cpp)
    info_.out_color_space = JCS_RGB;
    info_.dct_method = JDCT_ISLOW;
    return jpeg_start_decompress(&info_) == TRUE;
  }
  bool ReadRow(uint8_t* out) {
    if (setjmp(errors_.jump) != 0) return false;  // NOLINT(cert-err52-cpp)
    return jpeg_read_scanlines(&info_, &out, 1) == 1;
  }
  bool Finish() {
    if (setjmp(errors_.jump) != 0) return false;  // NOLINT(cert-err52-cpp)
    return jpeg_finish_decompress(&info_) == TRUE;
  }

 private:
  struct Errors {
    jpeg_error_mgr base{};  // first: libjpeg hands it back
    std::jmp_buf jump{};
    std::array<char, JMSG_LENGTH_MAX> message{};
  };
  [[noreturn]] static void Fail(j_common_ptr info) {
    auto* errors = reinterpret_cast<Errors*>(info->err);
    info->err->format_message(info, errors->message.data());
    std::longjmp(errors->jump, 1);  // NOLINT(cert-err52-cpp)
  }
  // Any warning is an error: the rows would be made up.
  static void OnMessage(j_common_ptr info, int level) {
    if (level < 0) Fail(info);
  }
  static void OnProgress(j_common_ptr info) {
    if (reinterpret_cast<j_decompress_ptr>(info)->input_scan_number <= kMaxJpegScans) return;
    auto* errors = reinterpret_cast<Errors*>(info->err);
    std::snprintf(errors->message.data(), errors->message.size(), "more than %d scans",
                  kMaxJpegScans);
    std::longjmp(errors->jump, 1);  // NOLINT(cert-err52-cpp)
  }

  jpeg_decompress_struct info_{};
  jpeg_progress_mgr progress_{};
  Errors errors_;
};

class JpegRows final : public ImageRows {
 public:
  explicit JpegRows(std::unique_ptr<JpegDecoder> decoder)
      : ImageRows(decoder->width(), decoder->height()),
        decoder_(std::move(decoder)),
        memory_(size_t{width()} * 3 + kSlack + kAlign) {
    // libjpeg-turbo writes aligned rows past the caches, where a reader has to wait for them.
    row_ = memory_.data();
    if (reinterpret_cast<uintptr_t>(row_) % kAlign == 0) ++row_;
  }
  absl::StatusOr<const uint8_t*> Next() override {
    if (!decoder_->ReadRow(row_)) return Failed();
    return row_;
  }
  absl::Status Finish() override { return decoder_->Finish() ? absl::OkStatus() : Failed(); }

 private:
  static constexpr size_t kAlign = 16;
  absl::Status Failed() const { return InvalidField(kField, StrCat("JPEG: ", decoder_->error())); }
  const std::unique_ptr<JpegDecoder> decoder_;
  Pixels memory_;
  uint8_t* row_;
};

absl::StatusOr<std::unique_ptr<ImageRows>> OpenJpeg(std::span<const uint8_t> bytes,
                                                    const ImageLimits& limits) {
  auto decoder = std::make_unique<JpegDecoder>();
  if (!decoder->ReadHeader(bytes)) return InvalidField(kField, StrCat("JPEG: ", decoder->error()));
  if (decoder->color_space() == JCS_CMYK || decoder->color_space() == JCS_YCCK) {
    return InvalidField(kField, "JPEG: CMYK and YCCK are not supported, send RGB or gray");
  }
  RETURN_IF_ERROR(CheckSize(decoder->width(), decoder->height(), limits, kField, kField));
  // libjpeg overlooks a segment of no valid length; what the picture costs was found without it.
  if (PixelsOfJpeg(bytes) != uint64_t{decoder->width()} * decoder->height()) {
    return InvalidField(kField, "JPEG: a header segment without a valid length");
  }
  if (!decoder->Start()) return InvalidField(kField, StrCat("JPEG: ", decoder->error()));
  return Oriented(std::make_unique<JpegRows>(std::move(decoder)), OrientationOfJpeg(bytes));
}

// ----------------------------------------------------------------------------------------- PNG

struct PngSource {
  const uint8_t* data = nullptr;
  size_t left = 0;
  std::array<char, 160> error{};
};

void PngRead(png_structp png, png_bytep out, size_t size) {
  auto* source = static_cast<PngSource*>(png_get_io_ptr(png));
  if (size > source->left) png_error(png, "truncated");
  std::memcpy(out, source->data, size);
  source->data += size;
  source->left -= size;
}

[[noreturn]] void PngError(png_structp png, png_const_charp message) {
  auto* source = static_cast<PngSource*>(png_get_error_ptr(png));
  std::snprintf(source->error.data(), source->error.size(), "%s", message);
  png_longjmp(png, 1);
}

void PngWarning(png_structp /*png*/, png_const_charp /*message*/) {}

class PngDecoder {
 public:
  explicit PngDecoder(std::span<const uint8_t> bytes) {
    source_.data = bytes.data();
    source_.left = bytes.size();
    png_ = png_create_read_struct(PNG_LIBPNG_VER_STRING, &source_, PngError, PngWarning);
    if (png_ != nullptr) info_ = png_create_info_struct(png_);
  }
  ~PngDecoder() { png_destroy_read_struct(&png_, &info_, nullptr); }
  PngDecoder(const PngDecoder&) = delete;
  PngDecoder& operator=(const PngDecoder&) = delete;

  bool valid() const { return info_ != nullptr; }
  const char* error() const { return source_.error.data(); }
  size_t row_bytes() const { return png_get_rowbytes(png_, info_); }
  int channels() const { return png_get_channels(png_, info_); }
  int bit_depth() const { return png_get_bit_depth(png_, info_); }
  bool interlaced() const { return png_get_interlace_type(png_, info_) != PNG_INTERLACE_NONE; }

  // libpng leaves these functions by longjmp on an error: nothing in them has a destructor.
  // Afterwards rows are RGB or RGBA of 8 or (big-endian) 16 bits.
  bool ReadHeader(const ImageLimits& limits) {
    if (setjmp(png_jmpbuf(png_)) != 0) return false;  // NOLINT(cert-err52-cpp)
    png_set_read_fn(png_, &source_, PngRead);
    png_set_user_limits(png_, limits.max_width, limits.max_height);
    png_set_crc_action(png_, PNG_CRC_ERROR_QUIT, PNG_CRC_ERROR_QUIT);
    png_set_benign_errors(png_, 0);
    // Skip every ancillary chunk but tRNS: no colour management, no text to decompress.
    png_set_keep_unknown_chunks(png_, PNG_HANDLE_CHUNK_NEVER, nullptr, -1);
    png_read_info(png_, info_);
    if (png_get_color_type(png_, info_) == PNG_COLOR_TYPE_PALETTE) png_set_palette_to_rgb(png_);
    if (png_get_bit_depth(png_, info_) < 8) png_set_expand_gray_1_2_4_to_8(png_);
    if (png_get_valid(png_, info_, PNG_INFO_tRNS) != 0) png_set_tRNS_to_alpha(png_);
    png_set_gray_to_rgb(png_);
    png_set_interlace_handling(png_);
    png_read_update_info(png_, info_);
    return true;
  }
  // Of an interlaced picture: all rows at once.
  bool ReadRows(png_bytepp rows) {
    if (setjmp(png_jmpbuf(png_)) != 0) return false;  // NOLINT(cert-err52-cpp)
    png_read_image(png_, rows);
    return true;
  }
  bool ReadRow(png_bytep row) {
    if (setjmp(png_jmpbuf(png_)) != 0) return false;  // NOLINT(cert-err52-cpp)
    png_read_row(png_, row, nullptr);
    return true;
  }
  bool ReadEnd() {
    if (setjmp(png_jmpbuf(png_)) != 0) return false;  // NOLINT(cert-err52-cpp)
    png_read_end(png_, nullptr);
    return true;
  }

 private:
  PngSource source_;
  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
};

// v / 257 and a * c / max, rounded to nearest.
uint8_t From16(uint32_t v) { return static_cast<uint8_t>((v + 128) / 257); }
uint32_t OnBlack(uint32_t c, uint32_t a, uint32_t max) { return (c * a + max / 2) / max; }

void ConvertRow(const uint8_t* in, int channels, int bit_depth, uint32_t width, uint8_t* out) {
  const bool alpha = channels == 4;
  const auto step = static_cast<size_t>(channels);
  if (bit_depth == 8) {
    for (uint32_t x = 0; x < width; ++x, in += step) {
      for (size_t c = 0; c < 3; ++c) {
        *out++ = alpha ? static_cast<uint8_t>(OnBlack(in[c], in[3], 255)) : in[c];
      }
    }
    return;
  }
  const auto sample = [](const uint8_t* p) { return static_cast<uint32_t>(p[0]) << 8 | p[1]; };
  for (uint32_t x = 0; x < width; ++x, in += step * 2) {
    for (size_t c = 0; c < 3; ++c) {
      const uint32_t v = sample(in + c * 2);
      *out++ = From16(alpha ? OnBlack(v, sample(in + 6), 65535) : v);
    }
  }
}

// An acTL chunk before the pixels makes a PNG an animation (APNG). Walks the chunk headers, within
// the bytes given.
bool IsAnimatedPng(std::span<const uint8_t> bytes) {
  for (size_t at = kPngSignature.size(); bytes.size() - at >= 12;) {
    const uint64_t length = ReadBig32(bytes.data() + at);
    const uint8_t* type = bytes.data() + at + 4;
    if (std::memcmp(type, "acTL", 4) == 0) return true;
    if (std::memcmp(type, "IDAT", 4) == 0 || length > bytes.size() - at - 12) return false;
    at += static_cast<size_t>(length) + 12;
  }
  return false;
}

// Rows come one by one, or out of the whole picture when that is interlaced.
class PngRows final : public ImageRows {
 public:
  PngRows(uint32_t width, uint32_t height, std::unique_ptr<PngDecoder> decoder)
      : ImageRows(width, height),
        decoder_(std::move(decoder)),
        raw_bytes_(decoder_->row_bytes()),
        row_(size_t{width} * 3 + kSlack) {}
  absl::StatusOr<const uint8_t*> Next() override {
    if (raw_.empty() && !Prepare()) return Failed();
    const uint8_t* raw = raw_.data();
    if (!decoder_->interlaced()) {
      if (!decoder_->ReadRow(raw_.data())) return Failed();
    } else {
      raw += next_++ * raw_bytes_;
    }
    ConvertRow(raw, decoder_->channels(), decoder_->bit_depth(), width(), row_.data());
    return row_.data();
  }
  absl::Status Finish() override { return decoder_->ReadEnd() ? absl::OkStatus() : Failed(); }

 private:
  bool Prepare() {
    if (!decoder_->interlaced()) {
      raw_.resize(raw_bytes_);
      return true;
    }
    raw_.resize(raw_bytes_ * height());
    std::vector<png_bytep> rows(height());
    for (size_t y = 0; y < rows.size(); ++y) rows[y] = raw_.data() + y * raw_bytes_;
    return decoder_->ReadRows(rows.data());
  }
  absl::Status Failed() const { return InvalidField(kField, StrCat("PNG: ", decoder_->error())); }

  const std::unique_ptr<PngDecoder> decoder_;
  const size_t raw_bytes_;  // of a row as libpng gives it
  Pixels raw_;              // one such row, or all
  size_t next_ = 0;
  Pixels row_;
};

absl::StatusOr<std::unique_ptr<ImageRows>> OpenPng(std::span<const uint8_t> bytes,
                                                   const ImageLimits& limits) {
  // Signature, chunk length and type, then width and height: checked before libpng sees a byte.
  if (bytes.size() < 24 || std::memcmp(bytes.data() + 12, "IHDR", 4) != 0) {
    return InvalidField(kField, "PNG: truncated or without an IHDR chunk");
  }
  const uint32_t width = ReadBig32(bytes.data() + 16);
  const uint32_t height = ReadBig32(bytes.data() + 20);
  RETURN_IF_ERROR(CheckSize(width, height, limits, kField, kField));

  if (IsAnimatedPng(bytes)) return InvalidField(kField, "PNG: an animation, not a picture");
  auto decoder = std::make_unique<PngDecoder>(bytes);
  if (!decoder->valid()) return absl::ResourceExhaustedError("no memory for a PNG decoder");
  if (!decoder->ReadHeader(limits)) return InvalidField(kField, StrCat("PNG: ", decoder->error()));
  const int channels = decoder->channels();
  const int bit_depth = decoder->bit_depth();
  if ((channels != 3 && channels != 4) || (bit_depth != 8 && bit_depth != 16) ||
      decoder->row_bytes() !=
          static_cast<size_t>(width) * static_cast<size_t>(channels * bit_depth / 8)) {
    return InvalidField(kField, "PNG: unsupported pixel layout");
  }
  return Oriented(std::make_unique<PngRows>(width, height, std::move(decoder)),
                  OrientationOfPng(bytes));
}

}  // namespace

PixelRows::PixelRows(uint32_t width, uint32_t height, std::span<const uint8_t> rgb)
    : ImageRows(width, height), left_(rgb) {}

absl::StatusOr<const uint8_t*> PixelRows::Next() {
  const size_t bytes = size_t{width()} * 3;
  if (left_.size() < bytes) return InvalidField(kField, "fewer pixels than its size says");
  const uint8_t* row = left_.data();
  if (left_.size() < bytes + kSlack) {
    last_.resize(bytes + kSlack);
    std::memcpy(last_.data(), row, bytes);
    row = last_.data();
  }
  left_ = left_.subspan(bytes);
  return row;
}

absl::StatusOr<Rgb8Image> ReadImage(ImageRows& rows) {
  Rgb8Image image{rows.width(), rows.height(), {}};
  const size_t bytes = size_t{image.width} * 3;
  image.rgb.resize(bytes * image.height);
  for (size_t y = 0; y < image.height; ++y) {
    ASSIGN_OR_RETURN(const uint8_t* row, rows.Next());
    std::memcpy(image.rgb.data() + y * bytes, row, bytes);
  }
  RETURN_IF_ERROR(rows.Finish());
  return image;
}

absl::StatusOr<std::unique_ptr<ImageRows>> OpenImage(std::span<const uint8_t> bytes,
                                                     const ImageLimits& limits) {
  if (bytes.size() > limits.max_bytes) {
    return InvalidField(kField,
                        StrCat(bytes.size(), " bytes, more than the limit of ", limits.max_bytes));
  }
  if (IsJpeg(bytes)) return OpenJpeg(bytes, limits);
  if (IsPng(bytes)) return OpenPng(bytes, limits);
  return InvalidField(kField, bytes.empty() ? "empty" : "neither a JPEG nor a PNG image");
}

absl::StatusOr<Rgb8Image> DecodeImage(std::span<const uint8_t> bytes, const ImageLimits& limits) {
  ASSIGN_OR_RETURN(const std::unique_ptr<ImageRows> rows, OpenImage(bytes, limits));
  return ReadImage(*rows);
}

std::optional<uint64_t> PixelsInHeader(std::span<const uint8_t> bytes) {
  if (IsPng(bytes)) {
    if (bytes.size() < 24) return std::nullopt;
    return uint64_t{ReadBig32(bytes.data() + 16)} * ReadBig32(bytes.data() + 20);
  }
  return IsJpeg(bytes) ? PixelsOfJpeg(bytes) : std::nullopt;
}

absl::Status CheckRawRgb8(int64_t width, int64_t height, size_t bytes, const ImageLimits& limits) {
  if (width < 1) return InvalidField("width", StrCat(width, " pixels, must be positive"));
  if (height < 1) return InvalidField("height", StrCat(height, " pixels, must be positive"));
  RETURN_IF_ERROR(CheckSize(static_cast<uint64_t>(width), static_cast<uint64_t>(height), limits,
                            "width", "height"));
  const uint64_t expected = static_cast<uint64_t>(width) * static_cast<uint64_t>(height) * 3;
  if (bytes != expected) {
    return InvalidField("data", StrCat(bytes, " bytes, but ", width, " x ", height,
                                       " pixels of RGB8 take ", expected));
  }
  return absl::OkStatus();
}

}  // namespace saccade
