#pragma once
// How many CPU cores this process may really use, and pinning to them. Linux.
#include <pthread.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace saccade {

// The smallest of: CPUs in the affinity mask, floor(cgroup v1 or v2 CPU quota), hardware threads.
// At least 1.
int UsableCores();

// CPUs of the calling thread's affinity mask, ascending; empty when the system does not say.
std::vector<int> AffinityCpus();

// Restricts a thread to one CPU. INVALID_ARGUMENT when the CPU does not exist or is not allowed.
absl::Status PinThread(pthread_t thread, int cpu);
absl::Status PinThisThread(int cpu);

// Asks the system to let this thread run soon after it wakes: in the shortest time slices, 0.1 ms,
// it goes before threads of the same priority that have longer ones, also in the middle of theirs.
// Its share of the CPU stays what it was. Threads that it starts inherit that. Without it a thread
// that wakes on a busy core waits for a whole slice of somebody else, some milliseconds. Linux 6.12
// and later; needs no privilege; elsewhere, and for real-time threads, nothing happens.
void PreferShortSlices();
// Back to the system's slices: for a thread that has time.
void PreferLongSlices();

// The CPU quota in cores that the cgroup of a process sets: the smallest of its own and its
// ancestors' quotas. nullopt when there is none. `mount` is where the cgroup file systems are
// mounted (/sys/fs/cgroup), `membership` the text of /proc/self/cgroup.
std::optional<double> CgroupCpuQuota(const std::filesystem::path& mount,
                                     std::string_view membership);
// The memory limit of the same groups in bytes; nullopt: none is set.
std::optional<uint64_t> CgroupMemoryLimit(const std::filesystem::path& mount,
                                          std::string_view membership);

}  // namespace saccade
