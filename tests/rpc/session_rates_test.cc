// A stream at several rates, turn by turn: what becomes of a pushed act and of a prefix that is
// made ahead, whatever else happens to the stream meanwhile. No turn comes by itself here: the push
// is so slow that its ticker has none within a test.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <thread>
#include <vector>

#include "tests/rpc/stream.h"

namespace saccade::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr double kSlowHz = 0.1;

class SessionRatesTest : public SessionCoreTest {
 protected:
  struct Opening {
    uint32_t outbox = 64;
    FakeModelOptions model = {};
    bool refresh = false;
  };
  void OpenAs(Opening opening) {
    Make(opening.outbox, std::move(opening.model));
    warm_up_ = server_->engine().Recent().value().requests.size();
    v1::SessionRequest request;
    request.mutable_open()->set_instruction("go");
    if (opening.refresh)
      request.mutable_open()->mutable_options()->set_refresh_class("best_effort");
    ASSERT_TRUE(Send(request));
    ASSERT_TRUE(Next().has_opened());
  }
  // Nothing is decoded, asked for or on its way any more.
  void Settle() {
    EXPECT_TRUE(Eventually([this] {
      // What is answered is delivered by the end of that turn. And the one may begin the other.
      const auto quiet = [this] { return Unanswered() == 0 && Unanswered() == 0 && Decoded(); };
      return quiet() && quiet();
    }));
  }
  // Step by step until one more request has ended, and what follows from that.
  void StepUntilOneEnds() {
    const size_t ended = Requests().size();
    while (Requests().size() == ended) {
      const uint64_t passed = gate_->passed();
      gate_->CloseAfter(1);
      ASSERT_TRUE(Eventually([&] { return gate_->passed() > passed; }));
      ASSERT_TRUE(Eventually([&] { return Requests().size() > ended || gate_->waiting(); }));
    }
    AwaitDecoded();
  }
  uint32_t Unanswered() {
    uint32_t requests = 0;
    const SchedulerStats stats = server_->engine().Stats().value();
    for (const auto& klass : stats.classes) {
      requests += klass.running + klass.queued;
    }
    return requests;
  }
  bool Decoded() const { return decoding_->waiting() == 0 && decoding_->idle() == 1; }
  void AwaitDecoded() {
    EXPECT_TRUE(Eventually([this] { return Decoded(); }));
  }
  // Those that have come to an end.
  std::vector<RequestRecord> Requests() {
    std::vector<RequestRecord> requests = server_->engine().Recent().value().requests;
    requests.erase(requests.begin(), requests.begin() + static_cast<std::ptrdiff_t>(warm_up_));
    return requests;
  }

  void Frame(int64_t time, std::string_view camera = "", Micros age = Micros(0)) {
    v1::SessionRequest request;
    v1::VisionFrame& vision = *request.mutable_vision();
    vision.set_camera(std::string(camera));
    vision.set_capture_time_ns(time);
    vision.set_age_us(static_cast<uint64_t>(age.count()));
    v1::RawImage& raw = *vision.mutable_raw();
    raw.set_pixel_format(v1::PIXEL_FORMAT_RGB8);
    raw.set_width(1);
    raw.set_height(1);
    raw.set_data({static_cast<char>(time), 'b', 'c'});
    ASSERT_TRUE(Send(request));
  }
  // A frame that has been handled; of a prefix that has been made of it, too.
  void SettledFrame(int64_t time, std::string_view camera = "") {
    Frame(time, camera);
    Settle();
  }
  void State(float value, int64_t time) {
    v1::SessionRequest request;
    request.mutable_state()->add_values(value);
    request.mutable_state()->set_capture_time_ns(time);
    ASSERT_TRUE(Send(request));
  }
  void Push(double hz, uint64_t first, const v1::ActRequest& act = {}) {
    v1::SessionRequest request;
    request.mutable_push()->set_hz(hz);
    *request.mutable_push()->mutable_act() = act;
    request.mutable_push()->mutable_act()->set_id(first);
    ASSERT_TRUE(Send(request));
  }
  void Turn() { core_->OnPush(clock_.Now()); }
  // One whose act is on its way until the gate opens.
  void HeldTurn() {
    gate_->Close();
    Turn();
    gate_->AwaitWaiter();
  }
  // A frame of time 1 and a push, whose acts count from 100.
  void OpenPushing() {
    OpenAs({});
    SettledFrame(1);
    Push(kSlowHz, 100);
  }
  // Nothing is there for the client.
  void ExpectQuiet() {
    Settle();
    EXPECT_FALSE(port_.TakeWrite()) << port_.last().ShortDebugString();
  }
  v1::ActionChunk Chunk() {
    const v1::SessionResponse response = Next();
    EXPECT_TRUE(response.has_chunk()) << response.ShortDebugString();
    return response.chunk();
  }
  v1::RequestError Error() {
    const v1::SessionResponse response = Next();
    EXPECT_TRUE(response.has_error()) << response.ShortDebugString();
    return response.error();
  }
  v1::ActionChunk Act(uint64_t id, Micros max_frame_age = Micros(0)) {
    v1::SessionRequest request;
    request.mutable_act()->set_id(id);
    request.mutable_act()->set_max_frame_age_us(static_cast<uint64_t>(max_frame_age.count()));
    EXPECT_TRUE(Send(request));
    return Chunk();
  }
  static std::vector<int64_t> TimesOf(const v1::ActionChunk& chunk) {
    std::vector<int64_t> times;
    for (const v1::FrameUsed& frame : chunk.frames()) times.push_back(frame.capture_time_ns());
    return times;
  }

 private:
  size_t warm_up_ = 0;  // requests of the engine's own
};

// ---------------------------------------------------------------------------------------------------------
// push

TEST_F(SessionRatesTest, ATurnDuringAFrameIsOneActOfWhatIsThere) {
  OpenPushing();
  HoldDecoding();
  Frame(2);
  HeldTurn();
  Turn();  // the first is not answered: one act, not two
  gate_->Open();
  v1::ActionChunk chunk = Chunk();
  EXPECT_EQ(chunk.act_id(), 100U);
  EXPECT_THAT(TimesOf(chunk), ::testing::ElementsAre(1));
  ReleaseDecoding();
  Settle();
  ExpectQuiet();
  Turn();
  chunk = Chunk();
  EXPECT_EQ(chunk.act_id(), 101U);
  EXPECT_THAT(TimesOf(chunk), ::testing::ElementsAre(2));
}

TEST_F(SessionRatesTest, ATurnWhosePredecessorIsNotAnsweredIsLeftOut) {
  OpenPushing();
  HeldTurn();
  for (int i = 0; i < 5; ++i) Turn();
  EXPECT_EQ(Unanswered(), 1U);
  gate_->Open();
  EXPECT_EQ(Chunk().act_id(), 100U);
  ExpectQuiet();
  Turn();
  EXPECT_EQ(Chunk().act_id(), 101U);
}

TEST_F(SessionRatesTest, APushOutlivesAReset) {
  OpenAs({.model = {.state_dim = 1}});
  SettledFrame(1);
  State(5, 1);
  Push(kSlowHz, 100);
  HeldTurn();
  v1::SessionRequest reset;
  reset.mutable_reset()->set_keep_instruction(true);
  ASSERT_TRUE(Send(reset));
  gate_->Open();
  EXPECT_THAT(Chunk().state(), ::testing::ElementsAre(5.0F));  // of what was there when it was due
  Settle();
  for (int i = 0; i < 3; ++i) Turn();
  EXPECT_EQ(Error().detail().reason(), v1::ERROR_REASON_NO_FRAME);  // once
  ExpectQuiet();
  SettledFrame(1);  // a time of the last episode is as good as any
  Turn();
  const v1::RequestError error = Error();
  EXPECT_EQ(error.detail().reason(), v1::ERROR_REASON_MISSING_INPUT);  // for another reason
  EXPECT_EQ(error.detail().field(), "state");
  State(6, 1);
  Turn();
  const v1::ActionChunk chunk = Chunk();
  EXPECT_EQ(chunk.act_id(), 105U);  // 100, then four that were refused
  EXPECT_THAT(chunk.state(), ::testing::ElementsAre(6.0F));
  // An episode without its text: the reason is told again, for there was an answer between.
  ASSERT_TRUE(Send([] {
    v1::SessionRequest request;
    request.mutable_reset();
    return request;
  }()));
  Turn();
  EXPECT_EQ(Error().detail().field(), "text");
}

TEST_F(SessionRatesTest, CancellingEndsATurnAndNotThePush) {
  OpenPushing();
  HeldTurn();
  v1::SessionRequest cancel;
  cancel.mutable_cancel()->set_all(true);
  ASSERT_TRUE(Send(cancel));
  gate_->Open();
  const v1::RequestError error = Error();
  EXPECT_EQ(error.act_id(), 100U);
  EXPECT_EQ(error.code(), static_cast<int>(absl::StatusCode::kCancelled));
  Settle();
  Turn();
  EXPECT_EQ(Chunk().act_id(), 101U);
}

// So that the scheduler keeps its moment free; an act that a client asks for announces nothing.
TEST_F(SessionRatesTest, ATurnAnnouncesTheNextOne) {
  OpenPushing();
  const TimePoint due = clock_.Now();
  core_->OnPush(due);
  EXPECT_EQ(Chunk().act_id(), 100U);
  Act(1);
  const std::vector<RequestRecord> requests = Requests();
  ASSERT_GE(requests.size(), 2U);
  EXPECT_EQ(requests[requests.size() - 2].next_arrival, due + Micros(10'000'000));
  EXPECT_EQ(requests.back().next_arrival, kNever);
}

TEST_F(SessionRatesTest, AStoppedPushAnswersWhatItAsked) {
  OpenPushing();
  HeldTurn();
  Push(0, 0);
  gate_->Open();
  EXPECT_EQ(Chunk().act_id(), 100U);
  Settle();
  Turn();  // one that the ticker was about to make
  ExpectQuiet();
  EXPECT_EQ(Act(100).act_id(), 100U);
  Push(kSlowHz, 7);
  Turn();
  EXPECT_EQ(Chunk().act_id(), 7U);
}

TEST_F(SessionRatesTest, ANumberInUseIsRefusedAndThePushCountsOn) {
  OpenAs({});
  SettledFrame(1);
  Push(kSlowHz, std::numeric_limits<uint64_t>::max());
  gate_->Close();
  ASSERT_TRUE(SendAct(std::numeric_limits<uint64_t>::max()));
  gate_->AwaitWaiter();
  Turn();
  EXPECT_EQ(Error().detail().field(), "act.id");
  gate_->Open();
  EXPECT_EQ(Chunk().act_id(), std::numeric_limits<uint64_t>::max());
  Settle();
  Turn();
  EXPECT_EQ(Chunk().act_id(), 0U);
}

TEST_F(SessionRatesTest, AClosingStreamTakesNoTurns) {
  OpenPushing();
  HeldTurn();
  core_->CloseWhenIdle(absl::UnavailableError("bye"));
  Turn();
  EXPECT_FALSE(port_.finished());
  gate_->Open();
  EXPECT_EQ(Chunk().act_id(), 100U);
  ASSERT_TRUE(port_.finished());
  EXPECT_EQ(port_.finished()->code(), absl::StatusCode::kUnavailable);
  Turn();
  EXPECT_EQ(Unanswered(), 0U);
}

TEST_F(SessionRatesTest, AHalfClosedStreamTakesNoTurns) {
  OpenPushing();
  ASSERT_TRUE(port_.TakeRead());
  core_->OnReadsDone();
  ASSERT_TRUE(port_.finished());
  EXPECT_TRUE(port_.finished()->ok());
  Turn();
  EXPECT_EQ(Unanswered(), 0U);
}

TEST_F(SessionRatesTest, ACancelledStreamTakesNoTurns) {
  OpenPushing();
  HoldDecoding();
  Frame(2);
  Turn();  // does not wait behind the frame
  EXPECT_EQ(Chunk().act_id(), 100U);
  core_->OnCancelled();
  Turn();
  const size_t before = Requests().size();
  ReleaseDecoding();
  Settle();
  EXPECT_EQ(Requests().size(), before);
}

TEST_F(SessionRatesTest, TurnsOfADrainingServerAreRefusedOnce) {
  OpenPushing();
  server_->engine().Drain(clock_.Now());
  for (int i = 0; i < 3; ++i) Turn();
  EXPECT_EQ(Error().detail().reason(), v1::ERROR_REASON_DRAINING);
  EXPECT_FALSE(port_.TakeWrite());
}

TEST_F(SessionRatesTest, AnUnloadedModelEndsItsPush) {
  OpenAs({.refresh = true});
  SettledFrame(1);
  Push(kSlowHz, 100);
  gate_->Close();
  Frame(2);  // a prefix is on its way
  gate_->AwaitWaiter();
  AwaitDecoded();
  const ModelId id = serving_->models().front()->id;
  serving_->Withdraw(id);
  ASSERT_TRUE(core_->NotifyModel(id, v1::NOTICE_KIND_MODEL_UNLOADING, "going"));
  EXPECT_EQ(Next().notice().kind(), v1::NOTICE_KIND_MODEL_UNLOADING);
  Turn();  // still answered
  ASSERT_TRUE(core_->CloseModel(id, absl::UnavailableError("gone")));
  Frame(3);
  Turn();
  gate_->Open();
  EXPECT_EQ(Chunk().act_id(), 100U);
  ASSERT_TRUE(server_->engine().Unload(id, kNever, absl::UnavailableError("gone")).ok());
  ASSERT_TRUE(port_.finished());
  EXPECT_EQ(port_.finished()->message(), "gone");
  Turn();
  EXPECT_EQ(Unanswered(), 0U);
}

TEST_F(SessionRatesTest, AStateThatIsNoNumberLeavesTheLastOneInForce) {
  OpenAs({.model = {.state_dim = 1}});
  SettledFrame(1);
  State(5, 10);
  Push(kSlowHz, 100);
  Turn();
  const v1::ActionChunk before = Chunk();
  State(std::nanf(""), 11);
  EXPECT_EQ(Error().detail().field(), "state.values");
  Turn();
  const v1::ActionChunk chunk = Chunk();
  EXPECT_THAT(chunk.state(), ::testing::ElementsAre(5.0F));
  EXPECT_EQ(chunk.state_capture_time_ns(), 10);
  EXPECT_EQ(chunk.samples(0).SerializeAsString(), before.samples(0).SerializeAsString());
}

TEST_F(SessionRatesTest, RatesHaveBounds) {
  OpenAs({});
  SettledFrame(1);
  for (const double hz : {0.1, 1.0, 200.0, -0.0}) {
    Push(hz, 1);
    EXPECT_FALSE(port_.TakeWrite() && port_.last().has_error()) << hz;
  }
  Push(kSlowHz, 100);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double hz :
       {0.0999, 200.001, 1e300, -1.0, -kInfinity, kInfinity, 5e-324, std::nan("")}) {
    Push(hz, 1);
    EXPECT_EQ(Error().detail().field(), "push.hz") << hz;
  }
  Turn();
  EXPECT_EQ(Chunk().act_id(), 100U) << "what was refused took the place of what ran";
  Config config = server_->config();
  config.limits.acts_per_s = 50;
  serving_->SetConfig(config);
  Push(50.5, 1);
  EXPECT_EQ(Error().detail().field(), "push.hz");
  Push(50, 1);
  EXPECT_FALSE(port_.TakeWrite() && port_.last().has_error());
  config.limits.acts_per_s = 0.05;
  serving_->SetConfig(config);
  Push(0.1, 1);
  EXPECT_THAT(Error().message(), ::testing::HasSubstr("leaves no room for a push"));
}

// Nothing but turns comes: they look at the limits too.
TEST_F(SessionRatesTest, TurnsFollowLimitsThatChange) {
  OpenPushing();
  Turn();
  EXPECT_EQ(Chunk().act_id(), 100U);
  Config config = server_->config();
  config.limits.acts_per_s = 0.01;
  serving_->SetConfig(config);
  Settle();
  bool refused = false;
  for (int i = 0; i < 3 && !refused; ++i) {  // it holds one act at most from now on
    Turn();
    const v1::SessionResponse response = Next();
    refused = response.has_error();
    if (refused) {
      EXPECT_EQ(response.error().detail().reason(), v1::ERROR_REASON_RATE_LIMITED);
    }
    Settle();
  }
  EXPECT_TRUE(refused);
}

// A client that stops reading for a while loses turns and not its stream.
TEST_F(SessionRatesTest, TurnsAreLeftOutWhileAnswersAreNotRead) {
  OpenAs({.outbox = 8});
  SettledFrame(1);
  Push(kSlowHz, 100);
  for (int i = 0; i < 20; ++i) {
    Turn();
    Settle();
  }
  EXPECT_FALSE(port_.finished());
  uint64_t id = 100;
  while (port_.TakeWrite()) {
    EXPECT_EQ(port_.last().chunk().act_id(), id++);
    core_->OnWriteDone(true);
  }
  EXPECT_EQ(id, 104U);  // half of the outbox
  Turn();
  EXPECT_EQ(Chunk().act_id(), id);
}

// The thread of the turns has those of all streams to take.
TEST_F(SessionRatesTest, NoFrameIsDecodedInATurn) {
  const std::thread::id turns = std::this_thread::get_id();
  std::function<void()> on_prompt;
  std::atomic<int> frames_here{0};
  std::atomic<int> frames{0};
  FakeModelOptions model;
  model.cameras = {"left", "right"};
  model.optional_cameras = true;
  model.on_prompt = [&] {
    if (on_prompt) std::exchange(on_prompt, nullptr)();
  };
  model.on_frame = [&] {
    ++frames;
    if (std::this_thread::get_id() == turns) ++frames_here;
  };
  OpenAs({.model = std::move(model)});
  SettledFrame(1, "left");
  EXPECT_EQ(frames_here, 1);  // a small one, by the thread that brought it
  Push(kSlowHz, 100);
  Turn();
  EXPECT_THAT(TimesOf(Chunk()), ::testing::ElementsAre(1));
  SettledFrame(2, "right");
  frames_here = frames = 0;
  std::thread transport;
  on_prompt = [&] {  // while the turn is taken: there is a camera more
    transport = std::thread([this] { Frame(3, "left"); });
  };
  Turn();
  transport.join();
  EXPECT_THAT(TimesOf(Chunk()), ::testing::ElementsAre(1, 2));
  Settle();
  EXPECT_EQ(frames, 1);
  EXPECT_EQ(frames_here, 0);
  Turn();
  EXPECT_THAT(TimesOf(Chunk()), ::testing::ElementsAre(3, 2));
}

// What a push asks for is kept: it is looked at before.
TEST_F(SessionRatesTest, APushKeepsNothingThatTheModelDoesNotTake) {
  OpenPushing();
  v1::ActRequest act;
  act.mutable_noise()->Resize(100'000, 0.5F);
  Push(kSlowHz, 1, act);
  EXPECT_EQ(Error().detail().field(), "push.act.noise");
  act = {};
  act.mutable_committed()->add_normalized(0.5F);
  Push(kSlowHz, 1, act);
  EXPECT_EQ(Error().detail().field(), "push.act.committed");
  act = {};
  act.set_flow_steps(3);
  Push(kSlowHz, 1, act);
  EXPECT_EQ(Error().detail().field(), "push.act.flow_steps");
  Turn();
  EXPECT_EQ(Chunk().act_id(), 100U);
}

TEST_F(SessionRatesTest, ATurnWithoutAFrameYoungEnoughIsRefusedOnce) {
  OpenAs({});
  Frame(1, "", seconds(10));
  v1::ActRequest act;
  act.set_max_frame_age_us(5'000'000);
  Push(kSlowHz, 100, act);
  AwaitDecoded();
  Turn();
  Turn();
  EXPECT_EQ(Error().detail().reason(), v1::ERROR_REASON_STALE_FRAME);
  ExpectQuiet();
  SettledFrame(2);
  Turn();
  const v1::ActionChunk chunk = Chunk();
  EXPECT_EQ(chunk.act_id(), 102U);
  EXPECT_THAT(TimesOf(chunk), ::testing::ElementsAre(2));
}

// --------------------------------------------------------------------------------------------------------
// prefixes made ahead

TEST_F(SessionRatesTest, ANewerSetOvertakesOnesThatWait) {
  OpenAs({.refresh = true});
  gate_->Close();
  Frame(1);
  gate_->AwaitWaiter();
  for (const int64_t time : {2, 3, 4}) {
    Frame(time);
    AwaitDecoded();
  }
  StepUntilOneEnds();  // the first is made, and the next one is of what is newest
  ASSERT_TRUE(SendAct(1));
  gate_->Open();
  EXPECT_THAT(TimesOf(Chunk()), ::testing::ElementsAre(1));
  Settle();
  EXPECT_EQ(Requests().size(), 3U);  // two prefixes and an act
  const v1::ActionChunk chunk = Act(2);
  EXPECT_THAT(TimesOf(chunk), ::testing::ElementsAre(4));
  EXPECT_TRUE(chunk.frames_cached());
}

// Frames of others may take all threads that decode: acts do not wait for them.
TEST_F(SessionRatesTest, APrefixThatIsMadeHoldsUpNoMessage) {
  OpenAs({.refresh = true});
  SettledFrame(1);
  gate_->Close();
  Frame(2);
  gate_->AwaitWaiter();
  AwaitDecoded();
  HoldDecoding();
  gate_->Open();
  AwaitAnswers();
  const v1::ActionChunk chunk = Act(1);
  EXPECT_THAT(TimesOf(chunk), ::testing::ElementsAre(2));
  EXPECT_TRUE(chunk.frames_cached());
  ReleaseDecoding();
}

TEST_F(SessionRatesTest, APrefixThatFailsLeavesTheLastOneInForce) {
  const auto failing = std::make_shared<std::atomic<bool>>(false);
  FakeModelOptions model;
  model.fault = [failing] {
    return *failing ? absl::ResourceExhaustedError("no memory for this step") : absl::OkStatus();
  };
  OpenAs({.model = std::move(model), .refresh = true});
  SettledFrame(1);
  *failing = true;
  SettledFrame(2);
  *failing = false;
  EXPECT_THAT(TimesOf(Act(1)), ::testing::ElementsAre(1));
  SettledFrame(3);
  EXPECT_THAT(TimesOf(Act(2)), ::testing::ElementsAre(3));
  EXPECT_TRUE(server_->engine().Ready());
  // Where there is none, an act computes what it needs.
  v1::SessionRequest text;
  text.mutable_text()->set_instruction("stop");
  *failing = true;
  ASSERT_TRUE(Send(text));
  Settle();
  *failing = false;
  const v1::ActionChunk chunk = Act(3);
  EXPECT_THAT(TimesOf(chunk), ::testing::ElementsAre(3));
}

TEST_F(SessionRatesTest, NewFramesWhileAPrefixFailsAreTakenUp) {
  const auto failing = std::make_shared<std::atomic<int>>(0);
  FakeModelOptions model;
  model.fault = [failing] {
    return failing->fetch_sub(1) == 1 ? absl::ResourceExhaustedError("no memory for this step")
                                      : absl::OkStatus();
  };
  OpenAs({.model = std::move(model), .refresh = true});
  SettledFrame(1);
  gate_->Close();
  Frame(2);
  gate_->AwaitWaiter();
  Frame(3);
  AwaitDecoded();
  *failing = 1;
  gate_->Open();
  Settle();
  EXPECT_EQ(Requests().size(), 3U);
  EXPECT_THAT(TimesOf(Act(1)), ::testing::ElementsAre(3));
}

TEST_F(SessionRatesTest, AnIncompleteSetIsNotActedOn) {
  OpenAs({.model = {.cameras = {"left", "right"}}, .refresh = true});
  SettledFrame(1, "left");
  EXPECT_EQ(Requests().size(), 0U);
  SettledFrame(2, "right");
  EXPECT_EQ(Requests().size(), 1U);
  EXPECT_THAT(TimesOf(Act(1)), ::testing::ElementsAre(1, 2));
  SettledFrame(3, "left");
  EXPECT_THAT(TimesOf(Act(2)), ::testing::ElementsAre(1, 2));
  SettledFrame(4, "right");
  EXPECT_THAT(TimesOf(Act(3)), ::testing::ElementsAre(3, 4));
  // One camera is faster than the other.
  SettledFrame(5, "right");
  EXPECT_THAT(TimesOf(Act(4)), ::testing::ElementsAre(3, 4));
  SettledFrame(6, "right");
  EXPECT_THAT(TimesOf(Act(5)), ::testing::ElementsAre(3, 6));
}

TEST_F(SessionRatesTest, AnAgeThatThePrefixDoesNotMeetIsMetByTheNewestFrames) {
  OpenAs({.refresh = true});
  Frame(1, "", seconds(100));
  Settle();
  EXPECT_THAT(TimesOf(Act(1, seconds(1000))), ::testing::ElementsAre(1));
  gate_->Close();
  Frame(2, "", seconds(50));
  gate_->AwaitWaiter();  // its prefix is not there yet
  v1::SessionRequest act;
  act.mutable_act()->set_id(2);
  act.mutable_act()->set_max_frame_age_us(1'000'000'000);
  ASSERT_TRUE(Send(act));
  act.mutable_act()->set_id(3);
  act.mutable_act()->set_max_frame_age_us(75'000'000);
  ASSERT_TRUE(Send(act));
  act.mutable_act()->set_id(4);
  act.mutable_act()->set_max_frame_age_us(10'000'000);
  ASSERT_TRUE(Send(act));
  const v1::RequestError error = Error();
  EXPECT_EQ(error.act_id(), 4U);
  EXPECT_EQ(error.detail().reason(), v1::ERROR_REASON_STALE_FRAME);
  gate_->Open();
  std::map<uint64_t, std::vector<int64_t>> times;
  for (int i = 0; i < 2; ++i) {
    const v1::ActionChunk chunk = Chunk();
    times[chunk.act_id()] = TimesOf(chunk);
  }
  EXPECT_THAT(times[2], ::testing::ElementsAre(1));
  EXPECT_THAT(times[3], ::testing::ElementsAre(2));
}

TEST_F(SessionRatesTest, APrefixOfTheLastEpisodeIsForgotten) {
  OpenAs({.refresh = true});
  gate_->Close();
  Frame(9);
  gate_->AwaitWaiter();
  v1::SessionRequest reset;
  reset.mutable_reset()->set_keep_instruction(true);
  ASSERT_TRUE(Send(reset));
  gate_->Open();
  Settle();
  ASSERT_TRUE(SendAct(1));
  EXPECT_EQ(Error().detail().reason(), v1::ERROR_REASON_NO_FRAME);
  SettledFrame(2);
  EXPECT_THAT(TimesOf(Act(2)), ::testing::ElementsAre(2));
}

// Whatever ends a stream: a prefix that is on its way is the last one, though newer frames wait.
class EndingTest : public SessionRatesTest {
 protected:
  void Begin() {
    OpenAs({.refresh = true});
    gate_->Close();
    Frame(1);
    gate_->AwaitWaiter();
    Frame(2);
    AwaitDecoded();
  }
  void ExpectNoOther() {
    gate_->Open();
    Settle();
    EXPECT_EQ(Requests().size(), 1U);
  }
};

TEST_F(EndingTest, CancelledWithAPrefixOnItsWay) {
  Begin();
  core_->OnCancelled();
  EXPECT_TRUE(port_.finished());
  ExpectNoOther();
}

TEST_F(EndingTest, HalfClosedWithAPrefixOnItsWay) {
  Begin();
  ASSERT_TRUE(port_.TakeRead());
  core_->OnReadsDone();
  ASSERT_TRUE(port_.finished());
  EXPECT_TRUE(port_.finished()->ok());
  ExpectNoOther();
}

TEST_F(EndingTest, ClosedWithAPrefixOnItsWay) {
  Begin();
  core_->CloseWhenIdle(absl::UnavailableError("bye"));
  ASSERT_TRUE(port_.finished());
  ExpectNoOther();
}

TEST_F(EndingTest, DrainedWithAPrefixOnItsWay) {
  Begin();
  std::thread draining([this] { server_->engine().Drain(kNever); });
  EXPECT_TRUE(Eventually([this] { return server_->engine().draining(); }));
  ExpectNoOther();
  draining.join();
}

// One that waits for its turn ends with the stream, like an act.
TEST_F(EndingTest, CancelledWithAPrefixThatWaits) {
  OpenAs({.refresh = true});
  SettledFrame(1);
  gate_->Close();
  ASSERT_TRUE(SendAct(1));
  gate_->AwaitWaiter();
  Frame(2);
  AwaitDecoded();
  EXPECT_EQ(Unanswered(), 2U);
  core_->OnCancelled();
  gate_->Open();
  Settle();
  const std::vector<RequestRecord> requests = Requests();
  ASSERT_EQ(requests.size(), 3U);
  EXPECT_EQ(requests[0].code, absl::StatusCode::kOk);
  EXPECT_EQ(requests[1].code, absl::StatusCode::kCancelled);
  EXPECT_EQ(requests[2].code, absl::StatusCode::kCancelled);
}

}  // namespace
}  // namespace saccade::testing
