// Shares, limits and places of the executor. Jobs burn a fixed amount of CPU time where shares
// matter, and wait on latches where order does.
#include "base/fair_executor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <ctime>
#include <latch>
#include <string>
#include <thread>

namespace saccade {
namespace {

using Size = FairExecutor::Size;
using Account = FairExecutor::Account;

std::shared_ptr<Account> NewAccount() { return std::make_shared<Account>(); }

void Burn(std::chrono::microseconds cpu) {
  const auto now = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
  };
  const auto until = now() + cpu;
  while (now() < until) {
  }
}

// Holds a thread of the executor until it is released.
class Blocker {
 public:
  void Occupy(FairExecutor& executor, Size size = Size::kMedium) {
    executor.Run(NewAccount(), size, [this] {
      began_.count_down();
      release_.wait();
    });
  }
  void AwaitBegin() { began_.wait(); }
  void Release() { release_.count_down(); }

 private:
  std::latch began_{1};
  std::latch release_{1};
};

TEST(FairExecutor, RefusesBadCounts) {
  for (const int threads : {-1, 0, FairExecutor::kMaxThreads + 1}) {
    EXPECT_EQ(FairExecutor::Create(threads).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(FairExecutor, RunsEveryJobOnce) {
  auto executor = FairExecutor::Create(3).value();
  std::atomic<int> ran = 0;
  std::vector<std::thread> clients;
  std::latch done(400);
  for (int c = 0; c < 4; ++c) {
    clients.emplace_back([&] {
      const auto account = NewAccount();
      for (int i = 0; i < 100; ++i) {
        executor->Run(account, static_cast<Size>(i % 3), [&] {
          ++ran;
          done.count_down();
        });
      }
    });
  }
  for (std::thread& client : clients) client.join();
  done.wait();
  EXPECT_EQ(ran, 400);
  EXPECT_EQ(executor->waiting(), 0U);
}

TEST(FairExecutor, SmallJobRunsOnItsCallerWhenNobodyWaits) {
  auto executor = FairExecutor::Create(2).value();
  std::thread::id ran;
  executor->Run(NewAccount(), Size::kSmall, [&] { ran = std::this_thread::get_id(); });
  EXPECT_EQ(ran, std::this_thread::get_id());
  std::latch done(1);
  executor->Run(NewAccount(), Size::kMedium, [&] {
    ran = std::this_thread::get_id();
    done.count_down();
  });
  done.wait();
  EXPECT_NE(ran, std::this_thread::get_id());
}

TEST(FairExecutor, OneCallerAtATime) {
  auto executor = FairExecutor::Create(2).value();
  std::latch begun(1);
  std::latch release(1);
  std::thread first([&] {
    executor->Run(NewAccount(), Size::kSmall, [&] {
      begun.count_down();
      release.wait();
    });
  });
  begun.wait();
  std::latch done(1);
  std::thread::id ran;
  executor->Run(NewAccount(), Size::kSmall, [&] {  // returns although the first is still running
    ran = std::this_thread::get_id();
    done.count_down();
  });
  done.wait();
  EXPECT_NE(ran, std::this_thread::get_id());
  release.count_down();
  first.join();
}

// Its caches are the warm ones.
TEST(FairExecutor, TheThreadThatWorkedLastIsWokenFirst) {
  auto executor = FairExecutor::Create(3).value();
  const auto account = NewAccount();
  const auto run = [&] {
    while (executor->idle() < 3) std::this_thread::yield();
    std::latch done(1);
    std::thread::id ran;
    executor->Run(account, Size::kMedium, [&] {
      ran = std::this_thread::get_id();
      done.count_down();
    });
    done.wait();
    return ran;
  };
  const std::thread::id first = run();
  for (int i = 0; i < 10; ++i) EXPECT_EQ(run(), first);
}

TEST(FairExecutor, LargeJobsLeaveAThread) {
  auto executor = FairExecutor::Create(2).value();
  Blocker large;
  large.Occupy(*executor, Size::kLarge);
  large.AwaitBegin();
  std::atomic<bool> second = false;
  std::latch second_done(1);
  executor->Run(NewAccount(), Size::kLarge, [&] {
    second = true;
    second_done.count_down();
  });
  std::latch medium(1);
  executor->Run(NewAccount(), Size::kMedium, [&] { medium.count_down(); });
  medium.wait();
  EXPECT_FALSE(second);
  EXPECT_EQ(executor->waiting(), 1U);
  large.Release();
  second_done.wait();
}

// A light client that comes late does not stand behind what heavy ones have queued.
TEST(FairExecutor, LightClientIsNotBehindAHeavyOnesQueue) {
  auto executor = FairExecutor::Create(1).value();
  const auto heavy = NewAccount();
  std::latch learned(1);
  executor->Run(heavy, Size::kMedium, [&] {  // its jobs are known to be long from here on
    Burn(std::chrono::milliseconds(5));
    learned.count_down();
  });
  learned.wait();
  Blocker blocker;
  blocker.Occupy(*executor);
  blocker.AwaitBegin();
  std::string order;
  std::latch done(6);
  const auto log = [&](char name, std::chrono::microseconds cpu) {
    return [&, name, cpu] {
      Burn(cpu);
      order += name;
      done.count_down();
    };
  };
  for (int i = 0; i < 4; ++i)
    executor->Run(heavy, Size::kMedium, log('H', std::chrono::milliseconds(5)));
  const auto light = NewAccount();
  executor->Run(light, Size::kMedium, log('l', std::chrono::microseconds(100)));
  executor->Run(light, Size::kMedium, log('l', std::chrono::microseconds(100)));
  blocker.Release();
  done.wait();
  EXPECT_EQ(order.substr(0, 3), "llH");
}

// Two clients that always have something waiting get the same CPU time, whatever one job of theirs
// takes.
TEST(FairExecutor, SharesAreOfTimeNotOfJobs) {
  auto executor = FairExecutor::Create(1).value();
  struct Client {
    std::shared_ptr<Account> account = NewAccount();
    std::chrono::microseconds cpu{};
    int ran = 0;
  };
  Client big{.cpu = std::chrono::microseconds(1000)};
  Client small{.cpu = std::chrono::microseconds(250)};
  std::atomic<bool> stop = false;
  std::latch done(1);
  std::function<void(Client&)> next = [&](Client& client) {
    executor->Run(client.account, Size::kMedium, [&] {
      Burn(client.cpu);
      ++client.ran;
      if (big.ran == 40) {
        if (!stop.exchange(true)) done.count_down();
        return;
      }
      next(client);
    });
  };
  Blocker blocker;
  blocker.Occupy(*executor);
  blocker.AwaitBegin();
  next(big);
  next(small);
  blocker.Release();
  done.wait();
  executor = nullptr;
  const double ratio = static_cast<double>(small.ran) / big.ran;
  EXPECT_GT(ratio, 3.4);
  EXPECT_LT(ratio, 4.6);
}

TEST(FairExecutor, DestructionFinishesWhatRunsAndDropsWhatWaits) {
  auto executor = FairExecutor::Create(1).value();
  std::latch begun(1);
  std::atomic<bool> finished = false;
  executor->Run(NewAccount(), Size::kMedium, [&] {
    begun.count_down();
    Burn(std::chrono::milliseconds(2));
    finished = true;
  });
  begun.wait();
  const auto held = std::make_shared<int>(0);
  executor->Run(NewAccount(), Size::kLarge, [held] {});
  executor = nullptr;
  EXPECT_TRUE(finished);
  EXPECT_EQ(held.use_count(), 1);
}

}  // namespace
}  // namespace saccade
