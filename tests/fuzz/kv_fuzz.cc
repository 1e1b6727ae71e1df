// Any bytes are operations on the K/V cache, which agrees with a naive model after each of them.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "tests/kv/kv_twin.h"

// The first two bytes choose the pool and its prompts; every four after that are one operation.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using saccade::KvOp;
  constexpr size_t kMaxOps = 1000;
  if (size < 2) return 0;
  saccade::KvCase list;
  list.geometry = data[0] % saccade::Geometries().size();
  list.prompts = data[1];
  for (size_t at = 2; at + 4 <= size && list.ops.size() < kMaxOps; at += 4) {
    const auto kind = static_cast<KvOp::Kind>(data[at] % static_cast<uint8_t>(KvOp::Kind::kDamage));
    list.ops.push_back({kind, data[at + 1], data[at + 2] | uint32_t{data[at + 3]} << 8});
  }
  const std::string wrong = list.Run();
  if (wrong.empty()) return 0;
  std::fprintf(stderr, "kv_fuzz: %s\n%s\n", wrong.c_str(), list.Print().c_str());
  std::abort();
}
