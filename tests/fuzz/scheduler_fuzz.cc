// Any bytes are limits, requests, cancellations, faults and the time between them: the scheduler
// keeps its invariants, answers every admitted request once and as if it were alone, and gives
// everything back.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>

#include "tests/sim/flow_random.h"
#include "tests/sim/sched_random.h"

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  testing::GTEST_FLAG(throw_on_failure) = true;  // nobody catches it: the input is kept
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr uint8_t kFlows = 0xf1;  // the first byte of inputs that are about flows
  if (size > 0 && data[0] == kFlows) {
    saccade::sim::RunFlowOperations(saccade::sim::Random({data + 1, size - 1}));
  } else {
    saccade::sim::RunSchedulerOperations({data, size});
  }
  return 0;
}
