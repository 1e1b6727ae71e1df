#pragma once
// Where an outsider chooses how much is allocated (messages, images), no memory is an error of that
// message. Anywhere else std::bad_alloc ends the process: what is small is there, or nothing is.
#include <new>
#include <stdexcept>

#include "base/status.h"

namespace saccade {

// What `work` returns (a Status or StatusOr), or RESOURCE_EXHAUSTED.
template <class Work>
auto CatchOutOfMemory(const Work& work) -> decltype(work()) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
  } catch (const std::length_error&) {
  }
  return absl::ResourceExhaustedError("the server has no memory for this message");
}

}  // namespace saccade
