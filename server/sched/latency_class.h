#pragma once
#include <algorithm>
#include <cstdint>
#include <span>
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

// How many tiers above `tier` have classes.
inline uint32_t TiersAbove(std::span<const LatencyClass> classes, uint32_t tier) {
  uint32_t count = 0;
  for (size_t i = 0; i < classes.size(); ++i) {
    if (classes[i].tier >= tier) continue;
    const bool seen = std::any_of(classes.begin(), classes.begin() + static_cast<std::ptrdiff_t>(i),
                                  [&](const LatencyClass& c) { return c.tier == classes[i].tier; });
    count += seen ? 0 : 1;
  }
  return count;
}
// Of passes that are cut by layers, each tier has one at a time on a lane.
inline uint32_t ParkingPlaces(std::span<const LatencyClass> classes) {
  uint32_t lowest = 0;
  for (const LatencyClass& c : classes) lowest = std::max(lowest, c.tier);
  return TiersAbove(classes, lowest) + 1;
}

}  // namespace saccade
