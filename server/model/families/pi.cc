#include "model/families/pi.h"

#include <array>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/strings.h"
#include "model/families/lerobot_config.h"
#include "model/tokenizer.h"

namespace saccade {
namespace {

constexpr std::string_view kDims = "tiny_dims.json";

struct Variant {
  std::string_view name;
  uint32_t heads;
  uint32_t kv_heads;
};
constexpr std::array kVariants = {Variant{"gemma_2b", 8, 1}, Variant{"gemma_300m", 8, 1}};
constexpr uint32_t kVisionHeads = 16;  // of SigLIP So400m

struct Heads {
  uint32_t heads = 0;
  uint32_t kv_heads = 0;
};

absl::StatusOr<uint32_t> Count(const JsonView& from, std::string_view key) {
  ASSIGN_OR_RETURN(const int64_t value, from.Int(key, 1, 1024));
  return static_cast<uint32_t>(value);
}

// Of the decoder that `key` of config.json names the variant of, or `part` of the dims file.
absl::StatusOr<Heads> ReadHeads(const JsonView& config, std::string_view key,
                                std::string_view fallback, const std::optional<Json>& dims,
                                std::string_view part) {
  Heads out;
  if (dims) {
    const JsonView root(*dims, kDims);
    ASSIGN_OR_RETURN(const JsonView view, root.Get(part));
    ASSIGN_OR_RETURN(out.heads, Count(view, "num_heads"));
    ASSIGN_OR_RETURN(out.kv_heads, Count(view, "num_kv_heads"));
    if (out.heads % out.kv_heads != 0) return view.Error("num_kv_heads does not divide num_heads");
    return out;
  }
  ASSIGN_OR_RETURN(const std::string name, config.String(key, fallback));
  for (const Variant& variant : kVariants) {
    if (variant.name == name) return Heads{variant.heads, variant.kv_heads};
  }
  return config.Error(StrCat(key, ": \"", name, "\" is unknown; known: gemma_2b, gemma_300m"));
}

// What a Gemma decoder's tensors show.
struct DecoderSizes {
  uint32_t hidden, layers, rows, intermediate;
};
absl::StatusOr<DecoderSizes> ReadDecoder(const Checkpoint& checkpoint, const std::string& prefix,
                                         uint32_t heads) {
  ASSIGN_OR_RETURN(const std::vector<uint32_t> q,
                   SizesOf(checkpoint, prefix + "layers.0.self_attn.q_proj.weight", 2));
  ASSIGN_OR_RETURN(const std::vector<uint32_t> gate,
                   SizesOf(checkpoint, prefix + "layers.0.mlp.gate_proj.weight", 2));
  if (q[0] > kMaxWidth || gate[0] > kMaxWidth || q[1] % 2 != 0 || q[0] % (2 * heads) != 0) {
    return absl::InvalidArgumentError(StrCat(checkpoint.dir(), ": ", prefix, ": ", heads,
                                             " heads do not fit a projection of ", q[0], " rows"));
  }
  return DecoderSizes{q[1], CountBlocks(checkpoint, prefix + "layers."), q[0], gate[0]};
}

// Tower, projector and trunk; `prefix` is that of the tensor names.
absl::Status ReadPaliGemma(const Checkpoint& checkpoint, const std::optional<Json>& dims,
                           const std::string& prefix, PolicyConfig& out) {
  const JsonView config = checkpoint.config_view();
  const std::string pali = StrCat(prefix, "paligemma.model.");
  uint32_t vision_heads = kVisionHeads;
  if (dims) {
    const JsonView root(*dims, kDims);
    ASSIGN_OR_RETURN(const JsonView vision, root.Get("vision"));
    ASSIGN_OR_RETURN(vision_heads, Count(vision, "num_attention_heads"));
  }
  ASSIGN_OR_RETURN(const uint32_t image, ReadSquare(config, "image_resolution", 224));
  ASSIGN_OR_RETURN(out.tower, ReadSiglip(checkpoint, StrCat(pali, "vision_tower.vision_model."),
                                         image, vision_heads, /*any_size=*/false));
  out.pad_side = PadSide::kCentered;
  out.projector = StrCat(pali, "multi_modal_projector.linear");
  out.projector_bias = true;
  DecoderSpec& trunk = out.trunk;
  trunk.prefix = StrCat(pali, "language_model.");
  ASSIGN_OR_RETURN(const Heads heads,
                   ReadHeads(config, "paligemma_variant", "gemma_2b", dims, "text"));
  ASSIGN_OR_RETURN(const DecoderSizes text, ReadDecoder(checkpoint, trunk.prefix, heads.heads));
  // Published weights are tied, and some files hold the table under the head's name alone.
  trunk.table = trunk.prefix + "embed_tokens.weight";
  if (!checkpoint.Has(trunk.table)) trunk.table = StrCat(prefix, "paligemma.lm_head.weight");
  ASSIGN_OR_RETURN(const std::vector<uint32_t> table, SizesOf(checkpoint, trunk.table, 2));
  trunk.vocab = table[0];
  trunk.hidden = text.hidden;
  trunk.layers = text.layers;
  trunk.heads = heads.heads;
  trunk.kv_heads = heads.kv_heads;
  trunk.head_dim = text.rows / heads.heads;
  trunk.intermediate = text.intermediate;
  trunk.unit_norm = true;
  trunk.activation = Activation::kGeluTanh;
  trunk.embedding_scale = static_cast<float>(std::sqrt(static_cast<double>(trunk.hidden)));
  return absl::OkStatus();
}

// The action expert; `outer` is the outermost prefix of the tensor names.
absl::Status ReadExpert(const Checkpoint& checkpoint, const std::optional<Json>& dims,
                        const std::string& outer, bool five, PolicyConfig& out) {
  ExpertSpec& expert = out.expert.emplace();
  const DecoderSpec& trunk = out.trunk;
  expert.prefix = StrCat(outer, "paligemma_with_expert.gemma_expert.model.");
  ASSIGN_OR_RETURN(const Heads heads, ReadHeads(checkpoint.config_view(), "action_expert_variant",
                                                "gemma_300m", dims, "expert"));
  ASSIGN_OR_RETURN(const DecoderSizes sizes, ReadDecoder(checkpoint, expert.prefix, heads.heads));
  expert.ends = outer;
  // Files of openpi's converter may have the name that the other of the two goes by.
  expert.time_mlp = outer + "time_mlp";
  if (checkpoint.Has(outer + "action_time_mlp_in.weight")) {
    expert.time_mlp = outer + "action_time_mlp";
  }
  expert.horizon = out.horizon;
  expert.action_width = out.action_width;
  expert.hidden = sizes.hidden;
  expert.layers = sizes.layers;
  expert.heads = heads.heads;
  expert.kv_heads = heads.kv_heads;
  expert.head_dim = sizes.rows / heads.heads;
  expert.intermediate = sizes.intermediate;
  expert.unit_norm = true;
  expert.adaptive = five;
  expert.activation = Activation::kGeluTanh;
  expert.cross.assign(expert.layers, -1);
  if (expert.layers != trunk.layers || expert.heads != trunk.heads ||
      expert.kv_heads != trunk.kv_heads || expert.head_dim != trunk.head_dim) {
    return absl::InvalidArgumentError(
        StrCat(checkpoint.dir(), ": the expert's layers and heads are not those of PaliGemma"));
  }
  return absl::OkStatus();
}

// The size of a tokenizer's model, as transformers counts it: without tokens that were added
// behind.
absl::StatusOr<uint32_t> ModelVocabulary(const std::string& dir) {
  const std::string path = dir + "/tokenizer.json";
  const absl::StatusOr<Json> file = ReadJsonFile(path);
  if (!file.ok()) {
    if (!absl::IsNotFound(file.status())) return file.status();
    ASSIGN_OR_RETURN(const std::unique_ptr<const Tokenizer> tokenizer, Tokenizer::Load(dir));
    return static_cast<uint32_t>(tokenizer->vocab_size());
  }
  const JsonView root(*file, "tokenizer.json");
  ASSIGN_OR_RETURN(const JsonView model, root.Get("model"));
  ASSIGN_OR_RETURN(const JsonView vocab, model.Get("vocab"));
  if (!vocab.json().is_object()) return vocab.Error("expected an object");
  return static_cast<uint32_t>(vocab.json().size());
}

absl::Status ReadFast(const Checkpoint& checkpoint, const std::string& prefix, PolicyConfig& out) {
  const JsonView config = checkpoint.config_view();
  out.trunk.head = StrCat(prefix, "paligemma.lm_head.weight");
  if (!checkpoint.Has(out.trunk.head)) out.trunk.head = out.trunk.table;
  out.prompt = PromptStyle::kTaskAndState;
  out.second_bos = true;
  out.state_width = out.state_dim();
  for (const PolicyAdapters& adapters : out.adapters) {
    if (!adapters.relative.empty()) {
      return absl::UnimplementedError(
          "policy_preprocessor.json: relative actions are not supported with FAST tokens");
    }
  }
  FastSpec& fast = out.fast.emplace();
  ASSIGN_OR_RETURN(const std::string name, config.String("action_tokenizer_name", ""));
  ASSIGN_OR_RETURN(fast.dir, FindTokenizer(checkpoint, name, "fast_tokenizer"));
  ASSIGN_OR_RETURN(fast.vocabulary, ModelVocabulary(out.tokenizer_dir));
  ASSIGN_OR_RETURN(const int64_t skipped, config.Int("fast_skip_tokens", 0, 1 << 20, 128));
  fast.skipped = static_cast<uint32_t>(skipped);
  ASSIGN_OR_RETURN(const int64_t tokens, config.Int("max_decoding_steps", 1, 1 << 16, 256));
  fast.max_tokens = static_cast<uint32_t>(tokens);
  return absl::OkStatus();
}

}  // namespace

bool IsPi0Fast(const Checkpoint& checkpoint, const ModelOptions& /*options*/) {
  return IsLerobotPolicy(checkpoint, "pi0_fast");
}
bool IsPi0(const Checkpoint& checkpoint, const ModelOptions& /*options*/) {
  return IsLerobotPolicy(checkpoint, "pi0");
}
bool IsPi05(const Checkpoint& checkpoint, const ModelOptions& /*options*/) {
  return IsLerobotPolicy(checkpoint, "pi05");
}

absl::StatusOr<PolicyConfig> ReadPi(const Checkpoint& checkpoint) {
  const bool five = IsPi05(checkpoint);
  const bool fast = IsPi0Fast(checkpoint);
  const JsonView config = checkpoint.config_view();
  PolicyConfig out;
  out.family = fast ? "pi0_fast" : five ? "pi05" : "pi0";
  RETURN_IF_ERROR(
      ReadLerobotPolicy(checkpoint, {"num_inference_steps", five || fast ? 200 : 48}, out));
  if (out.aloha != AlohaStage::kNever) {
    // No release of these layouts has it.
    return absl::UnimplementedError("config.json: adapt_to_pi_aloha is not supported");
  }
  ASSIGN_OR_RETURN(std::string name, TokenizerName(checkpoint));
  ASSIGN_OR_RETURN(name, config.String("text_tokenizer_name", name));
  ASSIGN_OR_RETURN(out.tokenizer_dir, FindTokenizer(checkpoint, name, "tokenizer"));
  ASSIGN_OR_RETURN(const std::optional<Json> dims, checkpoint.OptionalJson(kDims));
  // Files of openpi's converter lack the outermost prefix.
  const bool bare = checkpoint.Has("paligemma_with_expert.paligemma.lm_head.weight");
  const std::string outer = bare ? "" : "model.";
  RETURN_IF_ERROR(ReadPaliGemma(checkpoint, dims, StrCat(outer, "paligemma_with_expert."), out));
  if (fast) {
    RETURN_IF_ERROR(ReadFast(checkpoint, StrCat(outer, "paligemma_with_expert."), out));
    return out;
  }
  RETURN_IF_ERROR(ReadExpert(checkpoint, dims, outer, five, out));
  if (five) {
    // The state is words of the prompt.
    out.prompt = PromptStyle::kTaskAndState;
    out.prompt_end = "Action: ";
    out.state_width = out.state_dim();
    out.mask = SuffixMask::kBidirectional;
  } else {
    out.expert->state_width = out.state_width;
    out.mask = SuffixMask::kStateFirst;
  }
  return out;
}

absl::StatusOr<std::unique_ptr<Model>> LoadPi(const Checkpoint& checkpoint, Backend& backend,
                                              const ModelOptions& options) {
  ASSIGN_OR_RETURN(PolicyConfig config, ReadPi(checkpoint));
  return LoadLerobotPolicy(checkpoint, backend, options, std::move(config));
}

}  // namespace saccade
