#include "model/families/lerobot_policy.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <numbers>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/str_join.h"
#include "base/strings.h"
#include "model/fast_tokens.h"
#include "model/layers_scope.h"
#include "model/layers_tap.h"
#include "model/layers_weights.h"
#include "model/unicode_class.h"

namespace saccade {
namespace {

constexpr std::string_view kIds = "token_ids";

absl::Status NeverFits(std::string_view field, std::string_view message) {
  ErrorInfo info;
  info.reason = Reason::kNeverFits;
  info.field = std::string(field);
  return MakeError(absl::StatusCode::kInvalidArgument, StrCat(field, ": ", message), info);
}

bool StartsWith(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

// Bins of pi0.5: numpy.digitize(x, linspace(-1, 1, 257)[:-1]) - 1, whose edges are exact in F64.
int32_t BinOf(float x) {
  const double at = std::floor(static_cast<double>(x) * 128.0) + 128.0;
  return static_cast<int32_t>(std::clamp(at, -1.0, 255.0));
}

// As str.strip of Python, whose spaces are those of Unicode and four separators.
std::string Stripped(std::string_view text) {
  size_t begin = text.size();
  size_t end = 0;
  for (size_t at = 0; at < text.size();) {
    const Character c = CharacterAt(text, at);
    if (ClassOf(c.code) != CharClass::kSpace && (c.code < 0x1c || c.code > 0x1f)) {
      begin = std::min(begin, at);
      end = at + c.size;
    }
    at += c.size;
  }
  return begin < end ? std::string(text.substr(begin, end - begin)) : std::string();
}

// Immutable after loading. Holds the backend it was loaded to, which must outlive it.
class LerobotPolicy final : public Model {
 public:
  LerobotPolicy(PolicyConfig config, Backend& backend, DType compute)
      : config_(std::move(config)), backend_(backend), compute_(compute) {}

  absl::Status Load(const Checkpoint& checkpoint, const ModelOptions& options);

  const ModelSpec& spec() const override { return spec_; }
  absl::StatusOr<Prompt> BuildPrompt(const PromptInput& input) const override;
  absl::StatusOr<Prompt> BuildPromptFromTokens(std::span<const int32_t> ids,
                                               uint64_t missing_cameras) const override;
  absl::StatusOr<ModelImage> Preprocess(uint32_t camera, ImageRows& rows) const override;
  bool IsActionToken(int32_t id) const override;
  absl::StatusOr<std::vector<float>> NormalizeState(std::span<const float> state,
                                                    std::string_view statistics_key) const override;
  absl::StatusOr<ActionChunk> FinishActions(std::span<const float> chunk,
                                            std::string_view statistics_key,
                                            std::span<const float> state) const override;
  void EmbedTime(float t, std::span<float> out) const override;
  absl::StatusOr<ActionChunk> DecodeActions(std::span<const int32_t> tokens,
                                            std::string_view statistics_key,
                                            InvalidTokenPolicy policy) const override;
  size_t WorkspaceBytes(uint32_t frames, uint32_t rows, uint32_t logit_rows) const override {
    return config_.WorkspaceBytes(frames, rows, logit_rows, compute_);
  }
  size_t ParkingBytes(uint32_t frames, uint32_t rows, uint32_t logit_rows) const override {
    return config_.ParkingBytes(frames, rows, logit_rows);
  }
  absl::Status Encode(ExecContext& ctx, const EncodeBatch& batch) const override;
  absl::Status Forward(ExecContext& ctx, const TrunkBatch& batch) const override;
  size_t DenoiseBytes(uint32_t items) const override {
    return config_.DenoiseBytes(items, compute_);
  }
  size_t DenoiseParkingBytes(uint32_t items) const override {
    return config_.DenoiseParkingBytes(items);
  }
  absl::Status Denoise(ExecContext& ctx, const DenoiseBatch& batch) const override;

 private:
  absl::StatusOr<std::vector<int32_t>> EncodeText(std::string_view text) const;
  absl::StatusOr<Prompt> PromptOf(std::span<const int32_t> ids, uint64_t missing,
                                  std::string_view field) const;
  absl::Status LoadShuffle(Stream& stream);
  absl::Status LoadFast();
  absl::Status Project(ExecContext& ctx, const TensorView& features,
                       std::span<const TensorView> out) const;

  PolicyConfig config_;
  Backend& backend_;
  DType compute_;
  ModelSpec spec_;
  std::unique_ptr<const Tokenizer> tokenizer_;
  std::optional<VitTower> tower_;
  LinearLayer projector_;
  std::unique_ptr<Buffer> vision_scale_;  // [hidden]; null: 1
  std::unique_ptr<Buffer> shuffle_;       // [patches] I32: the patch at each place; null without
  std::optional<DecoderTrunk> trunk_;
  std::optional<ActionExpert> expert_;  // this, or the next two
  std::optional<FastTokens> fast_;
  std::optional<FastFraming> framing_;
  int32_t bos_ = -1;  // behind the text; -1: none
};

absl::Status LerobotPolicy::Load(const Checkpoint& checkpoint, const ModelOptions& options) {
  const std::vector<std::string> problems = PolicyTensorProblems(checkpoint, config_);
  if (!problems.empty()) {
    const auto shown = static_cast<std::ptrdiff_t>(std::min<size_t>(5, problems.size()));
    return absl::InvalidArgumentError(StrCat(
        checkpoint.dir(), ": ", problems.size(),
        " tensors do not fit: ", absl::StrJoin(problems.begin(), problems.begin() + shown, "; "),
        problems.size() > 5 ? "; ..." : ""));
  }
  ASSIGN_OR_RETURN(tokenizer_, Tokenizer::Load(config_.tokenizer_dir));
  if (config_.second_bos) {
    const std::optional<int32_t> bos = tokenizer_->TokenToId("<bos>");
    if (!bos || *bos < 0 || *bos >= static_cast<int32_t>(config_.trunk.vocab)) {
      return absl::InvalidArgumentError(
          StrCat(config_.tokenizer_dir, ": the tokenizer has no <bos>"));
    }
    bos_ = *bos;
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, backend_.NewStream());
  WeightLoader loader(checkpoint, backend_, *stream, compute_);
  ASSIGN_OR_RETURN(VitTower tower, VitTower::Load(loader, config_.tower));
  tower_ = std::move(tower);
  ASSIGN_OR_RETURN(projector_.weight, loader.Linear({config_.projector + ".weight"}));
  if (config_.projector_bias) {
    ASSIGN_OR_RETURN(projector_.bias, loader.Vector({config_.projector + ".bias"}));
  }
  ASSIGN_OR_RETURN(DecoderTrunk trunk, DecoderTrunk::Load(loader, config_.trunk));
  trunk_ = std::move(trunk);
  if (config_.expert) {
    ASSIGN_OR_RETURN(ActionExpert expert, ActionExpert::Load(loader, *config_.expert));
    expert_ = std::move(expert);
  } else {
    RETURN_IF_ERROR(LoadFast());
  }
  RETURN_IF_ERROR(LoadShuffle(*stream));
  spec_ = PolicySpec(checkpoint, config_);
  if (framing_) spec_.head.stop_tokens = {framing_->stop()};
  spec_.compute = compute_;
  spec_.kv.block_tokens = options.block_tokens;
  spec_.kv.dtype = compute_;
  spec_.weight_bytes = loader.device_bytes();
  if (framing_) spec_.stop_tokens = {framing_->stop()};
  // Beside the weights and config.json, which the first digest covers, the K/V bytes depend on what
  // other files say of the architecture.
  DigestBuilder digest("model.lerobot_policy.v1");
  digest.Field(checkpoint.WeightsFingerprint())
      .Field(config_.family)
      .Field(DTypeName(compute_))
      .Field(uint64_t{config_.tower.heads})
      .Field(uint64_t{config_.shuffle})
      .Field(uint64_t{config_.trunk.heads})
      .Field(uint64_t{config_.trunk.kv_heads})
      .Field(uint64_t{config_.trunk.head_dim})
      .Field(StrCat(config_.trunk.epsilon, " ", config_.trunk.rope_theta));
  spec_.fingerprint = digest.Finish();
  return absl::OkStatus();
}

absl::Status LerobotPolicy::LoadFast() {
  const FastSpec& spec = *config_.fast;
  ASSIGN_OR_RETURN(FastTokens fast,
                   FastTokens::Load(spec.dir, config_.horizon, config_.action_dim()));
  ASSIGN_OR_RETURN(FastFraming framing, FastFraming::Make(*tokenizer_, spec.vocabulary,
                                                          spec.skipped, fast.vocabulary()));
  fast_ = std::move(fast);
  framing_ = std::move(framing);
  return absl::OkStatus();
}

// Constants of the projection: what its output is multiplied with, and the order of patches.
absl::Status LerobotPolicy::LoadShuffle(Stream& stream) {
  if (config_.vision_scale != 1) {
    std::vector<float> scale(config_.trunk.hidden, config_.vision_scale);
    const TensorView host = TensorView::Dense(scale.data(), DType::kF32, MemKind::kHost,
                                              {static_cast<int64_t>(scale.size())});
    ASSIGN_OR_RETURN(vision_scale_, Upload(backend_, stream, host, DType::kF32));
  }
  if (config_.shuffle == 1) return absl::OkStatus();
  // Token (i, j) is the patches (s i + dy, s j + dx), dy and dx in that order.
  const uint32_t s = config_.shuffle;
  const uint32_t side = config_.tower.image_size / config_.tower.patch_size;
  std::vector<int32_t> order;
  for (uint32_t i = 0; i < side; i += s) {
    for (uint32_t j = 0; j < side; j += s) {
      for (uint32_t dy = 0; dy < s; ++dy) {
        for (uint32_t dx = 0; dx < s; ++dx) {
          order.push_back(static_cast<int32_t>((i + dy) * side + j + dx));
        }
      }
    }
  }
  const TensorView host = TensorView::Dense(order.data(), DType::kI32, MemKind::kHost,
                                            {static_cast<int64_t>(order.size())});
  ASSIGN_OR_RETURN(shuffle_, Upload(backend_, stream, host, DType::kI32));
  return absl::OkStatus();
}

// --- host side ---

absl::StatusOr<std::vector<int32_t>> LerobotPolicy::EncodeText(std::string_view text) const {
  absl::StatusOr<std::vector<int32_t>> ids = tokenizer_->Encode(text, {.allow_special = false});
  if (!ids.ok()) return InvalidField("instruction", FromAbsl(ids.status().message()));
  // Only a tokenizer of another model has ids that the embedding table lacks.
  const auto vocab = static_cast<int32_t>(config_.trunk.vocab);
  for (const int32_t id : *ids) {
    if (id >= vocab) {
      return InvalidField("instruction", StrCat("the tokenizer gives id ", id,
                                                ", but the vocabulary has ", vocab, " ids"));
    }
  }
  return ids;
}

absl::StatusOr<Prompt> LerobotPolicy::PromptOf(std::span<const int32_t> ids, uint64_t missing,
                                               std::string_view field) const {
  if (ids.empty()) return InvalidField(field, "there is no text");
  if (ids.size() > config_.max_text) {
    return NeverFits(field, StrCat("too long: ", ids.size(), " tokens of text, the model takes ",
                                   config_.max_text));
  }
  Prompt prompt;
  std::vector<int32_t> text;
  const auto flush = [&] {
    if (!text.empty()) prompt.segments.push_back({Modality::kText, std::exchange(text, {})});
  };
  const auto add = [&](std::span<const int32_t> tokens) {
    text.insert(text.end(), tokens.begin(), tokens.end());
  };
  uint32_t absent = config_.empty_cameras;
  const auto cameras = static_cast<uint32_t>(config_.cameras.size());
  uint32_t present = 0;
  for (uint32_t camera = 0; camera < cameras; ++camera) {
    if ((missing >> camera & 1) != 0) continue;
    ++present;
    add(config_.before_frame);
    flush();
    prompt.segments.push_back({Modality::kVision, {}, camera});
    add(config_.after_frame);
  }
  if (present == 0) return InvalidField("cameras", "the model needs a frame of at least one");
  // Empty frames are masked, but what stands around them is not.
  for (; absent > 0; --absent) {
    add(config_.before_frame);
    add(config_.after_frame);
  }
  add(ids);
  if (bos_ >= 0) text.push_back(bos_);
  flush();
  prompt.bidirectional = static_cast<uint32_t>(prompt.segments.size());
  if (config_.state_in_prompt()) {
    PromptSegment state;
    state.modality = Modality::kState;
    state.rows = 1;
    prompt.segments.push_back(std::move(state));
  }
  return prompt;
}

absl::StatusOr<Prompt> LerobotPolicy::BuildPrompt(const PromptInput& input) const {
  if (input.state.size() != config_.state_width) {
    return InvalidField(
        "state", StrCat(input.state.size(), " normalised values, expected ", config_.state_width));
  }
  ASSIGN_OR_RETURN(const std::string text, PolicyText(config_, input.instruction, input.state));
  ASSIGN_OR_RETURN(const std::vector<int32_t> ids, EncodeText(text));
  return PromptOf(ids, input.missing_cameras, "instruction");
}

absl::StatusOr<Prompt> LerobotPolicy::BuildPromptFromTokens(std::span<const int32_t> ids,
                                                            uint64_t missing_cameras) const {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= static_cast<int32_t>(config_.trunk.vocab)) {
      return InvalidField(kIds, StrCat("id ", ids[i], " at index ", i, " is outside [0, ",
                                       config_.trunk.vocab, ")"));
    }
  }
  return PromptOf(ids, missing_cameras, kIds);
}

absl::StatusOr<ModelImage> LerobotPolicy::Preprocess(uint32_t camera, ImageRows& rows) const {
  RETURN_IF_ERROR(CheckCamera(spec_, camera));
  return ResizeWithPad(rows, config_.tower.image_size, config_.tower.image_size, config_.pad_side);
}

absl::StatusOr<std::vector<float>> LerobotPolicy::NormalizeState(
    std::span<const float> state, std::string_view statistics_key) const {
  ASSIGN_OR_RETURN(const PolicyAdapters* adapters, FindAdapters(config_.adapters, statistics_key));
  std::vector<float> robot(state.begin(), state.end());
  if (config_.aloha == AlohaStage::kRobot) {
    RETURN_IF_ERROR(AlohaStateToPi(AlohaVersion::kLerobot, robot));
  }
  ASSIGN_OR_RETURN(std::vector<float> out, adapters->state.Normalize(robot, config_.state_width));
  if (config_.aloha == AlohaStage::kNormalised) {
    RETURN_IF_ERROR(AlohaStateToPi(AlohaVersion::kLerobot, out));
  }
  return out;
}

absl::StatusOr<ActionChunk> LerobotPolicy::FinishActions(std::span<const float> chunk,
                                                         std::string_view statistics_key,
                                                         std::span<const float> state) const {
  ASSIGN_OR_RETURN(const PolicyAdapters* adapters, FindAdapters(config_.adapters, statistics_key));
  const size_t width = config_.action_width;
  if (!expert_) return absl::UnimplementedError("the model answers in tokens");
  if (chunk.size() != config_.horizon * width) {
    return absl::InvalidArgumentError(
        StrCat("a chunk of ", chunk.size(), " values, expected ", config_.horizon, " x ", width));
  }
  const size_t dim = adapters->action.dim();
  ActionChunk out;
  out.horizon = config_.served_actions;
  std::vector<double> normalized;
  for (size_t step = 0; step < out.horizon; ++step) {
    const auto row = chunk.subspan(step * width, dim);
    normalized.insert(normalized.end(), row.begin(), row.end());
  }
  if (config_.aloha == AlohaStage::kNormalised) {
    RETURN_IF_ERROR(AlohaActionsFromPi(AlohaVersion::kLerobot, dim, normalized));
  }
  out.normalized.assign(normalized.begin(), normalized.end());
  ASSIGN_OR_RETURN(out.values, adapters->action.Unnormalize(normalized, dim));
  if (config_.aloha == AlohaStage::kRobot) {
    RETURN_IF_ERROR(AlohaActionsFromPi(AlohaVersion::kLerobot, dim, out.values));
  }
  RETURN_IF_ERROR(AddState(adapters->relative, state, dim, out.values));
  return out;
}

bool LerobotPolicy::IsActionToken(int32_t id) const {
  if (!framing_) return false;
  const absl::StatusOr<std::vector<int32_t>> ids =
      framing_->FastIds(std::array<int32_t, 1>{id}, FastPolicy::kReference);
  return id != framing_->stop() && ids.ok() && !ids->empty() && ids->front() >= 0 &&
         ids->front() < static_cast<int32_t>(fast_->vocabulary());
}

absl::StatusOr<ActionChunk> LerobotPolicy::DecodeActions(std::span<const int32_t> tokens,
                                                         std::string_view statistics_key,
                                                         InvalidTokenPolicy policy) const {
  if (!framing_) return absl::UnimplementedError("the model answers in chunks, not in tokens");
  ASSIGN_OR_RETURN(const PolicyAdapters* adapters, FindAdapters(config_.adapters, statistics_key));
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] != kInvalidSample) continue;
    ErrorInfo info;
    info.reason = Reason::kNonFinite;
    return MakeError(absl::StatusCode::kInternal,
                     StrCat("action token ", i, ": the logits held NaN or Inf"), info);
  }
  const FastPolicy fast =
      policy == InvalidTokenPolicy::kFail ? FastPolicy::kStrict : FastPolicy::kReference;
  ASSIGN_OR_RETURN(const std::vector<int32_t> ids, framing_->FastIds(tokens, fast));
  ASSIGN_OR_RETURN(std::vector<double> actions, fast_->Decode(ids, fast));
  const size_t dim = adapters->action.dim();
  ActionChunk out;
  out.tokens.assign(tokens.begin(), tokens.end());
  out.horizon = config_.served_actions;
  actions.resize(out.horizon * dim);
  // The reference hands F32 on.
  for (double& action : actions) action = static_cast<double>(static_cast<float>(action));
  out.normalized.assign(actions.begin(), actions.end());
  ASSIGN_OR_RETURN(out.values, adapters->action.Unnormalize(actions, dim));
  return out;
}

// As torch has it: linspace and all that follows in F64, then rounded.
void LerobotPolicy::EmbedTime(float t, std::span<float> out) const {
  const size_t half = out.size() / 2;
  const double ratio = config_.max_period / config_.min_period;
  const double step = half > 1 ? 1.0 / static_cast<double>(half - 1) : 0.0;
  for (size_t i = 0; i < half; ++i) {
    const double fraction = i < half / 2 ? static_cast<double>(i) * step
                                         : 1.0 - static_cast<double>(half - 1 - i) * step;
    const double period = config_.min_period * std::pow(ratio, fraction);
    const double angle = 1.0 / period * 2 * std::numbers::pi * static_cast<double>(t);
    out[i] = static_cast<float>(std::sin(angle));
    out[half + i] = static_cast<float>(std::cos(angle));
  }
}

// --- worker side ---

absl::Status LerobotPolicy::Project(ExecContext& ctx, const TensorView& features,
                                    std::span<const TensorView> out) const {
  const ArenaScope scope(ctx.arena);
  const int64_t patches = config_.tower.patches();
  const int64_t tokens = config_.vision_tokens();
  TensorView shuffled;
  if (shuffle_ != nullptr) {
    ASSIGN_OR_RETURN(shuffled, ctx.arena.New(DType::kF32, {patches, config_.tower.width}));
  }
  for (size_t g = 0; g < out.size(); ++g) {
    const auto begin = static_cast<int64_t>(g) * patches;
    TensorView x = features.Rows(begin, begin + patches);
    if (shuffle_ != nullptr) {
      RETURN_IF_ERROR(
          ctx.ops.GatherRows(ctx.stream, x, shuffle_->View(DType::kI32, {patches}), shuffled));
      x = shuffled.Reshape({tokens, patches / tokens * config_.tower.width});
    }
    LinearArgs args = projector_.Args(x, out[g]);
    if (vision_scale_ != nullptr) {
      args.scale = vision_scale_->View(DType::kF32, {config_.trunk.hidden});
    }
    RETURN_IF_ERROR(ctx.ops.Linear(ctx.stream, args));
  }
  return absl::OkStatus();
}

absl::Status LerobotPolicy::Encode(ExecContext& ctx, const EncodeBatch& batch) const {
  const auto frames = static_cast<int64_t>(batch.out.size());
  if (frames == 0) return absl::OkStatus();
  const int64_t size = config_.tower.image_size;
  if (batch.rgb.rank != 4 || batch.rgb.dtype != DType::kF32 || batch.rgb.dim(0) != frames ||
      batch.rgb.dim(1) != size || batch.rgb.dim(2) != size) {
    return absl::InvalidArgumentError(
        StrCat(config_.family, ": ", frames, " frames do not fit ", batch.rgb.DebugString()));
  }
  const ArenaScope scope(ctx.arena);
  StageTap tap(ctx, backend_);
  const LayerRange& run = batch.layers;
  // What a later slice goes on with: laid out alike by every slice.
  std::optional<Arena> parked;
  if (run.parked != nullptr) parked.emplace(*run.parked);
  Arena& kept = parked.has_value() ? *parked : ctx.arena;
  ASSIGN_OR_RETURN(const TensorView features,
                   kept.New(DType::kF32, {frames * config_.tower.patches(), config_.tower.width}));
  const uint32_t blocks = config_.tower.blocks;
  const uint32_t end = std::min(run.end, blocks);
  if (run.begin < end) {
    RETURN_IF_ERROR(tower_->Run(ctx, tap, kept, run.begin, end, batch.rgb, features));
    if (end == blocks) RETURN_IF_ERROR(tap.Record("vision.features", features));
  }
  if (!run.Has(blocks)) return tap.Finish();
  RETURN_IF_ERROR(Project(ctx, features, batch.out));
  for (const TensorView& out : batch.out) RETURN_IF_ERROR(tap.Record("vision.projected", out));
  return tap.Finish();
}

absl::Status LerobotPolicy::Forward(ExecContext& ctx, const TrunkBatch& batch) const {
  StageTap tap(ctx, backend_);
  RETURN_IF_ERROR(trunk_->Forward(ctx, tap, batch));
  return tap.Finish();
}

absl::Status LerobotPolicy::Denoise(ExecContext& ctx, const DenoiseBatch& batch) const {
  if (!expert_) return absl::UnimplementedError("the model has no flow head");
  StageTap tap(ctx, backend_);
  RETURN_IF_ERROR(expert_->Denoise(ctx, tap, batch));
  return tap.Finish();
}

// Tensors of the published files that no answer depends on.
bool Unused(const PolicyConfig& config, std::string_view name) {
  if (StartsWith(name, "normalize_inputs.") || StartsWith(name, "normalize_targets.") ||
      StartsWith(name, "unnormalize_outputs.")) {
    return true;
  }
  // Of the VLM where nothing is written, and of the expert anyway.
  if (name.ends_with("lm_head.weight") || name.ends_with(".rotary_emb.inv_freq")) return true;
  if (StartsWith(name, config.tower.prefix)) {
    return StartsWith(name.substr(config.tower.prefix.size()), "head.");
  }
  if (StartsWith(name, config.trunk.prefix)) {
    const std::string_view part = name.substr(config.trunk.prefix.size());
    // The last layer only caches, and later ones do not run.
    if (part == "embed_tokens.weight") return true;
    if (!config.trunk.head.empty()) return false;
    if (part == "norm.weight") return true;
    const std::string last = StrCat("layers.", config.trunk.layers - 1, ".");
    if (StartsWith(part, last)) {
      const std::string_view of_layer = part.substr(last.size());
      return of_layer == "self_attn.o_proj.weight" || of_layer == "mlp.gate_proj.weight" ||
             of_layer == "mlp.up_proj.weight" || of_layer == "mlp.down_proj.weight" ||
             of_layer == "post_attention_layernorm.weight";
    }
    if (!StartsWith(part, "layers.")) return false;
    uint32_t index = 0;
    const char* end = part.data() + part.size();
    return std::from_chars(part.data() + 7, end, index).ec == std::errc() &&
           index >= config.trunk.layers;
  }
  // pi0.5 made of a pi0 keeps its layer of the state.
  if (config.expert && config.expert->adaptive &&
      StartsWith(name, StrCat(config.expert->ends, "state_proj."))) {
    return true;
  }
  return config.expert && StartsWith(name, config.expert->prefix) &&
         name.substr(config.expert->prefix.size()) == "embed_tokens.weight";
}

}  // namespace

std::vector<TensorSpec> PolicyConfig::Tensors() const {
  std::vector<TensorSpec> out = tower.Tensors();
  const auto append = [&](std::vector<TensorSpec> part) {
    out.insert(out.end(), std::make_move_iterator(part.begin()),
               std::make_move_iterator(part.end()));
  };
  const int64_t hidden = trunk.hidden;
  out.push_back({StrCat(projector, ".weight"),
                 {hidden, int64_t{shuffle} * shuffle * tower.width},
                 TensorUse::kMatrix});
  if (projector_bias) out.push_back({StrCat(projector, ".bias"), {hidden}, TensorUse::kVector});
  append(trunk.Tensors());
  if (expert) append(expert->Tensors());
  return out;
}

size_t PolicyConfig::WorkspaceBytes(uint32_t frames, uint32_t rows, uint32_t logit_rows,
                                    DType compute) const {
  const uint64_t patches = uint64_t{frames} * tower.patches();
  const size_t shuffled = shuffle == 1 ? 0 : ArenaBytes(tower.patches(), tower.width, DType::kF32);
  return std::max(ArenaBytes(patches, tower.width, DType::kF32) +
                      std::max(tower.WorkspaceBytes(frames, compute), shuffled),
                  trunk.WorkspaceBytes(rows, logit_rows, compute));
}

size_t PolicyConfig::ParkingBytes(uint32_t frames, uint32_t rows, uint32_t logit_rows) const {
  const uint64_t patches = uint64_t{frames} * tower.patches();
  return std::max(ArenaBytes(patches, tower.width, DType::kF32) + tower.ParkingBytes(frames),
                  trunk.ParkingBytes(rows, logit_rows));
}

ModelSpec PolicySpec(const Checkpoint& checkpoint, const PolicyConfig& config) {
  ModelSpec spec;
  spec.family = config.family;
  spec.cameras = config.cameras;
  for (CameraSpec& camera : spec.cameras) {
    camera.width = config.tower.image_size;
    camera.height = config.tower.image_size;
    camera.optional = true;
  }
  for (const PolicyAdapters& adapters : config.adapters) {
    spec.statistics.push_back({adapters.key, static_cast<uint32_t>(adapters.action.dim())});
  }
  spec.state_dim = config.state_dim();
  spec.state_width = config.state_width;
  spec.state_in_text = config.prompt == PromptStyle::kTaskAndState;
  // Where they are relative FinishActions adds the state; else nobody says what they are.
  if (!config.adapters.front().relative.empty()) spec.relative_actions = false;
  spec.head.relative =
      std::any_of(config.adapters.begin(), config.adapters.end(), [](const PolicyAdapters& set) {
        return std::find(set.relative.begin(), set.relative.end(), true) != set.relative.end();
      });
  spec.head.horizon = config.horizon;
  spec.head.served = config.served_actions;
  if (config.expert) {
    spec.head.kind = HeadKind::kFlow;
    spec.head.width = config.action_width;
    spec.head.steps = config.steps;
    spec.head.time_width = config.expert->hidden;
    spec.head.state_row = config.expert->state_width > 0;
    spec.head.mask = config.mask;
    spec.head.layers = config.expert->LayerCosts();
  } else {
    spec.vocab_size = config.trunk.vocab;
    spec.max_action_tokens = config.fast->max_tokens;
  }
  spec.kv.layers = config.trunk.cache_layers();
  spec.kv.kv_heads = config.trunk.kv_heads;
  spec.kv.head_dim = config.trunk.head_dim;
  spec.hidden = config.trunk.hidden;
  spec.vision_tokens = config.vision_tokens();
  const auto around = static_cast<uint32_t>(config.before_frame.size() + config.after_frame.size());
  const auto cameras = static_cast<uint32_t>(config.cameras.size());
  spec.max_positions = cameras * spec.vision_tokens + (cameras + config.empty_cameras) * around +
                       config.max_text + (config.second_bos ? 1 : 0) +
                       (config.state_in_prompt() ? 1 : 0) +
                       (config.expert ? spec.head.suffix_rows() : spec.max_action_tokens);
  spec.max_group_rows =
      spec.max_positions - (config.expert ? spec.head.suffix_rows() : spec.max_action_tokens);
  spec.vision_layers = config.tower.LayerCosts();
  const uint64_t projector =
      uint64_t{config.shuffle} * config.shuffle * config.tower.width * config.trunk.hidden;
  // Rows of a frame are its patches, of which several make a token.
  spec.vision_layers.push_back({projector, projector / (config.shuffle * config.shuffle)});
  spec.trunk_layers = config.trunk.LayerCosts();
  for (const std::string& name : checkpoint.names()) {
    const absl::StatusOr<TensorView> tensor = checkpoint.Tensor(name);
    if (tensor.ok()) spec.parameters += static_cast<uint64_t>(tensor->numel());
  }
  return spec;
}

std::vector<std::string> PolicyTensorProblems(const Checkpoint& checkpoint,
                                              const PolicyConfig& config) {
  const std::vector<TensorSpec> tensors = config.Tensors();
  std::vector<std::string> problems = CheckTensors(checkpoint, tensors);
  std::vector<std::string_view> expected;
  for (const TensorSpec& tensor : tensors) expected.push_back(tensor.name);
  std::sort(expected.begin(), expected.end());
  for (const std::string& name : checkpoint.names()) {
    if (std::binary_search(expected.begin(), expected.end(), std::string_view(name))) continue;
    if (!Unused(config, name)) {
      problems.push_back(StrCat(name, ": is no part of ", config.family));
    }
  }
  return problems;
}

absl::StatusOr<std::string> PolicyText(const PolicyConfig& config, std::string_view instruction,
                                       std::span<const float> state) {
  if (config.prompt == PromptStyle::kLine) {
    std::string line(instruction);
    if (line.empty() || line.back() != '\n') line += '\n';
    return line;
  }
  std::string task = Stripped(instruction);
  std::replace(task.begin(), task.end(), '_', ' ');
  std::replace(task.begin(), task.end(), '\n', ' ');
  std::string bins;
  for (const float x : state) {
    if (!std::isfinite(x)) return InvalidField("state", "a value is not finite");
    StrAppend(&bins, bins.empty() ? "" : " ", BinOf(x));
  }
  return StrCat("Task: ", task, ", State: ", bins, ";\n", config.prompt_end);
}

absl::StatusOr<uint32_t> PolicyTextTokens(const PolicyConfig& config,
                                          std::string_view instruction) {
  ASSIGN_OR_RETURN(const std::unique_ptr<const Tokenizer> tokenizer,
                   Tokenizer::Load(config.tokenizer_dir));
  ASSIGN_OR_RETURN(const std::string text,
                   PolicyText(config, instruction, std::vector<float>(config.state_width)));
  ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                   tokenizer->Encode(text, {.allow_special = false}));
  return static_cast<uint32_t>(ids.size());
}

absl::StatusOr<std::unique_ptr<Model>> LoadLerobotPolicy(const Checkpoint& checkpoint,
                                                         Backend& backend,
                                                         const ModelOptions& options,
                                                         PolicyConfig config) {
  auto model = std::make_unique<LerobotPolicy>(std::move(config), backend, options.compute);
  RETURN_IF_ERROR(model->Load(checkpoint, options));
  return model;
}

}  // namespace saccade
