// The sum that is never passed, and what the kernel says of the process.
#include "base/memory_budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <thread>
#include <utility>
#include <vector>

#include "base/process.h"

namespace saccade {
namespace {

using ::testing::HasSubstr;

TEST(MemoryBudgetTest, RefusesWhatDoesNotFitAndSaysTheSum) {
  MemoryBudget budget(100 << 20);
  auto weights = budget.Hold(MemoryKind::kWeights, 60 << 20);
  ASSERT_TRUE(weights.ok());
  const absl::Status refused = budget.Hold(MemoryKind::kKvCache, 41 << 20).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(GetErrorInfo(refused).reason, Reason::kOutOfMemory);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("41.0 MiB for kv_cache do not fit the budget; held: weights 60.0 = 60.0 of "
                        "100.0 MiB"));
  EXPECT_TRUE(budget.Hold(MemoryKind::kKvCache, 40 << 20).ok());  // and given back
  EXPECT_EQ(budget.held(), 60U << 20);
  EXPECT_FALSE(budget.Hold(MemoryKind::kFrames, UINT64_MAX).ok());
}

TEST(MemoryBudgetTest, HoldsMoveResizeAndEnd) {
  MemoryBudget budget(1000);
  {
    auto held = budget.Hold(MemoryKind::kFrames, 400);
    ASSERT_TRUE(held.ok());
    MemoryHold moved = *std::move(held);
    held->Release();  // moved from: gives nothing back
    EXPECT_EQ(budget.held(MemoryKind::kFrames), 400U);
    EXPECT_TRUE(moved.Resize(1000).ok());
    EXPECT_FALSE(moved.Resize(1001).ok());
    EXPECT_EQ(moved.bytes(), 1000U);
    EXPECT_TRUE(moved.Resize(10).ok());
    EXPECT_EQ(budget.held(), 10U);
    moved = MemoryHold();
    EXPECT_EQ(budget.held(), 0U);
  }
  EXPECT_EQ(budget.held(), 0U);
  EXPECT_TRUE(MemoryBudget::Hold(nullptr, MemoryKind::kFrames, UINT64_MAX).ok());
}

TEST(MemoryBudgetTest, ManyThreadsNeverPassTheLimit) {
  MemoryBudget budget(1000);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&budget, t] {
      std::vector<MemoryHold> held;
      for (uint64_t i = 0; i < 5000; ++i) {
        auto hold = budget.Hold(static_cast<MemoryKind>(t), 1 + i % 97);
        if (hold.ok()) held.push_back(*std::move(hold));
        EXPECT_LE(budget.held(), 1000U);
        if (i % 5 == 0) held.clear();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(budget.held(), 0U);
}

TEST(ProcessTest, ReadsItself) {
  const ProcessUse use = ReadProcessUse();
  EXPECT_GT(use.resident_bytes, 1U << 20);
  EXPECT_GT(use.anonymous_bytes, 0U);
  EXPECT_LE(use.anonymous_bytes, use.resident_bytes);
  EXPECT_GE(use.open_fds, 3U);
  EXPECT_GT(use.start_time_seconds, 1.6e9);
  std::vector<char> touched(64 << 20, 1);
  // A compiler may leave out what nobody reads.
  asm volatile("" : : "r"(touched.data()) : "memory");
  EXPECT_GE(AnonymousBytes() + (1 << 20), use.anonymous_bytes + touched.size());
}

TEST(ProcessTest, UsableMemoryIsTheLeastOfHostAndGroups) {
  const std::filesystem::path root =
      std::filesystem::path(::testing::TempDir()) / "saccade_usable_memory";
  const auto write = [&root](const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text;
  };
  write("proc/meminfo", "MemFree:  1 kB\nMemTotal:    1000 kB\n");
  EXPECT_EQ(UsableMemory(root.string()), 1000U * 1024);
  write("proc/self/cgroup", "0::/a/b\n");
  write("sys/fs/cgroup/a/memory.max", "500000\n");
  write("sys/fs/cgroup/a/b/memory.max", "max\n");
  EXPECT_EQ(UsableMemory(root.string()), 500000U);
  write("proc/self/cgroup", "4:memory:/c\n");
  write("sys/fs/cgroup/memory/c/memory.limit_in_bytes", "400000\n");
  EXPECT_EQ(UsableMemory(root.string()), 400000U);
  std::filesystem::remove_all(root);
}

// A sanitizer has an allocator of its own.
#if !defined(SACCADE_SANITIZE_ADDRESS) && !defined(SACCADE_SANITIZE_THREAD) && defined(__GLIBC__)
TEST(ProcessTest, FreedFramesAreUsedAgain) {
  // Free memory of others in the heap, larger than what is tried there, must not stand in the way.
  std::vector<std::vector<char>> freed(40);
  for (std::vector<char>& buffer : freed) buffer.assign(100'000, 1);
  const std::vector<char> behind(100'000, 1);
  freed.clear();
  KeepFreedMemory();
  // In a thread, whose arena gives back what is free at its end.
  std::thread([] {
    const auto faults = [] {
      rusage use{};
      getrusage(RUSAGE_THREAD, &use);
      return use.ru_minflt;
    };
    const auto frames = [] {
      for (int i = 0; i < 100; ++i) {
        std::array<std::vector<char>, 4> buffers;
        for (std::vector<char>& buffer : buffers) buffer.assign(100'000, 1);
        asm volatile("" : : "r"(buffers.data()) : "memory");
      }
    };
    frames();
    const int64_t before = faults();
    frames();
    EXPECT_LT(faults() - before, 100);  // of 10,000 pages that were written
  }).join();
}
#endif

}  // namespace
}  // namespace saccade
