// Clients that are wrong, greedy or malicious, and the server's own comings and goings.
#include <gmock/gmock.h>
#include <google/protobuf/unknown_field_set.h>
#include <grpcpp/impl/rpc_method.h>
#include <grpcpp/support/sync_stream.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <thread>

#include "saccade/v1/models.grpc.pb.h"
#include "saccade/v1/server.grpc.pb.h"
#include "tests/rpc/client.h"
#include "tests/rpc/harness.h"

namespace saccade::testing {
namespace {

using ::testing::HasSubstr;
using Request = v1::SessionRequest;

v1::Open OpenWith(const std::string& instruction) {
  v1::Open open;
  open.set_instruction(instruction);
  return open;
}

v1::RawImage& RawOf(Request& request) { return *request.mutable_vision()->mutable_raw(); }

struct BadMessage {
  const char* field;
  std::function<void(Request&)> fill;
};

std::vector<BadMessage> BadMessages() {
  std::vector<BadMessage> bad = {
      {"message", [](Request&) {}},
      {"open", [](Request& r) { r.mutable_open(); }},
      {"vision", [](Request& r) { r.mutable_vision(); }},
      {"vision.camera", [](Request& r) { *r.mutable_vision() = RawFrame("rear", 1); }},
      {"vision.capture_time_ns",
       [](Request& r) { *r.mutable_vision() = RawFrame("front", 1, -1); }},
      {"vision.age_us",
       [](Request& r) {
         *r.mutable_vision() = RawFrame("front", 1);
         r.mutable_vision()->set_age_us(std::numeric_limits<uint64_t>::max());
       }},
      {"vision.encoded", [](Request& r) { r.mutable_vision()->set_encoded(""); }},
      {"vision.encoded", [](Request& r) { r.mutable_vision()->set_encoded("no picture at all"); }},
      {"vision.encoded",
       [](Request& r) { r.mutable_vision()->set_encoded("\xFF\xD8\xFF\xE0 half a JPEG"); }},
      {"vision.encoded",
       [](Request& r) { r.mutable_vision()->set_encoded("\x89PNG\r\n\x1a\n and then nothing"); }},
      {"vision.raw.pixel_format", [](Request& r) { RawOf(r).set_data("abc"); }},
      {"vision.raw.pixel_format",
       [](Request& r) {
         *r.mutable_vision() = RawFrame("front", 1);
         RawOf(r).set_pixel_format(static_cast<v1::PixelFormat>(99));
       }},
      {"text", [](Request& r) { r.mutable_text(); }},
      {"text.instruction", [](Request& r) { r.mutable_text()->set_instruction(""); }},
      {"text.instruction",
       [](Request& r) { r.mutable_text()->set_instruction(std::string(4097, 'a')); }},
      {"text.instruction",
       [](Request& r) { r.mutable_text()->set_instruction(std::string(50'000, ' ')); }},
      {"text.instruction",
       [](Request& r) { r.mutable_text()->set_instruction(std::string(1'000'000, '\n')); }},
      {"text.token_ids", [](Request& r) { r.mutable_text()->mutable_token_ids(); }},
      {"text.token_ids",
       [](Request& r) {
         for (int i = 0; i < 1025; ++i) r.mutable_text()->mutable_token_ids()->add_ids(1);
       }},
      {"state.values", [](Request& r) { r.mutable_state(); }},  // this model takes none
      {"state.values", [](Request& r) { r.mutable_state()->add_values(1); }},
      {"executed.actions", [](Request& r) { r.mutable_executed(); }},
      {"executed.actions", [](Request& r) { r.mutable_executed()->add_actions()->add_values(1); }},
      {"executed.actions",
       [](Request& r) {
         for (int i = 0; i < 65; ++i) r.mutable_executed()->add_actions();
       }},
      {"executed.actions",
       [](Request& r) {
         v1::ExecutedAction& action = *r.mutable_executed()->add_actions();
         for (int i = 0; i < 3; ++i) action.add_values(std::nan(""));
       }},
      {"cancel", [](Request& r) { r.mutable_cancel(); }},
      {"cancel.all", [](Request& r) { r.mutable_cancel()->set_all(false); }},
      {"act.samples",
       [](Request& r) { r.mutable_act()->set_samples(std::numeric_limits<uint32_t>::max()); }},
      {"act.latency_class", [](Request& r) { r.mutable_act()->set_latency_class("Control"); }},
      {"act.deadline_us",
       [](Request& r) { r.mutable_act()->set_deadline_us(std::numeric_limits<uint64_t>::max()); }},
      {"act.max_frame_age_us",
       [](Request& r) {
         r.mutable_act()->set_max_frame_age_us(std::numeric_limits<uint64_t>::max());
       }},
  };
  for (const int32_t id :
       {-1, 288, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()}) {
    bad.push_back({"text.token_ids", [id](Request& r) {
                     r.mutable_text()->mutable_token_ids()->add_ids(FakeModel::kBos);
                     r.mutable_text()->mutable_token_ids()->add_ids(id);
                   }});
  }
  for (const float t :
       {std::nanf(""), -1.0F, 0.001F, 1e9F, std::numeric_limits<float>::infinity()}) {
    bad.push_back({"act.temperature", [t](Request& r) { r.mutable_act()->set_temperature(t); }});
  }
  // 640x480 RGB8 is 921,600 bytes.
  for (const size_t bytes : {size_t{0}, size_t{921'599}, size_t{921'601}}) {
    bad.push_back({"vision.raw.data", [bytes](Request& r) {
                     *r.mutable_vision() = RawFrame("front", 1, 0, 640, 480);
                     RawOf(r).set_data(std::string(bytes, 'x'));
                   }});
  }
  for (const auto& [width, height] :
       std::vector<std::pair<uint32_t, uint32_t>>{{0, 480},
                                                  {640, 0},
                                                  {0, 0},
                                                  {0xFFFFFFFF, 1},
                                                  {0x7FFFFFFF, 0x7FFFFFFF},
                                                  {65'536, 65'536},
                                                  {65'535, 65'535}}) {
    bad.push_back({"vision.raw", [width = width, height = height](Request& r) {
                     *r.mutable_vision() = RawFrame("front", 1, 0, 640, 480);
                     RawOf(r).set_width(width);
                     RawOf(r).set_height(height);
                   }});
  }
  return bad;
}

TEST(HostileTest, ABadMessageIsItsOwnErrorAndNothingElse) {
  TestServer server;
  SessionClient client(NewChannel(server.address()));
  client.Open(OpenWith("steady"));
  client.SendFrame(RawFrame("front", 100, 0));
  const std::vector<int32_t> expected = TokensOf(client.Act(1));
  uint64_t number = 3;
  for (const BadMessage& bad : BadMessages()) {
    Request request;
    bad.fill(request);
    if (request.has_act()) request.mutable_act()->set_id(55);
    client.Send(request);
    ++number;
    const v1::RequestError error = client.NextError();
    EXPECT_EQ(error.message_number(), number);
    EXPECT_EQ(error.code(), static_cast<int>(grpc::StatusCode::INVALID_ARGUMENT))
        << error.ShortDebugString();
    EXPECT_EQ(error.detail().reason(), v1::ERROR_REASON_INVALID_INPUT);
    EXPECT_TRUE(error.detail().field().starts_with(bad.field))
        << error.ShortDebugString() << " for " << bad.field;
    EXPECT_EQ(error.has_act_id(), request.has_act());
    EXPECT_EQ(error.act_id(), request.has_act() ? 55U : 0U);
  }
  EXPECT_EQ(TokensOf(client.Act(2)), expected);  // the frame and the instruction are still there
  EXPECT_GT(server.metrics()
                .model("fake")
                .frames_rejected[static_cast<size_t>(Reason::kInvalidInput)]
                ->Value(),
            5);
  client.HalfClose();
  EXPECT_TRUE(client.Finish().ok());
  server.ExpectIdleSoon();
}

TEST(HostileTest, ABadOpenEndsItsStreamAndNamesTheField) {
  TestServer server({.model = {.cameras = {"base", "wrist"}}});
  const auto channel = NewChannel(server.address());
  struct Case {
    const char* field;
    grpc::StatusCode code;
    std::function<void(Request&)> fill;
  };
  const std::vector<Case> cases = {
      {"open", grpc::StatusCode::INVALID_ARGUMENT, [](Request& r) { r.mutable_act(); }},
      {"open", grpc::StatusCode::INVALID_ARGUMENT, [](Request&) {}},
      {"open.model", grpc::StatusCode::NOT_FOUND,
       [](Request& r) { r.mutable_open()->set_model("pi9"); }},
      {"open.statistics_key", grpc::StatusCode::INVALID_ARGUMENT,
       [](Request& r) { r.mutable_open()->set_statistics_key("Robot"); }},
      {"open.latency_class", grpc::StatusCode::INVALID_ARGUMENT,
       [](Request& r) { r.mutable_open()->set_latency_class("fast"); }},
      {"open.cameras", grpc::StatusCode::INVALID_ARGUMENT,
       [](Request& r) { r.mutable_open()->add_cameras("base"); }},
      {"open.cameras", grpc::StatusCode::INVALID_ARGUMENT,
       [](Request& r) {
         for (const char* name : {"base", "wrist", "base"}) r.mutable_open()->add_cameras(name);
       }},
      {"open.cameras", grpc::StatusCode::INVALID_ARGUMENT,
       [](Request& r) {
         for (const char* name : {"base", "wrist", "default"}) r.mutable_open()->add_cameras(name);
       }},
      {"open.instruction", grpc::StatusCode::INVALID_ARGUMENT,
       [](Request& r) { r.mutable_open()->set_instruction(std::string(4097, 'x')); }},
  };
  for (const Case& c : cases) {
    SessionClient client(channel);
    Request request;
    c.fill(request);
    client.Send(request);
    EXPECT_FALSE(client.Next());
    const grpc::Status status = client.Finish();
    EXPECT_EQ(status.error_code(), c.code) << status.error_message();
    EXPECT_EQ(DetailOf(status).field(), c.field);
  }
  server.ExpectIdleSoon();
}

TEST(HostileTest, SaysWhatIsMissing) {
  TestServer server({.model = {.cameras = {"base", "wrist"}}});
  SessionClient client(NewChannel(server.address()));
  client.Open();
  client.SendAct(1);
  v1::RequestError error = client.NextError();
  EXPECT_EQ(error.code(), static_cast<int>(grpc::StatusCode::FAILED_PRECONDITION));
  EXPECT_EQ(error.detail().field(), "text");
  client.SendText("now");
  client.SendFrame(RawFrame("base", 1));
  client.SendAct(2);
  error = client.NextError();
  EXPECT_EQ(error.act_id(), 2U);
  EXPECT_EQ(error.detail().reason(), v1::ERROR_REASON_NO_FRAME);
  EXPECT_EQ(error.detail().field(), "wrist");
  client.SendText(std::string(400, 'a'));  // over the model's 256 positions
  client.SendFrame(RawFrame("wrist", 1));
  client.SendAct(3);
  error = client.NextError();
  EXPECT_EQ(error.code(), static_cast<int>(grpc::StatusCode::INVALID_ARGUMENT));
  EXPECT_EQ(error.detail().reason(), v1::ERROR_REASON_NEVER_FITS);
}

TEST(HostileTest, NumbersInUseAndTooManyRequests) {
  auto gate = std::make_shared<Gate>();
  TestServer server({.model = {.gate = gate},
                     .config = [](Config& config) { config.limits.acts_in_flight = 3; }});
  SessionClient client(NewChannel(server.address()));
  client.Open(OpenWith("queue"));
  client.SendFrame(RawFrame("front", 9));
  gate->Close();
  client.SendAct(1);
  client.SendAct(1);  // message 4
  v1::RequestError error = client.NextError();
  EXPECT_FALSE(error.has_act_id());
  EXPECT_EQ(error.message_number(), 4U);
  EXPECT_EQ(error.detail().field(), "act.id");
  client.SendAct(2);
  client.SendAct(3);
  client.SendAct(4);
  error = client.NextError();
  EXPECT_EQ(error.act_id(), 4U);
  EXPECT_EQ(error.code(), static_cast<int>(grpc::StatusCode::RESOURCE_EXHAUSTED));
  EXPECT_EQ(error.detail().reason(), v1::ERROR_REASON_QUEUE_FULL);
  gate->Open();
  std::vector<uint64_t> answered;
  for (int i = 0; i < 3; ++i) answered.push_back(client.NextChunk().act_id());
  EXPECT_THAT(answered, ::testing::UnorderedElementsAre(1, 2, 3));
}

TEST(HostileTest, RatesAreLimitedPerSession) {
  TestServer server({.config = [](Config& config) {
    config.limits.acts_per_s = 5;
    config.limits.frames_per_s = 3;
  }});
  const auto channel = NewChannel(server.address());
  SessionClient client(channel);
  client.Open(OpenWith("fast"));
  for (uint64_t id = 1; id <= 3; ++id) {  // each frame is used, so none is replaced unseen
    client.SendFrame(RawFrame("front", 9));
    EXPECT_EQ(client.Act(id).act_id(), id);
  }
  client.SendFrame(RawFrame("front", 9));
  v1::RequestError error = client.NextError();
  EXPECT_EQ(error.code(), static_cast<int>(grpc::StatusCode::RESOURCE_EXHAUSTED));
  EXPECT_EQ(error.detail().reason(), v1::ERROR_REASON_RATE_LIMITED);
  EXPECT_GT(error.detail().retry_after_us(), 0U);
  for (uint64_t id = 4; id <= 5; ++id) EXPECT_EQ(client.Act(id).act_id(), id);
  client.SendAct(6);
  error = client.NextError();
  EXPECT_EQ(error.act_id(), 6U);
  EXPECT_EQ(error.detail().reason(), v1::ERROR_REASON_RATE_LIMITED);
  EXPECT_LE(error.detail().retry_after_us(), 200'001U);
  SessionClient other(channel);  // a budget of its own
  other.Open(OpenWith("calm"));
  other.SendFrame(RawFrame("front", 9));
  EXPECT_EQ(other.Act(1).act_id(), 1U);
}

TEST(HostileTest, AnOversizeMessageEndsOnlyItsOwnStream) {
  TestServer server({.config = [](Config& config) {
    config.server.max_message_bytes = 5'000'000;
    config.limits.max_image_bytes = 4'900'000;
  }});
  const auto channel = NewChannel(server.address());
  SessionClient other(channel);
  other.Open(OpenWith("calm"));
  SessionClient client(channel);
  client.Open(OpenWith("big"));
  // Above gRPC's own default of 4 MiB and below the limit: 1240 x 1280 x 3 bytes.
  client.SendFrame(RawFrame("front", 200, 1, 1240, 1280));
  EXPECT_EQ(client.Act(1).frames(0).capture_time_ns(), 1);
  // Over the limit of a frame, under that of a message: an error of the message.
  client.SendFrame(RawFrame("front", 200, 2, 1280, 1279));
  EXPECT_THAT(client.NextError().detail().field(), HasSubstr("vision.raw"));
  EXPECT_EQ(client.Act(2).frames(0).capture_time_ns(), 1);
  client.SendFrame(RawFrame("front", 200, 3, 1920, 1080));
  EXPECT_FALSE(client.Next());
  EXPECT_EQ(client.Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  other.SendFrame(RawFrame("front", 200));
  EXPECT_EQ(other.Act(1).act_id(), 1U);
}

TEST(HostileTest, CompressedMessagesAreRefused) {
  TestServer server;
  grpc::ChannelArguments arguments;
  arguments.SetCompressionAlgorithm(GRPC_COMPRESS_GZIP);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const auto channel =
      grpc::CreateCustomChannel(server.address(), grpc::InsecureChannelCredentials(), arguments);
  SessionClient client(channel);
  Request request;
  *request.mutable_open() = OpenWith(std::string(3000, 'a'));
  client.Send(request);
  EXPECT_FALSE(client.Next());
  EXPECT_EQ(client.Finish().error_code(), grpc::StatusCode::UNIMPLEMENTED);
  server.ExpectIdleSoon();
}

grpc::ByteBuffer Bytes(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return {&slice, 1};
}

using RawStream = grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;
std::unique_ptr<RawStream> NewRawStream(grpc::Channel& channel, grpc::ClientContext& context,
                                        const char* name) {
  const grpc::internal::RpcMethod method(name, grpc::internal::RpcMethod::BIDI_STREAMING);
  return std::unique_ptr<RawStream>(
      grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>::Create(
          &channel, method, &context));
}
std::string Text(const grpc::ByteBuffer& buffer) {
  grpc::Slice slice;
  EXPECT_TRUE(buffer.DumpToSingleSlice(&slice).ok());
  return {reinterpret_cast<const char*>(slice.begin()), slice.size()};
}

TEST(HostileTest, RandomBytesAreErrorsOfTheirMessage) {
  TestServer server;
  const auto channel = NewChannel(server.address());
  grpc::ClientContext context;
  const auto stream = NewRawStream(*channel, context, "/saccade.v1.Inference/Session");
  Request open;
  *open.mutable_open() = OpenWith("noise");
  Request frame;
  *frame.mutable_vision() = RawFrame("front", 4);
  stream->Write(Bytes(open.SerializeAsString()));
  stream->Write(Bytes(frame.SerializeAsString()));
  grpc::ByteBuffer answer;
  ASSERT_TRUE(stream->Read(&answer));
  // Half of them noise, half of them damaged copies of real messages, nested groups among them.
  std::thread writer([&] {
    std::mt19937 random(7);
    const std::string good = frame.SerializeAsString();
    for (int i = 0; i < 1000; ++i) {
      std::string bytes;
      if (i % 100 == 0) {
        bytes.assign(10'000, '\x0b');  // groups nested 10,000 deep
      } else if (i % 2 == 0) {
        bytes.resize(random() % 300);
        for (char& c : bytes) c = static_cast<char>(random());
      } else {
        bytes = good;
        for (int k = 0; k < 4; ++k) bytes[random() % 40] = static_cast<char>(random());
        if (i % 3 == 0) bytes.resize(random() % bytes.size());
      }
      stream->Write(Bytes(bytes));
    }
    Request act;
    act.mutable_act()->set_id(4242);
    // Noise may have been a reset, or worse; what an act needs is sent again.
    Request text;
    text.mutable_text()->set_instruction("calm");
    stream->Write(Bytes(text.SerializeAsString()));
    Request reset;
    reset.mutable_reset()->set_keep_instruction(true);
    stream->Write(Bytes(reset.SerializeAsString()));
    stream->Write(Bytes(good));
    stream->Write(Bytes(act.SerializeAsString()));
    stream->WritesDone();
  });
  int errors = 0;
  bool answered = false;
  while (stream->Read(&answer)) {
    v1::SessionResponse response;
    ASSERT_TRUE(response.ParseFromString(Text(answer)));
    errors += response.has_error() ? 1 : 0;
    answered = answered || (response.has_chunk() && response.chunk().act_id() == 4242);
  }
  writer.join();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_GT(errors, 500);
  EXPECT_TRUE(answered);
  server.ExpectIdleSoon();
}

TEST(HostileTest, AFloodIsHeldBackAndLosesNothing) {
  TestServer server({.config = [](Config& config) { config.limits.outbox_messages = 16; }});
  const auto channel = NewChannel(server.address());
  SessionClient client(channel);
  client.Open(OpenWith("flood"));
  constexpr int kMessages = 20'000;
  std::thread writer([&] {
    for (int i = 0; i < kMessages; ++i) client.Send({});
    client.HalfClose();
  });
  // While nothing is read, another client on the same connection is served as always.
  SessionClient other(channel);
  other.Open(OpenWith("calm"));
  other.SendFrame(RawFrame("front", 9));
  for (uint64_t id = 1; id <= 50; ++id) EXPECT_EQ(other.Act(id).act_id(), id);
  for (uint64_t i = 0; i < kMessages; ++i) ASSERT_EQ(client.NextError().message_number(), i + 2);
  writer.join();
  EXPECT_FALSE(client.Next());
  EXPECT_TRUE(client.Finish().ok());
}

TEST(HostileTest, AWorkerThatHangsFailsItsRequestsAndReadiness) {
  const auto gate = std::make_shared<Gate>();
  TestServer server({.model = {.gate = gate}, .step_timeout = std::chrono::milliseconds(200)});
  const auto channel = NewChannel(server.address());
  SessionClient client(channel);
  client.Open(OpenWith("go"));
  client.SendFrame(RawFrame("front", 9));
  EXPECT_EQ(client.Act(1).act_id(), 1U);
  EXPECT_TRUE(server.engine().Ready());
  gate->Close();
  client.SendAct(2);
  v1::RequestError error = client.NextError();
  EXPECT_EQ(error.act_id(), 2U);
  EXPECT_EQ(error.detail().reason(), v1::ERROR_REASON_WORKER_FAILED);
  EXPECT_FALSE(server.engine().Ready());
  EXPECT_TRUE(server.engine().stuck());
  // Nothing waits for it: the next one is refused, and the step that was queued is not run.
  client.SendAct(3);
  error = client.NextError();
  EXPECT_EQ(error.act_id(), 3U);
  EXPECT_EQ(error.detail().reason(), v1::ERROR_REASON_WORKER_FAILED);
  EXPECT_TRUE(server.engine().CheckInvariants().ok());
  gate->Open();
  EXPECT_TRUE(Eventually([&] { return !server.engine().stuck(); }));
  EXPECT_FALSE(server.engine().Ready());
}

TEST(HostileTest, SessionsAreLimited) {
  TestServer server({.config = [](Config& config) {
    config.server.max_sessions = 3;
    config.models[0].max_sessions = 2;
  }});
  const auto channel = NewChannel(server.address());
  auto a = std::make_unique<SessionClient>(channel);
  a->Open();
  SessionClient b(channel);
  b.Open();
  Request open;
  open.mutable_open();
  {
    SessionClient c(channel);
    c.Send(open);
    EXPECT_FALSE(c.Next());
    EXPECT_EQ(c.Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_EQ(DetailOf(c.Finish()).reason(), v1::ERROR_REASON_RATE_LIMITED);
    EXPECT_THAT(c.Finish().error_message(), HasSubstr("model \"fake\""));
  }
  a = nullptr;
  EXPECT_TRUE(Eventually([&] { return server.metrics().streams->Value() == 1; }));
  SessionClient d(channel);
  d.Open();
  // Streams that are not opened count too.
  std::vector<std::unique_ptr<SessionClient>> silent;
  silent.push_back(std::make_unique<SessionClient>(channel));
  EXPECT_TRUE(Eventually([&] { return server.metrics().streams->Value() == 3; }));
  SessionClient e(channel);
  EXPECT_FALSE(e.Next());
  EXPECT_EQ(e.Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST(HostileTest, IdleSessionsEnd) {
  TestServer server({.config = [](Config& config) { config.limits.session_idle_s = 0.2; }});
  SessionClient client(NewChannel(server.address()));
  client.Open(OpenWith("zzz"));
  EXPECT_FALSE(client.Next());
  EXPECT_EQ(client.Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  server.ExpectIdleSoon();
}

TEST(HostileTest, BadPredictionsSayWhatIsWrong) {
  TestServer server({.model = {.cameras = {"base", "wrist"}, .statistics = {"a", "b"}}});
  const auto channel = NewChannel(server.address());
  const auto stub = v1::Inference::NewStub(channel);
  v1::PredictRequest good;
  good.set_statistics_key("a");
  good.mutable_text()->set_instruction("one");
  *good.add_frames() = RawFrame("base", 1);
  *good.add_frames() = RawFrame("wrist", 2);
  struct Case {
    const char* field;
    grpc::StatusCode code;
    std::function<void(v1::PredictRequest&)> change;
  };
  const std::vector<Case> cases = {
      {"model", grpc::StatusCode::NOT_FOUND, [](auto& r) { r.set_model("x"); }},
      {"statistics_key", grpc::StatusCode::INVALID_ARGUMENT,
       [](auto& r) { r.clear_statistics_key(); }},
      {"text", grpc::StatusCode::INVALID_ARGUMENT, [](auto& r) { r.clear_text(); }},
      {"wrist", grpc::StatusCode::FAILED_PRECONDITION,
       [](auto& r) { r.mutable_frames()->RemoveLast(); }},
      {"frames[1].camera", grpc::StatusCode::INVALID_ARGUMENT,
       [](auto& r) { r.mutable_frames(1)->set_camera("base"); }},
      {"frames[0].camera", grpc::StatusCode::INVALID_ARGUMENT,
       [](auto& r) { r.mutable_frames(0)->clear_camera(); }},
      {"frames[1].encoded", grpc::StatusCode::INVALID_ARGUMENT,
       [](auto& r) { r.mutable_frames(1)->set_encoded("x"); }},
      {"frames", grpc::StatusCode::INVALID_ARGUMENT,
       [](auto& r) { *r.add_frames() = RawFrame("base", 1); }},
      {"state.values", grpc::StatusCode::INVALID_ARGUMENT,
       [](auto& r) { r.mutable_state()->add_values(1); }},
      {"act.temperature", grpc::StatusCode::INVALID_ARGUMENT,
       [](auto& r) { r.mutable_act()->set_temperature(-1); }},
      {"latency_class", grpc::StatusCode::INVALID_ARGUMENT,
       [](auto& r) { r.mutable_act()->set_latency_class("x"); }},
  };
  v1::PredictResponse response;
  for (const Case& c : cases) {
    v1::PredictRequest request = good;
    c.change(request);
    grpc::ClientContext context;
    const grpc::Status status = stub->Predict(&context, request, &response);
    EXPECT_EQ(status.error_code(), c.code) << status.error_message();
    EXPECT_EQ(DetailOf(status).field(), c.field) << status.error_message();
  }
  grpc::ClientContext context;
  EXPECT_TRUE(stub->Predict(&context, good, &response).ok());
  // Bytes that are no message.
  grpc::ClientContext raw_context;
  const auto raw = NewRawStream(*channel, raw_context, "/saccade.v1.Inference/Predict");
  raw->Write(Bytes("\xFF\xFF\xFF garbage"));
  raw->WritesDone();
  grpc::ByteBuffer nothing;
  EXPECT_FALSE(raw->Read(&nothing));
  const grpc::Status status = raw->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(DetailOf(status).field(), "message");
  server.ExpectIdleSoon();
}

// One answer of grpc.health.v1 or reflection; their messages are written out as bytes.
class Caller {
 public:
  Caller(const std::shared_ptr<grpc::Channel>& channel, const char* method,
         const std::string& request)
      : channel_(channel), stream_(NewRawStream(*channel, context_, method)) {
    stream_->Write(Bytes(request));
  }
  ~Caller() {
    context_.TryCancel();
    stream_->Finish();
  }
  std::optional<std::string> Next() {
    grpc::ByteBuffer buffer;
    if (!stream_->Read(&buffer)) return std::nullopt;
    return Text(buffer);
  }

 private:
  std::shared_ptr<grpc::Channel> channel_;
  grpc::ClientContext context_;
  std::unique_ptr<RawStream> stream_;
};

const std::string kServing("\x08\x01");
const std::string kNotServing("\x08\x02");
constexpr char kInferenceName[] = "\x0a\x14saccade.v1.Inference";

TEST(LifeTest, HealthTellsTheTruth) {
  TestServer server({.serve = false});
  const auto channel = NewChannel(server.address());
  const auto check = [&](const std::string& request) {
    return Caller(channel, "/grpc.health.v1.Health/Check", request).Next().value_or("none");
  };
  Caller watch(channel, "/grpc.health.v1.Health/Watch", "");
  Caller watch_inference(channel, "/grpc.health.v1.Health/Watch", kInferenceName);
  // Loading.
  EXPECT_EQ(check(""), kNotServing);
  EXPECT_EQ(watch.Next(), kNotServing);
  EXPECT_EQ(watch_inference.Next(), kNotServing);
  {
    grpc::ClientContext context;
    v1::ListResponse list;
    const grpc::Status status = v1::Models::NewStub(channel)->List(&context, {}, &list);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
    EXPECT_GT(DetailOf(status).retry_after_us(), 0U);
    SessionClient client(channel);
    EXPECT_FALSE(client.Next());
    EXPECT_EQ(client.Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  }
  server.Serve();
  EXPECT_EQ(watch.Next(), kServing);
  EXPECT_EQ(watch_inference.Next(), kServing);
  for (const std::string& name :
       {std::string(), std::string(kInferenceName), std::string("\x0a\x11saccade.v1.Models"),
        std::string("\x0a\x11saccade.v1.Server")}) {
    EXPECT_EQ(check(name), kServing) << name;
  }
  EXPECT_EQ(check("\x0a\x07unknown"), "none");
  EXPECT_EQ(server.metrics().ready->Value(), 1);
  server.rpc().BeginDrain();
  EXPECT_EQ(watch.Next(), kNotServing);
  EXPECT_EQ(check(kInferenceName), kNotServing);
  EXPECT_EQ(server.metrics().ready->Value(), 0);
}

TEST(LifeTest, AnEngineThatIsNotReadyIsSeen) {
  TestServer server;
  Caller watch(NewChannel(server.address()), "/grpc.health.v1.Health/Watch", "");
  EXPECT_EQ(watch.Next(), kServing);
  server.engine().Drain(std::chrono::steady_clock::now());
  EXPECT_EQ(watch.Next(), kNotServing);
}

TEST(LifeTest, BusyWorkersDoNotHoldUpTheNetwork) {
  auto gate = std::make_shared<Gate>();
  TestServer server({.model = {.gate = gate}});
  SessionClient client(NewChannel(server.address()));
  client.Open(OpenWith("busy"));
  client.SendFrame(RawFrame("front", 9));
  gate->Close();
  for (uint64_t id = 1; id <= 8; ++id) client.SendAct(id);
  gate->AwaitWaiter();
  for (int i = 0; i < 50; ++i) {
    const auto channel = NewChannel(server.address());
    EXPECT_EQ(Caller(channel, "/grpc.health.v1.Health/Check", "").Next(), kServing);
    SessionClient other(channel);
    EXPECT_EQ(other.Open(OpenWith("hello")).model().name(), "fake");
  }
  gate->Open();
  for (int i = 0; i < 8; ++i) client.NextChunk();
}

TEST(LifeTest, ReflectionListsTheServices) {
  TestServer server;
  const auto channel = NewChannel(server.address());
  const std::string list = std::string("\x3a\x01*", 3);  // list_services: "*"
  const std::string services =
      Caller(channel, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", list)
          .Next()
          .value_or("");
  for (const char* name : {"saccade.v1.Inference", "saccade.v1.Models", "saccade.v1.Server",
                           "grpc.health.v1.Health"}) {
    EXPECT_THAT(services, HasSubstr(name));
  }
  const std::string symbol = "\x22\x14saccade.v1.Inference";  // file_containing_symbol
  EXPECT_THAT(
      Caller(channel, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", symbol)
          .Next()
          .value_or(""),
      HasSubstr("SessionRequest"));
}

TEST(LifeTest, DrainingFinishesWhatWasAcceptedAndRefusesTheRest) {
  auto gate = std::make_shared<Gate>();
  TestServer server({.model = {.gate = gate}});
  const auto channel = NewChannel(server.address());
  SessionClient client(channel);
  client.Open(OpenWith("finish"));
  client.SendFrame(RawFrame("front", 9));
  gate->Close();
  client.SendAct(1);
  gate->AwaitWaiter();
  server.rpc().BeginDrain();
  const auto notice = client.Next();
  ASSERT_TRUE(notice && notice->has_notice());
  EXPECT_EQ(notice->notice().kind(), v1::NOTICE_KIND_DRAINING);
  SessionClient late(channel);
  EXPECT_FALSE(late.Next());
  EXPECT_EQ(late.Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(DetailOf(late.Finish()).reason(), v1::ERROR_REASON_DRAINING);
  std::thread drain([&] {
    server.engine().Drain(std::chrono::steady_clock::now() + std::chrono::seconds(10));
    server.rpc().Shutdown(std::chrono::steady_clock::now() + std::chrono::seconds(10));
  });
  EXPECT_TRUE(Eventually([&] { return server.engine().draining(); }));
  client.SendAct(2);
  const v1::RequestError error = client.NextError();
  EXPECT_EQ(error.act_id(), 2U);
  EXPECT_EQ(error.code(), static_cast<int>(grpc::StatusCode::UNAVAILABLE));
  EXPECT_EQ(error.detail().reason(), v1::ERROR_REASON_DRAINING);
  gate->Open();
  EXPECT_EQ(client.NextChunk().act_id(), 1U);
  EXPECT_FALSE(client.Next());
  EXPECT_EQ(client.Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(DetailOf(client.Finish()).reason(), v1::ERROR_REASON_DRAINING);
  drain.join();
}

TEST(LifeTest, ASecondServerOnThePortIsAnError) {
  TestServer server;
  Config config;
  config.server.listen = server.address();
  const SteadyClock clock;
  const absl::Status status = RpcServer::Start(config, clock, nullptr, "x").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr(server.address()));
}

TEST(LifeTest, ConfigurationAndModelsMustGoTogether) {
  const auto serve = [](const std::function<void(Config&)>& change) {
    TestServer server({.config = change, .serve = false});
    return server.rpc().Serve(server.engine());
  };
  EXPECT_TRUE(serve([](Config&) {}).ok());
  EXPECT_EQ(serve([](Config& c) { c.models[0].name = "other"; }).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(serve([](Config& c) { c.models[0].default_class = "other"; }).code(),
            absl::StatusCode::kFailedPrecondition);
  // Three values are no two steps, and not two named values.
  EXPECT_EQ(serve([](Config& c) {
              c.models[0].action_space = ActionSpaceConfig{.steps = 2, .dims = {}};
            }).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(serve([](Config& c) {
              c.models[0].action_space = ActionSpaceConfig{.dims = {{"a", ""}, {"b", ""}}};
            }).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(serve([](Config& c) {
                c.models[0].action_space = ActionSpaceConfig{.steps = 3, .dims = {{"a", ""}}};
              }).ok());
}

}  // namespace
}  // namespace saccade::testing
