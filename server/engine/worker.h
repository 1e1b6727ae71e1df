#pragma once
// Worker: one thread that owns one backend: its stream, scratch and the bytes of its caches. It is
// given at most two steps, the one that runs and the next; the engine may take back one that has
// not started.
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "base/wakeup.h"
#include "engine/device_model.h"
#include "sched/step.h"
#include "tensor/backend.h"

namespace saccade {

class Worker {
 public:
  // Called on the worker thread after every step of `plan`. `more`: the next one waits already.
  using OnDone = std::function<void(const StepPlan& plan, StepResult result, bool more)>;
  struct ModelOnWorker {
    ModelId id;
    const Model* model = nullptr;
    DeviceModelOptions options;
  };

  // Allocates all device memory, then starts the thread. The backend, models and clock outlive the
  // worker.
  static absl::StatusOr<std::unique_ptr<Worker>> Start(Backend& backend,
                                                       std::span<const ModelOnWorker> models,
                                                       const Clock& clock, OnDone on_done);
  ~Worker();  // finishes the running step, drops a queued one

  // By the holder of the engine's turn. At most two steps may be unfinished. The plan is borrowed:
  // it lives until OnDone, Revoke or destruction.
  void Submit(const StepPlan* plan);
  // By the holder of the engine's turn. True when the step submitted last had not started: it never
  // will.
  bool Revoke();

 private:
  Worker(const Clock& clock, OnDone on_done);
  void Loop();

  const Clock& clock_;
  const OnDone on_done_;
  std::unique_ptr<Stream> stream_;
  std::vector<std::unique_ptr<DeviceModel>>
      models_;  // by ModelId; null where the model is elsewhere
  // Step i passes through slot i % 2: the engine puts it there (and may take it back), the worker
  // takes it out.
  std::array<std::atomic<const StepPlan*>, 2> slots_{};
  uint64_t submitted_ = 0;  // by the holder of the engine's turn
  std::atomic<bool> stopping_{false};
  Wakeup wakeup_;
  std::thread thread_;
};

}  // namespace saccade
