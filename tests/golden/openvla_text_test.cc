// Text from the trunk of the tiny golden model, through the whole engine: greedily written tokens
// are the reference's generated_ids, and beam search is a search over the model's own logits.
#include <gtest/gtest.h>

#include <cmath>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "engine/engine.h"
#include "model/safetensors.h"
#include "model/text_decoder.h"
#include "session/prompt_timeline.h"
#include "tests/golden/support/setup.h"

namespace saccade {
namespace {

TextRequest Ask(uint32_t max_new_tokens, std::optional<BeamOptions> beams = std::nullopt) {
  TextRequest text;
  text.max_new_tokens = max_new_tokens;
  text.beams = beams;
  return text;
}

class CollectSink final : public ResponseSink {
 public:
  void OnToken(RequestId, uint32_t sample, uint32_t index, int32_t token) override {
    if (streamed_.size() <= sample) streamed_.resize(sample + 1);
    EXPECT_EQ(streamed_[sample].size(), index);
    streamed_[sample].push_back(token);
  }
  void OnDone(RequestId, absl::StatusOr<ActResult> result) override {
    done_.set_value(std::move(result));
  }
  absl::StatusOr<ActResult> Take() { return done_.get_future().get(); }
  const std::vector<std::vector<int32_t>>& streamed() const { return streamed_; }

 private:
  std::vector<std::vector<int32_t>> streamed_;
  std::promise<absl::StatusOr<ActResult>> done_;
};

class GoldenGenerate : public testing::TestWithParam<BackendConfig> {
 protected:
  void SetUp() override {
    const std::string dir = DataDir() + "/openvla";
    absl::StatusOr<LoadedModel> loaded = LoadFrom(dir + "/checkpoint", GetParam(), DType::kF32);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    model_ = loaded->model.get();
    absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(dir + "/golden.safetensors");
    ASSERT_TRUE(file.ok()) << file.status();
    const absl::StatusOr<Json> info = ReadJsonFile(dir + "/golden.json");
    ASSERT_TRUE(info.ok());
    prompt_text_ = (*info)["prompt"].get<std::string>();
    generated_ = (*info)["generated_ids"].get<std::vector<int32_t>>();
    const TensorView ids = file->Tensor("input_ids").value();
    for (int64_t i = 0; i < ids.dim(1); ++i) {
      prompt_.push_back(static_cast<int32_t>(ids.As<const int64_t>()[i]));
    }
    const TensorView pixels = file->Tensor("image_u8").value();
    Rgb8Image image{static_cast<uint32_t>(pixels.dim(1)), static_cast<uint32_t>(pixels.dim(0)), {}};
    const auto* bytes = pixels.As<const uint8_t>();
    image.rgb.assign(bytes, bytes + image.width * size_t{image.height} * 3);
    PixelRows rows(image);
    const ModelImage resized = model_->Preprocess(0, rows).value();
    auto frame = std::make_shared<Content>();
    frame->width = resized.width;
    frame->height = resized.height;
    frame->rgb = resized.rgb;
    frame->digest = DigestBytes("frame.v1", frame->rgb);
    frame_ = frame;

    ServedModel served;
    served.name = "golden";
    served.instances.push_back(std::move(loaded->model));
    served.workers.emplace_back(0);
    served.kv.num_blocks = 200;
    for (PartitionQuota& quota : served.kv.partitions) quota.cap = served.kv.num_blocks;
    served.embedding_slots = 4;
    served.max_sequences = 32;
    EngineOptions options;
    LatencyClass klass;
    klass.name = "any";
    klass.on_late = OnLate::kRunLate;
    options.classes = {klass};
    options.max_new_tokens = 2000;
    std::vector<std::unique_ptr<Backend>> backends;
    backends.push_back(std::move(loaded->backend));
    std::vector<ServedModel> models;
    models.push_back(std::move(served));
    auto engine = Engine::Start(options, std::move(backends), std::move(models), clock_, nullptr);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
  }

  // After `answer` tokens of an answer, too.
  ActRequest Request(const std::vector<int32_t>& answer, TextRequest text) {
    std::vector<int32_t> ids = prompt_;
    ids.insert(ids.end(), answer.begin(), answer.end());
    const Prompt prompt = model_->BuildTextPrompt(ids, std::vector<uint32_t>{0}).value();
    TimelineBuilder builder = engine_->models().front()->NewTimeline();
    EXPECT_TRUE(AddPrompt(
                    prompt, model_->spec().vision_tokens, [&](uint32_t) { return frame_; }, builder)
                    .ok());
    ActRequest request;
    request.session = SessionId(1);
    request.model = ModelId(0);
    request.klass = ClassId(0);
    request.arrival = clock_.Now();
    request.timeline = builder.SetAnswer(Modality::kText).Build();
    request.text = std::move(text);
    return request;
  }
  absl::StatusOr<ActResult> Run(ActRequest request) {
    sink_ = std::make_shared<CollectSink>();
    request.sink = sink_;
    EXPECT_TRUE(engine_->Submit(std::move(request)).ok());
    return sink_->Take();
  }

  SteadyClock clock_;
  const Model* model_ = nullptr;  // the engine's
  std::unique_ptr<Engine> engine_;
  std::string prompt_text_;
  std::vector<int32_t> prompt_;
  std::vector<int32_t> generated_;
  ContentRef frame_;
  std::shared_ptr<CollectSink> sink_;
};

TEST_P(GoldenGenerate, GreedyIsTheReference) {
  const absl::StatusOr<ActResult> result = Run(Request({}, Ask(7)));
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_EQ(result->answers.size(), 1u);
  EXPECT_EQ(result->answers[0].tokens, generated_);
  EXPECT_EQ(sink_->streamed(), std::vector<std::vector<int32_t>>{generated_});

  // Stopped at the fourth: nothing after it.
  TextRequest stopping = Ask(7);
  stopping.stop_tokens = {generated_[3]};
  const absl::StatusOr<ActResult> stopped = Run(Request({}, stopping));
  ASSERT_TRUE(stopped.ok());
  const std::vector<int32_t> four(generated_.begin(), generated_.begin() + 4);
  EXPECT_EQ(stopped->answers[0].tokens, four);
  EXPECT_TRUE(stopped->answers[0].stopped);
  EXPECT_EQ(sink_->streamed(), std::vector<std::vector<int32_t>>{four});

  // One beam is greedy search.
  const TextRequest one = Ask(7, BeamOptions{});
  const absl::StatusOr<ActResult> beam = Run(Request({}, one));
  ASSERT_TRUE(beam.ok()) << beam.status();
  EXPECT_EQ(beam->answers[0].tokens, generated_);
  EXPECT_TRUE(sink_->streamed().empty());
  EXPECT_EQ(engine_->CheckInvariants(), absl::OkStatus());
}

// Each hypothesis has the log-probability that the model gives its tokens one after another: the
// K/V it was computed from was its own, whatever was shared, copied and dropped.
TEST_P(GoldenGenerate, BeamsAreScoredByTheirOwnTokens) {
  const TextRequest text = Ask(5, BeamOptions{.results = 4});
  ActRequest request = Request({}, text);
  request.samples = 4;
  const absl::StatusOr<ActResult> result = Run(std::move(request));
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_EQ(result->answers.size(), 4u);
  EXPECT_GE(result->answers[0].log_prob, result->answers[3].log_prob);
  for (const Outcome::Answer& answer : result->answers) {
    ASSERT_EQ(answer.tokens.size(), 5u);
    double sum = 0;
    for (size_t i = 0; i < answer.tokens.size(); ++i) {
      // A search of one step with that many beams lists the likeliest tokens after a prefix.
      const std::vector<int32_t> prefix(answer.tokens.begin(),
                                        answer.tokens.begin() + static_cast<std::ptrdiff_t>(i));
      ActRequest next = Request(prefix, Ask(1, BeamOptions{.results = 16}));
      next.samples = 16;
      const absl::StatusOr<ActResult> likely = Run(std::move(next));
      ASSERT_TRUE(likely.ok()) << likely.status();
      bool found = false;
      for (const Outcome::Answer& candidate : likely->answers) {
        if (candidate.tokens[0] != answer.tokens[i]) continue;
        sum += candidate.log_prob;
        found = true;
      }
      ASSERT_TRUE(found);
    }
    EXPECT_NEAR(sum, answer.log_prob, 2e-4);
  }
  EXPECT_EQ(engine_->CheckInvariants(), absl::OkStatus());
}

TEST_P(GoldenGenerate, LimitsAreSaidAtOnce) {
  // The model has 2048 positions, the prompt 283 tokens.
  const absl::StatusOr<ActResult> positions = Run(Request({}, Ask(1766)));
  EXPECT_EQ(positions.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(GetErrorInfo(positions.status()).reason, Reason::kNeverFits);
  EXPECT_EQ(GetErrorInfo(positions.status()).field, "max_new_tokens");
  ActRequest many = Request({}, Ask(500));
  many.samples = 16;  // 16 * 32 blocks of 200
  const absl::StatusOr<ActResult> blocks = Run(std::move(many));
  EXPECT_EQ(blocks.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(GetErrorInfo(blocks.status()).reason, Reason::kNeverFits);
  const absl::StatusOr<ActResult> configured = Run(Request({}, Ask(2001)));
  EXPECT_FALSE(configured.ok());
}

TEST_P(GoldenGenerate, TheModelKnowsItsTexts) {
  EXPECT_EQ(model_->spec().stop_tokens, std::vector<int32_t>{2});
  const Tokenizer& tokenizer = *model_->tokenizer();
  EXPECT_EQ(TextDecoder::Decode(tokenizer, prompt_), prompt_text_ + " ");
}

std::vector<BackendConfig> Backends() {
  std::vector<BackendConfig> backends;
  for (const BackendConfig& backend : AllBackends()) {
    if (backend.kind == BackendKind::kCpu) backends.push_back(backend);
  }
  return backends;
}

INSTANTIATE_TEST_SUITE_P(Backends, GoldenGenerate, testing::ValuesIn(Backends()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace saccade
