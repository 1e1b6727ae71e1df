#pragma once
// Serving: the engine as calls see it. Any thread. Turns messages into requests; the streams and
// one-shot calls above it only move them. Models and limits change while it runs: each change makes
// a new immutable snapshot, and whoever has the old one goes on with it.
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/fair_executor.h"
#include "base/status.h"
#include "base/ticker.h"
#include "config/config.h"
#include "engine/engine.h"
#include "metrics/metrics.h"
#include "rpc/codec.h"
#include "session/catalog.h"
#include "session/content_store.h"
#include "session/session.h"
#include "session/session_manager.h"

namespace saccade {

// A model as calls see it. Keeps alive what it names.
struct OfferedModel : SessionModel {
  ModelRef served;
  v1::Model proto;
  ModelMetrics* metrics = nullptr;  // null without a Metrics
};

// The configuration with the limits of now, and what follows from them.
struct Settings {
  Config config;
  SessionLimits session;
  ImageLimits image;
  v1::Limits limits;
};

class Serving {
 public:
  // FAILED_PRECONDITION when the configuration and the engine's models do not go together.
  // `metrics` and `memory` may be null. `decoding` runs what decodes frames; it outlives every
  // call.
  static absl::StatusOr<std::shared_ptr<Serving>> Create(const Config& config, Engine& engine,
                                                         FairExecutor& decoding, const Clock& clock,
                                                         Metrics* metrics,
                                                         MemoryBudget* memory = nullptr);

  Engine& engine() const { return engine_; }
  FairExecutor& decoding() const { return decoding_; }
  Ticker& ticker() { return ticker_; }
  const Clock& clock() const { return clock_; }
  SessionManager& sessions() { return *sessions_; }
  const ContentStore& contents() const { return contents_; }
  const std::vector<v1::LatencyClass>& classes() const { return classes_; }

  std::shared_ptr<const Settings> settings() const;
  // Grows with every change of the settings.
  uint64_t settings_version() const { return settings_version_.load(std::memory_order_acquire); }
  // `config` is valid, and differs from the one now in limits only. The engine's are told, too.
  void SetConfig(const Config& config);

  // Those that new sessions can have.
  std::vector<std::shared_ptr<const OfferedModel>> models() const;
  absl::StatusOr<std::shared_ptr<const OfferedModel>> FindModel(std::string_view name,
                                                                std::string_view field) const;
  // From now on new sessions get `served`, in place of what has its name. FAILED_PRECONDITION when
  // the configuration does not go together with the model.
  absl::Status Offer(ModelRef served, const ModelConfig& config);
  // New sessions cannot have it any more.
  void Withdraw(ModelId id);
  bool Offers(ModelId id) const;

  // What the fields of Open and PredictRequest name, resolved. `prefix` is "open" or "", for
  // errors.
  struct Target {
    std::shared_ptr<const OfferedModel> model;  // keeps alive the next two
    const StatisticsSpec* statistics = nullptr;
    const v1::ActionSpace* action_space = nullptr;
    ClassId klass;
  };
  absl::StatusOr<Target> Resolve(std::string_view model, std::string_view statistics_key,
                                 std::string_view latency_class, std::string_view prefix) const;
  // INVALID_ARGUMENT listing the names; empty is `fallback`.
  absl::StatusOr<ClassId> FindClass(std::string_view name, ClassId fallback,
                                    std::string_view field) const {
    return catalog()->FindClass(name, fallback, field);
  }
  std::unique_ptr<Session> NewSession(SessionId id, const Target& target, TimePoint now) const;

  // Pixels that decoding will make, as the headers state them; none for a frame that is refused
  // unseen.
  uint64_t PixelsToDecode(const v1::VisionFrame& frame) const;
  template <class Request>  // PredictRequest, GenerateRequest
  uint64_t PixelsToDecode(const Request& request) const {
    uint64_t pixels = 0;
    for (const v1::VisionFrame& frame : request.frames()) pixels += PixelsToDecode(frame);
    return pixels;
  }
  static FairExecutor::Size DecodeSize(uint64_t pixels);
  // An act request that can only be refused: it is invalid, or its deadline has passed and its
  // class runs nothing late.
  bool IsTooLate(const Target& target, const v1::ActRequest& act, TimePoint arrival,
                 TimePoint call_deadline, TimePoint now) const;
  // A frame into its mailbox: checks, decoding, resizing, identity. Counts what becomes of it.
  // `pixels` of it are taken from the session's rate. `touching`, which guards the session, is let
  // go while the frame is decoded.
  absl::StatusOr<Session::Fate> PublishFrame(Session& session, const v1::VisionFrame& frame,
                                             uint64_t pixels, TimePoint received,
                                             std::string_view prefix,
                                             std::unique_lock<std::mutex>* touching = nullptr);
  absl::Status SetText(Session& session, const v1::TextInput& text) const;
  absl::Status SetState(Session& session, const v1::StateInput& state) const;

  // What PrepareAct refuses in `act` whatever the session holds.
  absl::Status CheckAct(const Target& target, const v1::ActRequest& act,
                        std::string_view prefix) const;
  // Everything of an act request but its sink. `call_deadline` bounds it too. `info` gets what the
  // answer needs.
  absl::StatusOr<ActRequest> PrepareAct(Session& session, const Target& target,
                                        const v1::ActRequest& act, TimePoint arrival,
                                        TimePoint call_deadline, std::string_view prefix,
                                        ActInfo& info) const;
  // Everything of a text request but its sink. `info` gets what the answer needs. `id` is the
  // call's.
  absl::StatusOr<ActRequest> PrepareText(SessionId id, const v1::GenerateRequest& request,
                                         TimePoint received, TimePoint call_deadline,
                                         TextInfo& info);
  // A frame gave way to a newer one before it was decoded.
  static void CountSuperseded(const OfferedModel& model);
  // One message or request was refused before the engine saw it.
  // The frames of a call without a session, each of another camera of the model: read(camera,
  // frame, prefix) for one after the other. INVALID_ARGUMENT names "frames" or "frames[i].camera".
  using ReadEach =
      std::function<absl::Status(uint32_t, const v1::VisionFrame&, const std::string&)>;
  static absl::Status EachFrame(const ModelSpec& spec,
                                const google::protobuf::RepeatedPtrField<v1::VisionFrame>& frames,
                                const ReadEach& read);
  void CountRefused(const absl::Status& status) const;
  static void SetSessionOpen(const OfferedModel& model, bool open);
  void SetStreamOpen(bool open) const;

 private:
  using Offered = std::vector<std::shared_ptr<const OfferedModel>>;

  Serving(const Config& config, Engine& engine, FairExecutor& decoding, const Clock& clock,
          Metrics* metrics, MemoryBudget* memory);
  absl::StatusOr<Frame> ReadFrame(const SessionModel& model, uint32_t camera,
                                  const v1::VisionFrame& frame, TimePoint received,
                                  std::string_view prefix);
  static absl::StatusOr<std::shared_ptr<const FlowInput>> ReadFlow(const Target& target,
                                                                   const v1::ActRequest& act,
                                                                   const ActFields& fields,
                                                                   const StateRef& state,
                                                                   std::string_view prefix);
  static absl::Status ReadCommitted(const Target& target, const v1::CommittedActions& committed,
                                    const std::string& prefix, FlowInput& flow);
  static absl::Status CheckFrame(const v1::VisionFrame& frame, std::string_view prefix);
  // When a request must be answered: its own or its class's deadline, within the call's.
  static TimePoint DeadlineOf(const LatencyClass& latency, const ActFields& fields,
                              TimePoint arrival, TimePoint call_deadline);
  absl::StatusOr<std::vector<int32_t>> ReadPrompt(const Tokenizer& tokenizer,
                                                  const v1::GenerateRequest& request) const;
  // By camera of the model.
  absl::StatusOr<std::vector<std::optional<Frame>>> ReadFrames(const OfferedModel& model,
                                                               const v1::GenerateRequest& request,
                                                               TimePoint received);
  // What `read` gives, a StatusOr. Counts a frame that came, and, when `read` refuses it, why.
  template <class Read>
  static auto CountFrame(ModelMetrics* metrics, Read&& read) {
    if (metrics != nullptr) metrics->frames_received->Increment();
    auto result = read();
    if (metrics != nullptr && !result.ok()) {
      metrics->RejectFrame(static_cast<Reason>(ErrorDetailOf(result.status()).reason()));
    }
    return result;
  }
  std::shared_ptr<const Catalog> catalog() const;
  void SetOfferedLocked(const Offered& offered);

  Engine& engine_;
  FairExecutor& decoding_;
  const Clock& clock_;
  Metrics* const metrics_;
  MemoryBudget* const memory_;
  std::unique_ptr<SessionManager> sessions_;
  ContentStore contents_;
  Ticker ticker_;
  std::vector<std::string> class_names_;   // by ClassId
  std::vector<v1::LatencyClass> classes_;  // by ClassId
  std::atomic<uint64_t> settings_version_{1};
  mutable std::mutex mu_;
  std::shared_ptr<const Settings> settings_;
  std::shared_ptr<const Catalog> catalog_;                      // its models are OfferedModels
  std::map<std::string, std::shared_ptr<ModelPlaces>> places_;  // by name, over all its loads
};

}  // namespace saccade
