#include "model/families/openvla.h"

#include <string>
#include <utility>
#include <vector>

#include "base/strings.h"
#include "model/checkpoint.h"
#include "model/families/openvla_config.h"
#include "model/families/openvla_prompt.h"
#include "model/families/openvla_vision.h"
#include "model/layers_decoder.h"
#include "model/layers_tap.h"
#include "model/layers_weights.h"
#include "model/preprocess.h"

namespace saccade {
namespace {

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
  absl::StatusOr<Prompt> PromptOf(std::vector<int32_t> ids, std::string_view field) const;

  OpenVlaConfig config_;
  Preprocessor preprocessor_;
  Backend& backend_;
  DType compute_;
  uint32_t block_tokens_;
  ModelSpec spec_;
  std::unique_ptr<const OpenVlaPrompt> prompt_;
  std::unique_ptr<OpenVlaVision> vision_;
  std::unique_ptr<DecoderTrunk> trunk_;
};

absl::Status OpenVla::LoadWeights(const Checkpoint& checkpoint) {
  RETURN_IF_ERROR(RefuseTensors(checkpoint, TensorProblems(checkpoint, config_)));
  ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, backend_.NewStream());
  WeightLoader loader(checkpoint, backend_, *stream, compute_);
  ASSIGN_OR_RETURN(OpenVlaVision vision, OpenVlaVision::Load(loader, config_));
  vision_ = std::make_unique<OpenVlaVision>(std::move(vision));
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
  DigestBuilder digest("model.openvla.v1");
  AddOpenVlaIdentity(checkpoint, config_, compute_, digest);
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
    return PromptTooLong(
        field, StrCat(ids.size(), " text tokens, ", spec_.vision_tokens, " vision tokens and ",
                      spec_.max_action_tokens, " actions pass the model's ", spec_.max_positions,
                      " positions"));
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

// BOS, the frame if there is one, and the text: the layout of the training prompts.
absl::StatusOr<Prompt> OpenVla::BuildTextPrompt(std::span<const int32_t> ids,
                                                std::span<const uint32_t> cameras) const {
  RETURN_IF_ERROR(prompt_->CheckIds(ids));
  Prompt prompt{{{Modality::kText, {ids.begin(), ids.begin() + 1}}}};
  for (const uint32_t camera : cameras) prompt.segments.push_back({Modality::kVision, {}, camera});
  prompt.segments.push_back({Modality::kText, {ids.begin() + 1, ids.end()}});
  return prompt;
}

absl::StatusOr<Prompt> OpenVla::BuildPromptFromTokens(std::span<const int32_t> ids,
                                                      uint64_t /*missing_cameras*/) const {
  RETURN_IF_ERROR(prompt_->CheckIds(ids));
  std::vector<int32_t> all(ids.begin(), ids.end());
  prompt_->Terminate(all);
  return PromptOf(std::move(all), kTokenIdsField);
}

absl::StatusOr<ModelImage> OpenVla::Preprocess(uint32_t camera, ImageRows& rows) const {
  RETURN_IF_ERROR(CheckCamera(spec_, camera));
  return preprocessor_.Apply(rows);
}

bool OpenVla::IsActionToken(int32_t id) const { return config_.bins.Has(id); }

absl::StatusOr<ActionChunk> OpenVla::DecodeActions(std::span<const int32_t> tokens,
                                                   std::string_view statistics_key,
                                                   InvalidTokenPolicy policy) const {
  ASSIGN_OR_RETURN(const OpenVlaStatistics* s, FindSet(config_.statistics, statistics_key));
  if (tokens.size() != s->action.dim()) {
    return absl::InvalidArgumentError(
        StrCat(tokens.size(), " action tokens, expected ", s->action.dim()));
  }
  ActionChunk chunk;
  chunk.tokens.assign(tokens.begin(), tokens.end());
  ASSIGN_OR_RETURN(const std::vector<double> normalized, config_.bins.Decode(tokens, policy));
  chunk.normalized.assign(normalized.begin(), normalized.end());
  ASSIGN_OR_RETURN(chunk.values, s->action.Unnormalize(normalized, normalized.size()));
  return chunk;
}

absl::Status OpenVla::Encode(ExecContext& ctx, const EncodeBatch& batch) const {
  return vision_->Encode(ctx, backend_, batch);
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
