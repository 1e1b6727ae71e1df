// A stream against a transport that can stall: bounded outbox, pausing, housekeeping, endings.
#include "rpc/session_core.h"

#include <gtest/gtest.h>

#include "tests/rpc/stream.h"

namespace saccade::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

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
