#pragma once
// A pool for data-parallel loops inside one op. The calling thread computes too; helpers spin for a
// moment after a loop and then sleep on a futex. A helper that the system preempts delays a loop
// only by the task it holds: the caller takes every task that nobody has begun.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "base/cores.h"
#include "base/status.h"

namespace saccade {

class ThreadPool {
 public:
  struct Options {
    int threads = 1;        // the caller included, so `threads - 1` helpers
    std::vector<int> cpus;  // when not empty, helper i is pinned to cpus[i + 1]; the caller pins
                            // itself (PinThisThread)
    std::chrono::microseconds spin{
        20};  // at most, before a thread sleeps; none when there are more threads than cores
  };
  static constexpr int kMaxThreads = 1024;

  // INVALID_ARGUMENT for a bad count or CPU, RESOURCE_EXHAUSTED when the system starts no more
  // threads.
  static absl::StatusOr<std::unique_ptr<ThreadPool>> Create(const Options& options);
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool();

  int threads() const { return static_cast<int>(helpers_.size()) + 1; }

  // Calls body(task, thread) once for every task in [0, tasks), in no particular order, and returns
  // when all calls have. thread is in [0, threads()) and is 0 for the caller; two calls that run at
  // once have different threads. What the caller wrote before is visible in the body, and what
  // bodies wrote is visible after. The body must not throw, and must not call ParallelFor. One
  // thread at a time may call this.
  void ParallelFor(int tasks, absl::FunctionRef<void(int task, int thread)> body);

 private:
  using Body = absl::FunctionRef<void(int, int)>;
  explicit ThreadPool(std::chrono::microseconds spin) : spin_(spin) {}

  void HelperLoop(int thread);
  // Runs unclaimed tasks until there are none.
  void RunTasks(int thread);

  const std::chrono::microseconds spin_;

  // The current loop. Its number is in the upper half and the count of unclaimed tasks in the
  // lower, so that a helper that slept through the end of one loop cannot claim a task of the next
  // by mistake. The number keeps a claimed task's loop alive: `body_` and `tasks_` are plain
  // because they change only while no task is claimed.
  alignas(64) std::atomic<uint64_t> unclaimed_{0};
  const Body* body_ = nullptr;
  int tasks_ = 0;
  uint32_t loop_ = 0;  // the caller's own
  alignas(64) std::atomic<int32_t> unfinished_{0};
  alignas(64) std::atomic<uint32_t> signal_{
      0};  // helpers sleep on it; changes with every loop and on destruction
  std::atomic<bool> stopping_{false};

  std::vector<std::thread> helpers_;
};

}  // namespace saccade
