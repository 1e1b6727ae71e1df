#include "model/families/lerobot_config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <utility>

#include "base/strings.h"

namespace saccade {
namespace {

constexpr std::string_view kImages = "observation.images.";
constexpr std::string_view kPlaceholder = "empty_camera_";
constexpr std::string_view kPreprocessor = "policy_preprocessor.json";
constexpr size_t kMaxCameras = 16;
constexpr size_t kMaxCameraName = 200;  // bytes: errors list the names
constexpr uint32_t kMostSpread = 16;    // patches per position: a config makes no memory of nothing

bool StartsWith(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

// Names of the VISUAL features in the order of the file, which is that of the prompt: `Json` sorts.
absl::StatusOr<std::vector<CameraSpec>> ReadCameras(const Checkpoint& checkpoint) {
  const JsonView config = checkpoint.config_view();
  ASSIGN_OR_RETURN(const JsonView features, config.Get("input_features"));
  if (!features.json().is_object()) return features.Error("expected an object");
  ASSIGN_OR_RETURN(const std::string text,
                   ReadFile(StrCat(checkpoint.dir(), "/config.json"), JsonLimits{}.max_bytes));
  // The same bytes were parsed, and so bounded, before.
  const auto ordered = nlohmann::ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!ordered.is_object() || !ordered.contains("input_features")) {
    return features.Error("changed while it was read");
  }
  std::vector<CameraSpec> out;
  for (const auto& item : ordered["input_features"].items()) {
    ASSIGN_OR_RETURN(const JsonView entry, features.Get(item.key()));
    ASSIGN_OR_RETURN(const std::string type, entry.String("type"));
    if (type != "VISUAL") continue;
    std::string_view name = item.key();
    if (StartsWith(name, kImages)) name.remove_prefix(kImages.size());
    // No camera: the policy itself fills its place.
    if (StartsWith(name, kPlaceholder)) continue;
    if (name.empty()) return entry.Error("a camera without a name");
    if (name.size() > kMaxCameraName) {
      return features.Error(StrCat("a camera's name has ", name.size(), " bytes, at most ",
                                   kMaxCameraName, " are supported"));
    }
    if (std::any_of(out.begin(), out.end(), [&](const CameraSpec& c) { return c.name == name; })) {
      return features.Error(
          StrCat("two cameras \"", name, "\": with and without \"", kImages, "\""));
    }
    CameraSpec camera;
    camera.name = std::string(name);
    camera.dtype = DType::kF32;
    out.push_back(std::move(camera));
  }
  if (out.empty()) return features.Error("there is no feature of type VISUAL");
  if (out.size() > kMaxCameras) {
    return features.Error(StrCat(out.size(), " cameras, at most ", kMaxCameras, " are supported"));
  }
  return out;
}

// adapt_to_pi_aloha. Releases with processor files turn what these have normalised.
absl::Status ReadAloha(const Checkpoint& checkpoint, PolicyConfig& out) {
  const JsonView config = checkpoint.config_view();
  ASSIGN_OR_RETURN(const bool deltas, config.Bool("use_delta_joint_actions_aloha", false));
  if (deltas) {
    return absl::UnimplementedError(
        "config.json: use_delta_joint_actions_aloha is not supported, by lerobot neither");
  }
  ASSIGN_OR_RETURN(const bool aloha, config.Bool("adapt_to_pi_aloha", false));
  if (!aloha) return absl::OkStatus();
  for (const PolicyAdapters& adapters : out.adapters) {
    if (adapters.state.dim() < kAlohaDim || adapters.action.dim() < kAlohaDim) {
      return config.Error(StrCat("adapt_to_pi_aloha: a state of ", adapters.state.dim(),
                                 " and actions of ", adapters.action.dim(),
                                 " dimensions are not ALOHA's ", kAlohaDim));
    }
  }
  ASSIGN_OR_RETURN(const std::optional<Json> file, checkpoint.OptionalJson(kPreprocessor));
  out.aloha = file ? AlohaStage::kNormalised : AlohaStage::kRobot;
  return absl::OkStatus();
}

}  // namespace

bool IsLerobotPolicy(const Checkpoint& checkpoint, std::string_view type) {
  const Json& config = checkpoint.config();
  if (!config.is_object()) return false;
  const auto found = config.find("type");
  return found != config.end() && found->is_string() && *found == type;
}

absl::Status ReadLerobotPolicy(const Checkpoint& checkpoint, const LerobotDefaults& defaults,
                               PolicyConfig& out) {
  const JsonView config = checkpoint.config_view();
  ASSIGN_OR_RETURN(out.cameras, ReadCameras(checkpoint));
  ASSIGN_OR_RETURN(out.adapters, ReadPolicyAdapters(checkpoint));
  const auto read = [&](std::string_view key, int64_t least, int64_t most, int64_t fallback,
                        uint32_t& to) -> absl::Status {
    ASSIGN_OR_RETURN(const int64_t value, config.Int(key, least, most, fallback));
    to = static_cast<uint32_t>(value);
    return absl::OkStatus();
  };
  uint32_t observations = 0;
  RETURN_IF_ERROR(read("n_obs_steps", 1, 1, 1, observations));
  RETURN_IF_ERROR(
      read("empty_cameras", 0, static_cast<int64_t>(kMaxCameras), 0, out.empty_cameras));
  RETURN_IF_ERROR(read("chunk_size", 1, 4096, 50, out.horizon));
  RETURN_IF_ERROR(read("n_action_steps", 1, out.horizon, out.horizon, out.served_actions));
  RETURN_IF_ERROR(read("max_action_dim", 1, 4096, 32, out.action_width));
  RETURN_IF_ERROR(read("max_state_dim", 1, 4096, 32, out.state_width));
  RETURN_IF_ERROR(read(defaults.steps_key, 1, 1000, 10, out.steps));
  RETURN_IF_ERROR(read("tokenizer_max_length", 1, 1 << 16, defaults.max_text, out.max_text));
  ASSIGN_OR_RETURN(out.min_period, config.Double("min_period", 4e-3));
  ASSIGN_OR_RETURN(out.max_period, config.Double("max_period", 4.0));
  if (!(out.min_period > 0 && out.max_period >= out.min_period)) {
    return config.Error("min_period and max_period must be positive and in that order");
  }
  for (const PolicyAdapters& adapters : out.adapters) {
    if (adapters.state.dim() == 0 || adapters.state.dim() > out.state_width) {
      return config.Error(StrCat("the state has ", adapters.state.dim(),
                                 " dimensions, expected 1 to max_state_dim ", out.state_width));
    }
    if (adapters.action.dim() > out.action_width) {
      return config.Error(StrCat("an action has ", adapters.action.dim(),
                                 " dimensions, max_action_dim is ", out.action_width));
    }
  }
  ASSIGN_OR_RETURN(const JsonView mapping, config.Get("normalization_mapping"));
  ASSIGN_OR_RETURN(const std::string visual, mapping.String("VISUAL", "IDENTITY"));
  if (visual != "IDENTITY") {
    return absl::UnimplementedError(
        StrCat("config.json: normalization_mapping.VISUAL: \"", visual, "\" is not supported"));
  }
  return ReadAloha(checkpoint, out);
}

absl::StatusOr<uint32_t> ReadSquare(const JsonView& config, std::string_view key,
                                    int64_t fallback) {
  if (!config.Has(key)) return static_cast<uint32_t>(fallback);
  ASSIGN_OR_RETURN(const JsonView value, config.Get(key));
  ASSIGN_OR_RETURN(const std::vector<int64_t> sides, value.AsInts(1, 8192));
  if (sides.size() != 2 || sides[0] != sides[1]) return value.Error("expected two equal sides");
  return static_cast<uint32_t>(sides[0]);
}

absl::StatusOr<std::string> FindTokenizer(const Checkpoint& checkpoint, std::string_view name,
                                          std::string_view fallback) {
  const auto has = [&](const std::string& dir) {
    std::error_code error;
    return std::filesystem::exists(dir + "/tokenizer.json", error) ||
           std::filesystem::exists(dir + "/tokenizer.model", error);
  };
  const bool plain = !name.empty() && name.front() != '.' &&
                     name.find('/') == std::string_view::npos &&
                     name.find('\0') == std::string_view::npos;
  for (const std::string_view folder : {plain ? name : fallback, fallback}) {
    std::string dir = StrCat(checkpoint.dir(), "/", folder);
    if (has(dir)) return dir;
  }
  if (has(checkpoint.dir())) return checkpoint.dir();
  return absl::NotFoundError(StrCat(checkpoint.dir(),
                                    ": no tokenizer.json or tokenizer.model in \"", fallback,
                                    "\"; put the files of \"", name, "\" there"));
}

absl::StatusOr<std::string> TokenizerName(const Checkpoint& checkpoint) {
  ASSIGN_OR_RETURN(const std::optional<Json> file, checkpoint.OptionalJson(kPreprocessor));
  if (!file) return std::string();
  const JsonView root(*file, kPreprocessor);
  ASSIGN_OR_RETURN(const JsonView steps, root.Get("steps"));
  ASSIGN_OR_RETURN(const size_t count, steps.ArraySize());
  for (size_t i = 0; i < count; ++i) {
    ASSIGN_OR_RETURN(const JsonView step, steps.At(i));
    ASSIGN_OR_RETURN(const std::string kind, step.String("registry_name", ""));
    if (kind != "tokenizer_processor") continue;
    ASSIGN_OR_RETURN(const JsonView settings, step.Get("config"));
    return settings.String("tokenizer_name", "");
  }
  return std::string();
}

uint32_t CountBlocks(const Checkpoint& checkpoint, std::string_view prefix) {
  uint32_t count = 0;
  const std::vector<std::string> names = checkpoint.names();  // sorted
  for (; count < kMaxLayers; ++count) {
    const std::string block = StrCat(prefix, count, ".");
    const auto found = std::lower_bound(names.begin(), names.end(), block);
    if (found == names.end() || !StartsWith(*found, block)) break;
  }
  return count;
}

absl::StatusOr<std::vector<uint32_t>> SizesOf(const Checkpoint& checkpoint, std::string_view name,
                                              size_t rank) {
  if (!checkpoint.Has(name)) {
    return absl::InvalidArgumentError(StrCat(checkpoint.dir(), ": ", name, " is absent"));
  }
  ASSIGN_OR_RETURN(const TensorView view, checkpoint.Tensor(name));
  std::vector<uint32_t> out;
  for (size_t d = 0; d < view.rank; ++d) {
    const int64_t size = view.dims[d];
    if (size < 1 || size > (d == 0 ? int64_t{1} << 24 : kMaxWidth)) break;
    out.push_back(static_cast<uint32_t>(size));
  }
  if (view.rank == rank && out.size() == rank) return out;
  return absl::InvalidArgumentError(StrCat(checkpoint.dir(), ": ", name, " is ", view.DebugString(),
                                           ", expected ", rank, " dimensions of a sensible size"));
}

absl::StatusOr<VitSpec> ReadSiglip(const Checkpoint& checkpoint, std::string_view prefix,
                                   uint32_t image_size, uint32_t heads, bool any_size) {
  VitSpec spec;
  spec.names = VitNames::kSiglip;
  spec.prefix = std::string(prefix);
  spec.tap = "vision.siglip";
  spec.pixels_tap = "pixel_values";
  spec.image_size = image_size;
  spec.heads = heads;
  spec.final_norm = true;
  spec.activation = Activation::kGeluTanh;
  spec.std = {1.0F, 1.0F, 1.0F};
  ASSIGN_OR_RETURN(const std::vector<uint32_t> patch,
                   SizesOf(checkpoint, StrCat(prefix, "embeddings.patch_embedding.weight"), 4));
  ASSIGN_OR_RETURN(const std::vector<uint32_t> positions,
                   SizesOf(checkpoint, StrCat(prefix, "embeddings.position_embedding.weight"), 2));
  ASSIGN_OR_RETURN(const std::vector<uint32_t> mlp,
                   SizesOf(checkpoint, StrCat(prefix, "encoder.layers.0.mlp.fc1.weight"), 2));
  spec.width = patch[0];
  spec.patch_size = patch[3];
  spec.mlp = mlp[0];
  spec.depth = CountBlocks(checkpoint, StrCat(prefix, "encoder.layers."));
  spec.blocks = spec.depth;
  const auto fail = [&](std::string_view message) {
    return absl::InvalidArgumentError(StrCat(checkpoint.dir(), ": ", prefix, ": ", message));
  };
  if (spec.width > kMaxWidth || spec.mlp > kMaxWidth) return fail("too wide");
  if (heads == 0 || spec.width % heads != 0) {
    return fail(StrCat(heads, " heads do not divide a width of ", spec.width));
  }
  const auto side = static_cast<uint32_t>(std::lround(std::sqrt(positions[0])));
  const bool fits = spec.patches() == positions[0];
  const bool spreads =
      any_size && side * side == positions[0] && spec.patches() / kMostSpread <= positions[0];
  if (image_size % spec.patch_size != 0 || (!fits && !spreads)) {
    return fail(StrCat("frames of ", image_size, " pixels in patches of ", spec.patch_size,
                       " do not fit ", positions[0], " positions"));
  }
  if (fits) return spec;
  // Each patch has the position of where it is in a frame of the table's size.
  spec.position_rows = positions[0];
  const uint32_t patches = image_size / spec.patch_size;
  for (uint32_t i = 0; i < spec.patches(); ++i) {
    const uint32_t row = i / patches * side / patches;
    const uint32_t column = i % patches * side / patches;
    spec.positions.push_back(row * side + column);
  }
  return spec;
}

}  // namespace saccade
