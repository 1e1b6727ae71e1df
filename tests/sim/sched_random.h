#pragma once
// The random scenarios of sched_random_test.cc, chosen by a fuzzer.
#include <cstdint>
#include <span>

namespace saccade::sim {

// Every byte is one choice: first of limits, classes, lanes and costs, then of what is offered,
// cancelled, failed, lost and waited for. What is wrong is a failure of GoogleTest.
void RunSchedulerOperations(std::span<const uint8_t> bytes);

}  // namespace saccade::sim
