#include "session/session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <thread>

#include "base/strings.h"
#include "session/catalog.h"
#include "session/content_store.h"
#include "session/session_manager.h"
#include "session/token_bucket.h"
#include "tests/rpc/fake_model.h"

namespace saccade {
namespace {

using testing::FakeModel;
using testing::FakeModelOptions;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr TimePoint kStart{std::chrono::seconds(100)};

class SessionTest : public ::testing::Test {
 protected:
  void Make(FakeModelOptions options, SessionLimits limits = {}) {
    host_ = FakeModel::HostOnly(std::move(options));
    model_.id = ModelId(0);
    model_.name = "fake";
    model_.model = host_.get();
    model_.default_class = ClassId(0);
    model_.new_timeline = [this] {
      ++timelines_;
      return TimelineBuilder(Digest128{1, 2}, 16);
    };
    SessionParams params;
    params.model = &model_;
    params.statistics_key = "robot";
    params.action_dim = 3;
    params.klass = ClassId(0);
    session_ = std::make_unique<Session>(SessionId(7), params, limits, kStart);
  }

  Frame MakeFrame(uint8_t shade, int64_t capture_ns, TimePoint captured = kStart) {
    Frame frame;
    frame.content = store_.Intern(4, 4, Pixels(48, shade));
    frame.capture_time_ns = capture_ns;
    frame.captured = captured;
    return frame;
  }

  std::unique_ptr<Model> host_;
  SessionModel model_;
  ContentStore store_{64};
  std::unique_ptr<Session> session_;
  int timelines_ = 0;
};

TEST_F(SessionTest, NewestFrameWinsAndOlderOnesAreStale) {
  Make({});
  EXPECT_EQ(session_->Publish(0, MakeFrame(1, 100)), Session::Fate::kKept);
  EXPECT_EQ(session_->Publish(0, MakeFrame(2, 200)), Session::Fate::kReplacedUnused);
  EXPECT_TRUE(session_->IsStale(0, 199));
  EXPECT_FALSE(session_->IsStale(0, 200));
  EXPECT_EQ(session_->Publish(0, MakeFrame(3, 150)), Session::Fate::kStale);
  ASSERT_TRUE(session_->SetInstruction("go", "text.instruction").ok());
  const auto observation = session_->Snapshot(kStart, Micros(0));
  ASSERT_TRUE(observation.ok());
  EXPECT_EQ((*observation)->frames[0].capture_time_ns, 200);
  EXPECT_EQ((*observation)->frames[0].content->rgb[0], 2);
  // It was used: the next one replaces nothing that was waiting.
  EXPECT_EQ(session_->Publish(0, MakeFrame(4, 200)), Session::Fate::kKept);
}

TEST_F(SessionTest, FramesWithoutTimesAreTakenInOrderOfArrival) {
  Make({});
  for (uint8_t i = 0; i < 5; ++i)
    EXPECT_NE(session_->Publish(0, MakeFrame(i, 0)), Session::Fate::kStale);
}

TEST_F(SessionTest, ASnapshotIsImmutable) {
  Make({});
  session_->Publish(0, MakeFrame(1, 1));
  ASSERT_TRUE(session_->SetInstruction("go", "f").ok());
  const auto first = session_->Snapshot(kStart, Micros(0));
  ASSERT_TRUE(first.ok());
  const std::shared_ptr<const Timeline> timeline = (*first)->timeline;
  const uint32_t tokens = timeline->num_tokens();
  session_->Publish(0, MakeFrame(2, 2));
  ASSERT_TRUE(session_->SetInstruction("go on for much longer", "f").ok());
  const auto second = session_->Snapshot(kStart, Micros(0));
  ASSERT_TRUE(second.ok());
  EXPECT_EQ((*first)->timeline, timeline);
  EXPECT_EQ((*first)->timeline->num_tokens(), tokens);
  EXPECT_EQ((*first)->frames[0].content->rgb[0], 1);
  EXPECT_EQ((*second)->frames[0].content->rgb[0], 2);
  EXPECT_NE((*second)->timeline, timeline);
}

TEST_F(SessionTest, TheTimelineFollowsThePrompt) {
  Make({.cameras = {"a", "b"}});
  session_->Publish(0, MakeFrame(1, 1));
  session_->Publish(1, MakeFrame(2, 1));
  ASSERT_TRUE(session_->SetInstruction("hi", "f").ok());
  const auto observation = session_->Snapshot(kStart, Micros(0));
  ASSERT_TRUE(observation.ok());
  const auto segments = (*observation)->timeline->segments();
  ASSERT_EQ(segments.size(), 4U);  // BOS, a, b, the words
  EXPECT_EQ(segments[0].modality, Modality::kText);
  EXPECT_EQ(segments[1].modality, Modality::kVision);
  EXPECT_EQ(segments[1].camera, 0U);
  EXPECT_EQ(segments[1].content, (*observation)->frames[0].content);
  EXPECT_EQ(segments[2].camera, 1U);
  EXPECT_EQ(segments[2].end - segments[2].begin, FakeModel::kVisionTokens);
  EXPECT_EQ((*observation)->timeline->num_tokens(), 1U + 4 + 4 + 3);
  EXPECT_EQ((*observation)->timeline->tokens()[9], 'h');
}

TEST_F(SessionTest, NothingIsRebuiltWhileNothingChanges) {
  Make({});
  session_->Publish(0, MakeFrame(1, 1));
  ASSERT_TRUE(session_->SetInstruction("go", "f").ok());
  const auto a = session_->Snapshot(kStart, Micros(0));
  const auto b = session_->Snapshot(kStart + Micros(5), Micros(0));
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(*a, *b);
  EXPECT_EQ(timelines_, 1);
  // The same pixels at a later time: another observation, the same timeline.
  session_->Publish(0, MakeFrame(1, 2));
  const auto c = session_->Snapshot(kStart, Micros(0));
  ASSERT_TRUE(c.ok());
  EXPECT_NE(*c, *a);
  EXPECT_EQ((*c)->timeline, (*a)->timeline);
  EXPECT_EQ((*c)->frames[0].capture_time_ns, 2);
  EXPECT_EQ(timelines_, 1);
}

// Vision at its own rate.
TEST_F(SessionTest, ActsReadTheNewestCommittedPrefix) {
  Make({.state_dim = 1});
  session_->Publish(0, MakeFrame(1, 1));
  ASSERT_TRUE(session_->SetInstruction("go", "f").ok());
  ASSERT_TRUE(session_->SetState(std::vector<float>{1}, 7).ok());
  const auto prefix = session_->SnapshotPrefix();
  ASSERT_TRUE(prefix.ok());
  ASSERT_NE(*prefix, nullptr);
  EXPECT_EQ(*session_->SnapshotPrefix(), nullptr);  // of the same
  EXPECT_EQ((*prefix)->timeline->reuse(), PrefixReuse::kAllButLast);

  // A newer frame is not acted on before its prefix is there.
  session_->CommitPrefix(*prefix);
  session_->Publish(0, MakeFrame(2, 2));
  auto act = session_->Snapshot(kStart, Micros(0));
  ASSERT_TRUE(act.ok());
  EXPECT_EQ((*act)->frames[0].capture_time_ns, 1);
  EXPECT_EQ((*act)->version, (*prefix)->version);
  EXPECT_EQ((*act)->state, std::vector<float>{1});
  EXPECT_EQ((*act)->state_capture_time_ns, 7);

  // A new state is another observation on the same prefix.
  ASSERT_TRUE(session_->SetState(std::vector<float>{2}, 8).ok());
  act = session_->Snapshot(kStart, Micros(0));
  EXPECT_EQ((*act)->state, std::vector<float>{2});
  EXPECT_EQ((*act)->version, (*prefix)->version);

  const auto next = session_->SnapshotPrefix();
  ASSERT_NE(*next, nullptr);
  EXPECT_GT((*next)->version, (*prefix)->version);
  session_->CommitPrefix(*prefix);  // an old one, late
  EXPECT_EQ((*session_->Snapshot(kStart, Micros(0)))->frames[0].capture_time_ns, 1);
  session_->CommitPrefix(*next);
  act = session_->Snapshot(kStart, Micros(0));
  EXPECT_EQ((*act)->frames[0].capture_time_ns, 2);
  EXPECT_EQ((*act)->version, (*next)->version);
}

TEST_F(SessionTest, APrefixThatIsTooOldOrOfAnotherTextIsNotActedOn) {
  Make({});
  session_->Publish(0, MakeFrame(1, 1));
  ASSERT_TRUE(session_->SetInstruction("go", "f").ok());
  const auto prefix = session_->SnapshotPrefix();
  session_->CommitPrefix(*prefix);
  Frame fresh = MakeFrame(2, 2);
  fresh.captured = kStart + Micros(5000);
  session_->Publish(0, std::move(fresh));
  const TimePoint now = kStart + Micros(6000);
  EXPECT_EQ((*session_->Snapshot(now, Micros(0)))->frames[0].capture_time_ns, 1);
  EXPECT_EQ((*session_->Snapshot(now, Micros(2000)))->frames[0].capture_time_ns, 2);
  EXPECT_EQ((*session_->Snapshot(now, Micros(0)))->frames[0].capture_time_ns, 1);
  ASSERT_TRUE(session_->SetInstruction("stop", "f").ok());
  EXPECT_EQ((*session_->Snapshot(now, Micros(0)))->frames[0].capture_time_ns, 2);
  session_->Reset(true);
  session_->CommitPrefix(*prefix);
  EXPECT_EQ(GetErrorInfo(session_->Snapshot(now, Micros(0)).status()).reason, Reason::kNoFrame);
}

// Cameras send their frames one after the other: a prefix is of a whole set.
TEST_F(SessionTest, APrefixIsOfAWholeSetOfFrames) {
  Make({.cameras = {"a", "b"}});
  ASSERT_TRUE(session_->SetInstruction("go", "f").ok());
  session_->Publish(0, MakeFrame(1, 1));
  session_->Publish(1, MakeFrame(2, 1));
  ASSERT_NE(*session_->SnapshotPrefix(), nullptr);
  session_->Publish(0, MakeFrame(3, 2));
  EXPECT_EQ(*session_->SnapshotPrefix(), nullptr);
  session_->Publish(1, MakeFrame(4, 2));
  auto prefix = session_->SnapshotPrefix();
  ASSERT_NE(*prefix, nullptr);
  EXPECT_EQ((*prefix)->frames[0].capture_time_ns, 2);
  EXPECT_EQ((*prefix)->frames[1].capture_time_ns, 2);
  // A camera that is slower holds nobody up for more than a frame.
  session_->Publish(0, MakeFrame(5, 3));
  EXPECT_EQ(*session_->SnapshotPrefix(), nullptr);
  session_->Publish(0, MakeFrame(6, 4));
  prefix = session_->SnapshotPrefix();
  ASSERT_NE(*prefix, nullptr);
  EXPECT_EQ((*prefix)->frames[0].capture_time_ns, 4);
  EXPECT_EQ((*prefix)->frames[1].capture_time_ns, 2);
  // Nor does a new text wait.
  session_->Publish(1, MakeFrame(7, 5));
  EXPECT_EQ(*session_->SnapshotPrefix(), nullptr);
  ASSERT_TRUE(session_->SetInstruction("stop", "f").ok());
  ASSERT_NE(*session_->SnapshotPrefix(), nullptr);
}

TEST_F(SessionTest, NamesWhatIsMissing) {
  Make({.cameras = {"front", "wrist"}});
  const absl::Status no_text = session_->Snapshot(kStart, Micros(0)).status();
  EXPECT_EQ(no_text.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(GetErrorInfo(no_text).reason, Reason::kMissingInput);
  EXPECT_EQ(GetErrorInfo(no_text).field, "text");
  ASSERT_TRUE(session_->SetInstruction("go", "f").ok());
  session_->Publish(0, MakeFrame(1, 1));
  const absl::Status status = session_->Snapshot(kStart, Micros(0)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(GetErrorInfo(status).reason, Reason::kNoFrame);
  EXPECT_EQ(GetErrorInfo(status).field, "wrist");
}

TEST_F(SessionTest, CamerasThatMayBeMissing) {
  const auto tokens = [&] {
    const auto observation = session_->Snapshot(kStart, Micros(0));
    EXPECT_TRUE(observation.ok()) << observation.status();
    return observation.ok() ? (*observation)->timeline->num_tokens() : 0;
  };
  for (const bool ids : {false, true}) {
    Make({.cameras = {"front", "wrist"}, .optional_cameras = true});
    // A text comes before any frame, and is judged then.
    const std::vector<int32_t> prompt = {FakeModel::kBos, 'g', 'o'};
    ASSERT_TRUE(
        (ids ? session_->SetPromptTokens(prompt) : session_->SetInstruction("g", "f")).ok());
    const absl::Status none = session_->Snapshot(kStart, Micros(0)).status();
    EXPECT_EQ(none.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(GetErrorInfo(none).reason, Reason::kNoFrame);
    EXPECT_NE(none.message().find("front, wrist"), absl::string_view::npos) << none;
    session_->Publish(1, MakeFrame(1, 1));
    EXPECT_EQ(tokens(), 3u + FakeModel::kVisionTokens);
    session_->Publish(0, MakeFrame(2, 2));
    EXPECT_EQ(tokens(), 3u + 2 * FakeModel::kVisionTokens);
    session_->Reset(/*keep_instruction=*/true);
    EXPECT_EQ(GetErrorInfo(session_->Snapshot(kStart, Micros(0)).status()).reason,
              Reason::kNoFrame);
    session_->Publish(0, MakeFrame(2, 2));
    EXPECT_EQ(tokens(), 3u + FakeModel::kVisionTokens);
    // A prefix is not acted on once a further camera is there.
    const auto prefix = session_->SnapshotPrefix();
    ASSERT_TRUE(prefix.ok() && *prefix != nullptr);
    session_->CommitPrefix(*prefix);
    session_->Publish(0, MakeFrame(3, 3));
    EXPECT_EQ((*session_->Snapshot(kStart, Micros(0)))->frames[0].capture_time_ns, 2);
    session_->Publish(1, MakeFrame(4, 4));
    EXPECT_EQ(tokens(), 3u + 2 * FakeModel::kVisionTokens);
  }
}

TEST_F(SessionTest, RefusesFramesOlderThanTheRequestAllows) {
  Make({.cameras = {"front", "wrist"}});
  ASSERT_TRUE(session_->SetInstruction("go", "f").ok());
  session_->Publish(0, MakeFrame(1, 1, kStart));
  session_->Publish(1, MakeFrame(1, 1, kStart - Micros(2000)));
  EXPECT_TRUE(session_->Snapshot(kStart + Micros(500), Micros(2500)).ok());
  const absl::Status status = session_->Snapshot(kStart + Micros(501), Micros(2500)).status();
  EXPECT_EQ(GetErrorInfo(status).reason, Reason::kStaleFrame);
  EXPECT_EQ(GetErrorInfo(status).field, "wrist");
  const auto any_age = session_->Snapshot(kStart + std::chrono::hours(1), Micros(0));
  ASSERT_TRUE(any_age.ok());
  EXPECT_EQ((*any_age)->oldest_captured, kStart - Micros(2000));
}

TEST_F(SessionTest, ChecksInstructions) {
  SessionLimits limits;
  limits.max_instruction_bytes = 8;
  Make({}, limits);
  session_->Publish(0, MakeFrame(1, 1));
  ASSERT_TRUE(session_->SetInstruction("caf\xC3\xA9 \xE2\x82", "x").code() ==
              absl::StatusCode::kInvalidArgument);
  for (const std::string_view bad :
       {"", "123456789", "\xFF", "a\xC3", "\xC0\xAF", "\xED\xA0\x80", "\xF5\x80\x80\x80"}) {
    const absl::Status status = session_->SetInstruction(bad, "open.instruction");
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_EQ(GetErrorInfo(status).field, "open.instruction");
  }
  EXPECT_FALSE(session_->Snapshot(kStart, Micros(0)).ok());
  EXPECT_TRUE(session_->SetInstruction("12345678", "x").ok());
  EXPECT_TRUE(session_->SetInstruction("\xF0\x9F\xA4\x96", "x").ok());
  // A refused one leaves the earlier one in place.
  EXPECT_FALSE(session_->SetInstruction("123456789", "x").ok());
  const auto observation = session_->Snapshot(kStart, Micros(0));
  ASSERT_TRUE(observation.ok());
  EXPECT_EQ((*observation)->timeline->tokens()[5], 0xF0);
}

TEST_F(SessionTest, ChecksTokenIds) {
  SessionLimits limits;
  limits.max_instruction_tokens = 4;
  Make({}, limits);
  const std::vector<int32_t> good = {FakeModel::kBos, 1, 2, 3};
  EXPECT_TRUE(session_->SetPromptTokens(good).ok());
  EXPECT_FALSE(session_->SetPromptTokens({}).ok());
  for (const int32_t id : {-1, 288, std::numeric_limits<int32_t>::max()}) {
    const absl::Status status =
        session_->SetPromptTokens(std::vector<int32_t>{FakeModel::kBos, id});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(GetErrorInfo(status).reason, Reason::kInvalidInput);
    // The model says "token_ids"; a client knows the field by its path.
    EXPECT_EQ(GetErrorInfo(status).field, "text.token_ids");
    EXPECT_THAT(std::string(status.message()), StartsWith(StrCat("text.token_ids: id ", id)));
  }
  EXPECT_FALSE(session_->SetPromptTokens(std::vector<int32_t>(5, FakeModel::kBos)).ok());
}

TEST_F(SessionTest, APromptThatCannotFitFailsWithBothNumbers) {
  Make({});
  session_->Publish(0, MakeFrame(1, 1));
  ASSERT_TRUE(
      session_->SetInstruction(std::string(247, 'a'), "f").ok());  // 1 + 4 + 247 + 1 + 3 = 256
  EXPECT_TRUE(session_->Snapshot(kStart, Micros(0)).ok());
  ASSERT_TRUE(session_->SetInstruction(std::string(248, 'a'), "open.instruction").ok());
  const absl::Status status = session_->Snapshot(kStart, Micros(0)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(GetErrorInfo(status).reason, Reason::kNeverFits);
  EXPECT_EQ(GetErrorInfo(status).field, "open.instruction");
  EXPECT_THAT(std::string(status.message()), HasSubstr("254"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("256"));
}

TEST_F(SessionTest, ChecksState) {
  Make({.state_dim = 2});
  session_->Publish(0, MakeFrame(1, 1));
  ASSERT_TRUE(session_->SetInstruction("go", "f").ok());
  const absl::Status missing = session_->Snapshot(kStart, Micros(0)).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(GetErrorInfo(missing).reason, Reason::kMissingInput);
  EXPECT_EQ(GetErrorInfo(missing).field, "state");
  EXPECT_FALSE(session_->SetState(std::vector<float>{1}, 0).ok());
  EXPECT_FALSE(session_->SetState(std::vector<float>{1, std::nanf("")}, 0).ok());
  EXPECT_FALSE(session_->SetState(std::vector<float>{1, INFINITY}, 0).ok());
  ASSERT_TRUE(session_->SetState(std::vector<float>{1, 2}, 0).ok());
  const auto observation = session_->Snapshot(kStart, Micros(0));
  ASSERT_TRUE(observation.ok());
  EXPECT_EQ((*observation)->state, (std::vector<float>{1, 2}));

  Make({});
  const absl::Status status = session_->SetState(std::vector<float>{}, 0);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("takes no state"));
}

TEST_F(SessionTest, KeepsABoundedHistoryOfExecutedActions) {
  SessionLimits limits;
  limits.executed_history = 3;
  Make({}, limits);
  EXPECT_FALSE(session_->AddExecuted({}).ok());
  EXPECT_FALSE(session_->AddExecuted({{{1, 2}, 0}}).ok());
  EXPECT_FALSE(session_->AddExecuted({{{1, 2, 3}, 0}, {{1, 2, std::nan("")}, 0}}).ok());
  EXPECT_FALSE(session_->AddExecuted({{{1, 2, 3}, -1}}).ok());
  EXPECT_TRUE(session_->executed().empty());  // all or none
  for (int64_t i = 0; i < 5; ++i) ASSERT_TRUE(session_->AddExecuted({{{1, 2, 3}, i}}).ok());
  ASSERT_EQ(session_->executed().size(), 3U);
  EXPECT_EQ(session_->executed().front().time_ns, 2);
}

TEST_F(SessionTest, ResetForgets) {
  Make({});
  session_->Publish(0, MakeFrame(1, 1000));
  ASSERT_TRUE(session_->SetInstruction("go", "f").ok());
  const auto before = session_->Snapshot(kStart, Micros(0));
  ASSERT_TRUE(before.ok());
  session_->Reset(true);
  EXPECT_EQ(GetErrorInfo(session_->Snapshot(kStart, Micros(0)).status()).reason, Reason::kNoFrame);
  // Time may start again.
  EXPECT_EQ(session_->Publish(0, MakeFrame(1, 1)), Session::Fate::kKept);
  EXPECT_TRUE(session_->Snapshot(kStart, Micros(0)).ok());
  session_->Reset(false);
  EXPECT_EQ(GetErrorInfo(session_->Snapshot(kStart, Micros(0)).status()).field, "text");
  EXPECT_EQ((*before)->frames[0].capture_time_ns, 1000);
}

TEST_F(SessionTest, CamerasAreBoundByName) {
  Make({.cameras = {"base", "wrist"}});
  EXPECT_EQ(*session_->FindCamera("wrist", "f"), 1U);
  for (const std::string_view name : {"", "Wrist", "default"}) {
    const absl::Status status = session_->FindCamera(name, "vision.camera").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("\"base\", \"wrist\""));
  }
  Make({.cameras = {"only"}});
  EXPECT_EQ(*session_->FindCamera("", "f"), 0U);
}

TEST_F(SessionTest, LimitsRates) {
  SessionLimits limits;
  limits.acts_per_s = 10;
  limits.frames_per_s = 2;
  limits.messages_per_s = 4;
  Make({}, limits);
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(session_->TakeActToken(kStart).ok());
  const absl::Status status = session_->TakeActToken(kStart);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(GetErrorInfo(status).reason, Reason::kRateLimited);
  ASSERT_TRUE(GetErrorInfo(status).retry_after.has_value());
  EXPECT_TRUE(session_->TakeActToken(kStart + *GetErrorInfo(status).retry_after).ok());
  EXPECT_TRUE(session_->TakeFrameToken(kStart).ok());  // a limit of its own
  EXPECT_TRUE(session_->TakeFrameToken(kStart).ok());
  EXPECT_FALSE(session_->TakeFrameToken(kStart).ok());
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(session_->TakeMessageToken(kStart).ok());
  const absl::Status messages = session_->TakeMessageToken(kStart);
  EXPECT_EQ(messages.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(GetErrorInfo(messages).reason, Reason::kRateLimited);
  EXPECT_THAT(std::string(messages.message()), HasSubstr("more than 4 text, state, executed"));
  ASSERT_TRUE(GetErrorInfo(messages).retry_after.has_value());
  EXPECT_NEAR(GetErrorInfo(messages).retry_after->count(), 250'000, 1);
  EXPECT_TRUE(session_->TakeMessageToken(kStart + *GetErrorInfo(messages).retry_after).ok());
}

TEST(TokenBucketTest, SustainsItsRate) {
  TokenBucket bucket(100, kStart);
  int taken = 0;
  for (int ms = 0; ms < 10'000; ++ms)
    taken += bucket.Take(kStart + std::chrono::milliseconds(ms)) ? 0 : 1;
  EXPECT_NEAR(taken, 100 + 1000, 2);
  // Time that does not move, or moves back, gives nothing.
  TokenBucket slow(0.5, kStart);
  EXPECT_FALSE(slow.Take(kStart));
  EXPECT_TRUE(slow.Take(kStart - std::chrono::hours(1)));
}

TEST(TokenBucketTest, WhatIsLargerThanABurstIsOwed) {
  using std::chrono::milliseconds;
  TokenBucket bucket(100, 50, kStart);
  EXPECT_FALSE(bucket.WaitFor(kStart, 80));
  EXPECT_FALSE(bucket.Take(kStart, 80));  // 30 are owed
  const std::optional<Micros> one = bucket.Take(kStart);
  ASSERT_TRUE(one);
  EXPECT_NEAR(one->count(), 310'000, 2);
  EXPECT_FALSE(bucket.Full(kStart + milliseconds(799)));
  EXPECT_TRUE(bucket.Full(kStart + milliseconds(801)));
  EXPECT_TRUE(bucket.Take(kStart + milliseconds(700), 80));  // only when it is full again
  EXPECT_FALSE(bucket.Take(kStart + milliseconds(801), 80));
}

TEST(TokenBucketTest, AnotherRateHoldsFromNowOn) {
  TokenBucket bucket(10, kStart);
  EXPECT_FALSE(bucket.Take(kStart, 10));
  bucket.SetRate(2, kStart);
  const auto wait = bucket.WaitFor(kStart);
  ASSERT_TRUE(wait);
  EXPECT_NEAR(wait->count(), 500'000, 2);
  bucket.SetRate(1000, kStart + std::chrono::seconds(9));  // 2 were saved up, no more
  EXPECT_FALSE(bucket.Take(kStart + std::chrono::seconds(9), 2));
  EXPECT_TRUE(bucket.WaitFor(kStart + std::chrono::seconds(9)));
}

TEST(CatalogTest, ResolvesOrLists) {
  const auto host = FakeModel::HostOnly({.statistics = {"a", "b"}});
  SessionModel one;
  one.id = ModelId(0);
  one.name = "one";
  one.model = host.get();
  SessionModel two = one;
  two.id = ModelId(1);
  two.name = "two";
  const auto share = [](const SessionModel& model) {
    return std::make_shared<const SessionModel>(model);
  };
  const Catalog catalog({share(one), share(two)}, {"control", "planning"});
  EXPECT_EQ((*catalog.FindModel("two", "f"))->id, ModelId(1));
  EXPECT_EQ(catalog.FindModel("", "f").status().code(), absl::StatusCode::kInvalidArgument);
  const absl::Status unknown = catalog.FindModel("three", "open.model").status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("\"one\", \"two\""));
  EXPECT_EQ(GetErrorInfo(unknown).field, "open.model");
  EXPECT_EQ((*Catalog({share(one)}, {}).FindModel("", "f"))->name, "one");

  EXPECT_EQ(*catalog.FindClass("planning", ClassId(0), "f"), ClassId(1));
  EXPECT_EQ(*catalog.FindClass("", ClassId(0), "f"), ClassId(0));
  EXPECT_THAT(std::string(catalog.FindClass("Control", ClassId(0), "f").status().message()),
              HasSubstr("\"control\", \"planning\""));

  EXPECT_EQ((*FindStatistics(host->spec(), "b", "f"))->key, "b");
  for (const std::string_view key : {"", "B", "c"}) {
    const absl::Status status = FindStatistics(host->spec(), key, "open.statistics_key").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("\"a\", \"b\""));
  }
  const auto single = FakeModel::HostOnly({.statistics = {"robot"}});
  EXPECT_EQ((*FindStatistics(single->spec(), "", "f"))->key, "robot");
}

TEST(CatalogTest, ChecksCameraLists) {
  const auto host = FakeModel::HostOnly({.cameras = {"a", "b"}});
  EXPECT_TRUE(FindCameras(host->spec(), {}, "f").ok());
  EXPECT_TRUE(FindCameras(host->spec(), {"b", "a"}, "f").ok());
  EXPECT_THAT(std::string(FindCameras(host->spec(), {"a", "a"}, "f").status().message()),
              HasSubstr("twice"));
  EXPECT_THAT(std::string(FindCameras(host->spec(), {"a", "c"}, "f").status().message()),
              HasSubstr("\"c\""));
  EXPECT_THAT(std::string(FindCameras(host->spec(), {"b"}, "f").status().message()),
              HasSubstr("needs camera \"a\""));
}

TEST(CatalogTest, LongNamesAreCutAtCharacters) {
  const auto host = FakeModel::HostOnly({});
  std::string name = "x";
  for (int i = 0; i < 100; ++i) name += "\xC3\xA9";
  const std::string message(FindStatistics(host->spec(), name, "f").status().message());
  EXPECT_LT(message.size(), 200U);
  EXPECT_THAT(message, HasSubstr("\xC3\xA9...\""));
}

TEST(ContentStoreTest, EqualFramesAreOneObject) {
  ContentStore store(16);
  const ContentRef a = store.Intern(2, 1, {1, 2, 3, 4, 5, 6});
  const ContentRef b = store.Intern(2, 1, {1, 2, 3, 4, 5, 6});
  const ContentRef c = store.Intern(2, 1, {1, 2, 3, 4, 5, 7});
  const ContentRef d = store.Intern(1, 2, {1, 2, 3, 4, 5, 6});  // the same bytes in another shape
  EXPECT_EQ(a, b);
  EXPECT_NE(a, c);
  EXPECT_NE(a, d);
  EXPECT_NE(a->digest, c->digest);
  EXPECT_NE(a->digest, d->digest);
  EXPECT_EQ(a->digest, FrameDigest(2, 1, {1, 2, 3, 4, 5, 6}));
}

TEST(ContentStoreTest, HoldsNothingAliveAndStaysBounded) {
  ContentStore store(128);
  const std::weak_ptr<const Content> gone = store.Intern(1, 1, {9, 9, 9});
  EXPECT_TRUE(gone.expired());
  for (uint32_t i = 0; i < 10'000; ++i) {
    store.Intern(1, 1, {static_cast<uint8_t>(i), static_cast<uint8_t>(i >> 8), 0});
  }
  EXPECT_LE(store.size(), 128U);
  // Full of living frames: a new one is served, but not shared.
  std::vector<ContentRef> alive;
  for (uint32_t i = 0; i < 200; ++i)
    alive.push_back(store.Intern(1, 1, {static_cast<uint8_t>(i), 0, 1}));
  EXPECT_LE(store.size(), 128U);
  const ContentRef extra = store.Intern(1, 1, {7, 7, 7});
  ASSERT_NE(extra, nullptr);
  EXPECT_EQ(extra->rgb[0], 7);
  // And it works again when they are gone.
  alive.clear();
  const ContentRef x = store.Intern(1, 1, {8, 8, 8});
  EXPECT_EQ(x, store.Intern(1, 1, {8, 8, 8}));
}

TEST(ContentStoreTest, ManyThreads) {
  ContentStore store(1024);
  std::vector<std::vector<ContentRef>> seen(4);
  std::vector<std::thread> threads;
  for (auto& mine : seen) {
    threads.emplace_back([&store, &mine] {
      for (int i = 0; i < 500; ++i)
        mine.push_back(store.Intern(1, 1, {static_cast<uint8_t>(i % 50), 1, 2}));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& mine : seen) {
    for (int i = 0; i < 500; ++i) EXPECT_EQ(mine[i], seen[0][i % 50]);
  }
}

TEST(SessionManagerTest, LeasesArePlaces) {
  const auto host = FakeModel::HostOnly({});
  SessionModel model;
  model.id = ModelId(0);
  model.name = "m";
  model.model = host.get();
  model.max_sessions = 1;
  SessionManager manager(2, 0);
  auto a = manager.Admit("a");
  auto b = manager.Admit("a");
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_NE(a->id(), b->id());
  const absl::Status full = manager.Admit("a").status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(GetErrorInfo(full).reason, Reason::kRateLimited);
  EXPECT_TRUE(a->BindModel(model).ok());
  EXPECT_EQ(b->BindModel(model).code(), absl::StatusCode::kResourceExhausted);
  SessionLease moved = *std::move(a);
  a->Release();  // moved from: gives nothing back
  EXPECT_EQ(manager.open(), 2U);
  moved.Release();
  moved.Release();
  EXPECT_EQ(manager.open(), 1U);
  EXPECT_EQ(model.places->open.load(), 0U);
  EXPECT_TRUE(b->BindModel(model).ok());
  b->Release();
  EXPECT_EQ(manager.open(), 0U);
}

TEST(SessionManagerTest, EachPeerHasItsOwnPlaces) {
  SessionManager manager(4, 2);
  auto a = manager.Admit("a");
  auto b = manager.Admit("a");
  ASSERT_TRUE(a.ok() && b.ok());
  const absl::Status full = manager.Admit("a").status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(GetErrorInfo(full).reason, Reason::kRateLimited);
  EXPECT_EQ(manager.open(), 2U);  // the refused one holds nothing
  EXPECT_TRUE(manager.Admit("b").ok());
  SessionLease moved = *std::move(a);
  a->Release();
  EXPECT_FALSE(manager.Admit("a").ok());
  moved.Release();
  EXPECT_TRUE(manager.Admit("a").ok());
}

TEST(SessionManagerTest, LimitsChangeAndMemoryIsHeld) {
  MemoryBudget memory(2 * SessionManager::kSessionBytes + 1);
  SessionManager manager(1, 0, &memory);
  auto a = manager.Admit("a");
  ASSERT_TRUE(a.ok());
  EXPECT_EQ(GetErrorInfo(manager.Admit("a").status()).reason, Reason::kRateLimited);
  EXPECT_EQ(memory.held(MemoryKind::kSessions), SessionManager::kSessionBytes);
  manager.SetLimits(8, 0);
  auto b = manager.Admit("a");
  ASSERT_TRUE(b.ok());
  const absl::Status full = manager.Admit("a").status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(GetErrorInfo(full).reason, Reason::kOutOfMemory);
  manager.SetLimits(8, 1);  // both stay, and no third of this address comes
  b->Release();
  EXPECT_EQ(GetErrorInfo(manager.Admit("a").status()).reason, Reason::kRateLimited);
  a->Release();
  EXPECT_TRUE(manager.Admit("a").ok());
  EXPECT_EQ(memory.held(), 0U);
}

TEST(SessionManagerTest, ManyThreadsNeverPassTheLimit) {
  SessionManager manager(10, 0);
  std::atomic<int> most{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 2000; ++i) {
        std::vector<SessionLease> leases;
        for (int k = 0; k < 4; ++k) {
          auto lease = manager.Admit("a");
          if (lease.ok()) leases.push_back(*std::move(lease));
        }
        most = std::max(most.load(), static_cast<int>(manager.open()));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(most.load(), 10);
  EXPECT_EQ(manager.open(), 0U);
}

}  // namespace
}  // namespace saccade
