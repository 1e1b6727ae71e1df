#pragma once
// Worker: one thread that owns one backend: its stream, scratch and the bytes of its caches. It runs one step and holds at
// most one more, which the engine may take back until it starts.
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
  // Called on the worker thread after every step.
  using OnDone = std::function<void(StepResult)>;
  struct ModelOnWorker {
    ModelId id;
    const Model* model = nullptr;
    DeviceModelOptions options;
  };

  // Allocates all device memory, then starts the thread. The backend, models and clock outlive the worker.
  static absl::StatusOr<std::unique_ptr<Worker>> Start(WorkerId id, Backend& backend,
                                                       std::span<const ModelOnWorker> models, const Clock& clock,
                                                       OnDone on_done);
  ~Worker();  // finishes the running step, drops a queued one

  // Engine thread. The slot for a queued step must be empty: it is after the step before last has finished.
  void Submit(std::unique_ptr<StepPlan> plan);
  // Engine thread. The queued step if it has not started, else nullptr.
  std::unique_ptr<StepPlan> Revoke();

 private:
  Worker(WorkerId id, Backend& backend, const Clock& clock, OnDone on_done);
  void Loop();

  const WorkerId id_;
  Backend& backend_;
  const Clock& clock_;
  const OnDone on_done_;
  std::unique_ptr<Stream> stream_;
  std::vector<std::unique_ptr<DeviceModel>> models_;  // by ModelId; null where the model is elsewhere
  std::atomic<StepPlan*> queued_{nullptr};
  std::atomic<bool> stopping_{false};
  Wakeup wakeup_;
  std::thread thread_;
};

}  // namespace saccade
