// What a client gets: the whole path from the socket to the answer and back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <png.h>
#include <turbojpeg.h>

#include <algorithm>
#include <cmath>
#include <thread>

#include "saccade/v1/models.grpc.pb.h"
#include "saccade/v1/server.grpc.pb.h"
#include "tests/rpc/client.h"
#include "tests/rpc/harness.h"

namespace saccade::testing {
namespace {

using ::testing::HasSubstr;

std::string Png(uint32_t width, uint32_t height, const std::string& rgb) {
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  image.width = width;
  image.height = height;
  image.format = PNG_FORMAT_RGB;
  png_alloc_size_t size = 0;
  png_image_write_to_memory(&image, nullptr, &size, 0, rgb.data(), 0, nullptr);
  std::string out(size, '\0');
  png_image_write_to_memory(&image, out.data(), &size, 0, rgb.data(), 0, nullptr);
  out.resize(size);
  return out;
}

std::string Jpeg(int width, int height, const std::string& rgb) {
  tjhandle handle = tjInitCompress();
  unsigned char* bytes = nullptr;
  unsigned long size = 0;
  tjCompress2(handle, reinterpret_cast<const unsigned char*>(rgb.data()), width, 0, height,
              TJPF_RGB, &bytes, &size, TJSAMP_444, 95, 0);
  std::string out(reinterpret_cast<char*>(bytes), size);
  tjFree(bytes);
  tjDestroy(handle);
  return out;
}

v1::Open OpenWith(const std::string& instruction) {
  v1::Open open;
  open.set_instruction(instruction);
  return open;
}

TEST(SessionRpcTest, OpensAndAnswers) {
  TestServer server({.config = [](Config& config) {
    config.models[0].action_space =
        ActionSpaceConfig{.steps = 1,
                          .dt_s = 0.05,
                          .relative = true,
                          .dims = {{"steer", "rad"}, {"gas", ""}, {"brake", "N"}}};
  }});
  SessionClient client(NewChannel(server.address()));
  const v1::Opened opened = client.Open(OpenWith("drive"));
  EXPECT_GT(opened.session_id(), 0U);
  EXPECT_EQ(opened.model().name(), "fake");
  EXPECT_EQ(opened.model().family(), "fake");
  ASSERT_EQ(opened.model().cameras_size(), 1);
  EXPECT_EQ(opened.model().cameras(0).name(), "front");
  EXPECT_EQ(opened.model().cameras(0).width(), 4U);
  EXPECT_TRUE(opened.model().cameras(0).required());
  EXPECT_EQ(opened.model().fingerprint().size(), 32U);
  EXPECT_EQ(opened.model().compute_type(), "f32");
  EXPECT_EQ(opened.statistics_key(), "robot");
  EXPECT_EQ(opened.action_space().steps(), 1U);
  EXPECT_EQ(opened.action_space().dim(), 3U);
  EXPECT_EQ(opened.action_space().dt_s(), 0.05);
  EXPECT_EQ(opened.action_space().reference(), v1::ACTION_REFERENCE_RELATIVE);
  ASSERT_EQ(opened.action_space().dimensions_size(), 3);
  EXPECT_EQ(opened.action_space().dimensions(2).name(), "brake");
  EXPECT_EQ(opened.action_space().dimensions(0).unit(), "rad");
  EXPECT_EQ(opened.latency_class().name(), "best_effort");
  EXPECT_EQ(opened.limits().max_message_bytes(), server.config().server.max_message_bytes);

  v1::VisionFrame frame = RawFrame("front", 40, 123'456'789);
  frame.set_age_us(5000);
  client.SendFrame(frame);
  const v1::ActionChunk chunk = client.Act(17);
  EXPECT_EQ(chunk.act_id(), 17U);
  ASSERT_EQ(chunk.samples_size(), 1);
  const v1::ActionSample& sample = chunk.samples(0);
  ASSERT_EQ(sample.token_ids_size(), 3);
  ASSERT_EQ(sample.values_size(), 3);
  ASSERT_EQ(sample.normalized_size(), 3);
  for (int i = 0; i < 3; ++i) {
    EXPECT_GE(sample.token_ids(i), FakeModel::kFirstAction);
    EXPECT_FLOAT_EQ(sample.normalized(i),
                    (sample.token_ids(i) - FakeModel::kFirstAction) / 15.0F - 1.0F);
    EXPECT_DOUBLE_EQ(sample.values(i), sample.normalized(i));
  }
  EXPECT_EQ(chunk.action_space().dimensions(1).name(), "gas");
  ASSERT_EQ(chunk.frames_size(), 1);
  EXPECT_EQ(chunk.frames(0).camera(), "front");
  EXPECT_EQ(chunk.frames(0).capture_time_ns(), 123'456'789);
  EXPECT_GE(chunk.frames(0).age_us(), 5000U);
  EXPECT_LT(chunk.frames(0).age_us(), 10'000'000U);
  ASSERT_EQ(chunk.frames(0).runs_size(), 1);
  EXPECT_EQ(chunk.frames(0).runs(0).source(), v1::TOKEN_SOURCE_COMPUTED);
  EXPECT_EQ(chunk.frames(0).runs(0).count(), FakeModel::kVisionTokens);
  const v1::Timings& t = chunk.timings();
  EXPECT_GT(t.total_us(), 0U);
  EXPECT_NEAR(static_cast<double>(t.queue_us() + t.encode_us() + t.prefill_us() + t.act_us()),
              static_cast<double>(t.total_us()), 4);
  ASSERT_EQ(chunk.tokens_size(), 2);
  EXPECT_EQ(chunk.tokens(0).modality(), v1::MODALITY_VISION);
  EXPECT_EQ(chunk.tokens(0).total(), FakeModel::kVisionTokens);
  EXPECT_EQ(chunk.tokens(1).modality(), v1::MODALITY_TEXT);
  EXPECT_EQ(chunk.tokens(1).total(), 1U + 5 + 1);
  EXPECT_FALSE(chunk.frames_cached());
  EXPECT_EQ(chunk.deadline_us(), 0U);
  EXPECT_TRUE(chunk.deadline_met());
  EXPECT_FALSE(chunk.late());
  EXPECT_EQ(chunk.degradation_size(), 0);
  EXPECT_EQ(chunk.latency_class(), "best_effort");
  EXPECT_EQ(chunk.statistics_key(), "robot");
  const v1::ActionChunk again = client.Act(18);
  ASSERT_EQ(again.frames(0).runs_size(), 1);
  EXPECT_EQ(again.frames(0).runs(0).source(), v1::TOKEN_SOURCE_REUSED);
  EXPECT_EQ(again.frames(0).runs(0).count(), FakeModel::kVisionTokens);
  client.HalfClose();
  EXPECT_TRUE(client.Finish().ok());
  server.ExpectIdleSoon();
}

TEST(SessionRpcTest, TheSamePixelsInAnyContainerAreTheSameFrame) {
  TestServer server;
  SessionClient client(NewChannel(server.address()));
  client.Open(OpenWith("look"));
  std::string rgb;
  for (int i = 0; i < 8 * 6; ++i)
    rgb += {static_cast<char>(i * 5), static_cast<char>(200), static_cast<char>(i)};
  v1::VisionFrame frame = RawFrame("front", 0);
  frame.mutable_raw()->set_data(rgb);
  client.SendFrame(frame);
  const v1::ActionChunk raw = client.Act(1);
  EXPECT_FALSE(raw.frames_cached());
  frame.set_encoded(Png(8, 6, rgb));
  client.SendFrame(frame);
  const v1::ActionChunk png = client.Act(2);
  EXPECT_TRUE(png.frames_cached());
  EXPECT_EQ(TokensOf(raw), TokensOf(png));
  EXPECT_GT(png.tokens(0).cached() + png.tokens(1).cached(), 0U);
  // A JPEG is decoded too; its pixels are only near.
  frame.set_encoded(Jpeg(8, 6, rgb));
  client.SendFrame(frame);
  EXPECT_EQ(TokensOf(client.Act(3)).size(), 3U);
}

// What a model's cameras take is its own affair: the answers are the same, the frames cost more.
TEST(SessionRpcTest, CamerasMayTakeFloats) {
  std::vector<std::vector<int32_t>> answers;
  std::vector<uint64_t> bytes;
  for (const uint32_t floats : {0U, 1U, 2U}) {
    TestServer server({.model = {.cameras = {"front", "back"}, .float_cameras = floats},
                       .memory = uint64_t{1} << 30});
    SessionClient client(NewChannel(server.address()));
    client.Open(OpenWith("look both ways"));
    std::string rgb;
    for (int i = 0; i < 8 * 6 * 3; ++i) rgb += static_cast<char>(i * 37);
    for (const char* camera : {"front", "back"}) {
      v1::VisionFrame frame = RawFrame(camera, 0);
      frame.mutable_raw()->set_data(rgb);
      std::reverse(rgb.begin(), rgb.end());
      client.SendFrame(frame);
    }
    answers.push_back(TokensOf(client.Act(1)));
    bytes.push_back(server.memory()->held(MemoryKind::kFrames));
  }
  EXPECT_EQ(answers[0].size(), 3U);
  EXPECT_EQ(answers[1], answers[0]);
  EXPECT_EQ(answers[2], answers[0]);
  EXPECT_EQ(bytes, (std::vector<uint64_t>{96, 240, 384}));
}

TEST(SessionRpcTest, RepeatedQuestionsAreAnswered) {
  TestServer server;
  SessionClient client(NewChannel(server.address()));
  client.Open(OpenWith("again"));
  client.SendFrame(RawFrame("front", 90, 1));
  const v1::ActionChunk first = client.Act(1);
  const v1::ActionChunk same_observation = client.Act(2);
  client.SendFrame(RawFrame("front", 90, 1));
  const v1::ActionChunk same_frame = client.Act(2);
  EXPECT_EQ(TokensOf(first), TokensOf(same_observation));
  EXPECT_EQ(TokensOf(first), TokensOf(same_frame));
  EXPECT_TRUE(same_frame.frames_cached());
}

TEST(SessionRpcTest, AnswersDependOnFrameAndInstruction) {
  TestServer server;
  SessionClient client(NewChannel(server.address()));
  client.Open();
  std::vector<std::vector<int32_t>> seen;
  uint64_t id = 0;
  for (const char* text : {"left", "right", "stop here"}) {
    client.SendText(text);
    for (const uint8_t shade : {10, 120, 250}) {
      client.SendFrame(RawFrame("front", shade));
      seen.push_back(TokensOf(client.Act(++id)));
    }
  }
  std::sort(seen.begin(), seen.end());
  EXPECT_GE(std::unique(seen.begin(), seen.end()) - seen.begin(), 4);
}

TEST(SessionRpcTest, PredictEqualsASession) {
  TestServer server({.model = {.cameras = {"a", "b"}}});
  const auto channel = NewChannel(server.address());
  SessionClient client(channel);
  client.Open(OpenWith("both ways"));
  client.SendFrame(RawFrame("a", 33));
  client.SendFrame(RawFrame("b", 144));
  const v1::ActionChunk expected = client.Act(1);

  const auto stub = v1::Inference::NewStub(channel);
  v1::PredictRequest request;
  request.mutable_text()->set_instruction("both ways");
  *request.add_frames() = RawFrame("b", 144, 77);  // by name, in any order
  *request.add_frames() = RawFrame("a", 33, 78);
  grpc::ClientContext context;
  v1::PredictResponse response;
  const grpc::Status status = stub->Predict(&context, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(TokensOf(response.chunk()), TokensOf(expected));
  ASSERT_EQ(response.chunk().frames_size(), 2);
  EXPECT_EQ(response.chunk().frames(0).camera(), "a");
  EXPECT_EQ(response.chunk().frames(0).capture_time_ns(), 78);
  client.HalfClose();
  EXPECT_TRUE(client.Finish().ok());
  server.ExpectIdleSoon();
}

TEST(SessionRpcTest, TenCamerasAreBoundByName) {
  FakeModelOptions model;
  model.cameras.clear();
  for (int i = 0; i < 10; ++i) model.cameras.push_back("cam" + std::to_string(i));
  TestServer server({.model = model});
  const auto channel = NewChannel(server.address());
  std::vector<int> order = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  std::vector<int32_t> expected;
  for (int round = 0; round < 3; ++round) {
    SessionClient client(channel);
    v1::Open open = OpenWith("look around");
    for (const int i : order) open.add_cameras("cam" + std::to_string(i));
    client.Open(open);
    for (const int i : order) {
      client.SendFrame(RawFrame("cam" + std::to_string(i), static_cast<uint8_t>(20 * i), 1000 + i));
    }
    const v1::ActionChunk chunk = client.Act(1);
    ASSERT_EQ(chunk.frames_size(), 10);
    for (int i = 0; i < 10; ++i) EXPECT_EQ(chunk.frames(i).capture_time_ns(), 1000 + i);
    if (round == 0) expected = TokensOf(chunk);
    EXPECT_EQ(TokensOf(chunk), expected);
    std::reverse(order.begin(), order.end());
  }
}

TEST(SessionRpcTest, StatisticsDecideTheScaleAndAreNeverGuessed) {
  TestServer server(
      {.model = {.statistics = {"small", "tall"}}});  // sorted by key, scales 1 and 10
  const auto channel = NewChannel(server.address());
  std::vector<double> values[2];
  const char* keys[2] = {"small", "tall"};
  for (int i = 0; i < 2; ++i) {
    SessionClient client(channel);
    v1::Open open = OpenWith("go");
    open.set_statistics_key(keys[i]);
    EXPECT_EQ(client.Open(open).statistics_key(), keys[i]);
    client.SendFrame(RawFrame("front", 60));
    const v1::ActionChunk chunk = client.Act(1);
    EXPECT_EQ(chunk.statistics_key(), keys[i]);
    values[i] = {chunk.samples(0).values().begin(), chunk.samples(0).values().end()};
  }
  ASSERT_EQ(values[0].size(), 3U);
  for (int d = 0; d < 3; ++d) EXPECT_DOUBLE_EQ(values[1][d], 10 * values[0][d]);
  for (const char* key : {"", "Small"}) {
    SessionClient client(channel);
    v1::SessionRequest request;
    request.mutable_open()->set_statistics_key(key);
    client.Send(request);
    EXPECT_FALSE(client.Next());
    const grpc::Status status = client.Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr("\"small\", \"tall\""));
    EXPECT_EQ(DetailOf(status).field(), "open.statistics_key");
    EXPECT_EQ(DetailOf(status).reason(), v1::ERROR_REASON_INVALID_INPUT);
  }
}

TEST(SessionRpcTest, TokensComeBeforeTheirChunk) {
  TestServer server;
  SessionClient client(NewChannel(server.address()));
  v1::Open open = OpenWith("stream");
  open.mutable_options()->set_stream_tokens(true);
  client.Open(open);
  client.SendFrame(RawFrame("front", 77));
  client.SendAct(5);
  std::vector<int32_t> tokens;
  while (true) {
    const auto event = client.Next();
    ASSERT_TRUE(event);
    if (event->has_chunk()) {
      EXPECT_EQ(TokensOf(event->chunk()), tokens);
      break;
    }
    ASSERT_TRUE(event->has_token());
    EXPECT_EQ(event->token().act_id(), 5U);
    EXPECT_EQ(event->token().index(), tokens.size());
    tokens.push_back(event->token().token());
  }
}

TEST(SessionRpcTest, SamplesAreReproducible) {
  TestServer server;
  SessionClient client(NewChannel(server.address()));
  client.Open(OpenWith("dice"));
  client.SendFrame(RawFrame("front", 11));
  v1::ActRequest act;
  act.set_samples(6);
  act.set_temperature(5);
  act.set_seed(99);
  const v1::ActionChunk a = client.Act(1, act);
  const v1::ActionChunk b = client.Act(2, act);
  act.set_seed(100);
  const v1::ActionChunk c = client.Act(3, act);
  ASSERT_EQ(a.samples_size(), 6);
  int differ_within = 0;
  int differ_by_seed = 0;
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(TokensOf(a, i), TokensOf(b, i));
    differ_within += TokensOf(a, i) != TokensOf(a, 0) ? 1 : 0;
    differ_by_seed += TokensOf(a, i) != TokensOf(c, i) ? 1 : 0;
  }
  EXPECT_GT(differ_within, 0);
  EXPECT_GT(differ_by_seed, 0);
}

TEST(SessionRpcTest, StaleFramesAreDroppedAndReported) {
  TestServer server;
  SessionClient client(NewChannel(server.address()));
  client.Open(OpenWith("time"));                   // message 1
  client.SendFrame(RawFrame("front", 200, 5000));  // 2
  client.SendFrame(RawFrame("front", 10, 4999));   // 3
  const auto event = client.Next();
  ASSERT_TRUE(event && event->has_notice());
  EXPECT_EQ(event->notice().kind(), v1::NOTICE_KIND_STALE_FRAME);
  EXPECT_EQ(event->notice().camera(), "front");
  EXPECT_EQ(event->notice().capture_time_ns(), 4999);
  EXPECT_EQ(event->notice().message_number(), 3U);
  EXPECT_EQ(client.Act(1).frames(0).capture_time_ns(), 5000);
  EXPECT_EQ(server.metrics().model("fake").frames_stale->Value(), 1);
  EXPECT_EQ(server.metrics().model("fake").frames_received->Value(), 2);
  // After a reset time may start again.
  v1::SessionRequest reset;
  reset.mutable_reset()->set_keep_instruction(true);
  client.Send(reset);
  client.SendFrame(RawFrame("front", 10, 3));
  EXPECT_EQ(client.Act(2).frames(0).capture_time_ns(), 3);
}

TEST(SessionRpcTest, OldFramesFailRequestsThatSaySo) {
  TestServer server;
  SessionClient client(NewChannel(server.address()));
  client.Open(OpenWith("fresh"));
  v1::VisionFrame frame = RawFrame("front", 1, 1);
  frame.set_age_us(3'000'000);
  client.SendFrame(frame);
  v1::ActRequest act;
  act.set_max_frame_age_us(2'000'000);
  client.SendAct(8, act);
  const v1::RequestError error = client.NextError();
  EXPECT_EQ(error.act_id(), 8U);
  EXPECT_EQ(error.code(), static_cast<int>(grpc::StatusCode::FAILED_PRECONDITION));
  EXPECT_EQ(error.detail().reason(), v1::ERROR_REASON_STALE_FRAME);
  EXPECT_EQ(error.detail().field(), "front");
  act.set_max_frame_age_us(60'000'000);
  EXPECT_EQ(client.Act(9, act).act_id(), 9U);
}

TEST(SessionRpcTest, AnObservationIsPinned) {
  auto gate = std::make_shared<Gate>();
  TestServer server({.model = {.gate = gate}});
  SessionClient client(NewChannel(server.address()));
  client.Open(OpenWith("pin"));
  client.SendFrame(RawFrame("front", 5, 1));
  const std::vector<int32_t> expected = TokensOf(client.Act(1));
  client.SendFrame(RawFrame("front", 6, 2));
  client.Act(2);
  client.SendFrame(RawFrame("front", 5, 3));
  gate->Close();
  client.SendAct(3);
  gate->AwaitWaiter();
  client.SendFrame(RawFrame("front", 250, 4));
  client.SendText("something else");
  v1::SessionRequest reset;
  reset.mutable_reset();
  client.Send(reset);
  gate->Open();
  const v1::ActionChunk chunk = client.NextChunk();
  EXPECT_EQ(chunk.frames(0).capture_time_ns(), 3);
  EXPECT_EQ(TokensOf(chunk), expected);
}

TEST(SessionRpcTest, DeadlinesOfTheRequestTheClassAndTheCall) {
  TestServer server;
  const auto channel = NewChannel(server.address());
  {
    SessionClient client(channel);
    v1::Open open = OpenWith("when");
    open.set_latency_class("planning");
    EXPECT_EQ(client.Open(open).latency_class().deadline_us(), 100'000U);
    client.SendFrame(RawFrame("front", 5, 1));
    const v1::ActionChunk chunk = client.Act(1);
    EXPECT_EQ(chunk.deadline_us(), 100'000U);
    EXPECT_EQ(chunk.latency_class(), "planning");
    EXPECT_TRUE(chunk.deadline_met());
    v1::ActRequest act;
    act.set_deadline_us(30'000'000);
    act.set_latency_class("control");
    const v1::ActionChunk own = client.Act(2, act);
    EXPECT_EQ(own.deadline_us(), 30'000'000U);
    EXPECT_EQ(own.latency_class(), "control");
  }
  {
    // The stream's own deadline bounds every request in it.
    SessionClient client(channel, std::chrono::seconds(20));
    client.Open(OpenWith("when"));
    client.SendFrame(RawFrame("front", 5, 1));
    const v1::ActionChunk chunk = client.Act(1);
    EXPECT_GT(chunk.deadline_us(), 0U);
    EXPECT_LE(chunk.deadline_us(), 20'200'000U);
    v1::ActRequest act;
    act.set_deadline_us(3'000'000'000);
    EXPECT_LE(client.Act(2, act).deadline_us(), 20'200'000U);
  }
  {
    const auto stub = v1::Inference::NewStub(channel);
    v1::PredictRequest request;
    request.mutable_text()->set_instruction("when");
    *request.add_frames() = RawFrame("front", 5);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    v1::PredictResponse response;
    ASSERT_TRUE(stub->Predict(&context, request, &response).ok());
    EXPECT_GT(response.chunk().deadline_us(), 10'000'000U);
    EXPECT_LE(response.chunk().deadline_us(),
              20'200'000U);  // gRPC rounds a timeout up to three digits
  }
}

TEST(SessionRpcTest, ExpiredWorkIsAnErrorNotALateAnswer) {
  auto gate = std::make_shared<Gate>();
  TestServer server({.model = {.gate = gate}});
  SessionClient client(NewChannel(server.address()));
  v1::Open open = OpenWith("late");
  open.set_latency_class("planning");
  client.Open(open);
  client.SendFrame(RawFrame("front", 5, 1));
  gate->Close();
  v1::ActRequest act;
  act.set_deadline_us(20'000);
  client.SendAct(1, act);
  gate->AwaitWaiter();
  std::this_thread::sleep_for(std::chrono::milliseconds(25));
  gate->Open();
  const v1::RequestError error = client.NextError();
  EXPECT_EQ(error.act_id(), 1U);
  EXPECT_EQ(error.code(), static_cast<int>(grpc::StatusCode::DEADLINE_EXCEEDED));
  EXPECT_EQ(error.detail().reason(), v1::ERROR_REASON_EXPIRED);
  // The session goes on.
  act.set_deadline_us(10'000'000);
  EXPECT_EQ(client.Act(2, act).act_id(), 2U);
}

TEST(SessionRpcTest, ClassesThatRunLateSaySo) {
  auto gate = std::make_shared<Gate>();
  TestServer server({.model = {.gate = gate}});
  SessionClient client(NewChannel(server.address()));
  client.Open(OpenWith("late"));  // best_effort runs late
  client.SendFrame(RawFrame("front", 5, 1));
  gate->Close();
  v1::ActRequest act;
  act.set_deadline_us(10'000);
  client.SendAct(1, act);
  gate->AwaitWaiter();
  std::this_thread::sleep_for(std::chrono::milliseconds(15));
  gate->Open();
  const v1::ActionChunk chunk = client.NextChunk();
  EXPECT_TRUE(chunk.late());
  EXPECT_FALSE(chunk.deadline_met());
  EXPECT_EQ(chunk.deadline_us(), 10'000U);
}

TEST(SessionRpcTest, HalfCloseFinishesWhatWasAccepted) {
  auto gate = std::make_shared<Gate>();
  TestServer server({.model = {.gate = gate}});
  SessionClient client(NewChannel(server.address()));
  client.Open(OpenWith("bye"));
  client.SendFrame(RawFrame("front", 5, 1));
  gate->Close();
  for (uint64_t id = 1; id <= 3; ++id) client.SendAct(id);
  client.HalfClose();
  gate->AwaitWaiter();
  gate->Open();
  std::vector<uint64_t> answered;
  for (int i = 0; i < 3; ++i) answered.push_back(client.NextChunk().act_id());
  std::sort(answered.begin(), answered.end());
  EXPECT_EQ(answered, (std::vector<uint64_t>{1, 2, 3}));
  EXPECT_FALSE(client.Next());
  EXPECT_TRUE(client.Finish().ok());
  server.ExpectIdleSoon();
}

TEST(SessionRpcTest, AClientThatVanishesFreesEverything) {
  auto gate = std::make_shared<Gate>();
  TestServer server({.model = {.gate = gate}});
  {
    SessionClient client(NewChannel(server.address()));
    client.Open(OpenWith("gone"));
    client.SendFrame(RawFrame("front", 5, 1));
    gate->Close();
    for (uint64_t id = 1; id <= 5; ++id) client.SendAct(id);
    gate->AwaitWaiter();
    client.Cancel();
  }
  EXPECT_TRUE(Eventually([&] { return server.metrics().streams->Value() == 0; }));
  const uint64_t passed = gate->passed();
  gate->Open();
  server.ExpectIdleSoon();
  EXPECT_LE(gate->passed(), passed + 2);  // no more than the steps a worker already had
  // The server is as good as before.
  SessionClient client(NewChannel(server.address()));
  client.Open(OpenWith("next"));
  client.SendFrame(RawFrame("front", 5, 1));
  EXPECT_EQ(client.Act(1).act_id(), 1U);
}

TEST(SessionRpcTest, APredictThatIsGivenUpFreesEverything) {
  auto gate = std::make_shared<Gate>();
  TestServer server({.model = {.gate = gate}});
  const auto stub = v1::Inference::NewStub(NewChannel(server.address()));
  v1::PredictRequest request;
  request.mutable_text()->set_instruction("when");
  *request.add_frames() = RawFrame("front", 5);
  gate->Close();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(50));
  v1::PredictResponse response;
  EXPECT_EQ(stub->Predict(&context, request, &response).error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  gate->Open();
  server.ExpectIdleSoon();
}

TEST(SessionRpcTest, CancelsOneOrAll) {
  auto gate = std::make_shared<Gate>();
  TestServer server({.model = {.gate = gate}});
  SessionClient client(NewChannel(server.address()));
  client.Open(OpenWith("no"));
  client.SendFrame(RawFrame("front", 5, 1));
  gate->Close();
  for (uint64_t id = 1; id <= 4; ++id) client.SendAct(id);
  gate->AwaitWaiter();
  v1::SessionRequest cancel;
  cancel.mutable_cancel()->set_act_id(3);
  client.Send(cancel);
  v1::RequestError error = client.NextError();
  EXPECT_EQ(error.act_id(), 3U);
  EXPECT_EQ(error.code(), static_cast<int>(grpc::StatusCode::CANCELLED));
  EXPECT_EQ(error.detail().reason(), v1::ERROR_REASON_CANCELLED);
  cancel.mutable_cancel()->set_act_id(77);  // nobody
  client.Send(cancel);
  cancel.mutable_cancel()->set_all(true);
  client.Send(cancel);
  std::vector<uint64_t> cancelled;
  for (int i = 0; i < 3; ++i) {
    error = client.NextError();
    EXPECT_EQ(error.code(), static_cast<int>(grpc::StatusCode::CANCELLED));
    cancelled.push_back(error.act_id());
  }
  std::sort(cancelled.begin(), cancelled.end());
  EXPECT_EQ(cancelled, (std::vector<uint64_t>{1, 2, 4}));
  gate->Open();
  EXPECT_EQ(client.Act(1).act_id(), 1U);  // its number is free again
}

TEST(SessionRpcTest, NewerRequestsReplaceOlderOnesOnlyWhenAsked) {
  auto gate = std::make_shared<Gate>();
  TestServer server({.model = {.gate = gate}});
  // A session that keeps the worker busy.
  SessionClient busy(NewChannel(server.address()));
  busy.Open(OpenWith("busy"));
  busy.SendFrame(RawFrame("front", 5, 1));
  SessionClient client(NewChannel(server.address()));
  v1::Open open = OpenWith("newest");
  open.mutable_options()->set_supersede(true);
  client.Open(open);
  client.SendFrame(RawFrame("front", 9, 1));
  gate->Close();
  busy.SendAct(1);
  gate->AwaitWaiter();
  // The first may become the queued step; of the others only the newest is left.
  for (uint64_t id = 1; id <= 5; ++id) client.SendAct(id);
  std::vector<uint64_t> replaced;
  for (int i = 0; i < 3; ++i) {
    const v1::RequestError error = client.NextError();
    EXPECT_EQ(error.code(), static_cast<int>(grpc::StatusCode::CANCELLED));
    EXPECT_EQ(error.detail().reason(), v1::ERROR_REASON_SUPERSEDED);
    replaced.push_back(error.act_id());
  }
  gate->Open();
  bool newest_answered = false;
  for (int i = 0; i < 2; ++i) {
    const auto event = client.Next();
    ASSERT_TRUE(event);
    if (event->has_error()) {
      EXPECT_EQ(event->error().detail().reason(), v1::ERROR_REASON_SUPERSEDED);
      EXPECT_NE(event->error().act_id(), 5U);
    } else {
      newest_answered = newest_answered || event->chunk().act_id() == 5;
    }
  }
  EXPECT_TRUE(newest_answered);
  EXPECT_EQ(busy.NextChunk().act_id(), 1U);
}

TEST(SessionRpcTest, ManyClientsGetTheirOwnAnswers) {
  TestServer server;
  std::vector<std::vector<int32_t>> alone(8);
  {
    SessionClient client(NewChannel(server.address()));
    client.Open();
    for (size_t c = 0; c < alone.size(); ++c) {
      client.SendText("client " + std::to_string(c));
      client.SendFrame(RawFrame("front", static_cast<uint8_t>(30 * c)));
      alone[c] = TokensOf(client.Act(c));
    }
  }
  std::vector<std::thread> threads;
  for (size_t c = 0; c < alone.size(); ++c) {
    threads.emplace_back([&server, &alone, c] {
      SessionClient client(NewChannel(server.address()));
      client.Open(OpenWith("client " + std::to_string(c)));
      for (uint64_t i = 1; i <= 20; ++i) {
        client.SendFrame(RawFrame("front", static_cast<uint8_t>(30 * c), static_cast<int64_t>(i)));
        const v1::ActionChunk chunk = client.Act(i);
        EXPECT_EQ(chunk.act_id(), i);
        EXPECT_EQ(chunk.frames(0).capture_time_ns(), static_cast<int64_t>(i));
        EXPECT_EQ(TokensOf(chunk), alone[c]);
      }
      client.HalfClose();
      EXPECT_TRUE(client.Finish().ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  server.ExpectIdleSoon();
}

TEST(SessionRpcTest, DescribesModelsAndServer) {
  TestServer server({.model = {.statistics = {"a", "b"}}});
  const auto channel = NewChannel(server.address());
  const auto models = v1::Models::NewStub(channel);
  v1::ListResponse list;
  {
    grpc::ClientContext context;
    ASSERT_TRUE(models->List(&context, {}, &list).ok());
  }
  ASSERT_EQ(list.models_size(), 1);
  EXPECT_EQ(list.models(0).name(), "fake");
  EXPECT_EQ(list.models(0).statistics_size(), 2);
  EXPECT_EQ(list.models(0).kv_bytes_per_token(), 2U * 4 * 4);
  v1::GetRequest get;
  v1::GetResponse got;
  {
    grpc::ClientContext context;
    get.set_name("fake");
    ASSERT_TRUE(models->Get(&context, get, &got).ok());
    EXPECT_EQ(got.model().SerializeAsString(), list.models(0).SerializeAsString());
  }
  {
    grpc::ClientContext context;
    get.set_name("other");
    const grpc::Status status = models->Get(&context, get, &got);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
    EXPECT_THAT(status.error_message(), HasSubstr("\"fake\""));
    EXPECT_EQ(DetailOf(status).field(), "name");
  }
  SessionClient client(channel);
  v1::Open open;
  open.set_statistics_key("a");
  client.Open(open);
  grpc::ClientContext context;
  v1::GetStatusResponse status;
  ASSERT_TRUE(v1::Server::NewStub(channel)->GetStatus(&context, {}, &status).ok());
  EXPECT_EQ(status.version(), "1.2.3");
  EXPECT_TRUE(status.ready());
  EXPECT_FALSE(status.draining());
  EXPECT_EQ(status.sessions(), 1U);
  EXPECT_EQ(status.models(0), "fake");
  ASSERT_EQ(status.classes_size(), 4);
  EXPECT_EQ(status.classes(0).name(), "control");
  EXPECT_EQ(status.classes(0).deadline_us(), 20'000U);
  EXPECT_FALSE(status.classes(0).runs_late());
  EXPECT_TRUE(status.classes(3).runs_late());
}

}  // namespace
}  // namespace saccade::testing
