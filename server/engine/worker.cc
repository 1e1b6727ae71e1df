#include "engine/worker.h"

#include <pthread.h>

#include <utility>

namespace saccade {

Worker::Worker(const Clock& clock, OnDone on_done) : clock_(clock), on_done_(std::move(on_done)) {}

absl::StatusOr<std::unique_ptr<Worker>> Worker::Start(Backend& backend, const Clock& clock,
                                                      OnDone on_done) {
  auto worker = std::unique_ptr<Worker>(new Worker(clock, std::move(on_done)));
  ASSIGN_OR_RETURN(worker->stream_, backend.NewStream());
  worker->thread_ = std::thread([w = worker.get()] { w->Loop(); });
  return worker;
}

Worker::~Worker() {
  stopping_.store(true, std::memory_order_release);
  wakeup_.Notify();
  if (thread_.joinable()) thread_.join();
}

void Worker::Submit(WorkerStep* step) {
  slots_[submitted_++ % 2].store(step, std::memory_order_release);  // empty by contract
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
    WorkerStep* const step = slots_[taken % 2].exchange(nullptr, std::memory_order_acq_rel);
    if (step == nullptr) {
      wakeup_.WaitUntil(epoch, kNever);
      continue;
    }
    ++taken;
    StepResult& result = step->result;
    result.Clear();
    result.id = step->plan.id;
    result.started = clock_.Now();
    result.status = step->model->Run(step->plan, result);
    result.finished = clock_.Now();
    const bool more = slots_[taken % 2].load(std::memory_order_relaxed) != nullptr;
    on_done_(*step, more);
  }
}

}  // namespace saccade
