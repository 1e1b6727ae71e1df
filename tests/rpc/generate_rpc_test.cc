// Generate as a client sees it: events, limits, endings.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <initializer_list>
#include <thread>

#include "model/tokenizer.h"
#include "tests/rpc/client.h"
#include "tests/rpc/harness.h"

namespace saccade::testing {
namespace {

using ::testing::HasSubstr;

struct Answered {
  std::vector<v1::GeneratedToken> tokens;
  std::vector<v1::GenerateResult> results;
  grpc::Status status;
};

v1::GenerateRequest Text(const std::string& text, uint32_t max_new_tokens) {
  v1::GenerateRequest request;
  request.set_text(text);
  request.set_max_new_tokens(max_new_tokens);
  request.set_latency_class("best_effort");
  return request;
}

Answered Generate(const std::string& address, const v1::GenerateRequest& request) {
  const auto stub = v1::Inference::NewStub(NewChannel(address));
  grpc::ClientContext context;
  const auto stream = stub->Generate(&context, request);
  Answered answered;
  for (v1::GenerateResponse response; stream->Read(&response);) {
    if (response.has_token()) answered.tokens.push_back(response.token());
    if (response.has_result()) {
      answered.results.push_back(response.result());
    } else {
      EXPECT_TRUE(answered.results.empty()) << "a token after the result";
    }
  }
  answered.status = stream->Finish();
  return answered;
}

TEST(GenerateRpcTest, StreamsEveryTokenThenTheWholeAnswer) {
  TestServer server;
  v1::GenerateRequest request = Text("hello", 9);
  *request.add_frames() = RawFrame("front", 40, 123);
  const Answered a = Generate(server.address(), request);
  ASSERT_TRUE(a.status.ok()) << a.status.error_message();
  ASSERT_EQ(a.tokens.size(), 9U);
  ASSERT_EQ(a.results.size(), 1U);
  const v1::GenerateResult& result = a.results[0];
  ASSERT_EQ(result.sequences_size(), 1);
  const v1::GeneratedSequence& sequence = result.sequences(0);
  EXPECT_EQ(sequence.finish_reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(sequence.score(), 0);
  std::string text;
  for (int i = 0; i < 9; ++i) {
    EXPECT_EQ(a.tokens[static_cast<size_t>(i)].index(), static_cast<uint32_t>(i));
    EXPECT_EQ(a.tokens[static_cast<size_t>(i)].sequence(), 0U);
    EXPECT_EQ(a.tokens[static_cast<size_t>(i)].token_id(), sequence.token_ids(i));
    text += a.tokens[static_cast<size_t>(i)].text();
  }
  EXPECT_EQ(sequence.text(), text);
  EXPECT_EQ(text.substr(0, 2), "a2");  // the action tokens' names
  EXPECT_EQ(result.latency_class(), "best_effort");
  ASSERT_EQ(result.frames_size(), 1);
  EXPECT_EQ(result.frames(0).camera(), "front");
  EXPECT_EQ(result.frames(0).capture_time_ns(), 123);
  ASSERT_EQ(result.tokens_size(), 2);
  EXPECT_EQ(result.tokens(1).total(), 6U);
  EXPECT_GT(result.timings().total_us(), 0U);
  EXPECT_TRUE(result.deadline_met());
  EXPECT_FALSE(result.frames_cached());
  EXPECT_EQ(server.metrics().model("fake").generated_tokens->Value(), 9);

  // Without a frame, and again with it.
  request.clear_frames();
  const Answered blind = Generate(server.address(), request);
  ASSERT_EQ(blind.results.size(), 1U);
  EXPECT_EQ(blind.results[0].tokens_size(), 1);
  EXPECT_EQ(blind.results[0].frames_size(), 0);
  *request.add_frames() = RawFrame("front", 40, 124);
  const Answered again = Generate(server.address(), request);
  EXPECT_EQ(again.results[0].sequences(0).text(), text);
  EXPECT_TRUE(again.results[0].frames_cached());
  EXPECT_EQ(again.results[0].tokens(0).cached(), FakeModel::kVisionTokens);
  server.ExpectIdleSoon();
}

TEST(GenerateRpcTest, APromptInIdsIsTheSame) {
  TestServer server;
  v1::GenerateRequest ids = Text("", 5);
  for (const int32_t id : std::initializer_list<int32_t>{256, 'h', 'i'})
    ids.mutable_token_ids()->add_ids(id);
  const Answered a = Generate(server.address(), ids);
  const Answered b = Generate(server.address(), Text("hi", 5));
  ASSERT_EQ(a.results.size(), 1U) << a.status.error_message();
  EXPECT_EQ(a.results[0].sequences(0).text(), b.results[0].sequences(0).text());
  server.ExpectIdleSoon();
}

TEST(GenerateRpcTest, StopTokensEndASequenceAndAreNoText) {
  TestServer server;
  const Answered whole = Generate(server.address(), Text("abc", 12));
  ASSERT_EQ(whole.results.size(), 1U);
  const v1::GeneratedSequence all = whole.results[0].sequences(0);
  v1::GenerateRequest request = Text("abc", 12);
  request.add_stop_token_ids(all.token_ids(4));
  const Answered stopped = Generate(server.address(), request);
  ASSERT_EQ(stopped.results.size(), 1U);
  const v1::GeneratedSequence& some = stopped.results[0].sequences(0);
  int place = 0;
  while (all.token_ids(place) != all.token_ids(4)) ++place;
  ASSERT_EQ(some.token_ids_size(), place + 1);
  EXPECT_EQ(some.finish_reason(), v1::FINISH_REASON_STOP);
  EXPECT_EQ(stopped.tokens.size(), static_cast<size_t>(place + 1));
  EXPECT_EQ(stopped.tokens.back().text(), "");
  EXPECT_TRUE(all.text().starts_with(some.text()));
  EXPECT_LT(some.text().size(), all.text().size());
  server.ExpectIdleSoon();
}

TEST(GenerateRpcTest, SamplesAndSeeds) {
  TestServer server;
  v1::GenerateRequest request = Text("abc", 8);
  request.set_temperature(1);
  request.set_top_p(0.9F);
  request.set_num_sequences(3);
  request.set_seed(5);
  const Answered a = Generate(server.address(), request);
  const Answered b = Generate(server.address(), request);
  request.set_seed(6);
  const Answered c = Generate(server.address(), request);
  ASSERT_EQ(a.results.size(), 1U) << a.status.error_message();
  ASSERT_EQ(a.results[0].sequences_size(), 3);
  EXPECT_EQ(a.tokens.size(), 24U);
  for (int i = 0; i < 3; ++i) {
    std::string text;
    for (const v1::GeneratedToken& token : a.tokens) {
      if (token.sequence() == static_cast<uint32_t>(i)) text += token.text();
    }
    EXPECT_EQ(a.results[0].sequences(i).text(), text);
    EXPECT_EQ(a.results[0].sequences(i).text(), b.results[0].sequences(i).text());
  }
  EXPECT_NE(a.results[0].sequences(0).text(), a.results[0].sequences(1).text());
  EXPECT_NE(a.results[0].sequences(0).text(), c.results[0].sequences(0).text());
  server.ExpectIdleSoon();
}

TEST(GenerateRpcTest, BeamsSendTheirResultAlone) {
  TestServer server;
  v1::GenerateRequest request = Text("abc", 10);
  request.set_num_beams(4);
  request.set_num_sequences(3);
  const Answered a = Generate(server.address(), request);
  ASSERT_EQ(a.results.size(), 1U) << a.status.error_message();
  EXPECT_TRUE(a.tokens.empty());
  ASSERT_EQ(a.results[0].sequences_size(), 3);
  for (int i = 0; i < 3; ++i) {
    const v1::GeneratedSequence& s = a.results[0].sequences(i);
    EXPECT_EQ(s.token_ids_size(), 10);
    EXPECT_NEAR(s.score(), s.log_probability() / 10, 1e-9);
    if (i > 0) {
      EXPECT_LE(s.score(), a.results[0].sequences(i - 1).score());
    }
  }
  // One beam is greedy; more find nothing less likely.
  request.set_num_beams(1);
  request.set_num_sequences(1);
  const Answered greedy = Generate(server.address(), request);
  ASSERT_EQ(greedy.results.size(), 1U);
  EXPECT_EQ(greedy.tokens.size(), 10U);
  server.ExpectIdleSoon();
}

TEST(GenerateRpcTest, LimitsAreRefusedByField) {
  TestServer server({.config = [](Config& config) {
    config.limits.max_new_tokens = 200;
    config.limits.max_beams = 4;
    config.limits.max_instruction_bytes = 100;
    config.limits.max_instruction_tokens = 50;
  }});
  const auto refuse = [&](auto&& change) {
    v1::GenerateRequest request = Text("abc", 4);
    change(request);
    const Answered a = Generate(server.address(), request);
    EXPECT_TRUE(a.results.empty());
    EXPECT_TRUE(a.tokens.empty());
    EXPECT_EQ(a.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT)
        << a.status.error_message();
    return DetailOf(a.status).field();
  };
  using R = v1::GenerateRequest;
  EXPECT_EQ(refuse([](R& r) { r.clear_text(); }), "text");
  EXPECT_EQ(refuse([](R& r) { r.set_text(""); }), "text");
  EXPECT_EQ(refuse([](R& r) { r.set_text(std::string(101, 'a')); }), "text");
  EXPECT_EQ(refuse([](R& r) { r.mutable_token_ids()->add_ids(7); }), "token_ids");
  EXPECT_EQ(refuse([](R& r) {
              for (int i = 0; i < 51; ++i) r.mutable_token_ids()->add_ids(256);
            }),
            "token_ids");
  EXPECT_EQ(refuse([](R& r) { r.set_max_new_tokens(201); }), "max_new_tokens");
  EXPECT_EQ(refuse([](R& r) {  // the model has 256 positions
              r.set_text(std::string(90, 'a'));
              r.set_max_new_tokens(200);
            }),
            "max_new_tokens");
  EXPECT_EQ(refuse([](R& r) { r.set_temperature(-1); }), "temperature");
  EXPECT_EQ(refuse([](R& r) { r.set_temperature(NAN); }), "temperature");
  EXPECT_EQ(refuse([](R& r) { r.set_top_p(1.5F); }), "top_p");
  EXPECT_EQ(refuse([](R& r) { r.set_top_p(NAN); }), "top_p");
  EXPECT_EQ(refuse([](R& r) { r.set_num_sequences(17); }), "samples");
  EXPECT_EQ(refuse([](R& r) { r.set_num_beams(5); }), "num_beams");
  EXPECT_EQ(refuse([](R& r) {
              r.set_num_beams(2);
              r.set_temperature(1);
            }),
            "num_beams");
  EXPECT_EQ(refuse([](R& r) {
              r.set_num_beams(2);
              r.set_num_sequences(3);
            }),
            "num_sequences");
  EXPECT_EQ(refuse([](R& r) { r.set_length_penalty(11); }), "length_penalty");
  EXPECT_EQ(refuse([](R& r) { r.set_length_penalty(NAN); }), "length_penalty");
  EXPECT_EQ(refuse([](R& r) { r.add_stop_token_ids(288); }), "stop_token_ids");
  EXPECT_EQ(refuse([](R& r) {
              for (int i = 0; i < 9; ++i) r.add_stop_token_ids(i);
            }),
            "stop_token_ids");
  EXPECT_EQ(refuse([](R& r) { r.set_latency_class("nope"); }), "latency_class");
  EXPECT_EQ(refuse([](R& r) { r.set_deadline_us(3'600'000'001); }), "deadline_us");
  EXPECT_EQ(refuse([](R& r) { *r.add_frames() = RawFrame("rear", 1); }), "frames[0].camera");
  EXPECT_EQ(refuse([](R& r) { r.add_frames()->set_camera("front"); }), "frames[0]");
  EXPECT_EQ(refuse([](R& r) {
              *r.add_frames() = RawFrame("front", 1);
              *r.add_frames() = RawFrame("front", 2);
            }),
            "frames");
  const Answered unknown = Generate(server.address(), [] {
    v1::GenerateRequest request = Text("abc", 4);
    request.set_model("other");
    return request;
  }());
  EXPECT_EQ(unknown.status.error_code(), grpc::StatusCode::NOT_FOUND);
  server.ExpectIdleSoon();
}

TEST(GenerateRpcTest, WithoutAClassItRunsInTheOneForText) {
  TestServer server({.config = [](Config& config) {
    for (ClassConfig& klass : config.classes) klass.deadline_ms = 0;
  }});
  v1::GenerateRequest request = Text("abc", 0);
  request.clear_latency_class();
  const Answered a = Generate(server.address(), request);
  ASSERT_EQ(a.results.size(), 1U) << a.status.error_message();
  EXPECT_EQ(a.results[0].latency_class(), "planning");
  EXPECT_EQ(a.tokens.size(), 64U);  // the default
}

TEST(GenerateRpcTest, AModelThatWritesNoTextSaysSo) {
  TestServer server({.model = {.writes_text = false}});
  const Answered a = Generate(server.address(), Text("abc", 4));
  EXPECT_EQ(a.status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_EQ(DetailOf(a.status).field(), "model");
}

TEST(GenerateRpcTest, PixelsCountAsForPredict) {
  TestServer server({.config = [](Config& config) { config.limits.pixels_per_s = 100; }});
  v1::GenerateRequest request = Text("abc", 4);
  *request.add_frames() = RawFrame("front", 1, 0, 10, 10);
  EXPECT_TRUE(Generate(server.address(), request).status.ok());
  const Answered limited = Generate(server.address(), request);
  EXPECT_EQ(limited.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(DetailOf(limited.status).reason(), v1::ERROR_REASON_RATE_LIMITED);
}

TEST(GenerateRpcTest, AClientThatCancelsFreesEverything) {
  const auto gate = std::make_shared<Gate>();
  TestServer server({.model = {.gate = gate}});
  for (const uint32_t beams : {1U, 4U}) {
    const auto stub = v1::Inference::NewStub(NewChannel(server.address()));
    grpc::ClientContext context;
    v1::GenerateRequest request = Text("abc", 100);
    request.set_num_beams(beams);
    gate->Close();
    const auto stream = stub->Generate(&context, request);
    gate->AwaitWaiter();
    context.TryCancel();
    v1::GenerateResponse response;
    while (stream->Read(&response)) {
    }
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
    gate->Open();
    server.ExpectIdleSoon();
  }
}

TEST(GenerateRpcTest, ItsOwnDeadlineEndsIt) {
  const auto gate = std::make_shared<Gate>();
  TestServer server({.model = {.gate = gate}, .config = [](Config& config) {
                       for (ClassConfig& klass : config.classes) klass.on_late = OnLate::kReject;
                     }});
  v1::GenerateRequest request = Text("abc", 100);
  request.set_deadline_us(50'000);
  gate->Close();
  std::thread opener([&] {
    // Not when a step waits: one that is refused at once has none.
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    gate->Open();
  });
  const Answered a = Generate(server.address(), request);
  opener.join();
  EXPECT_EQ(a.status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(a.results.empty());
  server.ExpectIdleSoon();
}

TEST(GenerateRpcTest, BytesThatAreNoMessageAreAnError) {
  TestServer server;
  const auto stub = v1::Inference::NewStub(NewChannel(server.address()));
  v1::GenerateRequest request = Text("abc", 4);
  request.GetReflection()->MutableUnknownFields(&request)->AddLengthDelimited(2, "\xff");
  grpc::ClientContext context;
  const auto stream = stub->Generate(&context, request);
  v1::GenerateResponse response;
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  server.ExpectIdleSoon();
}

}  // namespace
}  // namespace saccade::testing
