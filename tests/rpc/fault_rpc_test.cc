// Clients, connections and devices that fail, in every phase of a request. After each: nothing is
// held, the caches add up, the server is ready, and another client's answers have the same bits.
// SACCADE_FAULTS: how often each fault is tried; a few times by default.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <random>
#include <thread>

#include "rpc/health_probe.h"
#include "tests/rpc/bad_network.h"
#include "tests/rpc/client.h"
#include "tests/rpc/harness.h"

namespace saccade::testing {
namespace {

using std::chrono::milliseconds;

int Repetitions() {
  const char* text = std::getenv("SACCADE_FAULTS");
  return text == nullptr ? 5 : std::max(1, std::atoi(text));
}

v1::Open OpenWith(const std::string& instruction, bool stream_tokens = false) {
  v1::Open open;
  open.set_instruction(instruction);
  open.mutable_options()->set_stream_tokens(stream_tokens);
  return open;
}

// A client that is served all the time, and knows what it must be answered.
class Witness {
 public:
  explicit Witness(TestServer& server) : client_(NewChannel(server.address())) {
    client_.Open(OpenWith("the same as ever"));
    expected_ = Ask();
  }
  void Check() { EXPECT_EQ(Ask(), expected_); }

 private:
  std::vector<int32_t> Ask() {
    client_.SendFrame(RawFrame("front", 200));
    return TokensOf(client_.Act(++id_));
  }
  SessionClient client_;
  uint64_t id_ = 0;
  std::vector<int32_t> expected_;
};

// Nothing is held and queued but the witness's own stream, and the caches add up.
void ExpectOnlyTheWitness(TestServer& server) {
  EXPECT_TRUE(Eventually([&] {
    const absl::StatusOr<SchedulerStats> stats = server.engine().Stats();
    if (!stats.ok()) return false;
    for (const auto& klass : stats->classes) {
      if (klass.queued + klass.running != 0) return false;
    }
    for (const auto& lane : stats->lanes) {
      if (lane.embeddings_held != 0) return false;
      for (const PartitionStats& partition : lane.kv.partitions) {
        if (partition.held != 0) return false;
      }
    }
    return server.metrics().streams->Value() == 1 &&
           server.metrics().model("fake").sessions->Value() == 1;
  }));
  const absl::Status invariants = server.engine().CheckInvariants();
  EXPECT_TRUE(invariants.ok()) << invariants;
  EXPECT_TRUE(server.engine().Ready());
}

// ------------------------------------------------------------------------------------------------
// a client goes, in each phase

enum class Phase { kOpened, kQueued, kEncoding, kPrefill, kDecoding, kAnswered };
enum class Way { kCancel, kReset };

class VanishTest : public ::testing::TestWithParam<std::tuple<Phase, Way>> {};

TEST_P(VanishTest, FreesEverythingAndDisturbsNobody) {
  const auto [phase, way] = GetParam();
  const auto gate = std::make_shared<Gate>();
  const auto encode_gate = std::make_shared<Gate>();
  TestServer server({.model = {.gate = gate, .encode_gate = encode_gate}});
  Witness witness(server);
  const int repetitions = Repetitions();
  for (int i = 0; i < repetitions; ++i) {
    {
      BadNetwork network(server.rpc().port());
      SessionClient client(NewChannel(network.address()));
      client.Open(OpenWith("I will not be here", true));
      // Never the witness's, and for a long time no other's: what is encoded already waits at no
      // gate.
      v1::VisionFrame frame = RawFrame("front", static_cast<uint8_t>(i % 199));
      (*frame.mutable_raw()->mutable_data())[0] = static_cast<char>(i / 199);
      client.SendFrame(frame);
      const auto act = [&](uint64_t requests) {
        for (uint64_t id = 1; id <= requests; ++id) client.SendAct(id);
      };
      switch (phase) {
        case Phase::kOpened:
          break;
        case Phase::kQueued:  // behind a step that is held; seven more than fit in the next one
          gate->Close();
          act(12);
          gate->AwaitWaiter();
          break;
        case Phase::kEncoding:
          encode_gate->Close();
          act(2);
          encode_gate->AwaitWaiter();
          break;
        case Phase::kPrefill:
          gate->Close();
          act(1);
          gate->AwaitWaiter();
          break;
        case Phase::kDecoding:
          gate->CloseAfter(1);
          act(1);
          EXPECT_TRUE(client.Next());  // its first token
          gate->AwaitWaiter();
          break;
        case Phase::kAnswered:  // on the way to a client that does not read
          act(5);
          EXPECT_TRUE(Eventually([&] { return server.engine().Stats()->classes[3].running == 0; }));
          break;
      }
      if (way == Way::kCancel) {
        client.Cancel();
      } else {
        network.Reset();
      }
      EXPECT_FALSE(client.Finish().ok());
      EXPECT_TRUE(Eventually([&] { return server.metrics().streams->Value() == 1; }));
      gate->Open();
      encode_gate->Open();
    }
    ExpectOnlyTheWitness(server);
    witness.Check();
  }
}

std::string NameOfCase(const ::testing::TestParamInfo<std::tuple<Phase, Way>>& info) {
  static constexpr std::array<const char*, 6> kPhases = {"Opened",  "Queued",   "Encoding",
                                                         "Prefill", "Decoding", "Answered"};
  return std::string(kPhases[static_cast<size_t>(std::get<0>(info.param))]) +
         (std::get<1>(info.param) == Way::kCancel ? "Cancel" : "Reset");
}

INSTANTIATE_TEST_SUITE_P(Phases, VanishTest,
                         ::testing::Combine(::testing::Values(Phase::kOpened, Phase::kQueued,
                                                              Phase::kEncoding, Phase::kPrefill,
                                                              Phase::kDecoding, Phase::kAnswered),
                                            ::testing::Values(Way::kCancel, Way::kReset)),
                         NameOfCase);

// The connection breaks after any number of bytes: in the handshake, inside a message, inside an
// image, between messages, inside an answer.
TEST(ConnectionFaultTest, ABreakAtAnyByteFreesEverything) {
  TestServer server;
  Witness witness(server);
  std::mt19937 random(1);
  const int repetitions = 8 * Repetitions();
  for (int i = 0; i < repetitions; ++i) {
    const bool up = i % 4 != 0;
    const size_t at = up ? 1 + random() % 700'000 : 1 + random() % 2'000;
    BadNetwork network(server.rpc().port(), up ? at : BadNetwork::kNever,
                       up ? BadNetwork::kNever : at);
    SessionClient client(NewChannel(network.address()), milliseconds(5000));
    v1::SessionRequest open;
    *open.mutable_open() = OpenWith("cut");
    bool alive = client.Send(open);
    for (int message = 0; alive && message < 40; ++message) {
      // 300 KB: a message takes many packets.
      alive = client.SendFrame(RawFrame("front", static_cast<uint8_t>(message), 0, 400, 250)) &&
              client.SendAct(static_cast<uint64_t>(message) + 1);
    }
    EXPECT_FALSE(client.Finish().ok());
    if (i % 4 == 3) witness.Check();
  }
  ExpectOnlyTheWitness(server);
  witness.Check();
}

TEST(ConnectionFaultTest, AHalfOpenConnectionIsFoundByKeepalive) {
  TestServer server({.config = [](Config& config) {
    config.server.keepalive_s = 1;
    config.server.keepalive_timeout_s = 1;
  }});
  Witness witness(server);
  BadNetwork network(server.rpc().port());
  SessionClient client(NewChannel(network.address()));
  client.Open(OpenWith("unplugged"));
  client.SendFrame(RawFrame("front", 3));
  EXPECT_EQ(client.Act(1).act_id(), 1U);
  EXPECT_EQ(server.metrics().streams->Value(), 2);
  network.FallSilent();
  EXPECT_TRUE(Eventually([&] { return server.metrics().streams->Value() == 1; }));
  EXPECT_TRUE(Eventually([&] { return network.server_gone(); }));
  ExpectOnlyTheWitness(server);
  witness.Check();
  network.Reset();
  EXPECT_FALSE(client.Finish().ok());
}

TEST(ConnectionFaultTest, PingsOfAnIdleClientKeepItsConnection) {
  TestServer server({.config = [](Config& config) { config.server.min_ping_interval_s = 0.2; }});
  BadNetwork network(server.rpc().port());  // takes one connection only
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 400);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 2000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const auto channel =
      grpc::CreateCustomChannel(network.address(), grpc::InsecureChannelCredentials(), arguments);
  SessionClient client(channel);
  client.Open(OpenWith("quiet"));
  client.SendFrame(RawFrame("front", 3));
  EXPECT_EQ(client.Act(1).act_id(), 1U);
  std::this_thread::sleep_for(std::chrono::seconds(3));
  EXPECT_EQ(client.Act(2).act_id(), 2U);
  EXPECT_FALSE(network.server_gone());
}

// Twenty clients ask and never read: each of them costs a bounded amount of memory, and a normal
// one beside them is served.
TEST(ConnectionFaultTest, SlowReadersAreBoundedAndHoldUpNobody) {
  TestServer server({.config = [](Config& config) {
    config.limits.outbox_messages = 8;
    config.limits.acts_in_flight = 64;
  }});
  Witness witness(server);
  {
    const auto channel = NewChannel(server.address());
    std::vector<std::unique_ptr<SessionClient>> slow;
    std::vector<std::thread> writers;
    for (int i = 0; i < 20; ++i) {
      slow.push_back(std::make_unique<SessionClient>(channel));
      slow.back()->Open(OpenWith("slow"));
      slow.back()->SendFrame(RawFrame("front", static_cast<uint8_t>(i)));
    }
    for (const auto& client : slow) {
      writers.emplace_back([&client] {
        // Ends when the stream is ended, or is not read any more.
        for (uint64_t id = 1; id <= 500 && client->SendAct(id); ++id) {
        }
      });
    }
    for (int i = 0; i < 50; ++i) witness.Check();
    for (const auto& client : slow) client->Cancel();
    for (std::thread& writer : writers) writer.join();
  }
  ExpectOnlyTheWitness(server);
  witness.Check();
}

TEST(ConnectionFaultTest, GoingDuringADrainDoesNotHoldItUp) {
  const auto gate = std::make_shared<Gate>();
  TestServer server({.model = {.gate = gate}});
  BadNetwork network(server.rpc().port());
  SessionClient client(NewChannel(network.address()));
  client.Open(OpenWith("last"));
  client.SendFrame(RawFrame("front", 3));
  gate->Close();
  for (uint64_t id = 1; id <= 5; ++id) client.SendAct(id);
  gate->AwaitWaiter();
  server.rpc().BeginDrain();
  network.Reset();
  EXPECT_TRUE(Eventually([&] { return server.metrics().streams->Value() == 0; }));
  gate->Open();
  const auto begin = std::chrono::steady_clock::now();
  server.engine().Drain(begin + std::chrono::seconds(20));
  server.rpc().Shutdown(begin + std::chrono::seconds(20));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  server.ExpectIdleSoon();
}

// ------------------------------------------------------------------------------------------------
// the device fails

// Every step of a request fails once, the rest goes on as if nothing had been.
TEST(DeviceFaultTest, AStepThatFailsFailsItsOwnRequestOnly) {
  const auto countdown = std::make_shared<std::atomic<int>>(-1);
  const auto fault = [countdown] {
    return countdown->fetch_sub(1) == 0
               ? absl::ResourceExhaustedError("the device has no memory for this step")
               : absl::OkStatus();
  };
  TestServer server({.model = {.fault = fault}});
  Witness witness(server);
  const auto channel = NewChannel(server.address());
  SessionClient client(channel);
  client.Open(OpenWith("failing"));
  std::vector<int32_t> expected;
  uint64_t id = 0;
  for (int step = 0; step < 3; ++step) {  // prefill, and two decodes of its three tokens
    client.SendFrame(RawFrame("front", 9));
    *countdown = step;
    client.SendAct(++id);
    const v1::RequestError error = client.NextError();
    EXPECT_EQ(error.act_id(), id);
    EXPECT_NE(error.code(), 0);
    EXPECT_TRUE(server.engine().Ready());
    witness.Check();
    const std::vector<int32_t> tokens = TokensOf(client.Act(++id));
    if (expected.empty()) expected = tokens;
    EXPECT_EQ(tokens, expected);
  }
}

TEST(DeviceFaultTest, AWorkerThatKeepsFailingIsTakenOut) {
  const auto failing = std::make_shared<std::atomic<bool>>(false);
  const auto fault = [failing] {
    return *failing ? absl::InternalError("device lost") : absl::OkStatus();
  };
  TestServer server({.model = {.fault = fault}});
  SessionClient client(NewChannel(server.address()));
  client.Open(OpenWith("dead"));
  client.SendFrame(RawFrame("front", 9));
  EXPECT_EQ(client.Act(1).act_id(), 1U);
  *failing = true;
  for (uint64_t id = 2; id <= 6; ++id) {
    client.SendAct(id);
    const v1::RequestError error = client.NextError();
    EXPECT_EQ(error.act_id(), id);
    if (id > 4) {
      EXPECT_EQ(error.code(), static_cast<int>(grpc::StatusCode::UNAVAILABLE));
      EXPECT_EQ(error.detail().reason(), v1::ERROR_REASON_WORKER_FAILED);
    }
  }
  EXPECT_FALSE(server.engine().Ready());
  EXPECT_TRUE(
      Eventually([&] { return !ProbeHealth(server.address(), {}, milliseconds(2000)).ok(); }));
  EXPECT_TRUE(server.engine().CheckInvariants().ok());
}

// A word whose embedding is not finite: its requests fail, alone, and nothing of them is found
// again.
TEST(DeviceFaultTest, NotANumberStaysInItsRequest) {
  TestServer server({.model = {.nan_token = '!'}});
  Witness witness(server);
  const auto channel = NewChannel(server.address());
  SessionClient sick(channel);
  sick.Open(OpenWith("a long prompt that others share: !"));
  sick.SendFrame(RawFrame("front", 9));
  SessionClient sharing(channel);
  sharing.Open(OpenWith("a long prompt that others share: ."));
  sharing.SendFrame(RawFrame("front", 9));
  const std::vector<int32_t> expected = TokensOf(sharing.Act(1));
  const double before = server.metrics().model("fake").non_finite->Value();
  for (uint64_t id = 1; id <= 8; ++id) {
    sick.SendAct(id);
    sharing.SendAct(id + 1);
    witness.Check();
    const v1::RequestError error = sick.NextError();
    EXPECT_EQ(error.act_id(), id);
    EXPECT_EQ(error.code(), static_cast<int>(grpc::StatusCode::INTERNAL));
    EXPECT_EQ(error.detail().reason(), v1::ERROR_REASON_NON_FINITE);
    EXPECT_EQ(TokensOf(sharing.NextChunk()), expected);
  }
  EXPECT_EQ(server.metrics().model("fake").non_finite->Value(), before + 8);
  EXPECT_TRUE(server.engine().CheckInvariants().ok());
}

// Refuses the n-th allocation of any kind; a device with that little memory.
class SmallBackend final : public Backend {
 public:
  SmallBackend(std::unique_ptr<Backend> real, int allocations)
      : real_(std::move(real)), left_(allocations) {}
  std::string_view kind() const override { return real_->kind(); }
  std::string Describe() const override { return real_->Describe(); }
  const Ops& ops() const override { return real_->ops(); }
  absl::StatusOr<std::unique_ptr<Stream>> NewStream() override { return real_->NewStream(); }
  absl::StatusOr<std::unique_ptr<Buffer>> Allocate(size_t bytes, MemKind kind) override {
    RETURN_IF_ERROR(Take());
    return real_->Allocate(bytes, kind);
  }
  absl::StatusOr<std::unique_ptr<PackedWeight>> PackLinear(std::span<const TensorView> parts,
                                                           DType dtype) override {
    RETURN_IF_ERROR(Take());
    return real_->PackLinear(parts, dtype);
  }
  absl::StatusOr<std::unique_ptr<PackedWeight>> PackGated(TensorView gate, TensorView up,
                                                          DType dtype) override {
    RETURN_IF_ERROR(Take());
    return real_->PackGated(gate, up, dtype);
  }
  absl::StatusOr<std::unique_ptr<KvStorage>> NewKvStorage(const KvGeometry& geometry,
                                                          uint32_t num_blocks) override {
    RETURN_IF_ERROR(Take());
    return real_->NewKvStorage(geometry, num_blocks);
  }

 private:
  absl::Status Take() {
    return left_-- > 0 ? absl::OkStatus() : absl::ResourceExhaustedError("the device is full");
  }
  const std::unique_ptr<Backend> real_;
  int left_;
};

TEST(DeviceFaultTest, AFullDeviceAtStartIsAnErrorWhereverItHappens) {
  const SteadyClock clock;
  int refused = 0;
  for (int allocations = 0;; ++allocations) {
    ASSERT_LT(allocations, 200);
    std::vector<std::unique_ptr<Backend>> backends;
    backends.push_back(std::make_unique<SmallBackend>(MakeRefBackend({}).value(), allocations));
    absl::StatusOr<std::unique_ptr<Model>> model = FakeModel::Load(*backends[0], {});
    absl::Status status = model.status();
    if (model.ok()) {
      ServedModel served;
      served.name = "fake";
      served.instances.push_back(*std::move(model));
      served.workers = {WorkerId(0)};
      served.kv.num_blocks = 64;
      for (PartitionQuota& quota : served.kv.partitions) quota.cap = served.kv.num_blocks;
      served.embedding_slots = 4;
      served.max_sequences = 4;
      std::vector<ServedModel> models;
      models.push_back(std::move(served));
      EngineOptions options;
      options.classes.push_back({"best_effort"});
      status =
          Engine::Start(options, std::move(backends), std::move(models), clock, nullptr).status();
    }
    if (status.ok()) break;
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    ++refused;
  }
  EXPECT_GT(refused, 10);
}

// ------------------------------------------------------------------------------------------------
// what an engine has learned outlives it

TEST(CostTest, ARestartPredictsWhatItKnew) {
  CostTable before;
  {
    TestServer server;
    Witness witness(server);
    for (int i = 0; i < 10; ++i) witness.Check();
    before = server.engine().Costs().value();
  }
  ASSERT_EQ(before.size(), 1U);
  const uint64_t observed = before.begin()->second.observations();
  EXPECT_GT(observed, 30U);
  TestServer server({.costs = before});
  const CostTable after = server.engine().Costs().value();
  ASSERT_EQ(after.size(), 1U);
  EXPECT_EQ(after.begin()->first, before.begin()->first);
  // It goes on from there: the warm-up is on top.
  EXPECT_GT(after.begin()->second.observations(), observed);
  EXPECT_LT(after.begin()->second.observations(), observed + 40);
  // A model of other weights is another matter.
  TestServer other({.model = {.cameras = {"a", "b"}}, .costs = before});
  EXPECT_NE(other.engine().Costs()->begin()->first, before.begin()->first);
  EXPECT_LT(other.engine().Costs()->begin()->second.observations(), 40U);
}

}  // namespace
}  // namespace saccade::testing
