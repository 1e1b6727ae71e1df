// Scheduler: everything it counts, counted again from what it holds. For tests and debugging.
#include <unordered_map>
#include <vector>

#include "base/strings.h"
#include "sched/scheduler_impl.h"

namespace saccade {

absl::Status Scheduler::Impl::CheckInvariants() const {
  const auto broken = [](auto&&... parts) {
    return absl::InternalError(StrCat("scheduler: ", parts...));
  };
  std::unordered_map<const ActiveRequest*, uint32_t> in_flight;
  for (const WorkerState& worker : workers_) {
    if (worker.in_flight.size() > options_.pipeline_depth) {
      return broken("worker ", worker.id.value(), " has too many steps");
    }
    std::unordered_map<const Pass*, uint32_t> passes;  // to their slices in flight
    for (const Lane* lane : worker.lanes) {
      for (const auto& pass : lane->parked) {
        if (pass != nullptr) passes.try_emplace(pass.get(), 0);
      }
    }
    for (const InFlightStep& step : worker.in_flight) {
      for (const ActiveRequest* r : step.requests) ++in_flight[r];
      if (step.pass != nullptr) ++passes[step.pass.get()];
    }
    for (const auto& [pass, slices] : passes) {
      if (pass->in_flight != slices) return broken("a pass counts its slices wrong");
      for (const ActiveRequest* r : pass->requests) ++in_flight[r];
    }
  }
  std::vector<ClassCounts> classes(classes_.size());
  std::unordered_map<const Lane*, std::vector<const ActiveRequest*>> holders;
  size_t unended = 0;
  size_t named = 0;
  for (const auto& [id, r] : requests_) {
    if (id != r->request.id) return broken("request ", id.value(), " has another id");
    const auto it = in_flight.find(r.get());
    const uint32_t steps = it == in_flight.end() ? 0 : it->second;
    named += it == in_flight.end() ? 0 : 1;
    if (steps != r->in_flight) {
      return broken("request ", id.value(), " counts ", r->in_flight, " items in flight, has ",
                    steps);
    }
    if (r->ended && r->in_flight == 0) return broken("request ", id.value(), " outlived its end");
    if (!r->ended && r->lane->lost) return broken("request ", id.value(), " is on a lost worker");
    if (r->preempting && r->in_flight == 0) {
      return broken("request ", id.value(), " is to be preempted by no step");
    }
    holders[r->lane].push_back(r.get());
    if (r->ended) continue;
    ++unended;
    ClassCounts& counts = classes[Index(r->request.klass)];
    ++(r->planned ? counts.running : counts.queued);
  }
  if (named != in_flight.size()) return broken("a step in flight names a request that is gone");
  for (size_t c = 0; c < classes.size(); ++c) {
    if (classes[c].queued != classes_[c].queued || classes[c].running != classes_[c].running) {
      return broken("class ", options_.classes[c].name, " counts wrong");
    }
    if (classes[c].queued + classes[c].running > allowed_[c]) {
      return broken("class ", options_.classes[c].name, " holds more than it may");
    }
    uint32_t bound = 0;
    for (const WorkerState& worker : workers_) {
      bound += worker.class_active[c];
      uint32_t of_sessions = 0;
      uint32_t sessions = 0;
      for (const auto& use : worker.sessions) {
        if (use->klass != c) continue;
        of_sessions += use->active;
        sessions += use->active > 0 ? 1 : 0;
      }
      if (of_sessions != worker.class_active[c] || sessions != worker.class_sessions[c]) {
        return broken("class ", options_.classes[c].name, " counts sessions wrong");
      }
    }
    if (bound != classes[c].queued + classes[c].running) {
      return broken("class ", options_.classes[c].name, " is bound elsewhere");
    }
  }
  size_t active = 0;
  for (const auto& lane : lanes_) {
    active += lane->active.size();
    RETURN_IF_ERROR(lane->CheckInvariants(holders[lane.get()]));
  }
  if (active != unended) return broken("a request is on no lane, or on two");
  return absl::OkStatus();
}

}  // namespace saccade
