// Any bytes are limits, requests, cancellations, faults and the time between them: the scheduler
// keeps its invariants, answers every admitted request once and as if it were alone, and gives
// everything back.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>

#include "tests/sim/sched_random.h"

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  testing::GTEST_FLAG(throw_on_failure) = true;  // nobody catches it: the input is kept
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  saccade::sim::RunSchedulerOperations({data, size});
  return 0;
}
