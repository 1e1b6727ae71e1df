// Serving, the part for text: a GenerateRequest becomes a request of the engine.
#include <algorithm>
#include <optional>
#include <utility>

#include "base/strings.h"
#include "rpc/serving.h"
#include "session/prompt_timeline.h"

namespace saccade {
namespace {

constexpr uint32_t kDefaultNewTokens = 64;
constexpr int kMaxStopTokens = 8;
constexpr float kMaxLengthPenalty = 10;

// The first class that prefers text, where a request names none.
ClassId TextClass(std::span<const LatencyClass> classes, ClassId fallback) {
  const auto found = std::find_if(classes.begin(), classes.end(), [](const LatencyClass& klass) {
    return klass.preferred == Modality::kText;
  });
  return found == classes.end() ? fallback : ClassId(static_cast<int32_t>(found - classes.begin()));
}

// Everything that sampling, beams and ends say. INVALID_ARGUMENT names the field.
absl::StatusOr<TextRequest> ReadText(const v1::GenerateRequest& request, const ModelSpec& spec,
                                     const LimitsConfig& limits) {
  TextRequest text;
  if (request.max_new_tokens() > limits.max_new_tokens) {
    return InvalidField("max_new_tokens", StrCat("is ", request.max_new_tokens(), ", the limit is ",
                                                 limits.max_new_tokens));
  }
  text.max_new_tokens = request.max_new_tokens() > 0
                            ? request.max_new_tokens()
                            : std::min(kDefaultNewTokens, limits.max_new_tokens);
  if (request.num_beams() > limits.max_beams) {
    return InvalidField("num_beams",
                        StrCat("is ", request.num_beams(), ", the limit is ", limits.max_beams));
  }
  if (!(request.top_p() >= 0 && request.top_p() <= 1)) {  // written so that NaN fails
    return InvalidField("top_p", "must be from 0 to 1");
  }
  text.top_p = request.top_p() > 0 ? request.top_p() : 1;
  if (!request.ignore_eos()) text.stop_tokens = spec.stop_tokens;
  if (request.stop_token_ids_size() > kMaxStopTokens) {
    return InvalidField("stop_token_ids", StrCat("has ", request.stop_token_ids_size(),
                                                 " ids, the limit is ", kMaxStopTokens));
  }
  for (const int32_t id : request.stop_token_ids()) {
    if (id < 0 || id >= static_cast<int32_t>(spec.vocab_size)) {
      return InvalidField("stop_token_ids",
                          StrCat("id ", id, " is outside [0, ", spec.vocab_size, ")"));
    }
    if (std::find(text.stop_tokens.begin(), text.stop_tokens.end(), id) == text.stop_tokens.end()) {
      text.stop_tokens.push_back(id);
    }
  }
  const float penalty = request.has_length_penalty() ? request.length_penalty() : 1;
  if (!(penalty >= -kMaxLengthPenalty && penalty <= kMaxLengthPenalty)) {
    return InvalidField("length_penalty",
                        StrCat("must be from -", kMaxLengthPenalty, " to ", kMaxLengthPenalty));
  }
  if (request.num_beams() <= 1) return text;
  if (request.temperature() != 0 || request.top_p() != 0) {
    return InvalidField("num_beams", "beam search has no temperature and no top_p");
  }
  text.beams = BeamOptions{.length_penalty = penalty,
                           .early_stopping = request.early_stopping(),
                           .results = std::max(1U, request.num_sequences())};
  if (text.beams->results > request.num_beams()) {
    return InvalidField("num_sequences", StrCat("is ", text.beams->results, ", more than the ",
                                                request.num_beams(), " beams"));
  }
  return text;
}

}  // namespace

bool TextInfo::Stops(int32_t token) const {
  return std::find(stop_tokens.begin(), stop_tokens.end(), token) != stop_tokens.end();
}

absl::StatusOr<std::vector<int32_t>> Serving::ReadPrompt(const Tokenizer& tokenizer,
                                                         const v1::GenerateRequest& request) const {
  const std::shared_ptr<const Settings> settings = this->settings();
  const LimitsConfig& limits = settings->config.limits;
  switch (request.prompt_case()) {
    case v1::GenerateRequest::kText: {
      if (request.text().empty()) return InvalidField("text", "is empty");
      if (request.text().size() > limits.max_instruction_bytes) {
        return InvalidField("text", StrCat("has ", request.text().size(), " bytes, the limit is ",
                                           limits.max_instruction_bytes));
      }
      absl::StatusOr<std::vector<int32_t>> ids =
          tokenizer.Encode(request.text(), {.allow_special = false});
      if (!ids.ok()) return InvalidField("text", FromAbsl(ids.status().message()));
      return ids;
    }
    case v1::GenerateRequest::kTokenIds: {
      const auto& ids = request.token_ids().ids();
      if (static_cast<uint32_t>(ids.size()) > limits.max_instruction_tokens) {
        return InvalidField("token_ids", StrCat("has ", ids.size(), " ids, the limit is ",
                                                limits.max_instruction_tokens));
      }
      return std::vector<int32_t>(ids.begin(), ids.end());
    }
    case v1::GenerateRequest::PROMPT_NOT_SET:
      break;
  }
  return InvalidField("text", "neither a text nor token ids are given");
}

absl::StatusOr<std::vector<std::optional<Frame>>> Serving::ReadFrames(
    const OfferedModel& model, const v1::GenerateRequest& request, TimePoint received) {
  const ModelSpec& spec = model.model->spec();
  std::vector<std::optional<Frame>> frames(spec.cameras.size());
  RETURN_IF_ERROR(EachFrame(
      spec, request.frames(),
      [&](uint32_t camera, const v1::VisionFrame& frame,
          const std::string& prefix) -> absl::Status {
        ASSIGN_OR_RETURN(frames[camera], CountFrame(model.metrics, [&]() -> absl::StatusOr<Frame> {
                           RETURN_IF_ERROR(CheckFrame(frame, prefix));
                           return ReadFrame(model, camera, frame, received, prefix);
                         }));
        return absl::OkStatus();
      }));
  return frames;
}

absl::StatusOr<ActRequest> Serving::PrepareText(SessionId id, const v1::GenerateRequest& request,
                                                TimePoint received, TimePoint call_deadline,
                                                TextInfo& info) {
  ASSIGN_OR_RETURN(const std::shared_ptr<const OfferedModel> model,
                   FindModel(request.model(), "model"));
  const Tokenizer* const tokenizer = model->model->tokenizer();
  if (tokenizer == nullptr || !tokenizer->decoding().supported) {
    ErrorInfo error;
    error.reason = Reason::kInvalidInput;
    error.field = "model";
    return MakeError(absl::StatusCode::kUnimplemented,
                     StrCat("model: \"", model->name, "\" writes no text"), error);
  }
  const ModelSpec& spec = model->model->spec();
  const std::shared_ptr<const Settings> settings = this->settings();
  const LimitsConfig& limits = settings->config.limits;
  v1::ActRequest act;  // what both kinds of request have
  act.set_deadline_us(request.deadline_us());
  act.set_samples(request.num_sequences());
  act.set_temperature(request.temperature());
  ASSIGN_OR_RETURN(const ActFields fields, ReadActFields(act, limits.max_samples, ""));
  ASSIGN_OR_RETURN(TextRequest text, ReadText(request, spec, limits));
  ASSIGN_OR_RETURN(
      const ClassId klass,
      catalog()->FindClass(request.latency_class(),
                           TextClass(engine_.classes(), model->default_class), "latency_class"));
  ASSIGN_OR_RETURN(const std::vector<int32_t> ids, ReadPrompt(*tokenizer, request));
  ASSIGN_OR_RETURN(const std::vector<std::optional<Frame>> frames,
                   ReadFrames(*model, request, received));
  std::vector<uint32_t> cameras;
  auto observation = std::make_shared<Observation>();
  for (uint32_t camera = 0; camera < frames.size(); ++camera) {
    if (!frames[camera]) continue;
    cameras.push_back(camera);
    observation->frames.push_back(*frames[camera]);
    const TimePoint captured = frames[camera]->captured;
    if (cameras.size() == 1 || captured < observation->oldest_captured) {
      observation->oldest_captured = captured;
    }
  }
  ASSIGN_OR_RETURN(const Prompt prompt, model->model->BuildTextPrompt(ids, cameras));
  TimelineBuilder builder = model->new_timeline();
  RETURN_IF_ERROR(AddPrompt(
      prompt, spec, [&](uint32_t camera) { return frames[camera]->content; }, nullptr, builder));
  observation->timeline = builder.SetAnswer(Modality::kText).Build();

  const LatencyClass& latency = engine_.classes()[static_cast<size_t>(klass.value())];
  ActRequest out;
  out.session = id;
  out.model = model->id;
  out.klass = klass;
  out.arrival = received;
  out.deadline = DeadlineOf(latency, fields, received, call_deadline);
  out.timeline = observation->timeline;
  out.samples = text.beams ? request.num_beams() : fields.samples;
  out.temperature = fields.temperature;
  out.seed = request.seed();
  out.frame_captured = observation->oldest_captured;

  info.arrival = received;
  info.deadline = out.deadline;
  info.latency_class = latency.name;
  info.observation = std::move(observation);
  info.model = model;
  info.spec = &spec;
  info.tokenizer = tokenizer;
  info.samples = out.samples;
  info.stop_tokens = text.stop_tokens;
  out.text = std::move(text);
  return out;
}

}  // namespace saccade
