#include "model/families/openvla.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_join.h"
#include "base/strings.h"
#include "model/checkpoint.h"
#include "model/families/openvla_config.h"
#include "model/families/openvla_prompt.h"
#include "model/layers_decoder.h"
#include "model/layers_scope.h"
#include "model/layers_tap.h"
#include "model/layers_vit.h"
#include "model/layers_weights.h"
#include "model/preprocess.h"

namespace saccade {
namespace {

constexpr std::string_view kField = "token_ids";

absl::Status DecodeError(Reason reason, std::string_view message) {
  ErrorInfo info;
  info.reason = reason;
  return MakeError(absl::StatusCode::kInternal, message, info);
}

absl::Status NeverFits(std::string_view field, std::string_view message) {
  ErrorInfo info;
  info.reason = Reason::kNeverFits;
  info.field = std::string(field);
  return MakeError(absl::StatusCode::kInvalidArgument, StrCat(field, ": ", message), info);
}

struct ProjectorLayer {
  std::unique_ptr<PackedWeight> weight;
  std::unique_ptr<Buffer> bias;
};

// Immutable after loading. Holds the backend it was loaded to, which must outlive it.
class OpenVla final : public Model {
 public:
  OpenVla(OpenVlaConfig config, Preprocessor preprocessor, Backend& backend,
          const ModelOptions& options)
      : config_(std::move(config)),
        preprocessor_(std::move(preprocessor)),
        backend_(backend),
        compute_(options.compute),
        block_tokens_(options.block_tokens) {}

  absl::Status Load(const Checkpoint& checkpoint);

  const ModelSpec& spec() const override { return spec_; }
  absl::StatusOr<Prompt> BuildPrompt(const PromptInput& input) const override;
  absl::StatusOr<Prompt> BuildPromptFromTokens(std::span<const int32_t> ids,
                                               uint64_t missing_cameras) const override;
  absl::StatusOr<ModelImage> Preprocess(uint32_t camera, ImageRows& rows) const override;
  const Tokenizer* tokenizer() const override { return &prompt_->tokenizer(); }
  absl::StatusOr<Prompt> BuildTextPrompt(std::span<const int32_t> ids,
                                         std::span<const uint32_t> cameras) const override;
  bool IsActionToken(int32_t id) const override;
  absl::StatusOr<ActionChunk> DecodeActions(std::span<const int32_t> tokens,
                                            std::string_view statistics_key,
                                            InvalidTokenPolicy policy) const override;
  size_t WorkspaceBytes(uint32_t frames, uint32_t rows, uint32_t logit_rows) const override {
    return config_.WorkspaceBytes(frames, rows, logit_rows, compute_);
  }
  size_t ParkingBytes(uint32_t frames, uint32_t rows, uint32_t logit_rows) const override {
    return config_.ParkingBytes(frames, rows, logit_rows, compute_);
  }
  absl::Status Encode(ExecContext& ctx, const EncodeBatch& batch) const override;
  absl::Status Forward(ExecContext& ctx, const TrunkBatch& batch) const override;

 private:
  absl::Status LoadWeights(const Checkpoint& checkpoint);
  void FillSpec(const Checkpoint& checkpoint, size_t weight_bytes);
  absl::Status CheckIds(std::span<const int32_t> ids) const;
  absl::StatusOr<Prompt> PromptOf(std::vector<int32_t> ids, std::string_view field) const;
  absl::Status Project(ExecContext& ctx, Arena& kept, uint32_t begin, uint32_t end,
                       const TensorView& features, std::span<const TensorView> out) const;
  absl::StatusOr<const OpenVlaStatistics*> FindStatistics(std::string_view key) const;

  OpenVlaConfig config_;
  Preprocessor preprocessor_;
  Backend& backend_;
  DType compute_;
  uint32_t block_tokens_;
  ModelSpec spec_;
  std::unique_ptr<const OpenVlaPrompt> prompt_;
  std::vector<VitTower> towers_;
  std::vector<ProjectorLayer> projector_;
  std::unique_ptr<DecoderTrunk> trunk_;
};

absl::Status OpenVla::LoadWeights(const Checkpoint& checkpoint) {
  const std::vector<std::string> problems = TensorProblems(checkpoint, config_);
  if (!problems.empty()) {
    constexpr size_t kShown = 5;
    const size_t shown = std::min(kShown, problems.size());
    return absl::InvalidArgumentError(StrCat(
        checkpoint.dir(), ": ", problems.size(), " tensors do not fit: ",
        absl::StrJoin(problems.begin(), problems.begin() + static_cast<int64_t>(shown), "; "),
        problems.size() > shown ? "; ..." : ""));
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, backend_.NewStream());
  WeightLoader loader(checkpoint, backend_, *stream, compute_);
  for (const VitSpec& spec : config_.towers) {
    ASSIGN_OR_RETURN(VitTower tower, VitTower::Load(loader, spec));
    towers_.push_back(std::move(tower));
  }
  for (size_t i = 1; i < config_.projector_widths().size(); ++i) {
    ProjectorLayer layer;
    ASSIGN_OR_RETURN(layer.weight, loader.Linear({StrCat("projector.fc", i, ".weight")}));
    ASSIGN_OR_RETURN(layer.bias, loader.Vector({StrCat("projector.fc", i, ".bias")}));
    projector_.push_back(std::move(layer));
  }
  ASSIGN_OR_RETURN(DecoderTrunk trunk, DecoderTrunk::Load(loader, config_.llama));
  trunk_ = std::make_unique<DecoderTrunk>(std::move(trunk));
  FillSpec(checkpoint, loader.device_bytes());
  return absl::OkStatus();
}

void OpenVla::FillSpec(const Checkpoint& checkpoint, size_t weight_bytes) {
  spec_ = OpenVlaSpec(checkpoint, config_);
  spec_.compute = compute_;
  spec_.kv.block_tokens = block_tokens_;
  spec_.kv.dtype = compute_;
  spec_.weight_bytes = weight_bytes;
  // Beside the weights and config.json, which the first digest covers, the K/V bytes of a frame
  // depend on its normalisation.
  DigestBuilder digest("model.openvla.v1");
  digest.Field(checkpoint.WeightsFingerprint()).Field(DTypeName(compute_));
  for (const VitSpec& tower : config_.towers) {
    for (const float value : tower.mean) digest.Field(uint64_t{std::bit_cast<uint32_t>(value)});
    for (const float value : tower.std) digest.Field(uint64_t{std::bit_cast<uint32_t>(value)});
  }
  spec_.fingerprint = digest.Finish();
}

absl::Status OpenVla::Load(const Checkpoint& checkpoint) {
  ASSIGN_OR_RETURN(OpenVlaPrompt prompt, OpenVlaPrompt::Load(checkpoint, config_));
  prompt_ = std::make_unique<OpenVlaPrompt>(std::move(prompt));
  return LoadWeights(checkpoint);
}

absl::StatusOr<Prompt> OpenVla::PromptOf(std::vector<int32_t> ids, std::string_view field) const {
  const uint64_t positions = ids.size() + uint64_t{spec_.vision_tokens} + spec_.max_action_tokens;
  if (positions > spec_.max_positions) {
    return NeverFits(
        field, StrCat("too long: ", ids.size(), " text tokens, ", spec_.vision_tokens,
                      " vision tokens and ", spec_.max_action_tokens, " actions pass the model's ",
                      spec_.max_positions, " positions"));
  }
  return Prompt{{{Modality::kText, {ids.begin(), ids.begin() + 1}},
                 {Modality::kVision},
                 {Modality::kText, {ids.begin() + 1, ids.end()}}}};
}

absl::StatusOr<Prompt> OpenVla::BuildPrompt(const PromptInput& input) const {
  absl::StatusOr<std::vector<int32_t>> ids = prompt_->Encode(input.instruction);
  if (!ids.ok()) return InvalidField("instruction", FromAbsl(ids.status().message()));
  return PromptOf(*std::move(ids), "instruction");
}

absl::Status OpenVla::CheckIds(std::span<const int32_t> ids) const {
  if (ids.empty() || ids.front() != prompt_->bos()) {
    return InvalidField(kField, StrCat("the first id must be BOS, ", prompt_->bos()));
  }
  if (ids.size() > spec_.max_positions) {
    return NeverFits(kField, StrCat("too long: ", ids.size(), " ids, more than the model's ",
                                    spec_.max_positions, " positions"));
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= static_cast<int32_t>(spec_.vocab_size)) {
      return InvalidField(kField, StrCat("id ", ids[i], " at index ", i, " is outside [0, ",
                                         spec_.vocab_size, ")"));
    }
  }
  return absl::OkStatus();
}

// BOS, the frame if there is one, and the text: the layout of the training prompts.
absl::StatusOr<Prompt> OpenVla::BuildTextPrompt(std::span<const int32_t> ids,
                                                std::span<const uint32_t> cameras) const {
  RETURN_IF_ERROR(CheckIds(ids));
  Prompt prompt{{{Modality::kText, {ids.begin(), ids.begin() + 1}}}};
  for (const uint32_t camera : cameras) prompt.segments.push_back({Modality::kVision, {}, camera});
  prompt.segments.push_back({Modality::kText, {ids.begin() + 1, ids.end()}});
  return prompt;
}

absl::StatusOr<Prompt> OpenVla::BuildPromptFromTokens(std::span<const int32_t> ids,
                                                      uint64_t /*missing_cameras*/) const {
  RETURN_IF_ERROR(CheckIds(ids));
  std::vector<int32_t> all(ids.begin(), ids.end());
  prompt_->Terminate(all);
  return PromptOf(std::move(all), kField);
}

absl::StatusOr<ModelImage> OpenVla::Preprocess(uint32_t camera, ImageRows& rows) const {
  if (camera >= spec_.cameras.size()) {
    return InvalidField("camera", StrCat("index ", camera, ", but the model has ",
                                         spec_.cameras.size(), " camera"));
  }
  return preprocessor_.Apply(rows);
}

bool OpenVla::IsActionToken(int32_t id) const {
  const auto end = static_cast<int32_t>(config_.action_vocab);
  return id < end && id >= end - static_cast<int32_t>(config_.action_bins);
}

absl::StatusOr<const OpenVlaStatistics*> OpenVla::FindStatistics(std::string_view key) const {
  std::string known;
  for (const OpenVlaStatistics& s : config_.statistics) {
    if (s.key == key) return &s;
    StrAppend(&known, known.empty() ? "" : ", ", s.key);
  }
  return InvalidField("statistics_key", StrCat("unknown \"", key, "\"; known: ", known));
}

absl::StatusOr<ActionChunk> OpenVla::DecodeActions(std::span<const int32_t> tokens,
                                                   std::string_view statistics_key,
                                                   InvalidTokenPolicy policy) const {
  ASSIGN_OR_RETURN(const OpenVlaStatistics* s, FindStatistics(statistics_key));
  if (tokens.size() != s->action.dim()) {
    return absl::InvalidArgumentError(
        StrCat(tokens.size(), " action tokens, expected ", s->action.dim()));
  }
  const int64_t centres = int64_t{config_.action_bins} - 1;
  const double width = 2.0 / static_cast<double>(centres);
  // numpy.linspace(-1, 1, action_bins)[i]
  const auto edge = [&](int64_t i) {
    return i == centres ? 1.0 : static_cast<double>(i) * width - 1.0;
  };
  ActionChunk chunk;
  chunk.tokens.assign(tokens.begin(), tokens.end());
  std::vector<double> normalized;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] == kInvalidSample) {
      return DecodeError(Reason::kNonFinite,
                         StrCat("action token ", i, ": the logits held NaN or Inf"));
    }
    if (policy == InvalidTokenPolicy::kFail && !IsActionToken(tokens[i])) {
      return DecodeError(
          Reason::kInvalidActionToken,
          StrCat("action token ", i, ": id ", tokens[i], " is outside the action range [",
                 config_.action_vocab - config_.action_bins, ", ", config_.action_vocab, ")"));
    }
    const int64_t bin =
        std::clamp<int64_t>(int64_t{config_.action_vocab} - tokens[i] - 1, 0, centres - 1);
    const double centre = (edge(bin) + edge(bin + 1)) / 2.0;
    normalized.push_back(centre);
  }
  chunk.normalized.assign(normalized.begin(), normalized.end());
  ASSIGN_OR_RETURN(chunk.values, s->action.Unnormalize(normalized, normalized.size()));
  return chunk;
}

// Layers [begin, end) of the projector.
absl::Status OpenVla::Project(ExecContext& ctx, Arena& kept, uint32_t begin, uint32_t end,
                              const TensorView& features, std::span<const TensorView> out) const {
  const int64_t patches = config_.vision_tokens();
  TensorView x = features;
  for (uint32_t i = 0; i < end; ++i) {
    const ProjectorLayer& layer = projector_[i];
    LinearArgs args;
    args.weight = layer.weight.get();
    args.bias = layer.bias->View(DType::kF32, {layer.weight->n()});
    if (i + 1 < projector_.size()) {
      ASSIGN_OR_RETURN(args.y, kept.New(compute_, {x.dim(0), layer.weight->n()}));
      args.x = x;
      args.activation = Activation::kGeluErf;
      if (i >= begin) RETURN_IF_ERROR(ctx.ops.Linear(ctx.stream, args));
      x = args.y;
      continue;
    }
    for (size_t g = 0; g < out.size(); ++g) {
      const auto begin = static_cast<int64_t>(g) * patches;
      args.x = x.Rows(begin, begin + patches);
      args.y = out[g];
      RETURN_IF_ERROR(ctx.ops.Linear(ctx.stream, args));
    }
  }
  return absl::OkStatus();
}

absl::Status OpenVla::Encode(ExecContext& ctx, const EncodeBatch& batch) const {
  const auto frames = static_cast<int64_t>(batch.out.size());
  if (frames == 0) return absl::OkStatus();
  if (batch.rgb.rank != 4 || batch.rgb.dim(0) != frames ||
      batch.rgb.dim(1) != preprocessor_.height() || batch.rgb.dim(2) != preprocessor_.width()) {
    return absl::InvalidArgumentError(
        StrCat("openvla: ", frames, " frames do not fit ", batch.rgb.DebugString()));
  }
  const ArenaScope scope(ctx.arena);
  StageTap tap(ctx, backend_);
  const int64_t patches = config_.vision_tokens();
  const LayerRange& run = batch.layers;
  // What a later slice goes on with: laid out alike by every slice.
  std::optional<Arena> parked;
  if (run.parked != nullptr) parked.emplace(*run.parked);
  Arena& kept = parked.has_value() ? *parked : ctx.arena;
  ASSIGN_OR_RETURN(const TensorView features,
                   kept.New(compute_, {frames * patches, config_.features}));
  // The part of the range that lies in the next `count` layers.
  uint32_t first = 0;
  const auto part = [&](size_t count) {
    const auto until = first + static_cast<uint32_t>(count);
    const std::pair range(std::clamp(run.begin, first, until) - first,
                          std::clamp(run.end, first, until) - first);
    first = until;
    return range;
  };
  int64_t column = 0;
  for (const VitTower& tower : towers_) {
    const auto [begin, end] = part(tower.spec().blocks);
    const int64_t next = column + tower.spec().width;
    if (begin < end) {
      RETURN_IF_ERROR(
          tower.Run(ctx, tap, kept, begin, end, batch.rgb, features.Columns(column, next)));
    }
    column = next;
  }
  const auto [begin, end] = part(projector_.size());
  if (begin == end) return tap.Finish();
  if (begin == 0) RETURN_IF_ERROR(tap.Record("vision.features", features));
  RETURN_IF_ERROR(Project(ctx, kept, begin, end, features, batch.out));
  if (end < projector_.size()) return tap.Finish();
  for (const TensorView& out : batch.out) RETURN_IF_ERROR(tap.Record("vision.projected", out));
  return tap.Finish();
}

absl::Status OpenVla::Forward(ExecContext& ctx, const TrunkBatch& batch) const {
  StageTap tap(ctx, backend_);
  RETURN_IF_ERROR(trunk_->Forward(ctx, tap, batch));
  return tap.Finish();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> LoadOpenVla(const Checkpoint& checkpoint, Backend& backend,
                                                   const ModelOptions& options) {
  if (options.compute != DType::kF32 && options.compute != DType::kBf16) {
    return absl::InvalidArgumentError(
        StrCat("openvla computes in f32 or bf16, not ", DTypeName(options.compute)));
  }
  ASSIGN_OR_RETURN(Preprocessor preprocessor, Preprocessor::Load(checkpoint));
  ASSIGN_OR_RETURN(OpenVlaConfig config, ReadOpenVlaConfig(checkpoint, preprocessor));
  auto model =
      std::make_unique<OpenVla>(std::move(config), std::move(preprocessor), backend, options);
  RETURN_IF_ERROR(model->Load(checkpoint));
  return model;
}

}  // namespace saccade
