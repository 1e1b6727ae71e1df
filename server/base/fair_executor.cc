#include "base/fair_executor.h"

#include <pthread.h>

#include <algorithm>
#include <ctime>
#include <system_error>

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
      executor->threads_.emplace_back([e = executor.get()] { e->Loop(); });
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
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void FairExecutor::Run(const std::shared_ptr<Account>& account, Size size, Job job) {
  std::unique_lock lock(mu_);
  const std::chrono::nanoseconds start = EnterLocked(*account);
  const std::chrono::nanoseconds estimate = account->estimate_;
  if (size != Size::kSmall || caller_runs_ || running_ == places_ || !queue_.empty()) {
    queue_.emplace(std::pair(start, next_++), Waiting{account, size, estimate, std::move(job)});
    const bool idle = running_ < places_;
    lock.unlock();
    if (idle) wake_.notify_one();
    return;
  }
  virtual_now_ = std::max(virtual_now_, start);
  caller_runs_ = true;
  ++running_;
  lock.unlock();
  const std::chrono::nanoseconds begin = ThreadTime();
  job();
  const std::chrono::nanoseconds taken = ThreadTime() - begin;
  lock.lock();
  Settle(*account, estimate, taken);
  caller_runs_ = false;
  --running_;
  const bool work = !queue_.empty();
  lock.unlock();
  if (work) wake_.notify_one();
}

size_t FairExecutor::waiting() const {
  const std::lock_guard lock(mu_);
  return queue_.size();
}

std::chrono::nanoseconds FairExecutor::EnterLocked(Account& account) {
  const std::chrono::nanoseconds start = std::max(virtual_now_, account.finish_);
  account.finish_ = start + account.estimate_;
  return start;
}

void FairExecutor::Settle(Account& account, std::chrono::nanoseconds estimate,
                          std::chrono::nanoseconds taken) {
  account.finish_ += taken - estimate;
  account.estimate_ = taken;
}

FairExecutor::Queue::iterator FairExecutor::NextLocked() {
  if (running_ == places_) return queue_.end();
  if (large_running_ < large_places_) return queue_.begin();
  return std::find_if(queue_.begin(), queue_.end(),
                      [](const auto& entry) { return entry.second.size != Size::kLarge; });
}

void FairExecutor::Loop() {
  pthread_setname_np(pthread_self(), "saccade-decode");
  std::unique_lock lock(mu_);
  while (true) {
    auto next = queue_.end();
    wake_.wait(lock, [&] { return stopping_ || (next = NextLocked()) != queue_.end(); });
    if (stopping_) return;
    const std::chrono::nanoseconds start = next->first.first;
    Waiting waiting = std::move(next->second);
    queue_.erase(next);
    virtual_now_ = std::max(virtual_now_, start);
    ++running_;
    if (waiting.size == Size::kLarge) ++large_running_;
    lock.unlock();
    const std::chrono::nanoseconds begin = ThreadTime();
    waiting.job();
    const std::chrono::nanoseconds taken = ThreadTime() - begin;
    waiting.job = nullptr;  // what it holds may be large, or need this executor
    lock.lock();
    Settle(*waiting.account, waiting.estimate, taken);
    --running_;
    if (waiting.size == Size::kLarge) --large_running_;
    // A large job may have waited for this one's place.
    if (!queue_.empty()) wake_.notify_one();
  }
}

}  // namespace saccade
