#pragma once
// Pools and prompts for random operations on the K/V cache: odd sizes, tiny pools, floors and caps
// at their edges; prompts that share prefixes in many ways.
#include <algorithm>
#include <array>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/kv/kv_testing.h"

namespace saccade {

struct Geometry {
  const char* name;
  uint32_t num_blocks;
  uint32_t block_tokens;
  std::array<PartitionQuota, kModalities> quotas;  // vision, text, state, action
};

inline const std::vector<Geometry>& Geometries() {
  static const std::vector<Geometry> geometries = {
      {"one block", 1, 4, {{{0, 1}, {0, 1}, {0, 1}, {0, 1}}}},
      {"three blocks", 3, 2, {{{0, 3}, {0, 3}, {0, 0}, {0, 3}}}},
      {"single tokens", 24, 1, {{{2, 16}, {3, 20}, {0, 1}, {1, 8}}}},
      {"all floors", 12, 3, {{{5, 8}, {4, 8}, {1, 1}, {2, 4}}}},
      {"tight caps", 16, 4, {{{0, 5}, {0, 6}, {0, 0}, {0, 3}}}},
      {"no quotas", 20, 4, {{{0, 20}, {0, 20}, {0, 20}, {0, 20}}}},
      {"floors are caps", 17, 5, {{{6, 6}, {7, 7}, {0, 0}, {4, 4}}}},
      {"one floor takes all", 13, 3, {{{13, 13}, {0, 13}, {0, 13}, {0, 13}}}},
      {"caps above the pool", 19, 7, {{{1, 1000}, {1, 1000}, {1, 1000}, {1, 1000}}}},
      {"roomy", 64, 16, {{{16, 64}, {4, 48}, {0, 16}, {4, 32}}}},
  };
  return geometries;
}

inline std::string GeometryName(const testing::TestParamInfo<size_t>& info) {
  std::string name = Geometries()[info.param].name;
  std::replace(name.begin(), name.end(), ' ', '_');
  return name;
}

inline KvCacheOptions OptionsOf(const Geometry& g) {
  KvCacheOptions options;
  options.num_blocks = g.num_blocks;
  options.block_tokens = g.block_tokens;
  options.partitions = g.quotas;
  return options;
}

inline std::vector<std::shared_ptr<const Timeline>> Prompts(const Geometry& g, std::mt19937& rng) {
  const std::vector<ContentRef> frames = {Frame(1), Frame(2), Frame(3)};
  std::vector<std::shared_ptr<const Timeline>> prompts;
  for (int i = 0; i < 14; ++i) {
    TimelineBuilder builder(Salt(i % 7 == 6 ? "n" : "m"), g.block_tokens);
    if (rng() % 2 == 0) builder.AddText(Ids(1, 1 + rng() % (2 * g.block_tokens)));
    const uint32_t cameras = rng() % 3;
    for (uint32_t c = 0; c < cameras; ++c) {
      builder.AddVision(c, frames[rng() % 3], 2 * g.block_tokens + (g.block_tokens + 1) / 2);
    }
    auto ids = Ids(100, 1 + rng() % (3 * g.block_tokens));
    if (rng() % 3 == 0) ids[rng() % ids.size()] = 7;
    builder.AddText(ids);
    if (rng() % 3 == 0) builder.SetAnswer(Modality::kText);
    prompts.push_back(builder.Build());
  }
  return prompts;
}

}  // namespace saccade
