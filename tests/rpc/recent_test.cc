// What an engine remembers of its last steps and requests, and its trace.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "engine/recorder.h"
#include "tests/rpc/client.h"
#include "tests/rpc/harness.h"

namespace saccade::testing {
namespace {

v1::Open Go() {
  v1::Open open;
  open.set_instruction("go");
  return open;
}

TEST(RecentTest, RemembersAnswersRefusalsAndSteps) {
  TestServer server;
  const auto channel = NewChannel(server.address());
  SessionClient client(channel);
  client.Open(Go());
  client.SendFrame(RawFrame("front", 9));
  EXPECT_EQ(client.Act(1).act_id(), 1U);
  EXPECT_EQ(client.Act(2).act_id(), 2U);  // all cached
  v1::SessionRequest late;
  late.mutable_act()->set_id(3);
  late.mutable_act()->set_latency_class("control");
  late.mutable_act()->set_deadline_us(1);
  client.Send(late);
  EXPECT_EQ(client.NextError().act_id(), 3U);

  const RecentWork recent = server.engine().Recent().value();
  ASSERT_GE(recent.requests.size(), 3U);
  const RequestRecord* last = &recent.requests.back();
  EXPECT_EQ(server.engine().classes()[static_cast<size_t>(last->klass.value())].name, "control");
  EXPECT_NE(last->code, absl::StatusCode::kOk);
  EXPECT_TRUE(last->reason == Reason::kExpired || last->reason == Reason::kLate);
  EXPECT_EQ(last->deadline - last->arrival, Micros(1));
  --last;
  EXPECT_EQ(last->code, absl::StatusCode::kOk);
  EXPECT_EQ(last->reason, Reason::kUnspecified);
  const auto vision = static_cast<size_t>(Modality::kVision);
  EXPECT_GT(last->prompt_tokens[vision], 0U);
  EXPECT_EQ(last->cached_tokens[vision], last->prompt_tokens[vision]);
  EXPECT_GE(last->finished, last->arrival);
  --last;
  EXPECT_EQ(last->code, absl::StatusCode::kOk);
  EXPECT_EQ(last->cached_tokens[vision], 0U);

  ASSERT_FALSE(recent.steps.empty());
  EXPECT_GT(recent.steps.back().shape.decode_rows, 0U);
  for (size_t i = 1; i < recent.steps.size(); ++i) {
    EXPECT_LT(recent.steps[i - 1].id, recent.steps[i].id);
    EXPECT_LE(recent.steps[i - 1].finished, recent.steps[i].started);
  }
}

TEST(RecentTest, KeepsABoundedNumberOldestFirst) {
  Recorder recorder;
  ActRequest request;
  request.session = SessionId(1);
  for (uint64_t i = 1; i <= Recorder::kRequests + 10; ++i)
    recorder.Request(RequestId(i), request, absl::OkStatus(), nullptr, TimePoint{});
  StepPlan plan;
  for (uint64_t i = 1; i <= Recorder::kSteps + 7; ++i) {
    plan.id = StepId(i);
    recorder.Step(plan, {});
  }
  const RecentWork recent = recorder.Recent();
  ASSERT_EQ(recent.requests.size(), Recorder::kRequests);
  EXPECT_EQ(recent.requests.front().id, RequestId(11));
  EXPECT_EQ(recent.requests.back().id, RequestId(Recorder::kRequests + 10));
  ASSERT_EQ(recent.steps.size(), Recorder::kSteps);
  EXPECT_EQ(recent.steps.front().id, StepId(8));
  EXPECT_EQ(recent.steps.back().id, StepId(Recorder::kSteps + 7));
}

TEST(RecentTest, TraceIsJsonWithARowForEachWorkerAndSession) {
  TestServer server;
  const SteadyClock clock;
  const TimePoint epoch = clock.Now();
  const auto channel = NewChannel(server.address());
  SessionClient client(channel);
  client.Open(Go());
  client.SendFrame(RawFrame("front", 9));
  EXPECT_EQ(client.Act(1).act_id(), 1U);
  const RecentWork recent = server.engine().Recent().value();
  const auto trace = nlohmann::json::parse(ChromeTrace(recent, server.engine(), epoch));
  size_t steps = 0;
  size_t answers = 0;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] != "X") continue;
    EXPECT_GE(event["dur"].get<int64_t>(), 1);
    steps += event["pid"] == 1 ? 1 : 0;
    answers += event["name"] == "best_effort ok" ? 1 : 0;
  }
  EXPECT_EQ(steps, recent.steps.size());
  EXPECT_EQ(answers, recent.requests.size());
}

}  // namespace
}  // namespace saccade::testing
