#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

namespace saccade {
namespace {

std::unique_ptr<ThreadPool> MakePool(int threads) {
  ThreadPool::Options options;
  options.threads = threads;
  auto pool = ThreadPool::Create(options);
  EXPECT_TRUE(pool.ok()) << pool.status();
  return pool.ok() ? std::move(*pool) : nullptr;
}

class ThreadPoolTest : public testing::TestWithParam<int> {};

TEST_P(ThreadPoolTest, RunsEveryTaskOnce) {
  const auto pool = MakePool(GetParam());
  ASSERT_NE(pool, nullptr);
  EXPECT_EQ(pool->threads(), GetParam());
  for (int tasks : {0, -3, 1, 2, 3, 7, 64, 1000}) {
    std::vector<int> runs(static_cast<size_t>(std::max(tasks, 0)),
                          0);  // plain: each task writes its own
    std::atomic<bool> thread_in_range{true};
    pool->ParallelFor(tasks, [&](int task, int thread) {
      ++runs[static_cast<size_t>(task)];
      if (thread < 0 || thread >= GetParam()) thread_in_range = false;
    });
    EXPECT_TRUE(thread_in_range);
    EXPECT_EQ(runs, std::vector<int>(runs.size(), 1)) << tasks;
  }
}

TEST_P(ThreadPoolTest, ManyShortLoopsSeeWhatTheCallerWrote) {
  const auto pool = MakePool(GetParam());
  ASSERT_NE(pool, nullptr);
  std::vector<int64_t> input(17);
  std::vector<int64_t> output(17);
  for (int loop = 0; loop < 3000; ++loop) {
    const int tasks = 1 + loop % 17;
    for (int i = 0; i < tasks; ++i) input[static_cast<size_t>(i)] = loop * 100 + i;
    pool->ParallelFor(tasks, [&](int task, int) {
      output[static_cast<size_t>(task)] = input[static_cast<size_t>(task)] + 1;
    });
    for (int i = 0; i < tasks; ++i) ASSERT_EQ(output[static_cast<size_t>(i)], loop * 100 + i + 1);
  }
}

TEST_P(ThreadPoolTest, ScratchPerThreadIsNeverShared) {
  const auto pool = MakePool(GetParam());
  ASSERT_NE(pool, nullptr);
  std::vector<int64_t> sums(static_cast<size_t>(GetParam()),
                            0);  // a race here is what TSan looks for
  pool->ParallelFor(5000, [&](int task, int thread) { sums[static_cast<size_t>(thread)] += task; });
  EXPECT_EQ(std::accumulate(sums.begin(), sums.end(), int64_t{0}), int64_t{4999} * 5000 / 2);
}

INSTANTIATE_TEST_SUITE_P(Threads, ThreadPoolTest, testing::Values(1, 2, 3, 8));

TEST(ThreadPool, StalledHelperHoldsUpOnlyItsOwnTask) {
  const auto pool = MakePool(2);
  ASSERT_NE(pool, nullptr);
  constexpr int kTasks = 50;
  std::mutex mutex;
  std::condition_variable changed;
  int done = 0;
  bool helper_holds_one = false;
  pool->ParallelFor(kTasks, [&](int, int thread) {
    std::unique_lock lock(mutex);
    if (thread != 0) {
      // The helper takes one task and does not move until every other task is done: only the caller
      // can do them.
      helper_holds_one = true;
      changed.notify_all();
      changed.wait(lock, [&] { return done == kTasks - 1; });
    } else {
      changed.wait(lock, [&] { return helper_holds_one; });
    }
    ++done;
    changed.notify_all();
  });
  EXPECT_EQ(done, kTasks);
}

TEST(ThreadPool, HelpersTakePart) {
  const auto pool = MakePool(3);
  ASSERT_NE(pool, nullptr);
  std::mutex mutex;
  std::condition_variable changed;
  std::set<int> threads;
  // Each task waits for the others, so three threads must run at once.
  pool->ParallelFor(3, [&](int, int thread) {
    std::unique_lock lock(mutex);
    threads.insert(thread);
    changed.notify_all();
    changed.wait(lock, [&] { return threads.size() == 3; });
  });
  EXPECT_EQ(threads, (std::set<int>{0, 1, 2}));
}

TEST(ThreadPool, WakesHelpersThatSleep) {
  const auto pool = MakePool(2);
  ASSERT_NE(pool, nullptr);
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::atomic<int> arrived{0};
    pool->ParallelFor(2, [&](int, int) {
      arrived.fetch_add(1);
      while (arrived.load() < 2) std::this_thread::yield();
    });
    EXPECT_EQ(arrived, 2);
  }
}

TEST(ThreadPool, RefusesBadOptions) {
  for (int threads : {0, -1, ThreadPool::kMaxThreads + 1}) {
    ThreadPool::Options options;
    options.threads = threads;
    EXPECT_EQ(ThreadPool::Create(options).status().code(), absl::StatusCode::kInvalidArgument)
        << threads;
  }
  ThreadPool::Options few_cpus;
  few_cpus.threads = 2;
  few_cpus.cpus = {0};
  EXPECT_EQ(ThreadPool::Create(few_cpus).status().code(), absl::StatusCode::kInvalidArgument);
  ThreadPool::Options no_such_cpu;
  no_such_cpu.threads = 2;
  no_such_cpu.cpus = {0, 60000};
  EXPECT_EQ(ThreadPool::Create(no_such_cpu).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ThreadPool, PinsHelpers) {
  const std::vector<int> allowed = AffinityCpus();
  ASSERT_FALSE(allowed.empty());
  ThreadPool::Options options;
  options.threads = 2;
  options.cpus = {allowed.front(), allowed.back()};
  const auto pool = ThreadPool::Create(options);
  ASSERT_TRUE(pool.ok()) << pool.status();
  std::vector<int> helper_cpus;
  std::atomic<int> arrived{0};
  (*pool)->ParallelFor(2, [&](int, int thread) {
    arrived.fetch_add(1);
    while (arrived.load() < 2) std::this_thread::yield();
    if (thread == 1) helper_cpus = AffinityCpus();
  });
  EXPECT_EQ(helper_cpus, std::vector<int>{allowed.back()});
  EXPECT_EQ(AffinityCpus(), allowed) << "the caller is left alone";
}

}  // namespace
}  // namespace saccade
