#pragma once
// FairExecutor: a few threads that run the jobs of many clients in fair shares of time
// (start-time fair queueing: Goyal, Vin, Cheng, SIGCOMM 1996). Nothing here is preempted, so a
// client waits for its share and for at most one job in progress; jobs known to be large never
// take all threads. The thread that worked last is woken first: its caches still hold the buffers
// and tables that the next job uses.
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/status.h"

namespace saccade {

class FairExecutor {
 public:
  static constexpr int kMaxThreads = 256;
  using Job = std::function<void()>;
  enum class Size : uint8_t {
    kSmall,   // may run on the thread that brings it
    kMedium,  // runs on the executor's threads
    kLarge,   // and on half of them at most (one, when there is only one)
  };

  // What one client has had. The executor's own; clients only keep it.
  class Account {
    friend class FairExecutor;
    std::chrono::nanoseconds finish_{0};            // end of its last job, in virtual time
    std::chrono::nanoseconds estimate_{1'000'000};  // of its next job: what the last one took
  };

  // INVALID_ARGUMENT for a bad count, RESOURCE_EXHAUSTED when the system starts no more threads.
  static absl::StatusOr<std::unique_ptr<FairExecutor>> Create(int threads);
  FairExecutor(const FairExecutor&) = delete;
  FairExecutor& operator=(const FairExecutor&) = delete;
  // Finishes the jobs that run and drops the others. No other call may be under way.
  ~FairExecutor();

  // Any thread. `job` runs soon on a thread of the executor; or, when it is small, nobody waits and
  // the one place for that is free, on this thread before the call returns, which spares the waking
  // of another one. Jobs of one account may run at the same time; they must not throw.
  void Run(const std::shared_ptr<Account>& account, Size size, Job job);
  size_t waiting() const;  // jobs
  size_t idle() const;     // threads

 private:
  struct Waiting {
    std::shared_ptr<Account> account;
    Size size = Size::kMedium;
    std::chrono::nanoseconds estimate{0};
    Job job;
  };
  // By start in virtual time, then by arrival.
  using Queue = std::map<std::pair<std::chrono::nanoseconds, uint64_t>, Waiting>;

  struct Thread {
    std::thread thread;
    std::condition_variable wake;
    bool called = false;  // to look for a job
  };

  explicit FairExecutor(int threads) : places_(threads), large_places_((threads + 1) / 2) {}
  void Loop(Thread& self);
  // The next job that may run; end when there is none.
  Queue::iterator NextLocked();
  // Calls the thread that fell asleep last, if there is one.
  void CallOneLocked();
  // Runs a job that starts at `start` in virtual time, without the lock, and charges its account.
  void Execute(std::unique_lock<std::mutex>& lock, std::chrono::nanoseconds start, Waiting waiting);

  const int places_;  // jobs that run at a time
  const int large_places_;
  mutable std::mutex mu_;
  Queue queue_;
  uint64_t next_ = 0;
  std::chrono::nanoseconds virtual_now_{0};
  int running_ = 0;
  int large_running_ = 0;
  bool caller_runs_ = false;
  bool stopping_ = false;
  std::vector<Thread*> idle_;  // the last one slept last
  std::vector<std::unique_ptr<Thread>> threads_;
};

}  // namespace saccade
