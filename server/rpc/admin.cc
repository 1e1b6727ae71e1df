#include "rpc/admin.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "base/modality.h"
#include "rpc/codec.h"

namespace saccade {
namespace {

uint64_t Us(TimePoint from, TimePoint to) {
  return static_cast<uint64_t>(std::max<int64_t>(0, ToMicros(to - from).count()));
}

}  // namespace

v1::GetRecentResponse RecentRequestsOf(const RecentWork& recent, const Engine& engine,
                                       TimePoint epoch, uint32_t max_requests) {
  v1::GetRecentResponse response;
  const size_t all = recent.requests.size();
  const size_t count = max_requests == 0 ? all : std::min<size_t>(all, max_requests);
  for (size_t i = all - count; i < all; ++i) {
    const RequestRecord& record = recent.requests[i];
    v1::RecentRequest& out = *response.add_requests();
    out.set_request_id(record.id.value());
    out.set_session_id(record.session.value());
    out.set_model(engine.ModelName(record.model));
    out.set_latency_class(engine.classes()[static_cast<size_t>(record.klass.value())].name);
    out.set_arrival_us(Us(epoch, record.arrival));
    if (record.deadline != kNever) out.set_deadline_us(Us(record.arrival, record.deadline));
    out.set_total_us(Us(record.arrival, record.finished));
    out.set_code(static_cast<int32_t>(record.code));
    out.set_reason(static_cast<v1::ErrorReason>(record.reason));
    out.set_late(record.late);
    if (record.code != absl::StatusCode::kOk) continue;
    SetTimings(record.timings, *out.mutable_timings());
    const auto sum = [](const auto& tokens) {
      return std::accumulate(tokens.begin(), tokens.end(), uint32_t{0});
    };
    out.set_prompt_tokens(sum(record.prompt_tokens));
    out.set_cached_tokens(sum(record.cached_tokens));
  }
  return response;
}

v1::GetMemoryResponse MemoryOf(const MemoryBudget& memory) {
  v1::GetMemoryResponse response;
  response.set_limit_bytes(memory.limit());
  response.set_held_bytes(memory.held());
  for (size_t k = 0; k < kMemoryKinds; ++k) {
    v1::MemoryUse& use = *response.add_kinds();
    use.set_kind(std::string(kMemoryKindNames[k]));
    use.set_held_bytes(memory.held(static_cast<MemoryKind>(k)));
  }
  return response;
}

v1::GetCacheResponse CachesOf(const SchedulerStats& stats, const Engine& engine) {
  v1::GetCacheResponse response;
  for (const SchedulerStats::Lane& lane : stats.lanes) {
    v1::CacheState& out = *response.add_caches();
    out.set_model(engine.ModelName(lane.model));
    out.set_worker(static_cast<uint32_t>(lane.worker.value()));
    out.set_total_blocks(lane.kv.num_blocks);
    out.set_free_blocks(lane.kv.free_blocks);
    out.set_embeddings_held(lane.embeddings_held);
    out.set_embeddings_idle(lane.embeddings_idle);
    for (size_t m = 0; m < kModalities; ++m) {
      const PartitionStats& partition = lane.kv.partitions[m];
      v1::PartitionState& part = *out.add_partitions();
      part.set_modality(std::string(ModalityName(static_cast<Modality>(m))));
      part.set_held(partition.held);
      part.set_idle(partition.idle);
      part.set_floor(partition.floor);
      part.set_cap(partition.cap);
      part.set_hit_tokens(partition.hit_tokens);
      part.set_miss_tokens(partition.miss_tokens);
    }
  }
  return response;
}

}  // namespace saccade
