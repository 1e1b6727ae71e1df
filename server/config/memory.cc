#include "config/memory.h"

#include <algorithm>

#include "base/process.h"

namespace saccade {

uint64_t BudgetBytes(const Config& config) {
  return config.memory.budget_mb > 0 ? config.memory.budget_mb << 20 : UsableMemory() / 5 * 4;
}

uint64_t ProcessBytes(uint64_t budget) {
  constexpr uint64_t kOwn = 64 << 20;
  constexpr uint64_t kLeastSlack = 16 << 20;
  constexpr uint64_t kMostSlack = 512 << 20;
  return kOwn + std::clamp(budget / 16, kLeastSlack, kMostSlack);
}

uint64_t TransportBytes(const Config& config, uint64_t budget) {
  constexpr uint64_t kMost = 1ULL << 30;
  return std::max(std::min(budget / 8, kMost), 4 * config.server.max_message_bytes);
}

}  // namespace saccade
