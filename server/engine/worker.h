#pragma once
// Worker: one thread that owns one backend's stream. It is given at most two steps, the one that
// runs and the next, each with the device side of its model; the engine may take back one that has
// not started.
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "base/clock.h"
#include "base/status.h"
#include "base/wakeup.h"
#include "engine/device_model.h"
#include "sched/step.h"
#include "tensor/backend.h"

namespace saccade {

// A step, where it runs and what came of it. While a worker has it, what `model` names and `result`
// are the worker's, until `done` says that they are the engine's again.
struct WorkerStep {
  StepPlan plan;
  std::shared_ptr<DeviceModel> model;
  StepResult result;
  std::atomic<bool> done{false};
};

class Worker {
 public:
  // Called on the worker thread after every step, to set its `done`; from then on nothing of it is
  // touched here. `more`: the next one waits already.
  using OnDone = std::function<void(WorkerStep& step, bool more)>;
  // The backend and the clock outlive the worker.
  static absl::StatusOr<std::unique_ptr<Worker>> Start(Backend& backend, const Clock& clock,
                                                       OnDone on_done);
  ~Worker();  // finishes the running step, drops a queued one

  // What device models of this worker are made with.
  Stream& stream() { return *stream_; }
  // By the holder of the engine's turn. At most two steps may be unfinished. The step is borrowed:
  // it lives until OnDone, Revoke or destruction.
  void Submit(WorkerStep* step);
  // By the holder of the engine's turn. True when the step submitted last had not started: it never
  // will.
  bool Revoke();

 private:
  Worker(const Clock& clock, OnDone on_done);
  void Loop();

  const Clock& clock_;
  const OnDone on_done_;
  std::unique_ptr<Stream> stream_;
  // Step i passes through slot i % 2: the engine puts it there (and may take it back), the worker
  // takes it out.
  std::array<std::atomic<WorkerStep*>, 2> slots_{};
  uint64_t submitted_ = 0;  // by the holder of the engine's turn
  std::atomic<bool> stopping_{false};
  Wakeup wakeup_;
  std::thread thread_;
};

}  // namespace saccade
