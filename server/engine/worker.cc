#include "engine/worker.h"

#include <pthread.h>

#include <utility>

namespace saccade {

Worker::Worker(const Clock& clock, OnDone on_done) : clock_(clock), on_done_(std::move(on_done)) {}

absl::StatusOr<std::unique_ptr<Worker>> Worker::Start(Backend& backend,
                                                      std::span<const ModelOnWorker> models,
                                                      const Clock& clock, OnDone on_done) {
  auto worker = std::unique_ptr<Worker>(new Worker(clock, std::move(on_done)));
  ASSIGN_OR_RETURN(worker->stream_, backend.NewStream());
  for (const ModelOnWorker& m : models) {
    const auto index = static_cast<size_t>(m.id.value());
    if (worker->models_.size() <= index) worker->models_.resize(index + 1);
    ASSIGN_OR_RETURN(worker->models_[index],
                     DeviceModel::Create(backend, *worker->stream_, *m.model, m.options));
  }
  worker->thread_ = std::thread([w = worker.get()] { w->Loop(); });
  return worker;
}

Worker::~Worker() {
  stopping_.store(true, std::memory_order_release);
  wakeup_.Notify();
  if (thread_.joinable()) thread_.join();
}

void Worker::Submit(const StepPlan* plan) {
  slots_[submitted_++ % 2].store(plan, std::memory_order_release);  // empty by contract
  wakeup_.Notify();
}

bool Worker::Revoke() {
  if (slots_[(submitted_ - 1) % 2].exchange(nullptr, std::memory_order_acq_rel) == nullptr) {
    return false;
  }
  --submitted_;
  return true;
}

void Worker::Loop() {
  pthread_setname_np(pthread_self(), "saccade-worker");
  uint64_t taken = 0;
  while (!stopping_.load(std::memory_order_acquire)) {
    const uint32_t epoch = wakeup_.Epoch();
    const StepPlan* plan = slots_[taken % 2].exchange(nullptr, std::memory_order_acq_rel);
    if (plan == nullptr) {
      wakeup_.WaitUntil(epoch, kNever);
      continue;
    }
    ++taken;
    StepResult result;
    result.id = plan->id;
    result.started = clock_.Now();
    const auto index = static_cast<size_t>(plan->model.value());
    if (index < models_.size() && models_[index] != nullptr) {
      result.status = models_[index]->Run(*plan, result);
    } else {
      result.status = absl::InternalError("the step's model is not on this worker");
    }
    result.finished = clock_.Now();
    on_done_(std::move(result));
  }
}

}  // namespace saccade
