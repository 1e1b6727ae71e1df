#include "base/fair_executor.h"

#include <pthread.h>

#include <algorithm>
#include <ctime>
#include <system_error>

#include "base/cores.h"
#include "base/strings.h"

namespace saccade {
namespace {

// Time this thread has computed: what a job costs others, without what others cost it.
std::chrono::nanoseconds ThreadTime() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

}  // namespace

absl::StatusOr<std::unique_ptr<FairExecutor>> FairExecutor::Create(int threads) {
  if (threads < 1 || threads > kMaxThreads) {
    return absl::InvalidArgumentError(StrCat("an executor has 1 to ", kMaxThreads, " threads"));
  }
  auto executor = std::unique_ptr<FairExecutor>(new FairExecutor(threads));
  try {
    for (int i = 0; i < threads; ++i) {
      Thread& thread = *executor->threads_.emplace_back(std::make_unique<Thread>());
      thread.thread = std::thread([e = executor.get(), &thread] { e->Loop(thread); });
    }
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(
        StrCat("the system starts no more threads: ", error.what()));
  }
  return executor;
}

FairExecutor::~FairExecutor() {
  {
    const std::lock_guard lock(mu_);
    stopping_ = true;
    while (!idle_.empty()) CallOneLocked();
  }
  for (const std::unique_ptr<Thread>& thread : threads_) {
    if (thread->thread.joinable()) thread->thread.join();
  }
}

void FairExecutor::Run(const std::shared_ptr<Account>& account, Size size, Job job) {
  std::unique_lock lock(mu_);
  const std::chrono::nanoseconds start = std::max(virtual_now_, account->finish_);
  account->finish_ = start + account->estimate_;
  Waiting waiting{account, size, account->estimate_, std::move(job)};
  if (size != Size::kSmall || caller_runs_ || running_ == places_ || !queue_.empty()) {
    queue_.emplace(std::pair(start, next_++), std::move(waiting));
    CallOneLocked();
    return;
  }
  caller_runs_ = true;
  Execute(lock, start, std::move(waiting));
  caller_runs_ = false;
  if (!queue_.empty()) CallOneLocked();  // one may have waited for this place
}

void FairExecutor::Execute(std::unique_lock<std::mutex>& lock, std::chrono::nanoseconds start,
                           Waiting waiting) {
  virtual_now_ = std::max(virtual_now_, start);
  const int large = waiting.size == Size::kLarge ? 1 : 0;
  ++running_;
  large_running_ += large;
  lock.unlock();
  const std::chrono::nanoseconds begin = ThreadTime();
  waiting.job();
  const std::chrono::nanoseconds taken = ThreadTime() - begin;
  waiting.job = nullptr;  // what it holds may be large, or need this executor
  lock.lock();
  waiting.account->finish_ += taken - waiting.estimate;
  waiting.account->estimate_ = taken;
  --running_;
  large_running_ -= large;
}

size_t FairExecutor::waiting() const {
  const std::lock_guard lock(mu_);
  return queue_.size();
}

size_t FairExecutor::idle() const {
  const std::lock_guard lock(mu_);
  return idle_.size();
}

void FairExecutor::CallOneLocked() {
  if (idle_.empty()) return;
  Thread* thread = idle_.back();
  idle_.pop_back();
  thread->called = true;
  thread->wake.notify_one();
}

FairExecutor::Queue::iterator FairExecutor::NextLocked() {
  if (running_ == places_) return queue_.end();
  if (large_running_ < large_places_) return queue_.begin();
  return std::find_if(queue_.begin(), queue_.end(),
                      [](const auto& entry) { return entry.second.size != Size::kLarge; });
}

void FairExecutor::Loop(Thread& self) {
  pthread_setname_np(pthread_self(), "saccade-decode");
  PreferLongSlices();  // jobs are long, and whoever waits for an answer is not one of them
  std::unique_lock lock(mu_);
  while (!stopping_) {
    const auto next = NextLocked();
    if (next == queue_.end()) {
      self.called = false;
      idle_.push_back(&self);
      self.wake.wait(lock, [&] { return self.called; });
      continue;
    }
    const std::chrono::nanoseconds start = next->first.first;
    Waiting waiting = std::move(next->second);
    queue_.erase(next);
    Execute(lock, start, std::move(waiting));
  }
}

}  // namespace saccade
