#include "tests/golden/support/npz.h"

#include <zlib.h>

#include <cstring>
#include <utility>

#include "base/strings.h"
#include "model/json_util.h"

namespace saccade {
namespace {

constexpr size_t kMaxBytes = 64 << 20;

// Little-endian reads; out of range gives zero, which no caller takes for a valid place.
template <class T>
T At(const std::string& bytes, size_t offset) {
  T value{};
  if (offset + sizeof(T) <= bytes.size()) std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

absl::StatusOr<std::string> Inflate(const std::string& packed, size_t size) {
  std::string out(size, '\0');
  z_stream stream{};
  if (inflateInit2(&stream, -MAX_WBITS) != Z_OK) return absl::InternalError("zlib");
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(packed.data()));
  stream.avail_in = static_cast<uInt>(packed.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  const int result = inflate(&stream, Z_FINISH);
  inflateEnd(&stream);
  if (result != Z_STREAM_END || stream.avail_out != 0) {
    return absl::InvalidArgumentError("damaged deflate stream");
  }
  return out;
}

absl::StatusOr<NpyArray> ParseNpy(std::string bytes) {
  if (bytes.compare(0, 6, "\x93NUMPY") != 0 || bytes[6] != 1) {
    return absl::InvalidArgumentError("not an .npy file of version 1");
  }
  const auto length = At<uint16_t>(bytes, 8);
  std::string header = bytes.substr(10, length);
  // A Python literal: {'descr': '|u1', 'fortran_order': False, 'shape': (60, 224), }
  for (char& c : header) {
    if (c == '\'') c = '"';
    if (c == '(') c = '[';
    if (c == ')') c = ']';
  }
  const auto replace = [&](std::string_view from, std::string_view to) {
    for (size_t at = header.find(from); at != std::string::npos; at = header.find(from)) {
      header.replace(at, from.size(), to);
    }
  };
  replace("False", "false");
  replace("True", "true");
  replace(",]", "]");
  replace(", }", "}");
  ASSIGN_OR_RETURN(const Json json, ParseJson(header, "npy header"));
  const JsonView view(json, "npy header");
  NpyArray out;
  ASSIGN_OR_RETURN(out.dtype, view.String("descr"));
  ASSIGN_OR_RETURN(const bool fortran, view.Bool("fortran_order"));
  ASSIGN_OR_RETURN(const JsonView shape, view.Get("shape"));
  ASSIGN_OR_RETURN(out.dims, shape.AsInts(0, int64_t{1} << 32));
  if (fortran) return absl::UnimplementedError("Fortran order");
  out.bytes = bytes.substr(10 + size_t{length});
  return out;
}

}  // namespace

absl::StatusOr<std::map<std::string, NpyArray>> ReadNpz(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string zip, ReadFile(path, kMaxBytes));
  const size_t end = zip.rfind("PK\x05\x06");
  if (end == std::string::npos) return absl::InvalidArgumentError(StrCat(path, ": not a zip"));
  const auto count = At<uint16_t>(zip, end + 10);
  size_t at = At<uint32_t>(zip, end + 16);
  std::map<std::string, NpyArray> out;
  for (uint16_t i = 0; i < count; ++i) {
    if (At<uint32_t>(zip, at) != 0x02014b50) {
      return absl::InvalidArgumentError(StrCat(path, ": damaged directory"));
    }
    const auto method = At<uint16_t>(zip, at + 10);
    const size_t packed = At<uint32_t>(zip, at + 20);
    const size_t size = At<uint32_t>(zip, at + 24);
    const size_t name_length = At<uint16_t>(zip, at + 28);
    const size_t local = At<uint32_t>(zip, at + 42);
    std::string name = zip.substr(at + 46, name_length);
    if (const size_t dot = name.rfind(".npy"); dot != std::string::npos) name.resize(dot);
    const size_t data = local + 30 + At<uint16_t>(zip, local + 26) + At<uint16_t>(zip, local + 28);
    if (data + packed > zip.size() || size > kMaxBytes || (method != 0 && method != 8)) {
      return absl::InvalidArgumentError(StrCat(path, ": cannot read ", name));
    }
    std::string bytes = zip.substr(data, packed);
    if (method == 8) {
      ASSIGN_OR_RETURN(bytes, Inflate(bytes, size));
    }
    ASSIGN_OR_RETURN(NpyArray array, ParseNpy(std::move(bytes)));
    out.emplace(std::move(name), std::move(array));
    at += 46 + name_length + At<uint16_t>(zip, at + 30) + At<uint16_t>(zip, at + 32);
  }
  return out;
}

}  // namespace saccade
