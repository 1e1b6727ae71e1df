// Any bytes are what clients and time do to a Session stream and to Predict and Generate calls, on
// a transport of this test's own: messages (their bytes as they came), writes that are done, hours
// that pass, endings. Every act request gets exactly one answer as long as the client is there,
// texts come token by token as the contract says, every call ends once, and afterwards nothing is
// held.
//
// An operation is a byte: the lower four bits say which, the upper four may say of which Generate
// call (0: of the stream). Some have an argument, a byte or (messages) two of length and that many
// more.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backend/ref/ref_backend.h"
#include "base/clock.h"
#include "base/logging.h"
#include "model/tokenizer.h"
#include "rpc/generate_core.h"
#include "rpc/grpc_log.h"
#include "rpc/predict_core.h"
#include "rpc/session_core.h"
#include "tests/rpc/fake_model.h"

namespace saccade::testing {
namespace {

void Require(bool condition, int line = __builtin_LINE()) {
  if (condition) return;
  std::fprintf(stderr, "rpc_fuzz.cc:%d does not hold\n", line);
  std::abort();
}

template <class Message>
absl::StatusOr<Message> Parse(std::span<const uint8_t> bytes) {
  Message message;
  if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())))
    return InvalidField("message", "the bytes are no message of this call");
  return message;
}

void CheckChunk(const v1::ActionChunk& chunk) {
  Require(chunk.samples_size() > 0);
  for (const v1::ActionSample& sample : chunk.samples()) {
    Require(sample.values_size() == 3 && sample.token_ids_size() == 3);
    for (const double value : sample.values()) Require(std::isfinite(value));
  }
  Require(!(chunk.late() && chunk.deadline_met()));
}

void CheckError(int code, const v1::ErrorDetail& detail) {
  Require(code != 0 && detail.reason() != v1::ERROR_REASON_UNSPECIFIED);
  Require(detail.reason() != v1::ERROR_REASON_INTERNAL);
}

// A stream's transport. What the core asks for is remembered; the fuzzer completes it.
class Port final : public StreamPort {
 public:
  void Read() override {
    const std::lock_guard lock(mu_);
    Require(!reading_ && !finished_);
    reading_ = true;
  }
  void Write(const std::string& bytes) override {
    v1::SessionResponse response;
    Require(response.ParseFromString(bytes));
    const std::lock_guard lock(mu_);
    Require(!writing_ && !finished_);
    writing_ = true;
    Account(response);
  }
  void Finish(const absl::Status& status) override {
    const std::lock_guard lock(mu_);
    Require(!finished_ && !writing_);
    finished_ = status;
  }
  void Abort() override {}

  bool TakeRead() {
    const std::lock_guard lock(mu_);
    return std::exchange(reading_, false);
  }
  bool TakeWrite() {
    const std::lock_guard lock(mu_);
    return std::exchange(writing_, false);
  }
  std::optional<absl::Status> finished() const {
    const std::lock_guard lock(mu_);
    return finished_;
  }
  // The `number`th message goes to the core.
  void Sent(uint64_t number, const absl::StatusOr<v1::SessionRequest>& message) {
    if (!message.ok() || !message->has_act()) return;
    const std::lock_guard lock(mu_);
    unanswered_[number] = message->act().id();
  }
  size_t unanswered() const {
    const std::lock_guard lock(mu_);
    return unanswered_.size();
  }

 private:
  void Account(const v1::SessionResponse& response) {
    if (response.has_chunk()) {
      CheckChunk(response.chunk());
      // Numbers are used one after the other, so the oldest request of this one is meant.
      for (auto it = unanswered_.begin(); it != unanswered_.end(); ++it) {
        if (it->second != response.chunk().act_id()) continue;
        unanswered_.erase(it);
        return;
      }
      Require(false);  // nobody asked
    }
    if (!response.has_error()) return;
    const v1::RequestError& error = response.error();
    CheckError(error.code(), error.detail());
    const auto it = unanswered_.find(error.message_number());
    if (it == unanswered_.end()) {
      Require(!error.has_act_id());
      return;
    }
    Require(!error.has_act_id() || error.act_id() == it->second);
    unanswered_.erase(it);
  }

  mutable std::mutex mu_;
  bool reading_ = false;
  bool writing_ = false;
  std::map<uint64_t, uint64_t> unanswered_;  // message number to act id
  std::optional<absl::Status> finished_;
};

// The engine with a FakeModel of two cameras, for all runs of the process.
class World {
 public:
  World() {
    config_.models.resize(1);
    config_.models[0].name = "fake";
    config_.models[0].default_class = "best_effort";
    config_.limits.max_pixels = 10'000;
    config_.limits.max_image_bytes = 32'768;
    config_.limits.max_instruction_bytes = 256;
    config_.limits.max_instruction_tokens = 200;
    config_.limits.outbox_messages = 8;
    config_.limits.acts_in_flight = 4;
    config_.limits.sessions_per_peer = 3;
    config_.limits.max_samples = 3;
    config_.limits.max_new_tokens = 24;
    config_.limits.max_beams = 3;
    config_.limits.session_idle_s = 20;
    std::vector<std::unique_ptr<Backend>> backends;
    backends.push_back(MakeRefBackend({}).value());
    ServedModel served;
    served.name = "fake";
    served.instances.push_back(FakeModel::Load(*backends[0], {.cameras = {"front", "wrist"},
                                                              .statistics = {"robot", "car"},
                                                              .state_dim = 2,
                                                              .gate = gate_})
                                   .value());
    served.workers = {WorkerId(0)};
    served.kv.num_blocks = 64;
    for (PartitionQuota& quota : served.kv.partitions) quota.cap = served.kv.num_blocks;
    served.embedding_slots = 8;
    served.max_sequences = 8;
    std::vector<ServedModel> models;
    models.push_back(std::move(served));
    EngineOptions options;
    options.max_new_tokens = config_.limits.max_new_tokens;
    for (const ClassConfig& klass : config_.classes) {
      options.classes.push_back({klass.name, Micros(static_cast<int64_t>(klass.deadline_ms * 1000)),
                                 klass.tier, klass.preferred, klass.shares, klass.on_late,
                                 klass.max_queued});
    }
    engine_ =
        Engine::Start(options, std::move(backends), std::move(models), clock_, nullptr).value();
    serving_ = Serving::Create(config_, *engine_, *decoding_, clock_, nullptr).value();
  }

  const std::shared_ptr<Serving>& serving() { return serving_; }
  const LimitsConfig& limits() const { return config_.limits; }
  ManualClock& clock() { return clock_; }
  void OpenGate(bool open) {
    gate_open_ = open;
    open ? gate_->Open() : gate_->Close();
  }

  // Until frames are decoded and the engine has done what it can (nothing, behind a closed gate).
  void Settle() {
    Decoded();
    while (!Quiet()) std::this_thread::yield();
    Require(engine_->CheckInvariants().ok());  // and the deliveries of the turn before are over
  }
  // Settled, and soon nothing is held but what is cached: a step may still run that names what was
  // cancelled.
  void RequireIdle() {
    OpenGate(true);
    Settle();
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (HoldsAnything()) {
      Require(std::chrono::steady_clock::now() < until);
      std::this_thread::yield();
    }
    Require(engine_->CheckInvariants().ok());
    Require(serving_->sessions().open() == 0);
  }

 private:
  void Decoded() {
    while (decoding_->waiting() > 0 || decoding_->idle() == 0) std::this_thread::yield();
  }
  bool HoldsAnything() {
    const SchedulerStats stats = engine_->Stats().value();
    for (const auto& lane : stats.lanes) {
      if (lane.embeddings_held != 0) return true;
      for (const PartitionStats& partition : lane.kv.partitions) {
        if (partition.held != 0) return true;
      }
    }
    return false;
  }
  bool Quiet() {
    if (!gate_open_) return true;
    const absl::StatusOr<SchedulerStats> stats = engine_->Stats();
    for (const auto& klass : stats->classes) {
      if (klass.queued + klass.running != 0) return false;
    }
    return true;
  }

  Config config_;
  ManualClock clock_;
  std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
  bool gate_open_ = true;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<FairExecutor> decoding_ = FairExecutor::Create(1).value();
  std::shared_ptr<Serving> serving_;
};

// One stream from its beginning to its end.
class Client {
 public:
  explicit Client(World& world) : world_(world) {
    core_ = std::make_shared<SessionCore>(world.serving(),
                                          world.serving()->sessions().Admit("a").value(), kNever);
    core_->Start(&port_);
  }
  ~Client() {
    core_->OnCancelled();
    if (port_.TakeWrite()) core_->OnWriteDone(false);
    Require(port_.finished().has_value());
    core_->Detach();
  }

  void Send(std::span<const uint8_t> bytes) {
    if (!port_.TakeRead()) return;
    absl::StatusOr<v1::SessionRequest> message = Parse<v1::SessionRequest>(bytes);
    port_.Sent(++sent_, message);
    core_->OnMessage(std::move(message), world_.clock().Now());
  }
  void WriteDone(bool ok) {
    if (!port_.TakeWrite()) return;
    lossy_ = lossy_ || !ok;
    core_->OnWriteDone(ok);
  }
  void Tick() { core_->Tick(world_.clock().Now()); }
  void Cancel() { core_->OnCancelled(); }
  void NotifyDraining() { core_->NotifyDraining(); }
  void Close() { core_->CloseWhenIdle(absl::UnavailableError("bye")); }
  void HalfClose() {
    if (port_.TakeRead()) core_->OnReadsDone();
  }
  // The client reads to the end: every answer comes.
  void EndInOrder() {
    HalfClose();
    for (int i = 0; i < 64 && !port_.finished(); ++i) {
      world_.Settle();
      WriteDone(true);
      HalfClose();
    }
    const std::optional<absl::Status> finished = port_.finished();
    if (finished && finished->ok() && !lossy_) Require(port_.unanswered() == 0);
  }

 private:
  World& world_;
  Port port_;
  uint64_t sent_ = 0;
  bool lossy_ = false;
  std::shared_ptr<SessionCore> core_;
};

// One Predict call.
class Call {
 public:
  Call(World& world, std::span<const uint8_t> bytes, bool cancelled) {
    Serving& serving = *world.serving();
    absl::StatusOr<SessionLease> lease = serving.sessions().Admit("b");
    if (!lease.ok()) {
      ended_ = true;
      return;
    }
    absl::StatusOr<v1::PredictRequest> request = Parse<v1::PredictRequest>(bytes);
    const uint64_t pixels = request.ok() ? serving.PixelsToDecode(*request) : 0;
    core_ =
        std::make_shared<PredictCore>(world.serving(), *std::move(lease),
                                      [this](const absl::StatusOr<v1::PredictResponse>& response) {
                                        Require(!ended_.exchange(true));
                                        if (response.ok()) {
                                          CheckChunk(response->chunk());
                                        } else {
                                          CheckError(static_cast<int>(response.status().code()),
                                                     ErrorDetailOf(response.status()));
                                        }
                                      });
    core_->Start(std::move(request), pixels, std::make_shared<FairExecutor::Account>(),
                 world.clock().Now(), kNever);
    if (cancelled) core_->OnCancelled();
  }
  // Everything is settled.
  void RequireEnded() const { Require(ended_); }

 private:
  std::atomic<bool> ended_{false};
  std::shared_ptr<PredictCore> core_;
};

// One Generate call. It is the transport, too.
class TextCall final : public GeneratePort {
 public:
  TextCall(World& world, std::span<const uint8_t> bytes) {
    Serving& serving = *world.serving();
    absl::StatusOr<SessionLease> lease = serving.sessions().Admit("c");
    if (!lease.ok()) return;
    absl::StatusOr<v1::GenerateRequest> request = Parse<v1::GenerateRequest>(bytes);
    const uint64_t pixels = request.ok() ? serving.PixelsToDecode(*request) : 0;
    if (request.ok()) request_ = *request;
    const uint32_t most = world.limits().max_new_tokens;
    if (request_.max_new_tokens() == 0) request_.set_max_new_tokens(std::min(64U, most));
    if (request_.num_sequences() == 0) request_.set_num_sequences(1);
    core_ = std::make_shared<GenerateCore>(world.serving(), *std::move(lease), this);
    core_->Start(std::move(request), pixels, std::make_shared<FairExecutor::Account>(),
                 world.clock().Now(), kNever);
  }
  // Everything is settled. The client reads to the end.
  ~TextCall() override {
    if (core_ == nullptr) return;
    while (writing()) OnWriteDone(true);
    core_->Detach();
    Require(finished_.has_value());
    // The answer is whole, or there is an error and none.
    if (!cancelled_ && !lossy_) Require(finished_->ok() == has_result_);
    if (!finished_->ok()) {
      Require(!has_result_);
      CheckError(static_cast<int>(finished_->code()), ErrorDetailOf(*finished_));
    }
  }

  void Write(const std::string& bytes) override {
    v1::GenerateResponse response;
    Require(response.ParseFromString(bytes));
    const std::lock_guard lock(mu_);
    Require(!writing_ && !finished_ && !cancelled_ && !has_result_);
    writing_ = true;
    if (lossy_) return;  // this one will not arrive either
    if (response.has_token()) {
      Account(response.token());
    } else {
      Require(response.has_result());
      has_result_ = true;
      Account(response.result());
    }
  }
  void Finish(const absl::Status& status) override {
    const std::lock_guard lock(mu_);
    Require(!finished_ && !writing_);
    finished_ = status;
  }

  void OnWriteDone(bool ok) {
    if (core_ == nullptr) return;
    {
      const std::lock_guard lock(mu_);
      if (!std::exchange(writing_, false)) return;
      lossy_ = lossy_ || !ok;
    }
    core_->OnWriteDone(ok);
  }
  void Cancel() {
    if (core_ == nullptr) return;
    core_->OnCancelled();
    const std::lock_guard lock(mu_);
    cancelled_ = true;  // nothing but its end comes from now on
  }

 private:
  struct Sequence {
    std::vector<int32_t> tokens;
    std::string text;
  };

  bool writing() const {
    const std::lock_guard lock(mu_);
    return writing_;
  }
  bool Stops(int32_t token) const {
    const auto& stops = request_.stop_token_ids();
    return token == FakeModel::kBos + 1 ||
           std::find(stops.begin(), stops.end(), token) != stops.end();
  }
  void Account(const v1::GeneratedToken& token) {
    Require(request_.num_beams() <= 1 && token.sequence() < request_.num_sequences());
    Sequence& sequence = sequences_[token.sequence()];
    Require(token.index() == sequence.tokens.size());
    Require(token.index() < request_.max_new_tokens());
    Require(sequence.tokens.empty() || !Stops(sequence.tokens.back()));
    Require(IsValidUtf8(token.text()));
    sequence.tokens.push_back(token.token_id());
    sequence.text += token.text();
  }
  void Account(const v1::GenerateResult& result) const {
    const bool beams = request_.num_beams() > 1;
    const int count = static_cast<int>(request_.num_sequences());
    Require(beams ? result.sequences_size() > 0 && result.sequences_size() <= count
                  : result.sequences_size() == count);
    Require(!(result.late() && result.deadline_met()));
    double score = std::numeric_limits<double>::infinity();
    for (int i = 0; i < result.sequences_size(); ++i) {
      const v1::GeneratedSequence& s = result.sequences(i);
      const std::vector<int32_t> tokens(s.token_ids().begin(), s.token_ids().end());
      Require(!tokens.empty() && tokens.size() <= request_.max_new_tokens());
      // A stop token is the last, and then it is why.
      const auto stop = std::find_if(tokens.begin(), tokens.end(),
                                     [this](int32_t token) { return Stops(token); });
      if (s.finish_reason() == v1::FINISH_REASON_STOP) {
        Require(stop == tokens.end() - 1);
      } else {
        Require(s.finish_reason() == v1::FINISH_REASON_LENGTH && stop == tokens.end());
        Require(tokens.size() == request_.max_new_tokens());
      }
      Require(IsValidUtf8(s.text()));
      Require(std::isfinite(s.score()) && s.score() <= score && s.log_probability() <= 0);
      score = s.score();
      if (beams) continue;
      Require(s.score() == 0 && s.log_probability() == 0);
      const Sequence& streamed = sequences_.at(static_cast<uint32_t>(i));
      Require(tokens == streamed.tokens && s.text().starts_with(streamed.text));
    }
  }

  v1::GenerateRequest request_;  // with its defaults
  mutable std::mutex mu_;
  // Under mu_.
  bool writing_ = false;
  bool lossy_ = false;
  bool cancelled_ = false;
  bool has_result_ = false;
  std::map<uint32_t, Sequence> sequences_;  // as streamed
  std::optional<absl::Status> finished_;
  std::shared_ptr<GenerateCore> core_;  // null: there was no place for the call
};

void Run(World& world, std::span<const uint8_t> bytes) {
  const auto byte = [&]() -> uint8_t {
    if (bytes.empty()) return 0;
    const uint8_t first = bytes.front();
    bytes = bytes.subspan(1);
    return first;
  };
  const auto message = [&] {
    const size_t low = byte();
    const size_t length = low | size_t{byte()} << 8;
    const size_t size = std::min(bytes.size(), length);
    const std::span<const uint8_t> content = bytes.first(size);
    bytes = bytes.subspan(size);
    return content;
  };
  auto client = std::make_unique<Client>(world);
  std::vector<std::unique_ptr<Call>> calls;
  std::vector<std::unique_ptr<TextCall>> texts;
  const auto text_of = [&](uint8_t op) -> TextCall* {
    return op < 16 || texts.empty() ? nullptr : texts[(op / 16 - 1) % texts.size()].get();
  };
  const auto write_done = [&](uint8_t op, bool ok) {
    TextCall* const text = text_of(op);
    text != nullptr ? text->OnWriteDone(ok) : client->WriteDone(ok);
  };
  while (!bytes.empty()) {
    const uint8_t op = byte();
    switch (op % 16) {
      case 0:
      case 1:
        client->Send(message());
        world.Settle();
        break;
      case 2:
        client->Send(message());
        break;
      case 3:
        if (op >= 128 && op < 240) {
          if (texts.size() < 8) texts.push_back(std::make_unique<TextCall>(world, message()));
        } else {
          if (calls.size() < 8)
            calls.push_back(std::make_unique<Call>(world, message(), op >= 240));
        }
        break;
      case 4:
      case 5:
        write_done(op, true);
        break;
      case 6:
        write_done(op, false);
        break;
      case 7: {
        const int64_t milliseconds = byte();
        world.clock().Advance(Micros(milliseconds * milliseconds * 1000));  // up to a minute
        client->Tick();
        break;
      }
      case 8:
        world.Settle();
        break;
      case 9:
        world.OpenGate(false);
        break;
      case 10:
        world.OpenGate(true);
        break;
      case 11:
        client->HalfClose();
        break;
      case 12:
        client->NotifyDraining();
        break;
      case 13:
        client->Close();
        break;
      case 14:
        if (TextCall* const text = text_of(op)) {
          text->Cancel();
        } else {
          client->Cancel();
        }
        break;
      case 15:
        client = nullptr;
        client = std::make_unique<Client>(world);
        break;
    }
  }
  world.OpenGate(true);
  client->EndInOrder();
  client = nullptr;
  world.RequireIdle();
  for (const auto& call : calls) call->RequireEnded();
}

}  // namespace
}  // namespace saccade::testing

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  if (!saccade::InitLogging({.level = saccade::LogLevel::kError}).ok()) return 1;
  saccade::RouteGrpcLog();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static saccade::testing::World world;
  saccade::testing::Run(world, {data, size});
  return 0;
}
