#include "model/families/openvla_config.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "base/strings.h"
#include "model/layers_scope.h"

namespace saccade {
namespace {

constexpr std::string_view kLanguageModel = "language_model.";
constexpr int64_t kMaxWidth = 1 << 20;  // of anything that multiplies another size
constexpr int64_t kMaxLayers = 4096;

// Towers of Prismatic whose widths, depths and head counts no checkpoint states (timm 0.9).
struct KnownTower {
  std::string_view timm_id;
  uint32_t width;
  uint32_t depth;
  uint32_t heads;
};
constexpr std::array kKnownTowers = {
    KnownTower{"vit_large_patch14_reg4_dinov2.lvd142m", 1024, 24, 16},
    KnownTower{"vit_so400m_patch14_siglip_224", 1152, 27, 16},
    KnownTower{"vit_so400m_patch14_siglip_384", 1152, 27, 16},
};

// What the reference derives from vision_backbone_id when a config leaves the timm ids or the image
// sizes out.
struct KnownBackbone {
  std::string_view id;
  std::array<std::string_view, 2> timm_ids;
  uint32_t image_size;

  std::vector<std::string> towers() const {
    std::vector<std::string> names;
    for (const std::string_view timm_id : timm_ids) {
      if (!timm_id.empty()) names.emplace_back(timm_id);
    }
    return names;
  }
};
constexpr std::array kKnownBackbones = {
    KnownBackbone{"dinov2-vit-l", {"vit_large_patch14_reg4_dinov2.lvd142m", ""}, 224},
    KnownBackbone{"siglip-vit-so400m", {"vit_so400m_patch14_siglip_224", ""}, 224},
    KnownBackbone{"siglip-vit-so400m-384px", {"vit_so400m_patch14_siglip_384", ""}, 384},
    KnownBackbone{"dinosiglip-vit-so-224px",
                  {"vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"},
                  224},
    KnownBackbone{"dinosiglip-vit-so-384px",
                  {"vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_384"},
                  384},
};

bool StartsWith(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

bool Contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// "12.rest" -> 12; nullopt when `text` does not start with a number and a dot.
std::optional<uint32_t> LeadingIndex(std::string_view text) {
  uint32_t index = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), index);
  if (error != std::errc() || end == text.data() + text.size() || *end != '.') return std::nullopt;
  return index;
}

absl::Status Refuse(const JsonView& view, std::string_view key, std::string_view message) {
  ASSIGN_OR_RETURN(const JsonView value, view.Get(key));
  return value.Error(message);
}

// --- text_config: HF LlamaConfig, its defaults where a key is absent ---

absl::Status RefuseUnsupportedLlama(const JsonView& text) {
  ASSIGN_OR_RETURN(const std::string type, text.String("model_type", "llama"));
  if (type != "llama") return Refuse(text, "model_type", "only \"llama\" is supported");
  ASSIGN_OR_RETURN(const std::string act, text.String("hidden_act", "silu"));
  if (act != "silu") return Refuse(text, "hidden_act", "only \"silu\" is supported");
  for (const char* key : {"attention_bias", "mlp_bias"}) {
    ASSIGN_OR_RETURN(const bool bias, text.Bool(key, false));
    if (bias) return Refuse(text, key, "biases are not supported");
  }
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!text.Has(key)) continue;
    ASSIGN_OR_RETURN(const JsonView rope, text.Get(key));
    ASSIGN_OR_RETURN(const std::string kind, rope.String("rope_type", "default"));
    if (kind != "default" || rope.Has("type") || rope.Has("factor")) {
      return rope.Error("only the default RoPE is supported");
    }
  }
  ASSIGN_OR_RETURN(const double rotary, text.Double("partial_rotary_factor", 1.0));
  if (rotary != 1.0) return Refuse(text, "partial_rotary_factor", "only 1 is supported");
  if (text.Has("quantization_config")) {
    return Refuse(text, "quantization_config", "quantised weights are not supported");
  }
  return absl::OkStatus();
}

absl::StatusOr<DecoderSpec> ReadLlama(const JsonView& text) {
  RETURN_IF_ERROR(RefuseUnsupportedLlama(text));
  DecoderSpec llama;
  llama.prefix = StrCat(kLanguageModel, "model.");
  llama.table = llama.prefix + "embed_tokens.weight";
  const auto read = [&](const char* key, int64_t fallback, int64_t max,
                        uint32_t& out) -> absl::Status {
    ASSIGN_OR_RETURN(const int64_t value, text.Int(key, 1, max, fallback));
    out = static_cast<uint32_t>(value);
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(read("vocab_size", 32000, 1 << 24, llama.vocab));
  RETURN_IF_ERROR(read("hidden_size", 4096, kMaxWidth, llama.hidden));
  RETURN_IF_ERROR(read("intermediate_size", 11008, kMaxWidth, llama.intermediate));
  RETURN_IF_ERROR(read("num_hidden_layers", 32, kMaxLayers, llama.layers));
  RETURN_IF_ERROR(read("num_attention_heads", 32, kMaxWidth, llama.heads));
  RETURN_IF_ERROR(read("num_key_value_heads", llama.heads, kMaxWidth, llama.kv_heads));
  if (llama.heads % llama.kv_heads != 0) {
    return Refuse(text, "num_key_value_heads",
                  StrCat("does not divide num_attention_heads = ", llama.heads));
  }
  if (!text.Has("head_dim") && llama.hidden % llama.heads != 0) {
    return text.Error(StrCat("num_attention_heads = ", llama.heads,
                             " does not divide hidden_size = ", llama.hidden));
  }
  RETURN_IF_ERROR(
      read("head_dim", std::max<int64_t>(1, llama.hidden / llama.heads), 65536, llama.head_dim));
  if (llama.head_dim % 2 != 0 || uint64_t{llama.heads} * llama.head_dim > kMaxWidth) {
    return text.Error(StrCat("the size of an attention head, ", llama.head_dim,
                             ", must be even, and all heads at most ", kMaxWidth, " wide"));
  }
  ASSIGN_OR_RETURN(llama.rope_theta, text.Double("rope_theta", 10000.0));
  if (text.Has("rope_parameters")) {
    ASSIGN_OR_RETURN(const JsonView rope, text.Get("rope_parameters"));
    ASSIGN_OR_RETURN(llama.rope_theta, rope.Double("rope_theta", llama.rope_theta));
  }
  if (!(llama.rope_theta > 0)) return text.Error("rope_theta must be positive");
  ASSIGN_OR_RETURN(const double epsilon, text.Double("rms_norm_eps", 1e-6));
  if (!(epsilon >= 0 && epsilon < 1)) return text.Error("rms_norm_eps must be in [0, 1)");
  llama.epsilon = static_cast<float>(epsilon);
  ASSIGN_OR_RETURN(const bool tied, text.Bool("tie_word_embeddings", false));
  llama.head = tied ? llama.table : StrCat(kLanguageModel, "lm_head.weight");
  return llama;
}

// --- vision ---

// The backbone that vision_backbone_id names; null when the config names none.
absl::StatusOr<const KnownBackbone*> Backbone(const JsonView& config) {
  if (!config.Has("vision_backbone_id")) return nullptr;
  ASSIGN_OR_RETURN(const std::string id, config.String("vision_backbone_id"));
  std::string names;
  for (const KnownBackbone& known : kKnownBackbones) {
    if (known.id == id) return &known;
    StrAppend(&names, names.empty() ? "" : ", ", known.id);
  }
  return Refuse(config, "vision_backbone_id", StrCat("unknown \"", id, "\"; known: ", names));
}

absl::StatusOr<std::vector<std::string>> TimmIds(const JsonView& config,
                                                 const KnownBackbone* backbone) {
  if (!config.Has("timm_model_ids")) {
    if (backbone != nullptr) return backbone->towers();
    return config.Error("there are neither timm_model_ids nor a vision_backbone_id");
  }
  ASSIGN_OR_RETURN(const JsonView ids, config.Get("timm_model_ids"));
  ASSIGN_OR_RETURN(std::vector<std::string> names, ids.AsStrings());
  if (names.empty() || names.size() > 2) return ids.Error("expected one or two towers");
  if (backbone != nullptr && names != backbone->towers()) {
    return ids.Error(StrCat(absl::StrJoin(names, ", "),
                            " are not the towers of vision_backbone_id ", backbone->id,
                            ", which are ", absl::StrJoin(backbone->towers(), ", ")));
  }
  return names;
}

// What config.json repeats of preprocessor_config.json must be what is done.
absl::Status CheckImages(const JsonView& config, const Preprocessor& preprocessor,
                         const KnownBackbone* backbone, size_t towers) {
  if (config.Has("image_resize_strategy")) {
    ASSIGN_OR_RETURN(const std::string strategy, config.String("image_resize_strategy"));
    if (std::find(kResizeStrategies.begin(), kResizeStrategies.end(), strategy) ==
        kResizeStrategies.end()) {
      return Refuse(config, "image_resize_strategy",
                    StrCat("unknown \"", strategy, "\"; known: ", KnownResizeStrategies()));
    }
    if (strategy != preprocessor.strategy()) {
      return Refuse(
          config, "image_resize_strategy",
          StrCat("is ", strategy, ", but preprocessor_config.json says ", preprocessor.strategy()));
    }
  }
  if (!config.Has("image_sizes")) {
    if (backbone == nullptr || backbone->image_size == preprocessor.width()) {
      return absl::OkStatus();
    }
    return Refuse(config, "vision_backbone_id",
                  StrCat(backbone->id, " takes images of ", backbone->image_size,
                         " pixels, but preprocessor_config.json makes ", preprocessor.width(),
                         ", and there are no image_sizes"));
  }
  ASSIGN_OR_RETURN(const JsonView view, config.Get("image_sizes"));
  ASSIGN_OR_RETURN(const std::vector<int64_t> sizes, view.AsInts(1, 1 << 16));
  for (const int64_t size : sizes) {
    if (size != preprocessor.width() || sizes.size() != towers) {
      return view.Error(StrCat("expected ", preprocessor.width(), " for each of ", towers,
                               " towers, as in preprocessor_config.json"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<TensorView> TowerTensor(const Checkpoint& checkpoint, const std::string& name,
                                       int rank) {
  if (!checkpoint.Has(name)) {
    return absl::InvalidArgumentError(StrCat(checkpoint.dir(), ": tensor ", name, " is absent"));
  }
  ASSIGN_OR_RETURN(const TensorView view, checkpoint.Tensor(name));
  if (view.rank != rank) {
    return absl::InvalidArgumentError(StrCat(checkpoint.dir(), ": tensor ", name, " is ",
                                             view.DebugString(), ", expected rank ", rank));
  }
  for (int i = 0; i < rank; ++i) {
    if (view.dim(i) < 1 || view.dim(i) > kMaxWidth) {
      return absl::InvalidArgumentError(StrCat(checkpoint.dir(), ": tensor ", name,
                                               " has an impossible size: ", view.DebugString()));
    }
  }
  return view;
}

// Sizes that only the shapes of the weights tell.
absl::Status ReadTowerShapes(const Checkpoint& checkpoint, VitSpec& spec) {
  const auto name = [&](std::string_view suffix) { return StrCat(spec.prefix, suffix); };
  ASSIGN_OR_RETURN(const TensorView patch,
                   TowerTensor(checkpoint, name("patch_embed.proj.weight"), 4));
  if (patch.dim(1) != 3 || patch.dim(2) != patch.dim(3)) {
    return absl::InvalidArgumentError(
        StrCat(checkpoint.dir(), ": tensor ", name("patch_embed.proj.weight"), " is ",
               patch.DebugString(), ", expected [width, 3, patch, patch]"));
  }
  spec.width = static_cast<uint32_t>(patch.dim(0));
  spec.patch_size = static_cast<uint32_t>(patch.dim(2));
  ASSIGN_OR_RETURN(const TensorView fc1,
                   TowerTensor(checkpoint, name("blocks.0.mlp.fc1.weight"), 2));
  spec.mlp = static_cast<uint32_t>(fc1.dim(0));
  for (const auto& [suffix, count] : {std::pair{"cls_token", &spec.class_tokens},
                                      std::pair{"reg_token", &spec.register_tokens}}) {
    if (!checkpoint.Has(name(suffix))) continue;
    ASSIGN_OR_RETURN(const TensorView tokens, TowerTensor(checkpoint, name(suffix), 3));
    *count = static_cast<uint32_t>(tokens.dim(1));
  }
  spec.layer_scale = checkpoint.Has(name("blocks.0.ls1.scale_factor"));
  const std::string blocks = name("blocks.");
  for (const std::string& tensor : checkpoint.names()) {
    if (!StartsWith(tensor, blocks)) continue;
    const std::optional<uint32_t> index =
        LeadingIndex(std::string_view(tensor).substr(blocks.size()));
    if (index.has_value() && *index < kMaxLayers) spec.depth = std::max(spec.depth, *index + 1);
  }
  return absl::OkStatus();
}

// tiny_timm_overrides[timm_id]: arguments that replaced timm's own for this checkpoint. The head
// count is the only one that no shape tells; the others must agree with the shapes.
absl::Status ApplyOverrides(const JsonView& overrides, VitSpec& spec) {
  if (!overrides.json().is_object()) return overrides.Error("expected an object");
  const std::array<std::pair<std::string_view, uint32_t>, 5> stated = {{
      {"embed_dim", spec.width},
      {"depth", spec.depth},
      {"img_size", spec.image_size},
      {"patch_size", spec.patch_size},
      {"reg_tokens", spec.register_tokens},
  }};
  for (const auto& item : overrides.json().items()) {
    const std::string& key = item.key();
    if (key == "num_heads") {
      ASSIGN_OR_RETURN(const int64_t heads, overrides.Int(key, 1, kMaxWidth));
      spec.heads = static_cast<uint32_t>(heads);
      continue;
    }
    if (key == "mlp_ratio") continue;  // the width is in fc1's shape
    const auto* known = std::find_if(stated.begin(), stated.end(),
                                     [&](const auto& entry) { return entry.first == key; });
    if (known == stated.end()) return Refuse(overrides, key, "this override is not supported");
    ASSIGN_OR_RETURN(const int64_t value, overrides.Int(key, 0, kMaxWidth));
    if (value != known->second) {
      return Refuse(overrides, key,
                    StrCat(value, " does not fit the weights of ", spec.prefix, ", which say ",
                           known->second));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<VitSpec> ReadTower(const Checkpoint& checkpoint, const JsonView& config,
                                  const std::string& timm_id, std::string_view prefix,
                                  uint32_t image_size) {
  VitSpec spec;
  spec.prefix = prefix;
  spec.tap = Contains(timm_id, "dino") ? "dino" : Contains(timm_id, "siglip") ? "siglip" : "vision";
  spec.image_size = image_size;
  RETURN_IF_ERROR(ReadTowerShapes(checkpoint, spec));
  const auto* known = std::find_if(kKnownTowers.begin(), kKnownTowers.end(),
                                   [&](const KnownTower& t) { return t.timm_id == timm_id; });
  if (known != kKnownTowers.end()) spec.heads = known->heads;
  bool depth_stated = false;
  if (config.Has("tiny_timm_overrides")) {
    ASSIGN_OR_RETURN(const JsonView all, config.Get("tiny_timm_overrides"));
    if (all.Has(timm_id)) {
      ASSIGN_OR_RETURN(const JsonView overrides, all.Get(timm_id));
      RETURN_IF_ERROR(ApplyOverrides(overrides, spec));
      depth_stated = overrides.Has("depth");
    }
  }
  const auto fail = [&](std::string_view message) {
    return absl::InvalidArgumentError(
        StrCat(checkpoint.dir(), ": ", prefix, " (", timm_id, "): ", message));
  };
  if (spec.heads == 0) {
    return config.Error(StrCat("timm_model_ids: \"", timm_id,
                               "\" is not a known tower, and tiny_timm_overrides gives no "
                               "num_heads for it"));
  }
  if (spec.width % spec.heads != 0) {
    return fail(StrCat("its ", spec.heads, " heads do not divide its width ", spec.width));
  }
  // A full-size tower with fewer blocks lost some: the second to last one would be another block.
  if (known != kKnownTowers.end() && !depth_stated && spec.width == known->width &&
      spec.depth != known->depth) {
    return fail(StrCat("has ", spec.depth, " blocks, expected ", known->depth));
  }
  if (spec.depth < 2) return fail("needs at least two blocks: the features come before the last");
  spec.blocks = spec.depth - 1;
  if (spec.class_tokens > 1) return fail("more than one class token");
  if (spec.image_size % spec.patch_size != 0) {
    return fail(StrCat("image size ", spec.image_size, " is no multiple of the patch size ",
                       spec.patch_size));
  }
  ASSIGN_OR_RETURN(const TensorView positions,
                   TowerTensor(checkpoint, StrCat(prefix, "pos_embed"), 3));
  if (positions.dim(1) != spec.patches()) {
    return fail(StrCat("pos_embed has ", positions.dim(1), " positions, but an image of ",
                       spec.image_size, " pixels has ", spec.patches(), " patches"));
  }
  return spec;
}

absl::Status ReadVision(const Checkpoint& checkpoint, const JsonView& config,
                        const Preprocessor& preprocessor, OpenVlaConfig& out) {
  ASSIGN_OR_RETURN(const KnownBackbone* backbone, Backbone(config));
  ASSIGN_OR_RETURN(const std::vector<std::string> ids, TimmIds(config, backbone));
  ASSIGN_OR_RETURN(out.fused_projector, config.Bool("use_fused_vision_backbone", ids.size() == 2));
  if (out.fused_projector != (ids.size() == 2)) {
    return config.Error(StrCat("use_fused_vision_backbone is ",
                               out.fused_projector ? "true" : "false", ", but there are ",
                               ids.size(), " timm_model_ids"));
  }
  ASSIGN_OR_RETURN(const std::string arch, config.String("arch_specifier", "no-align+gelu-mlp"));
  const std::string_view projector = std::string_view(arch).substr(arch.rfind('+') + 1);
  if (projector != "gelu-mlp" && projector != "fused-gelu-mlp") {
    return Refuse(config, "arch_specifier",
                  StrCat("unknown projector \"", projector, "\"; known: gelu-mlp, fused-gelu-mlp"));
  }
  if (config.Has("timm_override_act_layers")) {
    ASSIGN_OR_RETURN(const JsonView layers, config.Get("timm_override_act_layers"));
    ASSIGN_OR_RETURN(const size_t count, layers.ArraySize());
    for (size_t i = 0; i < count; ++i) {
      if (!layers.json()[i].is_null()) return layers.Error("only null is supported");
    }
  }
  if (preprocessor.width() != preprocessor.height()) {
    return absl::InvalidArgumentError(
        StrCat("preprocessor_config.json: the towers take square images, not ",
               preprocessor.width(), " x ", preprocessor.height()));
  }
  if (preprocessor.towers().size() != ids.size()) {
    return absl::InvalidArgumentError(StrCat("preprocessor_config.json: normalises for ",
                                             preprocessor.towers().size(),
                                             " towers, but config.json names ", ids.size()));
  }
  RETURN_IF_ERROR(CheckImages(config, preprocessor, backbone, ids.size()));
  constexpr std::array<std::string_view, 2> kPrefixes = {"vision_backbone.featurizer.",
                                                         "vision_backbone.fused_featurizer."};
  for (size_t i = 0; i < ids.size(); ++i) {
    ASSIGN_OR_RETURN(VitSpec tower,
                     ReadTower(checkpoint, config, ids[i], kPrefixes[i], preprocessor.width()));
    tower.pixels_tap = StrCat("pixel_values.", i);
    tower.mean = preprocessor.towers()[i].mean;
    tower.std = preprocessor.towers()[i].std;
    out.features += tower.width;
    out.towers.push_back(std::move(tower));
  }
  if (out.towers.size() == 2) {
    if (out.towers[0].patches() != out.towers[1].patches()) {
      return config.Error("timm_model_ids: the towers give different numbers of patches");
    }
    if (out.towers[0].tap == out.towers[1].tap) out.towers[1].tap += "2";
  }
  return absl::OkStatus();
}

// --- statistics ---

absl::StatusOr<OpenVlaStatistics> ReadStatistics(const JsonView& entry, const std::string& key) {
  ASSIGN_OR_RETURN(const JsonView action, entry.Get("action"));
  ASSIGN_OR_RETURN(StatisticsRange range, ReadStatisticsRange(action, "q01", "q99"));
  OpenVlaStatistics out;
  out.key = key;
  ASSIGN_OR_RETURN(out.action, Normalizer::Range(std::move(range.low), std::move(range.high),
                                                 std::move(range.mask), kOpenVlaNorm));
  return out;
}

// Tensors that an OpenVLA model of this configuration does not have, such as biases or extra norms:
// serving without them would not be exact.
std::vector<std::string> UnexpectedTensors(const Checkpoint& checkpoint,
                                           const OpenVlaConfig& config) {
  std::vector<std::string> expected;
  for (TensorSpec& spec : config.Tensors()) expected.push_back(std::move(spec.name));
  std::sort(expected.begin(), expected.end());
  // Parts of the published architecture that the features do not depend on.
  const auto unused = [&](std::string_view name) {
    for (const VitSpec& tower : config.towers) {
      if (!StartsWith(name, tower.prefix)) continue;
      const std::string_view part = name.substr(tower.prefix.size());
      if (StartsWith(part, "blocks.")) {
        const std::optional<uint32_t> index = LeadingIndex(part.substr(7));
        return index.has_value() && *index >= tower.blocks;
      }
      return StartsWith(part, "norm.") || StartsWith(part, "attn_pool.") ||
             StartsWith(part, "fc_norm.") || StartsWith(part, "head.");
    }
    if (!StartsWith(name, kLanguageModel)) return false;
    const std::string_view part = name.substr(kLanguageModel.size());
    // A tied head is the embedding table, whatever the file holds under its name; another head may
    // take its place.
    return Contains(part, ".rotary_emb.inv_freq") ||
           ((config.llama.tied_head() || config.llama.head.empty()) && part == "lm_head.weight");
  };
  std::vector<std::string> out;
  for (std::string& name : checkpoint.names()) {
    if (!std::binary_search(expected.begin(), expected.end(), name) && !unused(name)) {
      out.push_back(std::move(name));
    }
  }
  return out;
}

}  // namespace

std::vector<uint32_t> OpenVlaConfig::projector_widths() const {
  if (fused_projector) return {features, 4 * features, llama.hidden, llama.hidden};
  return {features, llama.hidden, llama.hidden};
}

std::vector<TensorSpec> OpenVlaConfig::Tensors() const {
  std::vector<TensorSpec> out;
  for (const VitSpec& tower : towers) {
    std::vector<TensorSpec> part = tower.Tensors();
    out.insert(out.end(), std::make_move_iterator(part.begin()),
               std::make_move_iterator(part.end()));
  }
  const std::vector<uint32_t> widths = projector_widths();
  for (size_t i = 0; i + 1 < widths.size(); ++i) {
    const std::string name = StrCat("projector.fc", i + 1);
    out.push_back({StrCat(name, ".weight"), {widths[i + 1], widths[i]}, TensorUse::kMatrix});
    out.push_back({StrCat(name, ".bias"), {widths[i + 1]}, TensorUse::kVector});
  }
  std::vector<TensorSpec> part = llama.Tensors();
  out.insert(out.end(), std::make_move_iterator(part.begin()), std::make_move_iterator(part.end()));
  return out;
}

namespace {

// Of the features and what the projector makes of them; the latter takes the place of a tower.
size_t FeatureBytes(const OpenVlaConfig& config, uint32_t frames, size_t tower_bytes,
                    DType compute) {
  const uint64_t rows = uint64_t{frames} * config.vision_tokens();
  size_t projector_bytes = 0;
  const std::vector<uint32_t> widths = config.projector_widths();
  for (size_t i = 1; i + 1 < widths.size(); ++i) {
    projector_bytes += ArenaBytes(rows, widths[i], compute);
  }
  return ArenaBytes(rows, config.features, compute) + std::max(tower_bytes, projector_bytes);
}

}  // namespace

size_t OpenVlaConfig::EncodeWorkspaceBytes(uint32_t frames, DType compute) const {
  size_t tower_bytes = 0;
  for (const VitSpec& tower : towers) {
    tower_bytes = std::max(tower_bytes, tower.WorkspaceBytes(frames, compute));
  }
  return FeatureBytes(*this, frames, tower_bytes, compute);
}

size_t OpenVlaConfig::ParkingBytes(uint32_t frames, uint32_t rows, uint32_t logit_rows,
                                   DType compute) const {
  size_t tower_bytes = 0;
  for (const VitSpec& tower : towers) {
    tower_bytes = std::max(tower_bytes, tower.ParkingBytes(frames));
  }
  return std::max(FeatureBytes(*this, frames, tower_bytes, compute),
                  llama.ParkingBytes(rows, logit_rows));
}

size_t OpenVlaConfig::WorkspaceBytes(uint32_t frames, uint32_t rows, uint32_t logit_rows,
                                     DType compute) const {
  return std::max(EncodeWorkspaceBytes(frames, compute),
                  llama.WorkspaceBytes(rows, logit_rows, compute));
}

bool IsOpenVlaFolder(const Checkpoint& checkpoint) {
  const Json& config = checkpoint.config();
  if (!config.is_object()) return false;
  const auto type = config.find("model_type");
  return type != config.end() && type->is_string() && *type == "openvla";
}

namespace {

// As generate() of the reference: generation_config.json, else LlamaConfig and its default.
absl::StatusOr<std::vector<int32_t>> ReadStopTokens(const Checkpoint& checkpoint,
                                                    const JsonView& text, uint32_t vocab) {
  constexpr std::string_view kKey = "eos_token_id";
  constexpr size_t kMost = 16;
  ASSIGN_OR_RETURN(const std::optional<Json> file,
                   checkpoint.OptionalJson("generation_config.json"));
  std::optional<JsonView> generation;
  if (file) generation.emplace(*file, "generation_config.json");
  const JsonView& source = generation && generation->Has(kKey) ? *generation : text;
  if (!source.Has(kKey)) return std::vector<int32_t>{2};
  ASSIGN_OR_RETURN(const JsonView value, source.Get(kKey));
  std::vector<int64_t> ids;
  if (value.json().is_array()) {
    ASSIGN_OR_RETURN(ids, value.AsInts(0, int64_t{vocab} - 1));
  } else {
    ASSIGN_OR_RETURN(const int64_t id, value.AsInt(0, int64_t{vocab} - 1));
    ids = {id};
  }
  if (ids.size() > kMost) return value.Error(StrCat("more than ", kMost, " ids"));
  return std::vector<int32_t>(ids.begin(), ids.end());
}

}  // namespace

absl::StatusOr<OpenVlaConfig> ReadOpenVlaSizes(const Checkpoint& checkpoint,
                                               const Preprocessor& preprocessor) {
  const JsonView config = checkpoint.config_view();
  OpenVlaConfig out;
  if (config.Has("quantization_config")) {
    return Refuse(config, "quantization_config", "quantised weights are not supported");
  }
  const Json no_text = Json::object();
  JsonView text(no_text, "config.json: text_config");
  if (config.Has("text_config")) {
    ASSIGN_OR_RETURN(text, config.Get("text_config"));
    if (!text.json().is_object()) return text.Error("expected an object");
  }
  ASSIGN_OR_RETURN(out.llama, ReadLlama(text));
  ASSIGN_OR_RETURN(out.stop_tokens, ReadStopTokens(checkpoint, text, out.llama.vocab));
  ASSIGN_OR_RETURN(const int64_t positions, text.Int("max_position_embeddings", 1, 1 << 24, 2048));
  ASSIGN_OR_RETURN(const int64_t length, config.Int("llm_max_length", 1, 1 << 24, positions));
  out.max_positions = static_cast<uint32_t>(std::min(positions, length));
  RETURN_IF_ERROR(ReadVision(checkpoint, config, preprocessor, out));

  ASSIGN_OR_RETURN(const int64_t padding, config.Int("pad_to_multiple_of", 0, out.llama.vocab, 64));
  out.bins.vocab = out.llama.vocab - static_cast<uint32_t>(padding);
  ASSIGN_OR_RETURN(const int64_t bins, config.Int("n_action_bins", 2, 1 << 20, 256));
  out.bins.ids = static_cast<uint32_t>(bins);
  if (out.bins.ids > out.bins.vocab) {
    return config.Error(StrCat("n_action_bins = ", bins, " does not fit into vocab_size ",
                               out.llama.vocab, " less pad_to_multiple_of ", padding));
  }
  ASSIGN_OR_RETURN(const std::string llm, config.String("llm_backbone_id", ""));
  out.vicuna_prompt = StartsWith(llm, "vicuna");
  return out;
}

absl::Status ForEachOpenVlaStatistics(
    const Checkpoint& checkpoint,
    const std::function<absl::Status(const std::string& key, const JsonView& set)>& read) {
  ASSIGN_OR_RETURN(const std::optional<Json> file,
                   checkpoint.OptionalJson("dataset_statistics.json"));
  const JsonView config = checkpoint.config_view();
  std::optional<JsonView> all;
  if (file.has_value()) {
    all.emplace(*file, "dataset_statistics.json");
  } else {
    if (!config.Has("norm_stats")) {
      return config.Error("norm_stats: missing, and there is no dataset_statistics.json");
    }
    ASSIGN_OR_RETURN(JsonView stats, config.Get("norm_stats"));
    all.emplace(std::move(stats));
  }
  if (!all->json().is_object() || all->json().empty()) {
    return all->Error("expected an object with at least one dataset");
  }
  for (const auto& item : all->json().items()) {  // nlohmann's objects are sorted by key
    ASSIGN_OR_RETURN(const JsonView entry, all->Get(item.key()));
    RETURN_IF_ERROR(read(item.key(), entry));
  }
  return absl::OkStatus();
}

absl::Status ReadOpenVlaStatistics(const Checkpoint& checkpoint, OpenVlaConfig& out) {
  RETURN_IF_ERROR(ForEachOpenVlaStatistics(
      checkpoint, [&](const std::string& key, const JsonView& set) -> absl::Status {
        ASSIGN_OR_RETURN(OpenVlaStatistics statistics, ReadStatistics(set, key));
        out.max_action_dim =
            std::max(out.max_action_dim, static_cast<uint32_t>(statistics.action.dim()));
        out.statistics.push_back(std::move(statistics));
        return absl::OkStatus();
      }));
  if (out.vision_tokens() + uint64_t{out.max_action_dim} + 2 > out.max_positions) {
    return checkpoint.config_view().Error(StrCat(
        "llm_max_length or max_position_embeddings: ", out.max_positions, " positions cannot hold ",
        out.vision_tokens(), " vision tokens, a prompt and ", out.max_action_dim, " actions"));
  }
  return absl::OkStatus();
}

absl::StatusOr<OpenVlaConfig> ReadOpenVlaConfig(const Checkpoint& checkpoint,
                                                const Preprocessor& preprocessor) {
  ASSIGN_OR_RETURN(OpenVlaConfig config, ReadOpenVlaSizes(checkpoint, preprocessor));
  RETURN_IF_ERROR(ReadOpenVlaStatistics(checkpoint, config));
  return config;
}

std::vector<std::string> TensorProblems(const Checkpoint& checkpoint, const OpenVlaConfig& config) {
  std::vector<std::string> problems = CheckTensors(checkpoint, config.Tensors());
  for (const std::string& name : UnexpectedTensors(checkpoint, config)) {
    problems.push_back(StrCat(name, ": not part of this architecture"));
  }
  return problems;
}

absl::Status RefuseTensors(const Checkpoint& checkpoint, const std::vector<std::string>& problems) {
  if (problems.empty()) return absl::OkStatus();
  constexpr size_t kShown = 5;
  const size_t shown = std::min(kShown, problems.size());
  return absl::InvalidArgumentError(
      StrCat(checkpoint.dir(), ": ", problems.size(), " tensors do not fit: ",
             absl::StrJoin(problems.begin(), problems.begin() + static_cast<int64_t>(shown), "; "),
             problems.size() > shown ? "; ..." : ""));
}

void AddOpenVlaIdentity(const Checkpoint& checkpoint, const OpenVlaConfig& config, DType compute,
                        DigestBuilder& digest) {
  // The first digest covers the weights and config.json.
  digest.Field(checkpoint.WeightsFingerprint()).Field(DTypeName(compute));
  for (const VitSpec& tower : config.towers) {
    for (const float value : tower.mean) digest.Field(uint64_t{std::bit_cast<uint32_t>(value)});
    for (const float value : tower.std) digest.Field(uint64_t{std::bit_cast<uint32_t>(value)});
  }
}

ModelSpec OpenVlaSpec(const Checkpoint& checkpoint, const OpenVlaConfig& config) {
  const DecoderSpec& llama = config.llama;
  ModelSpec spec;
  spec.family = "openvla";
  spec.cameras = {{"image", config.towers.front().image_size, config.towers.front().image_size}};
  for (const OpenVlaStatistics& s : config.statistics) {
    spec.statistics.push_back({s.key, static_cast<uint32_t>(s.action.dim())});
  }
  spec.kv.layers = llama.layers;
  spec.kv.kv_heads = llama.kv_heads;
  spec.kv.head_dim = llama.head_dim;
  for (const VitSpec& tower : config.towers) {
    const std::vector<LayerCost> part = tower.LayerCosts();
    spec.vision_layers.insert(spec.vision_layers.end(), part.begin(), part.end());
  }
  const std::vector<uint32_t> widths = config.projector_widths();
  for (size_t i = 1; i < widths.size(); ++i) {
    const uint64_t weights = uint64_t{widths[i - 1]} * widths[i];
    spec.vision_layers.push_back({weights, weights});
  }
  spec.trunk_layers = llama.LayerCosts();
  spec.hidden = llama.hidden;
  spec.vocab_size = llama.vocab;
  spec.max_positions = config.max_positions;
  spec.vision_tokens = config.vision_tokens();
  spec.max_action_tokens = config.max_action_dim;
  spec.stop_tokens = config.stop_tokens;
  for (const std::string& name : checkpoint.names()) {
    const absl::StatusOr<TensorView> tensor = checkpoint.Tensor(name);
    if (tensor.ok()) spec.parameters += static_cast<uint64_t>(tensor->numel());
  }
  return spec;
}

}  // namespace saccade
