#include "model/torch_zip.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/strings.h"

namespace saccade {
namespace {

constexpr uint32_t kEndSignature = 0x06054b50;
constexpr uint32_t kCentralSignature = 0x02014b50;
constexpr uint32_t kLocalSignature = 0x04034b50;
constexpr size_t kEndBytes = 22;  // torch writes no comment behind it
constexpr size_t kCentralBytes = 46;
constexpr size_t kLocalBytes = 30;
constexpr size_t kMaxNameBytes = 1024;
constexpr uint32_t kEncrypted = 0x2041;  // bits of the flags: three ways

// Little-endian numbers at places that were checked.
uint32_t Number(std::span<const uint8_t> bytes, size_t at, size_t size) {
  uint32_t value = 0;
  for (size_t i = 0; i < size; ++i) value |= uint32_t{bytes[at + i]} << (8 * i);
  return value;
}
uint32_t U16(std::span<const uint8_t> bytes, size_t at) { return Number(bytes, at, 2); }
uint32_t U32(std::span<const uint8_t> bytes, size_t at) { return Number(bytes, at, 4); }

// A relative path that stays inside its folder.
bool IsPlainPath(std::string_view name) {
  if (name.empty() || name.size() > kMaxNameBytes) return false;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('/', begin), name.size());
    const std::string_view part = name.substr(begin, end - begin);
    if (part.empty() || part == "." || part == "..") return false;
    begin = end + 1;
  }
  return name.find('\\') == std::string_view::npos && name.find('\0') == std::string_view::npos;
}

}  // namespace

absl::StatusOr<std::map<std::string, ZipEntry, std::less<>>> ReadZip(std::span<const uint8_t> bytes,
                                                                     std::string_view origin) {
  const auto error = [&](auto&&... parts) {
    return absl::InvalidArgumentError(StrCat(origin, ": ", parts...));
  };
  const auto unimplemented = [&](auto&&... parts) {
    return absl::UnimplementedError(StrCat(origin, ": ", parts...));
  };
  const size_t end = bytes.size() - std::min(kEndBytes, bytes.size());
  if (bytes.size() < kEndBytes || U32(bytes, end) != kEndSignature || U16(bytes, end + 20) != 0) {
    return error("not a zip file as torch writes it (truncated, or older than torch 1.6)");
  }
  const uint32_t count = U16(bytes, end + 10);
  const uint32_t directory_bytes = U32(bytes, end + 12);
  const uint32_t directory = U32(bytes, end + 16);
  if (count == 0xFFFF || directory_bytes == 0xFFFFFFFF || directory == 0xFFFFFFFF) {
    return unimplemented("zip64 files are not supported");
  }
  if (U16(bytes, end + 4) != 0 || U16(bytes, end + 6) != 0 || U16(bytes, end + 8) != count) {
    return error("a zip of several disks");
  }
  if (directory > end || directory_bytes > end - directory) {
    return error("its directory of ", directory_bytes, " bytes at ", directory,
                 " does not fit the file");
  }

  struct Place {
    size_t begin;  // of the local header
    size_t end;
  };
  std::vector<Place> places;
  std::map<std::string, ZipEntry, std::less<>> entries;
  std::string folder;  // with its slash
  size_t at = directory;
  const size_t directory_end = size_t{directory} + directory_bytes;
  for (uint32_t i = 0; i < count; ++i) {
    if (directory_end - at < kCentralBytes || U32(bytes, at) != kCentralSignature) {
      return error("its directory is damaged at entry ", i);
    }
    const uint32_t flags = U16(bytes, at + 8);
    const uint32_t method = U16(bytes, at + 10);
    const uint32_t packed = U32(bytes, at + 20);
    const uint32_t size = U32(bytes, at + 24);
    const size_t name_bytes = U16(bytes, at + 28);
    const size_t behind = name_bytes + U16(bytes, at + 30) + U16(bytes, at + 32);
    const size_t local = U32(bytes, at + 42);
    if (directory_end - at - kCentralBytes < behind) {
      return error("its directory is damaged at entry ", i);
    }
    const std::string_view name(reinterpret_cast<const char*>(bytes.data() + at + kCentralBytes),
                                name_bytes);
    at += kCentralBytes + behind;
    if (!IsPlainPath(name)) return error("entry ", i, " has no plain name");
    if ((flags & kEncrypted) != 0) return unimplemented(name, ": encrypted");
    if (packed == 0xFFFFFFFF || size == 0xFFFFFFFF || local == 0xFFFFFFFF) {
      return unimplemented(name, ": zip64 entries are not supported");
    }
    if (method != 0) return unimplemented(name, ": compressed");
    if (packed != size) return error(name, ": stored, but its two sizes differ");
    if (directory < kLocalBytes || local > directory - kLocalBytes ||
        U32(bytes, local) != kLocalSignature) {
      return error(name, ": its header is not where the directory says");
    }
    const size_t local_name = U16(bytes, local + 26);
    const size_t data = local + kLocalBytes + local_name + U16(bytes, local + 28);
    if (data > directory || size > directory - data) return error(name, ": does not fit the file");
    const std::string_view again(reinterpret_cast<const char*>(bytes.data() + local + kLocalBytes),
                                 local_name);
    if (again != name) return error(name, ": is called otherwise in its own header");
    places.push_back({local, data + size});

    const size_t slash = name.find('/');
    if (slash == std::string_view::npos) return error(name, ": is in no folder");
    if (i == 0) folder = name.substr(0, slash + 1);
    if (name.substr(0, slash + 1) != folder) return error(name, ": is not in ", folder);
    if (!entries.emplace(name.substr(slash + 1), ZipEntry{data, size}).second) {
      return error(name, ": is there twice");
    }
  }
  std::sort(places.begin(), places.end(),
            [](const Place& a, const Place& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < places.size(); ++i) {
    if (places[i].begin < places[i - 1].end) return error("entries lie over each other");
  }
  return entries;
}

}  // namespace saccade
