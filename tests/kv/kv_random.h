#pragma once
// The random operations of kv_random_test.cc, chosen by a fuzzer.
#include <cstdint>
#include <span>

namespace saccade {

// The first byte chooses a geometry, and the naive model or the pipeline; every other byte is one
// choice. At most a thousand operations. What is wrong is a failure of GoogleTest.
void RunKvOperations(std::span<const uint8_t> bytes);

}  // namespace saccade
