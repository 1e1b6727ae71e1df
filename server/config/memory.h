#pragma once
// How the memory budget of the process is cut before anything is loaded.
#include <cstdint>

#include "config/config.h"

namespace saccade {

// `memory.budget_mb`, or four fifths of what the control group and the host allow. Bytes, as below.
uint64_t BudgetBytes(const Config& config);
// What the process has beside everything that is held piece by piece: its code's data, its threads,
// and what the allocator keeps back.
uint64_t ProcessBytes(uint64_t budget);
// What gRPC may buffer: a part of the budget, at least a few of the largest messages.
uint64_t TransportBytes(const Config& config, uint64_t budget);

}  // namespace saccade
