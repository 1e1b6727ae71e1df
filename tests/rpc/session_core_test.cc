// A stream against a transport that can stall: bounded outbox, pausing, housekeeping, endings.
#include "rpc/session_core.h"

#include <gtest/gtest.h>

#include <condition_variable>
#include <latch>

#include "tests/rpc/harness.h"

namespace saccade::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Keeps what is asked of it; the test completes it.
class FakePort final : public StreamPort {
 public:
  void Read() override {
    const std::lock_guard lock(mu_);
    EXPECT_FALSE(reading_);
    reading_ = true;
  }
  void Write(const std::string& bytes) override {
    const std::lock_guard lock(mu_);
    EXPECT_FALSE(writing_) << "two writes at once";
    writing_ = true;
    EXPECT_TRUE(written_.emplace_back().ParseFromString(bytes));
  }
  void Finish(const absl::Status& status) override {
    const std::lock_guard lock(mu_);
    EXPECT_FALSE(finished_) << "finished twice";
    EXPECT_FALSE(writing_) << "finished during a write";
    finished_ = status;
  }
  void Abort() override {
    const std::lock_guard lock(mu_);
    aborted_ = true;
  }

  bool TakeRead() {
    const std::lock_guard lock(mu_);
    return std::exchange(reading_, false);
  }
  bool TakeWrite() {
    const std::lock_guard lock(mu_);
    return std::exchange(writing_, false);
  }
  size_t written() const {
    const std::lock_guard lock(mu_);
    return written_.size();
  }
  v1::SessionResponse last() const {
    const std::lock_guard lock(mu_);
    return written_.back();
  }
  std::optional<absl::Status> finished() const {
    const std::lock_guard lock(mu_);
    return finished_;
  }
  bool aborted() const {
    const std::lock_guard lock(mu_);
    return aborted_;
  }

 private:
  mutable std::mutex mu_;
  bool reading_ = false;
  bool writing_ = false;
  bool aborted_ = false;
  std::vector<v1::SessionResponse> written_;
  std::optional<absl::Status> finished_;
};

class SessionCoreTest : public ::testing::Test {
 protected:
  void Make(uint32_t outbox) {
    server_ = std::make_unique<TestServer>(ServerOptions{.model = {.gate = gate_},
                                                         .config =
                                                             [&](Config& config) {
                                                               config.limits.outbox_messages =
                                                                   outbox;
                                                               config.limits.session_idle_s = 60;
                                                             },
                                                         .serve = false});
    serving_ = Serving::Create(server_->config(), server_->engine(), *decoding_, clock_,
                               &server_->metrics())
                   .value();
    core_ =
        std::make_shared<SessionCore>(serving_, serving_->sessions().Admit("a").value(), kNever);
    core_->Start(&port_);
  }
  void TearDown() override {
    gate_->Open();
    ReleaseDecoding();
    core_->OnCancelled();
    if (port_.TakeWrite()) core_->OnWriteDone(false);
    EXPECT_TRUE(port_.finished().has_value());
    core_->Detach();
    server_->ExpectIdleSoon();
    EXPECT_EQ(serving_->sessions().open(), 0U);
    core_ = nullptr;
    decoding_ = nullptr;  // what its jobs hold must not outlive the engine
    serving_ = nullptr;
  }

  // False when the stream does not read.
  bool Send(v1::SessionRequest request) {
    if (!port_.TakeRead()) return false;
    core_->OnMessage(std::move(request), clock_.Now());
    return true;
  }
  void Open(bool tokens = false) {
    v1::SessionRequest request;
    request.mutable_open()->set_instruction("go");
    request.mutable_open()->mutable_options()->set_stream_tokens(tokens);
    ASSERT_TRUE(Send(request));
    ASSERT_TRUE(port_.TakeWrite());
    ASSERT_TRUE(port_.last().has_opened());
    core_->OnWriteDone(true);
    v1::SessionRequest frame;
    v1::RawImage& raw = *frame.mutable_vision()->mutable_raw();
    raw.set_pixel_format(v1::PIXEL_FORMAT_RGB8);
    raw.set_width(1);
    raw.set_height(1);
    raw.set_data("abc");
    ASSERT_TRUE(Send(frame));
    std::latch decoded(1);
    decoding_->Run(std::make_shared<FairExecutor::Account>(), FairExecutor::Size::kMedium,
                   [&] { decoded.count_down(); });
    decoded.wait();
  }
  bool SendAct(uint64_t id) {
    v1::SessionRequest request;
    request.mutable_act()->set_id(id);
    return Send(request);
  }

  // Until the engine has nothing left and has delivered everything.
  void AwaitAnswers() {
    EXPECT_TRUE(Eventually([this] {
      const SchedulerStats stats = server_->engine().Stats().value();
      return stats.classes[3].running + stats.classes[3].queued == 0;
    }));
    EXPECT_TRUE(server_->engine().Stats().ok());  // the turn after the last delivery
  }

  // Takes the one place for decoding, so that frames wait.
  void HoldDecoding() {
    decoding_->Run(std::make_shared<FairExecutor::Account>(), FairExecutor::Size::kMedium, [this] {
      held_.count_down();
      release_.wait();
    });
    held_.wait();
  }
  void ReleaseDecoding() {
    if (!release_.try_wait()) release_.count_down();
  }
  bool SendFrame(int64_t capture_time_ns, std::string_view pixel) {
    v1::SessionRequest request;
    request.mutable_vision()->set_capture_time_ns(capture_time_ns);
    v1::RawImage& raw = *request.mutable_vision()->mutable_raw();
    raw.set_pixel_format(v1::PIXEL_FORMAT_RGB8);
    raw.set_width(1);
    raw.set_height(1);
    raw.set_data(std::string(pixel));
    return Send(request);
  }
  double Superseded() const { return server_->metrics().model("fake").frames_superseded->Value(); }
  // The next message to the client.
  v1::SessionResponse Next() {
    EXPECT_TRUE(Eventually([this] { return port_.TakeWrite(); }));
    v1::SessionResponse response = port_.last();
    core_->OnWriteDone(true);
    return response;
  }

  SteadyClock clock_;
  std::unique_ptr<FairExecutor> decoding_ = FairExecutor::Create(1).value();
  std::latch held_{1};
  std::latch release_{1};
  std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
  std::unique_ptr<TestServer> server_;
  std::shared_ptr<Serving> serving_;
  FakePort port_;
  std::shared_ptr<SessionCore> core_;
};

TEST_F(SessionCoreTest, StopsReadingAClientThatDoesNotRead) {
  Make(8);
  Open();
  int sent = 0;
  while (Send({})) ++sent;  // each is an error to be told
  EXPECT_EQ(sent, 4);       // half of the outbox
  EXPECT_FALSE(port_.finished());
  const size_t before = port_.written();
  // It reads again: everything comes, in order, and so does the next message.
  while (port_.TakeWrite()) core_->OnWriteDone(true);
  EXPECT_EQ(port_.written(), before + 3);
  EXPECT_EQ(port_.last().error().message_number(), 6U);
  EXPECT_TRUE(Send({}));
}

TEST_F(SessionCoreTest, AnswersThatNobodyReadsEndTheStream) {
  Make(4);
  Open();
  gate_->Close();
  for (uint64_t id = 1; id <= 10; ++id) ASSERT_TRUE(SendAct(id));
  gate_->Open();
  // One is being written, three wait; the next one is too many.
  AwaitAnswers();
  EXPECT_FALSE(port_.finished());
  ASSERT_TRUE(port_.TakeWrite());
  core_->OnWriteDone(true);
  ASSERT_TRUE(port_.finished());
  EXPECT_EQ(port_.finished()->code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(GetErrorInfo(*port_.finished()).reason, Reason::kRateLimited);
  EXPECT_FALSE(port_.TakeRead() && SendAct(11));
}

TEST_F(SessionCoreTest, AStalledStreamThatMustEndIsAborted) {
  Make(4);
  Open();
  gate_->Close();
  for (uint64_t id = 1; id <= 10; ++id) ASSERT_TRUE(SendAct(id));
  gate_->Open();
  AwaitAnswers();
  core_->Tick(clock_.Now() + milliseconds(100));
  EXPECT_FALSE(port_.aborted());
  core_->Tick(clock_.Now() + seconds(3));
  EXPECT_TRUE(port_.aborted());
  EXPECT_FALSE(port_.finished());
}

TEST_F(SessionCoreTest, TokenEventsGiveWayToAnswers) {
  Make(6);
  Open(true);
  gate_->Close();
  for (uint64_t id = 1; id <= 5; ++id) ASSERT_TRUE(SendAct(id));
  gate_->Open();
  // 15 token events and 5 answers; the first event is being written and nothing is read.
  AwaitAnswers();
  EXPECT_FALSE(port_.finished());
  int chunks = 0;
  int tokens = 0;
  while (port_.TakeWrite()) {
    port_.last().has_chunk() ? ++chunks : ++tokens;
    core_->OnWriteDone(true);
  }
  EXPECT_EQ(chunks, 5);
  EXPECT_GE(tokens, 1);
  EXPECT_LE(tokens, 3);
  EXPECT_TRUE(SendAct(6));
}

TEST_F(SessionCoreTest, AStreamThatIsNeverOpenedEnds) {
  Make(8);
  core_->Tick(clock_.Now() + seconds(9));
  EXPECT_FALSE(port_.finished());
  core_->Tick(clock_.Now() + seconds(11));
  ASSERT_TRUE(port_.finished());
  EXPECT_EQ(port_.finished()->code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(GetErrorInfo(*port_.finished()).field, "open");
}

TEST_F(SessionCoreTest, AnIdleSessionEnds) {
  Make(8);
  Open();
  core_->Tick(clock_.Now() + seconds(59));
  EXPECT_FALSE(port_.finished());
  core_->Tick(clock_.Now() + seconds(61));
  ASSERT_TRUE(port_.finished());
  EXPECT_EQ(port_.finished()->code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(SessionCoreTest, ASessionThatWaitsForAnAnswerIsNotIdle) {
  Make(8);
  Open();
  gate_->Close();
  ASSERT_TRUE(SendAct(1));
  core_->Tick(clock_.Now() + seconds(120));
  EXPECT_FALSE(port_.finished());
  gate_->Open();
  EXPECT_TRUE(Eventually([&] { return port_.TakeWrite(); }));
  core_->OnWriteDone(true);
  EXPECT_TRUE(port_.last().has_chunk());
}

TEST_F(SessionCoreTest, ASessionThatNeverReadsEnds) {
  Make(8);
  Open();
  ASSERT_TRUE(Send({}));
  core_->Tick(clock_.Now() + seconds(61));
  EXPECT_FALSE(port_.finished());  // a write is in progress
  core_->Tick(clock_.Now() + seconds(64));
  EXPECT_TRUE(port_.aborted());
  ASSERT_TRUE(port_.TakeWrite());
  core_->OnWriteDone(false);
  ASSERT_TRUE(port_.finished());
  EXPECT_EQ(port_.finished()->code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(SessionCoreTest, ClosingWaitsForWhatWasAccepted) {
  Make(8);
  Open();
  gate_->Close();
  ASSERT_TRUE(SendAct(1));
  core_->NotifyDraining();
  ASSERT_TRUE(port_.TakeWrite());
  EXPECT_EQ(port_.last().notice().kind(), v1::NOTICE_KIND_DRAINING);
  core_->OnWriteDone(true);
  core_->CloseWhenIdle(absl::UnavailableError("bye"));
  EXPECT_FALSE(port_.finished());
  gate_->Open();
  EXPECT_TRUE(Eventually([&] { return port_.TakeWrite(); }));
  EXPECT_TRUE(port_.last().has_chunk());
  EXPECT_FALSE(port_.finished());
  core_->OnWriteDone(true);
  ASSERT_TRUE(port_.finished());
  EXPECT_EQ(port_.finished()->code(), absl::StatusCode::kUnavailable);
}

TEST_F(SessionCoreTest, ANewerFrameReplacesOneThatWaitsBeforeItIsDecoded) {
  Make(64);
  Open();
  const double before = Superseded();
  HoldDecoding();
  ASSERT_TRUE(SendFrame(10, "abd"));
  ASSERT_TRUE(SendFrame(11, "x"));  // no picture: it is not even looked at
  ASSERT_TRUE(SendFrame(12, "abe"));
  EXPECT_EQ(Superseded(), before + 2);
  ASSERT_TRUE(SendAct(1));
  ReleaseDecoding();
  const v1::SessionResponse answer = Next();
  ASSERT_TRUE(answer.has_chunk()) << answer.ShortDebugString();
  ASSERT_EQ(answer.chunk().frames_size(), 1);
  EXPECT_EQ(answer.chunk().frames(0).capture_time_ns(), 12);
}

TEST_F(SessionCoreTest, AFrameThatAnActRequestWaitsForIsKept) {
  Make(64);
  Open();
  const double before = Superseded();
  HoldDecoding();
  for (const int64_t i : {1, 2, 3}) {
    ASSERT_TRUE(SendFrame(10 * i, "abd"));
    ASSERT_TRUE(SendAct(static_cast<uint64_t>(i)));
  }
  EXPECT_EQ(Superseded(), before);
  ReleaseDecoding();
  for (const int64_t i : {1, 2, 3}) {
    const v1::SessionResponse answer = Next();
    ASSERT_TRUE(answer.has_chunk()) << answer.ShortDebugString();
    EXPECT_EQ(answer.chunk().act_id(), static_cast<uint64_t>(i));
    EXPECT_EQ(answer.chunk().frames(0).capture_time_ns(), 10 * i);
  }
}

// Decoding for a request that can only be refused would take time from those that can be answered.
TEST_F(SessionCoreTest, AFrameOnlyALateRequestWaitsForIsNotDecoded) {
  Make(64);
  Open();
  const double before = Superseded();
  HoldDecoding();
  ASSERT_TRUE(SendFrame(10, "abd"));
  v1::SessionRequest act;
  act.mutable_act()->set_id(1);
  act.mutable_act()->set_latency_class("control");
  act.mutable_act()->set_deadline_us(1000);
  ASSERT_TRUE(Send(act));
  ASSERT_TRUE(SendFrame(20, "abe"));
  ASSERT_TRUE(SendAct(2));
  std::this_thread::sleep_for(milliseconds(3));
  ReleaseDecoding();
  v1::SessionResponse answer = Next();
  ASSERT_TRUE(answer.has_error()) << answer.ShortDebugString();
  EXPECT_EQ(answer.error().act_id(), 1U);
  answer = Next();
  ASSERT_TRUE(answer.has_chunk()) << answer.ShortDebugString();
  EXPECT_EQ(answer.chunk().frames(0).capture_time_ns(), 20);
  EXPECT_EQ(Superseded(), before + 1);
}

TEST_F(SessionCoreTest, ReadsABoundedNumberOfMessagesAhead) {
  Make(64);
  Open();
  HoldDecoding();
  int sent = 0;
  while (sent < 100 && SendFrame(sent, "abd") && SendAct(static_cast<uint64_t>(sent))) ++sent;
  EXPECT_EQ(sent, 8);  // 16 messages
  ReleaseDecoding();
  for (int i = 0; i < sent; ++i) EXPECT_TRUE(Next().has_chunk());
  EXPECT_TRUE(SendFrame(1000, "abd"));
}

TEST_F(SessionCoreTest, CancellingAStreamWhoseFramesWait) {
  Make(64);
  Open();
  HoldDecoding();
  ASSERT_TRUE(SendFrame(10, "abd"));
  ASSERT_TRUE(SendAct(1));
  core_->OnCancelled();
  EXPECT_TRUE(port_.finished());
  ReleaseDecoding();
  EXPECT_TRUE(Eventually([this] { return decoding_->waiting() == 0; }));
}

TEST_F(SessionCoreTest, CancellingFreesEverythingAtOnce) {
  Make(8);
  Open();
  gate_->Close();
  for (uint64_t id = 1; id <= 5; ++id) ASSERT_TRUE(SendAct(id));
  gate_->AwaitWaiter();
  core_->OnCancelled();
  ASSERT_TRUE(port_.finished());
  const size_t written = port_.written();
  gate_->Open();
  AwaitAnswers();
  EXPECT_EQ(port_.written(), written);
}

TEST_F(SessionCoreTest, HalfCloseEndsWithOkOnceAllIsSent) {
  Make(8);
  Open();
  gate_->Close();
  ASSERT_TRUE(SendAct(1));
  ASSERT_TRUE(port_.TakeRead());
  core_->OnReadsDone();
  EXPECT_FALSE(port_.finished());
  gate_->Open();
  EXPECT_TRUE(Eventually([&] { return port_.TakeWrite(); }));
  EXPECT_FALSE(port_.finished());
  core_->OnWriteDone(true);
  ASSERT_TRUE(port_.finished());
  EXPECT_TRUE(port_.finished()->ok());
}

}  // namespace
}  // namespace saccade::testing
