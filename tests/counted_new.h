#pragma once
// Linked into a program, counts what it allocates by operator new; under a sanitizer, nothing.
#include <cstdint>

namespace saccade {

// So far, by all threads.
uint64_t Allocations();

}  // namespace saccade
