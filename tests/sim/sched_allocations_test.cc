// No token costs an allocation: what the scheduler and the cache need for one was made when its
// request began.
#include <gtest/gtest.h>

#include "tests/bench/core_load.h"
#include "tests/counted_new.h"

namespace saccade {
namespace {

TEST(SchedAllocationsTest, NoneForTokensOfRunningRequests) {
  constexpr uint32_t kWarmUp = 400;  // steps, in which all 256 requests begin
  constexpr uint32_t kSteps = 350;   // in which none of them ends
  bench::SchedulerLoad load(/*answer=*/800);
  load.Fill();
  uint64_t tokens = 0;
  for (uint32_t i = 0; i < kWarmUp + kSteps; ++i) {
    const uint64_t before = Allocations();
    load.Plan();
    const uint64_t planned = Allocations();
    const uint64_t given = load.Execute();
    const uint64_t executed = Allocations();
    load.Done();
    if (i < kWarmUp) continue;
    tokens += given;
    ASSERT_EQ(planned - before, 0U) << "planning step " << i;
    ASSERT_EQ(Allocations() - executed, 0U) << "after step " << i;
  }
  EXPECT_GT(tokens, 5'000U);
}

}  // namespace
}  // namespace saccade
