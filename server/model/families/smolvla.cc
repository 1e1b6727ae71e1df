#include "model/families/smolvla.h"

#include <cmath>
#include <filesystem>
#include <string>
#include <utility>

#include "base/strings.h"
#include "model/families/lerobot_config.h"
#include "model/tokenizer.h"

namespace saccade {
namespace {

constexpr std::string_view kVlm = "model.vlm_with_expert.vlm.model.";
constexpr std::string_view kExpert = "model.vlm_with_expert.lm_expert.";

// The folder's config.json; nullopt: it has none.
absl::StatusOr<std::optional<Json>> VlmConfig(const std::string& dir) {
  const std::string path = dir + "/config.json";
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return std::nullopt;
  ASSIGN_OR_RETURN(Json config, ReadJsonFile(path));
  return config;
}

struct VlmSizes {
  uint32_t heads = 15;
  uint32_t kv_heads = 5;
  uint32_t vision_heads = 12;
  uint32_t shuffle = 4;
  double epsilon = 1e-5;
};

absl::StatusOr<VlmSizes> ReadVlm(const std::optional<Json>& json) {
  VlmSizes sizes;
  if (!json) return sizes;
  const JsonView config(*json, "vlm config.json");
  const auto read = [](const JsonView& from, std::string_view key, int64_t most,
                       uint32_t& to) -> absl::Status {
    ASSIGN_OR_RETURN(const int64_t value, from.Int(key, 1, most));
    to = static_cast<uint32_t>(value);
    return absl::OkStatus();
  };
  ASSIGN_OR_RETURN(const JsonView text, config.Get("text_config"));
  ASSIGN_OR_RETURN(const JsonView vision, config.Get("vision_config"));
  RETURN_IF_ERROR(read(text, "num_attention_heads", 1024, sizes.heads));
  RETURN_IF_ERROR(read(text, "num_key_value_heads", 1024, sizes.kv_heads));
  RETURN_IF_ERROR(read(vision, "num_attention_heads", 1024, sizes.vision_heads));
  RETURN_IF_ERROR(read(config, "scale_factor", 64, sizes.shuffle));
  ASSIGN_OR_RETURN(sizes.epsilon, text.Double("rms_norm_eps", 1e-5));
  if (!(sizes.epsilon >= 0 && sizes.epsilon < 1)) return text.Error("rms_norm_eps: out of range");
  ASSIGN_OR_RETURN(const std::string act, text.String("hidden_act", "silu"));
  if (act != "silu") return text.Error("hidden_act: only \"silu\" is supported");
  for (const char* key : {"attention_bias", "mlp_bias"}) {
    ASSIGN_OR_RETURN(const bool bias, text.Bool(key, false));
    if (bias) return text.Error(StrCat(key, ": biases are not supported"));
  }
  ASSIGN_OR_RETURN(const std::string gelu, vision.String("hidden_act", "gelu_pytorch_tanh"));
  if (gelu != "gelu_pytorch_tanh") {
    return vision.Error("hidden_act: only \"gelu_pytorch_tanh\" is supported");
  }
  ASSIGN_OR_RETURN(const double epsilon, vision.Double("layer_norm_eps", 1e-6));
  if (epsilon != 1e-6) return vision.Error("layer_norm_eps: only 1e-6 is supported");
  return sizes;
}

// The trunk: the first layers of the VLM's decoder. Its RoPE is the policy's own, theta 1e4,
// whatever the VLM's config says.
absl::StatusOr<DecoderSpec> ReadTrunk(const Checkpoint& checkpoint, const VlmSizes& sizes,
                                      const PolicyConfig& policy) {
  const JsonView config = checkpoint.config_view();
  DecoderSpec trunk;
  trunk.prefix = StrCat(kVlm, "text_model.");
  trunk.table = trunk.prefix + "embed_tokens.weight";
  ASSIGN_OR_RETURN(const std::vector<uint32_t> table, SizesOf(checkpoint, trunk.table, 2));
  ASSIGN_OR_RETURN(
      const std::vector<uint32_t> q,
      SizesOf(checkpoint, StrCat(trunk.prefix, "layers.0.self_attn.q_proj.weight"), 2));
  ASSIGN_OR_RETURN(const std::vector<uint32_t> mlp,
                   SizesOf(checkpoint, StrCat(trunk.prefix, "layers.0.mlp.gate_proj.weight"), 2));
  ASSIGN_OR_RETURN(const int64_t layers, config.Int("num_vlm_layers", 0, kMaxLayers, 16));
  const uint32_t present = CountBlocks(checkpoint, StrCat(trunk.prefix, "layers."));
  trunk.layers = layers > 0 ? static_cast<uint32_t>(layers) : present;
  if (trunk.layers == 0 || trunk.layers > present) {
    return config.Error(
        StrCat("num_vlm_layers is ", layers, ", but the checkpoint has ", present, " layers"));
  }
  trunk.vocab = table[0];
  trunk.hidden = table[1];
  trunk.heads = sizes.heads;
  trunk.kv_heads = sizes.kv_heads;
  trunk.intermediate = mlp[0];
  if (mlp[0] > kMaxWidth || q[0] > kMaxWidth || q[0] % (2 * trunk.heads) != 0 ||
      trunk.heads % trunk.kv_heads != 0) {
    return absl::InvalidArgumentError(StrCat(checkpoint.dir(), ": ", trunk.heads, " heads and ",
                                             trunk.kv_heads, " of keys do not fit a projection of ",
                                             q[0], " rows"));
  }
  trunk.head_dim = q[0] / trunk.heads;
  trunk.epsilon = static_cast<float>(sizes.epsilon);
  trunk.embedding_scale = static_cast<float>(std::sqrt(static_cast<double>(trunk.hidden)));
  trunk.state = "model.state_proj";
  trunk.state_width = policy.state_width;
  return trunk;
}

// The expert: as many layers as the trunk, of which every n-th attends to its own rows, too; the
// others read K and V that they derive from the trunk's.
absl::Status ReadExpert(const Checkpoint& checkpoint, PolicyConfig& out) {
  const JsonView config = checkpoint.config_view();
  ExpertSpec& expert = out.expert.emplace();
  expert.horizon = out.horizon;
  expert.action_width = out.action_width;
  DecoderSpec& trunk = out.trunk;
  expert.prefix = kExpert;
  expert.ends = "model.";
  expert.time_mlp = "model.action_time_mlp";
  ASSIGN_OR_RETURN(const std::vector<uint32_t> gate,
                   SizesOf(checkpoint, StrCat(kExpert, "layers.0.mlp.gate_proj.weight"), 2));
  expert.intermediate = gate[0];
  expert.hidden = gate[1];
  if (gate[0] > kMaxWidth || gate[1] % 2 != 0) {
    return absl::InvalidArgumentError(
        StrCat(checkpoint.dir(), ": the expert's sizes make no sense"));
  }
  expert.layers = trunk.layers;
  expert.heads = trunk.heads;
  expert.kv_heads = trunk.kv_heads;
  expert.head_dim = trunk.head_dim;
  expert.epsilon = trunk.epsilon;
  ASSIGN_OR_RETURN(const int64_t layers, config.Int("num_expert_layers", -1, kMaxLayers, -1));
  if (layers > 0 && layers != trunk.layers) {
    return absl::UnimplementedError(StrCat(
        "config.json: num_expert_layers: ", layers,
        " is not supported: the expert must have as many layers as the VLM, ", trunk.layers));
  }
  ASSIGN_OR_RETURN(const std::string mode, config.String("attention_mode", "cross_attn"));
  if (mode != "cross_attn" && mode != "self_attn") {
    return config.Error(
        StrCat("attention_mode: \"", mode, "\" is unknown; known: cross_attn, self_attn"));
  }
  ASSIGN_OR_RETURN(const int64_t every, config.Int("self_attn_every_n_layers", -1, kMaxLayers, 2));
  for (uint32_t n = 0; n < expert.layers; ++n) {
    const bool self = mode == "self_attn" || (every > 0 && n % every == 0);
    if (self) {
      expert.cross.push_back(-1);
      continue;
    }
    expert.cross.push_back(static_cast<int32_t>(trunk.cache_layers()));
    const std::string layer = StrCat(kExpert, "layers.", n, ".self_attn.");
    trunk.derived.push_back({n, layer + "k_proj.weight", layer + "v_proj.weight"});
  }
  return absl::OkStatus();
}

}  // namespace

bool IsSmolVla(const Checkpoint& checkpoint, const ModelOptions& /*options*/) {
  return IsLerobotPolicy(checkpoint, "smolvla");
}

absl::Status AddImageTokens(PolicyConfig& config) {
  ASSIGN_OR_RETURN(const std::unique_ptr<const Tokenizer> tokenizer,
                   Tokenizer::Load(config.tokenizer_dir));
  for (const std::string_view token : {"<fake_token_around_image>", "<global-img>"}) {
    const std::optional<int32_t> id = tokenizer->TokenToId(token);
    if (!id || *id < 0 || *id >= static_cast<int32_t>(config.trunk.vocab)) {
      return absl::InvalidArgumentError(
          StrCat("config.json: add_image_special_tokens: the tokenizer has no ", token));
    }
    config.before_frame.push_back(
        static_cast<int32_t>(config.trunk.vocab + config.trunk.unscaled.size()));
    config.trunk.unscaled.push_back(*id);
  }
  config.after_frame = {config.before_frame.front()};
  return absl::OkStatus();
}

absl::StatusOr<PolicyConfig> ReadSmolVla(const Checkpoint& checkpoint) {
  const JsonView config = checkpoint.config_view();
  PolicyConfig out;
  out.family = "smolvla";
  RETURN_IF_ERROR(ReadLerobotPolicy(checkpoint, {"num_steps", 48}, out));
  ASSIGN_OR_RETURN(const std::string vlm, config.String("vlm_model_name", ""));
  ASSIGN_OR_RETURN(out.tokenizer_dir, FindTokenizer(checkpoint, vlm, "vlm"));
  ASSIGN_OR_RETURN(const std::optional<Json> vlm_json, out.tokenizer_dir == checkpoint.dir()
                                                           ? std::optional<Json>()
                                                           : VlmConfig(out.tokenizer_dir));
  ASSIGN_OR_RETURN(const VlmSizes sizes, ReadVlm(vlm_json));
  ASSIGN_OR_RETURN(const uint32_t image, ReadSquare(config, "resize_imgs_with_padding", 512));
  ASSIGN_OR_RETURN(out.tower,
                   ReadSiglip(checkpoint, StrCat(kVlm, "vision_model."), image, sizes.vision_heads,
                              /*any_size=*/true));
  out.pad_side = PadSide::kLeftTop;
  out.shuffle = sizes.shuffle;
  if (image / out.tower.patch_size % out.shuffle != 0) {
    return config.Error(StrCat("resize_imgs_with_padding: ", image / out.tower.patch_size,
                               " patches are no multiple of the scale_factor ", out.shuffle));
  }
  out.projector = StrCat(kVlm, "connector.modality_projection.proj");
  ASSIGN_OR_RETURN(out.trunk, ReadTrunk(checkpoint, sizes, out));
  out.vision_scale = out.trunk.embedding_scale;
  RETURN_IF_ERROR(ReadExpert(checkpoint, out));
  out.mask = SuffixMask::kCausal;
  out.prompt = PromptStyle::kLine;
  ASSIGN_OR_RETURN(const bool around, config.Bool("add_image_special_tokens", false));
  if (around) RETURN_IF_ERROR(AddImageTokens(out));
  return out;
}

absl::StatusOr<std::unique_ptr<Model>> LoadSmolVla(const Checkpoint& checkpoint, Backend& backend,
                                                   const ModelOptions& options) {
  ASSIGN_OR_RETURN(PolicyConfig config, ReadSmolVla(checkpoint));
  return LoadLerobotPolicy(checkpoint, backend, options, std::move(config));
}

}  // namespace saccade
