#include "engine/cost_table.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>
#include <vector>

#include "base/strings.h"

namespace saccade {
namespace {

constexpr std::string_view kMagic = "saccade-costs 1 ";
constexpr size_t kDigestDigits = 32;

std::string Hex(const Digest128& digest) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (const uint64_t half : {digest.high, digest.low}) {
    for (int shift = 60; shift >= 0; shift -= 4) out += kDigits[half >> shift & 15];
  }
  return out;
}

// Lower-case digits only, exactly 32.
std::optional<Digest128> FromHex(std::string_view text) {
  if (text.size() != kDigestDigits) return std::nullopt;
  Digest128 digest;
  for (size_t i = 0; i < kDigestDigits; ++i) {
    const char c = text[i];
    const int value = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (value < 0) return std::nullopt;
    uint64_t& half = i < kDigestDigits / 2 ? digest.high : digest.low;
    half = half << 4 | static_cast<uint64_t>(value);
  }
  return digest;
}

Digest128 DigestOf(std::string_view body) {
  return DigestBytes("cost.file.v1", {reinterpret_cast<const uint8_t*>(body.data()), body.size()});
}

absl::Status Damaged(std::string_view what) {
  return absl::DataLossError(ToAbsl(StrCat("not a table of step times: ", what)));
}

absl::Status FileError(std::string_view doing, const std::string& path, int error) {
  const auto code = error == ENOENT ? absl::StatusCode::kNotFound : absl::StatusCode::kUnavailable;
  return absl::Status(code, ToAbsl(StrCat(path, ": cannot ", doing, ": ", std::strerror(error))));
}

// Closes at the end of the scope.
struct File {
  int fd = -1;
  ~File() {
    if (fd >= 0) ::close(fd);
  }
};

bool WriteAll(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t wrote = ::write(fd, bytes.data(), bytes.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return false;
    bytes.remove_prefix(static_cast<size_t>(wrote));
  }
  return true;
}

}  // namespace

Digest128 CostKey(const ModelSpec& spec, const Backend& backend) {
  return DigestBuilder("cost.key.v1")
      .Field(spec.fingerprint)
      .Field(backend.kind())
      .Field(backend.Describe())
      .Finish();
}

std::string WriteCostTable(const CostTable& table) {
  std::vector<std::string> lines;
  for (const auto& [key, model] : table) {
    std::string line = Hex(key);
    for (const double number : model.Save()) {
      char text[32];
      const auto end = std::to_chars(text, text + sizeof(text), number).ptr;
      line += ' ';
      line.append(text, end);
    }
    lines.push_back(line + "\n");
  }
  std::sort(lines.begin(), lines.end());
  if (lines.size() > kMaxCostEntries) lines.resize(kMaxCostEntries);
  std::string body;
  for (const std::string& line : lines) body += line;
  return StrCat(kMagic, Hex(DigestOf(body)), "\n", body);
}

absl::StatusOr<CostTable> ReadCostTable(std::string_view text) {
  if (text.size() > kMaxCostBytes) return Damaged("too large");
  if (!text.starts_with(kMagic)) return Damaged("another kind of file, or another version");
  text.remove_prefix(kMagic.size());
  const std::optional<Digest128> digest = FromHex(text.substr(0, kDigestDigits));
  if (!digest || text.size() <= kDigestDigits || text[kDigestDigits] != '\n') {
    return Damaged("no digest");
  }
  text.remove_prefix(kDigestDigits + 1);
  if (DigestOf(text) != *digest) return Damaged("the digest is that of other content");
  CostTable table;
  while (!text.empty()) {
    const size_t newline = text.find('\n');
    if (newline == std::string_view::npos) return Damaged("the last line has no end");
    std::string_view line = text.substr(0, newline);
    text.remove_prefix(newline + 1);
    const std::optional<Digest128> key = FromHex(line.substr(0, kDigestDigits));
    if (!key) return Damaged("a line without a key");
    line.remove_prefix(kDigestDigits);
    std::vector<double> numbers;
    while (!line.empty() && numbers.size() < CostModel::kSavedNumbers) {
      double number = 0;
      const char* const end = line.data() + line.size();
      const auto [ptr, error] = std::from_chars(line.data() + 1, end, number);
      if (line.front() != ' ' || error != std::errc()) return Damaged("a bad number");
      line.remove_prefix(static_cast<size_t>(ptr - line.data()));
      numbers.push_back(number);
    }
    if (!line.empty()) return Damaged("too many numbers");
    absl::StatusOr<CostModel> model = CostModel::Restore(numbers);
    if (!model.ok()) return Damaged(FromAbsl(model.status().message()));
    if (!table.emplace(*key, *std::move(model)).second) return Damaged("a key stands twice");
    if (table.size() > kMaxCostEntries) return Damaged("too many lines");
  }
  return table;
}

absl::StatusOr<CostTable> LoadCostFile(const std::string& path) {
  // Non-blocking, so that a named pipe does not wait for a writer.
  const File file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.fd < 0) return FileError("open it", path, errno);
  struct stat info = {};
  if (::fstat(file.fd, &info) != 0) return FileError("read it", path, errno);
  if (!S_ISREG(info.st_mode)) return Damaged(StrCat(path, " is no regular file"));
  std::string text;
  char chunk[65'536];
  while (text.size() <= kMaxCostBytes) {
    const ssize_t got = ::read(file.fd, chunk, sizeof(chunk));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return FileError("read it", path, errno);
    if (got == 0) break;
    text.append(chunk, static_cast<size_t>(got));
  }
  absl::StatusOr<CostTable> table = ReadCostTable(text);
  if (table.ok()) return table;
  return absl::Status(table.status().code(),
                      ToAbsl(StrCat(path, ": ", FromAbsl(table.status().message()))));
}

absl::Status SaveCostFile(const std::string& path, const CostTable& table) {
  const std::string fresh = StrCat(path, ".new");
  const std::string text = WriteCostTable(table);
  {
    const File file{
        ::open(fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644)};
    if (file.fd < 0) return FileError("make it", fresh, errno);
    // On the disk before it takes the old one's place: a power cut leaves one of the two whole.
    if (!WriteAll(file.fd, text) || ::fsync(file.fd) != 0) {
      const int error = errno;
      ::unlink(fresh.c_str());
      return FileError("write it", fresh, error);
    }
  }
  if (std::rename(fresh.c_str(), path.c_str()) != 0) return FileError("replace it", path, errno);
  return absl::OkStatus();
}

}  // namespace saccade
