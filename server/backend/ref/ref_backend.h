#pragma once
// The reference backend: every op in plain scalar C++, accumulated in one fixed order, in F64 where
// the compute dtype is F32 and in F32 where it is BF16. It is complete (a server can run on it), it
// is what the kernel tests compare with, and it checks more than a fast backend can: every view
// must lie inside a live buffer of this backend, every index that comes from device memory is
// checked when the op runs.
//
// Guarded mode makes the host behave as if the device were a GPU:
//   - the address of a device buffer is a mapping without access rights, so a host read or write
//   ends in SIGSEGV; ops and
//     copies reach the bytes through an alias that only the backend knows;
//   - every stream has a thread of its own. An op or a copy returns before it runs; it captures
//   shapes, scalars and views
//     when it is enqueued and reads bytes, pinned host memory included, when it runs;
//   - new device memory holds 0xFF bytes (NaN as F32 and BF16, -1 as I32).
//
// An error found while work runs (an index out of range, a buffer freed before its work) sticks to
// the stream: later work of the stream is skipped, and Event::Wait, Stream::Synchronize and later
// calls return the first error. Destroying a stream finishes what was enqueued. Buffers, packed
// weights and K/V storage must outlive the work that uses them; one that does not is reported as
// such an error, and never read.
#include <chrono>
#include <cstdint>
#include <memory>

#include "base/status.h"
#include "tensor/backend.h"

namespace saccade {

struct RefOptions {
  bool guarded = false;
  // Guarded mode only: each task first sleeps for a pseudo-random time in [0, max_delay], to shake
  // out work whose order rests on luck.
  std::chrono::microseconds max_delay{0};
  uint64_t delay_seed = 1;
};

absl::StatusOr<std::unique_ptr<Backend>> MakeRefBackend(const RefOptions& options);

}  // namespace saccade
