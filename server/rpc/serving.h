#pragma once
// Serving: the engine as calls see it. Immutable after Create; any thread. Turns messages into
// requests; the streams and one-shot calls above it only move them.
#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/fair_executor.h"
#include "base/status.h"
#include "config/config.h"
#include "engine/engine.h"
#include "metrics/metrics.h"
#include "rpc/codec.h"
#include "session/catalog.h"
#include "session/content_store.h"
#include "session/session.h"
#include "session/session_manager.h"

namespace saccade {

class Serving {
 public:
  // FAILED_PRECONDITION when the configuration and the engine's models do not go together.
  // `metrics` may be null. `decoding` runs what decodes frames; it outlives every call.
  static absl::StatusOr<std::shared_ptr<Serving>> Create(const Config& config, Engine& engine,
                                                         FairExecutor& decoding, const Clock& clock,
                                                         Metrics* metrics);

  Engine& engine() const { return engine_; }
  FairExecutor& decoding() const { return decoding_; }
  const Clock& clock() const { return clock_; }
  const Config& config() const { return config_; }
  const Catalog& catalog() const { return *catalog_; }
  SessionManager& sessions() { return *sessions_; }
  const ContentStore& contents() const { return contents_; }
  const std::vector<v1::Model>& models() const { return models_; }
  const std::vector<v1::LatencyClass>& classes() const { return classes_; }
  const v1::Limits& limits() const { return limits_; }

  // What the fields of Open and PredictRequest name, resolved. `prefix` is "open" or "", for
  // errors.
  struct Target {
    const SessionModel* model = nullptr;
    const StatisticsSpec* statistics = nullptr;
    const v1::ActionSpace* action_space = nullptr;
    ClassId klass;
  };
  absl::StatusOr<Target> Resolve(std::string_view model, std::string_view statistics_key,
                                 std::string_view latency_class, std::string_view prefix) const;
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
  // `pixels` of it are taken from the session's rate.
  absl::StatusOr<Session::Fate> PublishFrame(Session& session, const v1::VisionFrame& frame,
                                             uint64_t pixels, TimePoint received,
                                             std::string_view prefix);
  absl::Status SetText(Session& session, const v1::TextInput& text) const;
  absl::Status SetState(Session& session, const v1::StateInput& state) const;

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
  void CountSuperseded(ModelId model) const;
  // One message or request was refused before the engine saw it.
  void CountRefused(const absl::Status& status) const;
  void SetSessionOpen(ModelId model, bool open) const;
  void SetStreamOpen(bool open) const;

 private:
  Serving(const Config& config, Engine& engine, FairExecutor& decoding, const Clock& clock,
          Metrics* metrics);
  absl::StatusOr<Frame> ReadFrame(const SessionModel& model, uint32_t camera,
                                  const v1::VisionFrame& frame, TimePoint received,
                                  std::string_view prefix);
  static absl::Status CheckFrame(const v1::VisionFrame& frame, std::string_view prefix);
  // When a request must be answered: its own or its class's deadline, within the call's.
  static TimePoint DeadlineOf(const LatencyClass& latency, const ActFields& fields,
                              TimePoint arrival, TimePoint call_deadline);
  absl::StatusOr<std::vector<int32_t>> ReadPrompt(const Tokenizer& tokenizer,
                                                  const v1::GenerateRequest& request) const;
  // By camera of the model.
  absl::StatusOr<std::vector<std::optional<Frame>>> ReadFrames(const SessionModel& model,
                                                               const v1::GenerateRequest& request,
                                                               TimePoint received);
  // Counts a frame that came, and, when `read` refuses it, why.
  template <class Read>
  absl::Status CountFrame(ModelId model, Read&& read) const {
    ModelMetrics* const metrics = metrics_ == nullptr ? nullptr : &metrics_->model(model);
    if (metrics != nullptr) metrics->frames_received->Increment();
    absl::Status status = read();
    if (metrics != nullptr && !status.ok()) {
      metrics->RejectFrame(static_cast<Reason>(ErrorDetailOf(status).reason()));
    }
    return status;
  }

  const Config config_;
  Engine& engine_;
  FairExecutor& decoding_;
  const Clock& clock_;
  Metrics* const metrics_;
  SessionLimits session_limits_;
  ImageLimits image_limits_;
  std::unique_ptr<Catalog> catalog_;
  std::unique_ptr<SessionManager> sessions_;
  ContentStore contents_;
  std::vector<v1::Model> models_;          // by ModelId
  std::vector<v1::LatencyClass> classes_;  // by ClassId
  v1::Limits limits_;
};

}  // namespace saccade
