// Calls at their own periods: they come in time, never pile up, and stop.
#include "base/ticker.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <thread>
#include <vector>

namespace saccade {
namespace {

using std::chrono::milliseconds;

TEST(Ticker, CallsAreDueOnePeriodApart) {
  Ticker ticker;
  std::vector<TimePoint> due;
  std::promise<void> done;
  const TimePoint begin = std::chrono::steady_clock::now();
  ticker.Start(milliseconds(3), [&](TimePoint at) {
    EXPECT_LE(at, std::chrono::steady_clock::now());
    due.push_back(at);
    if (due.size() < 5) return true;
    done.set_value();
    return false;
  });
  done.get_future().wait();
  EXPECT_GE(due.front(), begin + milliseconds(3));
  for (size_t i = 1; i < due.size(); ++i) {
    EXPECT_EQ((due[i] - due[i - 1]) % milliseconds(3), TimePoint::duration(0));
    EXPECT_GT(due[i], due[i - 1]);
  }
}

TEST(Ticker, TurnsThatHavePassedAreLeftOut) {
  Ticker ticker;
  std::vector<TimePoint> due;
  std::promise<void> done;
  ticker.Start(milliseconds(2), [&](TimePoint at) {
    due.push_back(at);
    if (due.size() == 1) std::this_thread::sleep_for(milliseconds(11));
    if (due.size() < 3) return true;
    done.set_value();
    return false;
  });
  done.get_future().wait();
  EXPECT_GE(due[1] - due[0], milliseconds(12));
}

TEST(Ticker, NothingComesAfterStop) {
  Ticker ticker;
  std::atomic<int> calls{0};
  const uint64_t first = ticker.Start(milliseconds(1), [&](TimePoint) {
    ++calls;
    return true;
  });
  while (calls == 0) std::this_thread::yield();
  ticker.Stop(first);
  // A second one proves that the thread has been through its turns.
  std::promise<void> later;
  int turns = 0;
  int seen = 0;
  ticker.Start(milliseconds(2), [&](TimePoint) {
    if (++turns == 2) seen = calls;
    if (turns < 6) return true;
    later.set_value();
    return false;
  });
  later.get_future().wait();
  EXPECT_EQ(calls, seen);
}

// What a call holds may be the last to hold the ticker itself.
TEST(Ticker, MayEndInItsOwnCall) {
  auto ticker = std::make_unique<Ticker>();
  std::promise<void> done;
  ticker->Start(milliseconds(1), [&](TimePoint) {
    ticker.reset();
    done.set_value();
    return true;
  });
  done.get_future().wait();
  EXPECT_EQ(ticker, nullptr);
}

}  // namespace
}  // namespace saccade
