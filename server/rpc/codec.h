#pragma once
// Domain types to protobuf messages and back. Pure functions; no gRPC.
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "config/config.h"
#include "engine/engine.h"
#include "saccade/v1/inference.pb.h"
#include "saccade/v1/models.pb.h"
#include "saccade/v1/server.pb.h"
#include "session/session.h"

namespace saccade {

// Every status that leaves the server has a reason: one without is given the reason of its code.
v1::ErrorDetail ErrorDetailOf(const absl::Status& status);
// Its message, cut where it is too long to be a header: gRPC drops the whole answer then.
std::string StatusMessage(const absl::Status& status);
// Content of `grpc-status-details-bin`: a serialised v1::RpcStatus.
std::string StatusDetails(const absl::Status& status);
// As an event; `act_id` stays unset.
v1::RequestError RequestErrorOf(const absl::Status& status, uint64_t message_number);

v1::Limits LimitsOf(const Config& config);
v1::LatencyClass LatencyClassOf(const LatencyClass& klass);
// FAILED_PRECONDITION when `space` does not divide the actions of every set of statistics.
absl::StatusOr<v1::Model> ModelOf(const ModelSpec& spec, const ModelConfig& config);

// One act request on its way through the engine.
struct ActInfo {
  uint64_t act_id = 0;
  uint64_t message_number = 0;
  TimePoint arrival{};
  TimePoint deadline = kNever;
  std::string_view latency_class;   // of the engine's options
  std::string_view statistics_key;  // of the model's spec
  const v1::ActionSpace* action_space = nullptr;
  std::shared_ptr<const Observation> observation;
  const ModelSpec* spec = nullptr;
  std::shared_ptr<const SessionModel> model;  // keeps alive what the views above are of
};
// One text request on its way through the engine.
struct TextInfo {
  TimePoint arrival{};
  TimePoint deadline = kNever;
  std::string_view latency_class;  // of the engine's options
  std::shared_ptr<const Observation> observation;
  std::shared_ptr<const void> model;  // keeps the next two
  const ModelSpec* spec = nullptr;
  const Tokenizer* tokenizer = nullptr;
  uint32_t samples = 1;
  std::vector<int32_t> stop_tokens;
  bool Stops(int32_t token) const;
};
v1::GenerateResult GenerateResultOf(const TextInfo& info, const ActResult& result);

// All but decode_us, which is of frames.
void SetTimings(const Timings& timings, v1::Timings& out);
v1::ActionChunk ActionChunkOf(const ActInfo& info, const ActResult& result);

// Bounds checks and conversion. INVALID_ARGUMENT names "<prefix>.<field>"; an empty prefix and its
// dot are left out.
struct ActFields {
  std::optional<Micros> deadline;  // own one, from arrival
  Micros max_frame_age{0};
  uint32_t samples = 1;
  float temperature = 0;
  uint32_t flow_steps = 0;
  uint32_t least_flow_steps = 0;
};
absl::StatusOr<ActFields> ReadActFields(const v1::ActRequest& act, uint32_t max_samples,
                                        std::string_view prefix);
absl::StatusOr<std::vector<ExecutedAction>> ReadExecuted(const v1::ExecutedActions& executed);

// The rows of a frame, which outlives them. INVALID_ARGUMENT names "<prefix>.<field>"; what the
// rows themselves say names "image", and is about `ImageField`.
absl::StatusOr<std::unique_ptr<ImageRows>> OpenFrame(const v1::VisionFrame& frame,
                                                     const ImageLimits& limits,
                                                     std::string_view prefix);
std::string ImageField(const v1::VisionFrame& frame, std::string_view prefix);

}  // namespace saccade
