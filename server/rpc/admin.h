#pragma once
// What the engine remembers and holds, as messages of the Admin service. Pure functions; no gRPC.
#include "base/clock.h"
#include "engine/engine.h"
#include "saccade/v1/admin.pb.h"

namespace saccade {

// `epoch`: when the server started; times count from there.
v1::GetRecentResponse RecentRequestsOf(const RecentWork& recent, const Engine& engine,
                                       TimePoint epoch, uint32_t max_requests);
v1::GetMemoryResponse MemoryOf(const MemoryBudget& memory);
v1::GetCacheResponse CachesOf(const SchedulerStats& stats, const Engine& engine);

}  // namespace saccade
