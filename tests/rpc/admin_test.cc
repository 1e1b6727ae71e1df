// What an engine remembers of its last steps and requests, its trace, and the Admin service.
#include <gtest/gtest.h>

#include <atomic>
#include <nlohmann/json.hpp>

#include "engine/recorder.h"
#include "saccade/v1/admin.grpc.pb.h"
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

std::unique_ptr<v1::Admin::Stub> NewAdmin(const TestServer& server) {
  return v1::Admin::NewStub(NewChannel(server.address()));
}

TEST(AdminTest, ShowsRequestsTraceAndCaches) {
  TestServer server;
  const auto channel = NewChannel(server.address());
  SessionClient client(channel);
  client.Open(Go());
  client.SendFrame(RawFrame("front", 9));
  EXPECT_EQ(client.Act(1).act_id(), 1U);
  EXPECT_EQ(client.Act(2).act_id(), 2U);
  const auto admin = NewAdmin(server);

  v1::GetRecentResponse recent;
  v1::GetRecentRequest two;
  two.set_max_requests(2);
  {
    grpc::ClientContext context;
    ASSERT_TRUE(admin->GetRecent(&context, two, &recent).ok());
  }
  ASSERT_EQ(recent.requests_size(), 2);
  const v1::RecentRequest& last = recent.requests(1);
  EXPECT_EQ(last.model(), "fake");
  EXPECT_EQ(last.latency_class(), "best_effort");
  EXPECT_EQ(last.code(), 0);
  EXPECT_EQ(last.reason(), v1::ERROR_REASON_UNSPECIFIED);
  EXPECT_EQ(last.deadline_us(), 0U);
  EXPECT_GT(last.total_us(), 0U);
  EXPECT_GE(last.total_us(), last.timings().act_us());
  EXPECT_GT(last.arrival_us(), recent.requests(0).arrival_us());
  EXPECT_GT(last.cached_tokens(), recent.requests(0).cached_tokens());
  EXPECT_EQ(last.prompt_tokens(), recent.requests(0).prompt_tokens());

  v1::GetTraceResponse trace;
  {
    grpc::ClientContext context;
    ASSERT_TRUE(admin->GetTrace(&context, {}, &trace).ok());
  }
  EXPECT_TRUE(nlohmann::json::parse(trace.json()).contains("traceEvents"));

  v1::GetCacheResponse cache;
  v1::GetCacheRequest check;
  check.set_check_invariants(true);
  {
    grpc::ClientContext context;
    ASSERT_TRUE(admin->GetCache(&context, check, &cache).ok());
  }
  EXPECT_EQ(cache.broken_invariant(), "");
  EXPECT_TRUE(cache.has_broken_invariant());
  ASSERT_EQ(cache.caches_size(), 1);
  const v1::CacheState& state = cache.caches(0);
  uint32_t used = 0;
  for (const v1::PartitionState& part : state.partitions()) used += part.held() + part.idle();
  EXPECT_EQ(state.free_blocks() + used, state.total_blocks());
  EXPECT_EQ(state.partitions_size(), static_cast<int>(kModalities));
  EXPECT_GT(state.partitions(0).hit_tokens() + state.partitions(1).hit_tokens(), 0U);
}

TEST(AdminTest, BeforeModelsAreLoadedItSaysSo) {
  TestServer server({.serve = false});
  grpc::ClientContext context;
  v1::GetCacheResponse cache;
  EXPECT_EQ(NewAdmin(server)->GetCache(&context, {}, &cache).error_code(),
            grpc::StatusCode::UNAVAILABLE);
}

TEST(AdminTest, DrainAsksForTheEnd) {
  std::atomic<int> asked = 0;
  TestServer server({.on_drain = [&asked] { ++asked; }});
  grpc::ClientContext context;
  v1::DrainResponse response;
  EXPECT_TRUE(NewAdmin(server)->Drain(&context, {}, &response).ok());
  EXPECT_EQ(asked, 1);
}

}  // namespace
}  // namespace saccade::testing
