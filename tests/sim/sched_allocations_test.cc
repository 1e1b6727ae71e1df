// No token costs an allocation: what the scheduler and the cache need for one was made when its
// request began.
#include <gtest/gtest.h>

#include "tests/bench/core_load.h"
#include "tests/counted_new.h"

namespace saccade {
namespace {

TEST(SchedAllocationsTest, NoneForTokensOfRunningRequests) {
  uint64_t tokens = 0;
  uint32_t step = 0;
  bench::VisitRunningSteps(Allocations, [&](uint64_t given, uint64_t planning, uint64_t ending) {
    tokens += given;
    EXPECT_EQ(planning, 0U) << "planning step " << step;
    EXPECT_EQ(ending, 0U) << "after step " << step;
    ++step;
  });
  EXPECT_GT(tokens, 5'000U);
}

}  // namespace
}  // namespace saccade
