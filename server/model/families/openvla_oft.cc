#include "model/families/openvla_oft.h"

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "base/logging.h"
#include "base/strings.h"
#include "model/checkpoint.h"
#include "model/families/openvla_oft_config.h"
#include "model/families/openvla_oft_heads.h"
#include "model/families/openvla_oft_layers.h"
#include "model/families/openvla_prompt.h"
#include "model/families/openvla_vision.h"
#include "model/layers_decoder.h"
#include "model/layers_scope.h"
#include "model/layers_tap.h"
#include "model/layers_weights.h"
#include "model/preprocess.h"

namespace saccade {
namespace {

constexpr int32_t kStopId = 2;  // "</s>", as in the reference whatever the tokenizer says

// Immutable after loading. Holds the backend it was loaded to, which must outlive it.
class OpenVlaOft final : public Model {
 public:
  OpenVlaOft(OpenVlaOftConfig config, Preprocessor preprocessor, Backend& backend,
             const ModelOptions& options)
      : config_(std::move(config)),
        preprocessor_(std::move(preprocessor)),
        backend_(backend),
        compute_(options.compute),
        block_tokens_(options.block_tokens),
        invalid_tokens_(options.invalid_tokens) {}

  absl::Status Load(const Checkpoint& checkpoint, const OftHeads& heads);

  const ModelSpec& spec() const override { return spec_; }
  absl::StatusOr<Prompt> BuildPrompt(const PromptInput& input) const override;
  absl::StatusOr<Prompt> BuildPromptFromTokens(std::span<const int32_t> ids,
                                               uint64_t missing_cameras) const override;
  absl::StatusOr<ModelImage> Preprocess(uint32_t camera, ImageRows& rows) const override;
  bool IsActionToken(int32_t id) const override {
    return !config_.regression && config_.base.bins.Has(id);
  }
  absl::StatusOr<std::vector<float>> NormalizeState(std::span<const float> state,
                                                    std::string_view key) const override;
  absl::StatusOr<ActionChunk> FinishActions(std::span<const float> chunk, std::string_view key,
                                            std::span<const float> state) const override;
  absl::StatusOr<ActionChunk> DecodeActions(std::span<const int32_t> tokens,
                                            std::string_view statistics_key,
                                            InvalidTokenPolicy policy) const override;
  size_t WorkspaceBytes(uint32_t frames, uint32_t rows, uint32_t logit_rows) const override {
    return config_.WorkspaceBytes(frames, rows, logit_rows, compute_);
  }
  size_t ParkingBytes(uint32_t frames, uint32_t rows, uint32_t logit_rows) const override {
    return config_.ParkingBytes(frames, rows, logit_rows, compute_);
  }
  absl::Status Encode(ExecContext& ctx, const EncodeBatch& batch) const override {
    return vision_->Encode(ctx, backend_, batch);
  }
  absl::Status Forward(ExecContext& ctx, const TrunkBatch& batch) const override;

 private:
  void FillSpec(const Checkpoint& checkpoint, const OftHeads& heads, size_t weight_bytes);
  absl::StatusOr<Prompt> PromptOf(std::vector<int32_t> ids, std::string_view field) const;
  absl::StatusOr<const OftStatistics*> FindStatistics(std::string_view key) const;
  absl::StatusOr<ActionChunk> Finish(std::vector<double> normalized, const OftStatistics& s) const;

  OpenVlaOftConfig config_;
  Preprocessor preprocessor_;
  Backend& backend_;
  DType compute_;
  uint32_t block_tokens_;
  InvalidTokenPolicy invalid_tokens_;
  ModelSpec spec_;
  std::unique_ptr<const OpenVlaPrompt> prompt_;
  std::unique_ptr<OpenVlaVision> vision_;
  std::unique_ptr<DecoderTrunk> trunk_;
  std::unique_ptr<OftProprio> proprio_;  // null without state
  std::unique_ptr<OftHead> head_;
};

absl::Status OpenVlaOft::Load(const Checkpoint& checkpoint, const OftHeads& heads) {
  ASSIGN_OR_RETURN(OpenVlaPrompt prompt, OpenVlaPrompt::Load(checkpoint, config_.base));
  prompt_ = std::make_unique<OpenVlaPrompt>(std::move(prompt));
  RETURN_IF_ERROR(RefuseTensors(checkpoint, OftTensorProblems(checkpoint, heads, config_)));
  ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, backend_.NewStream());
  WeightLoader loader(checkpoint, backend_, *stream, compute_);
  ASSIGN_OR_RETURN(OpenVlaVision vision, OpenVlaVision::Load(loader, config_.base));
  vision_ = std::make_unique<OpenVlaVision>(std::move(vision));
  ASSIGN_OR_RETURN(DecoderTrunk trunk, DecoderTrunk::Load(loader, config_.base.llama));
  trunk_ = std::make_unique<DecoderTrunk>(std::move(trunk));
  WeightLoader head_loader(heads, backend_, *stream, compute_);
  if (config_.state_dim > 0) {
    ASSIGN_OR_RETURN(proprio_, LoadProprio(head_loader));
  }
  if (config_.regression) {
    ASSIGN_OR_RETURN(head_, LoadRegressionHead(head_loader, config_));
  } else {
    ASSIGN_OR_RETURN(head_, LoadTokenHead(loader, backend_, *stream, config_));
  }
  FillSpec(checkpoint, heads, loader.device_bytes() + head_loader.device_bytes());
  return absl::OkStatus();
}

void OpenVlaOft::FillSpec(const Checkpoint& checkpoint, const OftHeads& heads,
                          size_t weight_bytes) {
  spec_ = OpenVlaOftSpec(checkpoint, config_);
  spec_.compute = compute_;
  spec_.kv.block_tokens = block_tokens_;
  spec_.kv.dtype = compute_;
  spec_.weight_bytes = weight_bytes;
  DigestBuilder digest("model.openvla_oft.v1");
  AddOpenVlaIdentity(checkpoint, config_.base, compute_, digest);
  heads.AddIdentity(digest);
  digest.Field(uint64_t{config_.chunk}).Field(uint64_t{config_.action_dim});
  spec_.fingerprint = digest.Finish();
}

// [BOS | patches of all frames | state | the rest of the text | places | </s>], one group.
absl::StatusOr<Prompt> OpenVlaOft::PromptOf(std::vector<int32_t> ids,
                                            std::string_view field) const {
  const uint64_t frames = spec_.cameras.size() * uint64_t{spec_.vision_tokens};
  const uint64_t positions =
      ids.size() + frames + (spec_.state_dim > 0 ? 1 : 0) + config_.read_rows() + 1;
  if (positions > spec_.max_positions) {
    return PromptTooLong(field, StrCat(ids.size(), " text tokens, ", frames, " vision tokens and ",
                                       config_.read_rows(), " places of actions pass the model's ",
                                       spec_.max_positions, " positions"));
  }
  Prompt prompt{{{Modality::kText, {ids.begin(), ids.begin() + 1}}}};
  for (uint32_t i = 0; i < spec_.cameras.size(); ++i) {
    prompt.segments.push_back({Modality::kVision, {}, i});
  }
  if (spec_.state_dim > 0) prompt.segments.push_back({Modality::kState});
  prompt.segments.push_back({Modality::kText, {ids.begin() + 1, ids.end()}});
  prompt.segments.push_back({Modality::kAction, {}, 0, config_.read_rows()});
  prompt.segments.push_back({Modality::kText, {kStopId}});
  prompt.bidirectional = static_cast<uint32_t>(prompt.segments.size());
  return prompt;
}

absl::StatusOr<Prompt> OpenVlaOft::BuildPrompt(const PromptInput& input) const {
  for (size_t i = 0; i < spec_.cameras.size(); ++i) {
    if ((input.missing_cameras >> i & 1) != 0) {
      return InvalidField("cameras",
                          StrCat("the model needs a frame of \"", spec_.cameras[i].name, "\""));
    }
  }
  if (input.state.size() != spec_.state_width) {
    return InvalidField("state", StrCat("has ", input.state.size(), " values, the model takes ",
                                        spec_.state_width));
  }
  absl::StatusOr<std::vector<int32_t>> ids = prompt_->Encode(input.instruction);
  if (!ids.ok()) return InvalidField("instruction", FromAbsl(ids.status().message()));
  return PromptOf(*std::move(ids), "instruction");
}

absl::StatusOr<Prompt> OpenVlaOft::BuildPromptFromTokens(std::span<const int32_t> ids,
                                                         uint64_t /*missing_cameras*/) const {
  RETURN_IF_ERROR(prompt_->CheckIds(ids));
  std::vector<int32_t> all(ids.begin(), ids.end());
  prompt_->Terminate(all);
  return PromptOf(std::move(all), kTokenIdsField);
}

absl::StatusOr<ModelImage> OpenVlaOft::Preprocess(uint32_t camera, ImageRows& rows) const {
  RETURN_IF_ERROR(CheckCamera(spec_, camera));
  return preprocessor_.Apply(rows);
}

absl::StatusOr<const OftStatistics*> OpenVlaOft::FindStatistics(std::string_view key) const {
  // None of the unfit is among them.
  for (const auto& [unfit, why] : config_.unfit) {
    if (unfit != key) continue;
    return InvalidField("statistics_key",
                        StrCat("\"", key, "\" ", why, "; known: ", KeysOf(config_.statistics)));
  }
  return FindSet(config_.statistics, key);
}

absl::StatusOr<std::vector<float>> OpenVlaOft::NormalizeState(std::span<const float> state,
                                                              std::string_view key) const {
  if (config_.state_dim == 0) return InvalidField("state", "the model takes none");
  ASSIGN_OR_RETURN(const OftStatistics* s, FindStatistics(key));
  return s->state.Normalize(state);
}

absl::StatusOr<ActionChunk> OpenVlaOft::Finish(std::vector<double> normalized,
                                               const OftStatistics& s) const {
  ActionChunk chunk;
  chunk.horizon = config_.chunk;
  chunk.normalized.assign(normalized.begin(), normalized.end());
  ASSIGN_OR_RETURN(chunk.values, s.action.Unnormalize(normalized, config_.action_dim));
  return chunk;
}

absl::StatusOr<ActionChunk> OpenVlaOft::FinishActions(std::span<const float> values,
                                                      std::string_view key,
                                                      std::span<const float>) const {
  ASSIGN_OR_RETURN(const OftStatistics* s, FindStatistics(key));
  if (values.size() != config_.read_rows()) {
    return absl::InternalError(
        StrCat("a chunk of ", values.size(), " values, expected ", config_.read_rows()));
  }
  if (config_.regression) return Finish({values.begin(), values.end()}, *s);
  std::vector<int32_t> tokens;
  for (const float value : values) {
    tokens.push_back(std::isfinite(value) ? static_cast<int32_t>(value) : kInvalidSample);
  }
  return DecodeActions(tokens, key, invalid_tokens_);
}

// Of a whole chunk.
absl::StatusOr<ActionChunk> OpenVlaOft::DecodeActions(std::span<const int32_t> tokens,
                                                      std::string_view statistics_key,
                                                      InvalidTokenPolicy policy) const {
  ASSIGN_OR_RETURN(const OftStatistics* s, FindStatistics(statistics_key));
  if (config_.regression) return absl::UnimplementedError("the model answers without tokens");
  if (tokens.size() != config_.read_rows()) {
    return absl::InvalidArgumentError(
        StrCat(tokens.size(), " action tokens, expected ", config_.read_rows()));
  }
  ASSIGN_OR_RETURN(std::vector<double> normalized, config_.base.bins.Decode(tokens, policy));
  ASSIGN_OR_RETURN(ActionChunk chunk, Finish(std::move(normalized), *s));
  chunk.tokens.assign(tokens.begin(), tokens.end());
  return chunk;
}

absl::Status OpenVlaOft::Forward(ExecContext& ctx, const TrunkBatch& batch) const {
  const ArenaScope scope(ctx.arena);
  StageTap tap(ctx, backend_);
  const int64_t hidden = spec_.hidden;
  const int64_t states = proprio_ == nullptr ? 0 : batch.states.dim(0);
  DecoderTrunk::Extra extra;
  if (states > 0 && batch.layers.begin == 0) {
    ASSIGN_OR_RETURN(extra.states, ctx.arena.New(DType::kF32, {states, hidden}));
    RETURN_IF_ERROR(proprio_->Run(ctx, batch.states, extra.states));
    RETURN_IF_ERROR(tap.Record("proprio.projected", extra.states));
  }
  const int64_t read = batch.num_logit_rows;
  const bool ends = read > 0 && batch.layers.Has(config_.base.llama.layers);
  if (ends) {
    ASSIGN_OR_RETURN(extra.hidden, ctx.arena.New(DType::kF32, {read, hidden}));
  }
  RETURN_IF_ERROR(trunk_->Forward(ctx, tap, batch, extra));
  if (!ends) return tap.Finish();
  RETURN_IF_ERROR(tap.Record("actions_hidden_states", extra.hidden));
  if (read != batch.actions.dim(0) * batch.actions.dim(1)) {
    return absl::InvalidArgumentError(
        StrCat("openvla_oft: ", read, " rows do not fit ", batch.actions.DebugString()));
  }
  RETURN_IF_ERROR(head_->Run(ctx, extra.hidden, batch.actions));
  return tap.Finish();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> LoadOpenVlaOft(const Checkpoint& checkpoint,
                                                      Backend& backend,
                                                      const ModelOptions& options) {
  if (options.compute != DType::kF32 && options.compute != DType::kBf16) {
    return absl::InvalidArgumentError(
        StrCat("openvla_oft computes in f32 or bf16, not ", DTypeName(options.compute)));
  }
  ASSIGN_OR_RETURN(Preprocessor preprocessor, Preprocessor::Load(checkpoint));
  const OftOptions oft = options.oft.value_or(OftOptions{});
  OftHeads heads = OftHeads::None();
  if (oft.use_heads) {
    ASSIGN_OR_RETURN(heads, OftHeads::Open(checkpoint.dir()));
  }
  ASSIGN_OR_RETURN(OpenVlaOftConfig config,
                   ReadOpenVlaOftSizes(checkpoint, heads, preprocessor, oft));
  RETURN_IF_ERROR(ReadOpenVlaOftStatistics(checkpoint, config));
  // Constants that no file of the folder states: whoever deploys it should see them.
  std::string cameras;
  for (const std::string& camera : config.cameras) {
    StrAppend(&cameras, cameras.empty() ? "" : ", ", camera);
  }
  LogInfo("openvla_oft constants",
          {{"platform", kOftPlatformNames[static_cast<size_t>(config.platform)]},
           {"chunk", config.chunk},
           {"cameras", cameras},
           {"head", config.regression ? "l1" : "tokens"}});
  auto model =
      std::make_unique<OpenVlaOft>(std::move(config), std::move(preprocessor), backend, options);
  RETURN_IF_ERROR(model->Load(checkpoint, heads));
  return model;
}

}  // namespace saccade
