#pragma once
// WorkerState: the steps in flight on one worker and the fair shares of its time. Private to
// sched/.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/ids.h"
#include "sched/active_request.h"
#include "sched/lane.h"
#include "sched/latency_class.h"

namespace saccade {

struct InFlightStep {
  StepId id;
  Lane* lane = nullptr;
  Micros p50{0};
  uint32_t best_tier = 0;                // of the work in it
  TimePoint earliest_deadline = kNever;  // among its work of that tier
  std::vector<ActiveRequest*> requests;  // one entry per item; none of a slice
  std::vector<Charge> charges;           // one per item
  std::shared_ptr<Pass> pass;            // not null: a slice of it

  // As new, in old memory.
  void Clear() {
    std::vector<ActiveRequest*> old_requests = std::move(requests);
    std::vector<Charge> old_charges = std::move(charges);
    *this = InFlightStep();
    requests = std::move(old_requests);
    charges = std::move(old_charges);
    requests.clear();
    charges.clear();
  }

  // By item, of a slice too.
  const std::vector<ActiveRequest*>& named() const {
    return pass != nullptr ? pass->requests : requests;
  }
};

struct WorkerState {
  WorkerId id;
  std::vector<Lane*> lanes;
  std::vector<InFlightStep> in_flight;  // oldest first
  TimePoint busy_until{};               // predicted end of `in_flight`
  TimePoint next_aged{};                // ageing has used its share until then
  // Requests that were announced and have not come; one for each session and class at most.
  struct Arrival {
    SessionId session;
    ClassId klass;
    uint32_t tier = 0;
    TimePoint at{};
  };
  std::vector<Arrival> arrivals;
  TimePoint held_for = kNever;    // a step was held back for the arrival at that time,
  TimePoint held_until = kNever;  // and is, at the longest until then
  // Stride scheduling: predicted microseconds a class has got, divided by its shares. The lowest
  // goes first among classes of a tier.
  std::vector<double> class_pass;
  std::vector<uint32_t> class_active;
  std::vector<uint32_t> class_sessions;  // with active requests
  // Predicted microseconds given to each class lately, fading with kUsageMemory.
  std::vector<double> class_used;
  TimePoint used_at{};
  std::vector<double> session_used;                   // by class; scratch of JudgeSessions
  std::vector<std::unique_ptr<SessionUse>> sessions;  // with requests, or use that has not faded
  bool lost = false;

  static constexpr Micros kUsageMemory{500'000};
  static constexpr Micros kPatience{1'000};    // with an announced request that is late
  static constexpr size_t kNobody = SIZE_MAX;  // no class
  static constexpr double kForgotten = 100;    // microseconds of use
  static constexpr size_t kMaxGone = 256;      // sessions without requests that are remembered
  static constexpr double kTolerance = 1.1;    // a session above its share by less is within it

  void Fade(TimePoint now) {
    if (now <= used_at) return;
    const double fade = std::exp(-static_cast<double>(ToMicros(now - used_at).count()) /
                                 static_cast<double>(kUsageMemory.count()));
    for (double& used : class_used) used *= fade;
    for (const auto& session : sessions) session->used *= fade;
    std::erase_if(sessions, [](const auto& s) { return s->active == 0 && s->used < kForgotten; });
    used_at = now;
  }
  // Part of the time that classes of tiers above `tier` have lately used.
  double UsedAbove(std::span<const LatencyClass> classes, uint32_t tier, TimePoint now) {
    Fade(now);
    double used = 0;
    for (size_t c = 0; c < classes.size(); ++c) used += classes[c].tier < tier ? class_used[c] : 0;
    return used / static_cast<double>(kUsageMemory.count());
  }

  // Of the announced requests more urgent than `tier` that may still come: the first one's time.
  TimePoint NextArrival(uint32_t tier, TimePoint now) {
    std::erase_if(arrivals, [now](const Arrival& a) { return a.at + kPatience <= now; });
    TimePoint next = kNever;
    for (const Arrival& a : arrivals) next = a.tier < tier ? std::min(next, a.at) : next;
    return next;
  }

  SessionUse* FindSession(SessionId id, size_t klass) {
    for (const auto& s : sessions) {
      if (s->session == id && s->klass == klass) return s.get();
    }
    return nullptr;
  }
  SessionUse* AddSession(SessionId id, size_t klass) {
    SessionUse* use = FindSession(id, klass);
    if (use == nullptr) {
      use = sessions.emplace_back(std::make_unique<SessionUse>()).get();
      use->session = id;
      use->klass = klass;
    }
    if (use->active++ == 0) ++class_sessions[klass];
    return use;
  }
  void RemoveSession(SessionUse& use) {
    if (--use.active > 0) return;
    --class_sessions[use.klass];
    // Sessions that come and go do not pile up.
    const auto gone = [](const auto& s) { return s->active == 0; };
    if (static_cast<size_t>(std::count_if(sessions.begin(), sessions.end(), gone)) > kMaxGone) {
      sessions.erase(std::find_if(sessions.begin(), sessions.end(), gone));
    }
  }
  // Says which sessions have lately got more of their class than an equal share among those that
  // have requests now. Nobody has while no session of the class waits with two requests: then
  // deadlines alone decide.
  void JudgeSessions(TimePoint now) {
    Fade(now);
    Judge(nullptr, kNobody);
  }
  // The same as if `session` had one more request of `klass`: whether it is above its share then.
  bool JudgeJoining(SessionId session, size_t klass, TimePoint now) {
    Fade(now);  // before the search: it forgets sessions
    const SessionUse* const joining = FindSession(session, klass);
    Judge(joining, klass);
    return joining != nullptr && joining->over_share;
  }
  // `joining` (may be null) counts among the sessions with requests of its class.
  void Judge(const SessionUse* joining, size_t joining_class) {
    session_used.assign(class_used.size(), 0);
    for (const auto& s : sessions) {
      if (s->active > 0 || s.get() == joining) session_used[s->klass] += s->used;
    }
    for (const auto& s : sessions) {
      uint32_t count = class_sessions[s->klass];
      const bool more = count < class_active[s->klass];
      if (s->klass == joining_class && (joining == nullptr || joining->active == 0)) ++count;
      s->over_share = more && count > 1 && s->used * count > kTolerance * session_used[s->klass];
    }
  }

  // For an item of `r` at `now`. A class without work does not save up: it follows the lowest
  // running one of its tier.
  void Take(std::span<const LatencyClass> classes, const Charge& charge, const ActiveRequest& r,
            TimePoint now) {
    const size_t klass = charge.klass;
    const double us = charge.us;
    Fade(now);
    SessionUse* const use = r.ended ? FindSession(charge.session, klass) : r.use;
    if (use != nullptr) use->used += us;
    class_used[klass] += us;
    const double before = class_pass[klass];
    class_pass[klass] += us / std::max<uint32_t>(classes[klass].shares, 1);
    for (size_t c = 0; c < classes.size(); ++c) {
      if (class_active[c] == 0 && classes[c].tier == classes[klass].tier) {
        class_pass[c] = std::max(class_pass[c], before);
      }
    }
  }
};

}  // namespace saccade
