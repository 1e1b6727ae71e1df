// The shipped demo checkpoint on 60 recorded frames, against the reference's tokens. Its training
// used soft targets, so the two best logits are often neighbouring bins with a tiny gap.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "tests/golden/support/npz.h"
#include "tests/golden/support/setup.h"
#include "tests/golden/support/step_runner.h"

namespace saccade {
namespace {

class DemoFrames : public testing::TestWithParam<BackendConfig> {};

TEST_P(DemoFrames, TokensEqualTheReference) {
  const std::string dir = DataDir() + "/demo_frames/";
  const auto arrays = ReadNpz(dir + "frames.npz");
  ASSERT_TRUE(arrays.ok()) << std::string(arrays.status().message());
  const NpyArray& frames = arrays->at("frames");
  const NpyArray& tokens = arrays->at("tokens");
  const NpyArray& actions = arrays->at("actions");
  ASSERT_EQ(frames.dtype, "|u1");
  ASSERT_EQ(frames.dims, (std::vector<int64_t>{60, 224, 224, 3}));
  ASSERT_EQ(tokens.dtype, "<i4");
  ASSERT_EQ(tokens.dims, (std::vector<int64_t>{60, 10}));
  ASSERT_EQ(actions.dtype, "<f4");
  const absl::StatusOr<Json> info = ReadJsonFile(dir + "frames.json");
  ASSERT_TRUE(info.ok());
  const auto instructions = (*info)["instructions"].get<std::vector<std::string>>();
  ASSERT_EQ(instructions.size(), 60u);

  const auto loaded = LoadFrom(DemoCheckpoint(), GetParam(), DType::kF32);
  ASSERT_TRUE(loaded.ok()) << std::string(loaded.status().message());
  const Model& model = *loaded->model;
  const auto runner = StepRunner::Create(*loaded->backend, model, {});
  ASSERT_TRUE(runner.ok());
  int different = 0;
  for (size_t f = 0; f < instructions.size(); ++f) {
    Rgb8Image image{224, 224, {}};
    const size_t bytes = size_t{224} * 224 * 3;
    const auto* from = frames.As<uint8_t>() + f * bytes;
    image.rgb.assign(from, from + bytes);
    PixelRows rows(image);
    const auto frame = model.Preprocess(0, rows);
    const auto prompt = model.BuildPrompt({instructions[f]});
    ASSERT_TRUE(frame.ok() && prompt.ok());
    const auto got = (*runner)->Act(0, *prompt, *frame, 10, 512);
    ASSERT_TRUE(got.ok()) << std::string(got.status().message());
    const auto chunk = model.DecodeActions(*got, "highway_demo", InvalidTokenPolicy::kFail);
    ASSERT_TRUE(chunk.ok()) << std::string(chunk.status().message());
    for (size_t i = 0; i < 10; ++i) {
      const int32_t expected = tokens.As<int32_t>()[f * 10 + i];
      const int32_t distance = std::abs((*got)[i] - expected);
      EXPECT_LE(distance, 1) << "frame " << f << " token " << i;
      if (distance != 0) {
        ++different;
      } else {
        EXPECT_NEAR(chunk->values[i], actions.As<float>()[f * 10 + i], 1e-5);
      }
    }
  }
  EXPECT_LE(different, 6) << "of 600 tokens";
}

// The scalar backend is slow, and F32 on it is what the other tests already compare with.
std::vector<BackendConfig> FastBackends() {
  std::vector<BackendConfig> out;
  for (const BackendConfig& backend : AllBackends()) {
    if (backend.kind == BackendKind::kCpu) out.push_back(backend);
  }
  if (out.empty()) out.push_back(RefBackendConfig(false));
  return out;
}

INSTANTIATE_TEST_SUITE_P(Golden, DemoFrames, testing::ValuesIn(FastBackends()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace saccade
