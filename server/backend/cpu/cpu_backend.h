#pragma once
// The fast host backend. Streams run their work inside the call, on the calling thread and the
// backend's helpers; one thread at a time may use a backend's streams (two at once are safe, but
// wait for each other).
#include <memory>
#include <vector>

#include "base/status.h"
#include "kernels/cpu/api.h"
#include "tensor/backend.h"

namespace saccade {

using cpu::Isa;

struct CpuOptions {
  int threads = 0;        // that compute, the calling one included; 0: one per usable core
  Isa isa = Isa::kAuto;   // the best level of the machine, or a lower one
  std::vector<int> cpus;  // when not empty, helper i is pinned to cpus[i + 1]
};

// FAILED_PRECONDITION when the machine lacks the level (without AVX2: use the `ref` backend),
// INVALID_ARGUMENT for a bad thread count or CPU, RESOURCE_EXHAUSTED when the system starts no more
// threads.
absl::StatusOr<std::unique_ptr<Backend>> MakeCpuBackend(const CpuOptions& options);

}  // namespace saccade
