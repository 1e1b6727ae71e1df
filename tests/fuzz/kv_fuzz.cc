// Any bytes are operations on the K/V cache: it agrees with a naive model, and a device that
// follows its page tables reads what was computed.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>

#include "tests/kv/kv_random.h"

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  testing::GTEST_FLAG(throw_on_failure) = true;  // nobody catches it: the input is kept
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  saccade::RunKvOperations({data, size});
  return 0;
}
