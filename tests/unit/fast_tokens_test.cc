#include "model/fast_tokens.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model/json_util.h"
#include "model/safetensors.h"

namespace saccade {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

const std::string kTokenizers = std::string(SACCADE_SOURCE_DIR) + "/tests/data/tokenizers/";

template <class T>
std::vector<T> Golden(const SafetensorsFile& file, const std::string& name) {
  const TensorView view = file.Tensor(name).value();
  const auto copy = [&](const auto* values) {
    std::vector<T> out;
    for (int64_t i = 0; i < view.numel(); ++i) out.push_back(static_cast<T>(values[i]));
    return out;
  };
  if (view.dtype == DType::kI64) return copy(view.As<const int64_t>());
  return view.dtype == DType::kF64 ? copy(view.As<const double>()) : copy(view.As<const float>());
}

class FastTokensTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kVocabulary = 2048;  // of the text tokenizer
  static constexpr uint32_t kSkipped = 8;

  FastTokensTest()
      : golden_(SafetensorsFile::Open(kTokenizers + "fast/golden.safetensors").value()),
        fast_(FastTokens::Load(kTokenizers + "fast", 10, 6).value()),
        text_(Tokenizer::Load(kTokenizers + "gemma").value()),
        framing_(FastFraming::Make(*text_, kVocabulary, kSkipped, fast_.vocabulary()).value()) {}

  static std::string Refused(const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_EQ(GetErrorInfo(status).reason, Reason::kInvalidActionToken);
    return std::string(status.message());
  }

  SafetensorsFile golden_;
  FastTokens fast_;
  std::unique_ptr<const Tokenizer> text_;
  FastFraming framing_;
};

TEST_F(FastTokensTest, GivesTheReferencesActions) {
  for (int i = 0; i < 4; ++i) {
    const std::string name = "fast" + std::to_string(i) + ".";
    const auto sequence = Golden<int32_t>(golden_, name + "sequence");
    const auto ids = framing_.FastIds(sequence, FastPolicy::kStrict);
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_EQ(*ids, Golden<int32_t>(golden_, name + "fast_ids"));
    const auto decoded = Golden<double>(golden_, name + "decoded");
    const auto chunk = Golden<double>(golden_, name + "chunk");  // before rounding
    for (const FastPolicy policy : {FastPolicy::kStrict, FastPolicy::kReference}) {
      const auto actions = fast_.Decode(*ids, policy);
      ASSERT_TRUE(actions.ok()) << actions.status();
      ASSERT_EQ(actions->size(), decoded.size());
      for (size_t k = 0; k < decoded.size(); ++k) {
        EXPECT_NEAR((*actions)[k], decoded[k], 2e-6) << name << k;
        EXPECT_NEAR((*actions)[k], chunk[k], 0.2) << name << k;
      }
    }
  }
}

// Random weights do not know when to stop: the reference makes a chunk of what there is.
TEST_F(FastTokensTest, FollowsTheReferenceWhereAskedTo) {
  const auto answer = Golden<int32_t>(golden_, "generated_ids");
  EXPECT_THAT(Refused(framing_.FastIds(answer, FastPolicy::kStrict).status()),
              HasSubstr("no end after 24 tokens"));
  const auto ids = framing_.FastIds(answer, FastPolicy::kReference);
  ASSERT_TRUE(ids.ok()) << ids.status();
  EXPECT_THAT(Refused(fast_.Decode(*ids, FastPolicy::kStrict).status()), HasSubstr("FAST tokens"));
  const auto actions = fast_.Decode(*ids, FastPolicy::kReference);
  ASSERT_TRUE(actions.ok()) << actions.status();
  const auto expected = Golden<double>(golden_, "actions_normalized");
  ASSERT_EQ(actions->size(), expected.size());
  for (size_t k = 0; k < expected.size(); ++k) EXPECT_NEAR((*actions)[k], expected[k], 2e-6) << k;
}

TEST_F(FastTokensTest, RefusesWhatIsNoWholeChunk) {
  const auto sequence = Golden<int32_t>(golden_, "fast0.sequence");
  const auto ids = Golden<int32_t>(golden_, "fast0.fast_ids");

  auto other = sequence;
  other[7] = 5;  // a word
  EXPECT_THAT(Refused(framing_.FastIds(other, FastPolicy::kStrict).status()),
              HasSubstr("action token 7: id 5 is outside the action range"));
  EXPECT_EQ(framing_.FastIds(other, FastPolicy::kReference)->size(), ids.size() - 1);
  other = sequence;
  std::rotate(other.begin(), other.begin() + 4, other.end() - 1);  // "Action: " behind
  EXPECT_FALSE(framing_.FastIds(other, FastPolicy::kStrict).ok());
  EXPECT_EQ(*framing_.FastIds(other, FastPolicy::kReference), ids);
  // What comes after the end does not count; without "Action: " it is as good.
  other = sequence;
  other.push_back(5);
  EXPECT_EQ(*framing_.FastIds(other, FastPolicy::kStrict), ids);
  EXPECT_EQ(*framing_.FastIds(std::span(sequence).subspan(4), FastPolicy::kStrict), ids);
  EXPECT_TRUE(
      framing_.FastIds(std::vector<int32_t>{framing_.stop()}, FastPolicy::kStrict)->empty());
  EXPECT_FALSE(framing_.FastIds({}, FastPolicy::kStrict).ok());

  auto fewer = ids;
  fewer.pop_back();
  EXPECT_THAT(Refused(fast_.Decode(fewer, FastPolicy::kStrict).status()),
              HasSubstr("coefficients, expected 60"));
  auto more = ids;
  more.push_back(ids.front());
  EXPECT_THAT(Refused(fast_.Decode(more, FastPolicy::kStrict).status()),
              HasSubstr("coefficients, expected 60"));
  EXPECT_THAT(Refused(fast_.Decode({}, FastPolicy::kStrict).status()), HasSubstr("hold 0"));
  for (const int32_t bad : {-1, 512, 2147483647}) {
    auto unknown = ids;
    unknown[3] = bad;
    EXPECT_THAT(Refused(fast_.Decode(unknown, FastPolicy::kStrict).status()),
                HasSubstr("FAST token 3"));
    EXPECT_TRUE(fast_.Decode(unknown, FastPolicy::kReference).ok());
  }
  // Nothing is zero everywhere, nothing at all is.
  EXPECT_THAT(*fast_.Decode({}, FastPolicy::kReference), testing::Each(0.0));
}

TEST_F(FastTokensTest, InvertsTheCosineTransform) {
  const auto sum_of_squares = [](const std::vector<double>& values) {
    double sum = 0;
    for (const double v : values) sum += v * v;
    return sum;
  };
  // Orthonormal: the energy of the coefficients is that of the actions.
  const auto ids = Golden<int32_t>(golden_, "fast2.fast_ids");
  const std::vector<double> actions = fast_.Decode(ids, FastPolicy::kStrict).value();
  const std::vector<double> chunk = Golden<double>(golden_, "fast2.chunk");
  EXPECT_NEAR(std::sqrt(sum_of_squares(actions)), std::sqrt(sum_of_squares(chunk)), 0.25);
  // Half a coefficient each, through a row of the transform.
  double worst = 0;
  for (size_t i = 0; i < chunk.size(); ++i)
    worst = std::max(worst, std::abs(actions[i] - chunk[i]));
  EXPECT_LT(worst, 0.5 / 10 * std::sqrt(2.0 * 10));
}

TEST_F(FastTokensTest, RefusesASettingByItsName) {
  const fs::path folder = fs::temp_directory_path() / "fast_tokens_settings";
  struct Case {
    std::function<void(Json&)> change;
    const char* message;
  };
  for (const Case& c : std::vector<Case>{
           {[](Json& j) { j.erase("scale"); }, "processor_config.json: scale"},
           {[](Json& j) { j["scale"] = 0; }, "scale must be in"},
           {[](Json& j) { j["min_token"] = 0.5; }, "min_token"},
           {[](Json& j) { j["min_token"] = -2000000; }, "min_token"},
           {[](Json& j) { j["vocab_size"] = 511; }, "tokenizer.json has 512 ids"},
           {[](Json& j) { j["time_horizon"] = 50; }, "time_horizon is 50, but the policy has 10"},
           {[](Json& j) { j["action_dim"] = 7; }, "action_dim is 7, but the policy has 6"},
       }) {
    fs::remove_all(folder);
    fs::copy(kTokenizers + "fast", folder);
    Json config = ReadJsonFile((folder / "processor_config.json").string()).value();
    c.change(config);
    fs::remove(folder / "processor_config.json");
    std::ofstream(folder / "processor_config.json") << config.dump();
    const absl::Status status = FastTokens::Load(folder.string(), 10, 6).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.message));
  }
  // The universal tokenizer leaves the shape of a chunk open.
  Json open = ReadJsonFile(kTokenizers + "fast/processor_config.json").value();
  open["time_horizon"] = nullptr;
  open.erase("action_dim");
  std::ofstream(folder / "processor_config.json", std::ios::trunc) << open.dump();
  EXPECT_TRUE(FastTokens::Load(folder.string(), 50, 7).ok());
  EXPECT_FALSE(FastTokens::Load(folder.string(), 0, 7).ok());
  EXPECT_FALSE(FastTokens::Load(folder.string(), 4000, 4000).ok());
  fs::remove_all(folder);
  EXPECT_EQ(FastTokens::Load(folder.string(), 10, 6).status().code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(FastFraming::Make(*text_, 520, kSkipped, 512).ok());
}

}  // namespace
}  // namespace saccade
