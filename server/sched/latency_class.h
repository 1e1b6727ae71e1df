#pragma once
#include <cstdint>
#include <string>

#include "base/clock.h"
#include "base/modality.h"
#include "base/policy.h"

namespace saccade {

// A latency class is configuration. Tier 0 is the top: within it the earliest deadline goes first;
// below it classes get shares, deadlines first inside each.
struct LatencyClass {
  std::string name;
  Micros deadline{0};  // default for its requests; 0: none
  uint32_t tier = 0;
  Modality preferred = Modality::kAction;
  uint32_t shares = 1;
  OnLate on_late = OnLate::kReject;
  uint32_t max_queued = 64;  // requests waiting or running
};

}  // namespace saccade
