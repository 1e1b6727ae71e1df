#include "base/process.h"

#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <system_error>

#include "base/cores.h"

namespace saccade {
namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

uint64_t Number(std::string_view text) {
  uint64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

// Word `index`, from 0, of words between single blanks.
std::string_view Word(std::string_view text, size_t index) {
  for (; index > 0; --index) {
    const size_t blank = text.find(' ');
    if (blank == std::string_view::npos) return {};
    text.remove_prefix(blank + 1);
  }
  return text.substr(0, text.find(' '));
}

}  // namespace

void KeepFreedMemory() {
#if defined(__GLIBC__)
  // glibc's thresholds follow the largest buffer that has come and gone as a mapping of its own
  // (mallopt(3)): they still grow with larger frames, as they would not once they were set. Free
  // memory of the heap is used up first, for a buffer that fits there moves no threshold.
  constexpr size_t kBuffer = 1 << 20;
  std::array<void*, 64> buffers{};
  const size_t mapped = mallinfo2().hblks;
  for (void*& buffer : buffers) {
    buffer = std::malloc(kBuffer);
    if (mallinfo2().hblks > mapped) break;
  }
  for (void* const buffer : buffers) std::free(buffer);
#endif
}

uint64_t BytesOfLine(std::string_view text, std::string_view key) {
  for (size_t at = text.find(key); at != std::string_view::npos; at = text.find(key, at + 1)) {
    if (at > 0 && text[at - 1] != '\n') continue;
    std::string_view rest = text.substr(at + key.size());
    if (rest.empty() || rest.front() != ':') continue;
    rest.remove_prefix(std::min(rest.size(), rest.find_first_of("0123456789")));
    return Number(rest) * 1024;
  }
  return 0;
}

ProcessUse ReadProcessUse() {
  ProcessUse use;
  const std::string status = ReadFile("/proc/self/status");
  use.resident_bytes = BytesOfLine(status, "VmRSS");
  use.anonymous_bytes = BytesOfLine(status, "RssAnon");
  const auto ticks = static_cast<double>(std::max(1L, sysconf(_SC_CLK_TCK)));
  const std::string stat = ReadFile("/proc/self/stat");
  const size_t name_end = stat.rfind(')');  // the name may hold anything
  if (name_end != std::string::npos && name_end + 2 < stat.size()) {
    const std::string_view fields = std::string_view(stat).substr(name_end + 2);  // from field 3
    use.cpu_seconds =
        static_cast<double>(Number(Word(fields, 11)) + Number(Word(fields, 12))) / ticks;
    const std::string boot = ReadFile("/proc/stat");
    const size_t at = boot.find("\nbtime ");
    if (at != std::string::npos) {
      use.start_time_seconds = static_cast<double>(Number(std::string_view(boot).substr(at + 7))) +
                               static_cast<double>(Number(Word(fields, 19))) / ticks;
    }
  }
  std::error_code error;
  for (std::filesystem::directory_iterator entry("/proc/self/fd", error), end;
       !error && entry != end; entry.increment(error)) {
    ++use.open_fds;
  }
  if (use.open_fds > 0) --use.open_fds;  // the one that counted them
  return use;
}

uint64_t AnonymousBytes() {
  const std::string statm = ReadFile("/proc/self/statm");  // pages: size resident shared ...
  const uint64_t resident = Number(Word(statm, 1));
  const uint64_t shared = Number(Word(statm, 2));
  return (resident - std::min(resident, shared)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

uint64_t UsableMemory(const std::string& root) {
  uint64_t usable = BytesOfLine(ReadFile(root + "/proc/meminfo"), "MemTotal");
  if (usable == 0) usable = std::numeric_limits<uint64_t>::max() / 2;
  const std::optional<uint64_t> limit =
      CgroupMemoryLimit(root + "/sys/fs/cgroup", ReadFile(root + "/proc/self/cgroup"));
  return limit ? std::min(usable, *limit) : usable;
}

}  // namespace saccade
