#include "base/thread_pool.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "base/strings.h"

namespace saccade {
namespace {

constexpr uint64_t kCountMask = 0xffffffffu;

void Relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Polls `done` for at most `limit`; the clock is read once in a while only.
template <class Done>
bool SpinUntil(std::chrono::microseconds limit, const Done& done) {
  constexpr int kPollsPerClock = 16;
  if (limit.count() <= 0) return done();
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < kPollsPerClock; ++i) {
      if (done()) return true;
      Relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return done();
}

}  // namespace

absl::StatusOr<std::unique_ptr<ThreadPool>> ThreadPool::Create(const Options& options) {
  if (options.threads < 1 || options.threads > kMaxThreads) {
    return absl::InvalidArgumentError(
        StrCat("threads: ", options.threads, " is outside [1, ", kMaxThreads, "]"));
  }
  if (!options.cpus.empty() && options.cpus.size() < static_cast<size_t>(options.threads)) {
    return absl::InvalidArgumentError(
        StrCat("cpus: ", options.cpus.size(), " CPUs for ", options.threads, " threads"));
  }
  const bool crowded = options.threads > UsableCores();
  std::unique_ptr<ThreadPool> pool(
      new ThreadPool(crowded ? std::chrono::microseconds(0) : options.spin));
  for (int thread = 1; thread < options.threads; ++thread) {
    try {
      pool->helpers_.emplace_back([thread, self = pool.get()] { self->HelperLoop(thread); });
    } catch (const std::system_error& error) {
      return absl::ResourceExhaustedError(
          StrCat("cannot start helper ", thread, ": ", error.what()));
    }
    if (!options.cpus.empty()) {
      RETURN_IF_ERROR(PinThread(pool->helpers_.back().native_handle(),
                                options.cpus[static_cast<size_t>(thread)]));
    }
  }
  return pool;
}

ThreadPool::~ThreadPool() {
  stopping_.store(true, std::memory_order_release);
  signal_.fetch_add(1, std::memory_order_release);
  signal_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void ThreadPool::RunTasks(int thread) {
  uint64_t seen = unclaimed_.load(std::memory_order_acquire);
  while ((seen & kCountMask) != 0) {
    if (!unclaimed_.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel,
                                          std::memory_order_acquire)) {
      continue;
    }
    // From here until unfinished_ goes down, this loop cannot end.
    const int task = tasks_ - static_cast<int>(seen & kCountMask);
    (*body_)(task, thread);
    if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1 && thread != 0) {
      unfinished_.notify_one();
    }
    seen = unclaimed_.load(std::memory_order_acquire);
  }
}

void ThreadPool::HelperLoop(int thread) {
  while (true) {
    const uint32_t seen = signal_.load(std::memory_order_acquire);
    if (stopping_.load(std::memory_order_acquire)) return;
    RunTasks(thread);
    const auto signalled = [&] { return signal_.load(std::memory_order_acquire) != seen; };
    if (!SpinUntil(spin_, signalled)) signal_.wait(seen, std::memory_order_acquire);
  }
}

void ThreadPool::ParallelFor(int tasks, Body body) {
  if (tasks <= 0) return;
  if (tasks == 1 || helpers_.empty()) {
    for (int task = 0; task < tasks; ++task) body(task, 0);
    return;
  }
  body_ = &body;
  tasks_ = tasks;
  unfinished_.store(tasks, std::memory_order_relaxed);
  ++loop_;
  unclaimed_.store((uint64_t{loop_} << 32) | static_cast<uint32_t>(tasks),
                   std::memory_order_release);
  signal_.fetch_add(1, std::memory_order_release);
  const auto wanted = static_cast<size_t>(tasks - 1);
  if (wanted >= helpers_.size()) {
    signal_.notify_all();
  } else {
    for (size_t i = 0; i < wanted; ++i) signal_.notify_one();
  }

  RunTasks(0);
  const auto finished = [this] { return unfinished_.load(std::memory_order_acquire) == 0; };
  if (SpinUntil(spin_, finished)) return;
  for (int32_t left = unfinished_.load(std::memory_order_acquire); left != 0;
       left = unfinished_.load(std::memory_order_acquire)) {
    unfinished_.wait(left, std::memory_order_acquire);
  }
}

}  // namespace saccade
