// OpenVLA-OFT through the engine: the same request gives the same bits alone and in any company,
// with any number of threads, in one step or cut by layers, and a chunk that is not finite fails
// its request alone.
#include <gtest/gtest.h>

#include <cstring>
#include <future>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "backend/ref/ref_backend.h"
#include "base/clock.h"
#include "engine/engine.h"
#include "model/checkpoint.h"
#include "session/prompt_timeline.h"
#include "tests/golden/support/engine_serving.h"
#include "tests/golden/support/setup.h"

namespace saccade {
namespace {

constexpr int kRequests = 7;

struct ServingSetup {
  std::string folder;
  OftOptions oft;
  bool guarded_ref = false;
  int threads = 1;
  DType compute = DType::kF32;
  Micros step_ceiling{0};
};

ServingSetup ThreeImages(DType compute) {
  ServingSetup setup{DataDir() + "/variants/oft_three/checkpoint", {}};
  setup.oft.chunk = 6;
  setup.compute = compute;
  return setup;
}

ServingSetup Tokens(DType compute) {
  ServingSetup setup{DataDir() + "/variants/oft_tokens/checkpoint", {}};
  setup.oft.platform = OftPlatform::kBridge;
  setup.compute = compute;
  return setup;
}

class Served {
 public:
  static std::unique_ptr<Served> Make(const ServingSetup& setup) {
    auto served = std::make_unique<Served>();
    std::unique_ptr<Backend> backend;
    if (setup.guarded_ref) {
      RefOptions options;
      options.guarded = true;
      backend = MakeRefBackend(options).value();
    } else {
      CpuOptions options;
      options.threads = setup.threads;
      backend = MakeCpuBackend(options).value();
    }
    const auto checkpoint = Checkpoint::Open(setup.folder);
    if (!checkpoint.ok()) return nullptr;
    ModelOptions model_options;
    model_options.compute = setup.compute;
    model_options.oft = setup.oft;
    ServedModel model;
    model.name = "oft";
    model.invalid_tokens = InvalidTokenPolicy::kClamp;
    model.instances.push_back(LoadModel(*checkpoint, *backend, model_options).value());
    model.workers.emplace_back(0);
    model.kv.num_blocks = 400;
    for (PartitionQuota& quota : model.kv.partitions) quota.cap = model.kv.num_blocks;
    model.embedding_slots = 64;
    model.max_sequences = 64;
    std::vector<ServedModel> models;
    models.push_back(std::move(model));
    served->engine_ = StartPatientEngine(std::move(backend), std::move(models), served->clock_,
                                         setup.step_ceiling);
    return served->engine_ == nullptr ? nullptr : std::move(served);
  }

  std::shared_ptr<CollectSink> Submit(int which) {
    const ModelRef served = engine_->models().front();
    const Model& model = *served->instances.front();
    const ModelSpec& spec = model.spec();
    const std::string& key = spec.statistics.front().key;
    StateRef state;
    std::vector<float> robot;
    PromptInput input;
    const std::string words = "do thing " + std::string(static_cast<size_t>(which % 5) + 1, 'x');
    input.instruction = words;
    if (spec.state_dim > 0) {
      for (uint32_t i = 0; i < spec.state_dim; ++i)
        robot.push_back(static_cast<float>(which % 6) * 0.1F - 0.05F * static_cast<float>(i));
      state = std::make_shared<const std::vector<float>>(model.NormalizeState(robot, key).value());
      input.state = *state;
    }
    TimelineBuilder builder = served->NewTimeline();
    EXPECT_TRUE(AddPrompt(
                    model.BuildPrompt(input).value(), spec,
                    [&](uint32_t camera) { return Frame(which, camera, spec); }, state, builder)
                    .ok());
    ActRequest request;
    request.session = SessionId(static_cast<uint64_t>(which));
    request.model = ModelId(0);
    request.klass = ClassId(0);
    request.arrival = clock_.Now();
    request.timeline = builder.Build();
    request.statistics_key = key;
    request.state = robot;
    auto sink = std::make_shared<CollectSink>();
    request.sink = sink;
    EXPECT_TRUE(engine_->Submit(std::move(request)).ok());
    return sink;
  }

  Engine& engine() { return *engine_; }

 private:
  // Frames repeat among requests and cameras.
  static ContentRef Frame(int which, uint32_t camera, const ModelSpec& spec) {
    auto frame = std::make_shared<Content>();
    frame->width = spec.cameras[camera].width;
    frame->height = spec.cameras[camera].height;
    frame->rgb.resize(spec.cameras[camera].FrameBytes());
    uint32_t seed = (static_cast<uint32_t>(which) % 4 + camera) * 2654435761U + 12345;
    for (uint8_t& byte : frame->rgb) {
      seed = seed * 1664525U + 1013904223U;
      byte = static_cast<uint8_t>(seed >> 24);
    }
    frame->digest = DigestBytes("frame.v1", frame->rgb);
    return frame;
  }

  SteadyClock clock_;
  std::unique_ptr<Engine> engine_;
};

std::vector<float> Values(CollectSink& sink) {
  const absl::StatusOr<ActResult> result = sink.Take();
  EXPECT_TRUE(result.ok()) << result.status();
  return result.ok() ? result->chunks.front().normalized : std::vector<float>();
}

using Answers = std::vector<std::vector<float>>;

bool SameBits(const Answers& a, const Answers& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].size() != b[i].size() || a[i].empty() ||
        std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(float)) != 0)
      return false;
  }
  return true;
}

Answers AllAtOnce(Served& served) {
  std::vector<std::shared_ptr<CollectSink>> sinks;
  for (int i = 0; i < kRequests; ++i) sinks.push_back(served.Submit(i));
  Answers answers;
  for (auto& sink : sinks) answers.push_back(Values(*sink));
  return answers;
}

class OftEngine : public testing::TestWithParam<std::pair<bool, DType>> {
 protected:
  static ServingSetup Make() {
    const auto [tokens, compute] = GetParam();
    return tokens ? Tokens(compute) : ThreeImages(compute);
  }
};

TEST_P(OftEngine, SameBitsInAnyCompany) {
  ServingSetup setup = Make();
  Answers alone;
  for (int i = 0; i < kRequests; ++i) {
    const auto served = Served::Make(setup);
    ASSERT_NE(served, nullptr);
    alone.push_back(Values(*served->Submit(i)));
  }
  EXPECT_NE(alone[0], alone[1]);
  for (const int threads : {1, 2, 3}) {
    setup.threads = threads;
    const auto served = Served::Make(setup);
    ASSERT_NE(served, nullptr);
    EXPECT_TRUE(SameBits(AllAtOnce(*served), alone)) << threads << " threads";
    std::vector<std::shared_ptr<CollectSink>> others;
    for (int i = 0; i < 20; ++i) others.push_back(served->Submit(kRequests + i));
    EXPECT_TRUE(SameBits(AllAtOnce(*served), alone)) << threads << " threads, among others";
    for (auto& other : others) (void)Values(*other);
    EXPECT_EQ(served->engine().CheckInvariants(), absl::OkStatus());
    // Some step held more than one prompt.
    const RecentWork recent = served->engine().Recent().value();
    uint32_t most = 0;
    for (const StepRecord& step : recent.steps) most = std::max(most, step.shape.prefill_rows);
    EXPECT_GT(most, 2 * served->engine().models().front()->spec().head.read_rows + 60);
    for (const PartitionStats& partition :
         served->engine().Stats().value().lanes[0].kv.partitions) {
      EXPECT_EQ(partition.held, 0u);
    }
  }
  // A ceiling that nothing fits: every layer is a step of its own.
  setup.step_ceiling = Micros(1);
  const auto served = Served::Make(setup);
  ASSERT_NE(served, nullptr);
  EXPECT_TRUE(SameBits(AllAtOnce(*served), alone)) << "sliced";
  EXPECT_TRUE(SameBits(AllAtOnce(*served), alone)) << "sliced, frames cached";
  EXPECT_FALSE(served->engine().Recent()->steps.back().slice.whole());
}

INSTANTIATE_TEST_SUITE_P(Heads, OftEngine,
                         testing::Values(std::pair(false, DType::kF32),
                                         std::pair(false, DType::kBf16),
                                         std::pair(true, DType::kF32),
                                         std::pair(true, DType::kBf16)),
                         [](const auto& info) {
                           return std::string(info.param.first ? "tokens_" : "l1_") +
                                  std::string(DTypeName(info.param.second));
                         });

TEST(OftGuarded, TouchesNoDeviceMemory) {
  for (ServingSetup setup : {ThreeImages(DType::kF32), Tokens(DType::kF32)}) {
    setup.guarded_ref = true;
    const auto served = Served::Make(setup);
    ASSERT_NE(served, nullptr);
    const Answers first = AllAtOnce(*served);
    EXPECT_TRUE(SameBits(AllAtOnce(*served), first));
  }
}

// A weight that is NaN is found by its request, whichever head reads it.
TEST(OftNonFinite, FailsTheRequest) {
  const auto expect_failed = [](const ServingSetup& setup) {
    const auto served = Served::Make(setup);
    ASSERT_NE(served, nullptr);
    const absl::StatusOr<ActResult> result = served->Submit(0)->Take();
    EXPECT_EQ(GetErrorInfo(result.status()).reason, Reason::kNonFinite) << result.status();
  };
  const auto broken = [](const ServingSetup& setup, const std::string& file,
                         const std::string& tensor, const std::string& nan) {
    auto folder = std::make_unique<FolderCopy>(setup.folder);
    std::string bytes = folder->Read(file);
    uint64_t header = 0;
    std::memcpy(&header, bytes.data(), sizeof(header));
    const Json index = Json::parse(bytes.substr(8, header));
    bytes.replace(8 + header + index[tensor]["data_offsets"][0].get<size_t>(), nan.size(), nan);
    folder->Write(file, bytes);
    return folder;
  };
  ServingSetup setup = ThreeImages(DType::kF32);
  const auto head =
      broken(setup, "heads.safetensors", "action_head.model.fc2.bias", std::string("\xC0\x7F", 2));
  setup.folder = head->path();
  expect_failed(setup);
  setup = Tokens(DType::kF32);
  const auto trunk = broken(setup, "model.safetensors", "language_model.model.norm.weight",
                            std::string("\0\0\xC0\x7F", 4));
  setup.folder = trunk->path();
  expect_failed(setup);
}

}  // namespace
}  // namespace saccade
