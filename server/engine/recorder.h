#pragma once
// Recorder: the last steps and requests of an engine, for people who ask what just happened. Rings
// of fixed size, made once; recording copies a few numbers. Engine thread only; others ask the
// engine for a copy (Engine::Recent).
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "sched/step.h"

namespace saccade {

class Recorder {
 public:
  static constexpr size_t kSteps = 4096;
  static constexpr size_t kRequests = 1024;
  // Its rings when they are full.
  static constexpr size_t kBytes =
      2 * (kSteps * sizeof(StepRecord) + kRequests * sizeof(RequestRecord));

  Recorder() {
    steps_.reserve(kSteps);
    requests_.reserve(kRequests);
  }
  void Step(const StepPlan& plan, const StepResult& result);
  // A request that ended, or was refused (`result` is null then, and when it failed).
  void Request(RequestId id, const ActRequest& request, const absl::Status& status,
               const ActResult* result, TimePoint now);
  // Oldest first.
  RecentWork Recent() const;

 private:
  template <class T>
  static void Put(std::vector<T>& ring, size_t capacity, uint64_t& count, T value) {
    if (ring.size() < capacity) {
      ring.push_back(std::move(value));
    } else {
      ring[count % capacity] = std::move(value);
    }
    ++count;
  }
  std::vector<StepRecord> steps_;
  std::vector<RequestRecord> requests_;
  uint64_t num_steps_ = 0;  // ever
  uint64_t num_requests_ = 0;
};

// The records as a Chrome trace (JSON object format), which chrome://tracing and Perfetto open: a
// row for the steps of each worker, and a row of spans for each session. Times are microseconds
// since `epoch`. Names come from `engine`.
std::string ChromeTrace(const RecentWork& recent, const Engine& engine, TimePoint epoch);

}  // namespace saccade
