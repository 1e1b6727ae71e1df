#include "base/cores.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

#include "base/strings.h"

namespace saccade {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxFileBytes = 64 * 1024;  // of a /proc or cgroup file

std::string ReadSmallFile(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(kMaxFileBytes, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(std::max<std::streamsize>(file.gcount(), 0)));
  return text;
}

std::optional<double> ToQuota(double quota, double period) {
  if (!(quota > 0) || !(period > 0)) return std::nullopt;  // "no limit" is -1 in v1
  return quota / period;
}

// v2: "max 100000" or "150000 100000", microseconds.
std::optional<double> QuotaV2(const fs::path& group) {
  std::istringstream text(ReadSmallFile(group / "cpu.max"));
  double quota = 0;
  double period = 0;
  if (!(text >> quota >> period)) return std::nullopt;
  return ToQuota(quota, period);
}

std::optional<double> QuotaV1(const fs::path& group) {
  std::istringstream quota_text(ReadSmallFile(group / "cpu.cfs_quota_us"));
  std::istringstream period_text(ReadSmallFile(group / "cpu.cfs_period_us"));
  double quota = 0;
  double period = 0;
  if (!(quota_text >> quota) || !(period_text >> period)) return std::nullopt;
  return ToQuota(quota, period);
}

std::optional<double> ReadBytes(const fs::path& file) {
  std::istringstream text(ReadSmallFile(file));
  double bytes = 0;
  if (!(text >> bytes) || bytes <= 0) return std::nullopt;  // v2 says "max" for no limit
  return bytes;
}

std::optional<double> Smaller(std::optional<double> a, std::optional<double> b) {
  if (!a || !b) return a ? a : b;
  return std::min(*a, *b);
}

// The smallest quota of `group` (a path below `mount`, which begins with '/') and its ancestors,
// `mount` included. A path that this process cannot see (a container without its own cgroup
// namespace) is skipped up to one that it can.
template <class ReadQuota>
std::optional<double> SmallestUpwards(const fs::path& mount, std::string_view group,
                                      const ReadQuota& read) {
  std::optional<double> smallest = read(mount);
  fs::path at = mount;
  for (const fs::path& part : fs::path(group).relative_path()) {
    if (part == "..") break;  // outside this process's view
    at /= part;
    smallest = Smaller(smallest, read(at));
  }
  return smallest;
}

bool HasController(std::string_view controllers, std::string_view wanted) {
  while (!controllers.empty()) {
    const size_t comma = controllers.find(',');
    if (controllers.substr(0, comma) == wanted) return true;
    if (comma == std::string_view::npos) return false;
    controllers.remove_prefix(comma + 1);
  }
  return false;
}

// As the kernel has it (sched_setattr(2)); the C library has it only lately.
struct SchedulingAttributes {
  uint32_t size = sizeof(SchedulingAttributes);
  uint32_t policy = 0;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime_ns = 0;  // of an ordinary thread: its slice; 0: the system's
  uint64_t deadline_ns = 0;
  uint64_t period_ns = 0;
};

void SetSlice(uint64_t ns) {
  SchedulingAttributes attributes;
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0) != 0) return;
  if (attributes.policy != SCHED_OTHER) return;
  attributes.runtime_ns = ns;
  // An old system ignores it, a sandbox may refuse: then threads wait as they always did.
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

}  // namespace

namespace {

// The smallest value that `v2` reads of a unified group or `v1` of one of `controller`.
template <class ReadV2, class ReadV1>
std::optional<double> SmallestOfGroups(const fs::path& mount, std::string_view membership,
                                       std::string_view controller, const ReadV2& v2,
                                       const ReadV1& v1) {
  std::optional<double> smallest;
  while (!membership.empty()) {  // lines of "hierarchy:controllers:path"
    const size_t newline = membership.find('\n');
    const std::string_view line = membership.substr(0, newline);
    membership.remove_prefix(newline == std::string_view::npos ? membership.size() : newline + 1);
    const size_t first = line.find(':');
    if (first == std::string_view::npos) continue;
    const size_t second = line.find(':', first + 1);
    if (second == std::string_view::npos) continue;
    const std::string_view controllers = line.substr(first + 1, second - first - 1);
    const std::string_view group = line.substr(second + 1);
    if (controllers.empty()) {
      smallest = Smaller(smallest, SmallestUpwards(mount, group, v2));
    } else if (HasController(controllers, controller)) {
      smallest = Smaller(smallest, SmallestUpwards(mount / std::string(controller), group, v1));
      smallest = Smaller(smallest, SmallestUpwards(mount / std::string(controllers), group, v1));
    }
  }
  return smallest;
}

}  // namespace

void PreferShortSlices() { SetSlice(100'000); }

void PreferLongSlices() { SetSlice(0); }

std::optional<double> CgroupCpuQuota(const fs::path& mount, std::string_view membership) {
  return SmallestOfGroups(mount, membership, "cpu", QuotaV2, QuotaV1);
}

std::optional<uint64_t> CgroupMemoryLimit(const fs::path& mount, std::string_view membership) {
  const std::optional<double> bytes = SmallestOfGroups(
      mount, membership, "memory",
      [](const fs::path& group) { return ReadBytes(group / "memory.max"); },
      [](const fs::path& group) { return ReadBytes(group / "memory.limit_in_bytes"); });
  if (!bytes) return std::nullopt;
  return static_cast<uint64_t>(std::min(*bytes, 0x1p62));  // v1 says nearly 2^63 for no limit
}

std::vector<int> AffinityCpus() {
  std::vector<int> cpus;
  for (int capacity = 1024; capacity <= (1 << 16);
       capacity *= 2) {  // the kernel's mask may be larger than cpu_set_t
    cpu_set_t* set = CPU_ALLOC(static_cast<size_t>(capacity));
    if (set == nullptr) return cpus;
    const size_t bytes = CPU_ALLOC_SIZE(static_cast<size_t>(capacity));
    CPU_ZERO_S(bytes, set);
    const bool known = sched_getaffinity(0, bytes, set) == 0;
    const bool too_small = !known && errno == EINVAL;
    for (int cpu = 0; known && cpu < capacity; ++cpu) {
      if (CPU_ISSET_S(static_cast<size_t>(cpu), bytes, set)) cpus.push_back(cpu);
    }
    CPU_FREE(set);
    if (!too_small) return cpus;
  }
  return cpus;
}

int UsableCores() {
  int cores = static_cast<int>(std::thread::hardware_concurrency());  // 0 when unknown
  const auto allowed = static_cast<int>(AffinityCpus().size());
  if (allowed > 0) cores = cores > 0 ? std::min(cores, allowed) : allowed;
  const std::optional<double> quota =
      CgroupCpuQuota("/sys/fs/cgroup", ReadSmallFile("/proc/self/cgroup"));
  if (quota && *quota < cores) cores = static_cast<int>(std::floor(*quota));
  return std::max(cores, 1);
}

absl::Status PinThread(pthread_t thread, int cpu) {
  if (cpu < 0 || cpu >= (1 << 16))
    return absl::InvalidArgumentError(StrCat("cannot pin to CPU ", cpu));
  const auto capacity = static_cast<size_t>(cpu) + 1;
  cpu_set_t* set = CPU_ALLOC(capacity);
  if (set == nullptr) return absl::ResourceExhaustedError("cannot allocate a CPU mask");
  const size_t bytes = CPU_ALLOC_SIZE(capacity);
  CPU_ZERO_S(bytes, set);
  CPU_SET_S(static_cast<size_t>(cpu), bytes, set);
  const int error = pthread_setaffinity_np(thread, bytes, set);
  CPU_FREE(set);
  if (error == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(StrCat("cannot pin to CPU ", cpu, ": ", std::strerror(error)));
}

absl::Status PinThisThread(int cpu) { return PinThread(pthread_self(), cpu); }

}  // namespace saccade
