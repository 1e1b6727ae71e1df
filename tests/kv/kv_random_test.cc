// Random operations on the K/V cache beside a naive model of it: every count, hit, eviction,
// refusal, copy and every block of a page must agree after each operation. A list that fails is
// made small and printed; kept in a file, it runs again with
//   SACCADE_KV_CASE=FILE kv_random_test --gtest_filter='*Replay*'
// SACCADE_KV_OPS: operations in all (default a million).
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <string>

#include "tests/kv/kv_twin.h"

namespace saccade {
namespace {

constexpr size_t kOpsOfACase = 5'000;

size_t AllOps() {
  const char* const ops = std::getenv("SACCADE_KV_OPS");
  return ops == nullptr ? 1'000'000 : std::strtoul(ops, nullptr, 10);
}

class NaiveModel : public testing::TestWithParam<size_t> {};

TEST_P(NaiveModel, EverythingAgrees) {
  const size_t cases = AllOps() / (Geometries().size() * kOpsOfACase) + 1;
  for (uint32_t seed = 1; seed <= cases; ++seed) {
    std::mt19937 rng(seed);
    KvCase list{GetParam(), seed, RandomOps(rng, kOpsOfACase)};
    if (list.Run().empty()) continue;
    list.Shrink();
    FAIL() << list.Run() << "\n" << list.Print();
  }
}

INSTANTIATE_TEST_SUITE_P(Geometries, NaiveModel, testing::Range<size_t>(0, Geometries().size()),
                         GeometryName);

TEST(KvCase, Replay) {
  const char* const path = std::getenv("SACCADE_KV_CASE");
  if (path == nullptr) GTEST_SKIP() << "SACCADE_KV_CASE names no file";
  std::ifstream in(path);
  std::optional<KvCase> list = KvCase::Parse({std::istreambuf_iterator<char>(in), {}});
  ASSERT_TRUE(list.has_value()) << path;
  EXPECT_EQ(list->Run(), "");
}

// A cached block that vanishes is noticed, whatever else goes on, and of the list is left little
// more than what made the block idle.
TEST(KvCase, DamageIsFoundAndMadeSmall) {
  std::mt19937 rng(3);
  KvCase list{5, 3, RandomOps(rng, 2'000)};
  for (uint32_t b = 0; b < 200; ++b) {
    const auto at = list.ops.begin() + static_cast<std::ptrdiff_t>(rng() % list.ops.size());
    list.ops.insert(at, {KvOp::Kind::kDamage, b, 0});
  }
  ASSERT_NE(list.Run(), "");
  list.Shrink();
  EXPECT_LE(list.ops.size(), 30U) << list.Print();
  std::optional<KvCase> again = KvCase::Parse(list.Print());
  ASSERT_TRUE(again.has_value());
  EXPECT_EQ(again->Run(), list.Run());
  EXPECT_NE(again->Run(), "");
}

}  // namespace
}  // namespace saccade
