// Recorded traces are replayed: the requests as they came, steps as long as they were.
#include <gtest/gtest.h>

#include "tests/sim/run.h"

namespace saccade::sim {
namespace {

constexpr const char* kTrace = SACCADE_SOURCE_DIR "/tests/sim/traces/demo_5s.txt";

TEST(Traces, AreReplayedAsRecorded) {
  const absl::StatusOr<Scenario> trace = ReadScenario(kTrace);
  ASSERT_TRUE(trace.ok()) << trace.status();
  const Report report = RunScenario(*trace);
  EXPECT_TRUE(report.ok()) << report.Table();
  EXPECT_EQ(report.requests, trace->arrivals.size());
  // The request that left in the middle is not judged.
  EXPECT_EQ(report.Find("best_effort")->offered, 5u);
  EXPECT_EQ(report.Find("driving")->offered, 75u);
  // A recorded request alone takes 4.6 ms for its frame and prompt and nine decodes of 0.16 ms.
  EXPECT_GT(report.Find("driving")->latency_p99_us, 5'500);
  EXPECT_LT(report.Find("driving")->latency_p99_us, 20'000);
}

TEST(Traces, StepsTakeWhatWasMeasured) {
  absl::StatusOr<Scenario> trace = ReadScenario(kTrace);
  ASSERT_TRUE(trace.ok()) << trace.status();
  const double before = RunScenario(*trace).Find("driving")->latency_p99_us;
  for (StepLine& step : trace->steps) step.took_us *= 3;
  const double after = RunScenario(*trace).Find("driving")->latency_p99_us;
  EXPECT_GT(after, 2.5 * before);
  EXPECT_LT(after, 6 * before);
}

TEST(Traces, GoOnForAsLongAsOneLikes) {
  absl::StatusOr<Scenario> trace = ReadScenario(kTrace);
  ASSERT_TRUE(trace.ok()) << trace.status();
  trace->repeat = 24;
  trace->seconds = 120;
  const Report report = RunScenario(*trace);
  EXPECT_TRUE(report.ok()) << report.Table();
  EXPECT_EQ(report.requests, 24 * trace->arrivals.size());
  EXPECT_GT(report.simulated_s, 110);
}

TEST(Traces, ReadBackAsTheyArePrinted) {
  const absl::StatusOr<Scenario> trace = ReadScenario(kTrace);
  ASSERT_TRUE(trace.ok()) << trace.status();
  const std::string text = PrintScenario(*trace);
  const absl::StatusOr<Scenario> again = ParseScenario(text);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(PrintScenario(*again), text);
  EXPECT_EQ(again->steps.size(), trace->steps.size());
}

}  // namespace
}  // namespace saccade::sim
