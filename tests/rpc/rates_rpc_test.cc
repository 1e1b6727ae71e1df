// Sessions at several rates: prefixes that are made ahead of the acts that read them, and acts that
// the server asks for itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "tests/rpc/client.h"
#include "tests/rpc/harness.h"

namespace saccade::testing {
namespace {

using std::chrono::milliseconds;

v1::Open Refreshing() {
  v1::Open open;
  open.set_instruction("go");
  open.mutable_options()->set_refresh_class("best_effort");
  return open;
}

v1::SessionRequest PushOf(double hz, uint64_t first_id) {
  v1::SessionRequest request;
  request.mutable_push()->set_hz(hz);
  request.mutable_push()->mutable_act()->set_id(first_id);
  return request;
}

const v1::ModalityTokens* VisionOf(const v1::ActionChunk& chunk) {
  for (const v1::ModalityTokens& tokens : chunk.tokens()) {
    if (tokens.modality() == v1::MODALITY_VISION) return &tokens;
  }
  return nullptr;
}

TEST(RatesRpcTest, ActsReadTheNewestPrefixThatIsThere) {
  TestServer server;
  SessionClient client(NewChannel(server.address()));
  client.Open(Refreshing());
  SessionClient alone(NewChannel(server.address()));
  v1::Open plain;
  plain.set_instruction("go");
  alone.Open(plain);
  uint64_t id = 0;
  uint64_t version = 0;
  int64_t newest = 0;
  for (int64_t frame = 1; frame <= 5; ++frame) {
    client.SendFrame(RawFrame("", static_cast<uint8_t>(frame * 40), frame));
    v1::ActionChunk chunk;
    // Acts go on with the last prefix until the new one is committed.
    for (int attempt = 0; attempt < 2000; ++attempt) {
      chunk = client.Act(++id);
      ASSERT_EQ(chunk.frames_size(), 1);
      EXPECT_GE(chunk.frames(0).capture_time_ns(), newest) << "back to an older frame";
      EXPECT_GE(chunk.observation_version(), version);
      newest = chunk.frames(0).capture_time_ns();
      version = chunk.observation_version();
      // A committed prefix was computed before it was asked for.
      const v1::ModalityTokens* const vision = VisionOf(chunk);
      ASSERT_NE(vision, nullptr);
      if (newest == frame && vision->cached() == vision->total()) break;
      std::this_thread::sleep_for(milliseconds(1));
    }
    EXPECT_EQ(newest, frame);
    EXPECT_TRUE(chunk.frames_cached());
    // The answer is that of a session which computes everything when it is asked.
    alone.SendFrame(RawFrame("", static_cast<uint8_t>(frame * 40), frame));
    EXPECT_EQ(TokensOf(chunk), TokensOf(alone.Act(id)));
  }
  client.HalfClose();
  EXPECT_TRUE(client.Finish().ok());
}

TEST(RatesRpcTest, ManyFramesAreRefreshedOneAtATime) {
  TestServer server;
  SessionClient client(NewChannel(server.address()));
  client.Open(Refreshing());
  for (int64_t frame = 1; frame <= 200; ++frame) {
    client.SendFrame(RawFrame("", static_cast<uint8_t>(frame), frame));
    if (frame % 50 == 0) client.SendText("go " + std::to_string(frame));
  }
  v1::ActionChunk chunk;
  for (uint64_t id = 1; id < 3000; ++id) {
    chunk = client.Act(id);
    if (chunk.frames(0).capture_time_ns() == 200) break;
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_EQ(chunk.frames(0).capture_time_ns(), 200);
  client.HalfClose();
  EXPECT_TRUE(client.Finish().ok());
  server.ExpectIdleSoon();
}

TEST(RatesRpcTest, AnUnknownRefreshClassIsNamed) {
  TestServer server;
  SessionClient client(NewChannel(server.address()));
  v1::SessionRequest request;
  request.mutable_open()->mutable_options()->set_refresh_class("nope");
  client.Send(request);
  const grpc::Status status = client.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(DetailOf(status).field(), "open.options.refresh_class");
}

TEST(RatesRpcTest, PushedActsCountOnAndFollowTheState) {
  TestServer server({.model = {.state_dim = 1}});
  SessionClient client(NewChannel(server.address()));
  v1::Open open;
  open.set_instruction("go");
  client.Open(open);
  client.SendFrame(RawFrame("", 9, 1));
  v1::SessionRequest state;
  state.mutable_state()->add_values(1);
  state.mutable_state()->set_capture_time_ns(11);
  client.Send(state);
  client.Send(PushOf(200, 1000));
  for (uint64_t id = 1000; id < 1010; ++id) {
    const v1::ActionChunk chunk = client.NextChunk();
    EXPECT_EQ(chunk.act_id(), id);
    EXPECT_EQ(chunk.state_capture_time_ns(), 11);
  }
  state.mutable_state()->set_values(0, 2);
  state.mutable_state()->set_capture_time_ns(12);
  client.Send(state);
  v1::ActionChunk chunk;
  for (int i = 0; i < 200 && chunk.state_capture_time_ns() != 12; ++i) chunk = client.NextChunk();
  EXPECT_EQ(chunk.state_capture_time_ns(), 12);
  EXPECT_THAT(chunk.state(), ::testing::ElementsAre(2.0F));

  client.Send(PushOf(0, 0));
  // What was on its way still comes; then the client's own acts alone.
  client.SendAct(5);
  for (int i = 0; i < 100 && chunk.act_id() != 5; ++i) chunk = client.NextChunk();
  EXPECT_EQ(chunk.act_id(), 5U);
  std::this_thread::sleep_for(milliseconds(30));
  EXPECT_EQ(client.Act(6).act_id(), 6U);
  client.HalfClose();
  EXPECT_TRUE(client.Finish().ok());
  server.ExpectIdleSoon();
}

TEST(RatesRpcTest, PushedActsWaitForNoFrameThatIsDecoded) {
  const auto gate = std::make_shared<Gate>();
  TestServer server({.model = {.decode_gate = gate}});
  SessionClient client(NewChannel(server.address()));
  client.Open(Refreshing());
  client.SendFrame(RawFrame("", 10, 1));
  client.Send(PushOf(100, 1));
  EXPECT_EQ(client.NextChunk().frames(0).capture_time_ns(), 1);
  gate->Close();
  client.SendFrame(RawFrame("", 20, 2));
  client.SendFrame(RawFrame("", 30, 3));
  gate->AwaitWaiter();
  for (int i = 0; i < 10; ++i) EXPECT_EQ(client.NextChunk().frames(0).capture_time_ns(), 1);
  gate->Open();
  int64_t newest = 1;
  for (int i = 0; i < 200 && newest != 3; ++i) {
    newest = client.NextChunk().frames(0).capture_time_ns();
  }
  EXPECT_EQ(newest, 3);
  client.HalfClose();
  EXPECT_TRUE(client.Finish().ok());
  server.ExpectIdleSoon();
}

TEST(RatesRpcTest, WhyTurnsAreRefusedIsToldOnce) {
  TestServer server;
  SessionClient client(NewChannel(server.address()));
  v1::Open open;
  open.set_instruction("go");
  client.Open(open);
  client.Send(PushOf(200, 1));
  const v1::RequestError error = client.NextError();
  EXPECT_EQ(error.detail().reason(), v1::ERROR_REASON_NO_FRAME);
  std::this_thread::sleep_for(milliseconds(40));
  client.SendFrame(RawFrame("", 9, 1));
  EXPECT_GT(client.NextChunk().act_id(), error.act_id());  // and no second error before it
}

TEST(RatesRpcTest, APushIsChecked) {
  TestServer server;
  SessionClient client(NewChannel(server.address()));
  client.Open();
  for (const double hz : {-1.0, 0.01, 1000.0, std::nan("")}) {
    client.Send(PushOf(hz, 1));
    EXPECT_EQ(client.NextError().detail().field(), "push.hz") << hz;
  }
  v1::SessionRequest request = PushOf(10, 1);
  request.mutable_push()->mutable_act()->set_latency_class("nope");
  client.Send(request);
  EXPECT_EQ(client.NextError().detail().field(), "push.act.latency_class");
}

// A client that goes while its push runs leaves nothing behind.
TEST(RatesRpcTest, APushEndsWithItsClient) {
  TestServer server;
  for (int i = 0; i < 20; ++i) {
    SessionClient client(NewChannel(server.address()));
    client.Open(Refreshing());
    client.SendFrame(RawFrame("", static_cast<uint8_t>(i), 1));
    client.Send(PushOf(200, 1));
    if (i % 2 == 0) client.NextChunk();
  }
  server.ExpectIdleSoon();
}

}  // namespace
}  // namespace saccade::testing
