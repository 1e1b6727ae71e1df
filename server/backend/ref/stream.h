#pragma once
// An in-order queue of tasks. Without a thread a task runs inside Submit; with one (guarded mode)
// it runs later.
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "backend/ref/memory.h"
#include "base/status.h"
#include "tensor/backend.h"

namespace saccade::ref {

struct Task {
  std::function<absl::Status()> run;
  std::vector<std::shared_ptr<Memory>> uses;  // must not have been released when the task runs
  bool marker = false;                        // an event: runs even after an error
};

class RefStream final : public Stream {
 public:
  struct Options {
    bool threaded = false;
    std::chrono::microseconds max_delay{0};
    uint64_t delay_seed = 1;
  };

  RefStream(std::shared_ptr<const MemoryTable> table, const Options& options);
  ~RefStream() override;

  absl::Status Copy(TensorView dst, TensorView src) override;
  absl::StatusOr<std::unique_ptr<Event>> Record() override;
  absl::Status Synchronize() override;

  // Enqueues `task`; waits while kMaxQueued tasks are queued. Returns the stream's error if one is
  // known.
  absl::Status Submit(Task task);
  const MemoryTable& table() const { return *table_; }

 private:
  static constexpr size_t kMaxQueued = 4096;

  absl::Status Execute(const Task& task) const;
  void Loop();
  void Delay();

  const std::shared_ptr<const MemoryTable> table_;
  const Options options_;

  std::mutex mutex_;
  std::condition_variable work_;   // signals the thread
  std::condition_variable space_;  // signals the enqueuer
  std::deque<Task> queue_;         // guarded by mutex_, as the two below
  absl::Status error_;             // the first error
  bool stopping_ = false;
  uint64_t delays_ = 0;  // the thread's own
  std::thread thread_;
};

}  // namespace saccade::ref
